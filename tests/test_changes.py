"""Whatever is done to a model between two requests, reuse gives what reuse off gives: in memory, and from disk in a later process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from agentcache import Engine
from agentcache.types import Reason
from tests import models
from tests.changes import CHANGES, FAMILIES, Change
from tests.engines import chat, decode, engine

PROMPT = chat("The wind turns to the north and the tide is high at three. What did the keeper write down?")


def answer(running: Engine, reuse: Any) -> tuple[Any, torch.Tensor]:
    """A completion of two tokens, and the logits of the first."""
    logits: list[torch.Tensor] = []
    done = running.generate(PROMPT, sampling=decode(2), reuse=reuse, on_logits=logits.append)
    return done, logits[0]


def check(running: Engine, change: Change, name: str) -> Any:
    """Ask with reuse, without and with it again, as a hit; returns the receipt of the first."""
    (exact, logits), (off, expected), (hit, again) = answer(running, "exact"), answer(running, "off"), answer(running, "exact")
    receipt = exact.receipt
    if change.refused:
        assert receipt.cached_tokens == 0, name
        assert Reason.FINGERPRINT in [refusal.reason for refusal in receipt.refusals], name
        return receipt
    assert hit.receipt.computed_tokens == 1, name
    for done, found in ((exact, logits), (hit, again)):
        assert done.ids == off.ids, name
        if done.receipt.bitwise:
            assert torch.equal(found, expected), f"{name}: other bits, labelled bitwise"
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-3, msg=name)
    return receipt


def test_there_are_enough_changes() -> None:
    assert len(CHANGES) >= 150


@pytest.mark.parametrize("family", FAMILIES)
def test_a_change_of_the_model_is_noticed_in_memory(family: str) -> None:
    model = models.build(family)
    with engine(model=model) as running:
        answer(running, "exact")
        before = answer(running, "exact")
        assert before[0].receipt.computed_tokens == 1
        for name, change in CHANGES.items():
            if change.family == family:
                if change.prepare and change.act:
                    with change.prepare(model) as prepared:
                        answer(running, "exact")
                        assert answer(running, "exact")[0].receipt.computed_tokens == 1
                        change.act(prepared)
                        check(running, change, name)
                else:
                    with change.apply(model):
                        check(running, change, name)
                again = answer(running, "exact")
                assert again[0].ids == before[0].ids, f"{name}: other tokens once it was undone"
                assert torch.equal(again[1], before[1]), f"{name}: other logits once it was undone"


@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_change_is_noticed_in_a_later_process(family: str, tmp_path: Path) -> None:
    with engine(family, store=tmp_path) as running:
        answer(running, "exact")
        assert running.flush()
        written = running.fingerprint.whole
    for name, change in CHANGES.items():
        if change.family != family:
            continue
        model = models.build(family)
        with change.apply(model), engine(model=model, store=None) as alone:
            same = not change.refused and alone.fingerprint.whole == written
        if same:  # then the later process takes those pages
            model = models.build(family)
            with change.apply(model), engine(model=model, store=tmp_path) as later:
                assert check(later, change, name).disk_tokens > 0, name


def test_the_same_change_in_two_processes_is_the_same(tmp_path: Path) -> None:
    change = CHANGES["epsilon"]
    for expected in (0, 1):
        model = models.build(change.family)
        with change.apply(model), engine(model=model, store=tmp_path) as running:
            assert bool(answer(running, "exact")[0].receipt.disk_tokens) == bool(expected)
            assert running.flush()
