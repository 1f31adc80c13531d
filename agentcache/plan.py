"""Which prompt tokens are attached and which are computed: decided here, obeyed by the runner. Pure; looks into no page.

[0 ........ attach ........)[........ compute ........ n)
                                                    ^ the last token is always computed: its logits are needed

With consent, runs of tokens that were computed elsewhere are attached after the prefix, moved, and repaired at their head:

[0 .. prefix ..)[ compute )[ halo: compute )[ resume at a layer )[ segment: attach, moved )[ compute n)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .kv import Page
from .types import Reason, Refusal


@dataclass(frozen=True, slots=True)
class Attach:
    """Take tokens [start, stop), moved by `shift` positions, valid up to layer `layers` (None: all).

    run: number of the run of tokens that it is part of, None for the prefix. pages: where the run is stored, the first slot of the first
    one at position `base`.
    """

    start: int
    stop: int
    shift: int = 0
    layers: int | None = None
    run: int | None = None
    pages: tuple[Page, ...] = ()
    base: int = 0


@dataclass(frozen=True, slots=True)
class Compute:
    """Run tokens [start, stop) through the model."""

    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Plan:
    """Steps that cover [0, prompt_tokens) exactly once, in order, and the reason why the rest is computed."""

    prompt_tokens: int
    steps: tuple[Attach | Compute, ...]
    refusals: tuple[Refusal, ...] = ()

    @property
    def prefix_tokens(self) -> int:
        """Length of the longest exact prefix."""
        return next((step.stop for step in self.steps if isinstance(step, Attach) and step.run is None), 0)

    @property
    def cached_tokens(self) -> int:
        """Number of tokens attached in all layers."""
        return sum(step.stop - step.start for step in self.steps if isinstance(step, Attach) and step.layers is None)

    @property
    def computed_tokens(self) -> int:
        """Number of tokens computed, in all layers or above one."""
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
