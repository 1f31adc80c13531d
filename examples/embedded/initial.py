"""Weights that can look up, copy and choose before the first step: what training would take millions of tokens to find.

    layer 0          a head sees the token 1 (2, 3) before the current one, by rotary angles alone, and notes some of it
    layers 1, 3, 5   heads look for where the last one, two or three tokens were noted, and say the token that stands there
    layer 1          a head notes the token with which the last name began: in a catalog, the name of the tool that a word belongs to
    layer 2          a head looks for the current token where it stood earlier, and takes over that note: a word's votes for tools
    layers 3, 5      a head sums the votes of the last few dozen tokens, and says them

The first two are the induction heads of Olsson et al. (2022), put down instead of waited for; the others are a search engine of three
heads. All of it is trained on; what is not named here is random. The residual stream starts as parts at right angles: one constant, the
notes, the name, the votes, and the token itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

SHARP = 2.0  # the norms of queries and keys: how far a head prefers what it looks for
OFFSETS = (1, 2, 3)
LOOKS = ((1.0, 0.5, 0.0), (1.0, 1.0, 0.5), (1.0, 1.0, 1.0))  # by kv head: how much the last three tokens count


class _Heads:
    """Puts heads into one model, one kv head and its queries at a time."""

    def __init__(self, model: Any, seed: int) -> None:
        self.config = config = model.config
        self.layers = model.model.layers
        self.dim, self.kv = config.head_dim, config.num_key_value_heads
        self.group = config.num_attention_heads // self.kv
        self.generator = torch.Generator().manual_seed(seed + 1)
        half = self.dim // 2
        self.angles = config.rope_parameters["rope_theta"] ** (-torch.arange(half) / half)
        self.slow = torch.cat([(torch.arange(half) >= half // 2).float()] * 2)[:, None]  # angles that turn little over a prompt

    def frame(self, rows: int, columns: int) -> torch.Tensor:
        """[rows, columns] whose rows are orthonormal."""
        return torch.linalg.qr(torch.randn(columns, rows, generator=self.generator))[0].T.contiguous()

    def turned(self, tokens: float, weight: torch.Tensor) -> torch.Tensor:
        """[head dim]: parts of these weights, rotated as if it stood so many tokens later."""
        angle = tokens * self.angles
        return torch.cat((angle.cos() * weight, angle.sin() * weight))

    def put(
        self,
        layer: int,
        owner: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        out: torch.Tensor,
        only: int | None = None,
    ) -> None:
        """Adds query and key (both [head dim, hidden]) to what is there; value ([n, hidden]) and out ([hidden, n]) take its place."""
        one = self.layers[layer].self_attn
        rows = slice(owner * self.dim, (owner + 1) * self.dim)
        one.k_proj.weight[rows] += key
        one.v_proj.weight[rows][: len(value)] = value
        for head in range(owner * self.group, (owner + 1) * self.group) if only is None else (only,):
            mine = slice(head * self.dim, (head + 1) * self.dim)
            one.q_proj.weight[mine] += query
            one.o_proj.weight[:, mine][:, : out.shape[1]] = out
        one.q_norm.weight.fill_(SHARP)
        one.k_norm.weight.fill_(SHARP)


@torch.no_grad()
def structure(model: Any, seed: int, starts: Sequence[int] = ()) -> None:
    """Puts these heads into a fresh model's weights, in place. starts: ids of the tokens behind which names begin."""
    heads = _Heads(model, seed)
    hidden, dim, group = model.config.hidden_size, heads.dim, heads.group
    basis = torch.linalg.qr(torch.randn(hidden, hidden, generator=heads.generator))[0].T
    constant, rest = basis[0], basis[1 + (len(OFFSETS) + 2) * dim :]
    notes = basis[1 : 1 + len(OFFSETS) * dim].view(-1, dim, hidden)
    name, votes = basis[1 + len(OFFSETS) * dim : 1 + (len(OFFSETS) + 2) * dim].view(2, dim, hidden)
    embedding = model.model.embed_tokens.weight
    length = embedding.norm(dim=1).mean()
    own = embedding @ rest.T @ rest
    embedding.copy_(0.4 * embedding + own * (length / own.norm(dim=1).mean()) + constant * length)
    read = heads.frame(dim, len(rest)) @ rest  # what is noted of a token

    fast = torch.linspace(1.0, 0.0, dim // 2).square()
    for head, offset in enumerate(OFFSETS):
        owner = head // group
        query, key = (torch.outer(heads.turned(-by, fast), constant) for by in (offset, 0))
        heads.put(0, owner, query, key * (head % group == 0), read, notes[head].T * 0.11, only=head)

    for layer in (1, 3, 5):
        said = heads.frame(min(len(rest), heads.kv * dim), len(rest)) @ rest
        for owner, look in enumerate(LOOKS):
            mixes = [heads.frame(dim, dim) * wanted for wanted in look]
            query = sum(mix @ (read if at == 0 else notes[at - 1]) for at, mix in enumerate(mixes))
            key = sum(mix @ notes[at] for at, mix in enumerate(mixes))
            part = said[owner * dim : (owner + 1) * dim]
            heads.put(layer, owner, heads.slow * query, heads.slow * key, part, part.T * 0.05)

    if starts:
        _search(heads, constant, read, notes[0], name, votes, embedding[list(starts)])


def _search(
    heads: _Heads,
    constant: torch.Tensor,
    read: torch.Tensor,
    note: torch.Tensor,
    name: torch.Tensor,
    votes: torch.Tensor,
    begins: torch.Tensor,
) -> None:
    """The heads that choose. begins: [n, hidden], embeddings of the tokens behind which names begin."""
    half, dim = heads.dim // 2, heads.dim
    order = torch.arange(half)
    middle = ((order >= 4) & (order <= 6)).float()  # of the angles: they tell a few dozen tokens from the rest

    mark = torch.nn.functional.normalize((read @ begins.T).sum(1), dim=0)
    towards, filler = torch.zeros(2, dim)
    towards[half - 1], filler[half - 2] = 3.0, 3.0  # the filler keeps keys of other tokens from being blown up by their norm
    near = heads.turned(0, ((order >= 6) & (order <= 8)).float()) * 1.7
    query = torch.outer(towards + near, constant)
    key = torch.outer(towards, mark @ note) + torch.outer(near + filler, constant)
    heads.put(1, 3, query, key, read, name.T * 0.2)

    same = heads.slow * heads.frame(dim, dim) @ read
    apart = torch.outer(heads.turned(0, ((order >= 4) & (order <= 5)).float()), constant) * 0.1  # not the token itself
    heads.put(2, 0, same - apart, same + apart, name, votes.T * 0.2)

    flat = torch.zeros(dim)
    flat[half - 1] = 2.0
    recent = torch.outer(heads.turned(0, middle) + flat, constant)
    for layer in (3, 5):
        heads.put(layer, 3, recent, recent, votes, read.T * 0.05)
