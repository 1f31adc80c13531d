"""Bodies of requests as clients send them. A parameter that is not here, or that cannot be honoured, is refused by name."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from ..types import Constraint, Sampling
from .errors import refused

MOST_IDS = 1 << 20  # of a list: more hold up other answers for a second while they are read
Text = Annotated[str, Field(max_length=64 << 20)]
# lists tell of the first wrong element: an error for each takes 300 times the memory of a body's shortest ones
# and a body's shortest objects are a million, which stop all answers for seconds: Anthropic's API takes as many messages
Objects = Annotated[list[dict[str, Any]], Field(fail_fast=True, max_length=100_000)]
Texts = Annotated[list[str], Field(fail_fast=True)]
Ids = Annotated[list[Annotated[int, Field(ge=0, lt=1 << 31)]], Field(fail_fast=True, max_length=MOST_IDS)]
Messages = Annotated[Objects, Field(examples=[[{"role": "user", "content": "When is high water?"}]])]
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
Most = Annotated[int | None, Field(ge=1)]  # tokens of an answer
TOKENS = 1 << 31  # of an answer that names no bound: as many as the context has room for, as OpenAI's and vLLM's servers have it
NEUTRAL: dict[str, tuple[Any, ...]] = {  # parameters that are taken in these values only
    "n": (1,),
    "best_of": (1,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "logit_bias": ({},),
    "modalities": (["text"],),
    "service_tier": ("auto", "default", "standard_only"),
    "speed": ("standard",),
    "truncation": ("disabled",),
    "background": (False,),
    "verbosity": ("medium",),
}


class Strict(BaseModel):
    """Values of a body: unknown parameters are refused."""

    model_config = ConfigDict(extra="forbid")

    @model_validator(mode="before")
    @classmethod
    def _first_unknown(cls, said: Any) -> Any:
        """Leave one of many unknown parameters, for the same reason as in lists."""
        known = cls.model_fields.keys()
        first = next((name for name in said if name not in known), None) if isinstance(said, dict) else None
        return said if first is None else {name: value for name, value in said.items() if name in known or name == first}


class Body(Strict):
    """A body. Labels have no effect on the answer, and say so by being here."""

    @model_validator(mode="before")
    @classmethod
    def _told(cls, said: Any) -> Any:
        """Refuse numbers that JSON has not, which Python reads; a parameter that is null asks for nothing."""
        if not isinstance(said, dict):
            return said
        try:
            json.dumps([[[[said]]]], allow_nan=False)  # an event holds it that much deeper
        except RecursionError as error:
            raise ValueError("is nested too deeply") from error
        except ValueError as error:
            raise ValueError("holds NaN or Infinity, or a number that is too large, which is no JSON") from error
        return {name: value for name, value in said.items() if value is not None}

    model: str | None = None
    # labels
    user: str | None = None
    metadata: dict[str, Any] | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    # values that change nothing
    service_tier: str | None = None
    # sampling
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    ignore_eos: bool | None = None
    stream: bool | None = False
    # agentcache's own
    volatile: Texts | None = None
    reuse: Literal["off", "exact"] | None = None

    def check_neutral(self) -> None:
        """Refuse parameters in values that would change the answer, and cannot."""
        for name, values in NEUTRAL.items():
            value = getattr(self, name, None)
            if value is not None and value not in values:
                raise refused(name, value, f"only {' or '.join(map(repr, values))} can be honoured")

    def sampling(self, max_tokens: int | None, stop: str | list[str] | None, logprobs: int | None) -> Sampling:
        """Settings of decoding. ConfigError names the one that cannot be."""
        named = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "seed", "ignore_eos")
        given = {name: value for name in named if (value := getattr(self, name)) is not None}
        if "seed" in given:
            given["seed"] %= 1 << 64  # OpenAI's may be negative
        stops = (stop,) if isinstance(stop, str) else tuple(stop or ())
        return Sampling(max_tokens=TOKENS if max_tokens is None else max_tokens, stop=stops, logprobs=logprobs, **given)


class StreamOptions(Strict):
    """Extras of a stream. Obfuscation hides lengths from those who watch the network: there is none here."""

    include_usage: bool | None = False
    continuous_usage_stats: bool | None = False
    include_obfuscation: bool | None = None


class Thinking(Strict):
    """Thinking of a chat as OpenRouter's API asks for it, and so claude-code-router."""

    effort: Effort | None = None
    enabled: bool | None = None


class ChatBody(Body):
    """POST /v1/chat/completions."""

    messages: Messages
    tools: Objects | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    response_format: dict[str, Any] | None = None
    max_tokens: Most = None
    max_completion_tokens: Most = None
    stop: str | Texts | None = None
    logprobs: bool | None = False
    top_logprobs: Annotated[int | None, Field(ge=0, le=20)] = None
    stream_options: StreamOptions | None = None
    reasoning_effort: Effort | None = None
    reasoning: Thinking | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    store: bool | None = None
    n: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, Any] | None = None
    modalities: Texts | None = None
    verbosity: str | None = None

    @property
    def effort(self) -> str | None:
        """The amount of thinking that is asked for, in either form."""
        asked = self.reasoning or Thinking()
        if asked.enabled is False:
            return "none"
        return self.reasoning_effort or asked.effort or ("medium" if asked.enabled else None)


def _are_ids(said: Any) -> bool:
    return isinstance(said, list) and 0 < len(said) <= MOST_IDS and all(type(one) is int and 0 <= one < 1 << 31 for one in said)


def _prompts(said: Any) -> Any:
    """A list of prompts, of one where it is no list."""
    given = said if isinstance(said, list) and type(next(iter(said), None)) is not int else [said]
    if not given or not all(isinstance(one, str) or _are_ids(one) for one in given):
        raise ValueError(f"must be a text or at most {MOST_IDS} token ids, or a list of them")
    return given


class CompletionBody(Body):
    """POST /v1/completions: raw prompts, without a chat template."""

    prompt: Annotated[list[Text | Ids] | Text | Ids, BeforeValidator(_prompts)]
    max_tokens: Annotated[int | None, Field(ge=0)] = None
    stop: str | Texts | None = None
    logprobs: Annotated[int | None, Field(ge=0, le=20)] = None
    stream_options: StreamOptions | None = None
    suffix: None = None
    n: int | None = None
    best_of: int | None = None
    echo: bool | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, Any] | None = None


class ReasoningSettings(Strict):
    """Thinking of a Responses request. Thoughts are told whole, which "auto" allows: summaries of a kind are refused."""

    effort: Effort | None = None
    summary: Literal["auto"] | None = None
    generate_summary: Literal["auto"] | None = None


class TextSettings(Strict):
    """The form of a Responses request's text."""

    format: dict[str, Any] | None = None
    verbosity: Literal["medium"] | None = None


class ResponseBody(Body):
    """POST /v1/responses. client_metadata: a label of Codex."""

    client_metadata: dict[str, Any] | None = None
    input: Text | Objects = Field(default_factory=list)
    instructions: Text | None = None
    previous_response_id: str | None = None
    tools: Objects | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    text: TextSettings | None = None
    reasoning: ReasoningSettings | None = None
    max_output_tokens: Most = None
    top_logprobs: Annotated[int | None, Field(ge=0, le=20)] = None
    include: Texts | None = None
    store: bool | None = True
    stream_options: StreamOptions | None = None
    truncation: str | None = None
    background: bool | None = None
    max_tool_calls: None = None
    conversation: None = None
    prompt: None = None


class ThinkingSettings(Strict):
    """Thinking of a message. Its budget is a target, as Anthropic calls it: max_tokens bounds thought and answer."""

    type: Literal["enabled", "adaptive", "disabled"]
    budget_tokens: int | None = None
    display: Literal["summarized"] | None = None


class OutputSettings(Strict):
    """Amount of thinking, and form, of a message."""

    effort: Effort | None = None
    format: dict[str, Any] | None = None


class ToolChoice(Strict):
    """Tools that a message may call."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class ContextSettings(Strict):
    """Edits of a message's context by the server."""

    edits: Objects = Field(default_factory=list)


class MessagesBody(Body):
    """POST /v1/messages. cache_control: everything is cached."""

    messages: Messages
    system: Text | Objects | None = None
    tools: Objects | None = None
    tool_choice: ToolChoice | None = None
    thinking: ThinkingSettings | None = None
    output_config: OutputSettings | None = None
    max_tokens: Most = None
    stop_sequences: Texts | None = None
    cache_control: dict[str, Any] | None = None
    context_management: ContextSettings | None = None
    thread: dict[str, Any] | None = None
    speed: str | None = None

    @property
    def effort(self) -> str | None:
        """The amount of thinking that is asked for; None: as the model likes."""
        asked = self.output_config.effort if self.output_config else None
        if self.thinking is None:
            return asked
        return "none" if self.thinking.type == "disabled" else asked or "medium"


def tool_choice_of(choice: str | Mapping[str, Any] | None) -> tuple[str, tuple[str, ...] | None, bool]:
    """OpenAI's `tool_choice`, of chat and of responses: "auto", "none" or "any", the tools that may be called, and whether once only."""
    if choice is None:
        return "auto", None, False
    if isinstance(choice, str):
        if choice not in ("auto", "none", "required"):
            raise refused("tool_choice", choice, "must be 'auto', 'none', 'required' or name a function")
        return ("any" if choice == "required" else choice), None, False
    allowed = choice.get("allowed_tools", choice) if choice.get("type") == "allowed_tools" else None
    if isinstance(allowed, Mapping) and isinstance(allowed.get("tools"), list) and allowed.get("mode", "auto") in ("auto", "required"):
        names = tuple(str(_function_name(tool)) for tool in allowed["tools"])
        return ("any" if allowed.get("mode") == "required" else "auto"), names, False
    name = _function_name(choice)
    if choice.get("type") != "function" or not isinstance(name, str) or not name:
        raise refused("tool_choice", dict(choice), 'must be {"type": "function", ...} with a name, or of type "allowed_tools"')
    return "any", (name,), True


def _function_name(said: Any) -> Any:
    function = said.get("function", said) if isinstance(said, Mapping) else {}
    return function.get("name") if isinstance(function, Mapping) else None


def schema_of(form: Mapping[str, Any] | None, param: str) -> Mapping[str, Any] | bool | None:
    """The JSON schema that text is held to, True for any object, None for free text."""
    kind = None if form is None else form.get("type")
    if form is None or kind == "text":
        return None
    told = form.get("json_schema", form) if kind == "json_schema" else None
    schema: Any = told.get("schema") if isinstance(told, Mapping) else None
    if kind == "json_object":  # with a schema as llama.cpp's server has it, or as TGI has it, and so huggingface_hub's client
        schema = form.get("schema") or form.get("value")
        if schema is None:
            return True
    if not isinstance(schema, Mapping):
        raise refused(param, dict(form), 'must be of type "text", "json_object" or "json_schema" with a schema')
    return schema


def constraint_of(
    tools: list[dict[str, Any]], choice: str | Mapping[str, Any] | None, parallel: bool | None, schema: Mapping[str, Any] | bool | None
) -> Constraint | None:
    """The form of the answer; None where decoding is free."""
    wanted, allowed, once = tool_choice_of(choice)
    names = [_function_name(tool) for tool in tools]
    for name in allowed or ():
        if name not in names:
            raise refused("tool_choice", choice, f"there is no tool {name!r} among the tools")
    if wanted == "any" and not tools:
        raise refused("tool_choice", choice, "there are no tools")
    strict = any(isinstance(tool.get("function", tool), Mapping) and tool.get("function", tool).get("strict") for tool in tools)
    if not (strict or schema is not None or allowed is not None or parallel is False or wanted != "auto"):
        return None
    if not tools and schema is None:
        return None
    form = None if wanted == "any" else schema  # an answer that must be a call has no text to hold to it
    return Constraint(wanted, allowed=allowed, parallel=parallel is not False and not once, schema=form)


def thinking_of(effort: str | None) -> dict[str, Any]:
    """Keywords of chat templates that ask for a thought, or for none."""
    if effort is None:
        return {}
    thinks = effort != "none"
    return {"enable_thinking": thinks, "thinking": thinks, **({"reasoning_effort": effort} if thinks else {})}
