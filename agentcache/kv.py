"""The page table of a sequence: its keys and values, in pages that it shares or fills. Knows nothing of models."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from .ahead import Ahead, Piece, pieces
from .kv_spec import KVSpec, finite
from .page import Page, last_checkpoint, stored_slots, stored_states
from .types import PAGE_TOKENS

if TYPE_CHECKING:
    from .checkpoints import LiveState


@dataclass(slots=True, eq=False)
class Sequence:
    """The page table of one running request: `length` tokens in `pages`, the last page private or claimed.

    exact_until: only tokens before it may be kept as exact or lent to an exact request: what follows inexact ones is inexact.
    copied_tokens: slots that attaching copied from a shared page. ahead: ranges after `length`, in order. state: of recurrent
    layers after `length` tokens. cuts: where a piece has to end. marks: where a checkpoint is made. piece_ends: where pieces ended.
    adapter: of the request, None for the base (model/adapters.py); it acts on tokens from position acts_from on.
    routes: through experts, where they are asked for (model/routes.py).
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
    piece_ends: list[int] = field(default_factory=list)
    adapter: Any = None
    acts_from: int = 0
    routes: Any = None

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
            self.piece_ends = list(checkpoint.cuts)

    def attach_below(self, pages: Seq[Page], stop: int, layers: int) -> None:
        """Take the lowest layers of positions [length, stop) from pages of the same tokens that keep the next layer's inputs, and compute
        the layers above from those: sealed pages are shared, others copied."""
        start = self.length
        for page, slot, count, offset in stored_slots(pages, 0, start, stop):
            if count == PAGE_TOKENS:
                self.pages.append(Page(self.spec, below=page, shared=layers, owner=self))
            else:
                self.reserve(start + offset + count - self.length)
                some = slice(slot, slot + count)
                for (keys, values), (known_keys, known_values) in zip(self.pages[-1].blocks[:layers], page.blocks[:layers], strict=True):
                    keys[..., some], values[..., some, :] = known_keys[..., some], known_values[..., some, :]
        states = stored_states(pages, 0, layers, start, stop)
        self.place([Ahead(start, stop, layers, states, exact=True)])

    @property
    def checkpointed(self) -> int:
        """Length up to the last checkpoint; all of it where no layer needs one."""
        return self.length if self.state is None else last_checkpoint(self.pages, self.length)

    def next_cut(self) -> int | None:
        """The next position at which a forward has to end: of pieces that may be joined, the last one that is no page away."""
        joined = self.cuts_within(self.length, PAGE_TOKENS + 1)
        return joined[-1] if joined else next((cut for cut in self.cuts if cut > self.length), None)

    def cuts_within(self, start: int, tokens: int) -> list[int]:
        """The positions at which pieces end amid a forward of so many tokens."""
        packs_pieces = self.state is not None and self.state.packs_pieces
        return [cut for cut in self.cuts if packs_pieces and start < cut < start + tokens]

    def reserve(self, tokens: int) -> None:
        """Make room for `tokens` more; only then may `slots` of that range be written."""
        while len(self.pages) * PAGE_TOKENS < self.length + tokens:
            self.pages.append(Page(self.spec, owner=self))

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
        return stored_slots(self.pages, 0, start, stop)

    def write(self, layer: int, start: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Store keys and values [tokens, kv_heads, head_dim] of one layer at positions from `start` on."""
        for page, slot, count, offset in self.slots(start, start + keys.shape[0]):
            assert layer >= page.shared_layers
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
        """Declare tokens ahead, whose KV is written; they are stepped over as soon as everything before them is computed."""
        assert not self.ahead
        self.ahead.extend(spans)
        self._step_over()

    def advance(self, tokens: int) -> None:
        """Declare the next `tokens` positions written in every layer; then step over what lies ahead."""
        exact = self.exact_until == self.length
        if self.ahead and self.ahead[0].start == self.length and tokens:  # it was resumed
            span = self.ahead.pop(0)
            exact = exact and span.exact
            assert span.entry is not None and span.states is not None
            if span.start + tokens < span.stop:
                self.ahead.insert(0, replace(span, start=span.start + tokens, states=span.states[tokens:]))
        assert not self.ahead or self.length + tokens <= self.ahead[0].start
        self._fill(tokens)
        if (state := self.state) is not None:
            start = self.length - tokens
            for cut in self.cuts_within(start, tokens):
                self._end_piece(cut, partial(state.copy_at, cut - start))
            state.advance(tokens)
            self._end_piece(self.length, state.copy)
        if exact:
            self.exact_until = self.length
        self._step_over()

    def mark_end(self) -> None:
        """Make a checkpoint after decoded tokens, if they have a prompt's bits and are so many that computing them again takes long."""
        if self.state is not None and self.state.alignment == 1:
            from .checkpoints import CHECKPOINT_TOKENS

            if self.length >= self.checkpointed + CHECKPOINT_TOKENS:
                self._end_piece(self.length, self.state.copy, decoded=True)

    def _end_piece(self, at: int, copy: Callable[[], tuple[torch.Tensor | None, ...] | None], decoded: bool = False) -> None:
        self.piece_ends.append(at)
        if (decoded or at in self.marks) and self.state is not None and (states := copy()) is not None:
            from .checkpoints import Checkpoint

            page, slots = self.pages[(at - 1) // PAGE_TOKENS], (at - 1) % PAGE_TOKENS + 1
            cuts = tuple(self.piece_ends) if self.state.alignment > 1 else ()
            page.checkpoints = {**page.checkpoints, slots: Checkpoint(states, cuts, decoded=decoded)}

    @property
    def junction(self) -> Ahead | None:
        """The held range, if everything before it is computed."""
        return self.ahead[0] if self.ahead and self.ahead[0].held and self.ahead[0].start == self.length else None

    def resolve(self, spans: list[Ahead]) -> None:
        """Replace the junction's run ahead by these spans, and go on."""
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

    def truncate(self, tokens: int) -> None:
        """Cut the sequence down to `tokens`; zero all later slots in pages that it may write, so that masked slots stay finite.

        That includes slots after `length` which a failed forward may have written.
        """
        for page, slot, count, _ in self.slots(tokens, len(self.pages) * PAGE_TOKENS):
            for keys, values in page.blocks[page.shared_layers :]:
                keys[..., slot : slot + count] = 0
                values[..., slot : slot + count, :] = 0
            page.forget_states(slot, slot + count)
            page.checkpoints = {slots: known for slots, known in page.checkpoints.items() if slots <= slot}
            page.filled = slot
        self.length, self.exact_until = tokens, min(tokens, self.exact_until)
        self.ahead.clear()

    def take_back(self) -> None:
        """Go back to the states saved last, where layers have some: these have run tokens that the sequence does not have."""
        if self.state is not None:
            self.truncate(self.state.go_back())

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

    def finite(self, start: int, stop: int) -> bool:
        """Tell whether positions [start, stop) are free of NaN and infinity. The last layer tells: the residual stream carries them there.

        Recurrent layers may come after it: their checkpoints are looked at.
        """
        for page, slot, count, _ in self.slots(start, stop):
            if not all(known.finite for slots, known in page.checkpoints.items() if slot < slots <= slot + count):
                return False
            keys, values = page.layer_keys[-1][..., slot : slot + count], page.layer_values[-1][:, slot : slot + count]
            if not (finite(keys) and finite(values)):
                return False
        return True
