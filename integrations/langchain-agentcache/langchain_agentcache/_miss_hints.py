"""What a user should change, said once per cause: why a prompt was computed again, and what in LangChain keeps it. Changes no request.

The engine's receipt knows cause and cure in words for everybody (`missed`); here stand LangChain's names.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from agentcache import MissWarnings

from ._caller_warnings import tell_once

SELDOM = ("truncated history", "front summary")  # a history that is shortened seldom and much at once is as it should be
_warnings = MissWarnings(SELDOM)

_VOLATILE = (
    "AgentCacheMiddleware(volatile=...) shows what changes at the end of the prompt; invoke(..., volatile=...) does without an agent"
)
_SHORTEN = "trim_messages and SummarizationMiddleware with a high trigger and a small keep shorten seldom, and much at once"
_AS_IT_WAS = "Send the AIMessage back as it came, with tool_calls and additional_kwargs: splicing finds its tokens again"
HINTS = {
    **dict.fromkeys(("clock", "id", "counter", "changed system text"), _VOLATILE),
    **dict.fromkeys(SELDOM, _SHORTEN),
    **dict.fromkeys(("re-serialised arguments", "dropped reasoning"), _AS_IT_WAS),
    "changed tool set": "AgentCacheMiddleware(tools=[...]) keeps all tools in the prompt and masks; tool_choice={'type': 'allowed_tools', "
    "...} does for one call",
    "order": "Bind tools in one order, or set tools_order='sorted'; add results in the order of their calls",
    "edited history": "AgentCacheMiddleware names the middleware that edits; ContextEditingMiddleware with a high trigger edits seldom",
}


def hinted(missed: Mapping[str, Any]) -> dict[str, Any]:
    """Cause and cure of a receipt, with LangChain's names for the cure where there are some."""
    in_system = missed["cause"] == "order" and missed["writer"] == "system"  # neither tools nor results: retrieved passages, mostly
    hint = _VOLATILE if in_system else HINTS.get(str(missed["cause"]))
    return {**missed, "hint": hint} if hint else dict(missed)


def tell_missed(missed: Mapping[str, Any] | None) -> None:
    """Warn of a request that did not go on from the one before it, at the caller's line, where this is the first of its cause."""
    text = _warnings.text(hinted(missed) if missed else None)
    if missed and text:
        tell_once("missed", missed["cause"], f"{text} response_metadata['agentcache']['missed'] tells it of every answer")
