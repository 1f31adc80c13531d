"""Weights as quantising libraries wrap them: hits in memory and on disk, edits, digests, what is quantised, adapters, refusals."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from agentcache.bench import families
from agentcache.errors import ConfigError, ModelError
from agentcache.model.fingerprint import Fingerprint
from agentcache.model.loading import quantize
from agentcache.model.wrapped_weights import is_quantized
from tests import models, wrapped
from tests.engines import chat, decode, engine, long_text
from tests.saved_adapters import save

TURNS = chat(long_text(150))
ANSWER = decode(4)


def digest(model: Any) -> str:
    return Fingerprint(model, "aten").whole


def projection(model: Any) -> Any:
    return model.model.layers[0].self_attn.q_proj


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_pages_are_found_in_memory_and_on_disk(dtype: torch.dtype, tmp_path: Path) -> None:
    model = wrapped.build(dtype=dtype)
    with engine(model=model, store=tmp_path) as first:
        off = first.generate(TURNS, sampling=ANSWER, reuse="off")
        assert first.generate(TURNS, sampling=ANSWER).ids == off.ids
        hit = first.generate(TURNS, sampling=ANSWER)
        assert (hit.ids, hit.receipt.computed_tokens, hit.receipt.bitwise) == (off.ids, 1, False)
        assert first.flush()
    with engine(model=wrapped.build(dtype=dtype), store=tmp_path) as second:
        again = second.generate(TURNS, sampling=ANSWER)
        assert again.ids == off.ids
        assert again.receipt.disk_tokens == hit.receipt.cached_tokens


@pytest.mark.parametrize("family", ["youtu", "qwen3_5_text", "gpt_oss"])
def test_layers_of_other_kinds_take_wrapped_weights(family: str) -> None:
    with engine(model=wrapped.wrap(families.build(family))) as running:
        off = running.generate(TURNS, sampling=ANSWER, reuse="off")
        running.generate(TURNS, sampling=ANSWER)
        hit = running.generate(TURNS, sampling=ANSWER)
        assert hit.ids == off.ids
        assert hit.receipt.cached_tokens > 0.8 * hit.receipt.prompt_tokens


def in_place(model: Any) -> None:
    projection(model).weight.scale.mul_(-1)


def through_data(model: Any) -> None:
    projection(model).weight.numbers.data.neg_()


def exchanged(model: Any) -> None:
    weight = projection(model).weight
    weight.scale = -weight.scale


def setting(model: Any) -> None:
    projection(model).weight.gain = -1.0


def swapped(model: Any) -> None:
    torch.utils.swap_tensors(projection(model).weight, model.model.layers[1].self_attn.q_proj.weight)


@pytest.mark.parametrize("edit", [in_place, through_data, exchanged, setting, swapped])
def test_an_edit_of_what_is_wrapped_is_noticed(edit: Callable[[Any], None]) -> None:
    model = wrapped.build()
    before = digest(model)
    with engine(model=model) as running:
        running.generate(TURNS, sampling=ANSWER)
        assert running.generate(TURNS, sampling=ANSWER).receipt.computed_tokens == 1
        edit(model)
        edited = running.generate(TURNS, sampling=ANSWER)
        assert edited.receipt.cached_tokens == 0
        assert edited.ids == running.generate(TURNS, sampling=ANSWER, reuse="off").ids
    assert digest(model) != before


def test_equal_models_have_equal_digests() -> None:
    assert digest(wrapped.build()) == digest(wrapped.build()) != digest(models.build("qwen3"))


def test_dequantised_weights_keep_bits_and_own_loop() -> None:
    model = models.build("qwen3")
    model.hf_quantizer, model.quantization_method = object(), "fp8"  # as transformers leaves them where it has dequantised
    assert not is_quantized(model)
    with engine(model=model) as running:
        assert running.generate(TURNS, sampling=ANSWER).receipt.bitwise
        assert running.model.stepped
    projection(model).weight = nn.Parameter(projection(model).weight.to(torch.float8_e4m3fn), requires_grad=False)
    assert is_quantized(model)


def test_a_lora_acts_on_wrapped_weights(tmp_path: Path) -> None:
    with engine(model=wrapped.build()) as running:
        base = running.generate(TURNS, sampling=ANSWER)
        running.add_adapter("one", save(tmp_path / "one"))
        first = running.generate(TURNS, sampling=ANSWER, adapter="one")
        assert first.ids != base.ids
        hit = running.generate(TURNS, sampling=ANSWER, adapter="one")
        assert (hit.ids, hit.receipt.computed_tokens) == (first.ids, 1)
        assert running.generate(TURNS, sampling=ANSWER, adapter="one", reuse="off").ids == first.ids
        with pytest.raises(ModelError, match="products cannot be adapted"):
            running.add_adapter("two", save(tmp_path / "two", use_dora=True))


def test_parameters_may_lie_in_a_mapping_of_others() -> None:
    model = wrapped.build()
    for module in model.modules():
        module.__dict__["_parameters"] = wrapped.Held(module._parameters)
    with engine(model=model) as running:
        running.generate(TURNS, sampling=ANSWER)
        assert running.generate(TURNS, sampling=ANSWER).receipt.computed_tokens == 1
        in_place(model)
        assert running.generate(TURNS, sampling=ANSWER).receipt.cached_tokens == 0


def test_int8_of_our_own_refuses_quantised_weights() -> None:
    with pytest.raises(ConfigError, match="whose weights are quantised already"):
        quantize(wrapped.build())


def test_weights_wrapped_under_a_running_engine_promise_no_bits() -> None:
    model = models.build("qwen3")
    with engine(model=model) as running:
        assert running.generate(TURNS, sampling=ANSWER).receipt.bitwise
        wrapped.wrap(model)
        first = running.generate(TURNS, sampling=ANSWER)
        hit = running.generate(TURNS, sampling=ANSWER)
        off = running.generate(TURNS, sampling=ANSWER, reuse="off")
        assert (first.receipt.cached_tokens, hit.receipt.computed_tokens) == (0, 1)
        assert first.ids == hit.ids == off.ids
        assert not any(one.receipt.bitwise for one in (first, hit))
