"""`agentcache bench react`: recorded episodes replayed call by call; computed tokens against new ones.

Physics: an agent's prompts repeat themselves; only tokens after the longest prefix seen before are new. An oracle that remembers every
token sequence counts those; the engine must compute them, one more per call (logits need a forward), and as good as nothing else.
"""

from __future__ import annotations

import bisect
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any
from weakref import ReferenceType, ref

import numpy as np

from ..engine import Engine
from ..errors import ConfigError, ContextOverflowError
from ..kv import PAGE_TOKENS, Page
from ..receipt import Receipt
from ..store.keys import as_ids
from ..traces import Answers, Call, Episode
from ..types import Sampling
from . import baselines, engine_timing
from .environment import Watch

SLACK = 1.02  # computed tokens may exceed new ones by this factor, and by one per call
Say = Callable[[str], None]


class Oracle:
    """Every token sequence seen so far, and the longest common prefix of a new one with any of them. Independent of the store."""

    def __init__(self) -> None:
        self._seen: list[bytes] = []  # sorted: the longest common prefix is with a neighbour

    def known(self, ids: list[int]) -> int:
        """Length of the longest prefix of ids that an earlier sequence began with."""
        key = _key(ids)
        at = bisect.bisect_left(self._seen, key)
        return max((_common(key, other) for other in self._seen[max(0, at - 1) : at + 1]), default=0)

    def add(self, ids: list[int]) -> None:
        """Remember a sequence; one that it only continues is dropped."""
        key = _key(ids)
        at = bisect.bisect_left(self._seen, key)
        if at and key.startswith(self._seen[at - 1]):
            self._seen[at - 1] = key
        elif at == len(self._seen) or not self._seen[at].startswith(key):
            self._seen.insert(at, key)


def _key(ids: list[int]) -> bytes:
    return np.asarray(ids, dtype=">u4").tobytes()  # big endian: bytes sort as the tokens do


def _common(one: bytes, other: bytes) -> int:
    short = min(len(one), len(other)) // 4
    differs = np.flatnonzero(np.frombuffer(one, ">u4", short) != np.frombuffer(other, ">u4", short))
    return int(differs[0]) if len(differs) else short


@dataclass(slots=True)
class Sums:
    """Totals over calls. Times are to the last of the `decode` tokens (by default one: to the first token); None if not measured."""

    calls: int = 0
    prompt_tokens: int = 0
    new_tokens: int = 0
    computed_tokens: int = 0
    completion_tokens: int = 0
    skipped_calls: int = 0
    stock_ms: float | None = None
    off_ms: float | None = None
    ms: float | None = None

    def plus(self, other: Sums) -> None:
        """Add another's figures."""
        for name in self.__slots__:
            mine, theirs = getattr(self, name), getattr(other, name)
            if theirs is not None:
                setattr(self, name, theirs if mine is None else mine + theirs)


@dataclass(slots=True)
class Replay:
    """Replays episodes against one engine, in one namespace. stock, off: also time these, on every call."""

    engine: Engine
    decode: int = 1
    off: bool = True
    stock: bool = False
    namespace: str = "react"
    oracle: Oracle = field(default_factory=Oracle)
    answers: Answers = field(init=False)
    groups: dict[bytes, list[ReferenceType[Page]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.decode < 1:
            raise ConfigError(f"decode={self.decode!r}: must be at least 1, the first token")
        self.answers = Answers(self.engine.tokenizer)

    def call(self, call: Call, turn: int) -> Sums:
        """One call in all ways asked for, their order rotating; ours comes with the account."""
        done = Sums(calls=1)
        ways: list[Callable[[], None]] = [lambda: self._ours(call, done)]
        if self.off:
            ways.append(lambda: self._off(call, done))
        if self.stock:
            ways.append(lambda: self._stock(call, done))
        turn %= len(ways)
        for way in (*ways[turn:], *ways[:turn]):
            way()
        return done

    def _ours(self, call: Call, done: Sums) -> None:
        """Free tokens first, if more than the first are timed; then the recorded answer, which is what the next prompt continues."""
        engine, forced, prompt = self.engine, tuple(self.answers.ids(call)), []
        if self.decode > 1:
            timed, receipt = engine_timing.ask(engine, call.prompt, call.tools, self.decode, namespace=self.namespace)
            done.ms = timed.total_ms
            prompt = self._account(call, list(timed.ids), receipt, done)
        began = time.perf_counter()
        sampling = Sampling(max_tokens=max(1, len(forced)), forced=forced, ignore_eos=True)
        stream = engine.stream(call.prompt, call.tools, sampling=sampling, namespace=self.namespace)
        seen = engine_timing.stamps_of(stream)
        drawn = [token for _, token in seen]
        assert not forced or drawn == list(forced[: len(drawn)]), "the recorded answer was not what was decoded"
        if self.decode == 1:
            done.ms = (seen[0][0] - began) * 1e3
            self._account(call, drawn, stream.receipt, done)
        else:  # the same prompt again is the benchmark's doing, not the agent's
            assert stream.receipt.computed_tokens == 1, f"a prompt just answered cost {stream.receipt.computed_tokens} tokens"
            self.oracle.add(prompt + drawn)
        done.completion_tokens += len(drawn)

    def _account(self, call: Call, drawn: list[int], receipt: Receipt, done: Sums) -> list[int]:
        """Add a request's tokens to the sums and to the oracle; returns the ids of its prompt."""
        prompt = list(self.engine.renderer.render(call.prompt, call.tools, namespace=self.namespace).ids)
        assert len(prompt) == receipt.prompt_tokens, f"rendered again it has {len(prompt)} tokens, not {receipt.prompt_tokens}"
        assert receipt.cached_tokens + receipt.computed_tokens == receipt.prompt_tokens, "a token is missing from the account"
        done.prompt_tokens += len(prompt)
        done.new_tokens += len(prompt) - self.oracle.known(prompt)
        done.computed_tokens += receipt.computed_tokens
        self.oracle.add(prompt + drawn)
        return prompt

    def _off(self, call: Call, done: Sums) -> None:
        timed, receipt = engine_timing.ask(self.engine, call.prompt, call.tools, self.decode, namespace=self.namespace, reuse="off")
        assert receipt.cached_tokens == 0, f"reuse off reused {receipt.cached_tokens} tokens"
        done.off_ms = timed.total_ms

    def _stock(self, call: Call, done: Sums) -> None:
        ids = list(self.engine.renderer.render(call.prompt, call.tools, namespace=self.namespace).ids)
        done.stock_ms = baselines.dynamic(self.engine.model.model, ids, self.decode).total_ms

    def hold_once(self, one: Episode) -> int:
        """Count the cached whole pages of the episode's tool group; AssertionError unless they are those of all episodes before it."""
        call = one.calls[0]
        layout = self.engine.renderer.render(call.prompt, call.tools, namespace=self.namespace)
        whole = layout.prefix_tokens // PAGE_TOKENS
        ids = list(layout.ids)
        found = self.engine.store.match(engine_timing.scope_of(self.engine, self.namespace, len(ids)), as_ids(ids)).pages[:whole]
        held = self.groups.setdefault(_key(ids[: layout.prefix_tokens]), [])
        for before, page in zip(held, found):
            first = before()  # None: evicted meanwhile
            assert first is None or first is page, f"episode {one.id!r} holds its own copy of a tool group that was kept already"
        held[:] = [ref(page) for page in found]
        return len(found)

    def episode(self, one: Episode, say: Say = lambda _: None) -> tuple[Sums, int]:
        """All calls of an episode and the whole pages of its tool group; calls beyond the model's context are counted, not run."""
        sums, pages = Sums(), 0
        for number, call in enumerate(one.calls):
            say(f"{one.id}: call {number + 1} of {len(one.calls)}")
            try:
                sums.plus(self.call(call, number))
            except ContextOverflowError:
                sums.skipped_calls += 1
        if sums.calls:
            pages = self.hold_once(one)
        return sums, pages


def run(
    engine: Engine, families: dict[str, list[Episode]], *, decode: int = 1, off: bool = True, stock: bool = False, say: Say = lambda _: None
) -> dict[str, Any]:
    """Replay all families, each in a namespace of its own. Sums over all, per family and per episode; pages held at each family's end."""
    total, reports = Sums(), {}
    engine.generate("Warming up.", sampling=engine_timing.greedy(2), namespace="warm-up", reuse="off")
    for family, episodes in families.items():
        replay, sums, rows, longest = Replay(engine, decode, off, stock, namespace=f"react {family}"), Sums(), [], 0
        with Watch() as load:
            for one in episodes:
                done, pages = replay.episode(one, say)
                sums.plus(done)
                rows.append({"id": one.id, **asdict(done)})
                longest = max(longest, pages)
        reports[family] = {
            **asdict(sums),
            "within_bound": sums.computed_tokens <= SLACK * sums.new_tokens + sums.calls,
            "pages_held": len(engine.store),
            "pages_bytes": engine.store.bytes,
            "group_pages": longest,
            "tool_groups": len(replay.groups),
            "load": asdict(load),
            "episodes": rows,
        }
        engine.store.clear(replay.namespace)
        total.plus(sums)
    return {**asdict(total), "families": reports}
