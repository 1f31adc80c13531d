"""Requests to an engine of a tiny model of any family, with the logits of each token of the answer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from agentcache import Completion, Engine, Sampling, StoreOptions
from agentcache.bench import families
from agentcache.checkpoints import CHECKPOINT_TOKENS
from agentcache.model import proof
from tests import models

SYSTEM = {"role": "system", "content": "You are the keeper of a lighthouse."}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": f"tide_{number}",
            "description": f"Look up the tide and the wind at a place, number {number}.",
            "parameters": {"type": "object", "properties": {"place": {"type": "string"}, "days": {"type": "integer"}}},
        },
    }
    for number in range(6)
]


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def talk(count: int) -> list[dict[str, str]]:
    """A conversation of so many questions, about 80 tokens each."""
    turns = [(user(f"What is the tide {at}? " * 16), {"role": "assistant", "content": "High. " * 3}) for at in range(count)]
    return [SYSTEM, *(message for turn in turns for message in turn)][:-1]


@contextmanager
def by_pieces() -> Iterator[None]:
    """Load models with states as if these depended on where pieces end."""
    proven = proof.proven

    def of_pieces(*given: Any) -> tuple[proof.Verdict, bool]:
        verdict, found = proven(*given)
        return verdict._replace(alignment=CHECKPOINT_TOKENS), found

    with mock.patch.object(proof, "proven", of_pieces):
        yield


class Asking:
    """An engine of a family's tiny model, or of one in a folder, and what it answers: the completion, and the logits of each of its tokens
    [tokens, vocab]."""

    def __init__(self, family: str | Path, store: Path | StoreOptions | None, seed: int = 0, **options: Any) -> None:
        made = (str(family),) if isinstance(family, Path) else (families.build(family, seed=seed), models.toy_tokenizer())
        self.engine = Engine(*made, store=store, **options)

    def __call__(
        self, messages: str | Sequence[dict[str, str]], tools: Any = TOOLS, tokens: int = 6, says: str = "", **options: Any
    ) -> tuple[Completion, torch.Tensor]:
        logits: list[torch.Tensor] = []
        sampling = Sampling(max_tokens=tokens, temperature=0.0, ignore_eos=True, forced=says)
        said = self.engine.generate(messages, tools, sampling=sampling, on_logits=lambda found: logits.append(found.clone()), **options)
        return said, torch.stack(logits)
