"""What only a chat model is set to and asked about: tools, prompts of messages, LangChain's profile. Answers nothing."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal, cast

from langchain_core.language_models import ModelProfile
from langchain_core.language_models.chat_models import BaseChatModel
from langchain_core.messages import BaseMessage, HumanMessage
from typing_extensions import Self, override

from agentcache import Engine, Message, ModelFacts, ToolGroup
from agentcache import errors as own

from ._caller_warnings import tell_once
from ._messages import converted
from ._names import beside
from ._settings import SAMPLING, Settings
from ._tools import ToolLike, formatted, own_tools
from .errors import ModelInvalidRequestError, translated

_RENDERING = ("namespace", "group", "tools_order", "adapter")
_show_names: weakref.WeakKeyDictionary[Engine, bool] = weakref.WeakKeyDictionary()


class ChatSettings(Settings, BaseChatModel):
    """The fields of ChatAgentCache."""

    strict: bool = False
    tools_order: Literal["given", "sorted", "sticky"] = "given"
    group: str | None = None

    ls_model_type: ClassVar[Literal["chat", "llm"]] = "chat"
    of_calls: ClassVar[set[str]] = {
        *Settings.of_calls,
        *("tools", "tool_choice", "strict", "parallel_tool_calls", "forbidden_tools", "volatile", "group", "tools_order"),
        *("cache_control", "prompt_cache_key", "session", "show_schema", "warn_missed"),
    }

    @classmethod
    def from_huggingface(cls, chat: Any, **kwargs: Any) -> Self:
        """The model of a ChatHuggingFace over a local pipeline, with its settings and its pipeline's."""
        llm = getattr(chat, "llm", chat)
        if getattr(llm, "pipeline", None) is None:
            raise ModelInvalidRequestError(
                f"from_huggingface({type(chat).__name__} over {type(llm).__name__}): its model is not in this process; "
                "use one over a HuggingFacePipeline, or ChatAgentCache(model=...)"
            )
        said = {name: value for name in (*SAMPLING, "stop") if (value := getattr(chat, name, None)) is not None}
        shown, given = (getattr(each, "tokenizer", None) for each in (chat, llm.pipeline))  # the first one's template writes the prompts
        if isinstance(form := getattr(shown, "chat_template", None), str) and form != getattr(given, "chat_template", None):
            said["chat_template"] = form
        return cls.from_pipeline(llm, **beside(kwargs, said))

    @override
    def _learn_profile(self) -> None:
        self.profile = self._resolve_model_profile()

    @override
    def _resolve_model_profile(self) -> ModelProfile | None:
        if self.engine is not None:
            return self._profile_of(self.engine)
        facts = ModelFacts()  # a server's name is no file's here; load() asks the server
        if self.base_url is None:
            facts = ModelFacts.of_files(self.model, revision=self.revision, chat_template=self.chat_template)
        return _profile(self.model, facts, self.num_ctx)

    def _profile_of(self, engine: Engine) -> ModelProfile:
        with translated():
            facts = ModelFacts.of_engine(engine, chat_template=self.chat_template)
            return _profile(self.model or str(engine.name), facts, self.num_ctx)

    @override
    def load(self) -> Self:
        """Load the weights, or ask the server, now instead of at the first request. The profile then tells what they tell."""
        guessed = self._resolve_model_profile() or {}
        given = {name: value for name, value in (self.profile or {}).items() if value != guessed.get(name)}
        self.profile = cast("ModelProfile", {**self._profile_of(self._engine()), **given})
        return self

    def warm(self, system: str | None = None, tools: Sequence[ToolLike] = (), *, name: str | None = None) -> ToolGroup:
        """Compute what every conversation with this system prompt and these tools begins with, and pin it: under `name`, else under
        the `group` that this model is set to. Warming a name again moves its pins.
        """
        rendering = {each: value for each, value in self._rendering({}).items() if each != "group"}
        with translated():
            said = [Message("system", system)] if system else []
            return self._engine().pin(said, own_tools(formatted(tools)), name=name or self.group, **rendering)

    # -- what LangChain asks about ---------------------------------------------------------------------------------

    @property
    def _llm_type(self) -> str:
        return "agentcache-chat"

    @property
    def _identifying_params(self) -> dict[str, Any]:
        return {**super()._identifying_params, "strict": self.strict}

    @override
    def _deciding(self) -> tuple[str, ...]:
        return (*super()._deciding(), "strict", "group", "tools_order")

    @override
    def _get_invocation_params(self, stop: list[str] | None = None, **kwargs: Any) -> dict[str, Any]:
        return super()._get_invocation_params(stop=self.stop if stop is None else stop, **kwargs)

    @override
    def _combine_llm_outputs(self, llm_outputs: list[dict[str, Any] | None]) -> dict[str, Any]:
        """What `generate` tells of several answers: their tokens together. Streamed ones tell theirs in `usage_metadata` only."""
        told = [each for each in llm_outputs if each]
        used = sum((Counter(each["token_usage"]) for each in told), Counter[str]())
        return {**told[-1], "token_usage": dict(used)} if told else {}

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

    def _rendering(self, kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """What decides the tokens of a prompt besides messages and tools: the same for a request and for a pin of its start."""
        said = {name: kwargs.get(name, getattr(self, name)) for name in _RENDERING}
        return {**said, "template_kwargs": self._template_kwargs(kwargs)}


def _profile(model: str, facts: ModelFacts, context: int | None) -> ModelProfile:
    """The profile; what cannot be known without downloading something is left out, not guessed."""
    limit = min((each for each in (context, facts.context_tokens) if each), default=None)
    told = {
        **dict.fromkeys(("max_input_tokens", "max_output_tokens"), limit),
        "reasoning_output": facts.reasoning,
        "tool_calling": facts.tool_calling,
        "mid_conversation_system_messages": facts.later_system,
    }
    known: dict[str, Any] = {
        "name": model,
        "open_weights": True,
        **dict.fromkeys(("text_inputs", "text_outputs", "temperature"), True),
        **dict.fromkeys(("image_inputs", "audio_inputs", "pdf_inputs", "video_inputs", "mid_conversation_tools"), False),
        **dict.fromkeys(("tool_calling", "tool_choice", "tool_call_streaming", "structured_output"), True),
        **{name: value for name, value in told.items() if value is not None},
    }
    return cast("ModelProfile", known)


def tell_names(engine: Engine, messages: Sequence[BaseMessage]) -> None:
    """Warn, once, of names of users that the chat template does not show."""
    for index, message in enumerate(messages):
        if isinstance(message, HumanMessage) and message.name and not _shown(engine):
            shown = f"messages[{index}]: HumanMessage(name={message.name!r}): the model's chat template shows no names of users"
            tell_once("name", "user", f"{shown}; write it into the text where the model shall read it")


def _shown(engine: Engine) -> bool:
    """Whether a user's name reaches the prompt."""
    if engine not in _show_names:
        render = engine.renderer.render
        texts = [render([Message("user", "x", name=name)], namespace="names").text for name in (None, "zname")]
        _show_names[engine] = texts[0] != texts[1]
    return _show_names[engine]
