"""The fix for each cause, in one sentence that names the writer. Finds nothing."""

from __future__ import annotations

from .values import Cause

_FIXES = {
    Cause.CLOCK: "Move the time out of {writer}: say it in the newest message, round it to the day, or let a tool tell it.",
    Cause.ID: "Take the id out of {writer}, or make it once for the conversation and keep it.",
    Cause.COUNTER: "Move the number out of {writer} to the newest message.",
    Cause.ORDER: "Give {writer} in one fixed order: sort it by name or by call before it is sent.",
    Cause.ARGUMENTS: "Send the arguments in {writer} as the text that the model wrote: keep the string, do not parse and dump it.",
    Cause.REASONING: "Send {writer} back with its reasoning, or without it from the first time on; do not take it out later.",
    Cause.EDITED: "Leave {writer} as it was first sent: bound or shorten it before its first use, and put new text after the history.",
    Cause.SUMMARY: "Do not rewrite {writer} at every step: summarise seldom, in large pieces, and keep a summary unchanged until the next.",
    Cause.TRUNCATED: "Drop old messages seldom and many at once, instead of a few at every step, so that the history before {writer} stays the same.",  # noqa: E501
    Cause.TOOLS_MOVED: "Use a chat template that keeps the tools in one place: {writer} moves them with the newest user message.",
    Cause.TOOL_SET: "Keep one list of tools for the whole conversation ({writer} changed it): add new tools at its end and forbid instead of removing.",  # noqa: E501
    Cause.STATE: "Move what changes out of {writer} into the newest message, and keep the system text as it was.",
    Cause.TEMPLATE: "Use a chat template that is prefix-preserving: {writer} renders earlier messages anew; `agentcache lint --template` shows where.",  # noqa: E501
    Cause.BOUNDARY: "End prompts where a token ends: without trailing white space, or after a special token ({writer}).",
}
_TEMPLATE_FIXES = {
    Cause.REASONING: "Use a template, or an option of it, that keeps the reasoning of earlier turns: {writer} takes it out.",
}
_RESULTS = "Put the results before {writer} in the order of their calls, whichever came first."
_KEYS = "Write the JSON of {writer} with its keys in one fixed order."
_TAIL = "Keep text for one request only out of the history, or keep it for good: {writer} stands where it was taken out again."
_IDS = "Keep the ids of tool calls as they were first sent ({writer}), or number them by position."


def fix_of(cause: Cause, writer: str, where: str, detail: str) -> str:
    """The sentence for one finding."""
    text = _FIXES[cause]
    if writer == "template":
        text = _TEMPLATE_FIXES.get(cause, text)
    elif cause is Cause.ORDER and "keys" in detail:
        text = _KEYS
    elif cause is Cause.ORDER and where == "history" and "messages" in detail:
        text = _RESULTS
    elif cause is Cause.ID and "tool calls" in detail:
        text = _IDS
    elif cause is Cause.EDITED and "taken out again" in detail:
        text = _TAIL
    return text.format(writer="the list of tools" if where == "tools" and cause is Cause.ORDER and "keys" not in detail else writer)
