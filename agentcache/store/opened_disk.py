"""The tier on disk as it is opened: what killed processes were deleting is deleted first."""

from __future__ import annotations

from ..types import StoreOptions
from .disk.disk_tier import DiskTier
from .heard_deletions import Deletions


def open_tier(options: StoreOptions, deletions: Deletions, instead: bool) -> DiskTier:
    """The tier, as `DiskTier` is made. StoreError: it cannot be opened, or not all of that could be deleted."""
    tier = DiskTier(options, deletions, instead=instead)
    try:
        if tier.folder.writable and tier.index.unfinished():
            from .admin.prune import finish

            finish(tier.folder, tier.index)
    except BaseException:
        tier.close()
        raise
    return tier
