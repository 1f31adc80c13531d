"""ChatAgentCache: LangChain's chat model over an agentcache engine. Translates; never tokenises, templates, caches or decides."""

from __future__ import annotations

import asyncio
import threading
import warnings
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal, cast

from langchain_core.callbacks import AsyncCallbackManagerForLLMRun, CallbackManagerForLLMRun
from langchain_core.language_models import LanguageModelInput, ModelProfile
from langchain_core.language_models.base import LangSmithParams
from langchain_core.language_models.chat_models import BaseChatModel
from langchain_core.messages import AIMessage, BaseMessage
from langchain_core.outputs import ChatGeneration, ChatGenerationChunk, ChatResult
from langchain_core.runnables import Runnable
from langchain_core.utils import from_env
from pydantic import BaseModel, ConfigDict, Field, model_validator
from typing_extensions import Self, override

from agentcache import Engine, Sampling, Stream
from agentcache import errors as own

from . import _engines, _pins
from ._messages import converted, marked, system_text
from ._output import PROVIDER, chunk_of, last_chunk, message_of
from ._structured import structured
from ._tools import ToolLike, constraint, formatted, own_tools
from ._version import __version__
from .errors import ContextOverflowError, ModelInvalidRequestError, ModelTimeoutError, translated

# Words that ChatOllama, ChatHuggingFace and HuggingFacePipeline use for what is called otherwise here.
_ALIASES = {
    "model_name": "model",
    "model_id": "model",
    "num_predict": "max_tokens",
    "max_new_tokens": "max_tokens",
    "repeat_penalty": "repetition_penalty",
    "stop_sequences": "stop",
    "timeout_s": "timeout",
}
_SAMPLING = ("max_tokens", "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "seed")
_FOR_ENGINE = ("device", "dtype", "load_in_4bit", "load_in_8bit", "chat_template", "memory_bytes")
_PER_CALL = {
    *_SAMPLING,
    *("model", "tools", "tool_choice", "strict", "parallel_tool_calls", "response_format", "format"),
    *("forbidden_tools", "namespace", "group", "tools_order"),
    *("template_kwargs", "reasoning", "timeout", "cache_control", "prompt_cache_key", "ls_structured_output_format", "stream", "stop"),
}
_warned: set[str] = set()


class ChatAgentCache(BaseChatModel):
    """A local Hugging Face chat model whose prompts are computed once.

    Setup:
        `pip install langchain-agentcache`; weights are loaded at the first request, once per process, and shared by all instances.

    Key init args - completion params:
        model: Hugging Face id or folder (also `model_name`, `model_id`).
        temperature: 0, the default, is greedy.
        max_tokens: tokens of a completion, 1,024 if nothing is said (also `num_predict`, `max_new_tokens`).
        top_p, top_k, min_p, repetition_penalty, seed, stop: as usual.
        reasoning: True or False to have the chat template ask for reasoning or not, None for the template's own default.
        strict: tool calls are held to their schemas; with `tool_choice` and structured output they always are.

    Key init args - client params:
        device, dtype, load_in_4bit, load_in_8bit, chat_template, memory_bytes: of `agentcache.Engine`.
        cache_dir: where prompts are kept on disk; "" for nowhere. By default what AGENTCACHE_DIR says.
        namespace: requests of different namespaces share nothing.
        tools_order: "given", "sorted", or "sticky" with `group`, a tool group that was warmed.
        num_ctx: refuse longer prompts than this.
        timeout: seconds for one completion.
        engine: a running engine instead of `model`; it stays yours to close.

    Instantiate:
        >>> model = ChatAgentCache(model="Qwen/Qwen3-0.6B", max_tokens=256)

    Invoke:
        >>> model.invoke([("system", "Answer in one sentence."), ("user", "When is high water?")]).text

    Stream:
        >>> for chunk in model.stream("When is high water?"):
        ...     print(chunk.text, end="")

    Async:
        >>> await model.ainvoke("When is high water?")

    Tool calling:
        >>> model.bind_tools([tide]).invoke("When is high water in Port Averil?").tool_calls

    Structured output:
        >>> model.with_structured_output(Tide).invoke("When is high water in Port Averil?")

    Token usage:
        >>> model.invoke("...").usage_metadata["input_token_details"]
        {'cache_read': 4312, 'cache_creation': 57}

    Response metadata:
        >>> model.invoke("...").response_metadata["agentcache"]["refusals"]  # why something was computed again
    """

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
    memory_bytes: int | None = None
    cache_dir: str | None = Field(default_factory=from_env("AGENTCACHE_DIR", default=None))
    namespace: str = "default"
    tools_order: Literal["given", "sorted", "sticky"] = "given"
    group: str | None = None
    num_ctx: int | None = None
    timeout: float | None = None
    max_retries: int = 0
    engine: Any = Field(default=None, exclude=True, repr=False)

    model_config = ConfigDict(arbitrary_types_allowed=True, protected_namespaces=(), populate_by_name=True)

    # -- construction ----------------------------------------------------------------------------------------------

    @model_validator(mode="before")
    @classmethod
    def _read_aliases(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        out = {_ALIASES.get(name, name): value for name, value in values.items()}
        for name in out.keys() - cls.model_fields.keys() - {"api_key", "cache", "callback_manager"}:
            _warn_once(name, out.pop(name))
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

    @classmethod
    def from_pipeline(cls, pipeline: Any, **kwargs: Any) -> ChatAgentCache:
        """The model of a transformers pipeline, or of a HuggingFacePipeline, with its generation settings."""
        inner = getattr(pipeline, "pipeline", pipeline)
        model, tokenizer = getattr(inner, "model", None), getattr(inner, "tokenizer", None)
        if model is None or tokenizer is None or not hasattr(model, "config"):
            raise ModelInvalidRequestError(
                f"from_pipeline({type(pipeline).__name__}): needs a text-generation pipeline with model and tokenizer"
            )
        said = {**(getattr(inner, "_forward_params", None) or {}), **(getattr(pipeline, "pipeline_kwargs", None) or {})}
        settings = {_ALIASES.get(name, name): value for name, value in said.items()}
        if settings.get("do_sample") is False:
            settings["temperature"] = 0.0
        taken = {name: settings[name] for name in _SAMPLING if settings.get(name) is not None}
        name = str(getattr(model.config, "_name_or_path", "") or type(model).__name__)
        made = cls(**{"model": name, **taken, **kwargs})
        made.engine = _engines.of_object(model, tokenizer, made._engine_options())
        return made

    @classmethod
    def from_huggingface(cls, chat: Any, **kwargs: Any) -> ChatAgentCache:
        """The model of a ChatHuggingFace over a local pipeline."""
        llm = getattr(chat, "llm", chat)
        if getattr(llm, "pipeline", None) is None:
            raise ModelInvalidRequestError(
                f"from_huggingface({type(chat).__name__} over {type(llm).__name__}): its model is not in this process; "
                "use one over a HuggingFacePipeline, or ChatAgentCache(model=...)"
            )
        return cls.from_pipeline(llm, **kwargs)

    @override
    def _resolve_model_profile(self) -> ModelProfile | None:
        config = self.engine.model.config.to_dict() if self.engine is not None else _engines.config_of(self.model) if self.model else {}
        context = self.num_ctx or config.get("max_position_embeddings")
        sizes = {"max_input_tokens": int(context), "max_output_tokens": int(context)} if context else {}
        known = ModelProfile(
            name=self.model,
            open_weights=True,
            text_inputs=True,
            text_outputs=True,
            image_inputs=False,
            audio_inputs=False,
            pdf_inputs=False,
            video_inputs=False,
            tool_calling=True,
            tool_choice=True,
            tool_call_streaming=True,
            structured_output=True,
            temperature=True,
        )
        return cast("ModelProfile", {**known, **sizes})

    # -- what LangChain asks about ---------------------------------------------------------------------------------

    @property
    def _llm_type(self) -> str:
        return "agentcache-chat"

    @property
    def _identifying_params(self) -> dict[str, Any]:
        return {"model": self.model, **{name: getattr(self, name) for name in (*_SAMPLING, "stop", "reasoning", "strict")}}

    @override
    def _get_ls_params(self, stop: list[str] | None = None, **kwargs: Any) -> LangSmithParams:
        said = LangSmithParams(ls_provider=PROVIDER, ls_model_name=str(kwargs.get("model") or self.model), ls_model_type="chat")
        temperature = kwargs.get("temperature", self.temperature)
        limit = kwargs.get("max_tokens", self.max_tokens)
        if temperature is not None:
            said["ls_temperature"] = float(temperature)
        if limit is not None:
            said["ls_max_tokens"] = int(limit)
        if ends := stop or self.stop:
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

    # -- answering -------------------------------------------------------------------------------------------------

    @override
    def _generate(
        self, messages: list[BaseMessage], stop: list[str] | None = None, run_manager: CallbackManagerForLLMRun | None = None, **kwargs: Any
    ) -> ChatResult:
        with translated(), self._opened(messages, stop, kwargs) as stream:
            return _result(message_of(stream.completion, _label(kwargs)))

    @override
    def _stream(
        self, messages: list[BaseMessage], stop: list[str] | None = None, run_manager: CallbackManagerForLLMRun | None = None, **kwargs: Any
    ) -> Iterator[ChatGenerationChunk]:
        with translated(), self._opened(messages, stop, kwargs) as stream:
            for delta in stream.deltas():
                chunk = ChatGenerationChunk(message=chunk_of(delta))
                if run_manager:
                    run_manager.on_llm_new_token(chunk.text, chunk=chunk)
                yield chunk
            yield ChatGenerationChunk(message=last_chunk(stream.completion.receipt, _label(kwargs)))

    @override
    async def _agenerate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        with translated():
            stream = await asyncio.to_thread(self._open, messages, stop, kwargs)
            with self._limited(stream, kwargs):
                async for _ in stream:
                    pass
                return _result(message_of(stream.completion, _label(kwargs)))

    @override
    async def _astream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> AsyncIterator[ChatGenerationChunk]:
        with translated():
            stream = await asyncio.to_thread(self._open, messages, stop, kwargs)
            with self._limited(stream, kwargs):
                async for delta in stream.adeltas():
                    chunk = ChatGenerationChunk(message=chunk_of(delta))
                    if run_manager:
                        await run_manager.on_llm_new_token(chunk.text, chunk=chunk)
                    yield chunk
                yield ChatGenerationChunk(message=last_chunk(stream.completion.receipt, _label(kwargs)))

    @contextmanager
    def _opened(self, messages: list[BaseMessage], stop: list[str] | None, kwargs: dict[str, Any]) -> Iterator[Stream]:
        with self._limited(self._open(messages, stop, kwargs), kwargs) as stream:
            yield stream

    @contextmanager
    def _limited(self, stream: Stream, kwargs: Mapping[str, Any]) -> Iterator[Stream]:
        """The stream, ended with this block, or earlier if its time is over."""
        seconds = kwargs.get("timeout", self.timeout)
        late = threading.Event()

        def end() -> None:
            late.set()
            stream.close()

        timer = threading.Timer(seconds, end) if seconds else None
        if timer:
            timer.daemon = True
            timer.start()
        try:
            with stream:
                yield stream
        except own.CancelledError as error:
            if late.is_set():
                raise ModelTimeoutError(f"timeout={seconds!r}: passed before the completion ended; what was computed is kept") from error
            raise
        finally:
            if timer:
                timer.cancel()

    def _open(self, messages: list[BaseMessage], stop: list[str] | None, kwargs: dict[str, Any]) -> Stream:
        """Translate one request and hand it to the engine."""
        for name in kwargs.keys() - _PER_CALL:
            _warn_once(name, kwargs[name])
        with translated():
            engine = self._engine(kwargs.get("model"))
            said, tools = converted(messages), own_tools(kwargs.get("tools") or ())
            strict = kwargs.get("strict")
            options: dict[str, Any] = {
                "sampling": self._sampling(stop, kwargs),
                "constraint": constraint(
                    tools,
                    tool_choice=kwargs.get("tool_choice"),
                    strict=self.strict if strict is None else strict,
                    parallel_tool_calls=kwargs.get("parallel_tool_calls"),
                    response_format=kwargs.get("response_format", kwargs.get("format")),
                    forbidden=kwargs.get("forbidden_tools") or (),
                ),
                **{name: kwargs.get(name, getattr(self, name)) for name in ("namespace", "group", "tools_order")},
                "template_kwargs": self._template_kwargs(kwargs),
            }
            if pinned := kwargs.get("cache_control") or marked(messages):
                namespace, order = options["namespace"], options["tools_order"]
                _pins.pin(engine, system_text(said), tools, pinned, _label(kwargs), namespace, order)
            stream = engine.stream(said, tools, **options)
            prompt = stream.receipt.prompt_tokens
            if self.num_ctx and prompt >= self.num_ctx:
                stream.close()
                raise ContextOverflowError(prompt, self.num_ctx, 1)
            return stream

    def _sampling(self, stop: list[str] | None, kwargs: Mapping[str, Any]) -> Sampling:
        given = {name: kwargs.get(name, getattr(self, name)) for name in _SAMPLING}
        ends = stop if stop is not None else kwargs.get("stop") or self.stop or ()
        fields = {"max_tokens": 1024, **{name: value for name, value in given.items() if value is not None}}
        return Sampling(stop=(ends,) if isinstance(ends, str) else tuple(ends), **fields)

    def _template_kwargs(self, kwargs: Mapping[str, Any]) -> dict[str, Any]:
        wanted = kwargs.get("reasoning", self.reasoning)
        thinking = {} if wanted is None else {"enable_thinking": bool(wanted)}
        return {**self.template_kwargs, **thinking, **(kwargs.get("template_kwargs") or {})}

    def _engine(self, model: str | None = None) -> Engine:
        if self.engine is not None and model in (None, self.model, self.engine.name):
            return cast("Engine", self.engine)
        if not (model or self.model):
            raise ModelInvalidRequestError("model='': name a Hugging Face id or a folder, or pass engine=...")
        with translated():
            return _engines.named(model or self.model, self._engine_options())

    def _engine_options(self) -> dict[str, Any]:
        options = {name: value for name in _FOR_ENGINE if (value := getattr(self, name)) not in (None, False)}
        return options if self.cache_dir is None else {**options, "store": self.cache_dir or None}

    # -- tools and structured output -------------------------------------------------------------------------------

    @override
    def bind_tools(
        self,
        tools: Sequence[ToolLike],
        *,
        tool_choice: Any = None,
        strict: bool | None = None,
        parallel_tool_calls: bool | None = None,
        **kwargs: Any,
    ) -> Runnable[LanguageModelInput, AIMessage]:
        """The model with these tools.

        Args:
            tools: functions, BaseTools, pydantic classes, TypedDicts, or schemas of any provider.
            tool_choice: None or "auto", "none", "any", "required" or True, a tool's name, the dict form of these, or
                {"type": "allowed_tools", ...}: the other tools stay in the prompt, and cannot be called.
            strict: names and arguments are held to the schemas even where the model may choose to answer in words.
            parallel_tool_calls: False for at most one call.
        """
        listed = formatted(tools)
        choice = tool_choice
        if isinstance(choice, str) and choice not in ("auto", "none", "any", "required"):
            names = [tool["function"]["name"] for tool in listed]
            if choice not in names:
                raise ModelInvalidRequestError(f"tool_choice={choice!r}: there is no such tool, only {sorted(names)!r}")
        said = {"tool_choice": choice, "strict": strict, "parallel_tool_calls": parallel_tool_calls}
        return self.bind(tools=listed, **{name: value for name, value in said.items() if value is not None}, **kwargs)

    @override
    def with_structured_output(
        self,
        schema: dict[str, Any] | type | None = None,
        *,
        method: Literal["function_calling", "json_schema", "json_mode"] = "function_calling",
        include_raw: bool = False,
        strict: bool | None = None,
        **kwargs: Any,
    ) -> Runnable[LanguageModelInput, dict[str, Any] | BaseModel]:
        """The model, answering in the form of a schema.

        Args:
            schema: pydantic class (2 or 1), TypedDict, JSON schema or function schema.
            method: "function_calling" shows the schema to the model as a tool that it must call; "json_schema" holds its text to the schema
                without showing it; "json_mode" holds it to JSON of any kind, and you say which in the prompt.
            include_raw: the message as well, and parsing errors instead of raising them.
            strict: accepted; every method is held to its form in any case.
        """
        return structured(self, schema, method, include_raw, kwargs)

    # -- configuration as a file -----------------------------------------------------------------------------------

    def to_config(self) -> dict[str, Any]:
        """What was set, as JSON would keep it. LangChain's own serialisation is closed to packages outside of it."""
        kept = self.model_dump(exclude_unset=True, exclude={"engine", "callbacks", "cache", "rate_limiter", "profile", "metadata", "tags"})
        return {
            name: value if isinstance(value, (str, int, float, bool, list, dict, type(None))) else str(value)
            for name, value in kept.items()
        }

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> ChatAgentCache:
        """The model that `to_config` described."""
        return cls(**config)


def _result(message: AIMessage) -> ChatResult:
    said = {"token_usage": message.usage_metadata, "model_name": message.response_metadata["model_name"]}
    return ChatResult(generations=[ChatGeneration(message=message)], llm_output=said)


def _label(kwargs: Mapping[str, Any]) -> str | None:
    label = kwargs.get("prompt_cache_key")
    return None if label is None else str(label)


def _warn_once(name: str, value: Any) -> None:
    if name not in _warned and value is not None:
        _warned.add(name)
        warnings.warn(f"ChatAgentCache ignores {name}={value!r:.100}: it has no such setting (said once)", stacklevel=3)
