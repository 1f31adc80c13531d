"""One kept page as the tree holds it, and what a look into the tree finds. Knows no budgets."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ..types import Reason
from .keys import Ids, Role, Scope

if TYPE_CHECKING:  # who only looks into the index needs no torch
    from ..kv import Page


@dataclass(slots=True, eq=False)
class Entry:
    """One kept page, or the root of a tree (without page and ids).

    ids: its valid tokens. numerics: digests of all kernels that had a part in it, those of the pages before it included.
    role: what it serves. row: its row in the index of the store on disk, 0 if it is not there.
    """

    key: bytes
    scope: Scope
    ids: Ids
    page: Page | None
    parent: Entry | None
    numerics: frozenset[str] = frozenset()
    children: dict[bytes, Entry] = field(default_factory=dict)
    pins: int = 0
    role: Role = Role.TURN
    row: int = 0

    @property
    def place(self) -> int:
        """How many pages stand before it."""
        return -1 if self.parent is None else self.parent.place + 1


@dataclass(frozen=True, slots=True)
class Match:
    """The longest exact prefix: `pages` hold tokens [0, tokens). `missed` and `detail` say why it ends there.

    numerics: digests of the kernels that computed the pages.
    """

    tokens: int
    pages: tuple[Page, ...]
    missed: Reason
    numerics: frozenset[str] = frozenset()
    detail: str = ""
    entries: tuple[Entry, ...] = ()


def common(a: Ids, b: Ids) -> int:
    """How many leading ids are equal."""
    short = min(len(a), len(b))
    differs = a[:short] != b[:short]
    first = int(differs.argmax()) if short else 0
    return first if short and differs[first] else short
