"""Which prompt tokens are attached and which are computed: decided here, obeyed by the runner. Pure; knows neither torch nor storage.

[0 ........ attach ........)[........ compute ........ n)
                                                    ^ the last token is always computed: its logits are needed

With consent, runs of tokens that were computed elsewhere are attached behind the prefix, moved, and repaired at their head:

[0 .. prefix ..)[ compute )[ halo: compute )[ resume at a layer )[ segment: attach, moved )[ compute n)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from .calibration import Calibration
from .types import Precision, Reason, Refusal, Segment


@dataclass(frozen=True, slots=True)
class Attach:
    """Take tokens [start, stop) from `source`, moved by `shift` positions, valid up to layer `layers` (None: all).

    run: which of the runs that were found, for a segment.
    """

    start: int
    stop: int
    source: str = "prefix"
    shift: int = 0
    layers: int | None = None
    run: int = 0


@dataclass(frozen=True, slots=True)
class Compute:
    """Run tokens [start, stop) through the model."""

    start: int
    stop: int


class Repeat(NamedTuple):
    """Prompt tokens [start, stop) that are kept `shift` positions before. boundaries: layers whose inputs are kept with them.

    precision: in how many bits.
    """

    start: int
    stop: int
    shift: int
    boundaries: frozenset[int] = frozenset()
    precision: Precision = "exact"


@dataclass(frozen=True, slots=True)
class Plan:
    """Steps that cover [0, prompt_tokens) exactly once, in order, and the reasons for what is computed."""

    prompt_tokens: int
    steps: tuple[Attach | Compute, ...]
    refusals: tuple[Refusal, ...] = ()
    segments: tuple[Segment, ...] = ()

    @property
    def prefix_tokens(self) -> int:
        """How many tokens the longest exact prefix gives."""
        return next((step.stop for step in self.steps if isinstance(step, Attach) and step.source == "prefix"), 0)

    @property
    def cached_tokens(self) -> int:
        """How many tokens are attached in all layers."""
        return sum(step.stop - step.start for step in self.steps if isinstance(step, Attach) and step.layers is None)

    @property
    def computed_tokens(self) -> int:
        """How many tokens are computed, in all layers or above one."""
        return self.prompt_tokens - self.cached_tokens

    @property
    def segment_tokens(self) -> int:
        """How many tokens are attached from other positions."""
        return sum(segment.whole_tokens for segment in self.segments)


def make(
    prompt_tokens: int,
    prefix_tokens: int,
    missed: Reason,
    detail: str = "",
    repeats: Sequence[Repeat] = (),
    calibration: Calibration | None = None,
) -> Plan:
    """A plan from the length of the longest exact prefix and the reason why it is not longer.

    prefix_tokens may be anything up to the prompt: the last token is computed all the same. repeats: disjoint, in order, behind the
    prefix; the calibration says how much of each is taken.
    """
    assert prompt_tokens > 0 and prefix_tokens >= 0
    attached = min(prefix_tokens, prompt_tokens - 1)
    steps: list[Attach | Compute] = [Attach(0, attached)] if attached else []
    segments, at = [], attached
    for number, repeat in enumerate(repeats):
        assert calibration is not None and at <= repeat.start < repeat.stop < prompt_tokens
        counts = {"whole": 0, "resumed": 0, "halo": 0}
        for start, stop, layer in calibration.parts(repeat.stop - repeat.start, repeat.boundaries):
            kind = "halo" if not layer else "whole" if layer == calibration.layers else "resumed"
            counts[kind] += stop - start
            if layer:
                start, stop = start + repeat.start, stop + repeat.start
                steps += [Compute(at, start)] if at < start else []
                steps.append(Attach(start, stop, "segment", repeat.shift, None if kind == "whole" else layer, number))
                at = stop
        counted = counts["whole"], counts["resumed"], counts["halo"]
        segments.append(Segment(repeat.start, repeat.stop, repeat.shift, *counted, repeat.precision))
    steps.append(Compute(at, prompt_tokens))
    if attached == prompt_tokens - 1:
        missed, detail = (Reason.LAST_TOKEN, "") if attached or missed == Reason.COLD else (missed, detail)
    return Plan(prompt_tokens, tuple(steps), (Refusal(missed, attached, prompt_tokens, detail),), tuple(segments))
