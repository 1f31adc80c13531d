"""`benchmarks.segments` on the made-up world: requests that stay as they were, sums, runs that go on, verdicts."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from agentcache import Engine
from agentcache.approximate import segments
from agentcache.approximate.calibrate import shifts
from agentcache.approximate.calibrate.trials import Trials
from agentcache.errors import ConfigError
from agentcache.receipt import Receipt
from agentcache.types import Segment
from benchmarks import plots, segments_episodes, segments_paired, segments_parts, segments_sampled
from benchmarks import segments_tasks as made
from benchmarks.segments import app, made_up
from benchmarks.segments_rows import Rows
from benchmarks.segments_text import markdown
from benchmarks.segments_verdicts import moved, verdicts
from examples.embedded.cases import selections
from tests.checkout import ROOT

RUN = CliRunner()
Json = dict[str, Any]


@pytest.fixture(scope="module")
def embedded() -> Iterator[Engine]:
    with Engine("embedded", dtype="float32", store=None) as running:
        yield running


@pytest.fixture
def engine(embedded: Engine, threads: Callable[[int], None], monkeypatch: pytest.MonkeyPatch) -> Engine:
    threads(1)
    for module in (segments_paired, segments_sampled, segments_episodes):
        monkeypatch.setattr(module, "ANSWER_TOKENS", 24)
    return embedded


def quiet(_: str) -> None:
    pass


def test_the_request_is_asked_and_the_earlier_prompt_shifted() -> None:
    count = 2 * len(made.FAMILIES)
    tasks, cases = made.tasks(count, 4), selections("unseen tools", 4, count, "segments")
    assert [task.family for task in tasks] == [*made.FAMILIES, *made.FAMILIES]
    for task, case in zip(tasks, cases, strict=True):
        assert task.case == case
        assert (task.before.messages, task.before.tools) != (task.asked.messages, task.asked.tools)
        assert task.asked.messages[-1] == case.prompt[-1]
        assert task.asked.messages[0] == case.prompt[0], "a changed system prompt could change what is right"
        assert task.asked.tools == tuple(case.tools)
    by_name = {task.family: task for task in tasks}
    assert len(by_name["added tool"].before.tools) == 3
    assert len(by_name["removed tool"].before.tools) == 5
    assert sorted(map(json.dumps, by_name["moved tool"].before.tools)) == sorted(map(json.dumps, by_name["moved tool"].asked.tools))
    assert len(by_name["trimmed history"].before.messages) > len(by_name["trimmed history"].asked.messages) > len(cases[0].prompt)
    edited = by_name["edited history"]
    assert [one == two for one, two in zip(edited.before.messages, edited.asked.messages, strict=True)].count(False) == 1
    assert made.tasks(count, 4) == tasks, "the same seed gives the same tasks"
    with pytest.raises(ConfigError, match="'held-out tool'"):
        made.chosen(["held-out tool"])


def test_an_ended_run_goes_on_and_other_settings_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    rows = Rows(path, {"tools": 8, "methods": {"ours": (1, 2)}})
    rows.add({"part": "paired", "number": 1})
    rows.add({"part": "paired", "number": 0})
    with path.open("a") as file:
        file.write('{"part": "paired", "numb')
    again = Rows(path, {"tools": 8, "methods": {"ours": (1, 2)}})
    assert again.done("paired") == {0, 1}
    again.add({"part": "paired", "number": 2})
    assert [row["number"] for row in Rows(path, {"tools": 8, "methods": {"ours": (1, 2)}}).of("paired")] == [0, 1, 2]
    with pytest.raises(ConfigError, match="were measured with tools=8 instead of 9"):
        Rows(path, {"tools": 9, "methods": {"ours": (1, 2)}})
    path.write_text("words\nwords\n")
    with pytest.raises(ConfigError, match="not JSON lines"):
        Rows(path, {})


@pytest.mark.parametrize(
    ("one", "other", "apart"), [("", "", 0), ("abc", "abc", 0), ("kitten", "sitting", 3), ("", "abc", 3), ("ab", "ba", 2)]
)
def test_levenshtein(one: str, other: str, apart: int) -> None:
    assert segments_paired.distance([*map(ord, one)], [*map(ord, other)]) == apart


def test_flops_are_those_of_the_tokens_that_were_computed(engine: Engine) -> None:
    def of(positions: range) -> float:  # each token by itself, by what it looks at
        return sum(engine.model.flops(at + 1) - engine.model.flops(at) for at in positions)

    parts = (Segment(20, 60, 5, 30, 0, 10), Segment(70, 100, 5, 30, 0, 0))
    receipt = Receipt(prompt_tokens=120, cached_tokens=10 + 60, segment_tokens=60, segments=parts)
    found = segments_paired.flops(engine.model, receipt, Trials(engine).calibration(10))
    assert found["off"] == pytest.approx(of(range(120)))
    assert found["exact"] == pytest.approx(of(range(10, 120)))
    assert found["spent"] == pytest.approx(of(range(10, 30)) + of(range(60, 70)) + of(range(100, 120)))


def test_paired_requests_are_held_against_everything_computed(engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bench, path = Trials(engine), tmp_path / "rows.jsonl"
    methods = {"ours": bench.calibration(8), "all": bench.calibration(8, share=1.0), "probe": bench.calibration(8, probe=1e-9)}
    methods["margin"] = bench.calibration(8, margin=1e9)
    tasks = made.tasks(3, 3, ("dated system", "context 100 % other", "added tool"))
    rows = Rows(path, {})
    segments_paired.Paired(engine, methods, 2).run(tasks, rows, quiet)
    assert len(engine.store) == 0, "each request takes its pages with it"
    found = rows.of("paired")
    for row in found:
        assert {**row, "methods": 0} == {**json.loads(json.dumps(row)), "methods": 0}
        for near in row["methods"].values():
            assert near["prefix_tokens"] + near["reused_tokens"] + near["computed_tokens"] == row["prompt_tokens"]
            assert near["reused_tokens"] <= row["bound_tokens"]
        ours, all_, probe, margin = (row["methods"][name] for name in methods)
        assert ours["tier"] == "calibrated"
        assert ours["kl"] > 0
        assert ours["spent_flops"] < ours["exact_flops"] <= ours["off_flops"]
        assert (all_["kl"], all_["same"], all_["tool"], all_["reused_tokens"]) == (0.0, True, True, 0), "computing it all again is exact"
        assert (probe["tier"], probe["kl"], probe["refused"] > 0) == ("refused", 0.0, True)
        assert (margin["tier"], margin["same"], margin["tool"], margin["refused"] > 0) == ("refused", True, True, True)
        assert margin["spent_flops"] == pytest.approx(ours["spent_flops"] + ours["exact_flops"]), "both were paid for"
    sums = {(row["by"], row["of"], row["method"]): row for row in segments_paired.summaries(found)}
    whole = sums["all", "all", "ours"]
    assert whole["n"] == 3
    assert whole["reused_tokens"] == sum(row["methods"]["ours"]["reused_tokens"] for row in found)
    assert whole["prompts"] == {"exact": 0.0, "calibrated": 1.0, "refused": 0.0}
    assert sums["tier", "refused", "probe"]["kl_ours"] == pytest.approx(whole["kl"])
    shares = [sums[key]["n"] for key in (("share", "context", "ours"), ("share", "independent", "ours")) if key in sums]
    assert sum(shares) == 3
    assert sums["family", "added tool", "ours"]["n"] == 1

    monkeypatch.setattr(segments_paired.Paired, "_group", lambda *_: pytest.fail("measured again"))
    again = Rows(path, {})
    segments_paired.Paired(engine, methods, 2).run(tasks, again, quiet)
    assert again.of("paired") == found


def test_a_differing_answer_is_decoded_to_its_end(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys that were taken are spoilt, so that answers must differ."""
    bench = Trials(engine)
    real = segments.attach

    def spoilt(model: Any, sequence: Any, *rest: Any) -> None:
        real(model, sequence, *rest)
        for span in sequence.ahead:
            for own, into, some, _ in sequence.slots(span.start, span.stop):
                for values in own.layer_values:
                    values[:, into : into + some] *= -3.0

    monkeypatch.setattr(segments, "attach", spoilt)
    rows = Rows(None, {})
    segments_paired.Paired(engine, {"ours": bench.calibration(8)}).run(made.tasks(2, 3, ("dated system",)), rows, quiet)
    for row in rows.of("paired"):
        near = row["methods"]["ours"]
        assert near["kl"] > 0.5
        assert not near["same"]  # calls held to few schemas may be alike all the same
        assert near["top1"] < 1.0
        assert 0 < near["distance"] <= 1
    [whole] = [row for row in segments_paired.summaries(rows.of("paired")) if row["by"] == "all"]
    assert whole["same"] == 0.0
    assert whole["decision"] == 0.0


def test_episodes_are_played_by_each_method(engine: Engine) -> None:
    runs = list(made.runs(1, 3))
    rows = Rows(None, {})
    segments_episodes.Episodes(engine, {"ours": Trials(engine).calibration(8)}).run(runs, rows, quiet)
    assert len(engine.store) == 0
    [row] = rows.of("episodes")
    assert row["steps"] == len(runs[0].steps) >= 2
    off, exact, ours = (row["methods"][name] for name in ("off", "exact", "ours"))
    assert off["computed_tokens"] == off["prompt_tokens"] == exact["prompt_tokens"]
    assert (exact["solved"], exact["tool"], exact["arguments"]) == (off["solved"], row["steps"], row["steps"])
    assert sum(ours["reused_tokens"]) > 0
    assert sum(ours["computed_tokens"]) < sum(exact["computed_tokens"]) < sum(off["computed_tokens"])
    sums = {(row["family"], row["method"]): row for row in segments_episodes.summaries(rows.of("episodes"))}
    assert sums["all", "off"]["flops_of_off"] == sums["all", "exact"]["flops_of_exact"] == 1.0
    assert sums["all", "ours"]["flops_of_exact"] < 1.0
    assert sums["all", "ours"]["episode_ms"] > 0


def test_seeds_entropy_and_deviation(engine: Engine) -> None:
    assert segments_sampled.entropy([torch.zeros(8), torch.zeros(8)]) == pytest.approx(math.log(8))
    tasks = made.tasks(1, 3, ("dated system",))
    bench, rows, whole = Trials(engine), Rows(None, {}), Rows(None, {})
    segments_sampled.Sampled(engine, bench.calibration(8)).run(tasks, rows, quiet)
    segments_sampled.Sampled(engine, bench.calibration(8, share=1.0)).run(tasks, whole, quiet)
    assert len(engine.store) == 0
    [near], [same] = rows.of("sampled"), whole.of("sampled")
    assert 0 < near["keys"] < near["keys_most"] < 1
    assert 0 < near["values"] < near["values_most"] < 1
    assert (same["distance"], same["same"], same["entropy"]) == (0.0, 1.0, same["entropy_off"]), "computing it all again is exact"
    assert near["entropy"] != near["entropy_off"] == same["entropy_off"]
    assert segments_sampled.summary(rows.of("sampled"))["keys"] == near["keys"]


def test_verdicts_follow_their_figures(engine: Engine) -> None:
    worst = moved(engine)
    assert worst is not None
    assert 0 < worst <= 2e-6
    assert {row["verdict"] for row in verdicts({})} == {"not measured"}
    row = {"cases": 1, "bound_tokens": 2000, "reused_tokens": 1900, "of_bound": 0.95, "speedup": 1.4, "kl_mean": 0.2}
    timed = [
        {"family": "dated system", "method": "ours", "step_ms": 10.0, **row},
        {"family": "dated system", "method": "halo 8", "step_ms": 10.0, **row},
        {"family": "dated system", "method": "off", "step_ms": 100.0, **row, "kl_mean": 0.0},
    ]
    one = {"n": 100, "tool": 0.98, "tool_ci": (0.95, 0.99), "changed": 0.02, "spent_flops": 1.0, "exact_flops": 2.0, "method": "ours"}
    paired = [{"by": "all", "of": "all", **one}, {"by": "family", "of": "dated system", **one}]
    find = {"steps": [{"step_ms": 20.0}], "verdicts": []}
    found = {row["hypothesis"]: row for row in verdicts({"rows": timed, "paired": paired, "find": find, "moved": 1e-3})}

    def said(part: str) -> tuple[float, str]:
        [row] = [row for name, row in found.items() if part in name]
        return row["figure"], row["verdict"]

    assert said("sooner than without reuse") == (0.9, "holds")
    assert said("text-match bound") == (0.95, "holds")
    assert said(">= 1.5 x") == (1.4, "fails")
    assert said("KL below 0.1 nats per token") == (0.2, "fails")
    assert said("exact requests are untouched") == (0.0, "holds")
    assert said("same tool as with everything computed, all") == (0.98, "fails")
    assert said("fewer prefill FLOPs") == (0.5, "holds")
    assert said("tasks right or wrong") == (0.02, "fails")
    assert said("at most 15 ms") == (20.0, "fails")
    assert said("re-indexing") == (1e-3, "fails")
    assert said("where nothing repeats") == (None, "not measured")


def test_the_command_measures_the_made_up_world_and_goes_on(tmp_path: Path, threads: Callable[[int], None]) -> None:
    threads(1)
    rows, saved, drawn = tmp_path / "rows.jsonl", tmp_path / "s.json", tmp_path / "s.png"
    given = [
        "--model",
        "embedded",
        "--dtype",
        "float32",
        "--halo",
        "8",
        "--cases",
        "0",
        "--tools",
        "3",
        "--no-ablations",
    ]
    given += ["--families", "dated system,added tool", "--paired", "2", "--rows", str(rows), "--json", str(saved)]
    done = RUN.invoke(app, given)
    assert done.exit_code == 0, done.output
    report = json.loads(saved.read_text())
    assert {row["method"] for row in report["paired"]} == {"ours", "bare"}
    assert (report["tail"], report["margin"], report["repeats"]) == (64, 0.0, 1)
    kept = json.loads(rows.read_text().splitlines()[0])["methods"]
    assert (kept["ours"]["tail"], kept["bare"]["tail"]) == (64, 0), "no repair at all has none"
    assert report["verdicts"][0].keys() == {"hypothesis", "figure", "verdict", "reason"}
    assert RUN.invoke(plots.app, [str(rows), str(drawn)]).exit_code == 0
    assert drawn.read_bytes().startswith(b"\x89PNG")
    before = rows.read_text()
    further = RUN.invoke(app, [*given[:4], *given[6:], "--paired", "3", "--sampled", "1", "--episodes", "1"])
    assert further.exit_code == 0, further.output
    assert rows.read_text().startswith(before), "what was measured is not measured again, with the setting it was begun with"
    report = json.loads(saved.read_text())
    assert [row["n"] for row in report["paired"] if row["by"] == "all"] == [3, 3]
    assert report["sampled"]["n"] == 1
    assert {row["method"] for row in report["episodes"]} == {"off", "exact", "ours", "bare"}
    other = RUN.invoke(app, [*given, "--halo", "9"])
    assert other.exit_code == 1
    assert "name another file" in " ".join(other.output.split())


def test_styles_that_there_are_not_are_refused() -> None:
    with pytest.raises(ConfigError, match="styles='hermess'"):
        segments_parts.Options(styles=("hermess",))


def test_the_measured_page_is_what_the_json_lines_say() -> None:
    root = ROOT / "docs"
    files = sorted((root / "benchmarks").glob("*-segments-*.json"))
    reports = [(file.stem, json.loads(file.read_text(encoding="utf-8"))) for file in files]
    said = markdown(reports) + "\n"
    again = "python -m benchmarks.segments_text docs/benchmarks/*-segments-*.json > docs/notes/segments-measured.md"
    assert (root / "notes" / "segments-measured.md").read_text(encoding="utf-8") == said, f"run {again}"
    for _, report in reports:
        assert report["bench"] == "segments"


def test_made_up_requests_come_in_the_number_asked() -> None:
    assert made_up(0, 8) == []
    two = made_up(2, 4)
    assert len(two) == 2
    assert [len(one.calls[0].tools) for one in two] == [4, 4]
    assert {case.family for case in shifts.cases(two, 1)} >= {"added tool", "dated system"}
