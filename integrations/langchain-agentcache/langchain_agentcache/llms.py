"""AgentCacheLLM: LangChain's text model over an agentcache engine. Translates; never tokenises, caches or decides."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import ExitStack
from typing import Any, ClassVar, Literal, TypeVar

from langchain_core.callbacks import AsyncCallbackManagerForLLMRun, CallbackManagerForLLMRun
from langchain_core.language_models.llms import BaseLLM
from langchain_core.outputs import Generation, GenerationChunk, LLMResult
from pydantic import Field, model_validator
from typing_extensions import Self, override

from agentcache import Completion, Logprob, Message, Stream

from ._caller_warnings import in_thread, tell_empty, tell_shortened
from ._limits import arepeated, limited, repeated
from ._output import metadata_of, usage_of
from ._settings import Settings
from ._tools import constraint
from .errors import OutputCutError, translated

T = TypeVar("T")

_COUNTED = ("prompt_tokens", "completion_tokens", "total_tokens")


class AgentCacheLLM(Settings, BaseLLM):
    """A local Hugging Face model that continues text, and computes no prompt twice. Base models have no chat template, and need none.

    Setup:
        `pip install langchain-agentcache`; weights are loaded at the first request, once per process, and shared by all instances and
        with ChatAgentCache.

    Key init args - completion params:
        model, temperature, max_tokens, top_p, top_k, min_p, repetition_penalty, seed, stop: as of ChatAgentCache.
        format: "json", or a JSON schema, that the completion is held to.
        apply_chat_template: True to show the prompt to the model as a user's message, and to return its answer.
        reasoning, template_kwargs: of the chat template then.
        logprobs, top_logprobs: how likely each token was, in `generation_info["logprobs"]`, beside so many of the likeliest.

    Key init args - client params:
        As of ChatAgentCache.

    Instantiate:
        >>> llm = AgentCacheLLM(model="Qwen/Qwen3-0.6B-Base", max_tokens=32)

    Invoke:
        >>> llm.invoke("High water in Port Averil is at")

    Batch, in one forward as long as there is memory for it:
        >>> llm.batch(["High water is at", "Low water is at"])

    Token usage and receipt:
        >>> llm.generate(["High water is at"]).generations[0][0].generation_info["usage_metadata"]
    """

    apply_chat_template: bool = False
    logprobs: bool = False
    top_logprobs: int = Field(default=0, ge=0)

    ls_model_type: ClassVar[Literal["chat", "llm"]] = "llm"
    of_calls: ClassVar[set[str]] = {*Settings.of_calls, "apply_chat_template", "logprobs", "top_logprobs"}

    @model_validator(mode="after")
    def _check_template(self) -> Self:
        for name in ("reasoning", "template_kwargs"):
            if (value := getattr(self, name)) not in (None, {}) and not self.apply_chat_template:
                raise ValueError(f"{name}={value!r:.100}: is for the chat template; say apply_chat_template=True, too")
        return self

    # -- answering -------------------------------------------------------------------------------------------------

    @override
    def generate(self, prompts: list[str], stop: list[str] | None = None, *args: Any, **kwargs: Any) -> LLMResult:
        """As of BaseLLM. What is said for this call alone tells answers apart in LangChain's cache, too."""
        own, theirs = _divided(kwargs)
        if not own:
            return super().generate(prompts, stop, *args, **theirs)  # type: ignore[no-any-return]
        return self._with(own).generate(prompts, stop, *args, **theirs)

    @override
    async def agenerate(self, prompts: list[str], stop: list[str] | None = None, *args: Any, **kwargs: Any) -> LLMResult:
        """The same for `await`."""
        own, theirs = _divided(kwargs)
        if not own:
            return await super().agenerate(prompts, stop, *args, **theirs)  # type: ignore[no-any-return]
        return await self._with(own).agenerate(prompts, stop, *args, **theirs)

    @override
    def _generate(
        self, prompts: list[str], stop: list[str] | None = None, run_manager: CallbackManagerForLLMRun | None = None, **kwargs: Any
    ) -> LLMResult:
        model = self._with(kwargs)
        told = run_manager.on_llm_new_token if run_manager and model.streaming and len(prompts) == 1 else None
        return repeated(lambda: model._answers(prompts, stop, told), model.max_retries)

    def _answers(self, prompts: list[str], stop: list[str] | None, told: Callable[[str], Any] | None) -> LLMResult:
        with translated():
            streams = self._open(prompts, stop)
            with limited(streams, self.timeout):
                for stream in streams:
                    for text in self._texts(stream):
                        if told:
                            told(text)
                return self._result([stream.completion for stream in streams])

    @override
    async def _agenerate(
        self, prompts: list[str], stop: list[str] | None = None, run_manager: AsyncCallbackManagerForLLMRun | None = None, **kwargs: Any
    ) -> LLMResult:
        model = self._with(kwargs)
        told = run_manager.on_llm_new_token if run_manager and model.streaming and len(prompts) == 1 else None
        return await arepeated(lambda: model._aanswers(prompts, stop, told), model.max_retries)

    async def _aanswers(self, prompts: list[str], stop: list[str] | None, told: Callable[[str], Any] | None) -> LLMResult:
        with translated():
            streams = await in_thread(self._open, prompts, stop)
            with limited(streams, self.timeout):
                for stream in streams:
                    async for text in self._atexts(stream):
                        if told:
                            await told(text)
                return await self._beside(self._result, [stream.completion for stream in streams])

    @override
    def _stream(
        self, prompt: str, stop: list[str] | None = None, run_manager: CallbackManagerForLLMRun | None = None, **kwargs: Any
    ) -> Iterator[GenerationChunk]:
        model = self._with(kwargs)
        with translated():
            streams = model._open([prompt], stop)
            with limited(streams, model.timeout):
                for text in model._texts(streams[0]):
                    chunk = GenerationChunk(text=text)
                    if run_manager:
                        run_manager.on_llm_new_token(text, chunk=chunk)
                    yield chunk
                last = model._info(streams[0].completion)
            yield GenerationChunk(text="", generation_info=last)

    @override
    async def _astream(
        self, prompt: str, stop: list[str] | None = None, run_manager: AsyncCallbackManagerForLLMRun | None = None, **kwargs: Any
    ) -> AsyncIterator[GenerationChunk]:
        model = self._with(kwargs)
        with translated():
            streams = await in_thread(model._open, [prompt], stop)
            with limited(streams, model.timeout):
                async for text in model._atexts(streams[0]):
                    chunk = GenerationChunk(text=text)
                    if run_manager:
                        await run_manager.on_llm_new_token(text, chunk=chunk)
                    yield chunk
                last = await model._beside(model._info, streams[0].completion)
            yield GenerationChunk(text="", generation_info=last)

    # -- requests --------------------------------------------------------------------------------------------------

    def _with(self, said: Mapping[str, Any]) -> Self:
        """This model, set to what one call says."""
        if not said:
            return self
        call = self._call(said)
        settings = {name: value for name, value in call.items() if name in type(self).model_fields}
        if self.apply_chat_template or call.get("apply_chat_template"):
            settings["template_kwargs"] = self._template_kwargs(call)
        if "response_format" in call:
            settings["format"] = call["response_format"]
        if settings.get("model") not in (None, self.model, getattr(self.engine, "name", None)):
            settings["engine"] = None
        made = self.model_copy(update={name: value for name, value in settings.items() if value is not None or name == "engine"})
        made._lease = self._lease
        return made

    def _open(self, prompts: list[str], stop: list[str] | None) -> list[Stream]:
        """All prompts handed to the engine, which computes them beside each other."""
        engine = self._engine()
        options: dict[str, Any] = {
            "sampling": self._sampling(stop, {}, self.top_logprobs if self.logprobs else None),
            "constraint": constraint((), response_format=self._form({})),
            "namespace": self.namespace,
            "template_kwargs": self._template_kwargs({}),
            "reuse": self.reuse,
            "adapter": self.adapter,
        }
        asked = [[Message("user", prompt)] if self.apply_chat_template else prompt for prompt in prompts]
        with ExitStack() as opened:
            streams = [opened.enter_context(engine.stream(each, **options)) for each in asked]
            opened.pop_all()
            return streams

    def _texts(self, stream: Stream) -> Iterator[str]:
        """The completion piece by piece; of a chat template's answer, what is not its thought."""
        if self.apply_chat_template:
            yield from (delta.text for delta in stream.deltas() if delta.kind == "text")
        else:
            yield from (chunk.text for chunk in stream if chunk.text)

    async def _atexts(self, stream: Stream) -> AsyncIterator[str]:
        if self.apply_chat_template:
            async for delta in stream.adeltas():
                if delta.kind == "text":
                    yield delta.text
        else:
            async for chunk in stream:
                if chunk.text:
                    yield chunk.text

    # -- answers ---------------------------------------------------------------------------------------------------

    async def _beside(self, call: Callable[[Any], T], done: Any) -> T:
        """The result of a call; in a thread where it tells probabilities, for which a server is asked the text of each token."""
        return await in_thread(call, done) if self.logprobs else call(done)

    def _result(self, done: list[Completion]) -> LLMResult:
        texts = [each.message.content if self.apply_chat_template else each.text for each in done]
        generations = [[Generation(text=text, generation_info=self._info(each))] for text, each in zip(texts, done)]
        usage = {name: sum(each.usage[name] for each in done) for name in _COUNTED}
        return LLMResult(
            generations=generations, llm_output={"token_usage": usage, "model_name": done[0].receipt.model if done else self.model}
        )

    def _info(self, done: Completion) -> dict[str, Any]:
        """What is known of a completion beside its text: finish reason, usage, receipt, thought, probabilities."""
        if done.cut and self._form({}) is not None:
            raise OutputCutError(done.finish_reason, done.receipt.completion_tokens, done.text)
        tell_shortened(done)
        if self.apply_chat_template:
            tell_empty(done)
        info = {**metadata_of(done, None), "usage_metadata": usage_of(done.receipt)}
        if self.apply_chat_template and done.message.reasoning:
            info["reasoning_content"] = done.message.reasoning
        if self.logprobs:
            info["logprobs"] = {"content": [self._likelihood(each) for each in done.logprobs]}
        return info

    def _likelihood(self, found: Logprob) -> dict[str, Any]:
        top = [self._likely(token, logprob) for token, logprob in found.top]
        return {**self._likely(found.token, found.logprob), "top_logprobs": top}

    def _likely(self, token: int, logprob: float) -> dict[str, Any]:
        return {"token": self._engine().tokenizer.decode([token]), "id": token, "logprob": logprob}

    # -- what LangChain asks about ---------------------------------------------------------------------------------

    @property
    def _llm_type(self) -> str:
        return "agentcache-llm"

    @override
    def _deciding(self) -> tuple[str, ...]:
        return (*super()._deciding(), "stop", "apply_chat_template", "logprobs", "top_logprobs")


def _divided(kwargs: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """(settings of one call, what BaseLLM.generate itself takes)."""
    theirs = {"callbacks", "tags", "metadata", "run_name", "run_id"}
    own = {name: value for name, value in kwargs.items() if name not in theirs}
    return own, {name: value for name, value in kwargs.items() if name in theirs}
