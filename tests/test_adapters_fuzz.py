"""Adapters added, exchanged, renamed, scaled and removed while requests of all of them run: no token is ever another adapter's."""

from __future__ import annotations

import random
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from agentcache import Engine, StoreOptions
from agentcache.errors import ConfigError
from tests.engines import chat, decode, engine, long_text
from tests.saved_adapters import ACTIVATED, KINDS, save

NAMES = ["router", "caller", "judge"]
ROUNDS, THREADS, TOKENS = 4, 4, 3  # a round ends with the engine; the next one opens the same store
PROMPTS = [chat(long_text(20 + 130 * (salt % 2), salt // 2), *(["Yes.", "Why?"] if salt > 3 else [])) for salt in range(6)]


def first(running: Engine, prompt: Any, **options: Any) -> tuple[tuple[int, ...], bytes, str]:
    """Greedy tokens, the bits of the first logits, and the digest of the adapter that answered."""
    logits: list[torch.Tensor] = []
    done = running.generate(prompt, sampling=decode(TOKENS), on_logits=lambda row: logits.append(row.clone()), **options)
    return done.ids, logits[0].numpy().tobytes(), done.receipt.adapter


class Fuzz:
    """One engine, and the digest that each name has had, in order."""

    def __init__(self, running: Engine, sources: list[tuple[Path, float]], truth: dict[tuple[str, int], Any]) -> None:
        self.running, self.sources, self.truth = running, sources, truth
        self.seen: Counter[str] = Counter()
        self.wrong: list[str] = []
        self.lock = threading.Lock()
        self.had: dict[str, list[str]] = {name: [""] for name in NAMES}

    def add(self, chance: random.Random) -> None:
        """A new adapter, other weights under a known name, the same once more, or another scale."""
        folder, scale = chance.choice(self.sources)
        with self.lock:
            name = chance.choice(NAMES)
            self.had[name].append(self.running.add_adapter(name, folder, scale=scale))

    def remove(self, chance: random.Random) -> None:
        with self.lock:
            name = chance.choice(NAMES)
            self.running.remove_adapter(name)
            self.had[name].append("")

    def evict(self, chance: random.Random) -> None:
        self.running.store.clear()

    def cancel(self, chance: random.Random) -> None:
        try:
            with self.running.stream(chance.choice(PROMPTS), sampling=decode(20), adapter=chance.choice([None, *NAMES])) as stream:
                for _ in range(chance.randrange(3)):
                    next(stream, None)
        except ConfigError:
            self.seen["none of that name"] += 1

    def ask(self, chance: random.Random) -> None:
        name, at = chance.choice([None, *NAMES]), chance.randrange(len(PROMPTS))
        since = len(self.had[name]) - 1 if name else 0
        try:
            ids, bits, digest = first(self.running, PROMPTS[at], adapter=name)
        except ConfigError:
            self.seen["none of that name"] += 1
            return
        with self.lock:  # else a name may be ahead of what is written down
            known = self.had[name][since:] if name else [""]
        if digest not in known:
            self.wrong.append(f"{name} was answered by {digest}")
        if self.truth[digest, at] != (ids, bits):
            self.wrong.append(f"prompt {at}: not the tokens and bits of {digest or 'the base'}")

    def run(self, seed: int, count: int) -> None:
        chance = random.Random(seed)
        for _ in range(count):
            act = chance.choices([self.ask, self.add, self.cancel, self.remove, self.evict], [12, 3, 3, 1, 1])[0]
            act(chance)
            self.seen[act.__name__] += 1


@pytest.mark.parametrize("operations", [64, pytest.param(2400, marks=[pytest.mark.slow, pytest.mark.timeout(900)])])
def test_no_answer_is_of_another_adapter(operations: int, tmp_path: Path) -> None:
    kinds = [{}, KINDS["DoRA"], KINDS["upper layers"], {"layers_to_transform": [2]}, ACTIVATED]
    sources = [(save(tmp_path / f"{seed}", seed=seed, **kind), scale) for seed, kind in enumerate(kinds) for scale in (1.0, 0.5)]
    with engine(store=None) as running:
        truth = {("", at): first(running, prompt, reuse="off")[:2] for at, prompt in enumerate(PROMPTS)}
        for folder, scale in sources:
            digest = running.add_adapter("one", folder, scale=scale)
            truth |= {(digest, at): first(running, prompt, adapter="one", reuse="off")[:2] for at, prompt in enumerate(PROMPTS)}
    assert len(set(truth.values())) == len(truth), "each answer tells its adapter"
    seen: Counter[str] = Counter()
    for number in range(ROUNDS):
        with engine(store=StoreOptions(tmp_path / "store"), memory_bytes=3 << 20) as running:
            fuzz = Fuzz(running, sources, truth)
            each = operations // ROUNDS // THREADS
            threads = [threading.Thread(target=fuzz.run, args=(THREADS * number + at, each)) for at in range(THREADS)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            assert fuzz.wrong == []
            seen += fuzz.seen
    done = sum(seen[name] for name in ("ask", "add", "cancel", "remove", "evict"))
    assert done == ROUNDS * THREADS * (operations // ROUNDS // THREADS), "no thread ended early"
    assert seen["ask"] > operations // 3
