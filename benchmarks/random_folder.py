"""`python -m benchmarks.random_folder SHAPE FOLDER`: a checkpoint of a known shape with random weights, layer by layer, for --model.

Needs as much disk as the weights have bytes, and the memory of one layer. Knows no engine.
"""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
import typer
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from agentcache import toy
from agentcache.bench import shapes
from agentcache.bench.catalog import training_texts


def write(name: str, folder: Path, dtype: torch.dtype = torch.bfloat16) -> int:
    """Write config, tokenizer and one file of weights per layer; returns the bytes of all weights."""
    config = shapes.config(name)
    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(config, dtype=dtype)
    folder.mkdir(parents=True, exist_ok=True)
    config.architectures, config.dtype = [type(model).__name__], dtype
    config.save_pretrained(folder)
    toy.tokenizer(training_texts(), min(int(config.vocab_size), shapes.TOKENIZER_VOCAB)).save_pretrained(folder)
    files: defaultdict[str, dict[str, Any]] = defaultdict(dict)
    for parameter, weight in model.named_parameters():
        layer = next((part for part in parameter.split(".") if part.isdigit()), parameter.split(".")[-2])
        files[f"model-{layer}.safetensors"][parameter] = weight
    block = torch.randn(1 << 22, generator=torch.Generator().manual_seed(0)).mul_(0.02).to(dtype)
    places, total = {}, 0
    for number, (file, meta) in enumerate(files.items()):
        made = {parameter: torch.ones(weight.shape, dtype=dtype) for parameter, weight in meta.items()}
        for at, (parameter, weight) in enumerate(made.items()):
            if weight.ndim > 1:
                shapes.fill(weight, block, start=(97 * number + at) * 7919)
            places[parameter] = file
            total += weight.nbytes
        save_file(made, folder / file, metadata={"format": "pt"})
    index = {"metadata": {"total_size": total}, "weight_map": places}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    return total


def main(shape: str, folder: Path) -> None:
    """Write it, and say how large it is."""
    print(f"{write(shape, folder) / 1e9:.1f} GB")


if __name__ == "__main__":
    typer.run(main)
