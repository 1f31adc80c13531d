"""Weights as int8: bits of a hit, of packs and of few rows; their own pages; refusals; the label."""

from __future__ import annotations

from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from agentcache import Engine, StoreOptions
from agentcache.errors import ConfigError
from agentcache.model import int8, steps
from agentcache.model.hf import HFModel
from agentcache.model.kernels import jit
from agentcache.model.loading import load
from agentcache.model.verdict import verdict
from tests import models
from tests.engines import TOOLS, chat, decode, long_text
from tests.families import Run, differing, pack, stock_logits, tokens
from tests.processes import Child

pytestmark = pytest.mark.skipif(jit.compiler() is None, reason="needs llvmlite and PyTorch's OpenMP runtime")
FAMILIES = {"qwen3": "stepped", "smollm3": "generic"}


def quantized(outs: int, ins: int, bias: bool = False) -> Any:
    torch.manual_seed(outs + ins)
    layer = nn.Linear(ins, outs, bias=bias)
    int8.quantize([layer])
    return layer


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("outs", "ins"), [(64, 64), (128, 2048), (192, 3072), (64, 4864)])
def test_few_rows_have_the_bits_of_many(outs: int, ins: int, dtype: torch.dtype, count: int, threads: Callable[[int], None]) -> None:
    threads(count)
    layer, x = quantized(outs, ins, bias=True).to(dtype), torch.randn(200, ins).to(dtype)
    whole = layer(x)
    exact = x.double() @ int8.wide(layer.weight).double().t() + layer.bias.double()
    assert (whole - exact).abs().max() <= {torch.float32: 2.0**-20}.get(dtype, 2.0**-7) * exact.abs().max()
    for rows in (1, 2, 3, 4, 5, 8, 9, 16, 17, 70):
        assert torch.equal(layer(x[-rows:]), whole[-rows:]), rows


def test_numbers_are_the_nearest_that_their_scale_allows() -> None:
    layer = nn.Linear(128, 64, bias=False)
    with torch.no_grad():
        layer.weight[3] = 0
    before = layer.weight.detach().clone()
    int8.quantize([layer])
    off = (int8.wide(layer.weight) - before).abs()
    assert (off <= layer.weight.scale[:, None] * 0.5001).all()
    assert int(layer.weight.abs().max()) == 127
    assert not int8.wide(layer.weight)[3].any()


@pytest.fixture(params=FAMILIES)
def folder(request: Any, tmp_path: Path) -> Path:
    """A model that our own loop runs, and one that transformers' modules run."""
    wide = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64}
    models.build(request.param, torch.bfloat16, **wide, vocab_size=640).save_pretrained(tmp_path / "model")
    models.toy_tokenizer().save_pretrained(tmp_path / "model")
    return tmp_path / "model"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_chunks_and_packs_have_the_bits_of_one_run(folder: Path, dtype: torch.dtype) -> None:
    held = HFModel(load(folder, weights="int8", dtype=dtype)[0])
    assert (held.bitwise, held.quantized, held.weights) == (True, False, "int8")
    assert verdict(held)["weights"].startswith("int8")
    kinds = {type(module) for module in held.model.modules()}
    assert int8.Int8Linear in kinds
    assert nn.Linear not in kinds, "some layer was left as it was"
    ids, other = tokens(300), tokens(200, seed=1)
    whole = Run(held, ids).chunks()
    for sizes in ((1, 2, 3, 130, 1), (64, 1, 17)):
        assert not differing(whole, Run(held, ids).chunks(*sizes))
    beside, neighbour = Run(held, ids), Run(held, other)
    for sizes in ((150, 11), (1, 100), (149, 1)):
        pack(*zip((beside, neighbour), sizes))
    assert not differing(whole, beside)
    if dtype == torch.float32:
        stock = stock_logits(int8.widened(held.model, dtype), ids)
        assert max(float((row - stock[at]).abs().max()) for at, row in whole.logits.items()) < 1e-4 * float(stock.abs().max())
    held.close()


def test_an_embedding_that_was_the_head_stays_as_it_is() -> None:
    for dtype in ("float32", "bfloat16"):
        plain, made = (load("embedded", dtype=dtype, weights=weights)[0] for weights in (None, "int8"))
        assert plain.config.tie_word_embeddings
        assert torch.equal(made.get_input_embeddings().weight, plain.get_input_embeddings().weight)
        assert type(made.get_output_embeddings()) is int8.Int8Linear


def ask(engine: Engine, **options: Any) -> tuple[list[int], str, Any]:
    """Ids, a digest of the logits, the receipt."""
    logits: list[torch.Tensor] = []
    done = engine.generate(chat(long_text(150)), TOOLS, sampling=decode(6), on_logits=lambda row: logits.append(row.clone()), **options)
    return list(done.ids), str(torch.stack(logits).double().sum().item()), done.receipt


def ask_later(parent: Connection, folder: Path, store: Path) -> None:
    """In a process of its own."""
    with Engine(str(folder), weights="int8", store=StoreOptions(store, refuse_slow=False)) as engine:
        ids, digest, receipt = ask(engine)
    parent.send((ids, digest, receipt.disk_tokens > 400, receipt.bitwise))


def test_hits_have_the_bits_of_off_in_later_processes_too(folder: Path, tmp_path: Path) -> None:
    with Engine(str(folder), weights="int8", store=tmp_path / "store") as engine:
        off = ask(engine, reuse="off")
        cold, warm = ask(engine), ask(engine)
        assert cold[:2] == warm[:2] == off[:2]
        assert (cold[2].weights, warm[2].weights, warm[2].bitwise) == ("int8", "int8", True)
        assert warm[2].path == FAMILIES[engine.model.config.model_type]
        assert warm[2].cached_tokens > 400
        known = engine.fingerprint.whole if engine.fingerprint else ""
    assert Child(ask_later, folder, tmp_path / "store").end() == (*off[:2], True, True)
    with Engine(str(folder), store=tmp_path / "store") as plain:  # its pages are others
        assert plain.fingerprint is not None
        assert plain.fingerprint.whole != known
        found = ask(plain)
        assert found[2].weights == ""
        assert found[2].cached_tokens == 0


def test_layers_of_a_decoding_step_are_compiled(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    held = HFModel(load(folder, weights="int8")[0])
    if not held.stepped:
        pytest.skip("run by transformers' modules")
    run, used = Run(held, tokens(40)), list[int]()
    pack((run, 39))
    inner = steps._by_programs
    monkeypatch.setattr(steps, "_by_programs", lambda *args: used.append(1) or inner(*args))
    pack((run, 1))
    assert used


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"weights": "int4"}, "weights='int4': must be 'int8'"),
    ({"weights": "int8", "load_in_4bit": True}, "choose one"),
    ({"weights": "int8", "load_in_8bit": True}, "choose one"),
    ({"weights": "int8", "device": "cuda"}, "run on a CPU"),
]


@pytest.mark.parametrize(("options", "why"), REFUSED)
def test_what_cannot_be_quantized_is_refused(options: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        load("embedded", **options)


def test_nothing_is_quantized_without_its_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="pass|load the model that way"):
        load(models.build("qwen3"), models.toy_tokenizer(), weights="int8")
    with pytest.raises(ConfigError, match="no shape of 1 linear layers"):
        int8.quantize([nn.Linear(100, 30)])
    monkeypatch.setattr(jit, "compiler", lambda: None)
    with pytest.raises(ConfigError, match=r"agentcache-llm\[cpu\]"):
        load("embedded", weights="int8")


def test_changed_scales_change_the_fingerprint(folder: Path) -> None:
    with Engine(str(folder), weights="int8", store=None) as engine:
        assert engine.fingerprint is not None
        before = engine.fingerprint.whole
        layer = next(module for module in engine.model.decoder.layers[1].modules() if type(module) is int8.Int8Linear)
        with torch.no_grad():
            layer.weight.scale.mul_(2)  # type: ignore[operator]
        assert engine.fingerprint.whole != before
