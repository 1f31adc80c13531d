"""Text at another position, served from cached pages: its share, time and drift. Draws no tables.

Physics: attaching a token copies its KV (about 100 kB for a 0.6B model), computing it costs 2 FLOPs per weight. Copied KV was computed
after other text, so it is near what computing would give, not equal: the halo, resuming and computing again bring it nearer.

    off       nothing is reused                             exact     the longest exact prefix
    bound     every token that is cached anywhere, counted   bare      every run as it is, re-indexed, no repair
    ours      as the calibration says, and variations of it by name
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from ...calibration import Calibration
from ...divergence import divergence
from ...engine import Engine
from ...errors import AgentCacheError, ConfigError
from ...kv import Page
from ...matching import fingerprint_of
from ...receipt import Receipt
from ...store.disk import quantize
from ...store.entry import common
from ...store.keys import Ids, as_ids
from ...traces import Answers, Call
from ...types import Precision, Reuse, Sampling
from ..calibrations import answering
from .shifts import Case

LEAST = 32  # tokens of a repeat that the bound counts
Say = Callable[[str], None]
Logits = list[torch.Tensor]


@dataclass(slots=True)
class TimedAnswer:
    """One answer to one case: its account, the logits of every token of the answer, and milliseconds to the first one."""

    receipt: Receipt
    logits: Logits
    ms: float


@dataclass(frozen=True, slots=True)
class Scene:
    """A case made ready."""

    case: Case
    namespace: str
    answer: tuple[int, ...]  # ids that all methods are forced to say
    bound: int  # tokens that any of them could reuse


@dataclass(frozen=True, slots=True)
class Served:
    """One case under one method."""

    family: str
    method: str
    prompt_tokens: int
    bound_tokens: int
    prefix_tokens: int
    reused_tokens: int
    computed_tokens: int
    refused: int  # failed probes
    unsure: int  # 1 if a choice was closer than the calibration's margin: later tokens are computed anew, and alike
    work_tokens: float  # computed ones, in tokens through all layers
    step_ms: float
    exact_step_ms: float
    kl: float  # nats per token
    top1: float  # share of equal first choices


SUMMED = ("prompt_tokens", "bound_tokens", "prefix_tokens", "reused_tokens", "computed_tokens", "refused", "unsure", "work_tokens")


def row(served: Sequence[Served], family: str, method: str) -> dict[str, Any]:
    """Sums, means and medians over cases, at least one; decision: equal first choices at every token."""
    sums = {name: sum(getattr(one, name) for one in served) for name in SUMMED}
    ratios = [one.exact_step_ms / one.step_ms for one in served if one.step_ms]
    return {
        "family": family,
        "method": method,
        "cases": len(served),
        **sums,
        "of_bound": sums["reused_tokens"] / sums["bound_tokens"] if sums["bound_tokens"] else None,
        "step_ms": statistics.median(one.step_ms for one in served),
        "exact_step_ms": statistics.median(one.exact_step_ms for one in served),
        "speedup": statistics.median(ratios) if ratios else None,
        "kl_mean": statistics.fmean(one.kl for one in served),
        "kl_most": max(one.kl for one in served),
        "top1": statistics.fmean(one.top1 for one in served),
        "decision": statistics.fmean(one.top1 == 1.0 for one in served),
    }


def rows(served: Sequence[Served]) -> list[dict[str, Any]]:
    """A row per family and method."""
    groups: dict[tuple[str, str], list[Served]] = {}
    for one in served:
        groups.setdefault((one.family, one.method), []).append(one)
    return [row(some, *key) for key, some in groups.items()]


def bound(kept: Iterable[Ids], ids: Ids, since: int, min_tokens: int = LEAST) -> int:
    """Count the tokens of ids[since:-1] in runs of `min_tokens` that stand in one of the cached texts: any method could reuse them.

    Every place of every text is looked at: the oracle for what the index finds.
    """
    known = {row.tobytes() for text in kept for row in _rows(text, min_tokens)}
    covered = np.zeros(max(0, len(ids) - 1 - since), dtype=bool)
    for at, row in enumerate(_rows(ids[since:-1], min_tokens)):
        if row.tobytes() in known:
            covered[at : at + min_tokens] = True
    return int(covered.sum())


def _rows(ids: Ids, width: int) -> np.ndarray:
    if len(ids) < width:
        return np.empty((0, width), ids.dtype)
    return np.lib.stride_tricks.sliding_window_view(np.ascontiguousarray(ids), width)


@contextmanager
def nothing_kept(engine: Engine) -> Iterator[None]:
    """Cached pages stay and serve; none is added: a tree without a budget admits nothing."""
    eviction = engine.store.tree.eviction
    before, eviction.budget_bytes = eviction.budget_bytes, 0
    try:
        yield
    finally:
        eviction.budget_bytes = before


def lossy_copy(page: Page, precision: str, first: int = 0) -> Page:
    """The page as it comes back from a store of that precision, from token `first` on."""
    found, some = page.copy(page.filled), slice(first, page.filled)
    for layer in range(page.spec.layers):
        keys, values = page.layer_keys[layer][..., some], page.layer_values[layer][:, some]
        parts = quantize.quantize(keys, values, precision)
        quantize.dequantize(parts, precision, found.layer_keys[layer][..., some], found.layer_values[layer][:, some])
    return found


@contextmanager
def stored_as(engine: Engine, namespace: str, precision: Precision, since: int = 0) -> Iterator[None]:
    """Cached pages of a namespace, the exact prefix too, are as they would come back from a store of this precision, from a token on."""
    known = [(entry, entry.page) for entry in engine.store.tree.entries(namespace) if entry.page is not None and precision != "exact"]
    whole = [(entry, page) for entry, page in known if entry.first + page.filled > since]
    try:
        for entry, page in whole:
            entry.page = lossy_copy(page, precision, max(0, since - entry.first))
        yield
    finally:
        for entry, page in whole:
            entry.page = page


def answered(engine: Engine, prompt: Any, tools: Any = (), **options: Any) -> tuple[Any, Logits]:
    """The engine's completion, and the logits of each of its tokens. options: as of `Engine.generate`."""
    seen: Logits = []
    return engine.generate(prompt, tools, on_logits=lambda row: seen.append(row.clone()), **options), seen


class Trials:
    """Cases asked of one engine under several methods; each case in a namespace of its own, which is emptied afterwards.

    own: answers are compared along what the model itself says greedily when nothing is approximate, so that a case is decided alike if
    its answers would be the same; otherwise along the recorded ones. repeats: times are medians of so many askings, interleaved.
    adapter, lender: names of the adapter that answers the cases, and of the one that answered the calls before them; None is the base.
    """

    def __init__(
        self,
        engine: Engine,
        answer_tokens: int = 16,
        own: bool = True,
        repeats: int = 1,
        adapter: str | None = None,
        lender: str | None = None,
    ) -> None:
        if engine.model.spec is None or engine.fingerprint is None:
            raise ConfigError(f"model {engine.name!r} has no pages ({engine.model.support.why}): nothing of it can be reused")
        self.engine = engine
        self.answer_tokens, self.own, self.repeats, self.adapter, self.lender = answer_tokens, own, repeats, adapter, lender
        known = {name: engine.model.adapters[digest] for name, digest in engine.adapters.items() if name in (adapter, lender)}
        one, other, weights = known.get(adapter or ""), known.get(lender or ""), engine.fingerprint.whole
        self._fingerprint, self._source = answering(weights, one), fingerprint_of(weights, other)
        if self._source == fingerprint_of(weights, one):  # pages that its own requests keep
            self._source = ""
        self.answers = Answers(engine.tokenizer)
        self._number = 0

    def calibration(self, halo: int = 8, min_tokens: int = 0, **given: Any) -> Calibration:
        """A setting of this model to try. steps may be given instead of a halo."""
        spec = self.engine.model.spec
        assert spec is not None
        steps = given.pop("steps", ((halo, spec.layers),))
        min_tokens = min_tokens or max(LEAST, steps[-1][0] + 24)
        given = {"kl": 1e9, "model": self.engine.name, "source": self._source, **given}
        return Calibration(self._fingerprint, spec.layers, steps, min_tokens, **given)

    def ask(self, call: Call, namespace: str, reuse: Reuse | Calibration, forced: tuple[int, ...], adapter: str | None) -> TimedAnswer:
        """One call with its recorded answer forced."""
        sampling = Sampling(max_tokens=max(1, len(forced)), forced=forced, ignore_eos=True)
        began = time.perf_counter()
        done, seen = answered(self.engine, call.prompt, call.tools, sampling=sampling, namespace=namespace, reuse=reuse, adapter=adapter)
        return TimedAnswer(done.receipt, seen, done.receipt.ttft_ms or (time.perf_counter() - began) * 1e3)

    def _greedy(self, call: Call, namespace: str) -> tuple[int, ...]:
        sampling = Sampling(max_tokens=self.answer_tokens)
        kept = {"namespace": namespace, "adapter": self.adapter}
        return self.engine.generate(call.prompt, call.tools, sampling=sampling, reuse="exact", **kept).ids

    @contextmanager
    def scene(self, case: Case, boundaries: tuple[int, ...]) -> Iterator[Scene]:
        """Answer and cache the calls before the case; their pages go afterwards."""
        engine, namespace = self.engine, f"segments {self._number}"
        self._number += 1
        engine.model.keep_boundaries(boundaries)
        try:
            kept = []
            for call in case.before:
                forced = tuple(self.answers.ids(call)[: self.answer_tokens])
                self.ask(call, namespace, "exact", forced, self.lender)
                kept.append(as_ids([*engine.renderer.render(call.prompt, call.tools, namespace=namespace).ids, *forced[:-1]]))
            ids = as_ids(engine.renderer.render(case.call.prompt, case.call.tools, namespace=namespace).ids)
            prefix = 0 if self._source else max((common(ids, other) for other in kept), default=0)
            if self.own:
                with nothing_kept(engine):
                    answer = self._greedy(case.call, namespace)
            else:
                answer = tuple(self.answers.ids(case.call)[: self.answer_tokens])
            yield Scene(case, namespace, answer, bound(kept, ids, prefix))
        finally:
            engine.store.clear(namespace)

    def run(self, cases: Sequence[Case], methods: Mapping[str, Calibration], off: bool, say: Say) -> list[Served]:
        """Each case under each method, and by the exact prefix alone; their order rotates, and none of them leaves anything to the next."""
        served: list[Served] = []
        needed = tuple(sorted({layer for known in methods.values() for layer in known.boundaries}))
        ways: dict[str, Reuse | Calibration] = {"exact": "exact", **methods, **({"off": "off"} if off else {})}
        for number, case in enumerate(cases):
            say(f"{case.family}: case {number + 1} of {len(cases)}")
            try:
                with self.scene(case, needed) as scene:
                    found = self._asked(scene, ways, number)
            except AgentCacheError as error:  # a prompt beyond the context, a template that refuses the messages
                say(f"left out: {error}")
                continue
            served += [_served(scene, name, asked, found["exact"], methods.get(name)) for name, asked in found.items()]
        return served

    def _asked(self, scene: Scene, ways: Mapping[str, Reuse | Calibration], number: int) -> dict[str, TimedAnswer]:
        """Every way's answer, with the median of its times."""
        names = list(ways)
        found: dict[str, list[TimedAnswer]] = {name: [] for name in names}
        with nothing_kept(self.engine):
            for repeat in range(self.repeats):
                at = (number + repeat) % len(names)
                for name in names[at:] + names[:at]:
                    way = ways[name]
                    with stored_as(self.engine, scene.namespace, way.precision if isinstance(way, Calibration) else "exact"):
                        found[name].append(self.ask(scene.case.call, scene.namespace, way, scene.answer, self.adapter))
        return {name: replace(asked[0], ms=statistics.median(each.ms for each in asked)) for name, asked in found.items()}


def _served(scene: Scene, method: str, asked: TimedAnswer, exact: TimedAnswer, known: Calibration | None) -> Served:
    receipt = asked.receipt
    pairs = list(zip(exact.logits, asked.logits, strict=True))
    sure = first_unsure(asked.logits, known.margin if known and receipt.segments else 0.0)
    anew = receipt.prompt_tokens - exact.receipt.cached_tokens if sure < len(pairs) else 0
    return Served(
        family=scene.case.family,
        method=method,
        prompt_tokens=receipt.prompt_tokens,
        bound_tokens=scene.bound,
        prefix_tokens=receipt.cached_tokens - receipt.segment_tokens,
        reused_tokens=receipt.segment_tokens,
        computed_tokens=receipt.computed_tokens,
        refused=sum(refusal.reason == "PROBE" for refusal in receipt.refusals),
        unsure=int(sure < len(pairs)),
        work_tokens=receipt.computed_tokens - (known.spared(receipt.segments) if known else 0.0) + anew,
        step_ms=asked.ms,
        exact_step_ms=exact.ms,
        kl=sum(divergence(one, other) for one, other in pairs[:sure]) / len(pairs),
        top1=1 - sum(int(one.argmax() != other.argmax()) for one, other in pairs[:sure]) / len(pairs),
    )


def first_unsure(logits: Logits, margin: float) -> int:
    """The first token whose first choice is ahead by less than the margin; their number if none is."""
    gaps = (float(two[0] - two[1]) for two in (row.topk(2).values for row in logits))
    return next((at for at, gap in enumerate(gaps) if gap < margin), len(logits)) if margin else len(logits)
