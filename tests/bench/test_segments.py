"""`bench segments` and `calibrate`: cases as applications make them, a bound that is the truth, figures that add up, a file that serves."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from agentcache import Engine
from agentcache.approximate.calibrate import search, shifts
from agentcache.approximate.calibrate.trials import Served, Trials, bound, first_unsure, row, rows
from agentcache.approximate.calibrations import path_of
from agentcache.bench.quality_cases import made_up
from agentcache.calibration import Calibration
from agentcache.cli.app import app
from agentcache.errors import ConfigError, ReuseWarning
from agentcache.model.loading import load
from agentcache.traces import Call, Episode, read
from agentcache.types import Precision
from benchmarks import plots
from benchmarks.segments_parts import methods, variations
from tests import models
from tests.engines import TOOLS
from tests.saved_adapters import save_for, twin

RUN = CliRunner()
SYSTEM = "You keep the harbour book. " + " ".join(f"Rule {at} is about pier {at * 7 % 13}." for at in range(6))


def message(role: str, at: int) -> dict[str, Any]:
    return {"role": role, "content": f"{role} line {at}: " + " ".join(f"ship {at * n % 91} lies at {n}" for n in range(6))}


def chat_line() -> dict[str, Any]:
    turns = [message("user" if at % 2 == 0 else "assistant", at) for at in range(8)]
    return {"id": "chat", "system": SYSTEM, "tools": [*TOOLS, *[_renamed(at) for at in range(3)]], "messages": turns}


def _renamed(at: int) -> dict[str, Any]:
    function = dict(TOOLS[0]["function"])
    return {"type": "function", "function": {**function, "name": f"other_{at}", "description": f"Number {at} of all. " * 5}}


def edited_line() -> dict[str, Any]:
    first = [
        {"role": "system", "content": SYSTEM},
        message("user", 1),
        message("assistant", 2),
        message("user", 3),
        message("assistant", 4),
    ]
    elided = [*first[:2], {"role": "assistant", "content": "(left out)"}, *first[3:], message("user", 5)]
    answer = {"role": "assistant", "content": "Yes."}
    return {
        "id": "edited",
        "tools": [],
        "steps": [{"messages": first[:4], "completion": first[4]}, {"messages": elided, "completion": answer}],
    }


def inserted_line() -> dict[str, Any]:
    """Tools that come later, and a message that comes into the middle."""
    first = [{"role": "system", "content": SYSTEM}, message("user", 1), message("assistant", 2), message("user", 3)]
    inserted = [first[0], message("user", 9), *first[1:]]
    answer = {"role": "assistant", "content": "Yes."}
    steps = [{"messages": first, "completion": answer}, {"messages": inserted, "completion": answer}]
    return {"id": "inserted", "tools": [], "steps": steps}


def later_line() -> dict[str, Any]:
    turns = [message("user" if at % 2 == 0 else "assistant", at) for at in range(6)]
    return {
        "id": "later",
        "system": SYSTEM,
        "tools": TOOLS,
        "messages": turns,
        "tools_events": [{"before_message": 3, "add_tools": [_renamed(7)]}],
    }


def text_line() -> dict[str, Any]:
    said = f"{SYSTEM}\nQuestion: where?\nThought: look\nAction: find[ship]\nObservation: pier 4\nThought:"
    return {"id": "text", "prompts": [said], "completions": [" done\n"]}


SOME = ("halo 8, share 0.16", "halo 8, from layer 2 to 64", "halo 8, int8", "halo 8, int4")


@pytest.fixture
def workload(tmp_path: Path) -> Path:
    path = tmp_path / "traces" / "trace.jsonl"
    path.parent.mkdir()
    path.write_text("".join(json.dumps(line) + "\n" for line in (chat_line(), edited_line(), inserted_line(), later_line(), text_line())))
    return path


@pytest.fixture(autouse=True)
def few_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    """A calibration tries some thirty: four kinds of them show what it does."""
    monkeypatch.setattr(search, "HALOS", (0, 8, 32))
    monkeypatch.setattr(search, "SHARED", (8,))
    monkeypatch.setattr(search, "SHARES", (0.16,))
    monkeypatch.setattr(search, "WINDOWS", (16,))
    monkeypatch.setattr(search, "PROBES", (0.1,))


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    models.build("qwen3", num_hidden_layers=4).save_pretrained(folder)
    models.toy_tokenizer().save_pretrained(folder)
    return folder


def test_every_family_comes_from_some_episode_and_really_shifts(workload: Path) -> None:
    found = shifts.cases(list(read(workload)), 2, shifts.EVERY)
    assert {case.family for case in found} == set(shifts.EVERY)
    for case in found:
        [before] = case.before
        assert (before.prompt, before.tools) != (case.call.prompt, case.call.tools)
    by_name = {case.family: case for case in found}
    assert len(by_name["added tool"].call.tools) == len(by_name["added tool"].before[0].tools) + 1
    assert len(by_name["trimmed history"].call.prompt) < len(by_name["trimmed history"].before[0].prompt)
    one, all_ = (by_name[f"context {percent} % other"].call.prompt for percent in (1, 100))
    said = [str(prompt[0]["content"]).split(" ") for prompt in (one, all_)]
    changed = [sum(a != b for a, b in zip(SYSTEM.split(" "), words, strict=True)) for words in said]
    assert changed[0] <= 3
    assert changed[1] > 20
    inserted, later = by_name["inserted message"], by_name["held-out tool"]
    assert [message_ for message_ in inserted.call.prompt if message_ not in inserted.before[0].prompt] == [message("user", 9)]
    assert later.call.tools[:-1] == later.before[0].tools
    assert shifts.cases(list(read(workload)), 2, shifts.EVERY) == found, "the same seed gives the same cases"


def test_long_prompts_are_left_out(workload: Path) -> None:
    def longest(most: int) -> int:
        found = shifts.cases(list(read(workload)), 4, shifts.EVERY, most_tokens=most)
        return max(shifts.estimated(call) for case in found for call in case.before)

    assert longest(0) > 600
    assert longest(500) <= 550, "a date may come on top"


def test_where_nothing_repeats_there_is_nothing_to_find(workload: Path, model: Path, threads: Callable[[int], None]) -> None:
    threads(1)
    with Engine(str(model), store=None) as engine:
        bench = Trials(engine, 2)
        served = bench.run(shifts.cases(list(read(workload)), 1, (shifts.NOTHING,)), {"ours": bench.calibration(8)}, False, lambda _: None)
    [one] = [one for one in served if one.method == "ours"]
    assert (one.bound_tokens, one.reused_tokens, one.kl) == (0, 0, 0.0)


def test_the_bound_counts_every_repeat_of_enough_tokens() -> None:
    kept = np.arange(100, dtype=np.uint32)
    new = np.arange(500, 600, dtype=np.uint32)
    prompt = np.concatenate([new[:10], kept[20:70], new[:5], kept[30:61], new[:5]]).astype(np.uint32)
    assert bound([kept], prompt, 0, 32) == 50
    assert bound([kept], prompt, 0, 31) == 81
    assert bound([kept], prompt, 20, 32) == 40
    assert bound([kept], kept[:40], 0, 32) == 39, "the last token is always computed"
    assert bound([kept[:20]], prompt, 0, 32) == 0


def test_rows_add_up_and_no_method_helps_the_next(workload: Path, model: Path, threads: Callable[[int], None]) -> None:
    threads(1)
    families = ("dated system", "edited history")
    cases = shifts.cases(list(read(workload)), 1, families)
    with Engine(str(model), store=None) as engine:
        bench = Trials(engine, 4)
        tried = variations(bench, bench.calibration(16))
        methods = {name: tried[name] for name in ("bare", "ours", "halo 32", *SOME)}
        found = rows(bench.run(cases, methods, True, lambda _: None))
        again = rows(bench.run(cases, dict(reversed(methods.items())), False, lambda _: None))
        assert len(engine.store) == 0, "each case takes its pages with it"
    assert {one["method"] for one in found} == {*methods, "exact", "off"}
    by_name = {(one["family"], one["method"]): one for one in found}
    for one in found:
        assert one["prefix_tokens"] + one["reused_tokens"] + one["computed_tokens"] == one["prompt_tokens"]
        assert one["reused_tokens"] <= one["bound_tokens"]
    for family in families:
        exact, bare, off = (by_name[family, name] for name in ("exact", "bare", "off"))
        assert exact["kl_mean"] == off["kl_mean"] == 0.0
        assert exact["top1"] == off["top1"] == exact["decision"] == 1.0
        assert off["computed_tokens"] == off["prompt_tokens"]
        assert bare["reused_tokens"] >= 0.8 * bare["bound_tokens"] > 0
        assert bare["kl_mean"] > 0
        assert by_name[family, "halo 32"]["reused_tokens"] < bare["reused_tokens"]
        eight, four = (by_name[family, f"halo 8, {stored}"] for stored in ("int8", "int4"))
        assert eight["reused_tokens"] == four["reused_tokens"] > 0
        assert 0 < eight["kl_mean"] < four["kl_mean"]
        resumed = by_name[family, "halo 8, from layer 2 to 64"]
        assert resumed["work_tokens"] < resumed["computed_tokens"]
    other = {(one["family"], one["method"]): one for one in again}
    for key in other:
        for name in ("reused_tokens", "computed_tokens", "kl_mean", "top1"):
            assert other[key][name] == by_name[key][name], (key, name)


def test_times_are_medians_of_interleaved_askings(
    workload: Path, model: Path, threads: Callable[[int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    threads(1)
    [case] = shifts.cases(list(read(workload)), 1, ("dated system",))
    order: list[str] = []
    with Engine(str(model), store=None) as engine:
        bench = Trials(engine, 4, repeats=3)
        ask = bench.ask

        def timed(call: Call, namespace: str, reuse: Any, forced: tuple[int, ...], adapter: str | None) -> Any:
            found = ask(call, namespace, reuse, forced, adapter)
            name = reuse if isinstance(reuse, str) else "ours"
            if call is case.call:
                order.append(name)
                found.ms = (900.0, 10.0, 30.0)[order.count(name) - 1] * (2 if name == "exact" else 1)
            return found

        monkeypatch.setattr(bench, "ask", timed)
        served = {one.method: one for one in bench.run([case], {"ours": bench.calibration(8)}, True, lambda _: None)}
    assert order == ["exact", "ours", "off", "ours", "off", "exact", "off", "exact", "ours"]
    assert (served["ours"].step_ms, served["exact"].step_ms, served["ours"].exact_step_ms) == (30.0, 60.0, 60.0)


def test_only_settings_within_the_bounds_are_chosen(workload: Path, model: Path, threads: Callable[[int], None]) -> None:
    threads(1)
    cases = shifts.cases(list(read(workload)), 1, ("dated system", "removed tool"))
    with Engine(str(model), store=None) as engine:
        bench = Trials(engine, 4)
        given = search.settings(bench, {"margin": 0.5, "tail": 48}).values()
        assert {(known.margin, known.tail) for known in given} == {(0.5, 48)}, "neither is looked for"
        for found in (variations(bench, bench.calibration(8, tail=48)), methods(bench, bench.calibration(8, tail=48), True)):
            assert {name for name, known in found.items() if known.tail != 48} == {"bare", "no tail"}
            assert {found[name].tail for name in ("bare", "no tail")} == {0}
        seen = search.measure(bench, cases, lambda _: None)
        for _, plain in seen:
            assert plain["speedup"] > 0
            plain["speedup"] = 1000 / plain["work_tokens"]  # as on a machine that does nothing else
        loose = search.choose(seen, 1e9, 0.0)
        assert loose is not None
        reused = [plain for _, plain in seen if plain["reused_tokens"]]
        assert loose.measured["work_tokens"] == min(plain["work_tokens"] for plain in reused)
        kls = sorted(plain["kl_mean"] for plain in reused)
        tight = search.choose(seen, kls[1], 0.0)
        assert tight is not None
        assert tight.measured["kl_mean"] <= kls[1] < loose.measured["kl_mean"]
        assert search.choose(seen, kls[0] / 2, 0.0) is None
        assert search.choose(seen, 1e9, 1.1) is None
        sure = search.measure(bench, cases[:1], lambda _: None, {"margin": 1e9})
        assert all(plain["unsure"] == plain["cases"] and plain["kl_mean"] == 0 for _, plain in sure if plain["reused_tokens"])
        fresh = Call([message("user", 1)], (), message("assistant", 2))
        with pytest.raises(ConfigError, match="no case repeats"):
            search.calibrate(bench, [shifts.Case("x", (), fresh)], search.Bounds(1.0, 0.0), lambda _: None)


def test_the_fastest_setting_wins_and_must_beat_the_prefix() -> None:
    def measured(work: float, ms: list[float], precision: Precision = "exact", exact: float = 100.0) -> search.Seen:
        served = [Served("all", "x", 9, 9, 0, 1, 8, 0, 0, work / len(ms), each, exact, 0.0, 1.0) for each in ms]
        found = {**row(served, "all", "x"), "work": work}
        return Calibration("x", 2, ((8, 2),), 32, 1.0, precision=precision), found

    def chosen(*seen: search.Seen) -> float | None:
        found = search.choose(seen, 1.0, 0.0)
        return None if found is None else found.measured["work"]

    fast, frugal = measured(500, [40, 90, 41]), measured(100, [70, 20, 70])
    assert chosen(fast, frugal) == chosen(frugal, fast) == 500, "FLOPs are not time, and one lucky case is not the middle"
    assert chosen(fast, measured(300, [40.2, 90, 41.2])) == 300, "equally fast to a hundredth: the one that computes less"
    assert chosen(measured(100, [101, 102, 90])) is None, "slower than the exact prefix"
    bits = [measured(100, [40], precision) for precision in ("exact", "int4", "int8")]
    found = search.choose(bits, 1.0, 0.0)
    assert found is not None
    assert found.precision == "int4"


def test_what_follows_a_close_choice_is_not_counted() -> None:
    logits = [torch.tensor([5.0, 1.0, 4.5]), torch.tensor([0.0, 9.0, 1.0]), torch.tensor([2.0, 2.1, 0.0])]
    assert [first_unsure(logits, margin) for margin in (0.0, 0.05, 0.2, 1.0)] == [3, 3, 2, 0]


def test_what_calibrate_writes_serves_an_engine(workload: Path, model: Path, tmp_path: Path) -> None:
    given = [
        "--model",
        str(model),
        "--dtype",
        "float32",
        "--workload",
        str(workload),
        "--cases",
        "1",
        "--families",
        "dated system",
        "--answer",
        "3",
    ]
    done = RUN.invoke(
        app, ["calibrate", *given, "--kl", "1e9", "--top1", "0", "--store", str(tmp_path / "store"), "--json", str(tmp_path / "c.json")]
    )
    assert done.exit_code == 0, done.output
    assert "chosen: " in done.output
    assert "from 1 cases, fewer than 32" in done.stderr
    report = json.loads((tmp_path / "c.json").read_text())
    assert Calibration.load(report["written"]).model == str(model)
    with pytest.warns(ReuseWarning, match="from 1 cases, fewer than 32"):
        engine = Engine(str(model), store=str(tmp_path / "store"), reuse="approximate")
    with engine:
        for system in ("One.", "Quite another."):
            messages = [{"role": "system", "content": system}, message("user", 1), message("assistant", 2), message("user", 3)]
            receipt = engine.generate(messages, sampling=None).receipt
        assert receipt.segments
    refused = RUN.invoke(app, ["calibrate", *given, "--kl", "0", "--top1", "1", "--out", str(tmp_path / "none.json")])
    assert refused.exit_code == 1
    assert "nothing is written" in refused.output
    assert not (tmp_path / "none.json").exists()


def test_the_command_prints_table_picture_and_one_json_line(workload: Path, model: Path, tmp_path: Path) -> None:
    saved, drawn = tmp_path / "s.json", tmp_path / "s.png"
    names = "dated system,edited history,moved tool"
    given = [
        "--model",
        str(model),
        "--dtype",
        "float32",
        "--workload",
        str(workload),
        "--cases",
        "1",
        "--answer",
        "2",
        "--families",
        names,
    ]
    done = RUN.invoke(app, ["bench", "segments", *given, "--kl", "1e9", "--json", str(saved)])
    assert done.exit_code == 0, done.output
    report = json.loads(saved.read_text())
    assert {row["method"] for row in report["rows"]} == {"bare", "ours", "exact", "off"}
    keys = "family method prompt_tokens bound_tokens reused_tokens computed_tokens step_ms exact_step_ms kl_mean top1 decision".split()
    assert set(keys) <= set(report["rows"][0])
    assert report["lacking"] == []
    assert RUN.invoke(plots.app, [str(saved), str(drawn)]).exit_code == 0
    assert drawn.read_bytes().startswith(b"\x89PNG")


def test_unknown_families_and_workloads_are_refused(workload: Path) -> None:
    done = RUN.invoke(app, ["bench", "segments", "--workload", str(workload), "--families", "dated systems"])
    assert done.exit_code == 1
    assert "'dated systems' is none of" in done.output
    done = RUN.invoke(app, ["calibrate", "--workload", str(workload.with_name("none.jsonl"))])
    assert done.exit_code == 1
    assert "is not a file" in done.output


def test_episodes_without_history_give_no_cases() -> None:
    assert shifts.cases([Episode("x", "chat", (Call([message("user", 1)], (), message("assistant", 2)),))], 1) == []


def test_made_up_requests_come_in_the_number_asked() -> None:
    assert made_up(8, 0) == []
    two = made_up(8, 2)
    assert len(two) == 2
    assert {case.family for case in shifts.cases(two, 1)} >= {"added tool", "dated system"}
    with pytest.raises(ConfigError, match="with 5, 8, 20, 50 tools"):
        made_up(4, 2)
    with pytest.raises(ConfigError, match="n=201: 200 cases of each kind"):
        made_up(8, 201)


def test_calibrate_keeps_one_file_for_each_pair(workload: Path, model: Path, tmp_path: Path) -> None:
    base, _ = load(str(model), dtype="float32")
    router = save_for(base, tmp_path / "router")
    folders = {"router": router, "twin": twin(router, tmp_path / "twin")}
    given = ["--model", str(model), "--dtype", "float32", "--workload", str(workload), "--cases", "1", "--answer", "3"]
    given += ["--families", "handed over", "--store", str(tmp_path / "store")]
    for lender in ("twin", "base"):
        source = str(folders.get(lender, lender))
        done = RUN.invoke(app, ["calibrate", *given, "--adapter", str(router), "--from", source, "--json", str(tmp_path / "c.json")])
        report = json.loads((tmp_path / "c.json").read_text())
        if lender == "base":
            assert done.exit_code == 1
            assert "nothing is written" in done.output
            assert "written" not in report
            assert min(row["kl_mean"] for row in report["tried"] if row["reused_tokens"]) > 0.02, (
                "large random adapters are far from each other"
            )
            continue
        assert done.exit_code == 0, done.output
        assert max(row["kl_mean"] for row in report["tried"] if "int" not in row["method"]) < 1e-6, "its keys and values are the same"
    with Engine(str(model), dtype="float32", store=str(tmp_path / "store")) as engine:
        digests = {name: engine.add_adapter(name, folder) for name, folder in folders.items()}
        weights = engine.fingerprint.whole if engine.fingerprint else ""
        wanted, lent = (f"{weights}+{digests[name]}" for name in ("router", "twin"))
        [written] = (tmp_path / "store" / "calibrations").iterdir()
        assert written == path_of(tmp_path / "store", wanted, lent)
        assert (Calibration.load(written).fingerprint, Calibration.load(written).source) == (wanted, lent)
        asked = [{"role": "system", "content": SYSTEM}, message("user", 1), message("assistant", 2), message("user", 3)]
        engine.generate(asked, adapter="twin")
        with pytest.warns(ReuseWarning, match="from 1 cases, fewer than 32"):
            receipt = engine.generate(asked, adapter="router", reuse="approximate").receipt
        assert [segment.adapter for segment in receipt.segments] == [digests["twin"]]
