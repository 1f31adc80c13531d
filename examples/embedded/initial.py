"""Weights that can look up and copy before the first step: what training would take millions of tokens to find.

    layer 0          a head sees the token 1 (2, 3, 4) before the current one, by rotary angles alone, and notes some of it
    layers 1, 3, 5   heads look for where the last one, two or three tokens were noted, and say the token that stands there
    layers 2, 4, 6   half of the heads look for the current token wherever else it stands

These are the induction heads of Olsson et al. (2022), put down instead of waited for. All of it is trained on; what is not named
here is random. The residual stream starts as three parts at right angles: one constant, the notes, and the token itself.
"""

from __future__ import annotations

import math
from typing import Any

import torch

SHARP = 2.0  # the norms of queries and keys: how far a head prefers what it looks for
OFFSETS = (1, 2, 3, 4)
LOOKS = ((1.0, 0.5, 0.0), (1.0, 1.0, 0.5), (1.0, 1.0, 1.0), (0.5, 1.0, 0.5))  # by kv head: how much the last three tokens count


def _turned(config: Any, tokens: int) -> torch.Tensor:
    """[head dim]: rotated as if it stood so many tokens later; fast angles, which tell neighbours apart, weigh most."""
    half = config.head_dim // 2
    angle = tokens * config.rope_parameters["rope_theta"] ** (-torch.arange(half) / half)
    return torch.cat((angle.cos(), angle.sin())) * torch.cat([torch.linspace(1.0, 0.0, half).square()] * 2)


@torch.no_grad()
def structure(model: Any, seed: int) -> None:
    """Puts these heads into a fresh model's weights, in place. Needs a head for each offset and twice the notes' width."""
    config = model.config
    hidden, dim, kv = config.hidden_size, config.head_dim, config.num_key_value_heads
    group = config.num_attention_heads // kv
    generator = torch.Generator().manual_seed(seed + 1)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    basis = torch.linalg.qr(random(hidden, hidden))[0].T
    constant, notes, rest = basis[0], basis[1 : 1 + len(OFFSETS) * dim].view(-1, dim, hidden), basis[1 + len(OFFSETS) * dim :]
    embedding = model.model.embed_tokens.weight
    length = embedding.norm(dim=1).mean()
    own = embedding @ rest.T @ rest
    embedding.copy_(0.4 * embedding + own * (length / own.norm(dim=1).mean()) + constant * length)
    read = torch.linalg.qr(random(len(rest), dim))[0].T @ rest  # what is noted of a token

    first = model.model.layers[0].self_attn
    for head, offset in enumerate(OFFSETS):
        owner = head // group
        rows, kv_rows = slice(head * dim, (head + 1) * dim), slice(owner * dim, (owner + 1) * dim)
        first.q_proj.weight[rows] += torch.outer(_turned(config, -offset), constant)
        if head % group == 0:
            first.k_proj.weight[kv_rows] += torch.outer(_turned(config, 0), constant)
            first.v_proj.weight[kv_rows] = read
        first.o_proj.weight[:, rows] = notes[head].T * (length / math.sqrt(hidden / 8))  # as long as what was read
    first.q_norm.weight.fill_(SHARP)
    first.k_norm.weight.fill_(SHARP)

    slow = torch.cat([(torch.arange(dim // 2) >= dim // 4).float()] * 2)[:, None]  # angles that turn little over a prompt
    for layer in model.model.layers[1::2]:
        one = layer.self_attn
        said = torch.linalg.qr(random(len(rest), min(len(rest), kv * dim)))[0].T @ rest
        for owner, look in zip(range(kv), LOOKS):
            kv_rows = slice(owner * dim, (owner + 1) * dim)
            part = said[kv_rows]
            one.v_proj.weight[kv_rows][: len(part)] = part
            mixes = [torch.linalg.qr(random(dim, dim))[0] * wanted for wanted in look]
            key = sum(mix @ notes[at] for at, mix in enumerate(mixes))
            query = sum(mix @ (read if at == 0 else notes[at - 1]) for at, mix in enumerate(mixes))
            one.k_proj.weight[kv_rows] += slow * key
            for head in range(owner * group, (owner + 1) * group):
                rows = slice(head * dim, (head + 1) * dim)
                one.q_proj.weight[rows] += slow * query
                one.o_proj.weight[:, rows][:, : len(part)] = part.T * 0.05
        one.q_norm.weight.fill_(SHARP)
        one.k_norm.weight.fill_(SHARP)
    for layer in model.model.layers[2::2]:
        one = layer.self_attn
        for owner in range(0, kv, 2):
            same = slow * (torch.linalg.qr(random(dim, dim))[0] @ read)
            one.k_proj.weight[owner * dim : (owner + 1) * dim] += same
            for head in range(owner * group, (owner + 1) * group):
                one.q_proj.weight[head * dim : (head + 1) * dim] += same
        one.q_norm.weight.fill_(SHARP)
        one.k_norm.weight.fill_(SHARP)
