"""The endless stream of training packs: which size, style and length, by how much has been trained. Knows no model.

Pack number i is a function of the seed, i, and how many tokens went before it: a resumed stream goes on as if never interrupted.
"""

from __future__ import annotations

import math
import multiprocessing
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from queue import Full
from typing import Any

from .packing import Encoder, Pack, pack
from .world.dialogues import bundle
from .world.world import USUAL, VAGUE, World

DIALOGUES = 18  # drawn for a catalog; as many are taken as fit
FEW = 7  # tools of a small catalog at most
STYLES = ("hermes", "langchain", "langchain text", "llamaindex")


@dataclass(frozen=True, slots=True)
class Stage:
    """until: in millions of tokens. tools, least: the most and fewest in a catalog. tail: tokens of dialogues behind it. batch: of a step.

    context: the share of dialogues that depend on what stands before. Copying has to be learnt before it can be of use to them.
    plain: the share of bundles in which comparing words is enough. That has to be learnt before anything can make it hard.
    bare: the share, further, with synonyms and near-duplicates but without rules: what has to be learnt next.
    vague: the share of names that do not say what a tool does: what is told by a description only has to be found by it.
    short: the share of dialogues that end with the name of a tool: twice the choices in the same time, once arguments are known.
    often: by how much more often than usual scenarios are drawn: what goes wrong most, at last.
    small: the share, further, of catalogs of few tools, with half a tail in Hermes' style: where one tool that is misread is one in five.
    pieces: whether words without meaning are made of the vocabulary's pieces too. A piece that was never to be said is not copied.
    """

    until: float
    tools: int
    tail: int
    batch: int
    context: float
    plain: float
    bare: float
    short: float
    styles: Mapping[str, float]
    vague: float = VAGUE
    least: int = 2
    often: Mapping[str, float] = field(default_factory=lambda: USUAL)
    small: float = 0.0
    pieces: bool = False


HERMES = {"hermes": 1.0}
SOME = {"hermes": 0.76, "langchain": 0.08, "langchain text": 0.06, "llamaindex": 0.1}
ALL = {"hermes": 0.68, "langchain": 0.11, "langchain text": 0.07, "llamaindex": 0.14}
MORE = {"hermes": 0.6, "langchain": 0.14, "langchain text": 0.1, "llamaindex": 0.16}
TEXT = {"hermes": 0.5, "langchain": 0.14, "langchain text": 0.08, "llamaindex": 0.28}
LAST = {"hermes": 0.54, "langchain": 0.16, "langchain text": 0.1, "llamaindex": 0.2}
WEAK = {"glossary": 2.2, "service": 1.8, "like": 1.3, "above": 1.3, "reading only": 2.0, "forbidden": 1.5, "fallback": 2.0}
WEAK |= {"condition": 1.5, "chain": 1.2, "decline": 1.35, "default": 0.7, "today": 0.7, "facts": 0.8, "deprecated": 0.8}
LEFT = WEAK | {"like": 1.8, "above": 2.0, "service": 2.2, "siblings": 1.5, "silent": 2.5, "decline": 1.3, "default": 0.5, "today": 0.5}
LEFT |= {"deprecated": 1.2, "sum": 1.2, "facts": 1.2, "condition": 1.3, "fallback": 1.5, "forbidden": 1.2, "reading only": 1.0}
CLEAR = LEFT | {"deprecated": 1.8, "facts": 2.0, "sum": 1.5, "chain": 1.4, "condition": 1.4, "siblings": 1.6, "decline": 1.35}
NAMES = CLEAR | {"fallback": 2.5, "like": 2.4, "above": 2.2, "service": 2.8, "glossary": 2.4, "siblings": 1.8, "decline": 1.3}
NEARER = NAMES | {"above": 4.0, "like": 3.6, "deprecated": 2.2, "decline": 1.6, "preferred": 1.4}
STAGES = (
    Stage(1, 4, 600, 3000, 0.1, 1.0, 0.0, 0.0, HERMES),
    Stage(2, 8, 800, 4000, 0.3, 0.6, 0.0, 0.0, SOME),
    Stage(4, 8, 900, 5000, 0.4, 0.3, 0.3, 0.0, SOME),
    Stage(8, 10, 900, 5000, 0.4, 0.12, 0.48, 0.0, SOME),
    Stage(11, 8, 900, 5000, 0.6, 0.05, 0.3, 0.6, ALL),
    Stage(15, 20, 1100, 6000, 0.55, 0.05, 0.3, 0.6, ALL),
    Stage(24.2, 20, 1100, 6000, 0.55, 0.05, 0.25, 0.3, ALL),
    Stage(30, 24, 1200, 6000, 0.6, 0.0, 0.25, 0.3, MORE, 0.12),
    Stage(34, 36, 1300, 6000, 0.6, 0.0, 0.2, 0.3, MORE, 0.12),
    Stage(38.9, 50, 1400, 8000, 0.55, 0.0, 0.1, 0.3, MORE, 0.1),
    Stage(58.8, 50, 1800, 8000, 0.5, 0.0, 0.1, 0.45, MORE, 0.1, 4),
    Stage(63.4, 50, 2600, 9000, 0.55, 0.0, 0.1, 0.55, MORE, 0.1, 4),
    Stage(69.5, 50, 2600, 9000, 0.6, 0.0, 0.08, 0.5, LAST, 0.1, 4, WEAK),
    Stage(78.8, 50, 2600, 9000, 0.62, 0.0, 0.06, 0.4, LAST, 0.1, 4, LEFT),
    Stage(88.4, 50, 2600, 9000, 0.62, 0.0, 0.06, 0.35, TEXT, 0.1, 4, CLEAR),
    Stage(90.8, 50, 2600, 9000, 0.62, 0.0, 0.06, 0.35, TEXT, 0.1, 4, CLEAR | {"fallback": 4.0}),
    Stage(105.2, 50, 2600, 9000, 0.6, 0.0, 0.06, 0.35, TEXT, 0.3, 4, NAMES),
    Stage(121.6, 50, 2600, 9000, 0.6, 0.0, 0.06, 0.35, TEXT, 0.3, 4, NAMES, 0.3, True),
    Stage(math.inf, 50, 2600, 9000, 0.6, 0.0, 0.06, 0.45, TEXT, 0.3, 4, NEARER, 0.35, True),
)


def stage_at(tokens: int) -> Stage:
    return next(stage for stage in STAGES if tokens < stage.until * 1e6)


def counted(encoder: Encoder, seed: int, packs: int) -> tuple[Counter[int], Counter[int]]:
    """How often packs without pieces hold each id, and have it said."""
    read: Counter[int] = Counter()
    said: Counter[int] = Counter()
    before = int(max(stage.until for stage in STAGES if not stage.pieces) * 1e6) - 1
    for number in range(packs):
        made = draw(encoder, seed, number, before)
        read.update(made.ids.tolist())
        said.update(made.ids[made.targets()].tolist())
    return read, said


def unsaid(encoder: Encoder, seed: int) -> list[str]:
    """The parts of words that packs hardly say. Never said, one is not copied either: another is taken for it."""
    _, said = counted(encoder, seed, 100)
    return sorted({part for token, part in encoder.parts.items() if said[token] < 3})


def unread(encoder: Encoder, seed: int) -> list[int]:
    """The ids of parts of words that packs without pieces do not hold at all."""
    read, _ = counted(encoder, seed, 400)
    return sorted(token for token in encoder.parts if not read[token])


def draw(encoder: Encoder, seed: int, number: int, tokens: int, pieces: Sequence[str] = ()) -> Pack:
    """Pack `number` of the stream, when `tokens` went before it. pieces: see World; only a stage that wants them takes them."""
    stage = stage_at(tokens)
    world = World(f"{seed} {number} plan")
    style = world.rng.choices(list(stage.styles), list(stage.styles.values()))[0]
    few = stage.small > 0 and world.chance(stage.small)
    most = FEW if few else stage.tools
    size = round(math.exp(world.rng.uniform(math.log(stage.least), math.log(most + 0.49))))
    if style == "llamaindex":
        size = min(size, 16)  # its schemas are twice as long
    at = world.rng.random()
    plain, bare = at < stage.plain, at < stage.plain + stage.bare
    count = DIALOGUES * (2 if stage.short else 1)
    drawn = {"context_share": stage.context, "plain": plain, "bare": bare, "vague": stage.vague, "often": stage.often}
    drawn["pieces"] = pieces if stage.pieces else ()
    tail = stage.tail // 2 if few and style == "hermes" else stage.tail
    made = bundle(f"{seed} {number}", style, size, count, **drawn)
    return pack(encoder, made, tail, {dialogue for dialogue in range(count) if world.rng.random() < stage.short})


def packs(tokenizer: Any, seed: int, number: int = 0, tokens: int = 0) -> Iterator[Pack]:
    """The stream from pack `number` on."""
    encoder = Encoder(tokenizer)
    pieces: list[str] | None = None
    while True:
        if pieces is None and stage_at(tokens).pieces:
            pieces = unsaid(encoder, seed)
        made = draw(encoder, seed, number, tokens, pieces or ())
        yield made
        number += 1
        tokens += len(made.ids)


def _work(folder: str, seed: int, number: int, tokens: int, queue: Any) -> None:
    """The worker process: fills the queue until it is killed or its parent is gone."""
    from .tokenizer import load

    parent = os.getppid()
    for made in packs(load(Path(folder)), seed, number, tokens):
        while True:
            try:
                queue.put(made, timeout=5)
                break
            except Full:
                if os.getppid() != parent:
                    os._exit(0)  # nobody will ever take what is queued


def start(folder: Path, seed: int, number: int, tokens: int, ahead: int = 12) -> Any:
    """A queue that a process of its own fills, `ahead` packs ahead of what is taken."""
    context = multiprocessing.get_context("spawn")
    queue = context.Queue(ahead)
    context.Process(target=_work, args=(str(folder), seed, number, tokens, queue), daemon=True).start()
    return queue
