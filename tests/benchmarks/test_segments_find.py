"""`benchmarks.segments_find`: what it counts is right on prompts made by hand, and its rows are whole."""

from __future__ import annotations

import random
from typing import Any

import pytest

from agentcache import toy
from agentcache.approximate.windows import TokenTexts
from agentcache.layout import Renderer
from agentcache.traces import Call, Episode
from benchmarks import segments_find
from benchmarks.segments_find import EDITS, Finder, _both, duplicates, pieces_of, step, traces, verdicts

WORDS = "harbour tide wind anchor gull rope mast sail deck crew storm port chart lamp bell keel".split()


def prose(seed: int, count: int) -> str:
    rng = random.Random(seed)
    return " ".join(f"{rng.choice(WORDS)} {rng.choice(WORDS)}s" for _ in range(count // 2))


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return toy.tokenizer([prose(seed, 400) for seed in range(4)], 600)


def taken(tokenizer: Any, *texts: str) -> Finder:
    finder = Finder(64, (0.6, 0.9), TokenTexts(tokenizer))
    for text in texts:
        finder.take(Renderer(tokenizer).render(text))
    return finder


def test_text_behind_the_same_anchor_is_found_by_both(tokenizer: Any) -> None:
    told = f"\nObservation 1: {prose(1, 300)}"
    finder = taken(tokenizer, f"{prose(2, 30)}{told}", f"{prose(3, 77)}{told} {prose(4, 60)}")
    for tau in (0.6, 0.9):
        row = finder.sums[tau].row()
        assert row["exact_tokens"] >= 300
        assert row["recall"] == row["recall_long"] == 1.0
        assert row["precision"] == row["precision_strict"] == 1.0
    assert finder.costs.row()["sign_us_per_token"] > 0


def test_nothing_is_found_where_nothing_repeats(tokenizer: Any) -> None:
    row = taken(tokenizer, prose(1, 400), prose(2, 400)).sums[0.9].row()
    assert (row["exact_tokens"], row["proposals"], row["recall"], row["precision"]) == (0, 0, None, None)


def test_what_the_exact_prefix_covers_is_not_counted(tokenizer: Any) -> None:
    row = taken(tokenizer, prose(1, 400), f"{prose(1, 400)} {prose(2, 200)}").sums[0.6].row()
    assert row["exact_tokens"] == 0
    assert row["asked"] == 0


def test_the_same_words_with_other_ids_are_wrong_proposals(tokenizer: Any) -> None:
    def orders(seed: int) -> str:
        rng, words = random.Random(seed), random.Random(1)
        return "\nObservation 1: " + " ".join(f"{words.choice(WORDS)} {rng.randrange(10**5, 10**6)}" for _ in range(100))

    row = taken(tokenizer, f"{prose(2, 30)}{orders(5)}", f"{prose(3, 77)}{orders(6)}").sums[0.6].row()
    assert row["proposals"] > 0
    assert row["precision"] == 0.0
    assert row["found_tokens"] == row["exact_tokens"] == 0


def test_tokens_are_counted_once() -> None:
    assert _both([(0, 10), (20, 30)], [(8, 22), (5, 25), (5, 25)]) == 10
    assert _both([(0, 10)], [(2, 4), (3, 3), (6, 8)]) == 4


def test_rows_are_whole(tokenizer: Any) -> None:
    calls = tuple(Call(f"{prose(i, 60)}\nObservation: {prose(9, 200)}", (), "") for i in range(3))
    rows = traces({"made": [Episode("one", "text", calls)]}, tokenizer, sizes=(32, 64), taus=(0.8,))
    assert [(row["family"], row["window"], row["tau"], row["prompts"]) for row in rows] == [("made", 32, 0.8, 3), ("made", 64, 0.8, 3)]
    assert all(0 <= row["found_tokens"] <= row["exact_tokens"] for row in rows)
    assert all(row["right"] <= row["proposals"] for row in rows)
    [found, _] = verdicts(rows, [])
    assert found["precise"] == (found["precision"] > 0.7)
    assert found["recall"] == rows[0]["found_tokens"] / rows[0]["exact_tokens"]


def test_duplicates_and_the_step(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    episode = Episode("one", "text", (Call(prose(1, 3000), (), ""),))
    pieces = pieces_of({"made": [episode]}, count=4)
    assert pieces == pieces_of({"made": [episode]}, count=4)
    rows = {row["edit"]: row for row in duplicates(pieces, tokenizer, sizes=(64,), taus=(0.8,))}
    assert rows.keys() == EDITS.keys()
    assert rows["verbatim"]["recall"] == rows["verbatim"]["precision"] == 1.0
    assert rows["words 20 %"]["proposals"] < rows["verbatim"]["proposals"]
    monkeypatch.setattr(segments_find, "STEP_TOKENS", 1024)
    found = step(pieces, tokenizer, texts_kept=64, repeats=3)
    assert found["texts"] >= 64
    assert found["step_ms"] <= found["worst_ms"]
    assert found["windows"] >= 4
