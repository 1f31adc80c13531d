"""Words, things and values drawn from one random generator, split by hashing. Knows nothing of tools, requests or tokens.

    words    nouns and made-up words          what tools are about
    tools    pairs of an action and a thing   what a tool does: a known word in a new pair is an unseen tool
    values   names, ids, numbers, dates ...   what requests fill in

Each is drawn from its own split (train | validation | test), so "unseen words" and "unseen tools" are facts, not luck.
"""

from __future__ import annotations

import functools
import hashlib
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TypeVar

from .words import ACTIONS, CHOICES, CODAS, MODIFIERS, NOUNS, ONSETS, PEOPLE, PLACES, SCRIPTS, VOWELS

T = TypeVar("T")
Value = str | int | float | bool
SPLITS = ("train", "validation", "test")
_SHARES = {"words": (0.84, 0.92), "tools": (0.8, 0.9), "values": (0.8, 0.9)}


@functools.lru_cache(maxsize=200_000)
def split_of(kind: str, text: str) -> str:
    """The split that a word, a tool's meaning or a value belongs to, the same everywhere and forever."""
    digest = hashlib.blake2b(f"{kind}:{text.lower()}".encode(), digest_size=8).digest()
    at = int.from_bytes(digest, "big") / 2**64
    first, second = _SHARES[kind]
    return SPLITS[0 if at < first else 1 if at < second else 2]


@dataclass(frozen=True, slots=True)
class Source:
    """Which split each of the three comes from."""

    words: str = "train"
    tools: str = "train"
    values: str = "train"


TRAIN = Source()


def sources(held: str) -> dict[str, Source]:
    """The four splits of the evaluation; `held` is "validation" or "test"."""
    return {
        "seen": TRAIN,
        "held-out requests": Source(values=held),
        "unseen tools": Source(tools=held, values=held),
        "unseen words": Source(words=held, tools=held, values=held),
    }


VAGUE = 0.06
USUAL: Mapping[str, float] = MappingProxyType({})
GLUED = 0.6  # of the words without meaning are made of pieces, where there are any
LETTERS = "bcdfghjklmnprstvwz"
KNOWN = frozenset(" ".join((*NOUNS, *MODIFIERS, *(verb for verbs in ACTIONS.values() for verb in verbs))).split())


class World:
    """Everything that chance decides about words and values. plain: actions go by one word, and tools have nothing in common.

    vague: the share of ordinary tools whose names do not say what they do. often: by how much more often than usual a scenario, a
    request that no tool fits ("decline") or a system prompt that wants no words before a call ("silent") is drawn. pieces: what a
    tokenizer cuts words into; most of the words without meaning are then made of them, so that no piece is left unlearnt.
    """

    def __init__(
        self,
        seed: str,
        source: Source = TRAIN,
        plain: bool = False,
        vague: float = VAGUE,
        often: Mapping[str, float] = USUAL,
        pieces: Sequence[str] = (),
    ) -> None:
        self.rng = random.Random(seed)
        self.source = source
        self.plain = plain
        self.vague = vague
        self.often = often
        self.pieces = [piece for piece in pieces if piece not in KNOWN]

    def pick(self, options: Sequence[T]) -> T:
        return options[int(self.rng.random() * len(options))]

    def chance(self, share: float) -> bool:
        return self.rng.random() < share

    def number(self, first: int, last: int) -> int:
        return first + int(self.rng.random() * (last + 1 - first))

    def sample(self, options: Sequence[T], count: int) -> list[T]:
        return self.rng.sample(options, count)

    def shuffled(self, options: Sequence[T]) -> list[T]:
        out = list(options)
        self.rng.shuffle(out)
        return out

    def _held(self, kind: str, wanted: str, draw: Callable[[], T]) -> T:
        while True:
            drawn = draw()
            if split_of(kind, str(drawn)) == wanted:
                return drawn

    # words

    def _syllables(self, count: int) -> str:
        if self.pieces and self.chance(GLUED):
            return self._glued()
        return "".join(self.pick(ONSETS) + self.pick(VOWELS) for _ in range(count)) + self.pick(CODAS)

    def _glued(self) -> str:
        """A piece, mostly with another, a letter before it or a syllable behind it, that is no word with a meaning."""
        while True:
            word = self.pick(self.pieces)
            word = self.pick((word, word + self.pick(self.pieces), self.pick(LETTERS) + word, word + self.pick(ONSETS) + self.pick(VOWELS)))
            if 3 <= len(word) <= 12 and word not in KNOWN:
                return word

    def made_up(self) -> str:
        """A word without meaning, of the words' split."""
        return self._held("words", self.source.words, lambda: self._syllables(2 if self.chance(0.7) else 3))

    def noun(self) -> str:
        return self._held("words", self.source.words, lambda: self.pick(NOUNS))

    def head(self) -> str:
        return self.made_up() if self.chance(0.35) else self.noun()

    def thing(self, head: str = "") -> str:
        """What a tool is about: one or two words."""
        head = head or self.head()
        at = self.rng.random()
        if at < 0.5:
            return head
        if at < 0.8:
            return f"{self.pick(MODIFIERS)} {head}"
        return f"{head} {self.noun()}"

    # values

    def value(self, draw: Callable[[], T]) -> T:
        """What `draw` gives, of the values' split."""
        return self._held("values", self.source.values, draw)

    def identifier(self) -> str:
        return self.value(self._identifier)

    def _identifier(self) -> str:
        letters = "".join(self.pick("ABCDEFGHJKLMNPQRSTUVWXYZ") for _ in range(self.number(1, 2)))
        digits = str(self.number(10, 9999))
        at = self.rng.random()
        if at < 0.5:
            return f"{letters}-{digits}"
        if at < 0.7:
            return f"{letters}{digits}"
        if at < 0.85:
            return f"{self._syllables(1)}{self.pick('-_')}{digits}"
        return digits + letters.lower()

    def person(self) -> str:
        return self.value(self._person)

    def _person(self) -> str:
        if self.chance(0.02):
            return self._foreign()
        return self.pick(PEOPLE) if self.chance(0.4) else self._syllables(2).capitalize()

    def full_name(self) -> str:
        return self.value(lambda: f"{self.pick(PEOPLE)} {self._syllables(2).capitalize()}")

    def place(self) -> str:
        return self.value(lambda: self.pick(PLACES) if self.chance(0.5) else self._syllables(2).capitalize())

    def date(self) -> str:
        return self.value(lambda: f"{self.number(2019, 2031)}-{self.number(1, 12):02d}-{self.number(1, 28):02d}")

    def email(self) -> str:
        return self.value(lambda: f"{self._syllables(2)}@{self._syllables(2)}.{self.pick(('com', 'org', 'net'))}")

    def integer(self) -> int:
        return self.value(lambda: self.number(2, 99) if self.chance(0.7) else self.number(100, 9999))

    def decimal(self) -> int | float:
        return self.integer() if self.chance(0.5) else self.value(lambda: self.number(11, 9999) / 10)

    def phrase(self) -> str:
        return self.value(lambda: " ".join(self._word() for _ in range(self.pick((1, 1, 2, 2, 3, 3, 4, 6)))))

    def _word(self) -> str:
        if self.chance(0.02):
            return self._foreign()
        return self._syllables(2) if self.chance(0.4) else self.noun()

    def _foreign(self) -> str:
        """A word in letters of another script: copied byte by byte."""
        return "".join(self.pick(self.pick(SCRIPTS)) for _ in range(self.number(2, 4)))

    def choice(self, name: str) -> str:
        return self.pick(CHOICES[name])
