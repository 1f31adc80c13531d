"""Who goes into the next forward, decided over requests that only pretend to run."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from agentcache import scheduler as module
from agentcache.kv import Sequence
from agentcache.kv_spec import KVSpec
from agentcache.runner import Outcome, StockSequence, Work
from agentcache.scheduler import MAX_DECODING, MIN_FILL, PATIENCE, Scheduler
from tests.engines import chat, decode, engine


@dataclass(eq=False)
class Pretender:
    """A request with so many tokens to go."""

    remaining: int
    filled: bool = False
    skipped: int = 0
    sequence: Any = None

    def work(self, count: int, drafts: Any = ()) -> int:
        return min(count, self.remaining)


@pytest.fixture
def idle(monkeypatch: pytest.MonkeyPatch) -> Iterator[Scheduler]:
    """A scheduler whose thread has ended: its rounds are composed by hand."""
    monkeypatch.setattr(module, "draft", lambda *given: ())
    with engine() as running:
        running.scheduler.close()
        yield running.scheduler


def compose(idle: Scheduler, *live: Pretender) -> list[tuple[Pretender, int]]:
    idle.live = list(live)  # type: ignore[arg-type]
    pack = idle._compose()
    idle.live = []
    return pack  # type: ignore[return-value]


def test_short_prompts_go_first_and_the_budget_holds(idle: Scheduler) -> None:
    long, short = Pretender(5000), Pretender(40)
    assert compose(idle, long, short) == [(short, 40), (long, 512 - 40)]


def test_who_decodes_always_goes_and_limits_what_is_filled_beside(idle: Scheduler) -> None:
    decoding, long = Pretender(1, filled=True), Pretender(5000)
    assert compose(idle, long, decoding) == [(decoding, 1), (long, MIN_FILL)], "nothing is known about time yet"
    idle.ms_per_token, idle._decode_ms = 1.0, 100.0
    assert compose(idle, long, decoding) == [(decoding, 1), (long, int(100 * (module.STEP - 1)))]
    idle.ms_per_token = 1000.0
    assert compose(idle, long, decoding) == [(decoding, 1), (long, MIN_FILL)], "a fill never stands still"


def test_states_that_depend_on_pieces_are_filled_by_their_cuts(idle: Scheduler) -> None:
    idle.ms_per_token, idle._decode_ms = 1.0, 100.0
    for alignment, tokens in ((64, 512), (1, 300)):
        decoding, long = Pretender(1, filled=True), Pretender(5000, sequence=SimpleNamespace(state=SimpleNamespace(alignment=alignment)))
        assert compose(idle, long, decoding) == [(decoding, 1), (long, tokens)]


def test_short_prompts_do_not_starve_a_long_one(idle: Scheduler) -> None:
    long, got = Pretender(5000), []
    flood = [Pretender(500) for _ in range(10)]
    for _ in range(40):
        pack = compose(idle, long, *flood)
        got.append(any(request is long for request, _ in pack))
        done = [request for request, _ in pack]
        flood = [request for request in flood if request not in done] + [Pretender(500) for r in done if r is not long]
    assert sum(got) >= 40 // (4 * PATIENCE)


def test_more_than_fit_take_turns_to_decode(idle: Scheduler) -> None:
    many = [Pretender(1, filled=True) for _ in range(MAX_DECODING + 50)]
    seen: set[int] = set()
    for _ in range(3):
        pack = compose(idle, *many)
        assert len(pack) == MAX_DECODING
        seen |= {id(request) for request, _ in pack}
        idle.rounds += 1
    assert len(seen) == len(many)


def test_a_sequence_that_cannot_be_paged_is_filled_at_once(idle: Scheduler) -> None:
    stock = Pretender(3000, sequence=StockSequence())
    assert compose(idle, stock) == [(stock, 3000)]


def test_a_long_prompt_waits_for_its_prefix_from_another() -> None:
    system = " ".join(f"word{i}" for i in range(400))
    with engine(chunk_tokens=64) as running:
        streams = [running.stream(chat(f"question {i}", system=system), sampling=decode(2)) for i in range(3)]
        receipts = [stream.completion.receipt for stream in streams]
        assert receipts[0].cached_tokens == 0
        assert all(r.cached_tokens >= 1024 for r in receipts[1:]), "the same prefix was computed by several at once"
        assert receipts[1].queue_ms > 0


def test_costs_are_learned_from_rounds(idle: Scheduler, monkeypatch: pytest.MonkeyPatch) -> None:
    idle.ms_per_token = idle._decode_ms = 0.0
    idle._smooth_costs(0, True, 40.0)
    assert idle._decode_ms == 40.0
    idle._smooth_costs(100, True, 240.0)
    assert idle.ms_per_token == pytest.approx(2.0)
    idle._smooth_costs(100, False, 200.0)
    assert idle.ms_per_token == pytest.approx(2.0), "nobody decoded in this round"
    monkeypatch.setattr(idle, "_deliver", lambda *given: None)
    monkeypatch.setattr(idle.runner, "run", lambda works: [Outcome() for _ in works])
    for sequence, learned in ((StockSequence(), False), (Sequence(KVSpec(1, 1, 2, torch.float32)), True)):
        idle._forward([(Pretender(100), Work(sequence, [0] * 100))])  # type: ignore[list-item]
        assert (idle.ms_per_token != pytest.approx(2.0)) == learned
