"""Pages: the keys and values of one block of consecutive tokens, all layers; and the page table of a sequence. Knows nothing of models.

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
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Literal, Protocol

import torch

from .ahead import Ahead, Piece, pieces
from .checkpoints import Checkpoint, LiveState
from .kv_spec import KVSpec
from .page_memory import prepared, zeros
from .types import PAGE_TOKENS

Tier = Literal["device", "host"]


class File(Protocol):
    """A file whose memory is mapped."""

    def changed(self) -> bool:
        """Tell whether it was written to since it was opened."""
        ...


class Page:
    """KV of up to 512 tokens: keys [layers, kv_heads, head_dim, 512], values [layers, kv_heads, 512, head_dim]; flat where layers differ.

    `filled` counts the slots written so far. A page with filled == 512 is sealed: immutable, shared by reference.
    spec: of the model; a page of tier "host" waits in the computer's own memory. whole: all its slots will be written, and soon.
    layer_keys, layer_values: one view per layer. file: whose mapped memory that is, None if it is the page's own.
    boundaries: hidden states [512, hidden] by layer, where they were kept. checkpoints: by the number of slots before them.
    """

    __slots__ = (
        "__weakref__", "_claim", "_lock", "boundaries", "checkpoints", "file", "filled", "keys", "layer_keys", "layer_values",
        "spec", "tier", "values",
    )  # fmt: skip

    def __init__(self, spec: KVSpec, tier: Tier = "device", whole: bool = False) -> None:
        self.spec = spec
        self.tier: Tier = tier
        device = spec.device if tier == "device" else torch.device("cpu")
        kept = prepared.take(spec.shapes, spec.dtype) if device.type == "cpu" and not whole else None
        # a token's keys lie a kilobyte apart: the first one touches all of the memory, the last one no more
        made = kept or tuple(zeros(s, spec.dtype, device, keys or whole, not whole) for s, keys in zip(spec.shapes, (True, False)))
        self.keys, self.values = made
        self._views()
        self.boundaries: dict[int, torch.Tensor] = {}
        self.checkpoints: dict[int, Checkpoint] = {}
        self.file: File | None = None
        self.filled = 0
        self._claim: object | None = None
        self._lock = threading.Lock()

    def _views(self) -> None:
        self.layer_keys: Seq[torch.Tensor]
        self.layer_values: Seq[torch.Tensor]
        if widths := self.spec.widths:
            keys = self.keys.split([heads * width * PAGE_TOKENS for heads, width, _ in widths])
            values = self.values.split([heads * width * PAGE_TOKENS for heads, _, width in widths])
            self._shape(keys, values)
        else:
            self.layer_keys, self.layer_values = self.keys.unbind(0), self.values.unbind(0)

    def _shape(self, keys: Seq[torch.Tensor], values: Seq[torch.Tensor]) -> None:
        """Make the views of layers that differ, of flat memory of each."""
        widths = self.spec.widths
        self.layer_keys = [flat.view(heads, width, PAGE_TOKENS) for flat, (heads, width, _) in zip(keys, widths, strict=True)]
        self.layer_values = [flat.view(heads, PAGE_TOKENS, width) for flat, (heads, _, width) in zip(values, widths, strict=True)]

    @property
    def blocks(self) -> Seq[tuple[torch.Tensor, torch.Tensor]]:
        """Keys [.., width, 512] and values [.., 512, width]: of all layers at once, or of each where layers differ."""
        return list(zip(self.layer_keys, self.layer_values, strict=True)) if self.spec.widths else [(self.keys, self.values)]

    def lie_in(self, memory: torch.Tensor, file: File) -> None:
        """Take the memory of a mapped file, which holds a whole page already: of each layer its keys, then its values."""
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
    def bytes(self) -> int:
        """Bytes in memory, however full the page is, and those of its checkpoints."""
        return self.spec.page_bytes + sum(known.bytes for known in self.checkpoints.values())

    @property
    def changed(self) -> bool:
        """Tell whether the file that this page lies in was written to since it was verified."""
        return self.file is not None and self.file.changed()

    @property
    def sealed(self) -> bool:
        """Tell whether every slot is written."""
        return self.filled == PAGE_TOKENS

    def claim(self, slot: int, owner: object) -> bool:
        """Ask for the sole right to append at `slot`; refused if slots from there on are written or promised already."""
        with self._lock:
            if self._claim is not None or self.filled != slot:
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
        for (keys, values), (own_keys, own_values) in zip(page.blocks, self.blocks, strict=True):
            keys[..., :tokens].copy_(own_keys[..., :tokens])
            values[..., :tokens, :].copy_(own_values[..., :tokens, :])
        page.boundaries = {layer: states.to(page.keys.device, copy=True) for layer, states in self.boundaries.items()}
        page._forget_states(tokens, PAGE_TOKENS)
        page.checkpoints = {slots: known.on(page.keys.device) for slots, known in self.checkpoints.items() if slots <= tokens}
        page.filled = tokens
        return page

    @torch.inference_mode()  # they were made by a forward
    def _forget_states(self, start: int, stop: int) -> None:
        """Slots [start, stop) hold other tokens from now on: nothing is resumed from what was kept with those before."""
        for states in self.boundaries.values():
            states[start:stop] = float("nan")

    def branch(self, tokens: int, owner: object) -> Page:
        """A private copy of the first `tokens` slots, claimed by `owner`."""
        page = self.copy(tokens)
        page._claim = owner
        return page


def last_checkpoint(pages: Seq[Page], tokens: int, cuts: Seq[int] | None = None) -> int:
    """The position of the last checkpoint within the first `tokens` of these pages; 0 if there is none.

    cuts: of a prompt; only a checkpoint of the same pieces serves it.
    """
    for at in range(-(-tokens // PAGE_TOKENS) - 1, -1, -1):
        for slots, known in sorted(pages[at].checkpoints.items(), reverse=True):
            stop = at * PAGE_TOKENS + slots
            if stop <= tokens and (cuts is None or known.cuts == tuple(cut for cut in cuts if cut <= stop)):
                return stop
    return 0


def stored_slots(pages: Seq[Page], base: int, start: int, stop: int) -> Iterator[tuple[Page, int, int]]:
    """The pages under positions [start, stop) as (page, first slot, count); the first slot of the first page is position `base`."""
    at = start - base
    while at < stop - base:
        slot = at % PAGE_TOKENS
        count = min(PAGE_TOKENS - slot, stop - base - at)
        yield pages[at // PAGE_TOKENS], slot, count
        at += count


def stored_states(pages: Seq[Page], base: int, layer: int, start: int, stop: int) -> torch.Tensor | None:
    """The inputs of a layer that were kept with these tokens [stop - start, hidden], None if some were not."""
    found = []
    for page, slot, count in stored_slots(pages, base, start, stop):
        kept = page.boundaries.get(layer)
        if kept is None or not bool(torch.isfinite(kept[slot : slot + count]).all()):
            return None
        found.append(kept[slot : slot + count])
    return torch.cat(found)


@dataclass(slots=True, eq=False)
class Sequence:
    """The page table of one running request: `length` tokens in `pages`, the last page private or claimed.

    exact_until: only tokens before it may be kept as exact or lent to an exact request: what follows inexact ones is inexact.
    copied_tokens: slots copied by branching when the sequence was attached. ahead: ranges after `length`, in order. state: of recurrent
    layers after `length` tokens. cuts: where a piece has to end. marks: where a checkpoint is made. ended: where pieces ended.
    """

    spec: KVSpec
    pages: list[Page] = field(default_factory=list)
    length: int = 0
    exact_until: int = 0
    copied_tokens: int = 0
    ahead: list[Ahead] = field(default_factory=list)
    state: LiveState | None = None
    cuts: tuple[int, ...] = ()
    marks: frozenset[int] = frozenset()
    ended: list[int] = field(default_factory=list)

    def attach(self, pages: list[Page], tokens: int) -> None:
        """Start from shared pages that hold positions [0, tokens): sealed ones by reference, the last one claimed or branched."""
        assert not self.pages
        assert tokens <= len(pages) * PAGE_TOKENS
        whole, rest = divmod(tokens, PAGE_TOKENS)
        self.pages.extend(pages[:whole])
        if rest:
            last = pages[whole]
            if not last.claim(rest, self):
                last = last.branch(rest, self)
                self.copied_tokens = rest
            self.pages.append(last)
        self.length = self.exact_until = tokens
        if self.state is not None and tokens:
            checkpoint = pages[(tokens - 1) // PAGE_TOKENS].checkpoints[(tokens - 1) % PAGE_TOKENS + 1]
            self.state.restore(checkpoint.states, tokens)
            self.ended = list(checkpoint.cuts)

    @property
    def checkpointed(self) -> int:
        """Length up to the last checkpoint; all of it where no layer needs one."""
        return self.length if self.state is None else last_checkpoint(self.pages, self.length)

    def next_cut(self) -> int | None:
        """The next position at which a forward has to end: of pieces that may be joined, the last one that is no page away."""
        cuts = [cut for cut in self.cuts if cut > self.length]
        joined = self.cuts_within(self.length, PAGE_TOKENS + 1)
        return joined[-1] if joined else next(iter(cuts), None)

    def cuts_within(self, start: int, tokens: int) -> list[int]:
        """The positions at which pieces end amid a forward of so many tokens."""
        joins = self.state is not None and self.state.joins
        return [cut for cut in self.cuts if joins and start < cut < start + tokens]

    def reserve(self, tokens: int) -> None:
        """Make room for `tokens` more; only then may `slots` of that range be written."""
        while len(self.pages) * PAGE_TOKENS < self.length + tokens:
            page = Page(self.spec)
            page.claim(0, self)
            self.pages.append(page)

    def reserve_to(self, position: int) -> None:
        """Make room up to this position."""
        self.reserve(position - self.length)

    @property
    def ahead_tokens(self) -> int:
        """Number of tokens ahead that need no computing at all."""
        return sum(span.stop - span.start for span in self.ahead if span.entry is None)

    def pieces(self, tokens: int) -> list[Piece]:
        """Return the next `tokens` positions to compute, up to a cut. Fewer than a page are all that is left, and cut by the model."""
        if (cut := self.next_cut()) is not None and (tokens >= PAGE_TOKENS or not self.cuts_within(self.length, tokens)):
            tokens = min(tokens, cut - self.length)
        return pieces(self.ahead, self.length, tokens)

    def slots(self, start: int, stop: int) -> Iterator[tuple[Page, int, int, int]]:
        """The pages under positions [start, stop): (page, first slot, count, offset from start)."""
        at = start
        while at < stop:
            slot = at % PAGE_TOKENS
            count = min(PAGE_TOKENS - slot, stop - at)
            yield self.pages[at // PAGE_TOKENS], slot, count, at - start
            at += count

    def write(self, layer: int, start: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Store keys and values [tokens, kv_heads, head_dim] of one layer at positions from `start` on."""
        for page, slot, count, offset in self.slots(start, start + keys.shape[0]):
            page.layer_keys[layer][:, :, slot : slot + count] = keys[offset : offset + count].permute(1, 2, 0)
            page.layer_values[layer][:, slot : slot + count] = values[offset : offset + count].transpose(0, 1)

    def keep_states(self, layer: int, start: int, states: torch.Tensor) -> None:
        """Keep the inputs [tokens, hidden] of a layer at positions from `start` on: computing can be resumed from them."""
        for page, slot, count, offset in self.slots(start, start + len(states)):
            kept = page.boundaries.get(layer)
            if kept is None:
                kept = page.boundaries[layer] = states.new_full((PAGE_TOKENS, states.shape[1]), float("nan"))  # unknown
            kept[slot : slot + count] = states[offset : offset + count]

    def place(self, spans: list[Ahead]) -> None:
        """Declare what was written ahead; it is stepped over as soon as everything before it is computed."""
        assert not self.ahead
        self.ahead.extend(spans)
        self._step_over()

    def advance(self, tokens: int) -> None:
        """Declare the next `tokens` positions written in every layer; then step over what lies ahead."""
        exact = self.exact_until == self.length
        if self.ahead and self.ahead[0].start == self.length and tokens:  # it was resumed
            span, exact = self.ahead.pop(0), False
            assert span.entry is not None and span.states is not None
            if span.start + tokens < span.stop:
                self.ahead.insert(0, replace(span, start=span.start + tokens, states=span.states[tokens:]))
        assert not self.ahead or self.length + tokens <= self.ahead[0].start
        self._fill(tokens)
        if (state := self.state) is not None:
            start = self.length - tokens
            for cut in self.cuts_within(start, tokens):
                self._end_piece(cut, partial(state.passed, cut - start))
            state.advance(tokens)
            self._end_piece(self.length, state.copy)
        if exact:
            self.exact_until = self.length
        self._step_over()

    def _end_piece(self, at: int, states: Callable[[], tuple[torch.Tensor | None, ...]]) -> None:
        self.ended.append(at)
        if at in self.marks:
            page, slots = self.pages[(at - 1) // PAGE_TOKENS], (at - 1) % PAGE_TOKENS + 1
            page.checkpoints = {**page.checkpoints, slots: Checkpoint(states(), tuple(self.ended))}

    @property
    def junction(self) -> Ahead | None:
        """The held range, if everything before it is computed."""
        return self.ahead[0] if self.ahead and self.ahead[0].held and self.ahead[0].start == self.length else None

    def resolve(self, spans: list[Ahead]) -> None:
        """Put these in the place of what belongs to the junction's run, and go on."""
        run = self.ahead[0].run
        self.ahead = [*spans, *(span for span in self.ahead if span.run != run)]
        self._step_over()

    def _step_over(self) -> None:
        while self.ahead and self.ahead[0].start == self.length and self.ahead[0].entry is None and not self.ahead[0].held:
            self._fill(self.ahead[0].stop - self.length)
            self.ahead.pop(0)

    def _fill(self, tokens: int) -> None:
        for page, slot, count, _ in self.slots(self.length, self.length + tokens):
            assert page.filled == slot
            page.filled = slot + count
        self.length += tokens

    def withdraw(self, tokens: int) -> None:
        """Unwrite everything from position `tokens` on, in pages this sequence may write: zeros, so that masked slots stay finite.

        That includes slots after `length` which a failed forward may have written.
        """
        for page, slot, count, _ in self.slots(tokens, len(self.pages) * PAGE_TOKENS):
            for keys, values in page.blocks:
                keys[..., slot : slot + count] = 0
                values[..., slot : slot + count, :] = 0
            page._forget_states(slot, slot + count)
            page.checkpoints = {slots: known for slots, known in page.checkpoints.items() if slots <= slot}
            page.filled = slot
        self.length, self.exact_until = tokens, min(tokens, self.exact_until)
        self.ahead.clear()

    def close(self) -> None:
        """Give up the right to append. Written slots stay valid for all who share the pages, which forget this sequence."""
        for page in self.pages:
            page.release(self)

    def read(self, layer: int, start: int = 0, stop: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of positions [start, stop) as [tokens, kv_heads, head_dim] copies: for tests and for devices that gather."""
        keys, values = [], []
        for page, slot, count, _ in self.slots(start, self.length if stop is None else stop):
            keys.append(page.layer_keys[layer][..., slot : slot + count].permute(2, 0, 1))
            values.append(page.layer_values[layer][:, slot : slot + count].transpose(0, 1))
        return torch.cat(keys), torch.cat(values)
