"""The samples of one bundle as one sequence in which what they share stands once. Knows no model.

    trunk  |---- system, tools ----|                               computed once, causal
    branch                         |- request, call, result ... -| sees its own path only
    branch                         |- another request ... -|

Every token has the position it has in its own sample, and attends to its own path: the same numbers as one sample after another,
for a fraction of the work. Samples that go on from each other (text ReAct) share what they have in common too.
"""

from __future__ import annotations

import os
import re
from collections.abc import Container, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from .world.dialogues import Bundle, Sample, hermes
from .world.react import langchain, llamaindex

Ints = npt.NDArray[np.int64]

# Here all hangs on one token: whether there is something to recall (the sign behind the thing), which sentence, and which tool. So it does
# where a name turns away from others that begin like it (`turnings`).
FORKS = re.compile(r'(?=[.:]\s)|(?<=[.:])(?=\s)|(?<=[.:]\s)|(?<="name": ")')

WORD = re.compile(r"[A-Za-z][a-z]+")  # a part of a word in the vocabulary, of two letters or more


@dataclass(frozen=True, slots=True)
class Place:
    """Where a completion stands in its sample: first and last+1 index, how many tokens decide between tools, the indices of its forks."""

    first: int
    end: int
    pick: int
    forks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Completion:
    """Where one completion stands in the pack: its tokens, and how many of them decide between tools. kind: see Piece.

    forks: those of them where the answer takes one way or another (see FORKS).
    """

    rows: Ints
    pick: int
    kind: str
    dialogue: int
    forks: Ints


@dataclass(frozen=True, slots=True)
class Pack:
    """ids[n], positions[n], parents[n] (the row whose logits predict it), branches (first row, last row + 1, the rows seen before)."""

    ids: Ints
    positions: Ints
    parents: Ints
    trunk: int
    branches: tuple[tuple[int, int, Ints], ...]
    completions: tuple[Completion, ...]

    def targets(self) -> Ints:
        """The rows with loss, each once."""
        return np.unique(np.concatenate([completion.rows for completion in self.completions]))

    def choices(self) -> Ints:
        """Those of them that decide between tools: one or two in a completion, and the last thing to be learnt."""
        return np.unique(np.concatenate([completion.rows[: completion.pick] for completion in self.completions]))

    def forks(self) -> Ints:
        """Those of them where the answer takes one way or another."""
        return np.unique(np.concatenate([completion.forks for completion in self.completions]))


def samples_of(made: Bundle) -> list[Sample]:
    """The bundle's samples in its own style."""
    if made.style == "hermes":
        return hermes(made)
    return llamaindex(made) if made.style == "llamaindex" else langchain(made)


class Encoder:
    """Pieces to ids; what many samples share is tokenised once. Pieces meet at special tokens or where pre-tokens end.

    parts: the ids that are words or parts of words, in small letters.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._backend = tokenizer.backend_tokenizer
        self._known: dict[str, list[int]] = {}
        self.parts = {ids: text.lower() for text, ids in sorted(tokenizer.get_vocab().items()) if WORD.fullmatch(text)}

    def _ids(self, text: str) -> list[int]:
        if text not in self._known:
            if len(self._known) > 64:
                self._known.clear()
            self._known[text] = self._backend.encode(text, add_special_tokens=False).ids
        return self._known[text]

    def size(self, sample: Sample) -> int:
        """Tokens of the first piece: the catalog."""
        return len(self._ids(sample.pieces[0].text))

    def sample(self, sample: Sample, names: Sequence[str] = ()) -> tuple[Ints, list[Place]]:
        """Ids, and where its completions stand. names: of the catalog's tools."""
        ids: list[int] = []
        found: list[Place] = []
        for number, piece in enumerate(sample.pieces):
            if not piece.loss:
                ids += self._ids(piece.text) if number == 0 else self._backend.encode(piece.text, add_special_tokens=False).ids
                continue
            coded = self._backend.encode(piece.text, add_special_tokens=False)
            pick = sum(first < piece.pick for first, _ in coded.offsets)
            after = {match.end() for match in FORKS.finditer(piece.text[: piece.pick])} - {piece.pick}
            apart = turnings(piece.text[: piece.pick], names) if piece.kind == "call" else set()
            decides = (first in after or any(first <= place < last for place in apart) for first, last in coded.offsets)
            forks = tuple(len(ids) + at for at, here in enumerate(decides) if here)
            found.append(Place(len(ids), len(ids) + len(coded.ids), pick, forks))
            ids += coded.ids
        return np.asarray(ids, dtype=np.int64), found


def turnings(text: str, names: Sequence[str]) -> set[int]:
    """Where in `text`, which ends with one of the names, that name turns away from the others: message_a from message_tool at its end."""
    name = max((name for name in names if text.endswith(name)), key=len, default="")
    shared = {len(os.path.commonprefix((name, other))) for other in names if other != name}
    return {len(text) - len(name) + count for count in shared if count < len(name)}


def _common(one: Ints, other: Ints) -> int:
    short = min(len(one), len(other))
    differs = one[:short] != other[:short]
    return int(differs.argmax()) if differs.any() else short


def _until_choice(ids: Ints, found: list[Place], kinds: list[str]) -> tuple[Ints, list[Place]]:
    """A sample up to the name of the last tool that it calls; whole, if it calls none."""
    last = max((number for number, kind in enumerate(kinds) if kind == "call"), default=None)
    if last is None:
        return ids, found
    place = found[last]
    end = place.first + place.pick
    return ids[:end], [*found[:last], replace(place, end=end)]


def pack(encoder: Encoder, made: Bundle, limit: int, short: Container[int] = ()) -> Pack:
    """The bundle's samples in about `limit` tokens behind the catalog: dialogues that would not fit are left out, the first one never.

    short: dialogues that end with the name of the last tool called. Names are the last thing to be learnt, and few of the tokens.
    """
    paths: list[tuple[Ints, Ints]] = []  # the ids of a sample, and the rows where they stand
    rows, trunk = 0, 0
    branches: list[tuple[int, int, Ints]] = []
    completions: list[Completion] = []
    chunks: list[tuple[Ints, Ints, Ints]] = []  # ids, positions, parents
    full: set[int] = set()
    samples = samples_of(made)
    limit += encoder.size(samples[0])
    names = [tool.name for tool in made.tools]
    for sample in samples:
        ids, found = encoder.sample(sample, names)
        kinds = [piece.kind for piece in sample.pieces if piece.loss]
        if sample.dialogue in short:
            ids, found = _until_choice(ids, found, kinds)
        ids = ids[: found[-1].end]
        shared, nearest = max(((_common(ids, other), n) for n, (other, _) in enumerate(paths)), default=(0, -1))
        fresh = len(ids) - shared
        if sample.dialogue in full or (paths and rows + fresh > limit):
            full.add(sample.dialogue)
            continue
        before = paths[nearest][1][:shared] if shared else np.empty(0, np.int64)
        path = np.concatenate([before, np.arange(rows, rows + fresh)])
        if fresh:
            parents = np.concatenate([path[shared - 1 : shared] if shared else np.asarray([-1]), path[shared:-1]])
            chunks.append((ids[shared:], np.arange(shared, len(ids)), parents))
            branches.append((rows, rows + fresh, before))
        for at, kind in zip(found, kinds):
            forks = path[[row for row in at.forks if row < at.end]]
            completions.append(Completion(path[at.first : at.end], at.pick, kind, sample.dialogue, forks))
        trunk = trunk or fresh
        rows += fresh
        paths.append((ids, path))
    joined = [np.concatenate(parts) for parts in zip(*chunks)]
    return Pack(joined[0], joined[1], joined[2], trunk, tuple(branches[1:]), tuple(completions))
