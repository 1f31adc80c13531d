"""Texts and questions of `agentcache bench rag` and `calibrate`: the ones that come with it, or files as of HotpotQA and MultihopRAG.

Knows no model.
A retriever by words (BM25) ranks the passages of each question, where the file does not say which they are.
"""

from __future__ import annotations

import gzip
import json
import math
import random
import re
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ...errors import ConfigError
from ...traces import Call
from ...types import Message
from .shifts import DOCUMENTS, Case

SHIPPED = Path(__file__).parent / "towns.json.gz"
SYSTEM = "You are a helpful assistant."
K1, B = 1.2, 0.75  # BM25 (Robertson and Zaragoza, 2009)


@dataclass(frozen=True, slots=True)
class Question:
    """A question, and the passages that were found for it, the best first."""

    text: str
    begin: str  # how its answer begins, given to the model; empty: it answers freely
    answers: tuple[str, ...]  # right answers; none are known if empty
    found: tuple[str, ...]


class Retriever:
    """BM25 over words."""

    def __init__(self, passages: Sequence[str]) -> None:
        self.passages = passages
        self._counts = [Counter(_words(text)) for text in passages]
        self._mean = sum(sum(each.values()) for each in self._counts) / len(passages) or 1.0  # some have no words
        among = Counter(word for each in self._counts for word in each)
        self._weight = {word: math.log(1 + (len(passages) - n + 0.5) / (n + 0.5)) for word, n in among.items()}

    def best(self, query: str, top: int) -> tuple[str, ...]:
        """The passages that fit best, the best first."""
        asked = [word for word in _words(query) if word in self._weight]

        def score(number: int) -> float:
            counts = self._counts[number]
            norm = K1 * (1 - B + B * sum(counts.values()) / self._mean)
            return sum(self._weight[word] * counts[word] * (K1 + 1) / (counts[word] + norm) for word in asked)

        ranked = sorted(range(len(self.passages)), key=lambda number: (-score(number), number))
        return tuple(self.passages[number] for number in ranked[:top])


def _words(text: str) -> list[str]:
    return re.findall(r"\w+", text.lower())


def questions(corpus: Path | None, asked: Path | None, top: int) -> list[Question]:
    """All questions in order. corpus: of asked questions without passages of their own; None for both: those that come with it."""
    if corpus is None and asked is None:
        return _shipped(top)
    if asked is None:
        raise ConfigError(f"corpus={str(corpus)!r}: name a file of questions with --questions too")
    listed = _read(asked)
    texts = [_text(one) for one in _read(corpus)] if corpus else []
    if not texts and not all(isinstance(one, dict) and one.get("context") for one in listed):
        raise ConfigError(f"questions={str(asked)!r}: they name no passages (context): name a file of them with --corpus")
    retriever = Retriever(texts) if texts else None
    return [_question(one, retriever, top) for one in listed]


def in_orders(asked: Sequence[Question], orders: int) -> list[Question]:
    """Each question with its passages as they were found, then all of them again with these in another order."""
    rng = random.Random(0)
    mixed = (replace(one, found=tuple(rng.sample(one.found, len(one.found)))) for _ in range(orders - 1) for one in asked)
    return [*asked, *mixed]


def prompt(passages: str, ranks: str, question: str) -> list[Message]:
    """Passages first; what changes with each question after them."""
    tail = f"{ranks}\n{question}" if ranks else question
    return [Message("system", SYSTEM), Message("user", f"{passages}\n\n{tail}")]


def cases(asked: Sequence[Question], count: int, families: Collection[str]) -> list[Case]:
    """At most `count` cases of each of these families, of questions from all over the file. Each has other neighbours in the file."""
    some = [one for one in asked if len(one.found) > 1]
    found: dict[str, list[Case]] = {family: [] for family in DOCUMENTS if family in families}
    for number, one in enumerate(some[:: max(1, len(some) // count)][:count]):
        rng, own = random.Random(number), list(one.found)
        before = next((each for each in (*some[number + 1 :], *some) if each.text != one.text), one)
        others = max(([text for text in each.found if text not in own] for each in rng.sample(some, min(len(some), 16))), key=len)
        mixed, half = rng.sample(own, len(own)), len(own) // 2
        if mixed == own:
            mixed.reverse()
        earlier = {DOCUMENTS[0]: [mixed]}
        if others:
            earlier[DOCUMENTS[1]] = [rng.sample(few, len(few)) for few in ([*own[:half], *others[::2]], [*own[half:], *others[1::2]])]
        for family, orders in earlier.items():
            if family in found:
                calls = tuple(_call(texts, before) for texts in orders)
                found[family].append(Case(family, calls, _call(own, one)))
    return [case for each in found.values() for case in each]


def _call(texts: Sequence[str], asked: Question) -> Call:
    messages = [{"role": one.role, "content": one.content} for one in prompt("\n\n".join(texts), "", asked.text)]
    return Call(messages, (), {"role": "assistant", "content": asked.answers[0] if asked.answers else ""})


def _shipped(top: int) -> list[Question]:
    """The conversations, each over the passages of one town: each question is searched for with the one before it."""
    held, found = json.loads(gzip.decompress(SHIPPED.read_bytes())), []
    for talk in held["conversations"]:
        start, stop = talk["passages"]
        retriever, before = Retriever(held["passages"][start:stop]), ""
        for text, begin, answer, _ in talk["questions"]:
            found.append(Question(text, begin, (answer,), retriever.best(f"{text} {before}", top)))
            before = text
    return found


def _read(path: Path) -> list[Any]:
    found: Any = []
    at = ""
    try:
        if path.suffix == ".jsonl":
            for number, line in enumerate(path.read_bytes().splitlines(), 1):  # of text, it would cut at other characters, too
                at = f", line {number}"
                found += [json.loads(line)] if line.strip() else []
        else:
            found = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{str(path)!r}{at}: cannot be read as JSON: {error}") from error
    if not isinstance(found, list) or not found:
        raise ConfigError(f"{str(path)!r}: must hold a list that is not empty")
    return found


def _text(one: Any) -> str:
    """A passage: a text, an object with title and body (MultihopRAG) or text, or a title with its sentences (HotpotQA)."""
    title, body = None, one
    if isinstance(one, dict):
        title, body = one.get("title"), one.get("body") or one.get("text") or one.get("content")
    elif isinstance(one, list | tuple) and len(one) == 2:
        title, body = one
        body = "".join(body) if isinstance(body, list) and all(isinstance(part, str) for part in body) else body
    if not isinstance(body, str) or not (title or body.strip()):
        raise ConfigError(f"passage {one!r:.100}: must be a text that is not empty, or an object with `body` or `text`")
    return f"{title}\n{body}" if title else body


def _question(one: Any, retriever: Retriever | None, top: int) -> Question:
    """A question of HotpotQA (question, answer, context of titles and sentences) or MultihopRAG (query, answer)."""
    text = one.get("question") or one.get("query") if isinstance(one, dict) else None
    if not isinstance(text, str):
        raise ConfigError(f"question {one!r:.100}: must be an object with `question` or `query`")
    answer = one.get("answer")
    answers = tuple(map(str, answer if isinstance(answer, list) else () if answer is None else (answer,)))
    if context := one.get("context"):
        if isinstance(context, dict):  # HotpotQA as the Hub has it
            context = list(zip(context.get("title", ()), context.get("sentences", ()), strict=False))
        if not isinstance(context, list):
            raise ConfigError(f"question {text!r:.100}: context={context!r:.100} must be a list of passages")
        return Question(text, "", answers, tuple(map(_text, context[:top])))
    assert retriever is not None
    return Question(text, "", answers, retriever.best(text, top))
