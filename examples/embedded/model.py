"""The model, its forward over a pack, and its checkpoints. Knows nothing of data or of time."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors import safe_open
from safetensors.torch import save_file
from transformers import AttentionInterface, Qwen3Config, Qwen3ForCausalLM

from .packing import Pack

NAME = "pack"  # of the attention over packs


def _attend(
    module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Any, scaling: float, pack: Any = None, **_: Any
) -> tuple[torch.Tensor, None]:
    """Causal in the trunk, by the mask behind it. pack: (tokens in the trunk, additive mask of the other rows)."""
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    trunk, sight = pack
    parts = [F.scaled_dot_product_attention(query[:, :, :trunk], key[:, :, :trunk], value[:, :, :trunk], is_causal=True, scale=scaling)]
    if sight is not None:
        parts.append(F.scaled_dot_product_attention(query[:, :, trunk:], key, value, attn_mask=sight, scale=scaling))
    return torch.cat(parts, 2).transpose(1, 2).contiguous(), None


AttentionInterface.register(NAME, _attend)


def build(vocab: int, *, layers: int = 7, hidden: int = 256, mlp: int = 640, heads: int = 4, kv_heads: int = 2, seed: int = 0) -> Any:
    """A Qwen3 with tied embeddings, random weights."""
    config = Qwen3Config(
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=mlp,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=64,
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
    return model


def logits(model: Any, made: Pack, rows: Any) -> torch.Tensor:
    """[len(rows), vocab]: what predicts the tokens at these rows."""
    sight = None
    if made.trunk < len(made.ids):
        seen = torch.from_numpy(made.sight())
        sight = torch.zeros(seen.shape).masked_fill_(~seen, float("-inf"))[None, None]
    hidden = model.model(
        input_ids=torch.from_numpy(made.ids)[None],
        position_ids=torch.from_numpy(made.positions)[None],
        attention_mask={"full_attention": None},
        use_cache=False,
        pack=(made.trunk, sight),
    ).last_hidden_state[0]
    out: torch.Tensor = model.lm_head(hidden[torch.from_numpy(made.parents[rows])])
    return out


def loss(model: Any, made: Pack) -> tuple[torch.Tensor, int]:
    """The sum of the cross entropies of all tokens with loss, and their number."""
    rows = made.targets()
    return F.cross_entropy(logits(model, made, rows).float(), torch.from_numpy(made.ids[rows]), reduction="sum"), len(rows)


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
    """Muon or AdamW for the matrices of the layers, AdamW without decay for norms and embeddings."""
    matrices = [p for name, p in model.named_parameters() if p.ndim == 2 and "embed" not in name]
    others = [p for name, p in model.named_parameters() if p.ndim != 2 or "embed" in name]
    adam = {"lr": rate, "betas": (0.9, 0.98), "fused": True}
    first = Muon(matrices, rate, decay) if muon else torch.optim.AdamW(matrices, weight_decay=decay, **adam)
    return [first, torch.optim.AdamW(others, weight_decay=0.0, **adam)]


# Checkpoints: one safetensors file, so that it is there whole or not at all


def save(path: Path, model: Any, using: Optimizers, state: dict[str, Any]) -> None:
    tensors = {f"model.{name}": value.detach() for name, value in model.named_parameters()}
    for name, value in model.named_parameters():
        for one in using:
            for key, part in one.state.get(value, {}).items():
                tensors[f"{key}.{name}"] = torch.as_tensor(part)
    tensors["rng"] = torch.get_rng_state()
    part = path.with_suffix(".part")
    save_file({name: value.contiguous() for name, value in tensors.items()}, part, {"state": json.dumps(state)})
    with open(part, "rb") as file:
        os.fsync(file.fileno())
    os.replace(part, path)


def restore(path: Path, model: Any, using: Optimizers) -> dict[str, Any]:
    """Puts a checkpoint back and returns its state."""
    owner = {id(value): one for one in using for group in one.param_groups for value in group["params"]}
    values = dict(model.named_parameters())
    with safe_open(path, "pt") as file, torch.no_grad():
        for stored in file.keys():  # noqa: SIM118
            key, _, name = stored.partition(".")
            if key == "model":
                values[name].copy_(file.get_tensor(stored))
            elif name:
                owner[id(values[name])].state[values[name]][key] = file.get_tensor(stored)
        torch.set_rng_state(file.get_tensor("rng"))
        state: dict[str, Any] = json.loads(file.metadata()["state"])
    return state


def export(folder: Path, model: Any, tokenizer: Any) -> None:
    """A Hugging Face folder in bf16."""
    copy = build(**shape(model.config))
    copy.load_state_dict(model.state_dict())
    copy.to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def shape(config: Any) -> dict[str, int]:
    return {
        "vocab": config.vocab_size,
        "layers": config.num_hidden_layers,
        "hidden": config.hidden_size,
        "mlp": config.intermediate_size,
        "heads": config.num_attention_heads,
        "kv_heads": config.num_key_value_heads,
    }
