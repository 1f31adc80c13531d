"""Exact pages in memory, lent to a request that accepts fewer bits: it goes on from them with those. Never the other way round."""

from __future__ import annotations

from dataclasses import replace

from .keys import Ids, Scope
from .memory.prefix_tree import PrefixTree


def lend(tree: PrefixTree, scope: Scope, ids: Ids) -> None:
    """Drop changed pages of a prompt, so that they are read again for this very request; let a scope of fewer bits hold the exact ones,
    where memory has more of those. Their memory is shared."""
    tree.drop_changed(scope, ids)
    if scope.precision == "exact":
        return
    with tree.lock:
        exact = tree.match(replace(scope, precision="exact"), ids, peek=True)
        if exact.tokens <= tree.match(scope, ids, peek=True).tokens:
            return
        path = tree.admit(scope, ids[: exact.tokens], exact.pages, exact.numerics, evict=False)
        for entry, own in zip(path, exact.entries, strict=True):
            entry.role, entry.made = max(entry.role, own.role), min(entry.made, own.made)
            if entry.key == own.key:
                entry.row = entry.row or own.row
