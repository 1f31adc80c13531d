"""bench quality: what is asked is always the same, what is right is right, figures and intervals, the command."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from agentcache.bench import quality, quality_cases, quality_score
from agentcache.bench.cli import app
from agentcache.bench.quality_cases import Case, Right
from agentcache.bench.quality_score import Ratio, Said
from agentcache.engine import Engine
from agentcache.errors import ConfigError
from examples.embedded import checkpoints
from examples.embedded import model as models
from examples.embedded import tokenizer as tokenizers
from tests.bench.answering import empty_answer, right_answer

CELL = quality.Options(tools=(8,), splits=("unseen tools",), count=30, episodes=6)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("model")
    tokenizer = tokenizers.train(vocab=700, count=12)
    checkpoints.export(made, models.build(len(tokenizer), layers=2, hidden=64, mlp=64), tokenizer)
    return made


def asked(ask: Callable[[Case], Said], monkeypatch: pytest.MonkeyPatch, options: quality.Options = CELL) -> dict[str, Any]:
    monkeypatch.setattr(quality, "asking", lambda engine, reuse=None: ask)
    return quality.run(None, options, lambda text: None)  # type: ignore[arg-type]


# What is asked


def test_files_of_cases_are_read_and_bad_lines_named(tmp_path: Path) -> None:
    tool = {"type": "function", "function": {"name": "feed", "description": "Feed it", "parameters": {"type": "object", "properties": {}}}}
    (tmp_path / "tools").mkdir()
    (tmp_path / "selection").mkdir()
    (tmp_path / "tools" / "zoo.jsonl").write_text(json.dumps(tool) + "\n")
    path = tmp_path / "selection" / "cases.jsonl"
    given = {"query": "Feed it", "expected": [{"name": "feed", "arguments": {}}]}
    path.write_text(json.dumps(given | {"tools": [tool], "system": "Zoo."}) + "\n\n" + json.dumps(given | {"tools_ref": "zoo"}) + "\n")
    one, two = quality_cases.read(path)
    assert one.tools == two.tools == [tool]
    assert [message["role"] for message in one.prompt] == ["system", "user"]  # type: ignore[index,union-attr]
    path.write_text(json.dumps(given | {"tools_ref": "none"}))
    with pytest.raises(ConfigError, match="--tools-dir"):
        quality_cases.read(path)
    path.write_text("\n")
    with pytest.raises(ConfigError, match="no case is in it"):
        quality_cases.read(path)
    path.write_bytes(b'\xff{"query": "x"}')
    with pytest.raises(ConfigError, match="line 1: not a case"):
        quality_cases.read(path)
    path.write_text('{"query": "x"}')
    with pytest.raises(ConfigError, match="line 1: not a case"):
        quality_cases.read(path)
    with pytest.raises(ConfigError, match="cannot be read"):
        quality_cases.read(tmp_path / "none.jsonl")


# What is right


@pytest.mark.parametrize(
    ("given", "acceptable", "counts"),
    [
        ({"a": "x", "b": 2}, None, (2, 0, 0)),
        ({"a": "x ", "b": 2.0}, None, (2, 0, 0)),
        ({"a": "x", "b": "2"}, None, (1, 1, 1)),
        ({"a": "x"}, None, (1, 0, 1)),
        ({"a": "x", "b": 2, "c": 1}, None, (2, 1, 0)),
        ({"b": True}, None, (0, 1, 2)),
        ({"a": "Y", "b": 2}, {"a": ["x", "y"], "b": [2]}, (2, 0, 0)),
        ({"b": 2}, {"a": ["x", ""], "b": [2]}, (1, 0, 0)),
        ({"a": "z", "b": 2}, {"a": ["x", ""], "b": [2]}, (1, 1, 1)),
        ({"a": "x", "b": 2, "c": 7}, {"a": ["x"], "b": [2], "c": ["", 7]}, (3, 0, 0)),
        ({"a": {"k": "v"}, "b": [1, 2]}, {"a": [{"k": ["v", "w"], "l": [""]}], "b": [[1, 2]]}, (2, 0, 0)),
        ({"a": {"k": "q"}, "b": [2, 1]}, {"a": [{"k": ["v", "w"]}], "b": [[1, 2]]}, (0, 2, 2)),
    ],
)
def test_arguments_are_compared_by_meaning(given: dict[str, Any], acceptable: Any, counts: tuple[int, int, int]) -> None:
    assert quality_score.pairs(Right("t", {"a": "x", "b": 2}, acceptable), given) == counts


def test_an_interval_holds_its_figure_and_clusters_widen_it() -> None:
    alone = Ratio({number: (number % 2, 1) for number in range(100)}).interval()
    clustered = Ratio({number: (10 * (number % 2), 10) for number in range(10)}).interval()
    assert alone is not None
    assert clustered is not None
    assert 0.38 < alone[0] < 0.5 < alone[1] < 0.62
    assert clustered[0] < 0.3
    assert clustered[1] > 0.7
    perfect = Ratio({1: (20, 20)})
    assert perfect.value == 1.0
    assert perfect.interval() == pytest.approx((0.8389, 1.0), abs=1e-3)
    assert Ratio({}).interval() is None


# Asking


def test_a_perfect_model_scores_all_and_a_silent_one_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    found = asked(right_answer, monkeypatch)
    (row,) = found["rows"]
    assert (row["split"], row["tools"], row["n"]) == ("unseen tools", 8, 30)
    assert [row[name] for name in ("tsa", "pf1", "em", "fpr", "fnr")] == [1, 1, 1, 0, 0]
    assert [one["solved"] for one in found["episodes"]] == [1, 1, 1]
    assert {one["style"] for one in found["episodes"]} == {"hermes", "langchain", "llamaindex"}
    found = asked(empty_answer, monkeypatch)
    assert [found["rows"][0][name] for name in ("tsa", "pf1", "em", "fpr", "fnr")] == [0, 0, 0, 0, 1]
    assert [one["solved"] for one in found["episodes"]] == [0, 0, 0]


def test_one_wrong_value_spoils_the_exact_match_only(monkeypatch: pytest.MonkeyPatch) -> None:
    spoilt = [0]

    def nearly(case: Case) -> Said:
        said = right_answer(case)
        spoilt[0] += bool(said.arguments)
        wrong = said.arguments and spoilt[0] % 2 == 0
        return replace(said, arguments=dict.fromkeys(said.arguments, "wrong")) if wrong else said

    row = asked(nearly, monkeypatch)["rows"][0]
    assert row["tsa"] == 1
    assert 0 < row["pf1"] < 1
    assert 0.3 < row["em"] < 0.7


STEP = Case([], [], Right("get_order", {"id": 7}), "", 0, style="langchain")


def test_an_answer_must_say_what_the_result_says() -> None:
    step = next(step for one in quality_cases.episodes("hermes", 8) for step in one.steps if step.says and step.right is None)
    assert quality_score.right(step, Said(None, {}, f"Well: {step.says}!"))
    assert not quality_score.right(step, Said(None, {}, "Well."))
    assert not quality_score.right(step, Said("any", {}, step.says))


def test_numbers_below_zero_are_other_numbers() -> None:
    assert quality_cases.words('It is -107, {"x": -3} (-4) and UV-39 or 3-4.') == [
        "it",
        "is",
        "-107",
        "x",
        "-3",
        "-4",
        "and",
        "uv-39",
        "or",
        "3-4",
    ]
    step = replace(STEP, right=None, says="-107")
    assert quality_score.right(step, Said(None, {}, "The answer is -107."))
    assert not quality_score.right(step, Said(None, {}, "The answer is 107."))


NAMED = replace(STEP, right=Right("get_order", {"id": "Köln"}))


def test_an_input_may_be_json_on_its_own() -> None:
    assert quality.react('Action: get_order\nAction Input: "K\\u00f6ln"', NAMED).arguments == {"id": "Köln"}
    assert quality.react("Action: get_order\nAction Input: 7", NAMED).arguments == {"id": "7"}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (" I need it.\nAction: get_order\nAction Input: 7", ("get_order", {"id": 7})),
        ('Thought: x\nAction: get_order\nAction Input: {"id": 7}', ("get_order", {"id": 7})),
        ("Thought: x\nAction: get_order\nAction Input: seven", ("get_order", {"id": "seven"})),
        ("I know.\nFinal Answer: Action is needed", (None, {})),
        ("I know.\nFinal Answer: done\nAction: get_order\nAction Input: 7", (None, {})),
        ("nothing", (None, {})),
    ],
)
def test_text_react_is_read(text: str, said: tuple[str | None, dict[str, Any]]) -> None:
    found = quality.react(text, STEP)
    assert (found.name, found.arguments) == said


def test_prompts_that_do_not_fit_count_as_wrong(folder: Path) -> None:
    with Engine(str(folder), store=None) as engine:
        said = quality.asking(engine)(Case([{"role": "user", "content": "word " * 9000}], [], Right("t", {}), "", 0))
    assert said.failed == "too long"


def test_unknown_names_are_refused() -> None:
    with pytest.raises(ConfigError, match="split='none'"):
        quality.Options(splits=("none",))
    with pytest.raises(ConfigError, match="style='none'"):
        quality.Options(styles=("none",))


def test_the_command_ends_in_one_json_line(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quality, "ANSWER_TOKENS", 6)
    out = tmp_path / "quality.json"
    options = ["quality", "--model", str(folder), "--tools", "5", "--splits", "unseen tools", "--n", "3", "--episodes", "1"]
    options += [
        "--styles",
        "hermes",
        "--dtype",
        "float32",
        "--json",
        str(out),
    ]
    done = CliRunner().invoke(app, options)
    assert done.exit_code == 0, done.output
    found = json.loads(out.read_text())
    assert json.loads(done.stdout.splitlines()[-1]) == found
    assert found["bench"] == "quality"
    assert {"split", "tools", "n", "tsa", "pf1", "em", "fpr", "fnr"} <= found["rows"][0].keys()
    assert {"style", "n", "solved"} <= found["episodes"][0].keys()
    assert "dialogues of several calls" in done.stdout


@pytest.mark.parametrize(("split", "tools", "count", "said"), [("seen", 8, 1, "5, 20, 50 tools"), ("seen", 5, 201, "n=201: 200 cases")])
def test_cases_that_do_not_come_with_the_package_are_refused(split: str, tools: int, count: int, said: str) -> None:
    with pytest.raises(ConfigError, match=f"{said}.*python -m benchmarks.quality, from a checkout"):
        quality_cases.selections(split, tools, count)
