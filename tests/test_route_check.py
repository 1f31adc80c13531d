"""Routes through experts: of the tokens that a request ran, held against those of the same tokens without reuse."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

from agentcache.errors import ConfigError
from tests.asking import SYSTEM, Asking, user

ASKED = [SYSTEM, user("When is high water?")]
FAMILIES = ["mixtral", "qwen3_moe", "granitemoehybrid"]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_hit_routes_its_tokens_as_reuse_off_does(asking: Callable[..., Asking], family: str) -> None:
    ask = asking(family, None)
    off = ask(ASKED, reuse="off", diagnose="routes")[0].receipt
    assert off.routes is not None
    assert (off.cached_tokens, off.routes.changed) == (0, 0.0)
    ask(ASKED)
    hit = ask(ASKED, diagnose="routes")[0].receipt
    assert hit.cached_tokens > 0
    assert hit.routes is not None
    assert hit.routes.changed == 0.0
    assert len(hit.routes.digests) == len(set(hit.routes.digests)) == len(ask.engine.model.experts) > 1
    assert hit.routes.digests != off.routes.digests, "a hit runs fewer tokens"
    assert ask(ASKED, diagnose="routes")[0].receipt.routes == hit.routes
    assert json.loads(json.dumps(hit.as_dict()))["routes"] == {"digests": list(hit.routes.digests), "changed": 0.0}


def test_another_state_shows_in_the_routes(asking: Callable[..., Asking]) -> None:
    ask = asking("mixtral", None)
    before = ask(ASKED, diagnose="routes")[0].receipt
    for entry in ask.engine.store.tree.entries():
        entry.page.layer_values[0].neg_()
    wrong = ask(ASKED, diagnose="routes")[0].receipt
    assert before.routes is not None
    assert wrong.routes is not None
    assert wrong.routes.changed > 0.0


def test_a_model_without_experts_says_so(asking: Callable[..., Asking]) -> None:
    receipt = asking("qwen3", None)(ASKED, diagnose="routes")[0].receipt
    assert receipt.routes is None
    assert any("no experts" in note for note in receipt.notes)


def test_another_diagnosis_is_refused_by_name(asking: Callable[..., Asking]) -> None:
    with pytest.raises(ConfigError, match="diagnose='rout'"):
        asking("mixtral", None)(ASKED, diagnose="rout")
