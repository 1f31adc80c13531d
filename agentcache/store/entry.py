"""One cached page as the tree holds it, the match that a look into the tree finds, and the query for the disk. Knows no budgets."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import numpy as np

from ..types import PAGE_TOKENS, Reason
from .keys import Ids, Role, Scope, page_key

if TYPE_CHECKING:  # who only looks into the index needs no torch
    from ..kv import Page
    from ..kv_spec import KVSpec


@dataclass(slots=True, eq=False)
class Entry:
    """One cached page, or the root of a tree (without page and ids)."""

    key: bytes
    scope: Scope
    ids: Ids  # its valid tokens
    page: Page | None
    parent: Entry | None
    numerics: frozenset[str] = frozenset()  # digests of all kernels that had a part in it, those of the pages before it included
    children: dict[bytes, Entry] = field(default_factory=dict)
    pins: int = 0
    role: Role = Role.TURN  # its use
    row: int = 0  # its row in the index of the store on disk, 0 if it is not there
    passing: frozenset[int] = frozenset()  # slots before checkpoints that memory alone has
    rewritten: bool = False  # its row may have other checkpoints than are to be there
    made: float = field(default_factory=time.time)  # time.time()
    counted: tuple[Page, ...] = ()  # pages that the budget counts for it: its own, and those whose memory that shares

    @property
    def place(self) -> int:
        """Number of pages before it."""
        return -1 if self.parent is None else self.parent.place + 1

    @property
    def lineage(self) -> Iterator[Entry]:
        """This page and those that it continues, up to the root of the tree."""
        at: Entry | None = self
        while at is not None:
            yield at
            at = at.parent

    @property
    def first(self) -> int:
        """Number of tokens before it."""
        return self.place * PAGE_TOKENS


class EntryIndex(Protocol):
    """A view of the pages in memory; the tree's lock guards it."""

    def __len__(self) -> int:
        """Count the tokens that it finds."""

    def add(self, entry: Entry) -> None:
        """Take in a page, or the tokens by which one has grown."""

    def drop(self, entry: Entry) -> None:
        """Take a page out."""


@dataclass(frozen=True, slots=True)
class Match:
    """The longest exact prefix: `pages` hold tokens [0, tokens). `missed` and `detail` say why it ends there.

    numerics: digests of the kernels that computed the pages. layers: number of the lowest layers that are those of the request; None: all.
    """

    tokens: int
    pages: tuple[Page, ...]
    missed: Reason
    numerics: frozenset[str] = frozenset()
    detail: str = ""
    entries: tuple[Entry, ...] = ()
    layers: int | None = None


@dataclass(frozen=True, slots=True, eq=False)
class PageQuery:
    """The pages that a prompt asks the disk for."""

    scope: Scope
    ids: Ids
    ms_per_token: float  # cost of computing, 0 if unknown
    spec: KVSpec
    prefix_tokens: int = 0  # length of the prefix that other processes may wait for
    gain_ms: float | None = None  # cost of computing the tokens that want these pages; None: all that memory lacks


def common(a: Ids, b: Ids) -> int:
    """Number of leading ids that are equal."""
    short = min(len(a), len(b))
    differs = a[:short] != b[:short]
    first = int(differs.argmax()) if short else 0
    return first if short and differs[first] else short


def best_child(parent: Entry, ids: Ids) -> tuple[Entry | None, int]:
    """The continuation of `parent` that shares most leading ids with these, and how many."""
    if len(ids) == PAGE_TOKENS and (whole := parent.children.get(page_key(parent.key, ids))) is not None:
        if np.array_equal(whole.ids, ids):
            return whole, PAGE_TOKENS
    best, longest = None, 0
    first = ids[0]
    for child in parent.children.values():
        if child.ids[0] == first and (run := common(child.ids, ids)) > longest:
            best, longest = child, run
            if run == len(ids):
                break
    return best, longest
