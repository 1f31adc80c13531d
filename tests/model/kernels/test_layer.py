"""Decoding steps by compiled layers have the bits of the ordinary operations, or are not taken."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM, Qwen3Config, Qwen3ForCausalLM

from agentcache.model import int8, steps
from agentcache.model.attention import Batch
from agentcache.model.kernels import jit, layer, norm_rope

pytestmark = pytest.mark.skipif(jit.compiler() is None, reason="products cannot be compiled here")
SIZES: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 256,
    "intermediate_size": 384,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
}


def qwen3(dtype: torch.dtype = torch.bfloat16, **changes: Any) -> Any:
    torch.manual_seed(0)
    return Qwen3ForCausalLM(Qwen3Config(**(SIZES | changes))).to(dtype).eval()


def made(model: Any, rows: int, agrees: layer.Check | None = None, pairs: bool = False) -> layer.Programs | None:
    kernel: Any = "onednn" if pairs or model.dtype == torch.float32 else "upcast"
    with torch.inference_mode():
        return layer.programs(
            model, rows, pairs, agrees or partial(steps._agrees, batch=Batch([], 0, SimpleNamespace(kernel=kernel, even=1)))
        )


@pytest.mark.parametrize("rows", [1, 2, 3, 8, 16, 17, 252])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_a_layer_has_the_bits_of_the_ordinary_operations(rows: int, dtype: torch.dtype) -> None:
    assert made(qwen3(dtype), rows) is not None


@pytest.mark.skipif(not jit.multiplies_pairs(), reason="multiplies no pairs of bf16 numbers")
@pytest.mark.parametrize("rows", [1, 8, 40])
def test_a_layer_of_pairs_has_those_bits(rows: int) -> None:
    assert made(qwen3(), rows, pairs=True) is not None


@pytest.mark.parametrize("rows", [1, 17])
def test_a_layer_of_int8_weights_has_those_bits(rows: int) -> None:
    model = qwen3()
    int8.quantize(module for module in model.model.layers.modules() if isinstance(module, torch.nn.Linear))
    assert made(model, rows) is not None


@pytest.mark.parametrize("hidden", [64, 192, 1024, 2048, 3072])
def test_norms_of_any_width_are_added_up_as_pytorch_does(hidden: int) -> None:
    assert made(qwen3(hidden_size=hidden), 1) is not None


def test_biases_and_layers_without_head_norms() -> None:
    torch.manual_seed(0)
    biased = Qwen2ForCausalLM(Qwen2Config(**{k: v for k, v in SIZES.items() if k != "head_dim"}))
    for name, value in biased.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(value)
    assert made(biased.to(torch.bfloat16), 2) is not None
    assert made(LlamaForCausalLM(LlamaConfig(**SIZES, attention_bias=True, mlp_bias=True)).to(torch.bfloat16), 4) is not None


def test_another_order_of_additions_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a newer PyTorch might do: then nothing is compiled, and nothing is wrong."""
    found = jit.compiler()
    assert found is not None
    monkeypatch.setattr(found, "_compiled", {})
    checks = (norm_rope._sums_agree, norm_rope.norms_agree, norm_rope.heads_agree)
    for check in checks:
        check.cache_clear()
    original = norm_rope._squares

    def halves(code: Any, vector: Any, n: int) -> Any:
        if n < 256:
            return original(code, vector, n)
        middle = n // 2
        return original(code, vector, middle) + original(code, lambda at: vector(at + middle), middle)

    monkeypatch.setattr(norm_rope, "_squares", halves)
    assert made(qwen3(), 2) is None
    for check in checks:
        check.cache_clear()


def test_moved_weights_are_found_again() -> None:
    model = qwen3()
    first = made(model, 1)
    assert first is not None
    assert first is made(model, 1)
    model.model.layers[1].mlp.up_proj.weight = torch.nn.Parameter(model.model.layers[1].mlp.up_proj.weight.detach().clone())
    second = made(model, 1)
    assert second is not None
    assert second is not first


def test_what_it_cannot_take_is_left_alone() -> None:
    never: layer.Check = lambda *_: pytest.fail("asked to compare")  # noqa: E731
    assert made(qwen3(), layer.MOST_ROWS + 1, never) is None
    assert made(qwen3(num_key_value_heads=1, head_dim=16), 17, never) is None  # keys of no whole tile
    assert made(qwen3(head_dim=24), 1, never) is None
    other = qwen3()
    other.model.layers[1].mlp = qwen3(intermediate_size=256).model.layers[0].mlp
    assert made(other, 1, never) is None  # layers of two sizes


def test_hidden_states_do_not_depend_on_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole requests, several at once, with prompts long enough for many pages."""
    from agentcache import Engine, Sampling

    def answers() -> list[Any]:
        with Engine("embedded", store=None) as engine:
            prompts = ["The lighthouse " * 300, "A short one", "Tools: " * 40]
            return [engine.generate(text, sampling=Sampling(max_tokens=24, ignore_eos=True)).text for text in prompts]

    compiled = answers()
    monkeypatch.setattr(layer, "programs", lambda *_: None)
    assert compiled == answers()
