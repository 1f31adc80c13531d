"""Which prompt tokens are attached and which are computed: decided here, obeyed by the runner. Pure; knows neither torch nor storage.

[0 ........ attach ........)[........ compute ........ n)
                                                    ^ the last token is always computed: its logits are needed
"""

from __future__ import annotations

from dataclasses import dataclass

from .types import Reason, Refusal


@dataclass(frozen=True, slots=True)
class Attach:
    """Take tokens [start, stop) from `source`, moved by `shift` positions, valid up to layer `layers` (None: all)."""

    start: int
    stop: int
    source: str = "prefix"
    shift: int = 0
    layers: int | None = None


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
    def cached_tokens(self) -> int:
        """How many tokens are attached."""
        return sum(step.stop - step.start for step in self.steps if isinstance(step, Attach))

    @property
    def computed_tokens(self) -> int:
        """How many tokens are computed."""
        return self.prompt_tokens - self.cached_tokens


def make(prompt_tokens: int, prefix_tokens: int, missed: Reason, detail: str = "") -> Plan:
    """A plan from the length of the longest exact prefix and the reason why it is not longer.

    prefix_tokens may be anything up to the prompt: the last token is computed all the same.
    """
    assert prompt_tokens > 0 and prefix_tokens >= 0
    attached = min(prefix_tokens, prompt_tokens - 1)
    steps: list[Attach | Compute] = [Attach(0, attached)] if attached else []
    steps.append(Compute(attached, prompt_tokens))
    if attached == prompt_tokens - 1:
        missed, detail = (Reason.LAST_TOKEN, "") if attached or missed == Reason.COLD else (missed, detail)
    return Plan(prompt_tokens, tuple(steps), (Refusal(missed, attached, prompt_tokens, detail),))
