"""Asks a model, by real greedy decoding through the engine, and reads its calls. Knows of right answers only their shape."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, TypeVar

from ..engine import Engine
from ..errors import ContextOverflowError
from ..types import Reuse, Sampling
from .quality_cases import Case, Episode
from .quality_score import Said, right

ANSWER_TOKENS = 200
_ACTION = re.compile(r"^Action\s*:[ \t]*(.*?)\s*$\n\s*Action Input\s*:[ \t]*(.*)", re.DOTALL | re.MULTILINE)
_END = re.compile(r"^(?:Final )?Answer\s*:\s*(.*)", re.DOTALL | re.MULTILINE)

Ask = Callable[[Case], Said]
T = TypeVar("T")
R = TypeVar("R")


def asking(engine: Engine, reuse: Reuse | None = None) -> Ask:
    """A function that puts a case to an engine."""
    calm = Sampling(max_tokens=ANSWER_TOKENS)
    until = Sampling(max_tokens=ANSWER_TOKENS, stop=("\nObservation:",))

    def ask(case: Case) -> Said:
        prompt = case.prompt if isinstance(case.prompt, str) else list(case.prompt)
        try:
            sampling = calm if case.style == "hermes" else until
            done = engine.generate(prompt, case.tools, sampling=sampling, reuse=reuse, volatile=case.volatile)
        except ContextOverflowError:
            return Said(None, {}, failed="too long")
        said = react(done.text, case) if case.style != "hermes" else hermes(done.message)
        return replace(said, ids=tuple(done.ids), cached=done.receipt.cached_tokens)

    return ask


def hermes(message: Any) -> Said:
    """The first call of a message, in the model family's own form."""
    if not message.tool_calls:
        return Said(None, {}, message.content or "")
    call = message.tool_calls[0]
    return Said(call.name, call.arguments if isinstance(call.arguments, Mapping) else {}, message.content or "")


def react(text: str, case: Case) -> Said:
    """The action or the answer of a text ReAct step, as the agents' parsers read it. A bare input is the only argument's value."""
    found, end = _ACTION.search(text), _END.search(text)
    if found is None or (end is not None and end.start() < found.start()):
        return Said(None, {}, end.group(1).strip() if end else text, failed="" if end else "neither action nor answer")
    given = found.group(2).strip()
    try:
        value = json.loads(given)
    except ValueError:
        value = given.strip('"')
    if not isinstance(value, Mapping):
        wanted = case.right.arguments if case.right is not None else {}
        name, expected = next(iter(wanted.items()), ("", ""))
        value = {name: given if isinstance(expected, str) and not isinstance(value, str) else value} if len(wanted) == 1 else {"": given}
    return Said(found.group(1), value, text)


def all_of(ask: Callable[[T], R], items: Sequence[T], agents: int, say: Callable[[int], None]) -> list[R]:
    """The answer to every case, or of every episode, `agents` at a time."""
    out = []
    with ThreadPoolExecutor(agents) as pool:
        for number, said in enumerate(pool.map(ask, items), 1):
            out.append(said)
            say(number)
    return out


def solved(ask: Ask, episode: Episode) -> int:
    """Count the steps that were right before the first wrong one: all, if it is solved."""
    for number, step in enumerate(episode.steps):
        if not right(step, ask(step)):
            return number
    return len(episode.steps)
