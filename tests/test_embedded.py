"""The embedded model's folder: made from a checkpoint, verified on load, a Hugging Face folder, a template that only appends."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from agentcache import embedded
from agentcache.bench import quality as bench
from agentcache.bench.quality_score import right
from agentcache.engine import Engine
from agentcache.errors import ModelLoadError
from agentcache.types import Message, Sampling
from benchmarks import quality
from examples.embedded import card, cases, checkpoints, export
from examples.embedded import model as models
from examples.embedded import tokenizer as tokenizers
from examples.embedded.world.dialogues import bundle, messages, spoken
from tests.checkout import ROOT


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What train.py leaves behind, of a model that was hardly trained."""
    folder = tmp_path_factory.mktemp("trained")
    tokenizer = tokenizers.train(vocab=700, count=12)
    tokenizer.save_pretrained(folder / "tokenizer")
    model = models.build(len(tokenizer), layers=2, hidden=64, mlp=64)
    average = models.Average(model)
    using = models.optimizers(model, 1e-3, muon=True)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    for one in using:
        one.step()
    average.add(model, 0)
    state = {"step": 1, "packs": 2, "tokens": 3_000_000, "targets": 1_000_000, "hours": 0.5}
    checkpoints.save(folder / "checkpoint.safetensors", model, using, average, state)
    return folder


@pytest.fixture
def folder(trained: Path, tmp_path: Path) -> Path:
    return export.export(trained, tmp_path / "there" / "model")


@pytest.fixture
def as_embedded(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(embedded, "_FOLDER", folder)
    return folder


def test_the_export_is_whole_and_between_mean_and_last(folder: Path, trained: Path) -> None:
    from safetensors import safe_open
    from transformers import AutoModelForCausalLM

    assert embedded.checked(folder) == folder
    assert {file.name for file in folder.iterdir()} >= {
        "README.md",
        "SHA256SUMS",
        "model.safetensors",
        "tokenizer.json",
        "chat_template.jinja",
    }
    loaded = AutoModelForCausalLM.from_pretrained(folder)
    assert loaded.config.model_type == "qwen3"
    assert loaded.dtype is torch.bfloat16
    assert checkpoints.size(folder) == sum(p.numel() for p in loaded.parameters())
    with safe_open(trained / "checkpoint.safetensors", "pt") as file:
        name = "model.layers.1.mlp.up_proj.weight"
        mean, last = file.get_tensor(f"average.{name}"), file.get_tensor(f"model.{name}")
    assert not torch.equal(mean, last)
    assert torch.equal(loaded.state_dict()[name], mean.lerp(last, 0.75).bfloat16())


@pytest.mark.parametrize(
    ("damage", "named"),
    [
        (lambda f: (f / "config.json").write_text("{}"), "config.json"),
        (lambda f: (f / "tokenizer.json").unlink(), "tokenizer.json"),
        (lambda f: (f / "more.bin").write_bytes(b"x"), "more.bin"),
        (lambda f: (f / embedded.SUMS).unlink(), embedded.SUMS),
        (lambda f: (f / embedded.SUMS).write_text(""), "model.safetensors"),
    ],
)
def test_a_damaged_folder_is_refused_by_file_name(folder: Path, damage: Callable[[Path], Any], named: str) -> None:
    damage(folder)
    with pytest.raises(ModelLoadError, match=named):
        embedded.checked(folder)


def test_engine_loads_it_by_name_and_refuses_it_damaged(as_embedded: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Engine("embedded", store=None) as engine:
        assert engine.name == "embedded"
        assert engine.grammars.strict, "its generation config says so"
        assert engine.generate([{"role": "user", "content": "Hello!"}], sampling=Sampling(max_tokens=2)).ids
    weights = (as_embedded / "model.safetensors").read_bytes()
    (as_embedded / "model.safetensors").write_bytes(weights[:-1] + bytes([weights[-1] ^ 1]))
    embedded._verified.cache_clear()
    with pytest.raises(ModelLoadError, match="model.safetensors"):
        Engine("embedded", store=None)


def test_its_template_only_appends_and_its_calls_are_read(as_embedded: Path) -> None:
    made = bundle("template", "hermes", 6, 8)
    talk = next(talk for talk in made.dialogues if sum(turn.tool is not None for turn in talk.turns) > 1)
    tools = [tool.schema(made.form) for tool in made.tools]
    embedded._verified.cache_clear()
    with Engine("embedded", store=None) as engine:
        report = engine.renderer.report
        assert report.step_preserving
        assert report.turn_preserving
        assert report.tools_at == "after system"
        assert report.system == "kept"
        assert report.absent_is_empty
        assert not report.dated
        at = next(at for at, turn in enumerate(talk.turns) if turn.tool is not None)
        turn = talk.turns[at]
        assert turn.tool is not None
        told = f'<tool_call>\n{{"name": "{turn.tool.name}", "arguments": {json.dumps(dict(turn.args), ensure_ascii=False)}}}\n</tool_call>'
        done = engine.generate(messages(made, talk.turns[:at]), tools, sampling=Sampling(max_tokens=80, forced=told + "<|im_end|>"))
        assert done.message.tool_calls[0].name == turn.tool.name
        assert done.message.tool_calls[0].arguments == dict(turn.args)
        longer = engine.renderer.render([*messages(made, talk.turns[: at + 1]), {"role": "tool", "content": "{}"}], tools)
        shorter = engine.renderer.render(messages(made, talk.turns[:at]), tools)
        assert longer.ids[: len(shorter.ids)] == shorter.ids
    embedded._verified.cache_clear()


def test_the_card_says_what_was_measured_and_what_falls_short() -> None:
    state = {"step": 10, "tokens": 2_000_000, "targets": 500_000, "hours": 1.0}
    assert "None were measured" in card.card(state, 5_000_000, None)
    row = {"split": "unseen tools", "tools": 20, "n": 9, "too_long": 0}
    row |= dict.fromkeys(("tsa", "pf1", "em", "fnr", "bm25_tsa", "bm25_params_tsa", "first_tsa"), 0.96) | {"fpr": 0.2}
    row |= {f"{name}_ci": (0.1, 0.97) for name in ("tsa", "pf1", "em", "fpr", "fnr", "bm25_tsa", "bm25_params_tsa", "first_tsa")}
    found = {"held": "test", "rows": [row], "episodes": [{"style": "hermes", "tools": 8, "n": 3, "solved": 0.5, "solved_ci": (0.1, 0.9)}]}
    short = card.missed(found)
    assert any(line.startswith("calls though no tool fits") and "0.200" in line for line in short)
    assert not any(line.startswith("right tool, unseen tools, 20") for line in short)
    assert any("hermes: 0.500" in line for line in short)
    assert any("llamaindex: not measured" in line for line in short)
    assert any(line.startswith("above the better baseline, unseen tools, 20 tools: 0.000") for line in short)
    assert any(line.startswith("requests in a cell: 9") for line in short)
    found["speed"] = [{"tools": 20, "n": 9, "prompt_tokens": 900.0, "ttft_ms": 400.0, "tokens_per_s": 149.0}]
    assert any("400 ms, 149 tokens/s, wanted 1000 ms and 150/s" in line for line in card.missed(found))
    found["speed"][0]["tokens_per_s"] = 151.0
    assert card.missed(found) == short
    text = card.card(state, 5_000_000, found)
    assert "(900 tokens) of which nothing is kept: 400 ms" in text
    assert "0.960 (0.10-0.97)" in text
    assert all(line in text for line in short)


def test_training_goes_on_from_an_exported_folder(folder: Path, trained: Path) -> None:
    model = models.build(700, layers=2, hidden=64, mlp=64, seed=5)
    average = models.Average(model)
    state = checkpoints.begin_from(folder, model, average)
    assert state == {"step": 1, "packs": 2, "tokens": 3_000_000, "targets": 1_000_000, "hours": 0.5}
    name, weight = next(iter(model.named_parameters()))
    assert torch.equal(weight, average.values[name])
    again = models.build(700, layers=2, hidden=64, mlp=64)
    checkpoints.restore(trained / "checkpoint.safetensors", again, models.optimizers(again, 1e-3, muon=True), mean := models.Average(again))
    last = dict(again.named_parameters())[name]
    assert torch.equal(weight, mean.values[name].lerp(last, 0.75).bfloat16().float())


def test_a_card_takes_each_cell_from_the_longest_run() -> None:
    short = {"held": "test", "rows": [{"split": "seen", "tools": 5, "n": 100}, {"split": "seen", "tools": 20, "n": 100}], "speed": [1]}
    short |= {"shares": [{"split": "seen", "tools": 5, "share": "context", "n": 40}], "episodes": [{"style": "hermes", "n": 9}]}
    long = {"held": "test", "rows": [{"split": "seen", "tools": 5, "n": 1000}], "speed": [], "shares": [], "episodes": []}
    found = card.joined([short, long])
    assert [(row["tools"], row["n"]) for row in found["rows"]] == [(5, 1000), (20, 100)]
    assert (found["shares"], found["episodes"], found["speed"]) == (short["shares"], short["episodes"], [1])
    with pytest.raises(ValueError, match="different requests"):
        card.joined([short, {**long, "held": "validation"}])
    with pytest.raises(ValueError, match="different requests"):
        card.joined([short, {**long, "seed": "again"}])


def test_the_shipped_model_is_whole_small_and_has_a_card() -> None:
    folder = embedded.checked(ROOT / "agentcache" / "embedded" / "model")
    assert (folder / "model.safetensors").stat().st_size <= 16_000_000
    assert checkpoints.size(folder) <= 8_000_000
    text = (folder / "README.md").read_text("utf-8")
    assert "## Figures" in text
    assert "## Limits" in text
    with Engine("embedded", store=None) as engine:
        assert engine.renderer.report.step_preserving
        assert engine.renderer.report.turn_preserving


def test_the_shipped_model_hides_thoughts_where_words_are_unwanted() -> None:
    made = next(one for number in range(100) if not (one := bundle(f"silent {number}", "hermes", 4, 4, exact=True, hold=False)).aloud)
    tools = [tool.schema(made.form) for tool in made.tools]
    calm = Sampling(max_tokens=120)
    with Engine("embedded", store=None) as engine:
        for loud in (False, True):
            one = replace(made, aloud=loud, system="You are a helpful assistant." if loud else made.system)
            for talk in one.dialogues:
                if talk.turns[1].tool is None:
                    continue
                done = engine.generate(asked := messages(one, talk.turns[:1]), tools, sampling=calm)
                thought, said = spoken(talk.turns[1], loud)
                assert bool(done.message.reasoning) == bool(thought)
                assert bool(done.message.content) == bool(said)
                longer = engine.generate([*asked, done.message, Message("tool", "{}")], tools, sampling=Sampling(max_tokens=1))
                assert longer.receipt.cached_tokens >= done.receipt.prompt_tokens + len(done.ids) - 1


@pytest.mark.slow
def test_the_shipped_model_ignores_a_clock_at_the_tail() -> None:
    parts = quality.Parts(clock=100, styles=("hermes",))
    with Engine("embedded", store=None) as engine:
        for row in quality.more(engine, parts, cases.Drawn(), lambda text: None)["clock"]:
            assert row["without"] >= 90
            assert row["lost"] - row["won"] <= 2, row


def test_the_shipped_model_takes_no_day_for_an_id() -> None:
    day = (Message("user", "Today is 2026-11-23."),)
    talks = [one for one in cases.episodes("hermes", 100, held="validation") if one.kind == "siblings"]
    plain = [step for talk in talks[:10] for step in talk.steps[2:]]
    assert {step.prompt[-1]["role"] for step in plain} == {"user", "tool"}
    with Engine("embedded", store=None) as engine:
        asked = (plain, [replace(step, volatile=day) for step in plain])
        without, told = (bench.all_of(bench.asking(engine), steps, 8, lambda done: None) for steps in asked)
    lost = sum(right(step, one) and not right(step, other) for step, one, other in zip(plain, without, told, strict=True))
    assert lost <= 1, f"{lost} of {len(plain)}"
