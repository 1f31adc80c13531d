"""AgentCacheMiddleware: keeps what changes at the end of the prompt, and tells who does not. Knows nothing of tokens.

Place it last: it sees the request as it is sent.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Literal

from langchain.agents.middleware.types import AgentMiddleware, ModelRequest, ModelResponse
from langchain_core.callbacks import adispatch_custom_event, dispatch_custom_event
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage

from agentcache import Message

from .. import _pins
from .._caller_warnings import caller_warnings
from .._messages import control
from .._output import told_account
from .._tools import formatted, own_tools
from ..chat_models import ChatAgentCache
from ..errors import ModelInvalidRequestError
from .call_site import change, changed_by, prompt_state, selected_from, tool_name
from .conversations import Conversation, Conversations

EVENT = "agentcache.receipt"
WARM_S = 3600.0  # the prefix stays in memory for so long
_OPENING, _CLOSING = "<context>\n", "\n</context>"

Text = Callable[..., str | Awaitable[str | None] | None]
_CURES = {
    "system_message": "pass what changes as AgentCacheMiddleware(volatile=...), or keep it as it was",
    "tools": "pass AgentCacheMiddleware(tools=[...]) with all that any step may have: what a step lacks is masked",
    "messages": "shorten seldom and much at once, or keep it as it was",
}


class AgentCacheMiddleware(AgentMiddleware[Any, Any, Any]):
    """Keeps the prefix of an agent's prompts stable.

    Args:
        volatile: text that changes at every call, such as the time, made by a function of the agent's state, or of state and runtime, which
            may be async: the engine shows it at the very end of the prompt, as the user's, for one call. What the next step pays for it is
            this step's answer and tool results. A model of another class, such as a fallback, gets it as its last message.
        facts: text that changes now and then, such as a user's profile, made alike: becomes a message whenever it has changed.
        sticky_tools: tools stay in the prompt of a conversation once they were there; those that an outer middleware took away cannot be
            called, because decoding does not let them through. Those among which an LLMToolSelectorMiddleware chooses are there from the
            first step on.
        model, system_prompt, tools: with these the prefix is computed, and pinned, before the agent's first step. The tools are shown to
            every conversation from its first step on.
        on_change: "warn" names what of an earlier step's prompt was changed, and by which middleware; "ignore" does not.

    A subclass's own `before_agent` or `before_model` stands instead of the one for `model` or `facts`.

    Blocks of the system message after the last one that is tagged with `cache_control` are volatile, too, with or without this middleware.

    Each step's receipt is a custom event, "agentcache.receipt", and goes to `stream_mode="custom"`.
    """

    def __init__(
        self,
        *,
        volatile: Text | None = None,
        facts: Text | None = None,
        sticky_tools: bool = True,
        model: ChatAgentCache | None = None,
        system_prompt: str | None = None,
        tools: Sequence[Any] = (),
        on_change: Literal["warn", "ignore"] = "warn",
    ) -> None:
        super().__init__()
        if on_change not in ("warn", "ignore"):
            raise ModelInvalidRequestError(f"on_change={on_change!r}: must be 'warn' or 'ignore'")
        for name, given in (("volatile", volatile), ("facts", facts)):
            if given is not None and not callable(given):
                raise ModelInvalidRequestError(f"{name}={given!r:.200}: must be a function of state, or of state and runtime, or None")
        if not isinstance(model, (ChatAgentCache, type(None))):
            raise ModelInvalidRequestError(f"model={model!r:.200}: must be the agent's ChatAgentCache, or None")
        self.volatile, self.facts = volatile, facts
        self.sticky_tools = sticky_tools
        self.on_change = on_change
        self.tools = []  # none of our own: those given are the agent's
        self._prefix = (model, system_prompt or "", list(tools))
        self._conversations = Conversations({tool_name(tool): tool for tool in self._listed(tools)})
        self._warned: set[tuple[str, ...]] = set()
        # LangGraph runs each hook of a class as a step, even an idle one: this instance's class has those that it uses
        used = {"before_agent": model is not None, "before_model": facts is not None, "abefore_model": _is_async(facts)}
        self.__class__ = _hooked(type(self), [name for name, is_used in used.items() if is_used])

    @staticmethod
    def _listed(tools: Sequence[Any]) -> list[Any]:
        return [tool if hasattr(tool, "name") or isinstance(tool, dict) else formatted([tool])[0] for tool in tools]

    # -- hooks -----------------------------------------------------------------------------------------------------

    def _before_agent(self, state: Any, runtime: Any) -> dict[str, Any] | None:
        """Compute the prefix and pin it."""
        model, system, tools = self._prefix
        if model is not None:
            said = [Message("system", system)] if system else []
            _pins.PinRequest(model._engine(), said, own_tools(formatted(tools)), WARM_S, "agent", model._rendering({})).pin()
        return None

    def _before_model(self, state: Any, runtime: Any) -> dict[str, Any] | None:
        """Append facts that have changed."""
        return self._news(_text("facts", _made(self.facts, state, runtime)), state)

    async def _abefore_model(self, state: Any, runtime: Any) -> dict[str, Any] | None:
        """The same, awaited."""
        return self._news(_text("facts", await _awaited(_made(self.facts, state, runtime))), state)

    @staticmethod
    def _news(text: str | None, state: Any) -> dict[str, Any] | None:
        if not text:
            return None
        said = _OPENING + text + _CLOSING
        known = next((m.content for m in reversed(state["messages"]) if m.additional_kwargs.get("agentcache") == "facts"), None)
        return None if known == said else {"messages": [HumanMessage(said, additional_kwargs={"agentcache": "facts"})]}

    def wrap_model_call(self, request: ModelRequest[Any], handler: Callable[[ModelRequest[Any]], ModelResponse[Any]]) -> ModelResponse[Any]:
        """The request with what changes at its end, and its receipt told."""
        conversation = self._conversations.find(request)
        text = _text("volatile", _made(self.volatile, request.state, request.runtime))
        response = handler(self._arranged(request, text, conversation))
        for told in self._told(request, response, conversation):
            with suppress(RuntimeError):  # outside of a run there is no listener
                dispatch_custom_event(EVENT, told)
        return response

    async def awrap_model_call(
        self, request: ModelRequest[Any], handler: Callable[[ModelRequest[Any]], Awaitable[ModelResponse[Any]]]
    ) -> ModelResponse[Any]:
        """The same, awaited."""
        conversation = self._conversations.find(request)
        text = _text("volatile", await _awaited(_made(self.volatile, request.state, request.runtime)))
        response = await handler(self._arranged(request, text, conversation))
        for told in self._told(request, response, conversation):
            with suppress(RuntimeError):
                await adispatch_custom_event(EVENT, told)
        return response

    # -- arranging -------------------------------------------------------------------------------------------------

    def _arranged(self, request: ModelRequest[Any], text: str | None, conversation: Conversation) -> ModelRequest[Any]:
        if not isinstance(request.model, ChatAgentCache):
            return request.override(messages=[*request.messages, HumanMessage(_OPENING + text + _CLOSING)]) if text else request
        tools, forbidden = self._tools(request, conversation)
        arranged = request.override(tools=tools)
        named = self._compare(arranged.override(system_message=_stable(request.system_message)), conversation)
        said = {"forbidden_tools": forbidden, "volatile": text}
        more: dict[str, Any] = {name: value for name, value in said.items() if value}
        if named or self.on_change == "ignore":
            more["warn_missed"] = False  # said already, with the name of who did it, or not to be said
        return arranged.override(model_settings={**request.model_settings, **more}) if more else arranged

    def _tools(self, request: ModelRequest[Any], conversation: Conversation) -> tuple[list[Any], list[str]]:
        """(tools of the prompt, names of those that may not be called)"""
        if not self.sticky_tools:
            return request.tools, []
        wanted = {tool_name(tool): tool for tool in request.tools}
        shown = conversation.shown(wanted, lambda: selected_from(request, self))
        return list(shown.values()), [name for name in shown if name not in wanted]

    def _compare(self, request: ModelRequest[Any], conversation: Conversation) -> bool:
        """True if this step's prompt is not the last one's with new text after it; warns of it."""
        if self.on_change == "ignore":
            return False
        now = prompt_state(request)
        before = conversation.before(now)
        found = change(before, now) if before else None
        if found is None:
            return False
        field, what = found
        names = changed_by(request, field, self)
        sign = (field, *names)
        if sign in self._warned:
            return True
        self._warned.add(sign)
        who = ", ".join(names) or "an edit of the agent's state"
        caller_warnings.warn(f"{who} changed {what}. Everything after it is computed again at each such step: {_CURES[field]} (said once)")
        return True

    # -- telling ---------------------------------------------------------------------------------------------------

    def _told(self, request: ModelRequest[Any], response: Any, conversation: Conversation) -> list[dict[str, Any]]:
        results = [response] if isinstance(response, AIMessage) else list(getattr(response, "result", ()))
        conversation.answered(results)
        told = []
        for message in results:
            if not isinstance(message, AIMessage) or (account := told_account(message)) is None:
                continue
            told.append({"message_id": message.id, "usage": message.usage_metadata, **account})
            writer = getattr(request.runtime, "stream_writer", None)
            if writer is not None:
                writer({EVENT: told[-1]})
        return told


def _hooked(base: type[Any], hooks: Sequence[str]) -> type[Any]:
    """The class with these hooks, but for those it has of its own, under its own name: agents name their steps by it."""
    own = [name for name in hooks if not any(_is_own(base, hook) for hook in (name.removeprefix("a"), f"a{name.removeprefix('a')}"))]
    given = {name: getattr(base, f"_{name}") for name in own}
    return type(base.__name__, (base,), {"__module__": base.__module__, **given}) if own else base


def _is_own(base: type[Any], hook: str) -> bool:
    return getattr(base, hook) is not getattr(AgentMiddleware, hook)


def _is_async(function: Any) -> bool:
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(getattr(function, "__call__", None))  # noqa: B004


def _made(function: Text | None, state: Mapping[str, Any], runtime: Any) -> Any:
    """What the function gives for this state, and this runtime if it takes one."""
    if function is None:
        return None
    try:
        inspect.signature(function).bind(state, runtime)
    except (TypeError, ValueError):  # it takes the state only, or does not say what it takes
        return function(state)
    return function(state, runtime)


async def _awaited(made: Any) -> Any:
    return await made if inspect.isawaitable(made) else made


def _text(name: str, text: Any) -> str | None:
    """What the function given as `name` has returned."""
    if inspect.isawaitable(text):
        if inspect.iscoroutine(text):
            text.close()
        raise ModelInvalidRequestError(f"{name}: the function is async: call the agent with ainvoke or astream, or give a plain function")
    if not isinstance(text, (str, type(None))):
        raise ModelInvalidRequestError(f"{name}: the function returned {text!r:.200}; it must return text, or None for nothing")
    return text


def _stable(message: SystemMessage | None) -> SystemMessage | None:
    """What stays in front: the blocks up to the last tagged one."""
    if message is None or not isinstance(message.content, list):
        return message
    tagged = [number for number, block in enumerate(message.content) if control(block)]
    return message.model_copy(update={"content": message.content[: tagged[-1] + 1]}) if tagged else message
