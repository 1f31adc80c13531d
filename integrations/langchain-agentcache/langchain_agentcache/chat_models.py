"""ChatAgentCache: LangChain's chat model over an agentcache engine. Translates; never tokenises, templates, caches or decides."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from typing import Any, Literal

from langchain_core.callbacks import AsyncCallbackManagerForLLMRun, CallbackManagerForLLMRun
from langchain_core.language_models import LanguageModelInput
from langchain_core.messages import AIMessage, BaseMessage
from langchain_core.outputs import ChatGeneration, ChatGenerationChunk, ChatResult
from langchain_core.runnables import Runnable
from pydantic import BaseModel
from typing_extensions import override

from agentcache import Constraint, Message, Stream, Tool
from agentcache.errors import ToolSchemaError

from . import _pins
from ._answer import ASK, Answer
from ._caller_warnings import in_thread
from ._chat_settings import ChatSettings, tell_names
from ._limits import arepeated, limited, repeated
from ._messages import converted, marked, turn
from ._output import chunk_of, last_chunk, message_of, openai_usage
from ._sessions import session, task
from ._structured import structured
from ._tools import ToolLike, constraint, form_of, formatted, may_call, own_tools
from .errors import ModelInvalidRequestError, translated


class ChatAgentCache(ChatSettings):
    """A local Hugging Face chat model whose prompts are computed once.

    Setup:
        `pip install langchain-agentcache`; weights are loaded at the first request, or by `load()`, once per process, and shared by all
        instances, until the last of them is closed. `warm(system, tools)` computes what a conversation begins with.

    Key init args - completion params:
        model: Hugging Face id or folder (also `model_name`, `model_id`).
        temperature: 0, the default, is greedy.
        max_tokens: tokens of a completion, 1,024 if nothing is said (also `num_predict`, `max_new_tokens`).
        top_p, top_k, min_p, repetition_penalty, seed, stop: as usual.
        format: "json", or a JSON schema, that text is held to.
        reasoning: True or False to have the chat template ask for reasoning or not, None for the template's own default.
        strict: tool calls are held to their schemas; with `tool_choice` and structured output they always are.

    Key init args - client params:
        device, dtype, weights, load_in_4bit, load_in_8bit, memory_bytes, policy, receipts: of `agentcache.Engine`.
        revision, token, trust_remote_code: of the Hugging Face Hub.
        chat_template: a Jinja template, or the path of a file with one, instead of the model's.
        cache_dir: where prompts are kept on disk; "" for nowhere. By default what AGENTCACHE_DIR says.
        namespace: requests of different namespaces share nothing.
        tools_order: "given", "sorted", or "sticky" with `group`, a tool group that was warmed.
        num_ctx: tokens that prompt and completion may have together; longer prompts are refused.
        timeout: seconds for one completion. max_retries: how often `invoke` asks again after it.
        engine: a running engine instead of `model`; it stays yours to close.
        base_url, api_key: of an `agentcache serve`, whose model answers; `model` is then one of its names, and the key is the namespace.

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

    # -- answering -------------------------------------------------------------------------------------------------

    @override
    def _generate(
        self, messages: list[BaseMessage], stop: list[str] | None = None, run_manager: CallbackManagerForLLMRun | None = None, **kwargs: Any
    ) -> ChatResult:
        said = self._call(kwargs)
        return repeated(lambda: self._answer(messages, stop, said), self.max_retries)

    def _answer(self, messages: list[BaseMessage], stop: list[str] | None, kwargs: dict[str, Any]) -> ChatResult:
        with translated():
            answer, pins = self._open(messages, stop, kwargs)
            with limited([answer], kwargs.get("timeout", self.timeout)):
                message = message_of(answer.completed(), _label(kwargs), answer.draft)
            _pins.pin_all(pins)
            return _result(message)

    @override
    def _stream(
        self, messages: list[BaseMessage], stop: list[str] | None = None, run_manager: CallbackManagerForLLMRun | None = None, **kwargs: Any
    ) -> Iterator[ChatGenerationChunk]:
        kwargs = self._call(kwargs)
        with translated():
            answer, pins = self._open(messages, stop, kwargs)
            with limited([answer], kwargs.get("timeout", self.timeout)):
                for delta in answer.deltas():
                    chunk = ChatGenerationChunk(message=chunk_of(delta, self.output_version))
                    if run_manager:
                        run_manager.on_llm_new_token(chunk.text, chunk=chunk)
                    yield chunk
                last = last_chunk(answer.completed(), _label(kwargs), answer.draft)
            _pins.pin_all(pins)
            yield ChatGenerationChunk(message=last, generation_info=_ended(last))

    @override
    async def _agenerate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        said = self._call(kwargs)
        return await arepeated(lambda: self._aanswer(messages, stop, said), self.max_retries)

    async def _aanswer(self, messages: list[BaseMessage], stop: list[str] | None, kwargs: dict[str, Any]) -> ChatResult:
        with translated():
            answer, pins = await in_thread(self._open, messages, stop, kwargs)
            with limited([answer], kwargs.get("timeout", self.timeout)):
                message = message_of(await answer.acompleted(), _label(kwargs), answer.draft)
            if pins:
                await in_thread(_pins.pin_all, pins)
            return _result(message)

    @override
    async def _astream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> AsyncIterator[ChatGenerationChunk]:
        kwargs = self._call(kwargs)
        with translated():
            answer, pins = await in_thread(self._open, messages, stop, kwargs)
            with limited([answer], kwargs.get("timeout", self.timeout)):
                async for delta in answer.adeltas():
                    chunk = ChatGenerationChunk(message=chunk_of(delta, self.output_version))
                    if run_manager:
                        await run_manager.on_llm_new_token(chunk.text, chunk=chunk)
                    yield chunk
                last = last_chunk(answer.completed(), _label(kwargs), answer.draft)
            if pins:
                await in_thread(_pins.pin_all, pins)
            yield ChatGenerationChunk(message=last, generation_info=_ended(last))

    def _open(self, messages: list[BaseMessage], stop: list[str] | None, kwargs: dict[str, Any]) -> tuple[Answer, list[_pins.PinRequest]]:
        """Translate one request and hand it to the engine; what is to be pinned once it is answered."""
        engine = self._engine(kwargs.get("model"))
        said, tools = converted(messages), own_tools(kwargs.get("tools") or ())
        form = self._shown_form(tools, kwargs)
        shown = [*tools, form] if form else tools
        options: dict[str, Any] = {
            "sampling": self._sampling(stop, kwargs),
            **self._rendering(kwargs),
            "volatile": kwargs.get("volatile") or (),
            "turn": turn(messages, task()),
            "reuse": self.reuse,
            "session": kwargs.get("session", session()),
        }
        pins = [
            _pins.PinRequest(engine, said[:end], shown, _pins.seconds(control), _label(kwargs), self._rendering(kwargs))
            for end, control in marked(messages, kwargs.get("cache_control")).items()
        ]
        tell_names(engine, messages)

        def asked(said: list[Message], limits: Constraint | None) -> Stream:
            return engine.stream(said, shown, constraint=limits, **options)

        limits, tell = self._limits(shown, form, kwargs), bool(kwargs.get("warn_missed", True))
        if form is None:
            return Answer(asked(said, limits), tell=tell), pins
        can, must = may_call(tools, kwargs.get("tool_choice"), kwargs.get("forbidden_tools") or ())
        if not can:
            return Answer(asked(said, Constraint(form.name)), formed=True, tell=tell), pins
        then = None if must else lambda message: asked([*said, message, Message("user", ASK)], Constraint(form.name))
        try:
            stream = asked(said, limits)
        except ToolSchemaError:
            if self._limits(tools, None, {**kwargs, "response_format": "text"}) is not None:
                raise
            stream = asked(said, None)  # it was held for the form's sake alone: a call of the form is none
        return Answer(stream, then=then, form=form.name, tell=tell), pins

    def _shown_form(self, tools: Sequence[Tool], kwargs: Mapping[str, Any]) -> Tool | None:
        """The tool that shows the schema of the answer, None where it is held to it without being shown."""
        shows_tools = bool(tools) or (self.profile or {}).get("tool_calling", True)
        return form_of(kwargs.get("response_format"), tools) if shows_tools and kwargs.get("show_schema", True) else None

    def _limits(self, tools: Sequence[Tool], form: Tool | None, kwargs: Mapping[str, Any]) -> Constraint | None:
        """What the completion is held to. form: among the tools, and not to be called yet."""
        strict, forbidden = kwargs.get("strict"), kwargs.get("forbidden_tools") or ()
        if form and not isinstance(forbidden, str):
            forbidden = [*forbidden, form.name]
        return constraint(
            tools,
            tool_choice=kwargs.get("tool_choice"),
            strict=self.strict if strict is None else strict,
            parallel_tool_calls=kwargs.get("parallel_tool_calls"),
            response_format=None if form else self._form(kwargs),
            forbidden=forbidden,
        )

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


def _result(message: AIMessage) -> ChatResult:
    said = {"token_usage": openai_usage(message), "model_name": message.response_metadata["model_name"]}
    return ChatResult(generations=[ChatGeneration(message=message, generation_info=_ended(message))], llm_output=said)


def _ended(message: AIMessage) -> dict[str, Any]:
    """The reason of an answer's end where callbacks look for it, as MLflow's."""
    return {"finish_reason": message.response_metadata["finish_reason"]}


def _label(kwargs: Mapping[str, Any]) -> str | None:
    label = kwargs.get("prompt_cache_key")
    return None if label is None else str(label)
