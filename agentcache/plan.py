"""Which prompt tokens are attached and which are computed: decided here, obeyed by the runner. Pure; knows neither torch nor storage.

[0 ........ attach ........)[........ compute ........ n)
                                                    ^ the last token is always computed: its logits are needed

With consent, runs of tokens that were computed elsewhere are attached after the prefix, moved, and repaired at their head:

[0 .. prefix ..)[ compute )[ halo: compute )[ resume at a layer )[ segment: attach, moved )[ compute n)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .types import Reason, Refusal


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


@dataclass(frozen=True, slots=True)
class Plan:
    """Steps that cover [0, prompt_tokens) exactly once, in order, and the reasons for what is computed."""

    prompt_tokens: int
    steps: tuple[Attach | Compute, ...]
    refusals: tuple[Refusal, ...] = ()

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


def make(prompt_tokens: int, prefix_tokens: int, missed: Reason, detail: str = "", ranges: Sequence[Attach] = ()) -> Plan:
    """A plan from the length of the longest exact prefix and the reason why it is not longer.

    prefix_tokens may be anything up to the prompt: the last token is computed all the same. ranges: what else is attached, disjoint, in
    order, after the prefix.
    """
    assert prompt_tokens > 0 and prefix_tokens >= 0
    attached = at = min(prefix_tokens, prompt_tokens - 1)
    steps: list[Attach | Compute] = [Attach(0, attached)] if attached else []
    for step in ranges:
        assert at <= step.start < step.stop < prompt_tokens
        steps += [Compute(at, step.start)] if at < step.start else []
        steps.append(step)
        at = step.stop
    steps.append(Compute(at, prompt_tokens))
    if attached == prompt_tokens - 1:
        missed, detail = (Reason.LAST_TOKEN, "") if attached or missed == Reason.COLD else (missed, detail)
    return Plan(prompt_tokens, tuple(steps), (Refusal(missed, attached, prompt_tokens, detail),))
