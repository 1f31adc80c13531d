"""Text of cached prompts found again although it is not quite equal: MinHash over canonical words, and an LSH index. Knows no pages.

It only proposes places of text with nearly the same words. Reused tokens have equal ids (ngram_index.py finds those without this).

    one index per scope (keys.py)         one signature per text, with up to PLACES places that differ in ids or in what stands left
"""

from __future__ import annotations

import struct
import threading
import zlib
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from blake3 import blake3

from .. import extras
from ..errors import ConfigError
from ..namespace_lru import NamespaceLRU
from ..store.keys import Scope
from .windows import Window

PERMUTATIONS = 128
SHINGLE = 8  # canonical words that are hashed together
LEFT_SHINGLE = 2
LEFT = 16  # values kept of the signature of what stands left
TAU = 0.8
MOST = 16_384  # texts kept in all scopes together, some 5 kB each
PLACES = 4
REMEMBERED = 4096  # signatures of windows that are asked for now and noted soon
_BASE = np.uint64(0x9E3779B97F4A7C15)
_MIX = np.uint64(0xFF51AFD7ED558CCD)
_PACKED = struct.Struct("<16s16s32sIiI")


@dataclass(frozen=True, slots=True, eq=False)
class Signature:
    """MinHash of a window."""

    digest: bytes  # of the canonical words
    values: np.ndarray  # uint32 [PERMUTATIONS]
    left: np.ndarray  # of the words before it, uint32 [LEFT]


@dataclass(frozen=True, slots=True, eq=False)
class StoredText:
    """A cached text and where it stands: in the page after the one with the key `parent`, which holds its middle token."""

    signature: Signature
    exact: bytes  # digest of its ids
    parent: bytes
    page: int  # number of that page
    slot: int  # its start there; negative: on the page before
    tokens: int

    @property
    def name(self) -> bytes:
        """Digest of the text and its place: the same text in another page has another name."""
        return blake3(self.pack()).digest(length=16)

    def pack(self) -> bytes:
        """Pack it into bytes, always of the same length."""
        said = self.signature
        head = _PACKED.pack(said.digest, self.exact, self.parent, self.page, self.slot, self.tokens)
        return head + said.left.astype("<u4").tobytes() + said.values.astype("<u4").tobytes()

    @classmethod
    def unpack(cls, packed: bytes) -> StoredText | None:
        """The text that `pack` gave these bytes of; None if it did not."""
        if len(packed) != _PACKED.size + 4 * (LEFT + PERMUTATIONS):
            return None
        digest, exact, parent, page, slot, tokens = _PACKED.unpack_from(packed)
        values = np.frombuffer(packed, "<u4", offset=_PACKED.size).astype(np.uint32)
        return cls(Signature(digest, values[LEFT:], values[:LEFT]), exact, parent, page, slot, tokens)


@dataclass(frozen=True, slots=True)
class Proposal:
    """A cached text with nearly the words of a window."""

    text: StoredText
    similarity: float  # estimated Jaccard similarity of both
    left: float  # the same of the words to their left
    exact: bool  # equal ids, unless there is a collision


def datasketch() -> Any:
    """The library, which is an extra."""
    return extras.library("datasketch", "2.0", "segments", "signatures of segments")


@lru_cache
def bands(tau: float) -> tuple[int, int]:
    """Bands, and values of each, that find likeness `tau` best: an integration of a twentieth of a second."""
    found = datasketch().MinHashLSH(threshold=tau, num_perm=PERMUTATIONS)
    return found.b, found.r


class Signer:
    """Makes MinHash signatures; remembers the latest. Thread safe."""

    def __init__(self) -> None:
        self._minhash = datasketch().MinHash
        self._permutations = self._minhash(PERMUTATIONS).permutations
        self._known: NamespaceLRU[bytes, Signature] = NamespaceLRU(REMEMBERED)  # by a digest: no text outlives its prompt

    def sign(self, window: Window) -> Signature:
        """The signature of a window."""
        key = blake3(repr((window.words, window.left)).encode("utf-8", "surrogatepass")).digest(length=16)
        if (known := self._known.get("", key)) is not None:
            return known
        values = self._values(shingles(window.words, SHINGLE))
        left = self._values(shingles(window.left, LEFT_SHINGLE))[:LEFT]
        made = Signature(blake3("\x1f".join(window.words).encode("utf-8", "surrogatepass")).digest(length=16), values, left)
        self._known.put("", key, made)
        return made

    def _values(self, hashes: np.ndarray) -> np.ndarray:
        sketch = self._minhash(PERMUTATIONS, permutations=self._permutations, scheme="affine32", hashfunc=int)
        sketch.update_batch(hashes.tolist())
        return np.asarray(sketch.hashvalues)

    def sketch(self, values: np.ndarray) -> Any:
        """The library's own object for these values."""
        return self._minhash(hashvalues=values, permutations=self._permutations, scheme="affine32")


def shingles(words: Sequence[str], size: int) -> np.ndarray:
    """Hashes of the runs of `size` words, each once, uint32; of all words where there are fewer. The same in every process."""
    if not words:
        return np.empty(0, np.uint32)
    codes = np.array([zlib.crc32(word.encode("utf-8", "surrogatepass")) for word in words], np.uint64)
    size = min(size, len(codes))
    mixed = np.zeros(len(codes) - size + 1, np.uint64)
    for at in range(size):
        mixed = (mixed ^ codes[at : at + len(mixed)]) * _BASE
        mixed ^= mixed >> np.uint64(29)
    mixed *= _MIX
    return np.unique((mixed >> np.uint64(32)).astype(np.uint32))


class LSHIndex:
    """The LSH index over windows of cached prompts; a scope never sees another one's. Thread safe. most: texts in all scopes together."""

    def __init__(self, tau: float = TAU, most: int = MOST) -> None:
        if not 0.0 < tau < 1.0:
            raise ConfigError(f"tau={tau!r}: must lie between 0 and 1; {TAU!r} is the default")
        self.tau = tau
        self.signer = Signer()
        self._most = most
        self._lsh = datasketch().MinHashLSH
        self._bands = bands(tau)
        self._scopes: dict[Scope, _Scope] = {}
        self._used: OrderedDict[tuple[Scope, bytes], None] = OrderedDict()  # texts, least recently used first
        self._lock = threading.Lock()

    def __len__(self) -> int:
        """Number of texts that can be found."""
        return len(self._used)

    def __contains__(self, scope: Scope) -> bool:
        """Tell whether anything of a scope can be found."""
        return scope in self._scopes

    def add(self, scope: Scope, text: StoredText) -> bool:
        """Add a text to its scope's index; False if the index has it at this place already."""
        with self._lock:
            own = self._scopes.get(scope)
            if own is None:
                own = self._scopes[scope] = _Scope(self._lsh(params=self._bands, num_perm=PERMUTATIONS), {})
            digest = text.signature.digest
            self._used[scope, digest] = None
            self._used.move_to_end((scope, digest))
            places = own.texts.get(digest)
            if places is None:
                own.lsh.insert(digest, self.signer.sketch(text.signature.values), check_duplication=False)
                own.texts[digest] = [text]
                while len(self._used) > self._most:
                    self._remove(*next(iter(self._used)))
                return True
            if any(place.name == text.name for place in places):
                return False
            places.append(text)
            del places[1 : 1 - PLACES]  # the first one stays: a learnt text, that outlives the conversations which repeat it
            return True

    def find(self, scope: Scope, signature: Signature, exact: bytes) -> list[Proposal]:
        """Cached texts of an estimated similarity of at least `tau`: equal ids first, then by likeness of words, then of left context.

        exact: digest of the ids that are looked for.
        """
        with self._lock:
            own = self._scopes.get(scope)
            if own is None:
                return []
            found = []
            for digest in own.lsh.query(self.signer.sketch(signature.values)):
                places = own.texts[digest]
                similarity = float(np.mean(places[0].signature.values == signature.values))
                if similarity >= self.tau:
                    self._used.move_to_end((scope, digest))
                    for text in places:
                        left = float(np.mean(text.signature.left == signature.left))
                        found.append(Proposal(text, similarity, left, text.exact == exact))
            return sorted(found, key=lambda proposal: (not proposal.exact, -proposal.similarity, -proposal.left))

    def drop(self, scope: Scope, text: StoredText) -> None:
        """Forget one place of a text; no effect if it is not known."""
        with self._lock:
            own = self._scopes.get(scope)
            places = own.texts.get(text.signature.digest) if own is not None else None
            if own is None or places is None or text not in places:
                return
            places.remove(text)
            if not places:
                self._remove(scope, text.signature.digest)

    def _remove(self, scope: Scope, digest: bytes) -> None:
        """Remove a text, and with the last one its scope's index."""
        own = self._scopes[scope]
        own.lsh.remove(digest)
        del own.texts[digest], self._used[scope, digest]
        if not own.texts:
            del self._scopes[scope]

    def clear(self, namespace: str | None = None) -> None:
        """Forget everything, or all of one namespace."""
        with self._lock:
            for scope in [scope for scope in self._scopes if namespace in (None, scope.namespace)]:
                for digest in self._scopes.pop(scope).texts:
                    del self._used[scope, digest]


@dataclass(slots=True)
class _Scope:
    lsh: Any
    texts: dict[bytes, list[StoredText]]
