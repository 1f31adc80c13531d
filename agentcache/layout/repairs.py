"""Chat templates changed so that prompts keep their beginning: opt-in, by name, equal to the original for a prompt of one turn.

tools-first     tools before the first user message, and the system text with it, where the template puts them before the last one
keep-thinking   reasoning of earlier user turns stays where it was shown, where the template drops it at the next user message

From the second user turn on, the model sees them there.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from datetime import datetime

from ..errors import ConfigError

_ASKS = re.compile(r"""strftime_now\(\s*(?P<quote>["'])(?P<format>.*?)(?P=quote)\s*\)""")


def _tools_first(source: str) -> str:
    if not re.search(r"user_messages\s*\[\s*-1\s*\]|users\s*\[\s*-1\s*\]", source):
        return source
    first = re.sub(r"\b(user_messages|users)\s*\[\s*-1\s*\]", r"\1[0]", source)
    return re.sub(r"loop\.last(?=\s+and\s+system\w*\s+is\s+defined)", "loop.first", first)


def _keep_thinking(source: str) -> str:
    return re.sub(r"(\bset\s+ns\.last_(?:query|user)_index\s*=\s*)[\w.]+", r"\g<1>-1", source)


REPAIRS = {"tools-first": _tools_first, "keep-thinking": _keep_thinking}


def applicable(source: str) -> list[str]:
    """Settings of LayoutOptions for this template: names of repairs that change it, and "date" where it prints one."""
    found = [name for name, rewrite in REPAIRS.items() if rewrite(source) != source]
    return found + ["date"] * ("strftime_now" in source or "date_string" in source)


def repaired(source: str, names: Sequence[str], date: str | None = None) -> str:
    """The source with these repairs, and with this day for today; ConfigError for a name that is unknown or has nothing to do here."""
    for name in names:
        if name not in REPAIRS:
            raise ConfigError(f"repairs={tuple(names)!r}: {name!r} is unknown; there are {sorted(REPAIRS)!r}")
        changed = REPAIRS[name](source)
        if changed == source:
            raise ConfigError(f"repairs={tuple(names)!r}: {name!r} finds nothing to change in this chat template; leave it out")
        source = changed
    if date is not None:
        day = datetime.fromisoformat(date)
        source = _ASKS.sub(lambda asks: repr(day.strftime(asks["format"])), source)
    return source
