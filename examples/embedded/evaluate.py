"""The quick evaluation on held-out tools, words and values. Knows nothing of training.

Greedy decoding gives the right text exactly when every token of it is the likeliest one after the right tokens before it, so one
forward over a pack scores all its completions. `greedy` decodes some of them for real, with a KV cache, to hold that against it.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from agentcache.model.loading import cache_in, cache_name

from . import model as models
from .packing import Encoder, Ints, Pack, pack, samples_of
from .world.dialogues import Bundle, bundle
from .world.world import sources


@dataclass(frozen=True, slots=True)
class Set:
    """A cell of the evaluation: bundles of `count` dialogues on exactly `tools` tools."""

    split: str
    style: str
    tools: int
    bundles: int
    count: int


QUICK = (
    Set("unseen tools", "hermes", 5, 24, 6),
    Set("unseen tools", "hermes", 20, 10, 12),
    Set("unseen words", "hermes", 20, 6, 12),
    Set("unseen tools", "langchain", 5, 10, 8),
    Set("unseen tools", "llamaindex", 5, 8, 8),
)


@dataclass(slots=True)
class Scores:
    """Shares of right ones, and how many there were."""

    right: int = 0
    n: int = 0

    def add(self, right: bool) -> None:
        self.right += right
        self.n += 1

    @property
    def share(self) -> float:
        return self.right / self.n if self.n else float("nan")


def bundles(cell: Set, held: str = "validation", seed: str = "quick") -> list[Bundle]:
    """The cell's bundles, always the same. Dialogues start with what they are about."""
    source = sources(held)[cell.split]
    names = [f"{seed} {held} {cell.split} {cell.style} {cell.tools} {number}" for number in range(cell.bundles)]
    return [bundle(name, cell.style, cell.tools, cell.count, source, exact=True, hold=False) for name in names]


@torch.inference_mode()
def hits(model: Any, made: Pack) -> tuple[list[bool], list[bool]]:
    """For each completion, whether the choice between tools is right, and whether all of it is."""
    rows = made.targets()
    likeliest = models.logits(model, made, rows).argmax(-1).numpy()
    right = np.zeros(len(made.ids), dtype=np.bool_)
    right[rows] = likeliest == made.ids[rows]
    return [bool(right[c.rows[: c.pick]].all()) for c in made.completions], [bool(right[c.rows].all()) for c in made.completions]


def score(model: Any, encoder: Encoder, made: list[Bundle]) -> dict[str, Scores]:
    """Per kind of completion the choice and the exact match; dialogues solved, all and by kind, with and without context."""
    out: dict[str, Scores] = defaultdict(Scores)
    for one in made:
        packed = pack(encoder, one, 1_000_000)
        picks, wholes = hits(model, packed)
        solved = [True] * len(one.dialogues)
        for completion, pick, whole in zip(packed.completions, picks, wholes):
            out[f"{completion.kind} choice"].add(pick)
            out[f"{completion.kind} exact"].add(whole)
            solved[completion.dialogue] &= whole
        for dialogue, right in zip(one.dialogues, solved):
            share = "context" if dialogue.context else "independent"
            for name in ("solved", f"solved {share}", f"kind {dialogue.kind}"):
                out[name].add(right)
    return out


def quick(model: Any, encoder: Encoder, cells: tuple[Set, ...] = QUICK) -> dict[Set, dict[str, Scores]]:
    """All cells on the validation split. The model must attend over packs."""
    model.eval()
    out = {cell: score(model, encoder, bundles(cell)) for cell in cells}
    model.train()
    return out


def line(cell: Set, scores: dict[str, Scores]) -> str:
    """A cell in one line."""
    shown = ("call choice", "call exact", "refusal choice", "answer exact", "solved independent", "solved context")
    parts = [f"{name} {scores[name].share:.2f} ({scores[name].n})" for name in shown if name in scores]
    return f"{cell.split}, {cell.style}, {cell.tools} tools: {', '.join(parts)}"


@torch.inference_mode()
def greedy(model: Any, prompt: Ints, stop: int, limit: int = 120) -> list[int]:
    """The likeliest tokens one by one, with a KV cache; the model must attend as stock models do."""
    ids, cache, out, name = torch.from_numpy(prompt)[None], None, [], cache_name(model)
    while len(out) < limit:
        said = model(input_ids=ids, use_cache=True, **{name: cache})
        cache = cache_in(said, name)
        out.append(int(said.logits[0, -1].argmax()))
        if out[-1] == stop:
            break
        ids = torch.tensor([[out[-1]]])
    return out


def agreement(model: Any, encoder: Encoder, stop: int, count: int = 12) -> Scores:
    """How often decoding a first answer and scoring it in one forward give the same verdict."""
    out = Scores()
    model.eval()
    made = bundles(QUICK[0])[0]
    packed = pack(encoder, made, 1_000_000)
    _, wholes = hits(model, packed)
    model.set_attn_implementation("sdpa")
    number = 0
    for sample in samples_of(made):
        ids, found = encoder.sample(sample)
        for place in found:
            if out.n < count:
                alone = greedy(model, ids[: place.first], stop) == ids[place.first : place.end].tolist()
                out.add(alone == wholes[number])
            number += 1
    model.set_attn_implementation(models.NAME)
    model.train()
    return out
