"""The engine, timed from outside as a caller sees it; and the floor: the forward alone, with everything else already done."""

from __future__ import annotations

import time
from collections.abc import Sequence as Seq
from typing import Any

import torch

from ..engine import Engine
from ..errors import ConfigError
from ..kv import Sequence, last_checkpoint
from ..receipt import Receipt
from ..runner import Work
from ..store.keys import Scope, as_ids
from ..stream import Stream
from ..types import Sampling
from . import catalog
from .baselines import Timed, timed


def greedy(new: int, forced: tuple[int, ...] = ()) -> Sampling:
    """Exactly `new` greedy tokens, the first ones as forced. Without drafts: what random weights say repeats itself."""
    return Sampling(max_tokens=new, forced=forced, ignore_eos=True, draft_tokens=0)


def stamps_of(stream: Stream) -> list[tuple[float, int]]:
    """(seconds on perf_counter, id) of each token of a stream as it arrives."""
    return [(time.perf_counter(), token) for chunk in stream for token in chunk.ids]


def ask(engine: Engine, messages: Any, tools: Any, new: int, **options: Any) -> tuple[Timed, Receipt]:
    """One request through the public face, timed from the call."""
    began = time.perf_counter()
    stream = engine.stream(messages, tools, sampling=greedy(new), **options)
    seen = stamps_of(stream)
    assert len(seen) == new, f"the engine gave {len(seen)} tokens, {new} were asked for"
    return timed(began, [at for at, _ in seen], [token for _, token in seen]), stream.receipt


def prompt_of(engine: Engine, tools: tuple[dict[str, Any], ...], number: int, tail: int) -> tuple[list[dict[str, str]], list[int]]:
    """Messages and ids of turn `number` after the tools, with about `tail` tokens after the stable prefix."""

    def messages(text: str) -> list[dict[str, str]]:
        return [{"role": "system", "content": catalog.SYSTEM}, {"role": "user", "content": text}]

    def count(text: str) -> int:
        layout = engine.renderer.render(messages(text), tools)
        return len(layout.ids) - layout.prefix_tokens

    said = messages(catalog.user_turn(number, tail, count))
    return said, list(engine.renderer.render(said, tools).ids)


def scope_of(engine: Engine, namespace: str, tokens: int) -> Scope:
    """The scope under which the store caches a prompt of so many tokens."""
    fingerprint, regime = engine.fingerprint, engine.model.regime(tokens)
    if fingerprint is None or regime is None:
        raise ConfigError(f"model {engine.name!r} has no pages ({engine.model.support.why}): there is nothing to compare")
    return Scope(namespace, fingerprint.whole, regime)


def resident(engine: Engine, namespace: str, ids: Seq[int]) -> Sequence:
    """A sequence attached to the cached pages of ids. Close it."""
    assert engine.model.spec is not None
    scope = scope_of(engine, namespace, len(ids))
    found = engine.store.match(scope, as_ids(ids))
    sequence = Sequence(engine.model.spec, state=engine.model.new_state())
    tokens = found.tokens if sequence.state is None else last_checkpoint(found.pages, found.tokens)
    sequence.attach(list(found.pages), tokens)
    return sequence


def floor(engine: Engine, namespace: str, ids: Seq[int], prefix: int) -> tuple[Timed, torch.Tensor]:
    """Bare forward of ids[prefix:] after the resident KV of ids[:prefix], lm_head and one greedy token included; also the logits [vocab].

    Only while the engine is idle: it runs the model in this thread.
    """
    sequence = resident(engine, namespace, ids[: prefix + 1])
    assert sequence.length == prefix, f"{sequence.length} tokens are resident, the floor needs {prefix}"
    regime = scope_of(engine, namespace, len(ids)).regime
    began = time.perf_counter()
    [outcome] = engine.scheduler.runner.run([Work(sequence, list(ids[prefix:]), regime)])
    assert outcome.logits is not None
    token = int(outcome.logits.argmax())
    stamp = time.perf_counter()
    sequence.truncate(prefix)  # the group's own last page may have been claimed: leave it as it was
    sequence.close()
    return timed(began, [stamp], [token]), outcome.logits
