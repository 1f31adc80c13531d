"""A deletion on purpose: which pages, sequences and tool groups it covers. Knows no contents, and deletes nothing."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, get_args

from ..types import Precision
from .keys import Ids, Scope, chain, page_key

if TYPE_CHECKING:
    from .entry import Entry
    from .tool_group import ToolGroup


@dataclass(frozen=True, slots=True)
class Deletion:
    """A deletion on purpose."""

    namespace: str | None = None  # None: all
    before: float | None = None  # only pages made earlier, by time.time(); None: all
    forced: bool = True  # pinned pages too
    group: str | None = None  # name of a tool group: only its pages and their continuations
    fingerprint: str = ""  # of the group; "+" and a digest, without a group: all that this adapter computed
    keys: tuple[bytes, ...] = ()  # the group's pages but for those that other groups share
    prefix_tokens: int = 0  # end of the last of them
    generation: int = 0  # its number in the store

    @classmethod
    def of_group(cls, group: ToolGroup, others: Iterable[ToolGroup], forced: bool) -> Deletion:
        """Deletion of one tool group. others: the groups that stay."""
        shared = {key for other in others if other.fingerprint == group.fingerprint and group.spares(other) for key in other.page_keys}
        keys = tuple(bytes.fromhex(key) for key in (*group.page_keys, *group.superseded) if key not in shared)
        return cls(group.namespace, None, forced, group.name, group.fingerprint, keys, group.prefix_tokens)

    def covers(self, namespace: str, made: float) -> bool:
        """Tell whether everything of this namespace and age is deleted."""
        whole = self.group is None and not self.fingerprint
        return whole and self.namespace in (None, namespace) and (self.before is None or made < self.before)

    def covers_adapter(self, scope: Scope) -> bool:
        """Tell whether everything that the adapter of this scope computed in its namespace is deleted."""
        if self.group is not None or not self.fingerprint:
            return False
        return scope.fingerprint.endswith(self.fingerprint) and self.namespace in (None, scope.namespace)

    def covers_moved_text(self, scope: Scope) -> bool:
        """Tell whether pages of this scope may hold segments of the deleted tool group or session, or follow them."""
        return bool(self.group) and scope.precision not in get_args(Precision) and scope.namespace == self.namespace

    def covers_group(self, group: ToolGroup) -> bool:
        """Tell whether this tool group or session is deleted: by its name, with its namespace and age, or with its adapter."""
        named = self.group == group.name and self.namespace == group.namespace
        return named or self.covers(group.namespace, group.created) or self.covers_adapter(group.scope)

    def covers_sequence(self, scope: Scope, ids: Ids, made: float) -> bool:
        """Tell whether a page of this sequence is deleted."""
        if self.group is None:
            return self.covers(scope.namespace, made) or self.covers_adapter(scope)
        if self.covers_moved_text(scope):
            return True
        if not self.keys or (scope.namespace, scope.fingerprint) != (self.namespace, self.fingerprint):
            return False
        pages = {*chain(scope.root, ids[: self.prefix_tokens]), *chain(scope.root, ids)}
        return not pages.isdisjoint(self.keys)

    def covers_page(self, entry: Entry) -> bool:
        """Tell whether this page in memory is deleted, apart from those that it continues (`covers_lineage`)."""
        if entry.parent is None or (entry.pins and not self.forced):
            return False
        if self.group is None:
            return self.covers(entry.scope.namespace, entry.made) or self.covers_adapter(entry.scope)
        if self.covers_moved_text(entry.scope):
            return True
        if (entry.scope.namespace, entry.scope.fingerprint) != (self.namespace, self.fingerprint):
            return False
        if entry.key in self.keys:
            return True
        inside = self.prefix_tokens - entry.first
        return 0 < inside < len(entry.ids) and page_key(entry.parent.key, entry.ids[:inside]) in self.keys

    def covers_lineage(self, entry: Entry) -> bool:
        """Tell whether this page, or one that it continues, is deleted."""
        return any(map(self.covers_page, entry.lineage))


EVERYTHING = Deletion()  # for a process that has missed some
