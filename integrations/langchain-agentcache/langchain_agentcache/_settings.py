"""What both classes are set to: their fields, the engine that these name, and what LangChain asks about them. Answers nothing."""

from __future__ import annotations

import hashlib
import math
import os
import uuid
import weakref
from collections.abc import Mapping
from typing import Any, ClassVar, Literal, cast

from langchain_core.language_models.base import BaseLanguageModel, LangSmithParams
from langchain_core.utils import from_env
from pydantic import ConfigDict, Field, PrivateAttr, SecretStr, ValidationError, model_validator
from typing_extensions import Self, override

from agentcache import Engine, EngineLease, RemoteEngine, Sampling, foreign_settings

from ._caller_warnings import caller_warnings, tell_once
from ._config import plain, rebuilt
from ._names import SAME, beside, noted, own_names, template_text
from ._output import PROVIDER
from ._pipelines import Pipeline
from ._version import __version__
from .errors import ModelInvalidRequestError, translated

SAMPLING = ("max_tokens", "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "seed")
_LOADING = ("device", "dtype", "weights", "load_in_4bit", "load_in_8bit", "revision", "token", "trust_remote_code")
_FOR_ENGINE = (*_LOADING, "chat_template", "memory_bytes", "layout", "reuse", "calibration", "adapters", "policy", "receipts")
# What decides an answer besides the sampling, as far as the model is set to it; what a call says is added by LangChain.
_OF_PROMPTS = ("model", "base_url", "template_kwargs", "namespace", "num_ctx", "format", "adapter")
_DECIDES = (*_OF_PROMPTS, *(name for name in _FOR_ENGINE if name not in ("memory_bytes", "receipts", "token")))
# What a call may say: of LangChain itself, and of one completion.
_OF_LANGCHAIN = {"stop", "stream", "ls_structured_output_format"}
_OF_CALLS = {*SAMPLING, "model", "namespace", "timeout", "format", "response_format", "template_kwargs", "reasoning", "adapter"}

_named: set[Engine] = set()  # engines by name stay loaded while no model uses them; closing the last model ends that
_identities: weakref.WeakKeyDictionary[Engine, str] = weakref.WeakKeyDictionary()


class _Lease(EngineLease):
    """This model as a user of engines, which is no reason for two models to differ."""

    __slots__ = ()
    __hash__ = EngineLease.__hash__

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Lease)


class Settings(BaseLanguageModel):
    """The fields that ChatAgentCache and AgentCacheLLM share."""

    model: str = ""
    temperature: float | None = None
    max_tokens: int | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    stop: list[str] | None = None
    format: str | dict[str, Any] | None = None
    reasoning: bool | None = None
    template_kwargs: dict[str, Any] = Field(default_factory=dict)
    streaming: bool = False

    device: str | None = None
    dtype: Any = None
    weights: Literal["int8"] | None = None
    load_in_4bit: bool = False
    load_in_8bit: bool = False
    revision: str | None = None
    token: SecretStr | bool | None = Field(default=None, exclude=True, repr=False)
    trust_remote_code: bool = False
    chat_template: str | None = None
    memory_bytes: int | None = Field(default=None, ge=0)
    layout: Any = None
    reuse: Literal["exact", "lossy", "approximate", "off"] | None = None
    calibration: Any = None
    adapters: dict[str, str] | None = None
    adapter: str | None = None
    policy: str | None = None
    receipts: str | None = None
    cache_dir: str | None = Field(default_factory=from_env("AGENTCACHE_DIR", default=None))
    namespace: str = "default"
    num_ctx: int | None = Field(default=None, gt=0)
    timeout: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    max_retries: int = Field(default=0, ge=0)
    engine: Any = Field(default=None, exclude=True, repr=False)
    base_url: str | None = None
    api_key: SecretStr | None = Field(default=None, exclude=True, repr=False)
    _lease: EngineLease = PrivateAttr(default_factory=_Lease)

    model_config = ConfigDict(arbitrary_types_allowed=True, protected_namespaces=(), populate_by_name=True)
    of_calls: ClassVar[set[str]] = _OF_CALLS
    ls_model_type: ClassVar[Literal["chat", "llm"]]

    def __init__(self, *args: Any, **said: Any) -> None:
        try:
            super().__init__(*args, **said)
        except ValidationError as error:
            raise ModelInvalidRequestError(noted(foreign_settings.in_words(error), said)) from error

    @model_validator(mode="before")
    @classmethod
    def _read_names(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        out = own_names(values, cls.model_fields.keys(), cls.__name__)
        for name in ("model", "cache_dir", "policy", "receipts"):
            if isinstance(out.get(name), os.PathLike):
                out[name] = os.fspath(out[name])
        if out.get("cache_dir", "") is None:  # as if nothing were said
            del out["cache_dir"]
        if isinstance(out.get("stop"), str):
            out["stop"] = [out["stop"]]
        if "chat_template" in out:
            out["chat_template"] = template_text(out["chat_template"])
        if not isinstance(model := out.get("model", ""), str):
            raise ValueError(
                f"model={model!r:.100}: must be a Hugging Face id or a folder; one that is loaded already goes into "
                f"engine=agentcache.Engine(model, tokenizer), or {cls.__name__}.from_pipeline(...)"
            )
        if not isinstance(engine := out.get("engine"), (Engine, RemoteEngine, type(None))):
            raise ValueError(f"engine={engine!r:.100}: must be an agentcache.Engine; a name or a folder goes into model=")
        return out

    @model_validator(mode="after")
    def _check_engine(self) -> Self:
        if self.engine is not None and self.base_url is not None:
            raise ValueError(f"base_url={self.base_url!r:.100}: the engine that is passed is made already; give one of them")
        if _told(self.api_key) and self.base_url is None:  # no error: LangChain's own tests give each chat model a key
            by = type(self).__name__
            tell_once(
                by, "api_key", f"{by} ignores api_key=...: it is for base_url=, an `agentcache serve`; namespace= separates prompts here"
            )
        if self.engine is not None:
            self.model = self.model or str(self.engine.name)
        if self.base_url is not None or (self.engine is not None and not EngineLease.is_shared(self.engine)):
            said = "the server's engine is made already; say it to `agentcache serve`"
            said = "the engine that is passed is made already; say it to agentcache.Engine" if self.engine is not None else said
            for name in (*(name for name in _FOR_ENGINE if name != "reuse"), "cache_dir"):
                standing = type(self).model_fields[name].get_default(call_default_factory=True)
                if (value := getattr(self, name)) != standing:
                    raise ValueError(f"{name}={value!r:.100}: {said}")
        return self

    @model_validator(mode="after")
    def _set_agentcache_version(self) -> Self:
        self._add_version("langchain-agentcache", __version__)
        return self

    # -- the engine ------------------------------------------------------------------------------------------------

    @classmethod
    def from_pipeline(cls, pipeline: Any, **kwargs: Any) -> Self:
        """The model of a transformers pipeline, or of a HuggingFacePipeline, with its generation settings."""
        given = Pipeline.of(pipeline)
        made = cls(**beside(kwargs, {"model": given.name, **given.settings}))
        with translated():
            made.engine = Engine.shared(given.model, given.tokenizer, lease=made._lease, **made._engine_options())
        made._learn_profile()
        return made

    def _learn_profile(self) -> None:
        """Read again what is known of the model, now that its engine is there."""

    def load(self) -> Self:
        """Load the weights now instead of at the first request."""
        self._engine()
        return self

    def close(self) -> None:
        """Let go of the engine: with the last model of this process that uses it, its weights and pages are freed. One that was passed
        as `engine=` stays yours. The next request loads again what is known by name.
        """
        self._lease.release()

    def __copy__(self) -> Self:
        """A copy, such as of `model_copy`, uses the engine for itself: closing one of both leaves it to the other."""
        made = super().__copy__()
        made._lease = _Lease()
        return made

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _engine(self, model: str | None = None) -> Engine:
        if self.engine is not None and model in (None, self.model, self.engine.name):
            self._lease.join(self.engine)
            return cast("Engine", self.engine)
        if self.base_url is not None:
            served: dict[str, Any] = {"base_url": self.base_url, "api_key": _told(self.api_key) or None}
            with translated():
                return cast("Engine", RemoteEngine.shared(model or self.model, lease=self._lease, **served))
        if not (model or self.model):
            raise ModelInvalidRequestError("model='': name a Hugging Face id or a folder, or pass engine=... or base_url=...")
        with translated():
            engine = Engine.shared(model or self.model, lease=self._lease, **self._engine_options())
        _named.difference_update([each for each in tuple(_named) if each.closed])
        _named.add(engine)
        return engine

    def _engine_options(self) -> dict[str, Any]:
        given = {name: getattr(self, name) for name in _FOR_ENGINE}
        given["token"] = _told(self.token)
        options = {name: value for name, value in given.items() if value is not None and value is not False}  # 0 bytes are said
        return options if self.cache_dir is None else {**options, "store": self.cache_dir or None}

    async def agenerate(self, *args: Any, **kwargs: Any) -> Any:
        """As of LangChain, which makes a task of each prompt: a warning still names the line that waits for all of them."""
        with caller_warnings.from_here():
            return await super().agenerate(*args, **kwargs)

    # -- what LangChain asks about ---------------------------------------------------------------------------------

    @property
    def _identifying_params(self) -> dict[str, Any]:
        """What tracers show, and all that LangChain's cache of answers tells models apart by.

        "settings" stands apart from what a call may say under the same names: that is added to it, or replaces it only in part.
        """
        settings: dict[str, Any] = {name: plain(getattr(self, name)) for name in self._deciding()}
        if self.api_key is not None:  # it is the namespace there
            key = str(_told(self.api_key)).encode("utf-8", "surrogatepass")
            settings["namespace"] = hashlib.blake2b(key, digest_size=8).hexdigest()
        if self.engine is not None:
            settings["engine"] = _identities.setdefault(self.engine, uuid.uuid4().hex)  # a name may stand for several, an id comes again
        said = {name: getattr(self, name) for name in (*SAMPLING, "stop", "reasoning")}
        return {"model": self.model, **said, "settings": settings}

    def _deciding(self) -> tuple[str, ...]:
        return _DECIDES

    @override
    def _get_ls_params(self, stop: list[str] | None = None, **kwargs: Any) -> LangSmithParams:
        kwargs = {SAME.get(name, name): value for name, value in kwargs.items()}
        name = str(kwargs.get("model") or self.model)
        said = LangSmithParams(ls_provider=PROVIDER, ls_model_name=name, ls_model_type=self.ls_model_type)
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

    # -- what a request takes from them ----------------------------------------------------------------------------

    def _call(self, said: Mapping[str, Any]) -> dict[str, Any]:
        """What one call says, under the names that settings have here; refused before anything is computed where it cannot be."""
        try:
            out = own_names(said, self.of_calls | _OF_LANGCHAIN, type(self).__name__, vars(self))
            self._sampling(None, out)
            if not isinstance(thinks := out.get("reasoning"), (bool, type(None))):
                raise ValueError(f"reasoning={thinks!r:.200}: must be a boolean")
        except ValueError as error:
            raise ModelInvalidRequestError(noted(str(error), said)) from error
        seconds(out.get("timeout"))
        if not isinstance(space := out.get("namespace", ""), str):
            raise ModelInvalidRequestError(f"namespace={space!r:.200}: must be a text")
        return out

    def _sampling(self, stop: list[str] | None, kwargs: Mapping[str, Any], logprobs: int | None = None) -> Sampling:
        seconds(self.timeout)  # which may have been assigned: a timer takes anything, and fails in its own thread
        given = {name: getattr(self, name) if kwargs.get(name) is None else kwargs[name] for name in SAMPLING}
        ends = stop if stop is not None else kwargs.get("stop") or self.stop or ()
        if not isinstance(ends, (str, list, tuple)):
            raise ModelInvalidRequestError(f"stop={ends!r:.200}: must be a text or a list of texts")
        fields = {"max_tokens": 1024, **{name: value for name, value in given.items() if value is not None}}
        texts = (ends,) if isinstance(ends, str) else tuple(ends)
        return Sampling(stop=texts, logprobs=logprobs, context_tokens=self.num_ctx, **fields)

    def _template_kwargs(self, kwargs: Mapping[str, Any]) -> dict[str, Any]:
        standing, given = self.template_kwargs or {}, kwargs.get("template_kwargs") or {}
        for each in (standing, given):
            if not isinstance(each, Mapping):
                raise ModelInvalidRequestError(f"template_kwargs={each!r:.200}: must be a dict of arguments of the chat template")
        wanted = kwargs.get("reasoning", self.reasoning)
        thinking = {} if wanted is None else {"enable_thinking": bool(wanted)}
        return {**standing, **thinking, **given}

    def _form(self, kwargs: Mapping[str, Any]) -> Any:
        """What a completion is to be: the response format of the call, or the one that the model is set to."""
        return next((form for form in (kwargs.get("response_format"), kwargs.get("format"), self.format) if form not in (None, "")), None)

    # -- configuration as a file -----------------------------------------------------------------------------------

    def to_config(self) -> dict[str, Any]:
        """What was set, as JSON would keep it; without the engine and the token."""
        left = {"engine", "callbacks", "cache", "rate_limiter", "profile", "metadata", "tags"}
        return {name: plain(value) for name, value in self.model_dump(exclude_unset=True, exclude=left).items()}

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Self:
        """The model that `to_config` described."""
        return cls(**{name: rebuilt(name, value) for name, value in config.items()})


def _told(secret: Any) -> Any:
    """A secret in clear; what was assigned to the model's field is one already."""
    return secret.get_secret_value() if isinstance(secret, SecretStr) else secret


def seconds(timeout: Any) -> float | None:
    """The timeout of a call, None for none."""
    if timeout is None:
        return None
    if isinstance(timeout, bool) or not isinstance(timeout, (int, float)) or not 0 < timeout < math.inf:
        raise ModelInvalidRequestError(f"timeout={timeout!r:.200}: must be a positive number of seconds, or None for no limit")
    return float(timeout)
