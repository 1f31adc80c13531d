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


def optimizer(model: Any, rate: float, decay: float = 0.05) -> torch.optim.AdamW:
    """AdamW; matrices decay, norms and embeddings do not."""
    matrices = [p for name, p in model.named_parameters() if p.ndim == 2 and "embed" not in name]
    others = [p for name, p in model.named_parameters() if p.ndim != 2 or "embed" in name]
    groups = [{"params": matrices, "weight_decay": decay}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=rate, betas=(0.9, 0.98), fused=True)


# Checkpoints: one safetensors file, so that it is there whole or not at all


def save(path: Path, model: Any, adam: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    tensors = {f"model.{name}": value.detach() for name, value in model.named_parameters()}
    for name, value in model.named_parameters():
        for key, part in adam.state.get(value, {}).items():
            tensors[f"{key}.{name}"] = torch.as_tensor(part)
    tensors["rng"] = torch.get_rng_state()
    part = path.with_suffix(".part")
    save_file({name: value.contiguous() for name, value in tensors.items()}, part, {"state": json.dumps(state)})
    with open(part, "rb") as file:
        os.fsync(file.fileno())
    os.replace(part, path)


def restore(path: Path, model: Any, adam: torch.optim.Optimizer) -> dict[str, Any]:
    """Puts a checkpoint back and returns its state."""
    with safe_open(path, "pt") as file, torch.no_grad():
        for name, value in model.named_parameters():
            value.copy_(file.get_tensor(f"model.{name}"))
            adam.state[value] = {key: file.get_tensor(f"{key}.{name}") for key in ("step", "exp_avg", "exp_avg_sq")}
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
