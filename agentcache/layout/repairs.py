"""Chat templates changed so that prompts keep their beginning: opt-in, by name, equal to the original for a prompt of one turn.

tools-first     tools before the first user message, and the system text with it, where the template puts them before the last one
keep-thinking   reasoning of earlier user turns stays where it was shown, where the template drops it at the next user message
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime

from ..errors import ConfigError

_ASKS = re.compile(r"""strftime_now\(\s*(?P<quote>["'])(?P<format>.*?)(?P=quote)\s*\)""")


@dataclass(frozen=True, slots=True)
class Repair:
    """rewrite: a template's source to the repaired one, unchanged where it does not apply. differs: what a model sees otherwise."""

    rewrite: Callable[[str], str]
    differs: str


def _tools_first(source: str) -> str:
    if not re.search(r"user_messages\s*\[\s*-1\s*\]|users\s*\[\s*-1\s*\]", source):
        return source
    first = re.sub(r"\b(user_messages|users)\s*\[\s*-1\s*\]", r"\1[0]", source)
    return re.sub(r"loop\.last(?=\s+and\s+system\w*\s+is\s+defined)", "loop.first", first)


def _keep_thinking(source: str) -> str:
    return re.sub(r"(\bset\s+ns\.last_(?:query|user)_index\s*=\s*)[\w.]+", r"\g<1>-1", source)


REPAIRS = {
    "tools-first": Repair(
        _tools_first,
        "from the second user turn on, tools and system text stand before the first user message instead of the last one",
    ),
    "keep-thinking": Repair(_keep_thinking, "from the second user turn on, the model still sees its reasoning of earlier turns"),
}


def applicable(source: str) -> list[str]:
    """Settings of LayoutOptions for this template: names of repairs that change it, and "date" where it prints one."""
    found = [name for name, repair in REPAIRS.items() if repair.rewrite(source) != source]
    return found + ["date"] * ("strftime_now" in source or "date_string" in source)


def date_variables(date: str) -> dict[str, str]:
    """Names that templates read for the day, where they do not ask for it: Llama's."""
    return {"date_string": datetime.fromisoformat(date).strftime("%d %b %Y")}


def repaired(source: str, names: Sequence[str], date: str | None = None) -> str:
    """The source with these repairs, and with this day for today; ConfigError for a name that is unknown or has nothing to do here."""
    for name in names:
        if name not in REPAIRS:
            raise ConfigError(f"repairs={tuple(names)!r}: {name!r} is unknown; there are {sorted(REPAIRS)!r}")
        changed = REPAIRS[name].rewrite(source)
        if changed == source:
            raise ConfigError(f"repairs={tuple(names)!r}: {name!r} finds nothing to change in this chat template; leave it out")
        source = changed
    if date is not None:
        day = datetime.fromisoformat(date)
        source = _ASKS.sub(lambda asks: repr(day.strftime(asks["format"])), source)
    return source
