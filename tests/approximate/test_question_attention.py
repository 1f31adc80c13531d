"""Tokens computed again because the question attends to them: how many, which, and what is left of approximate reuse if all are."""

from __future__ import annotations

import pytest
import torch

from agentcache import Calibration, Engine, Sampling
from agentcache.approximate import question_attention
from agentcache.errors import CalibrationError
from tests.engines import engine, long_text

NOTES = [f"Note {number}. {long_text(40, number)}" for number in range(3)]


def by_hand(running: Engine, share: float, choice: str = "question") -> Calibration:
    """A calibration with a halo of 4 and this share."""
    assert running.fingerprint is not None
    return Calibration(running.fingerprint.whole, 3, ((4, 3),), min_tokens=16, kl=1.0, tail=8, share=share, share_by=choice)


def asked(*order: int) -> list[dict[str, str]]:
    """Notes in this order, and a question."""
    return [{"role": "user", "content": " ".join([*(NOTES[number] for number in order), "Which one is it?"])}]


def answer(running: Engine, share: float) -> tuple[list[torch.Tensor], int, int]:
    """Logits after notes in another order, attached and computed tokens."""
    seen: list[torch.Tensor] = []
    sampling = Sampling(max_tokens=4, ignore_eos=True)
    done = running.generate(
        asked(2, 0, 1), sampling=sampling, reuse=by_hand(running, share), on_logits=lambda row: seen.append(row.clone())
    )
    return seen, done.receipt.segment_tokens, done.receipt.computed_tokens


def test_computing_all_that_was_attached_is_exact() -> None:
    with engine(store=None) as running:
        running.generate(asked(0, 1, 2), sampling=Sampling(max_tokens=1))
        seen, attached, _ = answer(running, 1.0)
        assert attached == 0
        exact: list[torch.Tensor] = []
        sampling = Sampling(max_tokens=4, ignore_eos=True)
        running.generate(asked(2, 0, 1), sampling=sampling, reuse="off", on_logits=lambda row: exact.append(row.clone()))
        assert all(torch.allclose(one, other, atol=1e-4) for one, other in zip(seen, exact))


def test_the_share_of_attached_tokens_is_computed() -> None:
    counts = []
    for share in (0.0, 0.25):
        with engine(store=None) as running:
            running.generate(asked(0, 1, 2), sampling=Sampling(max_tokens=1))
            counts.append(answer(running, share)[1:])
    (attached, computed), (left, more) = counts
    assert attached > 200
    assert abs(left - round(0.75 * attached)) <= 1
    assert more - computed == attached - left


def test_the_choice_follows_the_attention() -> None:
    keys = torch.zeros(5, 1, 4)
    keys[3, 0, 0], keys[1, 0, 1] = 9.0, 5.0
    query = torch.tensor([[[4.0, 0, 0, 0], [0, 4.0, 0, 0]]])  # one row, two heads on one KV head
    assert question_attention._attention(query, keys).topk(2).indices.tolist() == [3, 1]


def test_long_gaps_are_packed_in_order() -> None:
    packs = list(question_attention._packs([(0, 10), (20, 20 + 2 * question_attention.MAX_ROWS)]))
    assert [sum(stop - start for start, stop in pack) for pack in packs[:2]] == [question_attention.MAX_ROWS] * 2
    assert [place for pack in packs for start, stop in pack for place in range(start, stop)] == [
        *range(10),
        *range(20, 20 + 2 * question_attention.MAX_ROWS),
    ]


def test_another_choice_is_refused() -> None:
    with engine(store=None) as running, pytest.raises(CalibrationError, match="share_by='best': must be 'deviation' or 'question'"):
        by_hand(running, 0.1, "best")
