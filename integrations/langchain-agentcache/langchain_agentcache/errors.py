"""agentcache's errors under LangChain's names, so that both `except` clauses work. Knows nothing of how they come about.

ContextOverflowError        the prompt does not fit; SummarizationMiddleware shortens what it summarises, and tries again
ModelInvalidRequestError    messages, tools or settings that cannot work
ModelNotFoundError          there is no such model
ModelTimeoutError           `timeout` has passed; may be tried again
ModelFailedError            the request failed while it ran
ModelUnusableError          the model is there and cannot be used
OutputCutError              max_tokens, or a stop string, ended an object or a call before it was whole
EngineClosedError           the engine that was given is closed
ModelConnectionError        no server answers at `base_url`; may be tried again
ModelPermissionDeniedError  a rule of the engine's policy, or of the server's, refuses it
StoreUnusableError          `cache_dir` cannot be opened, or not be trusted
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from langchain_core import exceptions as theirs

from agentcache import errors as own

__all__ = [
    "ContextOverflowError",
    "EngineClosedError",
    "ModelConnectionError",
    "ModelFailedError",
    "ModelInvalidRequestError",
    "ModelNotFoundError",
    "ModelPermissionDeniedError",
    "ModelTimeoutError",
    "ModelUnusableError",
    "StoreUnusableError",
    "translated",
]


class ContextOverflowError(theirs.ContextOverflowError, own.ContextOverflowError):
    """The prompt is longer than the model's context; raised before anything is computed."""


class ModelInvalidRequestError(theirs.ModelInvalidRequestError, own.PromptError, own.ConfigError):
    """Messages, tools or settings cannot work."""


class ModelNotFoundError(theirs.ModelNotFoundError, own.ModelLoadError):
    """The model's path or id cannot be loaded."""


class ModelTimeoutError(theirs.ModelTimeoutError, own.GenerationError):
    """The time given with `timeout` has passed; what was computed stays reusable."""


class ModelFailedError(theirs.ModelError, own.GenerationError):
    """The request failed while it ran."""


class ModelUnusableError(theirs.ModelError, own.ModelError):
    """The weights lie on several devices, or the model is none that writes text."""


class OutputCutError(theirs.OutputParserException, own.GenerationError):
    """An object or a call was not whole when the completion ended; `llm_output` is what there is of it."""

    def __init__(self, finish_reason: str | None, tokens: int, text: str) -> None:
        no_room = f"it had no room after {tokens} tokens: raise max_tokens"
        why = no_room if finish_reason == "length" else "a stop string, or the model, ended it"
        said = f"the answer is not whole, {why}; there is {text!r:.200}"
        theirs.OutputParserException.__init__(self, said, llm_output=text)


class EngineClosedError(theirs.ModelError, own.EngineClosedError):
    """The engine that was given with `engine=` was closed."""


class ModelConnectionError(theirs.ModelConnectionError, EngineClosedError):
    """No server answers at `base_url`."""


class ModelPermissionDeniedError(theirs.ModelPermissionDeniedError, own.PolicyError):
    """A rule of the engine's policy, or of the server's, refuses it."""


class StoreUnusableError(theirs.ModelError, own.StoreError):
    """The folder of `cache_dir` cannot be opened, or belongs to another user; `__cause__` says which of agentcache's errors it is."""


@contextmanager
def translated() -> Iterator[None]:
    """agentcache's errors raised inside leave as ours."""
    try:
        yield
    except (theirs.ModelError, OutputCutError):
        raise
    except own.ContextOverflowError as error:
        setting = f"num_ctx={error.context_tokens}" if error.setting else ""
        raise ContextOverflowError(error.prompt_tokens, error.context_tokens, error.max_tokens, setting) from error
    except (own.PromptError, own.ConfigError) as error:
        raise ModelInvalidRequestError(str(error)) from error
    except own.ModelLoadError as error:
        raise ModelNotFoundError(str(error)) from error
    except own.GenerationError as error:
        raise ModelFailedError(str(error)) from error
    except own.ModelError as error:
        raise ModelUnusableError(str(error)) from error
    except own.PolicyError as error:
        raise ModelPermissionDeniedError(str(error)) from error
    except own.EngineClosedError as error:
        of_network = type(error.__cause__).__module__.partition(".")[0] == "httpx"
        raise (ModelConnectionError if of_network else EngineClosedError)(str(error)) from error
    except own.StoreError as error:
        raise StoreUnusableError(str(error)) from error
