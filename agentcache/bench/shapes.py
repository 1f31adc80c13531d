"""Known model shapes with random weights, and a tokenizer trained on the spot: timing does not depend on what the weights say.

Built without initialisers, then filled from one block of normal numbers. Knows no engine.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ..errors import ConfigError

TOKENIZER_VOCAB = 8192  # learned from a few hundred kB of text: about 4 characters per token, as real tokenizers have on JSON
_BLOCK = 4_194_319  # prime, so that no two rows of a weight are the same cut of the block
_INIT_STD = 0.02

_LLAMA3_ROPE = {
    "rope_type": "llama3", "rope_theta": 5e5, "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}  # fmt: skip
_SIZES = "hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads head_dim vocab_size".split()

Shape = tuple[str, dict[str, Any]]


def _rope(theta: float) -> dict[str, Any]:
    return {"rope_type": "default", "rope_theta": theta}


_QWEN3 = {"rms_norm_eps": 1e-6, "rope_parameters": _rope(1e6), "max_position_embeddings": 40960}


def _shape(family: str, sizes: tuple[int, ...], *, tied: bool, **more: Any) -> Shape:
    return family, {**dict(zip(_SIZES, sizes, strict=True)), "tie_word_embeddings": tied, **more}


def _every(layers: int, period: int, last: str, others: str) -> list[str]:
    return [last if (at + 1) % period == 0 else others for at in range(layers)]


# name -> (family of transformers, its published config; ids of special tokens are left out: they belong to the tokenizer)
SHAPES: dict[str, Shape] = {
    "qwen3-0.6b": _shape("qwen3", (1024, 3072, 28, 16, 8, 128, 151936), tied=True, **_QWEN3),
    "qwen3-8b": _shape("qwen3", (4096, 12288, 36, 32, 8, 128, 151936), tied=False, **_QWEN3),
    "llama-3.2-1b": _shape(
        "llama", (2048, 8192, 16, 32, 8, 64, 128256), tied=True,
        rms_norm_eps=1e-5, rope_parameters=_LLAMA3_ROPE, max_position_embeddings=131072,
    ),
    "mistral-7b": _shape(  # v0.3: without the sliding window of v0.1
        "mistral", (4096, 14336, 32, 32, 8, 128, 32768), tied=False,
        rms_norm_eps=1e-5, rope_parameters=_rope(1e6), max_position_embeddings=32768, sliding_window=None,
    ),
    "llama-2-7b": _shape(
        "llama", (4096, 11008, 32, 32, 32, 128, 32000), tied=False,
        rms_norm_eps=1e-5, rope_parameters=_rope(1e4), max_position_embeddings=4096,
    ),
    "gemma-3-1b": _shape(
        "gemma3_text", (1152, 6912, 26, 4, 1, 256, 262144), tied=True,
        query_pre_attn_scalar=256, sliding_window=512, max_position_embeddings=32768,
        layer_types=_every(26, 6, "full_attention", "sliding_attention"),
    ),
    "qwen3.5-0.8b": _shape(
        "qwen3_5_text", (1024, 3584, 24, 8, 2, 256, 248320), tied=True,
        max_position_embeddings=262144, linear_num_key_heads=16, linear_num_value_heads=16, linear_key_head_dim=128,
        linear_value_head_dim=128, layer_types=_every(24, 4, "full_attention", "linear_attention"),
    ),
    "granite-4-h-1b": _shape(
        "granitemoehybrid", (1536, 4096, 40, 12, 4, 128, 100352), tied=True,
        shared_intermediate_size=4096, num_local_experts=0, num_experts_per_tok=0, position_embedding_type="nope",
        mamba_n_heads=48, mamba_d_head=64, mamba_d_state=128, mamba_expand=2, max_position_embeddings=131072,
        layers_block_type=["attention" if layer in (5, 15, 25, 35) else "mamba" for layer in range(40)],
    ),
    "gpt-oss-tiny": _shape(  # the kinds of its layers; no such model is published
        "gpt_oss", (1024, 1024, 12, 16, 4, 64, 32768), tied=False,
        num_local_experts=8, num_experts_per_tok=2, sliding_window=128, max_position_embeddings=131072,
    ),
    "small": _shape("qwen3", (128, 384, 2, 4, 2, 64, TOKENIZER_VOCAB), tied=True, **{**_QWEN3, "max_position_embeddings": 131072}),
}  # fmt: skip


def config(name: str) -> Any:
    """The transformers config of a named shape."""
    from transformers import AutoConfig

    if name not in SHAPES:
        raise ConfigError(f"shape={name!r} is unknown: use one of {', '.join(SHAPES)}, or pass a model folder instead")
    family, fields = SHAPES[name]
    none = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}  # nothing but a length may end a timed generation
    return AutoConfig.for_model(family, **fields, **none)


def random_model(config: Any, dtype: Any, *, seed: int = 0) -> Any:
    """A causal model of this config with random weights: seconds and no extra memory, also for 8 billion of them."""
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.initialization import no_init_weights

    with no_init_weights():
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    model.tie_weights()
    block = torch.randn(_BLOCK, generator=torch.Generator().manual_seed(seed)).mul_(_INIT_STD).to(dtype)
    with torch.no_grad():
        for number, (name, weight) in enumerate(model.named_parameters()):
            if weight.ndim > 1:
                fill(weight, block, start=number * 7919)
            elif not name.endswith("norm.weight"):  # a family's own norms are made neutral: of ones, or of zeros where it adds one
                weight.fill_(0.0 if name.endswith(("bias", "sinks")) else 1.0)
        for module in model.modules():
            if isinstance(module, torch.nn.LayerNorm):
                module.reset_parameters()
    return model.eval().requires_grad_(False)


def fill(tensor: Any, block: Any, *, start: int = 0) -> None:
    """Write the numbers of `block` [n] into a contiguous tensor, from its place `start` on, over and over."""
    flat, at, offset = tensor.view(-1), 0, start % len(block)
    while at < len(flat):
        count = min(len(block) - offset, len(flat) - at)
        flat[at : at + count].copy_(block[offset : offset + count])
        at, offset = at + count, 0


def load(name: str, *, dtype: str = "bfloat16", texts: Iterable[str] = (), seed: int = 0) -> tuple[Any, Any]:
    """(model, tokenizer) of a named shape. texts: what the tokenizer is to be good at, besides the benchmark's own tools."""
    import torch

    from .. import toy
    from .catalog import training_texts

    shape = config(name)
    model = random_model(shape, getattr(torch, dtype), seed=seed)
    model.name_or_path = model.config._name_or_path = name
    return model, toy.tokenizer([*training_texts(), *texts], min(int(shape.vocab_size), TOKENIZER_VOCAB))
