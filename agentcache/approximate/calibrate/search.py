"""`agentcache calibrate`: which repair keeps a model's answers near what computing everything gives, and costs least.

Every setting serves the same repeated text of the same recorded prompts, and its answers are held against exact ones: KL per token of the
recorded answer, and how often the first choice is the same. The fastest setting within the bounds is chosen; none, if none is within them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from types import MappingProxyType
from typing import Any

from ...calibration import PRECISIONS, Calibration
from ...errors import ConfigError
from ..ngram_index import GRAM
from .shifts import DOCUMENTS, NOTHING, Case
from .trials import Say, Trials, row

HALOS = (0, 4, 8, 16, 32, 64, 128)
SHARES = (0.08, 0.16)
SHARED = (4, 8, 32)  # halos that they are tried with
PROBES = (0.05, 0.1, 0.2)  # with a halo of 8: segments that deviate more are computed, and the rest may keep bounds that all together break
PASSAGE_HALOS = (0, 4, 8, 16)  # of documents, which are short
PASSAGE_SHARES = (0.1, 0.2, 0.3, 0.4)
WINDOWS = (16, 64)  # distances after which a token may be resumed, and taken whole

CHOICES = ("question", "deviation")

Seen = tuple[Calibration, dict[str, Any]]  # a setting, and its row over all families


def settings(trials: Trials, given: Mapping[str, Any]) -> dict[str, Calibration]:
    """Settings to try: halos; some of them with pages stored with fewer bits, or with some tokens computed again; a probe;
    resuming at a quarter, half, three quarters of the layers. All of them with the given margin and tail, of which a mean over a few
    cases does not tell how seldom it is missed, and how badly. Not tau, by which text on disk is proposed: it moves no answer."""
    spec = trials.engine.model.spec
    assert spec is not None
    stepped, layers = trials.engine.model.stepped, spec.layers
    found = {f"halo {halo}": trials.calibration(halo) for halo in HALOS}
    found |= {f"halo {halo}, {stored}": trials.calibration(halo, precision=stored) for halo in SHARED for stored in PRECISIONS[1:]}
    found |= {f"halo 8, probe {bound:g}": trials.calibration(8, probe=bound) for bound in PROBES}
    if stepped and layers > 2:
        found |= {f"halo {halo}, share {share:g}": trials.calibration(halo, share=share) for halo in SHARED for share in SHARES}
        most = SHARES[-1]
        found |= {f"halo {halo}, share {most:g} by question": trials.calibration(halo, share=most, share_by="question") for halo in SHARED}
        for layer in sorted({max(1, layers * part // 4) for part in (1, 2, 3)}):
            for window in WINDOWS:
                steps = ((window // 4, layer), (window * 2, layers))
                found[f"halo {window // 4}, from layer {layer} to {window * 2}"] = trials.calibration(steps=steps)
    return {name: replace(known, **given) for name, known in found.items()}


def of_passages(trials: Trials, given: Mapping[str, Any]) -> dict[str, Calibration]:
    """Settings to try on documents: halos, alone and with some of the other tokens computed again; a segment may be two halos long."""
    found = {}
    for halo in PASSAGE_HALOS:
        found[f"halo {halo}"] = known = trials.calibration(halo, min_tokens=max(GRAM, 2 * halo))
        for choice, share in product(CHOICES if trials.engine.model.stepped else (), PASSAGE_SHARES):
            found[f"halo {halo}, share {share:g} by {choice}"] = replace(known, share=share, share_by=choice)
    return {name: replace(known, **given) for name, known in found.items()}


@dataclass(frozen=True, slots=True)
class Bounds:
    """Bounds of a setting."""

    kl: float = 0.02  # mean, nats per token
    top1: float = 0.98  # share of equal first choices
    decision: float = 0.0  # share of answers all of whose first choices are equal
    margin: float = 0.0  # of all settings
    tail: int = 64  # a question, or the end of a long result; most of the drift of the embedded model is in it

    @property
    def given(self) -> dict[str, Any]:
        """The parameters that are not searched."""
        return {"margin": self.margin, "tail": self.tail}


def calibrate(trials: Trials, cases: Sequence[Case], bounds: Bounds, say: Say) -> tuple[Calibration | None, list[dict[str, Any]]]:
    """The fastest setting whose mean KL and share of equal first choices keep the bounds, None if none does; and the figures of each."""
    seen = measure(trials, cases, say, bounds.given)
    return choose(seen, bounds.kl, bounds.top1, bounds.decision), [row for _, row in seen]


def setting(
    trials: Trials, cases: Sequence[Case], bounds: Bounds, say: Say, file: Path | None = None, halo: int | None = None, shaped: bool = False
) -> Calibration:
    """A benchmark's setting: a file's, a plain halo (16 with random weights, whose drift says nothing), or the fastest."""
    if file is not None:
        known = Calibration.load(file)
        return replace(known, margin=bounds.margin) if bounds.margin else known
    if halo is not None or shaped:
        return trials.calibration(16 if halo is None else halo, **bounds.given)
    some = [case for case in cases if case.family != NOTHING]
    return calibrate(trials, some, replace(bounds, top1=0.0), say)[0] or trials.calibration(128, **bounds.given)


def measure(trials: Trials, cases: Sequence[Case], say: Say, given: Mapping[str, Any] = MappingProxyType({})) -> list[Seen]:
    """Run each setting on these cases; ConfigError if there are none, or none of them repeats text."""
    tried = settings(trials, given) if any(case.family not in DOCUMENTS for case in cases) else {}
    tried |= of_passages(trials, given) if any(case.family in DOCUMENTS for case in cases) else {}
    served = trials.run(cases, tried, False, say)
    if not any(one.reused_tokens for one in served):
        raise ConfigError("no case repeats text at another position: give a --workload whose prompts do")
    return [(known, row([one for one in served if one.method == name], "all", name)) for name, known in tried.items()]


def choose(seen: Sequence[Seen], kl: float, top1: float, decision: float = 0.0) -> Calibration | None:
    """The fastest setting within the bounds, to the first token and against the exact prefix on the same prompts; none that is slower.

    Of those that take equally long to a hundredth of the exact prefix's time the one that computes least, and then the one that may take
    the most.
    """
    best = None
    for known, found in seen:
        alike = found["kl_mean"] <= kl and found["top1"] >= top1 and found["decision"] >= decision
        within = alike and found["reused_tokens"] and (found["speedup"] or 0) >= 1
        rank = (round(1 / (found["speedup"] or 1), 2), found["work_tokens"], -PRECISIONS.index(known.precision))
        if within and (best is None or rank < best[0]):
            best = (rank, known, found)
    return None if best is None else replace(best[1], kl=max(kl, 1e-9), top1=top1, measured=best[2])
