"""`agentcache bench rag`: its own corpus and questions, other people's files, and the rows that it ends in."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from agentcache.approximate.calibrate import passages, questions, search, shifts
from agentcache.approximate.calibrate.trials import Served, row
from agentcache.calibration import Calibration
from agentcache.cli.app import app
from agentcache.errors import ConfigError


def test_our_own_corpus_is_as_large_as_promised() -> None:
    asked = questions.questions(None, None, 6)
    texts = {text for one in asked for text in one.found}
    assert (len(asked), len(texts)) == (360, 235)
    assert all(any(right in text for text in one.found) for one in asked for right in one.answers)
    assert len({one.found for one in asked}) > 100


def test_questions_are_asked_again_in_other_orders() -> None:
    asked = questions.questions(None, None, 6)[:40]
    thrice = questions.in_orders(asked, 3)
    assert (len(thrice), thrice[:40]) == (120, asked)
    assert [sorted(one.found) for one in thrice] == [sorted(one.found) for one in asked] * 3
    assert sum(one.found != other.found for one, other in zip(thrice[40:], asked * 2)) > 70


def test_questions_of_hotpotqa_and_multihoprag_are_read(tmp_path: Path) -> None:
    hotpot, multihop, corpus = tmp_path / "hotpot.json", tmp_path / "multihop.jsonl", tmp_path / "corpus.json"
    hotpot.write_text(
        json.dumps([{"question": "Who?", "answer": "Ada", "context": [["Mill", ["Ada built it.", " It stands."]], ["Sea", []]]}])
    )
    assert questions.questions(None, hotpot, 5) == [questions.Question("Who?", "", ("Ada",), ("Mill\nAda built it. It stands.", "Sea\n"))]
    corpus.write_text(json.dumps([{"title": "Mill", "body": "Ada built the mill."}, {"title": "Sea", "body": "Salt and wind."}]))
    multihop.write_text(json.dumps({"query": "Who built the mill?", "answer": "Ada", "evidence_list": []}) + "\n")
    assert questions.questions(corpus, multihop, 1)[0].found == ("Mill\nAda built the mill.",)
    with pytest.raises(ConfigError, match="name a file of them with --corpus"):
        questions.questions(None, multihop, 1)
    with pytest.raises(ConfigError, match="--questions too"):
        questions.questions(corpus, None, 1)


def test_files_of_ones_own_are_read_or_refused_by_name(tmp_path: Path) -> None:
    asked, corpus = tmp_path / "asked.jsonl", tmp_path / "corpus.jsonl"
    hub = {"title": ["Mill"], "sentences": [["Ada built it.", " It stands."]]}
    rows = [{"question": "Who?", "answer": None, "context": hub}, {"question": "Which year?", "answer": 1969, "context": ["Of the sea."]}]
    asked.write_text("\n".join(map(json.dumps, rows)), "utf-8-sig")
    found = questions.questions(None, asked, 5)
    assert [(one.answers, one.found) for one in found] == [((), ("Mill\nAda built it. It stands.",)), (("1969",), ("Of the sea.",))]
    corpus.write_text('"Ada\u2028built the mill."\r\n"?!"\r\n', "utf-8")
    asked.write_text(json.dumps({"query": "Who built it?"}))
    assert questions.questions(corpus, asked, 1)[0].found == ("Ada\u2028built the mill.",)
    for text, why in (
        ('"a"\n"b', "line 2: cannot be read"),
        ("[" * 100_000, "line 1: cannot be read"),
        ('"a"\n" "', "passage ' ': must be"),
    ):
        corpus.write_text(text)
        with pytest.raises(ConfigError, match=why):
            questions.questions(corpus, asked, 1)
    asked.write_text(json.dumps({"query": "Who?", "context": 5}))
    with pytest.raises(ConfigError, match="context=5 must be a list of passages"):
        questions.questions(None, asked, 1)


def test_cases_show_passages_in_another_order_and_among_others() -> None:
    asked = questions.questions(None, None, 6)
    found = questions.cases(asked, 4, shifts.DOCUMENTS)
    assert [case.family for case in found] == [family for family in shifts.DOCUMENTS for _ in range(4)]
    for case in found:
        said = str(case.call.prompt[-1]["content"])
        own = next(one for one in asked if said.endswith(one.text) and said.startswith(one.found[0])).found
        before = [str(call.prompt[-1]["content"]).split("\n\n")[:-1] for call in case.before]
        shown = said.split("\n\n")[:-1]
        assert tuple(shown) == own
        assert not any(str(call.prompt[-1]["content"]).endswith(case.call.prompt[-1]["content"].split("\n\n")[-1]) for call in case.before)
        if case.family == shifts.DOCUMENTS[0]:
            assert (len(before), sorted(before[0]), before[0] != shown) == (1, sorted(own), True)
        else:
            assert [len(set(texts) & set(own)) for texts in before] == [3, 3]
            assert all(len(set(texts) - set(own)) >= 2 for texts in before)
            assert set(before[0] + before[1]) > set(own)
    assert {case.family for case in questions.cases(asked, 1, shifts.DOCUMENTS[1:])} == {shifts.DOCUMENTS[1]}
    assert questions.cases([replace(asked[0], found=asked[0].found[:1])], 4, shifts.DOCUMENTS) == []


def test_consent_is_refused_where_answers_change_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked, corpus, out = tmp_path / "asked.jsonl", tmp_path / "corpus.json", tmp_path / "kept.json"
    ours = questions.questions(None, None, 6)
    corpus.write_text(json.dumps(sorted({text for one in ours for text in one.found})))
    asked.write_text("\n".join(json.dumps({"query": one.text, "answer": one.answers[0]}) for one in ours[:40]))
    given = ["calibrate", "--model", "embedded", "--corpus", str(corpus), "--questions", str(asked), "--cases", "1", "--answer", "6"]
    seen, measure = list[search.Seen](), search.measure

    def measured(*said: Any) -> list[search.Seen]:
        """The same figures for other bounds. On a busy machine nothing is faster than the exact prefix of so short a prompt."""
        if not seen:
            seen.extend((found, {**figures, "speedup": 2.0}) for found, figures in measure(*said))
        return seen

    monkeypatch.setattr(search, "measure", measured)
    done = CliRunner().invoke(app, [*given, "--kl", "9", "--top1", "0", "--out", str(out), "--json", str(tmp_path / "said.json")])
    assert done.exit_code == 0, done.output
    said = json.loads((tmp_path / "said.json").read_text())
    assert (said["cases"], len(said["tried"])) == (2, 36)
    shares = {one["method"]: one["reused_tokens"] / one["bound_tokens"] for one in said["tried"]}
    assert shares["halo 0"] > shares["halo 4"] > shares["halo 4, share 0.4 by question"] > 0.2
    known = Calibration.load(out)
    assert known.measured["method"] == said["chosen"]
    assert known.min_tokens == max(16, 2 * known.steps[0][0])
    seen[:] = [(found, {**figures, "decision": 0.5}) for found, figures in seen]
    bounds = ["--kl", "9", "--top1", "0", "--decision", "0.6"]
    refused = CliRunner().invoke(app, [*given, *bounds, "--out", str(tmp_path / "none.json")])
    assert (refused.exit_code, (tmp_path / "none.json").exists()) == (1, False)
    assert "decision=0.6" in refused.output


def test_a_setting_must_keep_whole_answers() -> None:
    def measured(halo: int, decision: float) -> search.Seen:
        served = [Served("all", "x", 9, 9, 0, 5, 4, 0, 0, 4 + halo, 50.0, 100.0, 0.0, 1.0)]
        return Calibration("x", 2, ((halo, 2),), 32, 1.0), {**row(served, "all", f"halo {halo}"), "decision": decision}

    seen = [measured(2, 0.9), measured(8, 0.97)]
    chosen = [search.choose(seen, 1.0, 0.0, least) for least in (0.0, 0.95, 0.98)]
    assert [known and known.steps[0][0] for known in chosen] == [2, 8, None]


def test_f1_counts_common_words() -> None:
    assert passages.f1("the Ada Lerin", "Ada Lerin") == 1.0
    assert passages.f1("Ada Kosler", "Ada Lerin") == pytest.approx(0.5)
    assert passages.f1("", "Ada") == 0.0


def test_rows_tell_what_order_and_repair_save(tmp_path: Path) -> None:
    done = CliRunner().invoke(
        app, ["bench", "rag", "--limit", "6", "--halos", "0,4", "--shares", "0.2", "--json", str(tmp_path / "rag.json")]
    )
    assert done.exit_code == 0, done.output
    rows = json.loads((tmp_path / "rag.json").read_text())["rows"]
    assert [(one["order"], one["reuse"], one["repair"]) for one in rows] == [
        ("retrieved", "off", ""),
        ("retrieved", "exact", ""),
        ("cache-aware", "exact", ""),
        *(
            ("retrieved", "approximate", f"halo {halo}{share}")
            for halo in (0, 4)
            for share in ("", ", 0.2 by question", ", 0.2 by deviation")
        ),
    ]
    off, retrieved, ordered, bare, asked, deviating, halo = rows[:7]
    assert abs(asked["computed_tokens"] - deviating["computed_tokens"]) < 0.1 * asked["passage_tokens"]
    assert bare["computed_tokens"] < asked["computed_tokens"] < retrieved["computed_tokens"]
    assert (off["computed_tokens"], off["agreement"], off["n"]) == (off["prompt_tokens"], 1.0, 6)
    assert (retrieved["agreement"], retrieved["kl"]) == (1.0, 0.0)
    assert ordered["computed_tokens"] < 0.6 * retrieved["computed_tokens"]
    assert ordered["prompt_tokens"] > retrieved["prompt_tokens"], "the retriever's ranks are shown"
    assert [off["hit_share"], retrieved["hit_share"] < ordered["hit_share"] / 1.5] == [0.0, True]
    system = retrieved["cached_tokens"] - retrieved["hit_share"] * retrieved["passage_tokens"]
    assert 5 * 6 < system < 40 * 6, "what stands before the passages is no hit of theirs"
    assert bare["hit_share"] > 0.9 > ordered["hit_share"], "each passage was learnt"
    assert bare["segment_tokens"] > halo["segment_tokens"] > 0.5 * halo["passage_tokens"]
    assert bare["computed_tokens"] < halo["computed_tokens"] < retrieved["computed_tokens"]
    assert all(one["right"] > 0.5 for one in (off, retrieved, ordered))
    assert all(one["right_less_full"] == pytest.approx(one["right"] - off["right"]) for one in rows)
    assert len({0.0, bare["kl"], asked["kl"], deviating["kl"], halo["kl"]}) == 5
