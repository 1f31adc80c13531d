"""MissWarnings: which missed prefixes are worth a warning, and in which words."""

from __future__ import annotations

from typing import Any

from agentcache import Missed, MissWarnings, Receipt

CLOCK: dict[str, Any] = {"cause": "clock", "writer": "system", "cost_tokens": 200, "fix": "Put it at the end."}
SHORTENED = {**CLOCK, "cause": "truncated history"}


def test_a_text_has_cost_cause_and_cures() -> None:
    warnings = MissWarnings()
    assert warnings.text(CLOCK) == "200 prompt tokens were computed again: clock (system). Put it at the end."
    assert warnings.text({**CLOCK, "hint": "volatile=[...] does"}).endswith("Put it at the end. volatile=[...] does.")  # type: ignore[union-attr]
    assert warnings.text(None) is None


def test_a_redacted_account_gives_no_cure_of_its_own() -> None:
    missed = Receipt(missed=Missed("clock", "alice", 1, 2, 200, "alice's clock"), redacted=True).as_dict()["missed"]
    assert MissWarnings().text({**missed, "hint": "Ours"}) == "200 prompt tokens were computed again: clock ((redacted)). Ours."


def test_what_should_be_seldom_is_told_if_it_is_not() -> None:
    warnings = MissWarnings(["truncated history"])
    assert warnings.text(SHORTENED) is None
    assert warnings.text(CLOCK) is not None
    assert warnings.text(SHORTENED) is not None
    for _ in range(4):
        warnings.text(None)
    assert warnings.text(SHORTENED) is None, "long enough ago"
