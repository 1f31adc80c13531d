"""What a ChatAgentCache is set to: its fields, the words of other classes for them, what LangChain asks about them. Answers nothing.

The engine of a model is found here, too: the settings say which one it is.
"""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict, is_dataclass
from typing import Any, Literal, cast

from langchain_core.language_models import ModelProfile
from langchain_core.language_models.base import LangSmithParams
from langchain_core.language_models.chat_models import BaseChatModel
from langchain_core.messages import BaseMessage
from langchain_core.utils import from_env
from pydantic import ConfigDict, Field, ValidationError, model_validator
from typing_extensions import Self, override

from agentcache import Engine, LayoutOptions, Sampling
from agentcache import errors as own
from agentcache.calibration import Calibration

from . import _engines
from ._messages import converted
from ._output import PROVIDER
from ._profile import profile_of
from ._tools import ToolLike, formatted, own_tools
from ._version import __version__
from .errors import ModelInvalidRequestError, translated

# Words that ChatOllama, ChatHuggingFace and HuggingFacePipeline use for what is called otherwise here.
ALIASES = {
    "model_name": "model",
    "model_id": "model",
    "num_predict": "max_tokens",
    "max_new_tokens": "max_tokens",
    "repeat_penalty": "repetition_penalty",
    "stop_sequences": "stop",
    "timeout_s": "timeout",
}
SAMPLING = ("max_tokens", "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "seed")
_FOR_ENGINE = ("device", "dtype", "load_in_4bit", "load_in_8bit", "chat_template", "memory_bytes", "layout", "reuse", "calibration")
RENDERING = ("namespace", "group", "tools_order")
# What decides an answer besides the sampling, as far as the model is set to it; what a call says is added by LangChain.
_DECIDES = ("model", "strict", "template_kwargs", *RENDERING, "num_ctx", *(name for name in _FOR_ENGINE if name != "memory_bytes"))
# Settings that are objects, and their fields that JSON keeps as lists.
_OBJECTS: dict[str, tuple[type[Any], tuple[str, ...]]] = {"layout": (LayoutOptions, ("repairs",)), "calibration": (Calibration, ("steps",))}
PER_CALL = {
    *SAMPLING,
    *("model", "tools", "tool_choice", "strict", "parallel_tool_calls", "response_format", "format"),
    *("forbidden_tools", "volatile", "namespace", "group", "tools_order"),
    *("template_kwargs", "reasoning", "timeout", "cache_control", "prompt_cache_key", "ls_structured_output_format", "stream", "stop"),
}
_warned: set[str] = set()


class Settings(BaseChatModel):
    """The fields of ChatAgentCache."""

    model: str = ""
    temperature: float | None = None
    max_tokens: int | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    stop: list[str] | None = None
    reasoning: bool | None = None
    strict: bool = False
    template_kwargs: dict[str, Any] = Field(default_factory=dict)
    streaming: bool = False

    device: str | None = None
    dtype: Any = None
    load_in_4bit: bool = False
    load_in_8bit: bool = False
    chat_template: str | None = None
    memory_bytes: int | None = Field(default=None, ge=0)
    layout: Any = None
    reuse: Literal["exact", "lossy", "approximate", "off"] | None = None
    calibration: Any = None
    cache_dir: str | None = Field(default_factory=from_env("AGENTCACHE_DIR", default=None))
    namespace: str = "default"
    tools_order: Literal["given", "sorted", "sticky"] = "given"
    group: str | None = None
    num_ctx: int | None = Field(default=None, gt=0)
    timeout: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    max_retries: int = 0
    engine: Any = Field(default=None, exclude=True, repr=False)

    model_config = ConfigDict(arbitrary_types_allowed=True, protected_namespaces=(), populate_by_name=True)

    def __init__(self, *args: Any, **said: Any) -> None:
        try:
            super().__init__(*args, **said)
        except ValidationError as error:
            raise ModelInvalidRequestError(_in_words(error)) from error

    @model_validator(mode="before")
    @classmethod
    def _read_aliases(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        out = {ALIASES.get(name, name): value for name, value in values.items()}
        for name in out.keys() - cls.model_fields.keys() - {"api_key", "cache", "callback_manager"}:
            warn_once(str(name), out.pop(name))
        if isinstance(out.get("model"), os.PathLike):
            out["model"] = os.fspath(out["model"])
        if not isinstance(model := out.get("model", ""), str):
            raise ValueError(
                f"model={model!r:.100}: must be a Hugging Face id or a folder; one that is loaded already goes into "
                "engine=agentcache.Engine(model, tokenizer), or ChatAgentCache.from_pipeline(...)"
            )
        if not isinstance(engine := out.get("engine"), (Engine, type(None))):
            raise ValueError(f"engine={engine!r:.100}: must be an agentcache.Engine; a name or a folder goes into model=")
        return out

    @model_validator(mode="after")
    def _check_model(self) -> Self:
        if self.engine is not None:
            self.model = self.model or str(self.engine.name)
        return self

    @model_validator(mode="after")
    def _set_agentcache_version(self) -> Self:
        self._add_version("langchain-agentcache", __version__)
        return self

    @override
    def _resolve_model_profile(self) -> ModelProfile | None:
        return profile_of(self.model, self.engine, self.num_ctx, self.chat_template)

    # -- what LangChain asks about ---------------------------------------------------------------------------------

    @property
    def _llm_type(self) -> str:
        return "agentcache-chat"

    @property
    def _identifying_params(self) -> dict[str, Any]:
        """What tracers show, and all that LangChain's cache of answers tells models apart by.

        "settings" stands apart from what a call may say under the same names: that is added to it, or replaces it only in part.
        """
        settings: dict[str, Any] = {name: _plain(getattr(self, name)) for name in _DECIDES}
        if self.engine is not None:
            settings["engine"] = _engines.identity(self.engine)
        said = {name: getattr(self, name) for name in (*SAMPLING, "stop", "reasoning", "strict")}
        return {"model": self.model, **said, "settings": settings}

    @override
    def _get_invocation_params(self, stop: list[str] | None = None, **kwargs: Any) -> dict[str, Any]:
        return super()._get_invocation_params(stop=self.stop if stop is None else stop, **kwargs)

    @override
    def _get_ls_params(self, stop: list[str] | None = None, **kwargs: Any) -> LangSmithParams:
        said = LangSmithParams(ls_provider=PROVIDER, ls_model_name=str(kwargs.get("model") or self.model), ls_model_type="chat")
        temperature = kwargs.get("temperature", self.temperature)
        limit = kwargs.get("max_tokens", self.max_tokens)
        if isinstance(temperature, (int, float)):  # anything else is refused where the request is made
            said["ls_temperature"] = float(temperature)
        if isinstance(limit, int):
            said["ls_max_tokens"] = limit
        if isinstance(ends := stop or self.stop, (list, tuple)):
            said["ls_stop"] = list(ends)
        return said

    @override
    def get_token_ids(self, text: str) -> list[int]:
        """The ids of a text, as this model's tokenizer makes them."""
        return list(self._engine().tokenizer(text, add_special_tokens=False)["input_ids"])

    @override
    def get_num_tokens_from_messages(self, messages: list[BaseMessage], tools: Sequence[ToolLike] | None = None) -> int:
        """The size of the prompt that these messages and tools make; part of a conversation counts as its texts."""
        said, listed = converted(messages), own_tools(formatted(tools or ()))
        try:
            return len(
                self._engine().renderer.render(said, listed, namespace=self.namespace, template_kwargs=self._template_kwargs({})).ids
            )
        except own.PromptError:
            return sum(len(self.get_token_ids(message.content)) for message in said)

    # -- what a request takes from them ----------------------------------------------------------------------------

    def _sampling(self, stop: list[str] | None, kwargs: Mapping[str, Any]) -> Sampling:
        given = {name: kwargs.get(name, getattr(self, name)) for name in SAMPLING}
        ends = stop if stop is not None else kwargs.get("stop") or self.stop or ()
        if not isinstance(ends, (str, list, tuple)):
            raise ModelInvalidRequestError(f"stop={ends!r:.200}: must be a text or a list of texts")
        fields = {"max_tokens": 1024, **{name: value for name, value in given.items() if value is not None}}
        return Sampling(stop=(ends,) if isinstance(ends, str) else tuple(ends), **fields)

    def _rendering(self, kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """What decides the tokens of a prompt besides messages and tools: the same for a request and for a pin of its start."""
        said = {name: kwargs.get(name, getattr(self, name)) for name in RENDERING}
        return {**said, "template_kwargs": self._template_kwargs(kwargs)}

    def _template_kwargs(self, kwargs: Mapping[str, Any]) -> dict[str, Any]:
        given = kwargs.get("template_kwargs") or {}
        if not isinstance(given, Mapping):
            raise ModelInvalidRequestError(f"template_kwargs={given!r:.200}: must be a dict of arguments of the chat template")
        wanted = kwargs.get("reasoning", self.reasoning)
        thinking = {} if wanted is None else {"enable_thinking": bool(wanted)}
        return {**self.template_kwargs, **thinking, **given}

    def _engine(self, model: str | None = None) -> Engine:
        if self.engine is not None and model in (None, self.model, self.engine.name):
            return cast("Engine", self.engine)
        if not (model or self.model):
            raise ModelInvalidRequestError("model='': name a Hugging Face id or a folder, or pass engine=...")
        with translated():
            return _engines.named(model or self.model, self._engine_options())

    def _engine_options(self) -> dict[str, Any]:
        given = {name: getattr(self, name) for name in _FOR_ENGINE}
        options = {name: value for name, value in given.items() if value is not None and value is not False}  # 0 bytes are said
        return options if self.cache_dir is None else {**options, "store": self.cache_dir or None}

    # -- configuration as a file -----------------------------------------------------------------------------------

    def to_config(self) -> dict[str, Any]:
        """What was set, as JSON would keep it. LangChain's own serialisation is closed to packages outside of it."""
        kept = self.model_dump(exclude_unset=True, exclude={"engine", "callbacks", "cache", "rate_limiter", "profile", "metadata", "tags"})
        return {name: _plain(value) for name, value in kept.items()}

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Self:
        """The model that `to_config` described."""
        return cls(**{name: _rebuilt(name, value) for name, value in config.items()})


def _rebuilt(name: str, value: Any) -> Any:
    """The setting that `_plain` wrote."""
    form, listed = _OBJECTS.get(name, (None, ()))
    if form is None or not isinstance(value, Mapping):
        return value
    try:
        return form(**{**value, **{each: _tupled(value[each]) for each in listed if each in value}})
    except (TypeError, LookupError, own.AgentCacheError) as error:
        raise ModelInvalidRequestError(f"{name}={value!r:.200}: is no {form.__name__} ({error}); give what to_config() wrote") from error


def _plain(value: Any) -> Any:
    """A setting as JSON would keep it."""
    if is_dataclass(value) and not isinstance(value, type):
        value = asdict(value)
    if isinstance(value, Mapping):
        return {str(name): _plain(each) for name, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(each) for each in value]
    return value if isinstance(value, (str, int, float, bool, type(None))) else str(value)


def _tupled(value: Any) -> Any:
    return tuple(map(_tupled, value)) if isinstance(value, (list, tuple)) else value


def seconds(timeout: Any) -> float | None:
    """The timeout of a call, None for none."""
    if timeout is None:
        return None
    if isinstance(timeout, bool) or not isinstance(timeout, (int, float)) or not 0 < timeout < math.inf:
        raise ModelInvalidRequestError(f"timeout={timeout!r:.200}: must be a positive number of seconds, or None for no limit")
    return float(timeout)


def _in_words(error: ValidationError) -> str:
    """What was wrong with which settings, one after the other."""
    said = []
    for each in error.errors(include_url=False, include_context=False):
        field = ".".join(map(str, each["loc"]))
        text = each["msg"].removeprefix("Value error, ")
        said.append(f"{field}={each['input']!r:.200}: {text[:1].lower()}{text[1:]}" if field else text)
    return "; ".join(said)


def warn_once(name: str, value: Any) -> None:
    """Say that a setting nobody knows is ignored, the first time it is given."""
    if name not in _warned and value is not None:
        _warned.add(name)
        warnings.warn(f"ChatAgentCache ignores {name}={value!r:.100}: it has no such setting (said once)", stacklevel=3)
