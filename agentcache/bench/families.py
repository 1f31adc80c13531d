"""Families of chat models, each as a tiny model with random weights: what reuse does for them, measured. Loads no weights.

A family is its model type in transformers and what a tiny configuration needs beside `SIZES`.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import torch

VOCAB = 600
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 4096, "initializer_range": 0.2, "sliding_window": 48,
    "attention_chunk_size": 64, "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "moe_num_experts": 4, "moe_k": 2,
    "num_experts_per_tok": 2, "num_experts_per_token": 2, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32,
    "n_group": 1, "topk_group": 1, "num_shared_experts": 1, "n_shared_experts": 1, "first_k_dense_replace": 1,
    "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 16,
    "intermediate_size_mlp": 128, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16,
    "linear_value_head_dim": 16, "linear_num_heads": 4, "linear_head_dim": 16,
    "mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 16, "mamba_expand": 2, "mamba_n_groups": 1,
    "mamba_num_heads": 8, "mamba_head_dim": 16, "ssm_state_size": 16, "n_groups": 1, "mamba_d_ssm": 128, "state_size": 16,
    "num_heads": 8, "expand": 2, "lru_width": 64, "attention_window_size": 48, "laurel_rank": 8, "hidden_size_per_layer_input": 16,
    "vocab_size_per_layer_input": VOCAB, "num_kv_shared_layers": 0, "index_n_heads": 16, "index_head_dim": 16, "index_topk": 64,
    "pad_token_id": None, "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip
_TWO_KINDS = {"layer_types": ["sliding_attention", "full_attention"] * 2}
_LATENT = {"qk_head_dim": 24, "head_dim": 8, "num_key_value_heads": 4}
_ZAMBA2 = {
    "layer_types": ["mamba", "hybrid"] * 2, "hybrid_layer_ids": [1, 3], "num_mem_blocks": 1, "adapter_rank": 8, "mamba_ngroups": 1,
    "mamba_headdim": 16, "n_mamba_heads": 8, "attention_head_dim": 32, "num_key_value_heads": 4,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Family:
    """Settings of a family's tiny model, and the expected outcome."""

    config: dict[str, Any]  # what differs from SIZES
    experts: bool = False  # some layers choose experts: of two that almost tie, another one than transformers does
    bits: bool = True  # bits are promised, not only tokens
    recurrent: bool = False  # some layers keep a state that does not grow
    unpaged: str = ""  # words of why its state cannot be paged, empty if it can


def _all(names: str, **options: Any) -> dict[str, Family]:
    config = options.pop("config", {})
    return {name: Family(config, **options) for name in names.split()}


TINY: dict[str, Family] = {
    **_all(
        "apertus arcee biogpt bitnet cohere cohere2 diffllama ernie4_5 exaone4 gemma gemma2 glm glm4 gpt_neox granite granite_swa helium "
        "hunyuan_v1_dense hyperclovax internlm3 iquestcoder jais2 llama ministral3 mistral nanochat nemotron olmo olmo2 opt persimmon phi "
        "phi3 qwen2 qwen3 seed_oss smollm3 stablelm starcoder2 vaultgemma"
    ),
    **_all("gemma3_text ministral olmo3", config=_TWO_KINDS),
    "gemma3n_text": Family({**_TWO_KINDS, "num_kv_shared_layers": 2}),
    **_all("gemma4_text gemma4_unified_text", config={**_TWO_KINDS, "global_head_dim": 32, "hidden_size_per_layer_input": 0}),
    "cwm": Family({"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}),
    **_all("minicpm3 youtu", config=_LATENT),
    **_all(
        "afmoe cohere2_moe dots1 ernie4_5_moe exaone_moe flex_olmo flint glm4_moe gpt_oss granitemoe granitemoe_swa granitemoeshared "
        "hunyuan_v1_moe hy_v3 kolibri1 mellum mimo_v2_flash minimax_m2 minimax_m3_vl_text mixtral olmoe "
        "qwen2_moe qwen3_moe solar_open",
        experts=True,
    ),
    **_all("jetmoe llama4_text", experts=True, bits=False),
    "laguna": Family(_TWO_KINDS, experts=True),
    **_all("axk1 deepseek_v2 deepseek_v3 glm4_moe_lite", config=_LATENT, experts=True),
    "longcat_flash": Family(
        {**_LATENT, "num_layers": 2, "ffn_hidden_size": 128, "expert_ffn_hidden_size": 32, "zero_expert_num": 2, "moe_topk": 2},
        experts=True,
        bits=False,
    ),
    **_all("axk2 deepseek_v32 dots3_note_text glm_moe_dsa hy_v4", config=_LATENT, experts=True, bits=False),
    **_all("olmo_hybrid qwen3_5_text falcon_h1 lfm3 mamba2", recurrent=True),
    **_all("nemotron_h qwen3_5_moe_text qwen3_next", recurrent=True, experts=True),
    "bamba": Family({"attn_layer_indices": [1, 3]}, recurrent=True),
    "zamba2": Family(_ZAMBA2, recurrent=True),
    "granitemoehybrid": Family({"layers_block_type": ["mamba", "attention"] * 2}, recurrent=True, experts=True),
    "lfm2": Family({"layer_types": ["conv", "full_attention"] * 2}, recurrent=True),
    "lfm2_moe": Family({"layer_types": ["conv", "full_attention"] * 2}, recurrent=True, experts=True),
    "zaya": Family({"num_experts_per_tok": 1}, recurrent=True, experts=True),
    "bailing_hybrid": Family({"layer_group_size": 2, "qk_head_dim": 24, "num_key_value_heads": 4}, recurrent=True, experts=True),
    "kimi_linear": Family(
        {"layer_types": ["linear_attention", "full_attention"] * 2, "num_key_value_heads": 4}, recurrent=True, experts=True
    ),
    "jamba": Family({"attn_layer_period": 2, "attn_layer_offset": 1}, recurrent=True, experts=True),
    "recurrent_gemma": Family({}, unpaged="continued after 64 tokens"),
    "minimax": Family({}, unpaged="uses cache of its own"),
    **_all("mamba falcon_mamba", recurrent=True),
    **_all("gpt2 gpt_bigcode", config={"n_embd": 64, "n_layer": 4, "n_head": 4, "n_positions": 4096}),
    "phimoe": Family({"sliding_window": None}, experts=True),
    "inkling_text": Family({}, unpaged="'position_bias'"),
    **_all("bloom falcon", unpaged="no layer calls attention"),
    **_all("deepseek_v4 doge", unpaged="not its own"),
}


def config_of(name: str, **changed: Any) -> Any:
    """The tiny configuration of a family, with some of its settings changed."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    kind = CONFIG_MAPPING[name]
    known = {field.name for field in fields(kind)}
    wanted = {key: value for key, value in SIZES.items() if key in known} | TINY[name].config | changed
    return kind(**wanted)


def build(name: str, dtype: torch.dtype = torch.float32, seed: int = 0, **changed: Any) -> Any:
    """A new model of a family, in eval mode, with some settings changed; the same arguments give the same weights."""
    from transformers import AutoModelForCausalLM

    from ..model.loading import with_soft_caps

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return with_soft_caps(AutoModelForCausalLM.from_config(config_of(name, **changed))).to(dtype).eval()
