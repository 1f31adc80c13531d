"""Deletion on purpose of pages in all tiers, and of what belongs to them: by namespace, by age, or one tool group. Knows no engine."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace

from ..errors import ConfigError, shown
from ..types import Forgotten, check_name
from .deletion import Deletion
from .store import Store
from .tool_group import ToolGroup


def delete(store: Store, namespace: str | None, group: str | None, older_than: float | None, held: Sequence[ToolGroup] = ()) -> Forgotten:
    """Delete pages and what belongs to them, in memory and on disk, pinned ones too: of a namespace and an age, or of one tool group.

    held: manifests of the tool groups that are held here. ConfigError: nothing is named, or what cannot be. StoreError: not all of it
    could be deleted on disk.
    """
    if namespace is None and group is None and older_than is None:
        raise ConfigError("forget(): name what is to be forgotten: namespace=, group=, session= or older_than= (0 for everything)")
    for setting, value in (("namespace", namespace), ("group", group)):
        if value is not None:
            check_name(setting, value)
    number = isinstance(older_than, (int, float)) and not isinstance(older_than, bool)
    if older_than is not None and (group is not None or not number or not 0 <= older_than < math.inf):
        raise ConfigError(f"older_than={shown(older_than)}: must be seconds as a number, at least 0, and no group beside it")
    store.apply_deletions()  # another folder may have taken the place of one that was deleted
    older_than = older_than or None  # 0: everything, what a clock that was set back calls made later, too
    namespace = "default" if group is not None and namespace is None else namespace
    known: dict[tuple[str, ...], ToolGroup] = {}
    for one in (*(store.disk.index.groups() if store.disk else ()), *held):  # another process may have recorded a later answer
        name = one.name, one.namespace, one.fingerprint
        known[name] = one.merge(known.get(name))
    named = [one for one in known.values() if one.namespace == namespace and group in (one.name, one.documents)]
    others = [one for one in known.values() if one not in named]
    before = None if older_than is None else time.time() - older_than
    wanted = [Deletion(namespace, before)] if group is None else [Deletion.of_group(one, others, forced=True) for one in named]
    with ExitStack() as under_way:
        pages = size = 0
        for one in wanted:
            with store.deletions.lock:
                more, bytes = store.drop_deleted(one)
                if store.disk is None:
                    store.deletions.add(replace(one, generation=store.deletions.generation + 1))
                else:  # until it is heard, what runs on pages that are gone would admit them anew
                    under_way.enter_context(store.deletions.under_way(one))
            pages, size = pages + more, size + bytes
        found = Forgotten(pages, size, groups=tuple(one.name for one in named))
        if store.disk is None:
            return found
        from .admin.prune import prune  # only a store on disk loads it

        for which in (None,) if group is None else named:
            done = prune(store.disk.folder, store.disk.index, namespace=namespace, older_than=older_than, group=which, force=True)
            groups = found.groups if which else tuple(done.groups)
            found = Forgotten(pages, size, found.pages + done.pages, found.bytes + done.bytes, groups, found.splices + done.splices)
        store.apply_deletions()
        return found
