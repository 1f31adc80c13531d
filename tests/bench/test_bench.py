"""Benchmarks measure what they say: keys, the last line, and assertions that fire when something else was timed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text
from typer.testing import CliRunner

from agentcache import toy
from agentcache.bench import baselines, catalog, engine_timing, environment, latency, report, shapes
from agentcache.bench.cli import app
from agentcache.bench.options import Dtype, Loading, Shape, Weights
from agentcache.engine import Engine
from agentcache.errors import ConfigError
from agentcache.model.hf import HFModel
from agentcache.model.int8 import Int8Linear, wide
from agentcache.model.kernels import jit
from benchmarks import plots
from tests.bench.tiny_shape import TINY_SHAPE

ROW_KEYS = (
    "tools prompt_tokens tail_tokens stock_ttft_ms static_ttft_ms recipe_ttft_ms kept_ttft_ms off_ttft_ms hit_ttft_ms floor_ms "
    "stock_decode_ms static_decode_ms decode_ms warm_ms group_bytes break_even_requests saved_ms_per_1000 repeats load agreement"
).split()

WIDE = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64}


@pytest.fixture(autouse=True)
def tiny_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    """`--shape small` becomes tinier, and its tokenizer learns less."""
    monkeypatch.setitem(shapes.SHAPES, "small", ("qwen3", TINY_SHAPE))


@pytest.fixture
def engine() -> Any:
    with Engine(*shapes.load("small")) as made:
        yield made


def run(*arguments: str) -> tuple[dict[str, Any], str]:
    """A command that must succeed: what its last line says, and all it printed."""
    done = CliRunner().invoke(app, arguments)
    if done.exception and not isinstance(done.exception, SystemExit):
        raise done.exception
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout.splitlines()[-1]), done.stdout


def refused(*arguments: str) -> str:
    """A command that must fail: what it says."""
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 1, done.output
    return done.stderr


# -- latency -------------------------------------------------------------------------------------------------------


def test_latency_ends_in_one_json_line_with_every_figure(tmp_path: Path) -> None:
    path, picture = tmp_path / "out.json", tmp_path / "out.png"
    options = ("--tools", "3,1", "--repeats", "2", "--slow-repeats", "1", "--decode", "2", "--tail", "40")
    said, shown = run("latency", "--shape", "small", *options, "--json", str(path))
    assert json.loads(path.read_text()) == said
    assert [row["tools"] for row in said["rows"]] == [1, 3]
    for row in said["rows"]:
        assert all(row[key] is not None for key in ROW_KEYS if key != "break_even_requests")
        assert row["repeats"]["hit_ttft_ms"] == 2
        assert row["repeats"]["stock_ttft_ms"] == 1
        assert set(row["load"]) == set(latency.METHODS)
        assert row["prompt_tokens"] == row["prefix_tokens"] + row["tail_tokens"]
        assert 30 <= row["tail_tokens"] <= 44
    assert said["machine"]["cores"] >= 1
    assert said["numerics"]["digest"]
    assert "stock/hit" in shown
    drawn = CliRunner().invoke(plots.app, [str(path), str(picture)])
    assert drawn.exit_code == 0, drawn.output
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_a_prompt_that_does_not_fit_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(shapes.SHAPES, "small", ("qwen3", {**TINY_SHAPE, "max_position_embeddings": 600}))
    said, _ = run("latency", "--tools", "1,20", "--repeats", "1", "--decode", "1", "--tail", "40", "--stock-dtype", "float32")
    assert said["stock_dtype"] == "float32"
    assert said["too_long"] == [20]
    assert [row["tools"] for row in said["rows"]] == [1]


def test_stock_runs_the_same_weights_in_another_type(engine: Engine) -> None:
    held = engine.model
    rival = baselines.rival(held, torch.float32)
    assert rival.dtype == torch.float32
    assert all(torch.equal(mine.float(), theirs) for mine, theirs in zip(held.model.parameters(), rival.parameters(), strict=True))
    assert baselines.rival(held, torch.bfloat16) is held.model


def scene_of(engine: Engine) -> latency.Scene:
    scene = latency.prepare(engine, 2, latency.Options(tools=(2,), tail=40, repeats=1, slow_repeats=1, decode=1))
    assert scene is not None
    return scene


def test_a_hit_that_is_none_is_noticed(engine: Engine) -> None:
    scene = scene_of(engine)
    engine.release("bench", namespace=scene.namespace)
    engine.store.clear()
    with pytest.raises(AssertionError, match="was to be timed, the receipt says 0"):
        latency.methods(scene, 0, 1)["hit"]()


def test_a_repeated_tail_is_noticed(engine: Engine) -> None:
    scene = scene_of(engine)
    latency.methods(scene, 0, 1)["hit"]()
    with pytest.raises(AssertionError, match="was to be timed"):
        latency.methods(scene, 0, 1)["hit"]()


def answer(*ids: int) -> baselines.Timed:
    return baselines.Timed(1.0, 1.0, 2.0, ids)


def test_other_tokens_are_noticed(engine: Engine) -> None:
    scene = scene_of(engine)
    scene.gaps.append(1.0)
    good = {"floor": answer(5), "hit": answer(5, 6), "off": answer(5, 6), "stock": answer(5)}
    latency.check(scene, good, "bfloat16")
    with pytest.raises(AssertionError, match="reuse off drew"):
        latency.check(scene, {**good, "off": answer(5, 7)}, "bfloat16")
    with pytest.raises(AssertionError, match="the floor drew"):
        latency.check(scene, {**good, "floor": answer(4)}, "bfloat16")
    with pytest.raises(AssertionError, match="no tie"):
        latency.check(scene, {**good, "stock": answer(4)}, "bfloat16")
    scene.gaps.append(0.01)
    latency.check(scene, {**good, "stock": answer(4)}, "bfloat16")
    assert scene.agreed == {"stock": [True, False]}


def test_store_bench_reads_what_it_wrote(tmp_path: Path) -> None:
    options = ("--shape", "small", "--tokens", "700", "--repeats", "1")
    said, shown = run("store", *options, "--store-dir", str(tmp_path))
    assert [row["way"] for row in said["rows"]] == ["raw", "agentcache", "verify"]
    assert all(row["cold_ms"] > 0 and row["warm_ms"] > 0 for row in said["rows"])
    assert said["bytes"] > 700 * 2 * 2 * 2 * 16 * 2  # keys and values, layers, heads, channels, bytes
    assert "warm/raw" in shown
    assert not list(tmp_path.iterdir())


def test_floor_leaves_the_group_as_it_was(engine: Engine) -> None:
    scene = scene_of(engine)
    ids, prefix = scene.prompts[0], scene.group.prefix_tokens
    first, second = (engine_timing.floor(engine, scene.namespace, ids, prefix)[1] for _ in range(2))
    assert torch.equal(first, second)
    hit, receipt = engine_timing.ask(engine, scene.turns[0], scene.tools, 1, namespace=scene.namespace)
    assert receipt.cached_tokens == prefix
    assert hit.ids == (int(first.argmax()),)


# -- shapes, catalog, load -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", shapes.SHAPES)
def test_shapes_are_known_to_transformers(name: str) -> None:
    config = shapes.config(name)
    assert config.num_attention_heads % config.num_key_value_heads == 0
    assert config.eos_token_id is None


def test_published_sizes() -> None:
    from transformers import AutoModelForCausalLM

    millions = {}
    for name in ("qwen3-0.6b", "qwen3-8b", "llama-3.2-1b", "mistral-7b", "llama-2-7b"):
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(shapes.config(name))
        millions[name] = sum(p.numel() for p in model.parameters()) // 1_000_000
    assert millions == {"qwen3-0.6b": 596, "qwen3-8b": 8190, "llama-3.2-1b": 1235, "mistral-7b": 7248, "llama-2-7b": 6738}


def test_random_model_is_whole() -> None:
    model = shapes.random_model(shapes.config("small"), torch.float32)
    like = type(model)(model.config)
    assert torch.equal(model.model.rotary_emb.inv_freq, like.model.rotary_emb.inv_freq)
    assert model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()
    assert all(torch.isfinite(p).all() for p in model.parameters())
    rows = model.model.embed_tokens.weight
    assert len({tuple(row[:8].tolist()) for row in rows}) == len(rows)


def test_unknown_names_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"shape='gpt-9' is unknown: use one of qwen3-0.6b"):
        shapes.load("gpt-9")
    assert "tools='5,x'" in refused("latency", "--tools", "5,x")
    assert "slow_repeats=3" in refused("latency", "--repeats", "2", "--slow-repeats", "3")
    assert "give one of them" in refused("latency", "--model", "/x", "--shape", "small", "--tools", "1")


def test_catalog() -> None:
    many = catalog.tools(100)
    assert many[:5] == catalog.tools(5)
    assert len({tool["function"]["name"] for tool in many}) == 100
    with pytest.raises(ConfigError, match="tools=500"):
        catalog.tools(500)
    turns = [catalog.user_turn(number, 30, lambda text: len(text.split())) for number in range(40)]
    assert len({turn[0] for turn in turns}) == 40
    assert {len(turn.split()) for turn in turns} == {30}
    with pytest.raises(ConfigError, match="openings"):
        catalog.user_turn(99, 30, len)


def test_tool_sizes_are_as_described() -> None:
    tokenizer = toy.tokenizer(catalog.training_texts(), shapes.TOKENIZER_VOCAB)
    size = [len(tokenizer(json.dumps(tool))["input_ids"]) for tool in catalog.tools(40)]
    assert 115 < sum(size) / len(size) < 165


def test_load_of_this_process_is_not_foreign() -> None:
    with environment.watch() as seen:
        sum(range(2_000_000))
    assert seen.wall_ms > 0
    assert 0 <= seen.foreign <= 1


def test_tables_show_a_dash_for_what_was_not_measured() -> None:
    assert report.number(None) == "-"
    assert report.number(1234.5, 1) == "1,234.5"


@pytest.mark.skipif(jit.compiler() is None, reason="int8 products are compiled")
def test_tables_keep_every_figure_in_80_columns() -> None:
    columns = {f"column {n}": report.of(f"n{n}") for n in range(12)}
    made = report.drawn("figures", columns, [{f"n{n}": 1000 + n for n in range(12)}], "a caption")
    lines = [[text.plain for text in _printed(part, 80)] for part in report.fitted(made, 80)]
    text = "\n".join(line for part in lines for line in part)
    assert all(f"{1000 + n:,}" in text and f"column {n} " in text for n in range(12))
    assert "…" not in text
    assert len(lines) == 2
    assert all("column 0" in "".join(part) for part in lines)
    assert text.count("figures") == text.count("a caption") == 1
    assert len(list(report.fitted(made, report.WIDTH))) == 1


def _printed(made: Table, width: int) -> list[Text]:
    console = Console(width=width)
    with console.capture() as captured:
        console.print(made)
    lines = [Text(line) for line in captured.get().splitlines()]
    assert max(map(len, lines)) <= width
    return lines


def test_tables_say_that_other_processes_took_part() -> None:
    family = {
        "prompt_tokens": 1,
        "computed_tokens": 1,
        "calls": 1,
        "skipped_calls": 0,
        "stock_ms": None,
        "off_ms": 1,
        "ms": 1,
        "pages_held": 1,
    }
    captions = [report.react_table({"one": {**family, "load": {"foreign": share}}}).caption for share in (0.05, 0.5)]
    assert captions[0] is None
    assert "other processes took up to 50%" in str(captions[1])


def test_int8_weights_are_timed_against_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(shapes.SHAPES, "small", ("qwen3", {**TINY_SHAPE, **WIDE}))
    said, _ = run("latency", "--tools", "1", "--repeats", "1", "--decode", "1", "--tail", "40", "--weights", "int8")
    assert (said["model"]["weights"], said["stock_dtype"]) == ("int8", "bfloat16")
    found, _ = Loading(None, Shape.small, Dtype.bfloat16, quantized=Weights.int8).weights()
    held = HFModel(found)
    assert baselines.rival(held) is held.model
    rival = baselines.rival(held, torch.float32)  # a copy of what they stand for
    pairs = [(mine, theirs) for mine, theirs in zip(held.model.modules(), rival.modules()) if type(mine) is Int8Linear]
    assert pairs
    assert all(type(theirs) is torch.nn.Linear and torch.equal(theirs.weight, wide(mine.weight)) for mine, theirs in pairs)
    held.close()
