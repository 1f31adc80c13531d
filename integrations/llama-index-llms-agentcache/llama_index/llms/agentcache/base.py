"""AgentCacheLLM: LlamaIndex's endpoints over agentcache's Engine. Translates and asks; never tokenises, never decides what is reused.

chat(messages, tools=...)
   | translate, tools, requests    LlamaIndex's words into an Ask
   | host                          the engine; for coroutines, threads that lay out prompts in place of the event loop
   | answer                        its pieces into ChatResponses, with usage and receipt in `raw`
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

from llama_index.core.base.llms.generic_utils import prompt_to_messages
from llama_index.core.base.llms.types import (
    ChatMessage,
    ChatResponse,
    ChatResponseAsyncGen,
    ChatResponseGen,
    CompletionResponse,
    CompletionResponseAsyncGen,
    CompletionResponseGen,
    LLMMetadata,
    LogProb,
    MessageRole,
    ToolCallBlock,
)
from llama_index.core.bridge.pydantic import Field, PrivateAttr, ValidationError
from llama_index.core.instrumentation import get_dispatcher
from llama_index.core.llms.callbacks import llm_chat_callback, llm_completion_callback
from llama_index.core.llms.llm import ToolSelection

from agentcache import Completion, Engine, EngineLease, Message, RemoteEngine, Stream, foreign_settings
from agentcache.errors import ConfigError, MessageError

from . import prompts, requests
from .answer import Answer, alast, as_completion, check_called, last, likeliest
from .cache_points import pin_points
from .contexts import with_session
from .events import ReceiptEvent
from .host import Host, count
from .requests import Ask
from .saved_args import SERVER, SavedArgs, name_of, remade, renamed, saved_args
from .structured import ObjectLLM
from .tools import Offer, Schema, offer, tool_choice
from .translate import LateSystem, arguments_of, cache_points, kept_stops, to_messages

if TYPE_CHECKING:
    from llama_index.core.tools import BaseTool

dispatcher = get_dispatcher(__name__)

MAX_TOKENS = 512


class AgentCacheLLM(ObjectLLM):
    """A local chat model that computes only the tokens it has not computed before, for LlamaIndex.

    Examples:
        ```python
        from llama_index.core.agent.workflow import FunctionAgent
        from llama_index.llms.agentcache import AgentCacheLLM

        llm = AgentCacheLLM(model="Qwen/Qwen3-0.6B")
        agent = FunctionAgent(tools=[search, add], llm=llm, system_prompt="You look things up.")
        print(await agent.run("What is two and two?"))
        ```
    """

    model: str = Field(default="", description="Hugging Face id or folder of the model, or what the given engine calls it.")
    temperature: float = Field(default=0.0, ge=0.0, description="0 takes the likeliest token.")
    max_tokens: int = Field(default=MAX_TOKENS, gt=0, description="Longest answer, in tokens; shortened to the room there is.")
    stop: list[str] = Field(default_factory=list, description="Texts that end an answer; they may span tokens.")
    namespace: str = Field(default="default", description="Nothing is shared between namespaces.")
    constrain: bool = Field(default=True, description="Hold tool calls to their schemas, if these can be enforced.")
    late_system: LateSystem = Field(default="user", description="Role of system messages after the first turn.")
    context_window: int | None = Field(default=None, gt=0, description="Tell LlamaIndex of a smaller context than the model's.")
    additional_kwargs: dict[str, Any] = Field(default_factory=dict, description="Further options of every request; see the README.")

    _host: Host = PrivateAttr()
    _saved_args: SavedArgs = PrivateAttr()
    _superset: tuple[Schema, ...] = PrivateAttr(default=())

    def __init__(self, model: Any = None, tokenizer: Any = None, *, engine: Engine | None = None, **options: Any) -> None:
        """model: a Hugging Face id, a folder, or a loaded model with its tokenizer; or `engine`, which others may use, too.

        `base_url` and `api_key` of an `agentcache serve` instead: its model, `model` being one of its names.
        Options that are no fields go to the Engine: device, dtype, weights, load_in_4bit, store, memory_bytes and so on. Names of
        HuggingFaceLLM and Ollama are understood where they mean the same.
        """
        model, options = renamed(model, options, type(self).model_fields)
        mine = {name: value for name in list(options) if name in type(self).model_fields and (value := options.pop(name)) is not None}
        how = saved_args(model, tokenizer, engine, options)
        requests.check_settings(mine.get("additional_kwargs") or {})  # before weights are loaded
        try:
            super().__init__(**{**mine, "model": engine.name if engine else name_of(model)})
        except ValidationError as error:
            raise ConfigError(foreign_settings.in_words(error)) from error
        self._saved_args = how
        lease = EngineLease()
        self._host = Host(engine or _shared(model, tokenizer, lease, options), lease)

    @classmethod
    def class_name(cls) -> str:
        return "AgentCache_LLM"

    @property
    def engine(self) -> Engine:
        """The engine of this model, to be shared: `AgentCacheLLM(engine=llm.engine)`."""
        return self._host.engine

    @property
    def metadata(self) -> LLMMetadata:
        asked, longest = self.context_window, self.engine.model.context_tokens
        try:
            return LLMMetadata(
                context_window=longest if isinstance(asked, int) and asked > longest else asked or longest,
                num_output=requests.sampling({"max_tokens": self.max_tokens}, {}).max_tokens,
                is_chat_model=prompts.of_text(self) is None,  # otherwise LlamaIndex asks by complete()
                is_function_calling_model=prompts.of_messages(self) is None,
                model_name=self.model or self.engine.name,
            )
        except ValidationError as error:  # of what was assigned
            raise ConfigError(foreign_settings.in_words(error)) from error

    def count(self, text: str) -> list[int]:
        """The model's own token ids of a text: `Settings.tokenizer = llm.count` makes LlamaIndex count as this model does."""
        return count(self.engine, text)

    def with_superset(self, tools: Sequence[BaseTool | Mapping[str, Any]]) -> AgentCacheLLM:
        """This model (on the same engine) with `tools` in every prompt; a call's own tools are a mask over them.

        For agents whose tools change from step to step or that should share one tool group. Decoding is then constrained. Closing it ends
        its own requests and leaves this model open; closing this model closes it.
        """
        self._host.check_open()
        other = self.model_copy()
        other._superset = self._host.translator.schemas(tools)
        other.offered(())  # names what is wrong with it
        return other

    def offered(self, tools: Sequence[BaseTool | Mapping[str, Any]]) -> Offer:
        """What a request with these tools shows, and what it allows."""
        return offer(self._host.translator.schemas(tools), self._superset)

    def close(self) -> None:
        """End running requests, let cache points go; the engine is closed too, unless it was given."""
        self._host.close()

    def __enter__(self) -> AgentCacheLLM:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __copy__(self) -> AgentCacheLLM:
        """A copy, such as of `model_copy`, shares the engine. Closing it leaves this model open; closing this model closes it."""
        other = super().__copy__()
        other._host = self._host.view()
        return other

    def __deepcopy__(self, memo: dict[int, Any] | None = None) -> AgentCacheLLM:
        return self.model_copy()

    def to_dict(self, **kwargs: Any) -> dict[str, Any]:
        """The settings, with what the Engine was made with; `from_dict` loads the same again, or says what must be given to it."""
        return {**super().to_dict(**kwargs), **self._saved_args.written(prompts.not_written_down(self))}

    @classmethod
    def from_dict(cls, data: dict[str, Any], **kwargs: Any) -> AgentCacheLLM:
        return super().from_dict(remade(data, kwargs))

    def __reduce__(self) -> tuple[Any, ...]:
        self._saved_args.check_pickled(self.model)
        fields = {name: getattr(self, name) for name in type(self).model_fields if name != "callback_manager"}
        return _unpickled, (type(self), {**fields, **self._saved_args.plain}, self._superset)

    # -- one request -----------------------------------------------------------------------------------------------

    def _ask(self, messages: Sequence[ChatMessage] | str, given: Mapping[str, Any]) -> tuple[Ask, Answer]:
        """The request that a call means, and what will make responses of its chunks."""
        self._host.check_open()
        settings, own = requests.split(self.additional_kwargs), requests.split(given)
        kept = () if "stop" in own[0] else kept_stops(messages)  # a call's own stop strings replace all others
        said, options = ({**every, **one} for every, one in zip(settings[:2], own[:2]))
        defaults = {"temperature": self.temperature, "max_tokens": self.max_tokens, "stop": self.stop}
        tools = given.get("tools") or ()
        offered = Offer(self._host.translator.schemas(tools)) if isinstance(messages, str) else self.offered(tools)
        ask = Ask(
            prompt=self._prompt(messages, offered),
            offer=offered,
            choice=tool_choice(given.get("tool_choice"), bool(given.get("tool_required")), offered),
            parallel=given.get("allow_parallel_tool_calls") is not False,
            constrain=self.constrain,
            sampling=requests.sampling(defaults, said, kept),
            options={"namespace": self.namespace, **options},
            form=own[2] or settings[2],  # an answer has one form
        )
        return ask, Answer(ask.calls, ask.parallel)

    def _prompt(self, messages: Sequence[ChatMessage] | str, offered: Offer) -> Sequence[Message] | str:
        """Messages for the engine, or the whole prompt as a text where there is one: given, or written by the user's own function."""
        if isinstance(messages, str):
            return messages
        turns = to_messages(messages, self.late_system)  # refuses what is no message, for that function too
        write = prompts.of_messages(self)
        return turns if write is None else prompts.written(write, messages, Offer(offered.shown).callable_names)

    def _open(self, ask: Ask, messages: Sequence[ChatMessage] | str, answer: Answer) -> Stream:
        """Start it; called where waiting is allowed, because a cache point may have to be computed first."""
        if isinstance(ask.prompt, str) and not isinstance(messages, str) and cache_points(messages):
            answer.notes = ("cache points are not pinned: messages_to_prompt writes the prompt",)
        elif not isinstance(messages, str):
            answer.notes = pin_points(self._host, messages, ask, self.late_system)
        stream, notes = ask.open(self.engine)
        answer.notes += notes
        return stream

    def _responses(self, messages: Sequence[ChatMessage] | str, given: Mapping[str, Any]) -> ChatResponseGen:
        ask, answer = self._ask(messages, given)
        with self._host.running(lambda: self._open(ask, messages, answer)) as stream:
            for delta in stream.deltas():
                if (response := answer.feed(delta.kind, delta.text)) is not None:
                    yield response
            yield self._finish(ask, answer, stream.completion, likeliest(stream.completion, self.engine.tokenizer.decode))

    async def _aresponses(self, messages: Sequence[ChatMessage] | str, given: Mapping[str, Any]) -> ChatResponseAsyncGen:
        await self._host.hints.look()
        given = await with_session(given, self.additional_kwargs)
        ask, answer = self._ask(messages, given)
        pieces = self._host.pieces(lambda: self._open(ask, messages, answer))
        try:
            async for piece in pieces:
                if isinstance(piece, Completion):  # a server is asked the text of each token
                    likely = await asyncio.to_thread(likeliest, piece, self.engine.tokenizer.decode) if piece.logprobs else None
                    yield self._finish(ask, answer, piece, likely)
                elif (response := answer.feed(piece.kind, piece.text)) is not None:
                    yield response
        finally:
            await pieces.aclose()

    def _finish(self, ask: Ask, answer: Answer, completion: Completion, likely: list[list[LogProb]] | None) -> ChatResponse:
        response = answer.finish(completion)
        assert isinstance(response.raw, dict)
        response.logprobs = likely
        self._host.hints.tell(response.raw, completion, ask.prompt, Offer(ask.offer.shown).callable_names)
        said = completion.text if isinstance(ask.prompt, str) else completion.message
        dispatcher.event(ReceiptEvent(receipt=response.raw, prompt=ask.prompt, tools=ask.offer.shown, answer=said))
        return response

    # -- chat ------------------------------------------------------------------------------------------------------

    @llm_chat_callback()
    def chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponse:
        return last(self._responses(messages, kwargs))

    @llm_chat_callback()
    def stream_chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponseGen:
        yield from self._responses(messages, kwargs)

    @llm_chat_callback()
    async def achat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponse:
        return await alast(self._aresponses(messages, kwargs))

    @llm_chat_callback()
    async def astream_chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponseAsyncGen:
        return self._aresponses(messages, kwargs)

    # -- completion ------------------------------------------------------------------------------------------------
    # A prompt becomes a message after the system prompt, unless `formatted` says that it is a whole one, or completion_to_prompt writes it.

    @llm_completion_callback()
    def complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponse:
        return as_completion(last(self._responses(self._turns(prompt, formatted), kwargs)))

    @llm_completion_callback()
    def stream_complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponseGen:
        yield from map(as_completion, self._responses(self._turns(prompt, formatted), kwargs))

    @llm_completion_callback()
    async def acomplete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponse:
        return as_completion(await alast(self._aresponses(self._turns(prompt, formatted), kwargs)))

    @llm_completion_callback()
    async def astream_complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponseAsyncGen:
        turns = self._turns(prompt, formatted)

        async def responses() -> CompletionResponseAsyncGen:
            async for response in self._aresponses(turns, kwargs):
                yield as_completion(response)

        return responses()

    def _turns(self, prompt: str, formatted: bool) -> list[ChatMessage] | str:
        if formatted:
            return prompt
        if (write := prompts.of_text(self)) is not None:
            return self._extend_prompt(prompts.written(write, prompt))
        return self._extend_messages(list(prompt_to_messages(prompt)))

    # -- tools -----------------------------------------------------------------------------------------------------

    def _prepare_chat_with_tools(
        self,
        tools: Sequence[BaseTool],
        user_msg: str | ChatMessage | None = None,
        chat_history: list[ChatMessage] | None = None,
        verbose: bool = False,
        allow_parallel_tool_calls: bool = False,
        tool_required: bool = False,
        **kwargs: Any,
    ) -> dict[str, Any]:
        """The arguments of `chat` for a conversation with tools."""
        if isinstance(chat_history, (str, Mapping)) or not isinstance(user_msg, (str, ChatMessage, type(None))):
            raise MessageError(
                f"chat_history={chat_history!r:.100}, user_msg={user_msg!r:.100}: give a list of ChatMessage, and a text or a ChatMessage"
            )
        messages = list(chat_history or [])
        if user_msg is not None:
            messages.append(ChatMessage(role=MessageRole.USER, content=user_msg) if isinstance(user_msg, str) else user_msg)
        return {
            "messages": messages,
            "tools": list(self._host.translator.schemas(tools or ())),
            "tool_required": tool_required,
            "allow_parallel_tool_calls": allow_parallel_tool_calls,
            **kwargs,
        }

    def get_tool_calls_from_response(
        self, response: ChatResponse, error_on_no_tool_call: bool = True, **kwargs: Any
    ) -> list[ToolSelection]:
        """The calls in a response's message; NoToolCallError also where the only call was cut short: agents would take it for an answer."""
        calls = [block for block in response.message.blocks if isinstance(block, ToolCallBlock)]
        if not calls:
            check_called(response, error_on_no_tool_call)
        return [ToolSelection(tool_id=call.tool_call_id or "", tool_name=call.tool_name, tool_kwargs=arguments_of(call)) for call in calls]


def _shared(model: Any, tokenizer: Any, lease: EngineLease, options: Mapping[str, Any]) -> Engine:
    """The engine of this process, or the one that a server runs."""
    if options.get("base_url") is not None:
        return cast("Engine", RemoteEngine.shared(model, lease=lease, **options))
    return Engine.shared(model, tokenizer, lease=lease, **{name: value for name, value in options.items() if name not in SERVER})


def _unpickled(kind: type[AgentCacheLLM], options: dict[str, Any], superset: tuple[Schema, ...]) -> AgentCacheLLM:
    made = kind(**options)
    made._superset = superset
    return made
