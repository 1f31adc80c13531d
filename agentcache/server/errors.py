"""Errors of the server as its clients read them: a status, and a body {"error": {message, type, param, code}}, or Anthropic's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fastapi import HTTPException
from pydantic import BaseModel

from .. import errors
from ..errors import AgentCacheError, ContextOverflowError

INVALID = "invalid_request_error"
NO_THREADS = "thread_unsupported_request"  # by this code the tool runner of Anthropic's SDK asks again with the whole conversation
_STATUS: tuple[tuple[type[AgentCacheError], int, str, str | None], ...] = (
    (ContextOverflowError, 400, INVALID, "context_length_exceeded"),
    (errors.PromptError, 400, INVALID, None),
    (errors.ConfigError, 400, INVALID, None),
    (errors.PolicyError, 403, INVALID, "quota"),
    (errors.OutOfMemoryError, 503, "server_error", "out_of_memory"),
    (errors.EngineClosedError, 503, "server_error", "model_unloaded"),
    (errors.WeightsChangedError, 503, "server_error", "weights_changed"),
    (errors.StoreBusyError, 503, "server_error", "store_busy"),
    (errors.StoreFullError, 507, "server_error", "store_full"),
)
_SAID = {
    400: "The body is no JSON, or a parameter cannot be honoured",
    401: "No API key, or an unknown one",
    403: "Not with this key, or not from this host",
    404: "There is none of that name",
    413: "The body is too large",
    429: "Too many requests or tool groups; Retry-After says when to ask again",
    503: "Not now: the model cannot be loaded, or the server ends",
    504: "The answer took too long",
    507: "The store is full",
}
_ANTHROPIC = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


class Cause(BaseModel):
    """An error as OpenAI's clients read it."""

    message: str
    type: str
    param: str | None
    code: str | None


class Problem(BaseModel):
    """The body of a request that is refused."""

    error: Cause


class AnthropicCause(BaseModel):
    """An error as Anthropic's clients read it."""

    type: str
    message: str


class AnthropicProblem(BaseModel):
    """The body of a message that is refused."""

    type: str
    error: AnthropicCause


def problems(body: type[BaseModel]) -> dict[int | str, dict[str, Any]]:
    """Statuses of refused requests, with their body, for the schema."""
    return {status: {"model": body, "description": said} for status, said in _SAID.items()}


class ServerError(HTTPException):
    """A request that is refused, or that failed."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = INVALID,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(status, message, dict(headers or {}))
        self.body: dict[str, Any] = {"error": {"message": message, "type": kind, "param": param, "code": code}}

    @classmethod
    def of(cls, error: AgentCacheError) -> ServerError:
        """An engine's error, with the status that tells whether asking again may help, and with its class for agentcache's own client."""
        found = next((row[1:] for row in _STATUS if isinstance(error, row[0])), (500, "server_error", type(error).__name__))
        status, name, code = found
        said, args = str(error), list[int | str]([str(error)])
        if isinstance(error, ContextOverflowError):  # in OpenAI's words, by which litellm and others know it
            args = [error.prompt_tokens, error.context_tokens, error.max_tokens, error.setting]
            said = f"This model's maximum context length is {error.context_tokens} tokens: {said}"
        made = cls(status, said, kind=name, code=code, headers={"Retry-After": "1"} if status == 503 else None)
        made.body["x_agentcache"] = {"error": type(error).__name__, "args": args}
        return made

    @property
    def anthropic(self) -> dict[str, Any]:
        """The body in Anthropic's shape. Its clients read words and numbers of a prompt without room, and shorten the conversation."""
        said, code = self.body["error"]["message"], self.body["error"]["code"]
        if code == "context_length_exceeded":
            prompt, context, *_ = self.body["x_agentcache"]["args"]
            said = f"prompt is too long: {prompt} tokens > {context} maximum: {said}"
        told = {"type": _ANTHROPIC.get(self.status_code, INVALID if self.status_code < 500 else "api_error"), "message": said}
        details = {"details": {"error_code": code, "unsupported": ["thread"]}} if code == NO_THREADS else {}
        return {"type": "error", "error": {**told, **details}}


def refused(param: str, value: object, rule: str) -> ServerError:
    """The error of a parameter that cannot be honoured."""
    return ServerError(400, f"{param}={value!r:.200}: {rule}", param=param, code="unsupported_value")
