"""The model, its forward over a pack, and what moves its weights. Knows nothing of data or of time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from transformers import AttentionInterface, Qwen3Config, Qwen3ForCausalLM

from .packing import Pack

NAME = "pack"  # of the attention over packs


@dataclass(frozen=True, slots=True)
class Block:
    """Rows [first, last) of a pack that see the same rows before themselves. seen: their numbers, or how many from row 0 on."""

    first: int
    last: int
    seen: torch.Tensor | int
    mask: torch.Tensor  # [last - first, last - first], additive: causal among themselves

    def of(self, states: torch.Tensor) -> torch.Tensor:
        """[kv heads, seen + own, head dim] of [kv heads, n, head dim]."""
        if isinstance(self.seen, int) and self.seen == self.first:
            return states[:, : self.last]
        before = states[:, : self.seen] if isinstance(self.seen, int) else states.index_select(1, self.seen)
        return torch.cat((before, states[:, self.first : self.last]), 1)

    def add(self, states: torch.Tensor, change: torch.Tensor) -> None:
        """Adds a change of what `of` gave to where it came from."""
        if isinstance(self.seen, int):
            states[:, : self.seen] += change[:, : self.seen]
            states[:, self.first : self.last] += change[:, self.seen :]
        else:
            states.index_add_(1, self.seen, change[:, : len(self.seen)].to(states.dtype))
            states[:, self.first : self.last] += change[:, len(self.seen) :]


def blocks(made: Pack, size: int = 128) -> list[Block]:
    """The trunk in pieces of `size` rows, then the branches. No score is computed that the softmax would not see."""
    cuts = [*range(0, made.trunk, size), made.trunk]
    parts: list[tuple[int, int, torch.Tensor | int]] = [(first, last, first) for first, last in zip(cuts, cuts[1:])]
    for first, last, before in made.branches:
        count = len(before)
        straight = count == 0 or (before[0] == 0 and before[-1] == count - 1)  # in order, each once: the first `count` rows
        parts.append((first, last, count if straight else torch.from_numpy(before)))
    return [Block(first, last, seen, torch.full((last - first,) * 2, float("-inf")).triu_(1)) for first, last, seen in parts]


class Attention(torch.autograd.Function):
    """Attention of one pack, block by block. A group of query heads is more rows of one product: its keys are not repeated.

    Written out backwards too: autograd would fill and add whole tensors for each block's slice of them.
    """

    @staticmethod
    def forward(ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, pack: list[Block], half: bool) -> torch.Tensor:
        """query (scaled) [kv heads, group, n, head dim], key and value [kv heads, n, head dim]; returns the query's shape.

        half: all products but the scores in bf16, which would round the score of a head that copies by a tenth: of them only the
        factors are (trainer.round_factors).
        """
        kv, _, _, dim = query.shape
        kind = torch.bfloat16 if half else query.dtype
        out, shares, value = torch.empty_like(query), [], value.to(kind)
        for block in pack:
            scores = torch.bmm(query[:, :, block.first : block.last].reshape(kv, -1, dim), block.of(key).transpose(1, 2))
            scores.view(kv, -1, len(block.mask), scores.shape[2])[..., -len(block.mask) :].add_(block.mask)
            shares.append(scores.softmax(-1).to(kind))
            out[:, :, block.first : block.last] = torch.bmm(shares[-1], block.of(value)).view(kv, -1, len(block.mask), dim)
        ctx.save_for_backward(query, key, value, *shares)
        ctx.pack = pack
        return out

    @staticmethod
    def backward(ctx: Any, change: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, None, None]:
        query, key, value, *shares = ctx.saved_tensors
        kv, _, _, dim = query.shape
        queries, keys, values = torch.empty_like(query), torch.zeros_like(key), torch.zeros_like(key)
        query, key, change = (states.to(value.dtype) for states in (query, key, change))
        for block, share in zip(ctx.pack, shares):
            rows = slice(block.first, block.last)
            given = change[:, :, rows].reshape(kv, -1, dim)
            block.add(values, torch.bmm(share.transpose(1, 2), given))
            scores = torch.ops.aten._softmax_backward_data(torch.bmm(given, block.of(value).transpose(1, 2)), share, -1, share.dtype)
            queries[:, :, rows] = torch.bmm(scores, block.of(key)).view(kv, -1, len(block.mask), dim)
            block.add(keys, torch.bmm(scores.transpose(1, 2), query[:, :, rows].reshape(kv, -1, dim)))
        return queries, keys, values, None, None


def _attend(
    module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Any, scaling: float, pack: Any = None, **_: Any
) -> tuple[torch.Tensor, None]:
    _, heads, rows, dim = query.shape
    half = torch.is_autocast_enabled("cpu")
    with torch.autocast("cpu", enabled=False):
        grouped = (query[0].float() * scaling).view(key.shape[1], -1, rows, dim)
        out = Attention.apply(grouped, key[0].float().contiguous(), value[0].float().contiguous(), pack, half)
    return out.view(heads, rows, dim).transpose(0, 1)[None].contiguous(), None


AttentionInterface.register(NAME, _attend)


def build(
    vocab: int, *, layers: int = 7, hidden: int = 256, mlp: int = 640, heads: int = 8, kv_heads: int = 4, head_dim: int = 0, seed: int = 0
) -> Any:
    """A Qwen3 with tied embeddings, random weights. head_dim: channels of a head, by default hidden / heads."""
    config = Qwen3Config(
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=mlp,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim or hidden // heads,
        max_position_embeddings=8192,
        rope_parameters={"rope_type": "default", "rope_theta": 100_000.0},
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=2,
        pad_token_id=0,
    )
    torch.manual_seed(seed)
    model = Qwen3ForCausalLM(config)
    with torch.no_grad():  # sums over the residual stream start small, as in GPT-2
        for layer in model.model.layers:
            for last in (layer.self_attn.o_proj, layer.mlp.down_proj):
                last.weight.mul_((2 * layers) ** -0.5)
        model.model.embed_tokens.weight.mul_(2.0)  # also the head: a row must be long enough to name its token
    return model


def logits(model: Any, made: Pack, rows: Any) -> torch.Tensor:
    """[len(rows), vocab]: what predicts the tokens at these rows."""
    hidden = model.model(
        input_ids=torch.from_numpy(made.ids)[None],
        position_ids=torch.from_numpy(made.positions)[None],
        attention_mask={"full_attention": None},
        use_cache=False,
        pack=blocks(made),
    ).last_hidden_state[0]
    out: torch.Tensor = model.lm_head(hidden[torch.from_numpy(made.parents[rows])])
    return out


def loss(model: Any, made: Pack, choice: float = 1.0, fork: float = 1.0) -> tuple[torch.Tensor, float]:
    """The weighted sum of the cross entropies of all tokens with loss, and the sum of the weights.

    Tokens that decide between tools count `choice` times; those of them on which all else hangs count `fork` times.
    """
    rows = made.targets()
    losses = F.cross_entropy(logits(model, made, rows).float(), torch.from_numpy(made.ids[rows]), reduction="none")
    weights = torch.where(torch.from_numpy(np.isin(rows, made.choices())), choice, 1.0)
    weights = torch.where(torch.from_numpy(np.isin(rows, made.forks())), fork, weights)
    return (losses * weights).sum(), float(weights.sum())


class Muon(torch.optim.Optimizer):
    """Momentum whose updates are made orthogonal (Newton-Schulz, after Keller Jordan), with the step size of AdamW's updates."""

    def __init__(self, matrices: list[torch.Tensor], rate: float, decay: float, momentum: float = 0.95) -> None:
        super().__init__(matrices, {"lr": rate, "weight_decay": decay, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for matrix in group["params"]:
                mean = self.state[matrix].setdefault("mean", torch.zeros_like(matrix))
                mean.lerp_(matrix.grad, 1 - group["momentum"])
                update = orthogonal(matrix.grad.lerp(mean, group["momentum"]))
                matrix.mul_(1 - group["lr"] * group["weight_decay"])
                matrix.add_(update, alpha=-group["lr"] * 0.2 * max(matrix.shape) ** 0.5)


def orthogonal(matrix: torch.Tensor, steps: int = 5) -> torch.Tensor:
    """About the nearest matrix whose singular values are all one."""
    tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.T if tall else matrix
    x = x / (x.norm() + 1e-7)
    for _ in range(steps):
        square = x @ x.T
        x = 3.4445 * x + (-4.7750 * square + 2.0315 * square @ square) @ x
    return x.T if tall else x


Optimizers = list[torch.optim.Optimizer]


def optimizers(model: Any, rate: float, muon: bool, decay: float = 0.05) -> Optimizers:
    """Muon or AdamW for the matrices of the layers, AdamW without decay for norms and embeddings.

    Embeddings step less far (`scale`): each step pushes the rows of all tokens that were not there the same way, and at the full rate rows
    of rare tokens become one another within 150 steps (mean cosine 0.38): nothing that can be told apart, or copied.
    """
    matrices = [p for name, p in model.named_parameters() if p.ndim == 2 and "embed" not in name]
    others = [
        {"params": [p for p in model.parameters() if p.ndim != 2], "scale": 1.0},
        {"params": [p for name, p in model.named_parameters() if "embed" in name], "scale": 0.2},
    ]
    adam = {"lr": rate, "betas": (0.9, 0.98), "fused": True}
    first = Muon(matrices, rate, decay) if muon else torch.optim.AdamW(matrices, weight_decay=decay, **adam)
    return [first, torch.optim.AdamW(others, weight_decay=0.0, **adam)]


class Average:
    """A running mean of the weights: what is evaluated and exported. It is what a falling rate would lead to, at any time."""

    def __init__(self, model: Any, keep: float = 0.998) -> None:
        self.values = {name: value.detach().clone() for name, value in model.named_parameters()}
        self.keep = keep

    @torch.no_grad()
    def add(self, model: Any, step: int) -> None:
        keep = min(self.keep, (1 + step) / (10 + step))
        for name, value in model.named_parameters():
            self.values[name].lerp_(value, 1 - keep)

    @torch.no_grad()
    def swap(self, model: Any) -> None:
        """Exchanges the mean and the weights; a second time, back."""
        for name, value in model.named_parameters():
            kept = value.clone()
            value.copy_(self.values[name])
            self.values[name].copy_(kept)


def shape(config: Any) -> dict[str, int]:
    return {
        "vocab": config.vocab_size,
        "layers": config.num_hidden_layers,
        "hidden": config.hidden_size,
        "mlp": config.intermediate_size,
        "heads": config.num_attention_heads,
        "kv_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
    }
