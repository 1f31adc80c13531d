"""Indexers: their keys lie in pages, each row sees the tokens that they choose, and their owner's calls stay their own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from agentcache.bench import families
from agentcache.model.attention import Attention
from agentcache.model.hf import HFModel
from tests.engines import chat, decode, engine, long_text
from tests.families import Run, pack, stock_logits, tokens
from tests.saved_adapters import answer, by_peft, generated, save_for

INDEXED = ["axk2", "deepseek_v32", "glm_moe_dsa", "hy_v4"]
WIDTH, TOPK = 16, 64  # of the tiny models
KEYS = (1, WIDTH, 0)


def modules(model: Any) -> list[Any]:
    return [module for module in model.modules() if hasattr(module, "index_topk")]


def far(run: Run, stock: torch.Tensor) -> list[int]:
    """Positions whose logits are not the model's own: of experts that almost tie, another one may be chosen."""
    return [at for at, row in run.logits.items() if float((row - stock[at]).abs().max()) > 1e-3 * float(stock.abs().max())]


@pytest.mark.parametrize("family", INDEXED)
def test_rows_see_chosen_tokens_however_a_prompt_is_cut(family: str) -> None:
    model, ids = families.build(family), tokens(560)
    stock, others = stock_logits(model, ids), stock_logits(model, ids[:90])
    held = HFModel(model)
    assert held.spec is not None
    assert held.spec.layer_widths.count(KEYS) == len(modules(model))
    assert not held.bitwise, "scores that almost tie are chosen by the bits of a product"
    assert {one.index_topk for one in modules(model)} == {TOPK}, "the proof gives them their number back"
    assert torch.equal(stock_logits(model, ids), stock), "its owner's calls are its own"
    run, other = Run(held, ids), Run(held, ids[:90])
    pack((other, 40), (run, 200))  # of one all tokens are chosen, of the other few
    pack((run, 1), (other, 50))
    assert len(far(run.chunks(300, 1), stock)) <= 20
    assert len(far(other, others)) <= 20
    assert len(far(run.branch(530).chunks(1), stock)) <= 20, "shared pages have the indexers' keys, too"
    held.close()
    assert not any(module._forward_pre_hooks for module in modules(model))
    assert torch.equal(stock_logits(model, ids), stock)


def test_two_engines_share_an_indexer_until_both_close() -> None:
    model = families.build("deepseek_v32")
    one, other = HFModel(model), HFModel(model)
    assert model.get_submodule("model.layers.0.self_attn.indexer.wk") is modules(model)[0].wk, "its owner finds it by name"
    one.close()
    assert not far(Run(other, tokens(100)).chunks(), stock_logits(model, tokens(100)))
    other.close()
    assert not any(module._forward_pre_hooks for module in modules(model))


def test_keys_of_wider_numbers_lie_in_the_type_of_others() -> None:
    held = HFModel(families.build("dots3_note_text", torch.bfloat16))
    assert held.support.paged, held.support.why
    assert held.spec is not None
    assert KEYS in held.spec.layer_widths


def test_a_proof_narrows_what_rows_see(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fewer tokens than fit into the proof's prompt: a choice that is lost shows only there."""
    monkeypatch.setattr(Attention, "of", lambda self, part: Attention(self.scale))
    held = HFModel(families.build("deepseek_v32", index_topk=2048))
    assert not held.support.paged
    assert "attention over pages is not its own" in held.support.why


def test_an_adapter_of_an_indexer_answers_as_in_peft(tmp_path: Path) -> None:
    save_for(families.build("deepseek_v32"), tmp_path, target_modules=["wq_b", "wk"])  # these alone: they change what rows see
    wrapped, prompts = by_peft(tmp_path, model=families.build("deepseek_v32")), [chat(long_text(80, salt)) for salt in (1, 2)]
    with engine(model=families.build("deepseek_v32"), store=None) as running:
        running.add_adapter("one", tmp_path)
        logits: list[list[torch.Tensor]] = [[], []]
        streams = [
            running.stream(prompt, sampling=decode(12), adapter="one", on_logits=lambda row, told=told: told.append(row.clone()))
            for prompt, told in zip(prompts, logits, strict=True)
        ]  # they share forwards
        for prompt, stream, told in zip(prompts, streams, logits, strict=True):
            expected, rows = generated(wrapped, list(running.renderer.render(prompt).ids), 12)
            assert list(stream.completion.ids) == expected
            assert not stream.completion.receipt.notes, "none ran alone after a failure"
            assert float((torch.stack(told) - rows).abs().max()) <= 1e-4
        assert float((answer(running, prompt, None, tokens=1)[0][1] - rows[:1]).abs().max()) > 1e-3, "it changes something"
