"""Attention over page tables: exact, causal, row-pure on a CPU. Knows nothing of models or layers' weights.

Per key block b (one page) and query row r, with scores s_b = scale · q·K_b, soft-capped if the layer does that (s = c · tanh(s / c)) and
masked where a key comes after r, or is outside the window or the chunk; a sink z is one more score of each head, without a value:

    m = max over z and all blocks of s_b        l = exp(z - m) + Σ_b Σ exp(s_b - m)        out = Σ_b exp(s_b - m) V_b / l

in fp32, blocks in ascending order. Masked keys add exact zeros, so the result of a row does not depend on how many rows or blocks were in
the call. Compiled by `kernels/paged_attention.py`; where nothing is compiled, by the library's products, in tiles of heads and queries.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from ..kv import PAGE_TOKENS, Page, Sequence
from .kernels.scratch import scratch
from .numerics import LEAST_WEIGHT, TILE, Numerics

if TYPE_CHECKING:
    from .kernels.device_table import DeviceTable

SCORE_ELEMENTS = 1 << 19  # fp32 scores of a tile, 2 MB: stays in the caches next to keys and values
_FUSED = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]  # cuDNN plans for ms at each new length
SINKS = 16  # scores before those of keys, where a layer has sinks: keeps the others aligned


@dataclass(frozen=True, slots=True, eq=False)
class Attention:
    """How one layer attends.

    window: of keys that a row sees, its own included, 0 for all. chunk: positions of the same multiple see each other, 0 for all.
    softcap: bound of the scores, 0 for none. sinks: scores [heads] of keys without values. chosen: the positions [rows, tokens] that rows
    of a forward see at most, None for all.
    """

    scale: float
    window: int = 0
    chunk: int = 0
    softcap: float = 0.0
    sinks: torch.Tensor | None = None
    chosen: torch.Tensor | None = None

    @property
    def plain(self) -> bool:
        """Tell whether scores are only scaled, and masked by a window."""
        return not self.chunk and not self.softcap and self.sinks is None

    def first_key(self, position: int) -> int:
        """The first key that a row at this position sees."""
        first = max(0, position - self.window + 1) if self.window else 0
        return max(first, position // self.chunk * self.chunk) if self.chunk else first

    def of(self, part: Part) -> Attention:
        """The same for the rows of one part: all tokens are chosen where it has no more."""
        if self.chosen is None:
            return self
        few = self.chosen.shape[1] < part.start + part.count
        return replace(self, chosen=self.chosen[part.offset : part.offset + part.count] if few else None)

    def hidden(self, queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        """True where a query at a position [rows, 1] does not see a key [1, keys]."""
        hidden = keys > queries
        if self.window:
            hidden |= keys <= queries - self.window
        if self.chunk:
            hidden |= keys < queries // self.chunk * self.chunk
        if self.chosen is not None:
            unseen = torch.ones(len(queries), int(queries[-1]) + 1, dtype=torch.bool, device=keys.device)
            hidden |= unseen.scatter_(1, self.chosen.long(), False)[:, keys[0]]
        return hidden


@dataclass(slots=True)
class Part:
    """Tokens of one sequence inside a packed forward: rows [offset, offset + count) are its positions from `start` on.

    entry: the layer at which they come in, with `states` [count, hidden] as that layer's input; below it their KV is in the pages.
    """

    sequence: Sequence
    start: int
    count: int
    offset: int = 0
    entry: int = 0
    states: torch.Tensor | None = None

    @property
    def cuts(self) -> tuple[int, tuple[int, ...], tuple[int, ...]]:
        """The number of rows, the rows at which pieces end amid them, and those of them that a checkpoint is made after."""
        within, marks = self.sequence.cuts_within(self.start, self.count), self.sequence.marks
        return self.count, tuple(cut - self.start for cut in within), tuple(cut - self.start for cut in within if cut in marks)


@dataclass(slots=True)
class Batch:
    """One packed forward. `rows` includes the padding rows at the end. later: parts that come in at a layer, in the order of rows.

    acting: adapters, and the rows of `parts` that each acts on. token: notices weights that are not the model's. table: of pages, on a GPU.
    """

    parts: list[Part]
    rows: int
    numerics: Numerics
    later: list[Part] = field(default_factory=list)
    masks: dict[tuple[int, ...], torch.Tensor] = field(default_factory=dict)
    acting: list[tuple[Any, slice | torch.Tensor]] = field(default_factory=list)
    token: Any = None
    table: DeviceTable | None = None
    fixed: bool = False

    def __post_init__(self) -> None:
        self.join([])

    def join(self, parts: list[Part]) -> None:
        """Take in parts that come in here."""
        self.parts, self.table = [*self.parts, *parts], None
        spans: dict[Any, list[range]] = {}
        for part in self.parts:
            first = part.offset + max(0, part.sequence.acts_from - part.start)
            if part.sequence.adapter is not None and first < part.offset + part.count:
                spans.setdefault(part.sequence.adapter, []).append(range(first, part.offset + part.count))
        whole = bool(self.parts) and self.parts[0].sequence.state is not None  # an adapted one runs alone, adapted whole, however it is cut
        self.acting = [(adapter, slice(None) if whole else _rows(own)) for adapter, own in spans.items()]

    def on(self, device: torch.device) -> DeviceTable:
        """The table of the parts' pages, on their device."""
        if self.table is None:
            from .kernels.device_table import table_of

            self.table = table_of(self.parts, self.rows, device)
        return self.table

    def adapt(self, weight: torch.Tensor, x: torch.Tensor, y: torch.Tensor) -> None:
        """Adapt one product y [1, rows, out] of x [1, rows, in] by the modules of transformers, in place."""
        for adapter, rows in self.acting:
            if y.shape[-2] == self.rows or self.parts[0].sequence.state is not None:  # else it is seen that the adapter was lost
                adapter.add(rows, [weight], x.flatten(0, -2), [y.view(-1, y.shape[-1])])


def _rows(spans: list[range]) -> slice | torch.Tensor:
    """The rows of ascending spans, as an index."""
    if all(one.stop == other.start for one, other in zip(spans, spans[1:])):
        return slice(spans[0].start, spans[-1].stop)
    return torch.tensor([row for span in spans for row in span])


def _mask(batch: Batch, first: int, count: int, group: int, keys: range, attn: Attention) -> torch.Tensor:
    """True where a query row may not see one of these keys. Rows are (token, head of the group)."""
    key = (first, count, group, keys.start, attn.window, attn.chunk)
    if key not in batch.masks:
        hidden = attn.hidden(torch.arange(first, first + count)[:, None], torch.arange(keys.start, keys.stop)[None])
        batch.masks[key] = hidden.repeat_interleave(group, 0)
    return batch.masks[key]


def _tile(
    batch: Batch, q: torch.Tensor, pages: list[Page], layer: int, heads: slice, span: tuple[int, int, int], attn: Attention
) -> torch.Tensor:
    """One tile: q [heads, rows, width of keys] of positions span = (first, count, group) -> fp32 [heads, rows or more, width of values].

    Positions of one multiple of TILE take the same keys, whichever of them are asked for: so they are added in the same order.
    """
    first, count, group = span
    start = first // TILE * TILE
    if short := -q.shape[1] % batch.numerics.query_rows:
        q = torch.nn.functional.pad(q, (0, 0, 0, short))
    low = attn.first_key(start) // PAGE_TOKENS * PAGE_TOKENS
    sinks, widths = attn.sinks is not None, range(low, start + TILE, PAGE_TOKENS)
    blocks = [(pages[at // PAGE_TOKENS], min(PAGE_TOKENS, start + TILE - at)) for at in widths]
    scores = scratch("scores", q.shape[0] * q.shape[1] * (SINKS * sinks + start + TILE - low)).view(*q.shape[:2], -1)
    columns = scores[:, :, SINKS * sinks :].split([keys for _, keys in blocks], 2)
    for (page, keys), column in zip(blocks, columns):
        part = page.layer_keys[layer][heads, :, :keys]
        if q.dtype == torch.float32:
            torch.bmm(q, _wide("keys", part), out=column)
        else:
            column.copy_(torch.bmm(q, part))
    if q.dtype != torch.float32:
        scores.mul_(attn.scale)
    if attn.softcap:
        scores.div_(attn.softcap).tanh_().mul_(attn.softcap)
    seen = range(low if attn.first_key(first + count - 1) > low else start, start + TILE)
    scores[:, : count * group, seen.start - start - TILE :].masked_fill_(_mask(batch, first, count, group, seen, attn), float("-inf"))
    if attn.sinks is not None:
        scores[:, :, :SINKS] = float("-inf")
        scores[:, :, 0] = attn.sinks.detach().float().view(-1, group)[heads].repeat(1, -(-q.shape[1] // group))[:, : q.shape[1]]
    torch.threshold_(torch.softmax(scores, -1, out=scores), LEAST_WEIGHT, 0.0)  # products with subnormal numbers are slow
    out = torch.zeros(*q.shape[:2], pages[0].layer_values[layer].shape[-1], dtype=torch.float32)
    for (page, keys), column in zip(blocks, columns):
        part = page.layer_values[layer][heads, :keys]
        if q.dtype == torch.float32:
            out.baddbmm_(column, _wide("values", part))
        else:
            out.add_(torch.bmm(column.to(part.dtype), part))
    return out


def _wide(kind: str, part: torch.Tensor) -> torch.Tensor:
    """Keys or values of one page in fp32."""
    return part if part.dtype == torch.float32 else scratch(kind, part.numel()).view(part.shape).copy_(part)


def write(part: Part, layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
    """Store the new keys and values [count, kv_heads, head_dim] of one part."""
    if keys.device.type == "cpu" and len(keys) > 16:  # PyTorch transposes a matrix faster than it copies into a transposed one
        keys = keys.flatten(1).t().contiguous().t().view(keys.shape)
    part.sequence.write(layer, part.start, keys, values)


def attend(batch: Batch, part: Part, layer: int, query: torch.Tensor, attn: Attention) -> torch.Tensor:
    """Attention of one part: query [count, heads, width of keys] at positions from part.start on -> [count, heads, width of values].

    Sees every key at or before its own position that was written to the part's pages, and that the layer lets it see.
    """
    attn = attn.of(part)
    if query.device.type != "cpu" or attn.chosen is not None:
        return attend_gathered(part, layer, query, attn)
    count, heads, dim = query.shape
    kv_heads, _, width = part.sequence.pages[0].layer_values[layer].shape
    group = heads // kv_heads
    blocks = (part.start + count - 1) // PAGE_TOKENS + 1
    if batch.numerics.compiled:
        from .kernels import paged_attention

        pages = part.sequence.pages[:blocks]
        keys, values = [page.layer_keys[layer] for page in pages], [page.layer_values[layer] for page in pages]
        room = partial(scratch, "scores")
        return paged_attention.attend(query, keys, values, part.start, attn.scale, attn.window, attn.chunk, attn.softcap, attn.sinks, room)
    rows = query.view(count, kv_heads, group, dim).permute(1, 0, 2, 3)
    rows = rows.float() * attn.scale if batch.numerics.widen or rows.dtype == torch.float32 else rows
    out = query.new_empty(count, heads, width)
    target = out.view(count, kv_heads, group, width).permute(1, 0, 2, 3)
    at = part.start
    while at < part.start + count:
        stop = min(part.start + count, (at // TILE + 1) * TILE)
        n, own = stop - at, slice(at - part.start, stop - part.start)
        together = max(1, min(kv_heads, SCORE_ELEMENTS // (n * group * stop)))
        for head in range(0, kv_heads, together):
            chosen = slice(head, min(kv_heads, head + together))
            done = _tile(batch, rows[chosen, own].reshape(-1, n * group, dim), part.sequence.pages, layer, chosen, (at, n, group), attn)
            target[chosen, own] = done[:, : n * group].view(-1, n, group, width).to(query.dtype)
        at = stop
    return out


def attend_gathered(part: Part, layer: int, query: torch.Tensor, attn: Attention) -> torch.Tensor:
    """The same over gathered pages, for devices whose own kernels are faster than block products: `scaled_dot_product_attention`, or the
    formula itself where a layer caps its scores or has sinks."""
    low = attn.first_key(part.start)
    keys, values = part.sequence.read(layer, low, part.start + part.count)
    positions = torch.arange(part.start, part.start + part.count, device=query.device)[:, None]
    hidden = attn.hidden(positions, torch.arange(low, part.start + part.count, device=query.device)[None])
    group = query.shape[1] // keys.shape[1]
    keys, values = (t.expand(-1, group, -1) if t.shape[1] == 1 else t.repeat_interleave(group, 1) for t in (keys, values))
    q, keys, values = (t.transpose(0, 1) for t in (query, keys, values))
    if attn.softcap or attn.sinks is not None:
        scores = (q @ keys.transpose(1, 2)).float() * attn.scale
        if attn.softcap:
            scores = torch.tanh(scores / attn.softcap) * attn.softcap
        scores.masked_fill_(hidden, float("-inf"))
        if attn.sinks is not None:
            scores = torch.cat([scores, attn.sinks.float()[:, None, None].expand(-1, part.count, 1)], -1)
        return (scores.softmax(-1)[..., : keys.shape[1]].to(values.dtype) @ values).transpose(0, 1)
    mask = None if part.count == 1 and attn.chosen is None else ~hidden
    attention = torch.nn.functional.scaled_dot_product_attention
    with sdpa_kernel(_FUSED) if query.is_cuda else nullcontext():  # they want a batch
        return attention(q[None], keys[None], values[None], attn_mask=mask, scale=attn.scale)[0].transpose(0, 1)
