"""What a module or hook writes in its own forward is no change of the model; tensors that are written so refuse reuse by name."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from agentcache.errors import ConfigError
from tests import models
from tests.engines import chat, decode, engine

SHORT = chat("The wind turns to the north and the tide is high at three. What did the keeper write down?")


class Noting(torch.nn.Module):
    """A custom module around another one that notes something about itself in each forward."""

    def __init__(self, inner: torch.nn.Module, note: Callable[[Any, torch.Tensor], Any]) -> None:
        super().__init__()
        self.inner, self.note = inner, note
        self.calls, self.seen, self.shapes = 0, [], {}
        self.register_buffer("load", torch.zeros(64), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.note(self, x)
        return self.inner(x)


def _count(module: Any, x: torch.Tensor) -> None:
    module.calls += 1


def _keep(module: Any, x: torch.Tensor) -> None:
    module.last = x.detach()


NOTES: dict[str, tuple[Callable[[Any, torch.Tensor], Any], str]] = {
    "a counter": (_count, ""),
    "a list": (lambda module, x: module.seen.append(x.shape), ""),
    "a dictionary": (lambda module, x: module.shapes.update({x.shape: 1}), ""),
    "its input": (_keep, "Noting.last is a tensor that its own forward writes"),
    "a buffer": (lambda module, x: module.load.add_(x.reshape(-1, 64).abs().sum(0)), "Noting.load is a tensor that its own forward writes"),
}


@pytest.mark.usefixtures("compiled_anew")  # a proof runs forwards, which is when writes are seen
@pytest.mark.parametrize("kind", NOTES)
def test_what_a_forward_writes_itself_is_no_change(kind: str, tmp_path: Path) -> None:
    note, refused = NOTES[kind]

    def build() -> Any:
        model = models.build("llama")
        model.model.layers[0].mlp = Noting(model.model.layers[0].mlp, note)
        return model

    model = build()
    with engine(model=model, store=tmp_path) as running:
        first = running.generate(SHORT, sampling=decode(3))
        again = running.generate(SHORT, sampling=decode(3))
        assert again.ids == first.ids == running.generate(SHORT, sampling=decode(3), reuse="off").ids
        assert bool(again.receipt.cached_tokens) == (not refused)
        if refused:
            assert refused in [refusal.detail for refusal in again.receipt.refusals]
            with pytest.raises(ConfigError, match=re.escape(f"cannot be kept ({refused})")):
                running.warm("You are the keeper of a lighthouse.")
            return
        model.model.layers[0].mlp.other = 2.0
        assert not running.generate(SHORT, sampling=decode(3)).receipt.cached_tokens, "nothing of that module counts any more"
        assert running.flush()
    with engine(model=build(), store=tmp_path) as later:
        assert later.generate(SHORT, sampling=decode(3)).receipt.disk_tokens


def test_what_another_thread_writes_is_a_change(monkeypatch: pytest.MonkeyPatch) -> None:
    """It comes whether a forward runs or not."""
    model = models.build("llama")
    gate = model.model.layers[0].mlp = Noting(model.model.layers[0].mlp, lambda module, x: None)
    with engine(model=model, store=None) as running:
        inner = running.fingerprint._notes

        def notes() -> Any:
            gate.calls += 1  # between any two looks
            return inner()

        monkeypatch.setattr(running.fingerprint, "_notes", notes)
        gate.note = _count
        running.generate(SHORT, sampling=decode(1))
        gate.note = lambda module, x: None
        before = running.fingerprint.whole
        gate.calls = -1
        assert running.fingerprint.whole != before
