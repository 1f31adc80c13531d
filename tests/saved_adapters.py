"""Adapters as PEFT saves them, for tiny models, with large random weights so that a lost one shows. Holds no tests."""

from __future__ import annotations

import shutil
import warnings
from pathlib import Path
from typing import Any

import torch

from agentcache import Engine
from tests import models
from tests.engines import decode

Answer = tuple[tuple[int, ...], torch.Tensor]

KINDS: dict[str, dict[str, Any]] = {
    "LoRA": {},
    "rsLoRA": {"use_rslora": True, "r": 8},
    "DoRA": {"use_dora": True},
    "patterns": {"rank_pattern": {"v_proj": 6}, "alpha_pattern": {"layers.1.self_attn.q_proj": 3}, "lora_alpha": 9},
    "upper layers": {"layers_to_transform": [1, 2]},
}
INVOCATION = "<|im_start|>assistant\n"
ACTIVATED: dict[str, Any] = {"alora_invocation_tokens": models.toy_tokenizer().encode(INVOCATION, add_special_tokens=False)}


def save(folder: Path, family: str = "qwen3", seed: int = 0, **options: Any) -> Path:
    """A folder with an adapter of a family's tiny model."""
    return save_for(models.build(family), folder, seed, **options)


def save_for(model: Any, folder: Path, seed: int = 0, **options: Any) -> Path:
    """A folder with an adapter of this model, which PEFT wraps."""
    from peft import LoraConfig, get_peft_model

    given = {"r": 4, "lora_alpha": 16, "target_modules": ["q_proj", "v_proj", "o_proj"], "init_lora_weights": False,
             "task_type": "CAUSAL_LM", **options}  # fmt: skip
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PEFT reads what transformers deprecates
        torch.manual_seed(seed)
        wrapped = get_peft_model(model, LoraConfig(**given))
        for name, parameter in wrapped.named_parameters():
            if "magnitude" in name:  # a fresh one changes nothing
                parameter.data.mul_(torch.rand_like(parameter) + 0.5)
        wrapped.save_pretrained(folder)
    return folder


def twin(folder: Path, other: Path) -> Path:
    """An adapter whose keys and values are those of another one: its digest differs, and what it answers."""
    from safetensors.torch import load_file, save_file

    shutil.copytree(folder, other)
    weights = load_file(folder / "adapter_model.safetensors")
    last = max(name for name in weights if name.endswith("o_proj.lora_B.weight"))  # what it adds reaches no keys
    save_file({**weights, last: weights[last] * 2}, other / "adapter_model.safetensors")
    return other


def by_peft(folder: Path, family: str = "qwen3", *, model: Any = None, **overrides: Any) -> Any:
    """The tiny model of a family, or this one, with that adapter, as PEFT computes it."""
    from peft import PeftModel

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return PeftModel.from_pretrained(model if model is not None else models.build(family, **overrides), str(folder)).eval()


def generated(model: Any, ids: list[int], tokens: int) -> tuple[list[int], torch.Tensor]:
    """Greedy tokens of PEFT and transformers, and the logits [tokens, vocab] of each."""
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        out = model.generate(
            input_ids=torch.tensor([ids]), attention_mask=torch.ones(1, len(ids), dtype=torch.long), max_new_tokens=tokens,
            min_new_tokens=tokens, do_sample=False, return_dict_in_generate=True, output_logits=True,
        )  # fmt: skip
    return out.sequences[0, len(ids) :].tolist(), torch.cat(out.logits)


def answer(running: Engine, prompt: Any, adapter: str | None, reuse: Any = "exact", tokens: int = 4) -> tuple[Answer, Any]:
    """Greedy tokens with the logits of each, and the receipt."""
    logits: list[torch.Tensor] = []
    done = running.generate(prompt, sampling=decode(tokens), adapter=adapter, reuse=reuse, on_logits=lambda row: logits.append(row.clone()))
    return (done.ids, torch.stack(logits)), done.receipt


def same(one: Answer, other: Answer) -> bool:
    return one[0] == other[0] and torch.equal(one[1], other[1])
