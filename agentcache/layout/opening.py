"""The start that a prompt shares with every continuation of its conversation. Asks for renderings, knows not how they are made."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ..types import Layout, Message, Span
from .plain import plain_message
from .request import Rendered
from .template import SENTINEL
from .tokenise import common_length

Turn = Message | Mapping[str, Any]
Render = Callable[[Sequence[Turn], bool], Layout]  # the messages, and whether an answer is asked for


def opening(messages: Sequence[Turn], render: Render) -> Layout:
    """The common start of the prompt that asks for an answer to `messages` and of the prompt with more after them."""
    last = plain_message(len(messages) - 1, messages[-1])
    if last["role"] != "assistant":  # it is answered next
        asked, continued = render(messages, True), render([*messages, Message("assistant", SENTINEL)], False)
    else:
        calls = last.get("tool_calls")
        name = calls[0].get("id") if calls else None
        behind = [Message("tool" if calls else "user", text, tool_call_id=name) for text in (SENTINEL, SENTINEL[::-1])]
        asked, continued = (render([*messages, one], True) for one in behind)
    return cut(asked, common_length(asked.ids, continued.ids))


def cut(whole: Layout, size: int) -> Layout:
    """The first `size` tokens of a prompt."""
    ends = whole.encoded.ends if isinstance(whole, Rendered) else ()
    covered = tuple(replace(span, stop=min(span.stop, size)) for span in whole.spans if span.start < size)
    shown = whole.text[: ends[size - 1]] if ends and size else ""
    return Layout(whole.ids[:size], covered, shown, min(whole.prefix_tokens, size), whole.differences, 0, whole.tokenised_chars)


def at_multiple(whole: Layout, alignment: int) -> tuple[Layout, Layout]:
    """The start of a prompt to compute and to pin, where nothing continues but from a multiple of `alignment` tokens.

    The first has one token more: of a prompt that is cached, the last token is computed.
    """
    end = max((span.stop for span in whole.spans if span.kind != "generation"), default=0)  # continuations are cut at ends of messages
    size = end // alignment * alignment
    pinned = cut(whole, size)
    if 0 < size == len(whole.ids):  # any token serves: nothing of it is admitted
        more = replace(pinned, ids=[*pinned.ids, pinned.ids[-1]], spans=(*pinned.spans, Span("generation", size, size + 1)))
        return more, pinned
    return cut(whole, size + 1), pinned
