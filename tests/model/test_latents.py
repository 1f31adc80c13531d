"""Latent attention: pages hold latents, answers are the model's own, and what changes `kv_b_proj` changes them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from agentcache.bench import families
from agentcache.errors import ModelError
from agentcache.model import attention_interface, latents, steps
from agentcache.model.hf import HFModel
from tests.engines import chat, engine, long_text
from tests.families import Run, stock_logits, tokens
from tests.saved_adapters import ACTIVATED, answer, by_peft, generated, same, save_for

LATENT = ["minicpm3", "youtu", "deepseek_v2", "deepseek_v3", "glm4_moe_lite", "kimi_linear"]
RANK, ROTATED = 16, 8  # of the tiny models
TARGETS = {"target_modules": ["kv_b_proj", "o_proj"]}


def adapted(folder: Path, **options: Any) -> Any:
    """A tiny model as PEFT adapts it, and the folder with its adapter."""
    save_for(families.build("youtu"), folder, **TARGETS, **options)
    return by_peft(folder, model=families.build("youtu"))


def agrees(found: tuple[tuple[int, ...], torch.Tensor], expected: tuple[list[int], torch.Tensor]) -> bool:
    return list(found[0]) == expected[0] and float((found[1] - expected[1]).abs().max()) <= 1e-4


@pytest.mark.parametrize("family", LATENT)
def test_pages_hold_latents_and_logits_are_the_model_s(family: str) -> None:
    model, ids = families.build(family), tokens(560)
    stock = stock_logits(model, ids)
    held = HFModel(model)
    assert held.spec is not None
    assert set(held.spec.layer_widths) == {(1, ROTATED + RANK, RANK)}
    if not held.spec.recurrent:
        run = Run(held, ids).chunks(200, 1, 330)
        assert max(float((row - stock[at]).abs().max()) for at, row in run.logits.items()) < 1e-4
    assert torch.equal(stock_logits(model, ids), stock), "its owner's calls are its own"
    held.close()
    assert not any("expand_kv" in vars(module) for module in model.modules())


def test_keys_can_stand_elsewhere_as_their_angles_come_first() -> None:
    assert HFModel(families.build("youtu")).unrotated == ()


def test_a_product_that_cannot_be_taken_apart_leaves_heads() -> None:
    model = families.build("youtu")
    layer = model.model.layers[1].self_attn.kv_b_proj
    layer.bias = torch.nn.Parameter(torch.ones(layer.out_features))
    held = HFModel(model)
    assert held.support.paged
    assert held.spec is not None
    assert held.spec.layer_widths[0][0] == 4


def test_an_impure_product_promises_tokens_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(latents, "_multiple", lambda *_: 0)
    held = HFModel(families.build("youtu"))
    assert held.support.paged
    assert not held.bitwise


@pytest.mark.parametrize("options", [{}, {"use_rslora": True, "r": 8}, {"use_dora": True}])
def test_an_adapter_of_the_product_answers_as_in_peft(options: dict[str, Any], tmp_path: Path) -> None:
    wrapped, text = adapted(tmp_path, **options), long_text(150)
    with engine(model=families.build("youtu"), store=None) as running:
        running.add_adapter("one", tmp_path)
        for name in ("one", None, "one"):
            for turns in ([text], [text, "Noted.", "And now?"]):
                found, receipt = answer(running, chat(*turns), name)
                assert same(found, answer(running, chat(*turns), name, "off")[0])
                assert receipt.bitwise
        assert receipt.computed_tokens < 8
        assert agrees(found, generated(wrapped, list(running.renderer.render(chat(*turns)).ids), 4))


def test_an_activated_adapter_of_the_product_is_refused(tmp_path: Path) -> None:
    save_for(families.build("youtu"), tmp_path, **TARGETS, **ACTIVATED)
    refused = pytest.raises(ModelError, match="kv_b_proj' of latent attention: there it can neither be Activated LoRA nor")
    with engine(model=families.build("youtu"), store=None) as running, refused:
        running.add_adapter("one", tmp_path)


def test_a_product_that_its_owner_changes_later_is_obeyed(tmp_path: Path) -> None:
    wrapped = adapted(tmp_path)
    model = families.build("youtu")
    with engine(model=model, store=None) as running:
        prompt = chat(long_text(40))
        ids = list(running.renderer.render(prompt).ids)
        before, _ = answer(running, prompt, None)
        for layer, other in zip(model.model.layers, wrapped.get_base_model().model.layers, strict=True):
            layer.self_attn.kv_b_proj, layer.self_attn.o_proj = other.self_attn.kv_b_proj, other.self_attn.o_proj
        found, _ = answer(running, prompt, None)
        assert not same(found, before)
        assert agrees(found, generated(wrapped, ids, 4))
        wrapped.base_model.disable_adapter_layers()
        assert agrees(answer(running, prompt, None)[0], (list(before[0]), before[1]))


def test_a_hook_there_for_part_of_a_forward_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    model = families.build("youtu")
    layer, inner, handles = model.model.layers[1].self_attn.kv_b_proj, steps.mix, list[Any]()

    def mix(*args: Any, **kwargs: Any) -> Any:
        if not handles:  # layer 0 attends
            handles.append(layer.register_forward_hook(lambda module, given, out: out * 3))
        else:
            handles[0].remove()
        return inner(*args, **kwargs)

    with engine(model=model, store=None) as running:
        prompt = chat(long_text(40))
        expected, _ = answer(running, prompt, None, "off")
        monkeypatch.setattr(steps, "mix", mix)
        assert any("begun anew" in note for note in answer(running, prompt, None)[1].notes)
        assert same(answer(running, prompt, None)[0], expected)


def test_a_failed_forward_leaves_no_latent_to_the_next_model(monkeypatch: pytest.MonkeyPatch) -> None:
    latent, other, ids = HFModel(families.build("youtu")), families.build("granite"), tokens(40)
    expected = stock_logits(other, ids)
    held = HFModel(other)

    def fails(*args: Any) -> Any:
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(attention_interface, "attention_of", fails)
        with pytest.raises(MemoryError):
            Run(latent, ids).chunks(40)
    found = Run(held, ids).chunks(40).logits[39]
    assert float((found - expected[39]).abs().max()) < 1e-4


def test_two_engines_share_a_model_until_the_last_one_ends() -> None:
    model, ids = families.build("youtu"), tokens(80)
    first, second = HFModel(model), HFModel(model)
    expected = Run(second, ids).chunks(80).logits[79]
    first.close()
    assert torch.equal(Run(second, ids).chunks(33, 47).logits[79], expected)
    second.close()
    assert not any("expand_kv" in vars(module) for module in model.modules())
