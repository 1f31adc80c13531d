"""`agentcache bench react`: recorded episodes replayed call by call: cached and computed tokens, and times.

Physics: an agent's prompts repeat themselves; only tokens after the longest prefix seen before are new. The engine computes those, one more
per call (logits need a forward), and as good as nothing else.
"""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass, field
from typing import Any

from ..engine import Engine
from ..errors import ContextOverflowError
from ..receipt import Receipt
from ..traces import Answers, Call, Episode
from ..types import Sampling
from . import baselines, engine_timing
from .environment import Say, watch


@dataclass(slots=True)
class Sums:
    """Totals over calls. Times are to the first token; None if not measured."""

    calls: int = 0
    skipped_calls: int = 0  # calls beyond the model's context
    prompt_tokens: int = 0
    computed_tokens: int = 0
    completion_tokens: int = 0
    stock_ms: float | None = None
    off_ms: float | None = None
    ms: float | None = None

    def plus(self, other: Sums) -> None:
        for name, theirs in asdict(other).items():
            if theirs is not None:
                setattr(self, name, (getattr(self, name) or 0) + theirs)


@dataclass
class Replay:
    """Replays episodes against one engine, in one namespace. stock, off: also time these, on every call."""

    engine: Engine
    off: bool = True
    stock: bool = False
    namespace: str = "react"
    answers: Answers = field(init=False)

    def __post_init__(self) -> None:
        self.answers = Answers(self.engine.tokenizer)

    def call(self, call: Call, turn: int) -> Sums:
        """One call in all ways asked for, their order rotating."""
        done = Sums(calls=1)
        ways = [self._ours, *([self._off] if self.off else []), *([self._stock] if self.stock else [])]
        turn %= len(ways)
        for way in (*ways[turn:], *ways[:turn]):
            way(call, done)
        return done

    def _ours(self, call: Call, done: Sums) -> None:
        """The recorded answer is forced: it is what the next prompt continues."""
        forced = tuple(self.answers.ids(call))
        began = time.perf_counter()
        sampling = Sampling(max_tokens=max(1, len(forced)), forced=forced, ignore_eos=True)
        stream = self.engine.stream(call.prompt, call.tools, sampling=sampling, namespace=self.namespace)
        seen = engine_timing.stamps_of(stream)
        done.ms = (seen[0][0] - began) * 1e3
        drawn = [token for _, token in seen]
        assert not forced or drawn == list(forced[: len(drawn)]), "the recorded answer was not what was decoded"
        done.completion_tokens += len(drawn)
        self.count(call, stream.receipt, drawn, done)

    def count(self, call: Call, receipt: Receipt, drawn: list[int], done: Sums) -> None:
        """Add a request's tokens to the sums. drawn: what was answered to it."""
        assert receipt.cached_tokens + receipt.computed_tokens == receipt.prompt_tokens, "a token is missing from the account"
        done.prompt_tokens += receipt.prompt_tokens
        done.computed_tokens += receipt.computed_tokens

    def _off(self, call: Call, done: Sums) -> None:
        timed, receipt = engine_timing.ask(self.engine, call.prompt, call.tools, 1, namespace=self.namespace, reuse="off")
        assert receipt.cached_tokens == 0, f"reuse off reused {receipt.cached_tokens} tokens"
        done.off_ms = timed.ttft_ms

    def _stock(self, call: Call, done: Sums) -> None:
        ids = list(self.engine.renderer.render(call.prompt, call.tools, namespace=self.namespace).ids)
        done.stock_ms = baselines.generate(self.engine.model.model, ids, 1).ttft_ms

    def episode(self, one: Episode, say: Say = lambda _: None) -> Sums:
        """All calls of an episode; calls beyond the model's context are counted, not run."""
        sums = Sums()
        for number, call in enumerate(one.calls):
            say(f"{one.id}: call {number + 1} of {len(one.calls)}")
            try:
                sums.plus(self.call(call, number))
            except ContextOverflowError:
                sums.skipped_calls += 1
        return sums

    def family(self, episodes: list[Episode], say: Say = lambda _: None) -> dict[str, Any]:
        """All episodes: sums, rows, and the pages cached at the end."""
        sums, rows = Sums(), []
        with watch() as load:
            for one in episodes:
                done = self.episode(one, say)
                sums.plus(done)
                rows.append({"id": one.id, **asdict(done)})
        held = {"pages_held": len(self.engine.store), "pages_bytes": self.engine.store.bytes}
        self.engine.store.clear(self.namespace)
        return {**asdict(sums), **held, "load": asdict(load), "episodes": rows}


def run(
    engine: Engine, families: dict[str, list[Episode]], say: Say = lambda _: None, kind: type[Replay] = Replay, **ways: Any
) -> dict[str, Any]:
    """Replay all families, each in a namespace of its own. Sums over all, per family and per episode."""
    total, reports = Sums(), {}
    engine.generate("Warming up.", sampling=engine_timing.greedy(2), namespace="warm-up", reuse="off")
    for family, episodes in families.items():
        reports[family] = kind(engine, namespace=f"react {family}", **ways).family(episodes, say)
        total.plus(Sums(**{name: reports[family][name] for name in asdict(total)}))
    return {**asdict(total), "families": reports}
