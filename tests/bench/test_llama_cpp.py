"""llama.cpp beside the engine: the same weights, the same prompts, and a refusal that names the way out where it is not installed."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from agentcache.bench import baselines, latency, llama_cpp, shapes
from agentcache.engine import Engine
from agentcache.errors import ConfigError
from tests import models
from tests.bench.tiny_shape import TINY_SHAPE


def test_its_absence_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llama_cpp", None)
    with pytest.raises(ConfigError, match=r"--llama-cpp: .*llama_cpp.*agentcache-llm\[llama-cpp\]"):
        llama_cpp.about()


def test_other_families_are_refused_by_name(tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    refused = pytest.raises(ConfigError, match="'llama' cannot be written as GGUF here: use one of qwen2, qwen3")
    with Engine(models.build("llama"), models.toy_tokenizer(), store=None) as engine, refused:
        llama_cpp.write(engine.model, "BF16", tmp_path / "model.gguf")


def test_it_draws_the_tokens_of_the_same_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("llama_cpp")
    monkeypatch.setitem(shapes.SHAPES, "small", ("qwen3", TINY_SHAPE))
    options = latency.Options(tools=(2,), tail=40, repeats=2, slow_repeats=1, decode=2)
    made = Engine(*shapes.load("small", dtype="float32"), store=None)
    with made as engine, llama_cpp.started(engine.model, lambda _: None) as others:
        given = torch.arange(40).tolist()
        wide = baselines.rival(engine.model, torch.bfloat16).float()(input_ids=torch.tensor([given])).logits[0, -1]
        assert others["llama_bf16"].answer(given, 30, 1).ids[0] == int(wide.argmax())
        [row] = latency.run(engine, options, others=others)["rows"]
    assert all(row[f"llama_{kind}_{figure}"] > 0 for kind in ("bf16", "q8_0") for figure in ("ttft_ms", "decode_ms"))
