"""Tiny random models and a toy tokenizer, made in the test process: no network, no files. Every family the engine pages is here.

`build("qwen3")`, `build("mistral", torch.bfloat16, sliding_window=8)`: overrides are fields of the family's config.
"""

from __future__ import annotations

import functools
from importlib.resources import files
from typing import Any

import torch
import transformers
from transformers import PreTrainedTokenizerFast

from agentcache import toy

VOCAB = 600
CONTEXT = 4096

_BASE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": CONTEXT,
    "initializer_range": 0.2,  # sharp enough that another state gives other tokens
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
_MOE: dict[str, Any] = {"num_hidden_layers": 2, "moe_intermediate_size": 32, "num_experts_per_tok": 2}

# name of the variant -> (prefix of the classes in transformers, what differs from _BASE)
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama_mha": ("Llama", {"num_key_value_heads": 4}),
    "llama_mqa": ("Llama", {"num_key_value_heads": 1}),
    "qwen2": ("Qwen2", {}),
    "qwen3": ("Qwen3", {"head_dim": 32}),
    "qwen3_moe": ("Qwen3Moe", {"head_dim": 32, "num_experts": 4, **_MOE}),
    "mistral": ("Mistral", {"head_dim": 16, "sliding_window": None}),
    "mistral_window": ("Mistral", {"head_dim": 16, "sliding_window": 48}),
    "mixtral": ("Mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2, "num_hidden_layers": 2}),
    "phi3": ("Phi3", {"original_max_position_embeddings": CONTEXT}),
    "granite": ("Granite", {"attention_multiplier": 0.25, "residual_multiplier": 0.5, "embedding_multiplier": 2.0, "logits_scaling": 2.0}),
    "olmo2": ("Olmo2", {}),
    "smollm3": ("SmolLM3", {"num_hidden_layers": 4, "no_rope_layer_interval": 4}),
}


def build(family: str, dtype: torch.dtype = torch.float32, *, seed: int = 0, **overrides: Any) -> Any:
    """A new random model of one of FAMILIES, in eval mode. Takes tens of milliseconds; the same arguments give the same weights."""
    prefix, own = FAMILIES[family]
    config = getattr(transformers, f"{prefix}Config")(**{**_BASE, **own, **overrides})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = getattr(transformers, f"{prefix}ForCausalLM")(config)
    for name, parameter in model.named_parameters():
        if name.endswith("bias") or "norm" in name:  # fresh ones are all zero or all one: a lost bias would not show
            torch.nn.init.normal_(parameter, float("norm" in name), 0.1, generator=torch.Generator().manual_seed(seed))
    return model.to(dtype).eval()


_TEXTS = (
    "You are a helpful assistant of a lighthouse. You may call functions and you answer in plain sentences.",
    "The keeper writes down the wind, the tide and every ship that passes, and reads the log to whoever asks for it.",
    "What is the weather in Port Averil tomorrow? I will look that up. The result says that the wind turns to the north.",
    '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Port Averil", "days": 3}}\n</tool_call>',
    '{"type": "function", "function": {"name": "search", "description": "Search the log.", "parameters": {"type": "object", '
    '"properties": {"query": {"type": "string"}, "limit": {"type": "integer"}}, "required": ["query"]}}}',
    "<tool_response>\n[1, 2.5, true, null]\n</tool_response> 0 1 2 3 4 5 6 7 8 9 10 2026-11-18 [a] (b) {c}",
)


def toy_tokenizer() -> PreTrainedTokenizerFast:
    """A new byte-level BPE tokenizer with VOCAB ids, <|im_end|> as eos and a ChatML template with tools."""
    made = PreTrainedTokenizerFast(
        tokenizer_object=_trained(), eos_token="<|im_end|>", pad_token="<|endoftext|>", additional_special_tokens=["<|im_start|>"]
    )
    made.chat_template = toy.CHAT_TEMPLATE
    return made


@functools.cache
def _trained() -> Any:
    more = files("agentcache.bench").joinpath("museum.json").read_text(encoding="utf-8")
    return toy.tokenizer((*_TEXTS, more), VOCAB).backend_tokenizer
