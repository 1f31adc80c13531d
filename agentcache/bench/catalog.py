"""A made-up tool catalog of any size, and user turns of a given length: the prompts of the latency benchmark. Pure data, no torch."""

from __future__ import annotations

import string
from collections.abc import Callable, Iterator
from random import Random
from typing import Any

from ..errors import ConfigError

SYSTEM = (
    "You are the back office assistant of a harbour company. Look things up before you answer, change nothing without being asked, "
    "and quote the numbers of documents. Prices are in euros, times are local."
)
_VERBS = ("list", "get", "create", "update", "cancel", "approve", "export", "search", "assign", "verify", "archive", "estimate")
_NOUNS = ("invoice", "shipment", "berth", "crew_member", "contract", "customs_form", "crane", "warehouse_slot", "pilot_order", "complaint")
_PARAMETERS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("reference", {"type": "string", "description": "Two letters, six digits"}),
    ("from_date", {"type": "string", "format": "date", "description": "First day, ISO 8601"}),
    ("status", {"type": "string", "enum": ["open", "waiting", "closed"], "description": "State it must be in"}),
    ("limit", {"type": "integer", "minimum": 1, "maximum": 200, "description": "How many at most"}),
    ("customer", {"type": "string", "description": "Customer number or full name"}),
    ("notify", {"type": "boolean", "description": "Tell the people concerned by mail"}),
    ("quay", {"type": "string", "description": "Quay and place, as N4-12"}),
    ("amount", {"type": "number", "description": "Euros before tax"}),
    ("reason", {"type": "string", "description": "Why, in one sentence"}),
)
_WORDS = (
    "please check the papers of the ship that came in last night and tell me which of them are still open who has to sign them and what "
    "the harbour will charge for the second crane if unloading takes longer than until noon because the crew wants to leave with the tide"
).split()
OPENINGS = string.ascii_uppercase + string.digits + string.ascii_lowercase  # each opens a turn with another token than all others


def tools(count: int, *, seed: int = 7) -> tuple[dict[str, Any], ...]:
    """`count` different function schemas in OpenAI's shape, about 140 tokens each; a longer list starts with the shorter one."""
    most = len(_VERBS) * len(_NOUNS)
    if not 0 <= count <= most:
        raise ConfigError(f"tools={count!r}: the made-up catalog has 0 to {most} of them")
    names = [(verb, noun) for verb in _VERBS for noun in _NOUNS]
    Random(seed).shuffle(names)
    return tuple(_tool(verb, noun, Random(f"{seed} {verb} {noun}")) for verb, noun in names[:count])


def _tool(verb: str, noun: str, draw: Random) -> dict[str, Any]:
    shown = noun.replace("_", " ")
    chosen = draw.sample(_PARAMETERS, 3)
    description = f"{verb.capitalize()} a {shown}. {draw.choice(('Use it', 'Call this'))} with its number."
    schema = {"type": "object", "properties": dict(chosen), "required": [chosen[0][0]]}
    return {"type": "function", "function": {"name": f"{verb}_{noun}", "description": description, "parameters": schema}}


def training_texts() -> Iterator[str]:
    """Texts to train a tokenizer for these prompts: the catalog, the turns, and a recorded task as ordinary text."""
    from importlib.resources import files

    yield SYSTEM
    yield " ".join(_WORDS)
    yield from (repr(tool) for tool in tools(40))
    yield files(__package__).joinpath("museum.json").read_text(encoding="utf-8")


def user_turn(number: int, tokens: int, count: Callable[[str], int]) -> str:
    """A user's text whose prompt tail counts `tokens` (at least, and as few more as possible), opening unlike every other number's.

    count(text) -> tokens of the tail that this text gives.
    """
    if not 0 <= number < len(OPENINGS):
        raise ConfigError(f"turn {number!r}: there are {len(OPENINGS)} different openings; use fewer repeats")
    draw = Random(number)
    words = [OPENINGS[number]]
    while (short := tokens - count(" ".join(words))) > 0:
        words += draw.choices(_WORDS, k=max(1, short // 2))
    while len(words) > 1 and count(" ".join(words[:-1])) >= tokens:
        words.pop()
    return " ".join(words)
