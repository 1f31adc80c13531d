"""What greedy answers hide: answers drawn with five seeds, and keys and values themselves, with moved text and with everything computed.

distance         Levenshtein's, of the answers drawn with the same seed, as a share of the longer one
distance_seeds   the same between two seeds with everything computed: what chance alone does
entropy          of the next token's distribution, in nats, mean over the answers drawn
deviation        |near - exact| / |exact| (Frobenius) of the keys and values that were taken, mean over layers, and the worst layer
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import torch

from agentcache.approximate.calibrate.trials import nothing_kept
from agentcache.approximate.segments import approximate_scope
from agentcache.bench.quality import ANSWER_TOKENS
from agentcache.calibration import Calibration
from agentcache.engine import Engine
from agentcache.kv import PAGE_TOKENS, Page
from agentcache.store.keys import as_ids
from agentcache.types import Sampling

from .segments_paired import Paired, Say, Told, ask, distance
from .segments_rows import Row, Rows
from .segments_tasks import Task

SEEDS = (0, 1, 2, 3, 4)
TEMPERATURE = 0.7


def entropy(logits: Sequence[torch.Tensor]) -> float:
    """Mean over rows of logits [vocab], in nats."""
    logs = torch.log_softmax(torch.stack(list(logits)).double(), -1)
    return float(-(logs.exp() * logs).sum(-1).mean())


def share(one: Told, other: Told) -> float:
    """Distance of two answers as a share of the longer one."""
    return distance(one.ids, other.ids) / max(len(one.ids), len(other.ids))


class Sampled:
    """Draws answers of one engine under one method, the seeds at a time."""

    def __init__(self, engine: Engine, known: Calibration) -> None:
        self.engine, self.known = engine, known
        self._paired = Paired(engine, {"ours": known})

    def run(self, tasks: Sequence[Task], rows: Rows, say: Say) -> None:
        """Each task that the rows do not have yet."""
        done = rows.done("sampled")
        with ThreadPoolExecutor(len(SEEDS)) as pool:
            for at, task in enumerate(tasks, 1):
                if task.number not in done:
                    rows.add(self._row(task, pool))
                    say(f"sampled: {at} of {len(tasks)}")

    def _row(self, task: Task, pool: ThreadPoolExecutor) -> Row:
        engine, namespace = self.engine, f"sampled {task.number}"
        engine.model.keep_boundaries(self.known.boundaries)
        try:
            self._paired.keep(task, namespace)

            def drawn(seed: int, known: Calibration | None) -> Told:
                sampling = Sampling(max_tokens=ANSWER_TOKENS, temperature=TEMPERATURE, seed=seed)
                return ask(engine, task.asked, namespace, known or "off", sampling)

            with nothing_kept(engine):
                off = list(pool.map(drawn, SEEDS, [None] * len(SEEDS)))
                near = list(pool.map(drawn, SEEDS, [self.known] * len(SEEDS)))
            pairs = list(zip(off, near, strict=True))
            return {
                "part": "sampled",
                "number": task.number,
                "family": task.family,
                "distance": sum(share(*pair) for pair in pairs) / len(pairs),
                "distance_seeds": sum(share(one, two) for one, two in zip(off, off[1:], strict=False)) / (len(off) - 1),
                "same": sum(one.ids == two.ids for one, two in pairs) / len(pairs),
                "entropy_off": sum(entropy(one.logits) for one in off) / len(off),
                "entropy": sum(entropy(one.logits) for one in near) / len(near),
                **deviation(engine, task, namespace, self.known),
            }
        finally:
            engine.store.clear(namespace)


def deviation(engine: Engine, task: Task, namespace: str, known: Calibration) -> Row:
    """Of the tokens that were taken; None each where none was."""
    once, other = Sampling(max_tokens=1), f"{namespace} anew"
    try:
        receipt = engine.generate(task.asked.messages, task.asked.tools, sampling=once, namespace=namespace, reuse=known).receipt
        done = engine.generate(task.asked.messages, task.asked.tools, sampling=once, namespace=other, reuse="exact")
        ids = as_ids(engine.renderer.render(task.asked.messages, task.asked.tools, namespace=other).ids)
        assert len(ids) == done.receipt.prompt_tokens
        scope = engine.store.tree.entries(other)[0].scope
        exact = engine.store.match(scope, ids, peek=True)
        near = engine.store.match(approximate_scope(replace(scope, namespace=namespace), known), ids, peek=True)
        spans = [(part.stop - part.whole_tokens, min(part.stop, exact.tokens, near.tokens)) for part in receipt.segments]
        spans = [span for span in spans if span[0] < span[1]]
        if not spans:
            return dict.fromkeys(("keys", "keys_most", "values", "values_most"))
        found: dict[str, float] = {}
        for name in ("keys", "values"):
            layers = [_apart(near.pages, exact.pages, spans, layer, name) for layer in range(exact.pages[0].spec.layers)]
            found |= {name: sum(layers) / len(layers), f"{name}_most": max(layers)}
        return dict(found)
    finally:
        engine.store.clear(other)


def _apart(near: Sequence[Page], exact: Sequence[Page], spans: Sequence[tuple[int, int]], layer: int, name: str) -> float:
    differs = whole = 0.0
    for start, stop in spans:
        for at in range(start // PAGE_TOKENS, -(-stop // PAGE_TOKENS)):
            low, high = max(start - at * PAGE_TOKENS, 0), min(stop - at * PAGE_TOKENS, PAGE_TOKENS)
            one, two = (
                (page.layer_keys[layer][..., low:high] if name == "keys" else page.layer_values[layer][:, low:high]).double()
                for page in (near[at], exact[at])
            )
            differs += float((one - two).square().sum())
            whole += float(two.square().sum())
    return (differs / whole) ** 0.5 if whole else 0.0


def summary(rows: Sequence[Row]) -> Row:
    """Means over all requests; `sd` of a request's distance beside it."""
    names = ("distance", "distance_seeds", "same", "entropy_off", "entropy", "keys", "keys_most", "values", "values_most")
    found: Row = {"n": len(rows), "seeds": len(SEEDS), "temperature": TEMPERATURE}
    for name in names:
        values = [row[name] for row in rows if row[name] is not None]
        found[name] = sum(values) / len(values) if values else None
    spread: Mapping[str, list[float]] = {"distance_sd": [row["distance"] for row in rows]}
    for name, values in spread.items():
        middle = sum(values) / len(values) if values else 0.0
        found[name] = (sum((value - middle) ** 2 for value in values) / (len(values) - 1)) ** 0.5 if len(values) > 1 else None
    return found
