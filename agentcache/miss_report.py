"""Report of misses: why a prompt did not go on from the one before it in its conversation, as lint says of a log. Computes nothing.

Compares once a request is answered: no first token waits for it. Lint is loaded with the first prompt that goes on from no other.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from .layout.request import Rendered
from .namespace_lru import NamespaceLRU
from .types import Layout, Missed

if TYPE_CHECKING:
    from .lint.open_conversations import OpenConversations

NAMESPACES = 64  # with conversations of their own
CONVERSATIONS = 32  # open ones of each: their last prompts
CHARS = 4 << 20  # of those of each
LEAST = 32  # tokens that had to be computed again: less is not worth a word


class Prompts:
    """The last prompts of a namespace: the first and the last of its only conversation, or those of all, for lint to compare."""

    def __init__(self) -> None:
        self._only: list[Rendered] = []
        self._compared: OpenConversations | None = None

    def grows(self, new: Rendered) -> bool:
        """Tell whether the only conversation goes on with this prompt, which is its last then."""
        if self._compared is not None or (self._only and not _continues(self._only[-1], new)):
            return False
        self._only[1:] = [new]
        return True

    @property
    def compared(self) -> OpenConversations:
        """The conversations as lint tells them apart."""
        if self._compared is None:
            from .lint.open_conversations import OpenConversations

            self._compared = OpenConversations(CONVERSATIONS, CHARS)
            for layout in self._only:
                self._compared.add(layout)
            self._only.clear()
        return self._compared


class MissReport:
    """The last prompts by namespace. Safe to use from many threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: NamespaceLRU[str, Prompts] = NamespaceLRU(NAMESPACES)
        self.forget = self._open.forget

    def prompts(self, namespace: str) -> Prompts:
        """The last prompts of a namespace."""
        if (known := self._open.get(namespace, "")) is None:
            self._open.put(namespace, "", known := Prompts())
        return known

    def explain(self, namespace: str, layout: Layout, computed: int = 1 << 62) -> Missed | None:
        """Say why a prompt, `computed` tokens of it, does not go on from its conversation's last one or begin as another. None: it does."""
        if not isinstance(layout, Rendered) or layout.request is None or not layout.encoded.ends:
            return None  # raw text, or a tokenizer that tells no offsets
        with self._lock:
            prompts = self.prompts(namespace)
            pair = None if prompts.grows(layout) else prompts.compared.add(layout)
        return pair.missed(LEAST, computed) if pair else None


def _continues(old: Rendered, new: Rendered) -> bool:
    """Tell whether a prompt begins with an earlier one, but for what asked for an answer there."""
    whole = len(old.encoded.ids)
    stable = whole - sum(span.stop - span.start for span in old.spans if span.kind == "generation" and span.start < whole)
    return new.encoded.ids[:stable] == old.encoded.ids[:stable]
