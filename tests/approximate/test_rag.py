"""`agentcache bench rag`: its own corpus and questions, other people's files, and the rows that it ends in."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from agentcache.approximate.calibrate import passages, questions
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


def test_f1_counts_common_words() -> None:
    assert passages.f1("the Ada Lerin", "Ada Lerin") == 1.0
    assert passages.f1("Ada Kosler", "Ada Lerin") == pytest.approx(0.5)
    assert passages.f1("", "Ada") == 0.0


def test_rows_tell_what_order_and_repair_save(tmp_path: Path) -> None:
    done = CliRunner().invoke(
        app, ["bench", "rag", "--limit", "12", "--halos", "0,4", "--shares", "0.2", "--json", str(tmp_path / "rag.json")]
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
    assert (off["computed_tokens"], off["agreement"], off["n"]) == (off["prompt_tokens"], 1.0, 12)
    assert (retrieved["agreement"], retrieved["kl"]) == (1.0, 0.0)
    assert ordered["computed_tokens"] < 0.6 * retrieved["computed_tokens"]
    assert ordered["prompt_tokens"] > retrieved["prompt_tokens"], "the retriever's ranks are shown"
    assert bare["cached_tokens"] > 0.95 * bare["passage_tokens"], "each passage was learnt"
    assert bare["segment_tokens"] > halo["segment_tokens"] > 0.5 * halo["passage_tokens"]
    assert bare["computed_tokens"] < halo["computed_tokens"] < retrieved["computed_tokens"]
    assert all(one["right"] > 0.5 for one in (off, retrieved, ordered))
    assert all(one["right_less_full"] == pytest.approx(one["right"] - off["right"]) for one in rows)
    assert len({0.0, bare["kl"], asked["kl"], deviating["kl"], halo["kl"]}) == 5
