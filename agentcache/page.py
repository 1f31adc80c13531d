"""A page: the keys and values of one block of consecutive tokens, all layers. Knows nothing of models or sequences.

A page holds positions [512·i, 512·(i+1)). Inside it, per layer, keys lie transposed (kv_heads, head_dim, 512) and values plain
(kv_heads, 512, head_dim): both attention products then run as plain matrix products without a copy.

    slots of a page     [0, length of a reader)   valid for that reader, never written again
                        [.., filled)              written, valid for longer readers
                        [filled, 512)             zero or stale, always masked

Layers whose state does not grow with the tokens are no pages: a *checkpoint*, a copy of their states after some token, lies with the page
of that token, and a sequence can start only where there is one. A page's `checkpoints` are exchanged, never changed: others read them.

Sharing needs no lock on the data: one writer at a time may append at `filled`; everybody else reads below it or branches.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING, Literal

import numpy as np
import torch

from .kv_spec import KVSpec, finite
from .page_memory import prepared, zeros
from .types import PAGE_TOKENS

if TYPE_CHECKING:
    from .checkpoints import Checkpoint, File

Tier = Literal["device", "host"]


class Page:
    """KV of up to 512 tokens: keys [layers, kv_heads, head_dim, 512], values [layers, kv_heads, 512, head_dim]; flat where layers differ.

    `filled` counts the slots written so far. A page with filled == 512 is sealed: immutable, shared by reference.
    spec: of the model; a page of tier "host" waits in the computer's own memory. whole: all its slots will be written, and soon.
    layer_keys, layer_values: one view per layer. file: whose mapped memory that is, None if it is the page's own.
    boundaries: hidden states [512, hidden] by layer, where they were kept. checkpoints: by the number of slots before them.
    shared_layers: number of the lowest layers whose memory is that of `below`, a sealed page with the same tokens. wrong: a check found
    other keys or values than computing gives. owner: has the sole right to append.
    """

    __slots__ = (
        "__weakref__", "_addresses", "_claim", "_lock", "below", "boundaries", "checkpoints", "file", "filled", "keys", "layer_keys",
        "layer_values", "shared_layers", "spec", "tier", "values", "wrong",
    )  # fmt: skip

    def __init__(
        self, spec: KVSpec, tier: Tier = "device", whole: bool = False, below: Page | None = None, shared: int = 0, owner: object = None
    ) -> None:
        self.spec = spec
        self.tier: Tier = tier
        while below is not None and below.shared_layers >= shared:
            below = below.below
        self.below: Page | None = below
        self.shared_layers: int = shared
        self.wrong = False
        device = spec.device if tier == "device" else torch.device("cpu")
        shapes = tuple((shape[0] - shared, *shape[1:]) for shape in spec.shapes) if shared else spec.shapes
        kept = prepared.take(shapes, spec.dtype) if device.type == "cpu" and not whole and not shared else None
        # a token's keys lie a kilobyte apart: the first one touches all of the memory, the last one no more
        made = kept or tuple(zeros(s, spec.dtype, device, keys or whole, not whole) for s, keys in zip(shapes, (True, False)))
        self.keys, self.values = made
        self.layer_keys: Seq[torch.Tensor]
        self.layer_values: Seq[torch.Tensor]
        self._views()
        self.file: File | None = None
        if below is not None:
            assert below.sealed and not spec.widths
            self.layer_keys = [*below.layer_keys[:shared], *self.layer_keys]
            self.layer_values = [*below.layer_values[:shared], *self.layer_values]
        self.boundaries: dict[int, torch.Tensor] = {}
        self.checkpoints: dict[int, Checkpoint] = {}
        self.filled = 0
        self._addresses: np.ndarray | None = None
        self._claim: object | None = owner
        self._lock = threading.Lock()

    def _views(self) -> None:
        if widths := self.spec.widths:
            keys = self.keys.split([heads * width * PAGE_TOKENS for heads, width, _ in widths])
            values = self.values.split([heads * width * PAGE_TOKENS for heads, _, width in widths])
            self._shape(keys, values)
        else:
            self.layer_keys, self.layer_values = self.keys.unbind(0), self.values.unbind(0)

    def _shape(self, keys: Seq[torch.Tensor], values: Seq[torch.Tensor]) -> None:
        """Set `layer_keys` and `layer_values`, of layers that differ, to views of each layer's flat memory."""
        widths = self.spec.widths
        self.layer_keys = [flat.view(heads, width, PAGE_TOKENS) for flat, (heads, width, _) in zip(keys, widths, strict=True)]
        self.layer_values = [flat.view(heads, PAGE_TOKENS, width) for flat, (heads, _, width) in zip(values, widths, strict=True)]

    @property
    def blocks(self) -> Seq[tuple[torch.Tensor, torch.Tensor]]:
        """Keys [.., width, 512] and values [.., 512, width] of each layer."""
        return list(zip(self.layer_keys, self.layer_values, strict=True))

    def use_mapped(self, memory: torch.Tensor, file: File) -> None:
        """Use the memory of a mapped file, which holds a whole page: of each layer its keys, then its values."""
        spec = self.spec
        assert self.filled == 0 and memory.nbytes == PAGE_TOKENS * spec.token_bytes and memory.dtype == spec.dtype
        self.file = file
        if spec.widths:
            self.keys = self.values = memory
            parts = memory.split([heads * width * PAGE_TOKENS for heads, *both in spec.widths for width in both])
            self._shape(parts[::2], parts[1::2])
        else:
            data = memory.view(spec.layers, 2, -1)
            self.keys, self.values = (data[:, at].unflatten(1, shape[1:]) for at, shape in enumerate(spec.shapes))
            self._views()

    @property
    def addresses(self) -> np.ndarray:
        """Addresses of the keys and values of each layer, [2, layers]: for kernels that read pages where they lie."""
        if self._addresses is None:
            self._addresses = np.array([[layer.data_ptr() for layer in side] for side in (self.layer_keys, self.layer_values)])
        return self._addresses

    @property
    def bytes(self) -> int:
        """Bytes of the page's own memory, however full it is, and of its checkpoints."""
        return self.copy_bytes - PAGE_TOKENS * self.spec.token_bytes * self.shared_layers // self.spec.layers

    @property
    def chain(self) -> Iterator[Page]:
        """This page, and those whose memory it shares."""
        at: Page | None = self
        while at is not None:
            yield at
            at = at.below

    @property
    def copy_bytes(self) -> int:
        """Bytes of a copy of this page, which shares no memory."""
        return self.spec.page_bytes + sum(known.bytes for known in self.checkpoints.values())

    @property
    def changed(self) -> bool:
        """Tell whether the page must not be used: it is wrong, or a mapped file of it was written to since it was verified."""
        if self.wrong or (self.below is not None and self.below.changed):
            return True
        files = (self.file, *(known.file for known in self.checkpoints.values()))
        return any(file is not None and file.changed() for file in files)

    @property
    def sealed(self) -> bool:
        """Tell whether every slot is written."""
        return self.filled == PAGE_TOKENS

    def claim(self, slot: int, owner: object) -> bool:
        """Ask for the sole right to append at `slot`; refused if slots from there on are written or promised already, or shared below."""
        with self._lock:
            if self._claim is not None or self.filled != slot or self.shared_layers:
                return False
            self._claim = owner
            return True

    def release(self, owner: object) -> None:
        """Give the right to append back; no effect if `owner` does not hold it."""
        with self._lock:
            if self._claim is owner:
                self._claim = None

    @property
    def claimed(self) -> bool:
        """Tell whether a sequence has the right to append."""
        return self._claim is not None

    def copy(self, tokens: int, tier: Tier = "device") -> Page:
        """A copy of the first `tokens` slots in another page."""
        assert 0 < tokens <= self.filled
        page = Page(self.spec, tier)
        one = not self.shared_layers and not self.spec.widths  # then all layers are one tensor, which a GPU copies at once
        pairs = [((page.keys, page.values), (self.keys, self.values))] if one else zip(page.blocks, self.blocks, strict=True)
        for (keys, values), (own_keys, own_values) in pairs:
            keys[..., :tokens].copy_(own_keys[..., :tokens])
            values[..., :tokens, :].copy_(own_values[..., :tokens, :])
        page.boundaries = {layer: states.to(page.keys.device, copy=True) for layer, states in self.boundaries.items()}
        page.forget_states(tokens, PAGE_TOKENS)
        page.checkpoints = {slots: known.on(page.keys.device) for slots, known in self.checkpoints.items() if slots <= tokens}
        page.filled = tokens
        return page

    @torch.inference_mode()  # they were made by a forward
    def forget_states(self, start: int, stop: int) -> None:
        """Forget the boundaries of slots [start, stop), which hold other tokens from now on."""
        for states in self.boundaries.values():
            states[start:stop] = float("nan")

    def branch(self, tokens: int, owner: object) -> Page:
        """A private copy of the first `tokens` slots, claimed by `owner`."""
        page = self.copy(tokens)
        page._claim = owner
        return page


def last_checkpoint(pages: Seq[Page], tokens: int, cuts: Seq[int] | None = None) -> int:
    """The position of the last checkpoint within the first `tokens` of these pages; 0 if there is none.

    cuts: of a prompt; only a checkpoint of the same pieces serves it, or one that does not depend on pieces.
    """
    for at in range(-(-tokens // PAGE_TOKENS) - 1, -1, -1):
        for slots, known in sorted(pages[at].checkpoints.items(), reverse=True):
            stop = at * PAGE_TOKENS + slots
            if stop <= tokens and (cuts is None or not known.cuts or known.cuts == tuple(cut for cut in cuts if cut <= stop)):
                return stop
    return 0


def stored_slots(pages: Seq[Page], base: int, start: int, stop: int) -> Iterator[tuple[Page, int, int, int]]:
    """The pages under positions [start, stop): (page, first slot, count, offset from start). Their first slot is position `base`."""
    at = start
    while at < stop:
        place, slot = divmod(at - base, PAGE_TOKENS)
        count = min(PAGE_TOKENS - slot, stop - at)
        yield pages[place], slot, count, at - start
        at += count


def stored_states(pages: Seq[Page], base: int, layer: int, start: int, stop: int) -> torch.Tensor | None:
    """The inputs of a layer that were kept with these tokens [stop - start, hidden], None if some were not."""
    found = []
    for page, slot, count, _ in stored_slots(pages, base, start, stop):
        kept = page.boundaries.get(layer)
        if kept is None or not finite(kept[slot : slot + count]):
            return None
        found.append(kept[slot : slot + count])
    return torch.cat(found)


def states_until(pages: Seq[Page], layer: int, start: int, stop: int) -> int:
    """The end of the tokens from `start` on whose inputs of a layer were kept, at most `stop`."""
    for page, slot, count, offset in stored_slots(pages, 0, start, stop):
        kept = page.boundaries.get(layer)
        known = torch.zeros(count, dtype=torch.bool) if kept is None else torch.isfinite(kept[slot : slot + count]).all(1)
        if not bool(known.all()):
            return start + offset + int(known.logical_not().int().argmax())
    return stop
