"""Figures of several reports together: who may speak of what, the worst of them, boundary KL, and steps by tier."""

from __future__ import annotations

from typing import Any

from agentcache.receipt import Receipt
from agentcache.types import Reason, Refusal
from benchmarks import segments_episodes, segments_paired
from benchmarks.segments_verdicts import together, verdicts


def test_the_worst_report_that_may_speak_is_the_verdict() -> None:
    """Times come from known shapes, what answers say from trained weights, tokens from both."""

    def report(speedup: float, kl: float, share: float, **more: Any) -> dict[str, Any]:
        row = {
            "cases": 1,
            "bound_tokens": 2000,
            "reused_tokens": 1900,
            "of_bound": share,
            "speedup": speedup,
            "kl_mean": kl,
            "step_ms": 1.0,
        }
        return {"rows": [{"family": "dated system", "method": method, **row} for method in ("ours", "halo 8")], **more}

    def said(part: str, *reports: tuple[str, dict[str, Any]]) -> tuple[float | None, str, str]:
        [row] = [each for each in together(reports) if part in each["hypothesis"]]
        return row["figure"], row["verdict"], row["report"]

    trained = ("good", report(1.2, 0.02, 0.95)), ("bad", report(1.1, 0.2, 0.9)), ("better", report(1.3, 0.05, 0.92))
    shapes = ("slow", report(1.6, 5.0, 0.85, shape="small")), ("fast", report(9.0, 6.0, 0.99, shape="small"))
    for reports in ((*trained, *shapes), (*shapes, *reversed(trained))):
        assert said(">= 1.5 x", *reports) == (1.6, "holds", "slow")
        assert said("KL below 0.1 nats per token", *reports) == (0.2, "fails", "bad")
        assert said("text-match bound", *reports) == (0.85, "holds", "slow")
    assert said(">= 1.5 x", *trained) == (None, "not measured", "")
    assert said("KL below 0.1 nats per token", *shapes) == (None, "not measured", "")
    whole = {"by": "family", "of": "moved tool", "method": "ours", "n": 9, "bound_tokens": 90, "of_bound": 0.75}
    answers = {"paired": [{**whole, "spent_flops": 1.0, "exact_flops": 2.0, "changed": 0.0}]}
    assert said("text-match bound", *shapes, ("answers", answers)) == (0.75, "fails", "answers"), (
        "whole answers count what was computed again"
    )


def test_prompts_without_repeats_tell_the_cost_of_looking() -> None:
    """A run as long as the bound's may stand even there; it says nothing of how much of other prompts is reused."""
    row = {"family": "nothing repeats", "method": "ours", "cases": 7, "bound_tokens": 32, "reused_tokens": 0, "of_bound": 0.0}
    found = {each["hypothesis"]: each["figure"] for each in verdicts({"rows": [{**row, "speedup": 0.8, "step_ms": 9.0}], "shape": "small"})}
    assert found["never slower than 1.03 x the exact prefix where nothing repeats"] == 1.25
    assert found["reused >= 0.8 x the text-match bound in each family"] is None


def test_boundary_kl_is_that_of_the_first_token_too() -> None:
    def found(**more: Any) -> dict[str, tuple[float | None, str]]:
        row = {"by": "all", "of": "all", "n": 100, "method": "ours", "tool": 1.0, "tool_ci": (0.9, 1.0), "changed": 0.0}
        paired = [{**row, "kl": 0.01, "kl_first": 0.05, "kl_first_p99": 0.9}]
        rows = verdicts({"paired": paired, **more})
        return {
            each["hypothesis"].split(" nats ")[1]: (each["figure"], each["verdict"]) for each in rows if "KL below" in each["hypothesis"]
        }

    assert list(found(steps=[[8, 4]]).values()) == [(0.01, "holds"), (0.05, "holds"), (0.9, "fails")]
    for other in ({"steps": [[16, 4]]}, {"steps": [[8, 2], [64, 4]]}, {"steps": [[8, 4]], "shape": "small"}):
        assert {figure for figure, _ in found(**other).values()} == {None}, "another repair, or random weights"


def test_steps_are_summed_up_by_tier() -> None:
    near = {
        "tier": ["exact", "calibrated", "calibrated", "calibrated"],
        "reused_tokens": [0, 10, 20, 30],
        "step_ms": [9.0, 3.0, 1.0, 2.0],
        "ms": [90.0, 30.0, 10.0, 20.0],
    }
    method = {**near, "solved": True, "tool": 4, "arguments": 4, "prompt_tokens": [1] * 4, "computed_tokens": [1] * 4, "flops": [1.0] * 4}
    row = {"part": "episodes", "number": 0, "family": "x", "style": "hermes", "steps": 4}
    row["methods"] = dict.fromkeys(("off", "exact", "ours"), method)
    [all_, *_] = [each for each in segments_episodes.summaries([row]) if each["method"] == "ours"]
    assert all_["tiers"] == {
        "exact": {"steps": 1, "reused_tokens": 0, "step_ms": 9.0, "ms": 90.0},
        "calibrated": {"steps": 3, "reused_tokens": 60, "step_ms": 2.0, "ms": 20.0},
    }


def test_what_goes_on_behind_moved_text_is_not_exact() -> None:
    near = Receipt(precision="approximate")
    assert segments_paired.tier(near) == "calibrated"
    unsure = Receipt(precision="approximate", refusals=(Refusal(Reason.UNSURE, 0, 1),))
    assert segments_paired.tier(unsure) == "refused"
    assert segments_paired.tier(Receipt()) == "exact"
