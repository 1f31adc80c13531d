"""Answers of one model after turns in fewer bits, held against exact ones: calls as calls, divergence token by token.

All turns of a prompt but its last token are in fewer bits: more than a session has, whose first page of turns often holds tools, too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ...divergence import divergence
from ...engine import Engine
from ...errors import AgentCacheError, shown
from ...traces import Call
from ...turn_precision import TurnsFound
from ...types import Precision, Sampling
from .trials import Logits, answered, nothing_kept, stored_as

Say = Callable[[str], None]
PRECISIONS: tuple[Precision, ...] = ("int8", "int4")
ANSWER = 128  # tokens of the longest answer
EVERY = 25  # answers between two words of progress


@dataclass(frozen=True, slots=True)
class _Answer:
    """One answer: its ids, its tool calls by name and values, not by text, and the logits of each token."""

    ids: tuple[int, ...]
    calls: list[tuple[str, Any]]
    logits: Logits


@dataclass(slots=True)
class _Tally:
    answers: int = 0
    calls: int = 0
    changed: int = 0
    same: int = 0
    divergences: list[float] = field(default_factory=list)

    def add(self, exact: _Answer, near: _Answer, free: _Answer) -> None:
        self.answers += 1
        self.calls += len(exact.calls)
        self.changed += exact.calls != free.calls
        for one, other in zip(exact.logits, near.logits, strict=True):
            self.divergences.append(divergence(one, other))
            self.same += int(one.argmax() == other.argmax())

    @property
    def found(self) -> TurnsFound:
        tokens, known = len(self.divergences), torch.tensor(self.divergences or [0.0], dtype=torch.float64)
        tail, mean, most = (float(value) for value in (known.quantile(0.99), known.mean(), known.max()))
        return TurnsFound(self.answers, self.calls, self.changed, tokens, self.same / max(1, tokens), mean, tail, most)


def measure(
    engine: Engine, calls: Iterable[Call], precisions: Sequence[str], say: Say, answer: int = ANSWER, most_calls: int = 0
) -> dict[str, TurnsFound]:
    """Hold greedy answers of at most `answer` tokens after turns in each precision against exact ones.

    most_calls: end after so many calls of exact answers.
    """
    tallies = {precision: _Tally() for precision in PRECISIONS if precision in precisions}
    for number, call in enumerate(calls):
        namespace = f"turns {number}"
        try:
            exact = _asked(engine, call, namespace, Sampling(max_tokens=answer))
            stable = engine.renderer.render(call.prompt, call.tools, namespace=namespace).prefix_tokens
            forced = Sampling(max_tokens=len(exact.ids), forced=exact.ids, ignore_eos=True)
            with nothing_kept(engine):
                for precision, tally in tallies.items():
                    with stored_as(engine, namespace, precision, stable):
                        near = _asked(engine, call, namespace, forced)
                        # where all first choices are those of the exact answer, so is the answer
                        same = all(int(row.argmax()) == id for row, id in zip(near.logits, exact.ids, strict=True))
                        free = exact if same else _asked(engine, call, namespace, Sampling(max_tokens=answer))
                        tally.add(exact, near, free)
                        if free.calls != exact.calls:
                            say(f"{precision}, answer {number}: {shown(free.calls)} instead of {shown(exact.calls)}")
        except AgentCacheError as error:  # a prompt beyond the context, a template that refuses the messages
            say(f"left out: {error}")
        finally:
            engine.store.clear(namespace)
        told = next(iter(tallies.values()))
        if number % EVERY == EVERY - 1:
            say(f"{told.answers} answers, {told.calls} calls: changed {', '.join(f'{k} {v.changed}' for k, v in tallies.items())}")
        if most_calls and told.calls >= most_calls:
            break
    return {precision: tally.found for precision, tally in tallies.items()}


def _asked(engine: Engine, call: Call, namespace: str, sampling: Sampling) -> _Answer:
    done, rows = answered(engine, call.prompt, call.tools, sampling=sampling, namespace=namespace)
    return _Answer(done.ids, [(call.name, call.arguments) for call in done.message.tool_calls], rows[: len(done.ids)])
