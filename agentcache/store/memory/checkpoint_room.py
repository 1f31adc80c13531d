"""Room that checkpoints of recurrent layers may take in memory, beside the pages of their conversation. Knows no layers."""

from __future__ import annotations

from collections.abc import Sequence

from ... import checkpoints
from ..entry import Entry
from .prefix_tree import PrefixTree


def thin(tree: PrefixTree, path: Sequence[Entry], prefix_tokens: int) -> None:
    """Keep the last checkpoint of a path's prompts, that of its stable prefix, those in which pins end and those of pages lent to its
    scope; others, newest first, up to SHARE. Memory alone keeps the last LAST behind the prefix, too: the disk would soon remove them."""
    with tree.lock:
        known = [
            (entry, slots, known)
            for entry in reversed(path)
            if entry.page is not None
            for slots, known in sorted(entry.page.checkpoints.items(), reverse=True)
            if slots <= len(entry.ids)
        ]
        if not known:
            return
        behind = [one for one in known[: checkpoints.LAST] if one[0].first + one[1] > prefix_tokens]
        prefix = next((one for one in known if one[0].first + one[1] <= prefix_tokens), None)
        last = next((one for one in known if not one[2].decoded), known[0])
        lent = [entry for entry in path if entry.scope.precision != "exact" and entry.page is not None and tree.eviction.shared(entry)]
        vital = [one for one in known if one in (last, prefix) or one[0] in lent or one[1] in tree.pins.ends(one[0])]
        share = checkpoints.SHARE
        room = sum(entry.page.spec.page_bytes for entry in path if entry.page) * share / (1 - share)
        room -= sum(one.bytes for _, _, one in vital)
        for found in known:
            entry, slots, checkpoint = found
            assert entry.page is not None
            lasts = found in vital
            if not lasts:
                room -= checkpoint.bytes
                lasts = room >= 0
            if not lasts and found not in behind:
                entry.page.checkpoints = {at: one for at, one in entry.page.checkpoints.items() if at != slots}
                tree.eviction.replace(entry, entry.page)
            if lasts is (slots in entry.passing):
                entry.passing ^= {slots}
                entry.rewritten = True  # it is offered to the disk again
