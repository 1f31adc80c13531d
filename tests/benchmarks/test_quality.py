"""Drawn cases, and what only `benchmarks.quality` asks: always the same cases, what is right is right, KV spoilt on purpose."""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Callable
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from agentcache.bench import quality as bench
from agentcache.bench import quality_cases, quality_score
from agentcache.bench.quality_cases import Case
from agentcache.bench.quality_score import Said
from agentcache.engine import Engine
from agentcache.errors import GenerationError
from agentcache.model.loading import cache_in, cache_name
from benchmarks import quality, quality_baselines, quality_spoil
from examples.embedded import cases as drawn
from examples.embedded import checkpoints
from examples.embedded import model as models
from examples.embedded import tokenizer as tokenizers
from examples.embedded.world.asking import Turn
from tests.bench.answering import empty_answer, right_answer


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("model")
    tokenizer = tokenizers.train(vocab=700, count=12)
    checkpoints.export(made, models.build(len(tokenizer), layers=2, hidden=64, mlp=64), tokenizer)
    return made


def test_the_generator_draws_exactly_the_frozen_cases() -> None:
    frozen = gzip.decompress(files("agentcache.bench").joinpath(quality_cases.FROZEN).read_bytes()).decode()
    assert drawn.frozen() == frozen, "run python -m examples.embedded.cases"


@pytest.mark.parametrize(("split", "tools", "seed"), [drawn.CELLS[0], drawn.CELLS[-1], drawn.MADE_UP])
def test_frozen_cases_are_read_as_they_were_drawn(split: str, tools: int, seed: str) -> None:
    assert quality_cases.selections(split, tools, 40) == drawn.selections(split, tools, 40, seed)


@pytest.mark.parametrize("style", quality_cases.STYLES)
def test_frozen_episodes_are_read_as_they_were_drawn(style: str) -> None:
    assert quality_cases.episodes(style, 20) == drawn.episodes(style, 20)


def test_cases_are_always_the_same_and_of_every_kind() -> None:
    cases = drawn.selections("unseen tools", 7, 40)
    again = drawn.selections("unseen tools", 7, 40)
    assert cases == again
    assert {len(case.tools) for case in cases} == {7}
    assert len({case.catalog for case in cases}) == 4
    assert any(case.right is None for case in cases)
    assert any(case.context for case in cases)
    assert not all(case.context for case in cases)
    for case in cases:
        assert case.right is None or case.right.name in {tool["function"]["name"] for tool in case.tools}
        assert isinstance(case.prompt, list)
        assert case.prompt[-1] == {"role": "user", "content": case.query}
    assert drawn.selections("unseen tools", 7, 40, held="validation") != cases


@pytest.mark.parametrize("style", quality_cases.STYLES)
def test_episodes_call_twice_and_steps_see_earlier_ones(style: str) -> None:
    for one in drawn.episodes(style, 6, 6):
        assert sum(step.right is not None for step in one.steps) >= 2
        assert {step.style for step in one.steps} == {style}
        for before, step in zip(one.steps, one.steps[1:]):
            if style == "langchain text":
                assert isinstance(step.prompt, str)
                assert step.prompt.startswith(str(before.prompt))
                continue
            assert not isinstance(step.prompt, str)
            last = str(step.prompt[-1]["content"])
            assert step.prompt[-1]["role"] in ("tool", "user")
            if before.right is not None and style == "langchain":
                assert f"Action: {before.right.name}\n" in last


def test_an_answer_must_name_an_error_but_no_fields() -> None:
    asked, told = Turn("user", "Stop A-12."), Turn("assistant", "Done: status queued, id B-7.")
    said = drawn._says([asked, Turn("tool", '{"status": "queued", "id": "B-7"}'), told])
    assert said.split() == ["queued", "b-7"]
    failed = Turn("assistant", "That failed: not found.")
    assert drawn._says([asked, Turn("tool", '{"error": "not found"}'), failed]) == "not found"
    assert drawn._says([asked, Turn("tool", "The lake is in Bern."), Turn("assistant", "The answer is Bern.")]) == "bern"


def test_a_first_decision_knows_whether_it_depends_on_another_tool() -> None:
    cases = drawn.selections("unseen tools", 20, 360)
    asked = {kind: [case for case in cases if case.kind == kind] for kind in ("like", "above", "service", "fallback", "sum")}
    assert all(case.rivals for case in asked["service"])
    assert {case.rivals for kind in ("like", "above") for case in asked[kind]} == {True, False}
    assert all(case.context for case in asked["fallback"])
    assert not any(case.context for case in asked["sum"])
    assert all(asked.values())
    share = quality_spoil.SHARES
    assert {case.kind for case in cases if share["with rivals"](case)} == {"like", "above"}
    assert sum(map(share["with rivals"], cases)) < sum(map(share["another tool"], cases))


def test_an_answer_that_says_that_nothing_changed_says_what() -> None:
    talks = (one for one in drawn.episodes("hermes", 120, 6) if one.kind == "siblings")
    steps = [step for one in talks for step in one.steps if '"unchanged"' in str(step.prompt[-1]) and step.right is None]
    assert steps
    for step in steps:
        assert step.says
        assert "status" not in step.says.split()
        assert not quality_score.right(step, Said(None, {}, "Here it is: status unchanged."))


def test_a_sum_may_be_written_without_spaces() -> None:
    steps = [
        step for one in drawn.episodes("hermes", 60, 8) if one.kind == "sum" for step in one.steps if step.right and step.right.acceptable
    ]
    assert steps
    for step in steps:
        ((name, value),) = step.right.arguments.items()
        for given, fits in ((value, True), (value.replace(" ", ""), True), (value + "1", False)):
            assert quality_score.right(step, Said(step.right.name, {name: given})) == fits


def test_a_greeting_is_no_request_that_no_tool_fits() -> None:
    cases = drawn.selections("unseen tools", 8, 200)
    idle = [case for case in cases if not case.wants]
    assert {case.kind for case in idle} >= {"small talk"}
    assert all(case.right is None for case in idle)
    said = [Said("any" if not case.wants else None, {}, failed="" if case.kind != "forbidden" else "too long") for case in cases]
    row = quality_score.figures(cases, said)
    assert row["fpr"] == 0
    assert quality_score.figures([case for case in cases if case.kind in ("small talk", "forbidden")], [
        one for one, case in zip(said, cases) if case.kind in ("small talk", "forbidden")])["fpr"] is None  # fmt: skip


def test_only_the_first_call_decides_dependence_on_context() -> None:
    cases = drawn.selections("unseen tools", 20, 240)
    kinds = {case.kind for case in cases if case.context}
    assert {"like", "above", "glossary", "switch", "fallback"} <= kinds
    assert not kinds & {"siblings", "chain", "sum", "facts", "kth", "condition", "plain", "decline"}


def test_variants_change_what_changes_nothing() -> None:
    asked = drawn.variants("unseen tools", 12, 30)
    plain, shuffled, other, behind = (asked[name] for name in drawn.VARIANTS)
    assert plain == drawn.selections("unseen tools", 12, 30)
    names = [[tool["function"]["name"] for tool in case.tools] for case in plain]
    for cases in (shuffled, other, behind):
        assert [case.right for case in cases] == [case.right for case in plain]
        assert [case.query for case in cases] == [case.query for case in plain]
    moved = [[tool["function"]["name"] for tool in case.tools] for case in shuffled]
    assert [sorted(some) for some in moved] == [sorted(some) for some in names]
    assert all(one != two for one, two in zip(moved, names))
    for case in shuffled:
        texts = [tool["function"]["description"] for tool in case.tools]
        there = [tool["function"]["description"] for tool in plain[shuffled.index(case)].tools]
        for at, text in enumerate(there):
            if text.startswith(("As the tool above", "Same as the previous", "As above")):
                assert texts[texts.index(text) - 1] == there[at - 1], "the tool it speaks of"
    assert all(b.prompt[0]["content"].endswith(a.prompt[0]["content"]) and a.prompt[0] != b.prompt[0] for a, b in zip(plain, other))
    assert all(len(b.prompt) > len(a.prompt) and list(b.prompt[-1:]) == list(a.prompt[-1:]) for a, b in zip(plain, behind))


def test_bm25_takes_the_tool_whose_words_fit() -> None:
    tools = [
        {"function": {"name": "deleteOrder", "description": "Removes one."}},
        {"function": {"name": "order_get", "description": "Fetch the orders."}},
    ]
    assert quality_baselines.bm25("please delete the order", tools) == "deleteOrder"
    assert quality_baselines.bm25("fetch order 5", tools) == "order_get"
    assert quality_baselines.bm25("hello", tools) == quality_baselines.first(tools) == "deleteOrder"


def test_bm25_reads_parameters_where_it_is_asked_to() -> None:
    known = {"type": "object", "properties": {"gohus": {"type": "string", "description": "A colour."}}}
    tools = [{"name": "sell_chair"}, {"type": "function", "function": {"name": "sell_table", "parameters": known}}]
    for query in ("sell it with gohus red", "sell it in another colour"):
        assert (quality_baselines.bm25(query, tools), quality_baselines.bm25(query, tools, params=True)) == ("sell_chair", "sell_table")


def test_cells_have_baselines_and_shares_by_context(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quality, "asking", lambda engine: right_answer)
    parts = quality.Parts(splits=("unseen tools",), sizes=(8,), count=30)
    found = quality.more(None, parts, drawn.Drawn(), lambda text: None)  # type: ignore[arg-type]
    (row,) = found["rows"]
    assert 0 < row["bm25_tsa"] < 1
    assert row["tsa"] == 1
    assert {part["share"] for part in found["shares"]} == {"independent", "context"}
    assert sum(part["n"] for part in found["shares"]) == 30


def test_a_comparison_in_which_nothing_was_reused_is_none(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    monkeypatch.setattr(quality, "asking", lambda engine, reuse=None: empty_answer)
    with Engine(str(folder), store=None) as engine, pytest.raises(GenerationError, match="nothing is compared"):
        quality.more(engine, quality.Parts(paired=2, tools=5), drawn.Drawn(), lambda said: None)


def test_two_answers_that_are_none_are_not_the_same_tokens(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    def asking(engine: Engine, reuse: str | None = None) -> Callable[[Case], Said]:
        kept = 0 if reuse == "off" else 5
        answers = iter((Said(None, {}, failed="too long"), Said(None, {}, ids=(1, 2), cached=kept)))
        return lambda case: next(answers)

    monkeypatch.setattr(quality, "asking", asking)
    with Engine(str(folder), store=None) as engine:
        (found,) = quality.more(engine, quality.Parts(paired=2, tools=5, agents=1), drawn.Drawn(), lambda said: None)["paired"]
    assert (found["n"], found["same"]) == (2, 1)


def test_a_clock_at_each_step_has_its_losses_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    told = [step.volatile for one in drawn.episodes("hermes", 3) for step in drawn.with_clock(one, "system").steps]
    assert all(message.role == "system" and re.fullmatch(r"It is \d\d:\d\d\.", message.content) for (message,) in told)
    assert len(set(told)) > 3

    def ask(case: Case) -> Said:
        return empty_answer(case) if case.volatile[:1] and case.volatile[0].role == "user" else right_answer(case)

    monkeypatch.setattr(quality, "asking", lambda engine: ask)
    found = quality.more(None, quality.Parts(clock=4, styles=("hermes",)), drawn.Drawn(), lambda text: None)  # type: ignore[arg-type]
    user, system = found["clock"]
    assert (user["without"], user["with"], user["lost"], user["won"]) == (4, 0, 4, 0)
    assert (system["without"], system["with"], system["lost"], system["won"]) == (4, 4, 0, 0)


def test_the_lab_asks_more_and_ends_in_one_json_line(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (bench, quality_spoil):
        monkeypatch.setattr(module, "ANSWER_TOKENS", 6)
    out = tmp_path / "quality.json"
    options = ["--model", str(folder), "--tools", "3", "--splits", "unseen tools", "--n", "3", "--episodes", "1"]
    options += [
        "--styles",
        "hermes",
        "--dtype",
        "float32",
        "--paired",
        "2",
        "--sensitivity",
        "1",
        "--variants",
        "2",
        "--clock",
        "1",
        "--seed",
        "another",
        "--speed",
        "1",
        "--json",
        str(out),
    ]
    done = CliRunner().invoke(quality.app, options)
    assert done.exit_code == 0, done.output
    found = json.loads(out.read_text())
    assert json.loads(done.stdout.splitlines()[-1]) == found
    assert found["bench"] == "quality"
    assert {"split", "tools", "n", "tsa", "pf1", "em", "fpr", "fnr", "bm25_tsa"} <= found["rows"][0].keys()
    assert {"style", "n", "solved"} <= found["episodes"][0].keys()
    assert found["rows"][0]["n"] == 3
    assert found["paired"][0]["same"] == 2
    assert found["paired"][0]["cached_tokens"] > 0
    assert [row["variant"] for row in found["variants"]] == list(drawn.VARIANTS)
    assert found["variants"][0]["same"] == 2
    assert [(row["role"], row["n"]) for row in found["clock"]] == [("user", 1), ("system", 1)]
    assert found["speed"][0]["ttft_ms"] > 0
    assert "history in front" in done.stdout
    assert {row["kind"] for row in found["sensitivity"]} == set(quality_spoil.KINDS)
    assert found["seed"] == "another"
    assert drawn.selections("unseen tools", 3, 3, "another")[0].query != drawn.selections("unseen tools", 3, 3)[0].query


@pytest.fixture(scope="module")
def spoilt(folder: Path) -> Any:
    """An engine, a case's prompt, and another prompt's."""
    with Engine(str(folder), store=None, dtype="float32") as engine, torch.inference_mode():
        cases = drawn.selections("unseen tools", 4, 13)
        yield engine, quality_spoil.prompt(engine, cases[0]), quality_spoil.prompt(engine, cases[12])


def apart(one: quality_spoil.KV, other: quality_spoil.KV) -> float:
    return max(float((a - b).abs().max()) for pair in zip(one, other) for a, b in zip(*pair))


@torch.inference_mode()
def test_re_indexed_keys_are_those_of_the_other_positions(spoilt: Any) -> None:
    engine, given, _ = spoilt
    model, ids = engine.model.model, torch.tensor([given.ids[:40]])
    later = cache_in(model(input_ids=ids, position_ids=torch.arange(9, 49)[None], use_cache=True), cache_name(model))
    kv = quality_spoil.computed(model, None, given.ids[:40])
    assert apart(quality_spoil.turned(model, kv, 9), quality_spoil.kv_of(later, 0, 40)) < 1e-5
    assert apart(kv, quality_spoil.kv_of(later, 0, 40)) > 1e-3


@torch.inference_mode()
def test_each_kind_replaces_the_tools_and_nothing_else(spoilt: Any) -> None:
    engine, given, other = spoilt
    spoiler = quality_spoil.Spoiler(engine.model.model, given, other, 3)
    first, length = given.cuts[0], given.cuts[-1]
    assert engine.tokenizer.decode(given.ids[first:length]).startswith('{"type": "function"')
    for kind in quality_spoil.KINDS:
        made = spoiler.prefix(kind, 1)
        assert made[0][0].shape[2] == length
        assert apart(quality_spoil.cut(made, 0, first), quality_spoil.cut(spoiler.exact, 0, first)) == 0
        assert (apart(made, spoiler.exact) > 1e-4) == (kind != "exact"), kind
    swapped = spoiler.prefix("swapped", 1)
    assert apart(quality_spoil.cut(swapped, 0, given.cuts[1]), quality_spoil.cut(spoiler.exact, 0, given.cuts[1])) == 0
    first_tool = quality_spoil.cut(spoiler.prefix("behind system", 0), first, given.cuts[1])
    assert apart(first_tool, quality_spoil.cut(spoiler.exact, first, given.cuts[1])) < 1e-4  # nothing stood before it but the system
    tail = spoiler.prefix("shifted", 0)
    assert apart([(t[1], t[1]) for t in tail], [(t[1], t[1]) for t in spoiler.exact]) == 0  # values have no position


@torch.inference_mode()
def test_exact_kv_answers_as_the_engine_does(spoilt: Any) -> None:
    engine, given, other = spoilt
    case = drawn.selections("unseen tools", 4, 1)[0]
    prefix = quality_spoil.Spoiler(engine.model.model, given, other, 3).exact
    said, logits = quality_spoil.answered(engine, prefix, given.ids[given.cuts[-1] :], [])
    done = engine.generate(list(case.prompt), list(case.tools), sampling=bench.Sampling(max_tokens=8))
    assert list(done.ids[:8]) == said[:8]
    again, same = quality_spoil.answered(engine, prefix, given.ids[given.cuts[-1] :], [*said[:3], said[0], *said[3:5]])
    assert again == said
    assert torch.allclose(same[:4], logits[:4], atol=1e-4)
    assert len(same) == 6
