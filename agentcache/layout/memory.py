"""The memory of a Renderer: renderings with their ids, and the model's own ids of messages. Knows nothing of templates.

Both tables are bounded, and a namespace never sees the records of another.
"""

from __future__ import annotations

import hashlib
import threading
from collections import OrderedDict
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Protocol

from ..namespace_lru import Covering, NamespaceLRU
from .canonical import Turn
from .tokenise import EMPTY, Encoded, common_length

ENTRIES = 256  # renderings per namespace: some more than agents that plausibly alternate on one device
CHARS = 16_000_000  # of all renderings: of one byte, and 12 bytes a token, some 60 to 110 MB at most
SPLICES = 16_384  # remembered messages: 30 steps each of 500 episodes
GENERATED = 8_000_000  # ids held by them, those of their prompts too: some 16 bytes each, with the text


class Kept(Protocol):
    """A store of the model's own ids of messages beyond one process."""

    def learn(self, namespace: str, key: bytes, ids: Sequence[int]) -> None: ...

    def generated(self, namespace: str, key: bytes) -> tuple[int, ...]: ...


@dataclass(frozen=True, slots=True)
class Generated:
    """The ids that the model produced after a prompt, for the message they became."""

    prompt: Encoded
    ids: tuple[int, ...]
    made: float = 0.0  # time.time(); 0 if unknown


def chain(root: bytes, turns: Sequence[Turn]) -> list[bytes]:
    """keys[i] names the first i messages as they are in canonical form, keys[0] what stands before all messages."""
    return list(accumulate(turns, link, initial=root))


def link(parent: bytes, turn: Turn) -> bytes:
    """The key of a history that ends in `turn`. A call id is a position by now: it tells which call a result answers."""
    return hashlib.blake2b(
        parent + turn.digest + str(turn.data.get("tool_call_id") or "").encode("utf-8", "surrogatepass"), digest_size=16
    ).digest()


class Memory:
    """Renderings and generated ids by namespace; safe to use from many threads.

    generated: the model's own ids, by the key of the history that ends in their message. absent: names that no earlier process left.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._renderings: OrderedDict[tuple[str, bytes], Encoded] = OrderedDict()
        self._by_namespace: dict[str, OrderedDict[bytes, Encoded]] = {}
        self._held_chars = 0
        self.generated: NamespaceLRU[bytes, Generated] = NamespaceLRU(
            SPLICES, GENERATED, lambda known: len(known.prompt.ids) + len(known.ids), lambda known: known.made
        )
        self.absent: NamespaceLRU[bytes, bool] = NamespaceLRU(SPLICES)

    def nearest(self, namespace: str, text: str, valid: Collection[bytes]) -> tuple[Encoded, int]:
        """The rendering of which most can be used again for `text`, and how many characters of it.

        Splices are used only if their message is in `valid`: a template may show an edited message as it showed the original.
        """
        with self._lock:
            known = list(self._by_namespace.get(namespace, {}).values())
        best, most = EMPTY, 0
        for record in reversed(known):
            if len(record.text) <= most or record.text[most // 2 : most + 1] != text[most // 2 : most + 1]:
                continue  # cannot share more than the best so far
            shared = usable(record, common_length(record.text, text), valid)
            if shared > most:
                best, most = record, shared
            if most == len(text):
                break
        return best, most

    def keep(self, namespace: str, encoded: Encoded) -> None:
        """Remembers a rendering whose tokens have offsets; the least recently kept ones go when a bound is reached."""
        if not encoded.ends:
            return
        splices = b"".join(splice.key for splice in encoded.splices)
        key = hashlib.blake2b(encoded.text.encode("utf-8", "surrogatepass") + splices, digest_size=16).digest()
        with self._lock:
            self._drop(namespace, key)
            self._by_namespace.setdefault(namespace, OrderedDict())[key] = encoded
            self._renderings[namespace, key] = encoded
            self._held_chars += len(encoded.text)
            while len(self._by_namespace[namespace]) > ENTRIES:
                self._drop(namespace, next(iter(self._by_namespace[namespace])))
            while self._held_chars > CHARS and len(self._renderings) > 1:
                self._drop(*next(iter(self._renderings)))

    def _drop(self, namespace: str, key: bytes) -> None:
        encoded = self._renderings.pop((namespace, key), None)
        if encoded is not None:
            self._held_chars -= len(encoded.text)
            del self._by_namespace[namespace][key]
            if not self._by_namespace[namespace]:
                del self._by_namespace[namespace]

    def forget(self, deletion: Covering) -> None:
        """Forget deleted text: the ids of messages by their age, and all renderings, which are made again."""
        with self._lock:
            for known in [name for name in self._renderings if deletion.covers(name[0], 0.0)]:
                self._drop(*known)
        self.generated.forget(deletion)


def usable(record: Encoded, shared: int, valid: Collection[bytes]) -> int:
    """Count the shared characters that may be used again: none after a splice that is cut or whose message changed."""
    for splice in record.splices:
        if splice.stop > shared or splice.key not in valid:
            return min(shared, splice.start)
    return shared
