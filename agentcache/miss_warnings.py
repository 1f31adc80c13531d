"""Warnings about missed prefixes, in words: for packages that know where to warn. Knows no engine and no framework."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Mapping
from typing import Any

LAST = 4  # requests within which a cause that should be seldom comes twice


class MissWarnings:
    """The texts of warnings about `Receipt.missed`. Safe to use from many threads.

    seldom: causes, such as a history that is shortened much at once, that are as they should be unless they come twice in a row.
    """

    def __init__(self, seldom: Collection[str] = ()) -> None:
        self._seldom = frozenset(seldom)
        self._causes: deque[str] = deque(maxlen=LAST)  # "" for a request without one

    def text(self, missed: Mapping[str, Any] | None) -> str | None:
        """The warning of a request, given `missed` as its receipt's `as_dict` has it, with a "hint" if there is one; None for nothing."""
        cause = missed["cause"] if missed else ""
        self._causes.append(cause)  # no lock, which a forked child might find held: appending and counting are one step each
        often = self._causes.count(cause)
        if missed is None or (cause in self._seldom and often < 2):
            return None
        cures = [missed[name] for name in ("fix", "hint") if missed.get(name) not in (None, "", "(redacted)")]
        said = f"{missed['cost_tokens']} prompt tokens were computed again: {cause} ({missed['writer']})"
        return " ".join(f"{each.rstrip('.')}." for each in (said, *cures))
