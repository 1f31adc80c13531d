"""Report of misses: why a prompt did not go on from the one before it in its conversation, as lint says of a log. Computes nothing.

Holds the last prompt of each open conversation, and compares once a request is answered: no first token waits for it.
"""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any, NamedTuple

from .layout.tail import Rendered
from .lint.judge import judge
from .lint.templated import Tokens, tokens_of
from .lint.tracks import Tracks
from .lint.values import Call, Request, Said, Shown
from .namespace_lru import Covering
from .types import Layout, Missed

NAMESPACES = 64  # whose conversations are kept apart
CONVERSATIONS = 32  # open ones of each: their last prompts
CHARS = 4 << 20  # of those of each
LEAST = 32  # tokens that had to be computed again: less is not worth a word


class _Open(NamedTuple):
    """The open conversations of a namespace, and their last prompts."""

    tracks: Tracks
    prompts: dict[str, Tokens]

    @classmethod
    def new(cls) -> _Open:
        """None so far."""
        prompts: dict[str, Tokens] = {}
        return cls(Tracks(CONVERSATIONS, CHARS, lambda name: prompts.pop(name, None)), prompts)


class MissReport:
    """The last prompts by namespace. Safe to use from many threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: OrderedDict[str, _Open] = OrderedDict()
        self._number = 0

    def forget(self, deletion: Covering) -> None:
        """Forget the prompts of namespaces of which something was deleted on purpose."""
        with self._lock:
            for known in [name for name in self._open if deletion.covers(name, 0.0)]:
                del self._open[known]

    def explain(self, namespace: str, layout: Layout) -> Missed | None:
        """Say why this prompt does not go on from the last one of its conversation. None: it does, or little was lost."""
        if not isinstance(layout, Rendered) or layout.request is None or not layout.encoded.ends:
            return None  # raw text, or a tokenizer that tells no offsets
        new = tokens_of(layout.encoded, layout.spans)
        with self._lock:
            self._number += 1
            now = _request(self._number, layout.request)
            known = self._open.pop(namespace, None)
            tracks, prompts = self._open[namespace] = known if known is not None else _Open.new()
            track, was = tracks.place(now)
            old = prompts.get(track.name)
            prompts[track.name] = new
            while len(self._open) > NAMESPACES:
                self._open.popitem(last=False)
        if was is None or old is None or new.encoded.ids[: old.stable] == old.encoded.ids[: old.stable]:
            return None
        found = judge(was, now, old, new, "", redact=True).finding
        if found is None or found.cost_tokens < LEAST:
            return None
        return Missed(str(found.cause), found.writer, found.token, found.char, found.cost_tokens, found.fix)


def _request(number: int, rendered: Any) -> Request:
    """A rendered prompt in lint's words: canonical, without what was there for one prompt only."""
    said = [_said(turn.source, turn.data) for turn in rendered.turns]
    leading = next((at for at, one in enumerate(said) if one.role != "system"), len(said))
    tools = tuple(
        Shown(str(tool.get("function", tool).get("name")), json.dumps(tool, ensure_ascii=False, default=repr))
        for tool in rendered.tools.schemas
    )
    return Request(number, 0, None, tuple(said[:leading]), tools, tuple(said[leading:]))


def _said(source: int, message: Mapping[str, Any]) -> Said:
    calls = tuple(
        Call(call["function"]["name"], json.dumps(call["function"]["arguments"], ensure_ascii=False, default=repr), call.get("id"))
        for call in message.get("tool_calls", ())
    )
    return Said(
        message["role"],
        str(message.get("content") or ""),
        str(message.get("reasoning_content") or ""),
        calls,
        message.get("tool_call_id"),
        message.get("name"),
        source,
    )
