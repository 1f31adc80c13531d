"""Calibration of one model by `agentcache calibrate`: how near to a junction stored keys and values can be trusted. Knows no torch.

A token of a repeated run follows `distance` equal tokens: those of the run before it. The nearer to the junction, the more its state
depends on what stood before the run. So it is computed anew up to a layer that falls with the distance:

    distance   0 ......... steps[0] ............ steps[1] ................... end of the run
    taken      nothing     below that layer      in all layers
    computed   all (halo)  from that layer on    nothing

The end of the prompt is another matter: the last question has read the whole prompt, and the answer is read off it. So the last turn is
computed anew however far it is from a junction, or its end (tail) if it is long.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from .errors import CalibrationError
from .types import Precision, Segment

FORMAT = 1
LEAST_CASES = 32  # fewer tell little: each answer is a thirtieth of what its bounds were held against
PRECISIONS: tuple[Precision, ...] = ("exact", "int8", "int4")


@dataclass(frozen=True, slots=True)
class Calibration:
    """The conditions under which segments of one model are attached, and their repair."""

    fingerprint: str  # of the weights, and after "+" the digest of the adapter that answers
    layers: int  # of the model
    steps: tuple[tuple[int, int], ...]  # (distance, layer), both ascending, up to `layers`
    min_tokens: int  # tokens of the shortest run that is attached
    kl: float  # mean KL allowed, nats per token
    tail: int = 0  # tokens of the last turn and after it that are never attached, at most
    share: float = 0.0  # of whole tokens, computed again
    share_by: str = "deviation"  # which these are: those whose values differ most in layer 1, or "question": those it attends to most
    probe: float = 0.0  # largest relative difference of the halo's last keys, stored and computed, in the middle layer; 0: no probe
    margin: float = 0.0  # a greedy choice that is ahead by fewer nats is made with everything computed; 0: none is
    top1: float = 0.0  # share of equal first choices asked for
    watch_one_in: int = 32  # of so many requests served with segments one is computed again in idle time
    model: str = ""  # its name
    precision: Precision = "exact"  # the fewest bits of stored pages that a segment may come from
    source: str = ""  # fingerprint of whose pages they are; empty: those that its own requests keep
    tau: float = 0.8  # least similarity of proposals from disk, of an engine's own calibration; it moves no answer
    measured: Mapping[str, Any] = field(default_factory=dict)  # figures of the search

    def __post_init__(self) -> None:
        def refuse(name: str, rule: str) -> None:
            raise CalibrationError(f"calibration {name}={getattr(self, name)!r}: must be {rule}; run `agentcache calibrate` again")

        ascending = all(one < two for one, two in zip(self.steps, self.steps[1:], strict=False))
        deeper = all(one[1] < two[1] for one, two in zip(self.steps, self.steps[1:], strict=False))
        if not self.steps or not ascending or not deeper or self.steps[-1][1] != self.layers or self.steps[0][0] < 0:
            refuse("steps", f"pairs of distance and layer, both ascending, up to layer {self.layers!r}")
        if self.steps[0][1] < 1:
            refuse("steps", "above layer 0: what is taken nowhere is no segment")
        if self.min_tokens <= self.steps[-1][0]:
            refuse("min_tokens", f"more than the distance {self.steps[-1][0]!r} after which tokens are taken whole")
        for name in ("kl", "share", "probe", "margin", "top1", "tau"):
            value = getattr(self, name)
            if not isinstance(value, (int, float)) or not math.isfinite(value) or value < 0:
                refuse(name, "a finite number of at least 0")
        if self.probe and not self.steps[0][0]:
            refuse("probe", "0 where steps begin at distance 0: without a halo nothing is computed that could be held against what is kept")
        if self.source and self.source.partition("+")[0] != self.fingerprint.partition("+")[0]:
            refuse("source", "a fingerprint over the same weights")
        if not 0 < self.tau < 1:
            refuse("tau", "between 0 and 1")
        for name, low in (("watch_one_in", 1), ("tail", 0)):
            if not isinstance(getattr(self, name), int) or getattr(self, name) < low:
                refuse(name, f"a whole number of at least {low}")
        if self.share > 1 or self.top1 > 1:
            refuse("share" if self.share > 1 else "top1", "a share of at most 1")
        if self.share_by not in ("deviation", "question"):
            refuse("share_by", "'deviation' or 'question'")
        if self.precision not in PRECISIONS:
            refuse("precision", f"one of {', '.join(map(repr, PRECISIONS))}")

    @property
    def precisions(self) -> tuple[Precision, ...]:
        """Precisions of stored pages that segments may come from, the most exact first."""
        return PRECISIONS[: PRECISIONS.index(self.precision) + 1]

    @property
    def repair(self) -> str:
        """The settings that decide how near to exact its pages are: calibrations that share this may share them."""
        return repr((self.steps, self.min_tokens, self.tail, self.share, self.share_by, self.probe, self.precision, self.source))

    @property
    def adapters(self) -> tuple[str, str]:
        """Digests of the adapter that answers and of the one whose pages are taken; "" is the base, or for pages the first one itself."""
        return self.fingerprint.partition("+")[2], self.source and (self.source.partition("+")[2] or "base")

    @property
    def doubt(self) -> str:
        """The reason why its bounds are not to be relied on: it was measured on few cases; empty if it was not, or was made by hand."""
        cases = self.measured.get("cases")
        if not isinstance(cases, int) or cases >= LEAST_CASES:
            return ""
        return (
            f"calibration of {self.model!r} from {cases!r} cases, fewer than {LEAST_CASES}: how far answers drift is hardly known; "
            "run `agentcache calibrate` with more recorded requests, or with a higher --cases"
        )

    @property
    def boundaries(self) -> tuple[int, ...]:
        """Layers at which computing is resumed: their inputs have to be kept with the pages."""
        return tuple(layer for _, layer in self.steps[:-1])

    def parts(self, tokens: int, kept: frozenset[int]) -> Iterator[tuple[int, int, int]]:
        """(first, last + 1, layer up to which it is taken) for the tokens of a run. kept: layers whose inputs its source holds."""
        steps = [step for step in self.steps if step[1] == self.layers or step[1] in kept]
        edges = [(0, 0), *steps, (tokens, 0)]
        for (start, layer), (stop, _) in zip(edges, edges[1:], strict=False):
            if min(start, tokens) < min(stop, tokens):
                yield min(start, tokens), min(stop, tokens), layer

    def spared(self, segments: Sequence[Segment]) -> float:
        """Count tokens, through all layers, that a receipt counts as computed of these and that were not: resumed above some layer, or
        looked at in two layers more."""
        spared = 0.0
        for segment in segments:
            left = segment.resumed_tokens
            for (start, layer), (stop, _) in zip(self.steps, self.steps[1:], strict=False):
                spared += min(left, stop - start) * layer / self.layers
                left -= min(left, stop - start)
            looked = segment.whole_tokens * 2 / self.layers if self.share_by == "deviation" else segment.halo_tokens / 2
            spared -= looked if self.share else 0.0
        return spared

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write it as JSON, whole or not at all."""
        place = Path(path)
        place.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        fresh = place.with_name(f"{place.name}.{os.getpid()}.new")
        fresh.write_text(json.dumps({"format": FORMAT, **asdict(self)}, indent=1) + "\n", encoding="utf-8")
        os.replace(fresh, place)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Calibration:
        """Read what `save` wrote; CalibrationError if it is something else."""
        try:
            found = json.loads(Path(path).read_text(encoding="utf-8"))
        except (OSError, TypeError, ValueError) as error:
            raise CalibrationError(f"calibration {str(path)!r} cannot be read: {error}; run `agentcache calibrate` again") from error
        if not isinstance(found, dict) or found.pop("format", None) != FORMAT:
            raise CalibrationError(f"calibration {str(path)!r} has another format: run `agentcache calibrate` again")
        try:
            return cls(**{**found, "steps": tuple((int(at), int(layer)) for at, layer in found["steps"])})
        except (KeyError, TypeError, ValueError) as error:
            if isinstance(error, CalibrationError):
                raise
            raise CalibrationError(f"calibration {str(path)!r} is not one: {error}; run `agentcache calibrate` again") from error
