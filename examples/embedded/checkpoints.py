"""Weights as files: checkpoints, exported folders, wider heads, more layers. A file is there whole or not at all. Knows no data."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from transformers import GenerationConfig

from .model import Average, Optimizers, build, shape

STATE = "training.json"  # in an exported folder: how far its training was
NEW = 0.25  # of the size of a head's old channels, in a wider head: so that each new one has a direction to grow in


def save(path: Path, model: Any, using: Optimizers, average: Average, state: dict[str, Any]) -> None:
    tensors = {f"model.{name}": value.detach() for name, value in model.named_parameters()}
    tensors |= {f"average.{name}": value for name, value in average.values.items()}
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


def restore(path: Path, model: Any, using: Optimizers, average: Average) -> tuple[dict[str, Any], bool]:
    """Puts a checkpoint back; returns its state, and whether its heads were widened to the model's: optimizers forget what grew."""
    owner = {id(value): one for one in using for group in one.param_groups for value in group["params"]}
    values = dict(model.named_parameters())
    with safe_open(path, "pt") as file, torch.no_grad():
        parts: dict[str, dict[str, torch.Tensor]] = {}
        for stored in file.keys():  # noqa: SIM118
            key, _, name = stored.partition(".")
            parts.setdefault(key, {})[name] = file.get_tensor(stored)
        state: dict[str, Any] = json.loads(file.metadata()["state"])
    torch.set_rng_state(parts.pop("rng")[""])
    before = {name: tuple(value.shape) for name, value in parts["model"].items()}
    widened = _shape_of(parts["model"]) != shape(model.config)
    with torch.no_grad():
        for key, target in (("model", values), ("average", average.values)):
            found = parts.pop(key)
            for name, value in (wider(found, model.config.head_dim) if widened else found).items():
                target[name].copy_(value)
    for key, kept in parts.items():
        for name in kept.keys() & {name for name, value in values.items() if before[name] == tuple(value.shape)}:
            owner[id(values[name])].state[values[name]][key] = kept[name]
    return state, widened


def wider(tensors: dict[str, torch.Tensor], head_dim: int, seed: int = 0) -> dict[str, torch.Tensor]:
    """The same weights with twice the channels in each head: nearly the same model, which can tell more words apart by one look.

    A head of d channels turns channel i and i + d/2 together, at the frequency base^(-2i/d): those are 2i and 2i + d of 2d channels. New
    channels of queries and keys are small and random, those of values small, and not looked at yet. Norms make up for the larger length.
    """
    old = _shape_of(tensors)["head_dim"]
    if head_dim != 2 * old:
        raise ValueError(f"head_dim={head_dim!r}: the checkpoint's heads have {old} channels; give {old}, or {2 * old} to widen them")
    rng = torch.Generator().manual_seed(seed)
    turned = torch.cat((torch.arange(0, old, 2), torch.arange(old, 2 * old, 2)))
    out = {}
    for name, value in tensors.items():
        if name.endswith(("q_norm.weight", "k_norm.weight")):
            value = value * (1 + NEW**2) ** 0.5 * 2**-0.25
            new = value.mean().repeat(head_dim)
            new[turned] = value
        elif name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight")):
            rows = value.view(-1, old, value.shape[1])
            new = torch.randn(len(rows), head_dim, value.shape[1], generator=rng) * NEW * rows.square().mean((1, 2), keepdim=True).sqrt()
            new[:, turned if "v_proj" not in name else torch.arange(old)] = rows
            new = new.view(-1, value.shape[1])
        elif name.endswith("o_proj.weight"):
            columns = value.view(len(value), -1, old)
            new = torch.cat((columns, torch.zeros_like(columns)), 2).view(len(value), -1)
        else:
            new = value
        out[name] = new
    return out


def deeper(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The same model with one more layer, two thirds of the way up: it looks where the one below looks, and says nothing yet.

    Below the last layers, so that they can make use of it from the first step on.
    """
    at = _shape_of(tensors)["layers"] * 2 // 3
    out = {}
    for name, value in tensors.items():
        found = re.match(r"model\.layers\.(\d+)\.(.*)", name)
        if found is None:
            out[name] = value
            continue
        layer, rest = int(found[1]), found[2]
        out[f"model.layers.{layer + (layer > at)}.{rest}"] = value
        if layer == at:
            silent = rest in ("self_attn.o_proj.weight", "mlp.down_proj.weight")
            out[f"model.layers.{at + 1}.{rest}"] = torch.zeros_like(value) if silent else value.clone()
    return out


def renew(model: Any, average: Average, tokens: Sequence[int], seed: int = 0) -> None:
    """New embeddings for tokens that were never read: such are only ever told apart from what is said, all in the same way, until they are
    alike and one is taken for another (Land and Bartolo, "Fishing for Magikarp", 2024). New ones vary as those of other words do.
    """
    weight = model.get_input_embeddings().weight
    name = next(name for name, value in model.named_parameters() if value is weight)
    rows = torch.as_tensor(tokens)
    others = torch.ones(len(weight), dtype=torch.bool)
    others[rows] = False
    with torch.no_grad():
        mean, apart = weight[others].mean(0), weight[others] - weight[others].mean(0)
        mixed = torch.randn(len(rows), len(apart), generator=torch.Generator().manual_seed(seed)) / len(apart) ** 0.5
        weight[rows] = mean + mixed @ apart
        average.values[name][rows] = weight[rows]


def export(folder: Path, model: Any, tokenizer: Any) -> None:
    """A Hugging Face folder in bf16."""
    copy = build(**shape(model.config))
    copy.load_state_dict(model.state_dict())
    # an Engine then holds calls to their schemas: names and types are hard for so small a model
    ends = {"eos_token_id": model.config.eos_token_id, "pad_token_id": model.config.pad_token_id}
    copy.generation_config = GenerationConfig(**ends, strict_calls=True)
    copy.to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def export_checkpoint(path: Path, folder: Path, tokenizer: Any, last: float = 0.75) -> dict[str, Any]:
    """A Hugging Face folder in bf16 of a checkpoint; returns the training's state.

    last: the share of its last weights in what is exported; the rest is the running mean, which lags where the rate has just fallen.
    """
    with safe_open(path, "pt") as file:
        names = [name.removeprefix("average.") for name in file.keys() if name.startswith("average.")]  # noqa: SIM118
        tensors = {name: file.get_tensor(f"average.{name}").lerp(file.get_tensor(f"model.{name}"), last) for name in names}
        state: dict[str, Any] = json.loads(file.metadata()["state"])
    model = build(**_shape_of(tensors))
    model.load_state_dict(tensors, strict=False)  # the head is the embedding
    export(folder, model, tokenizer)
    (folder / STATE).write_text(json.dumps(state) + "\n", "utf-8")
    return state


def begin_from(folder: Path, model: Any, average: Average) -> dict[str, Any]:
    """Puts an exported folder's weights into model and average; returns the state its training had. The optimizers start anew.

    A model of more layers gets them by `deeper`; one of fewer is refused with a ValueError.
    """
    wanted = model.config.num_hidden_layers
    with safe_open(folder / "model.safetensors", "pt") as file, torch.no_grad():
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        if wanted < (layers := _shape_of(tensors)["layers"]):
            raise ValueError(f"layers={wanted!r}: the model in {str(folder)!r} has {layers}; give {layers}, or more to add some")
        for _ in range(wanted - layers):
            tensors = deeper(tensors)
        for name, value in model.named_parameters():
            value.copy_(tensors[name])
            average.values[name].copy_(value)
    state: dict[str, Any] = json.loads((folder / STATE).read_text("utf-8"))
    return state


def _shape_of(tensors: dict[str, torch.Tensor]) -> dict[str, int]:
    vocab, hidden = tensors["model.embed_tokens.weight"].shape
    first = "model.layers.0."
    head_dim = tensors[f"{first}self_attn.q_norm.weight"].shape[0]
    return {
        "vocab": vocab,
        "hidden": hidden,
        "layers": sum(name.endswith("q_norm.weight") for name in tensors),
        "mlp": tensors[f"{first}mlp.gate_proj.weight"].shape[0],
        "heads": tensors[f"{first}self_attn.q_proj.weight"].shape[0] // head_dim,
        "kv_heads": tensors[f"{first}self_attn.k_proj.weight"].shape[0] // head_dim,
        "head_dim": head_dim,
    }


def size(folder: Path) -> int:
    """How many parameters a folder's weights have."""
    with safe_open(folder / "model.safetensors", "pt") as file:
        return sum(math.prod(file.get_slice(name).get_shape()) for name in file.keys())  # noqa: SIM118
