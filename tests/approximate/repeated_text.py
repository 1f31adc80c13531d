"""Engines that reuse approximately, and two prompts around one document. Holds no tests."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from agentcache import Engine, Sampling
from agentcache.calibration import Calibration
from agentcache.types import Reuse
from tests import models

LAYERS = 6
DOC = " ".join(f"entry {at} of the harbour book says {at * at % 977}." for at in range(70))


def calibration(**given: Any) -> Calibration:
    return Calibration(**{"fingerprint": "x", "layers": LAYERS, "steps": ((8, LAYERS),), "min_tokens": 32, "kl": 1.0, **given})


def prompt(system: str, after: str) -> list[dict[str, str]]:
    return [{"role": "system", "content": system}, {"role": "user", "content": f"Read this. {DOC} {after}"}]


FIRST = prompt("You are one.", "What does entry 3 say?")
OTHER = prompt("You are quite another assistant, and today is Monday.", "Why?")
GREEDY = Sampling(max_tokens=12, ignore_eos=True)


@functools.cache
def tiny_model() -> tuple[Any, Any, str]:
    """A model, its tokenizer and its fingerprint."""
    model, tokenizer = models.build("qwen3", num_hidden_layers=LAYERS), models.toy_tokenizer()
    with Engine(model, tokenizer, store=None) as running:
        assert running.fingerprint is not None
        return model, tokenizer, running.fingerprint.whole


@contextmanager
def engine(reuse: Reuse = "approximate", **given: Any) -> Iterator[Engine]:
    model, tokenizer, fingerprint = tiny_model()
    with Engine(model, tokenizer, store=None, reuse=reuse, calibration=calibration(fingerprint=fingerprint, **given)) as running:
        yield running
