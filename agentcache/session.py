"""A session as its user holds it: requests, forks, another name, an archive, the end. Knows no pages."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from .errors import ConfigError, shown
from .process_owned import ProcessOwned
from .sessions import SessionName, Sessions
from .store.tool_group import SESSION, ToolGroup
from .stream import Completion, Stream
from .types import check_name


class Session(SessionName):
    """The name of a conversation, by which any process finds its last turn; `Engine.session` gives it. Never keys and values of its own.

    Safe to use from many threads: of answers to one session that run at once, the last one that is read to its end is the session's.
    """

    def __init__(
        self, engine: ProcessOwned, ask: Callable[..., Stream], sessions: Sessions, name: str, namespace: str, lease_s: float
    ) -> None:
        check_name("name", name)
        check_name("namespace", namespace)
        if not name:
            raise ConfigError(f"name={name!r}: an empty name is no session; give it one, or ask without a session")
        if not isinstance(lease_s, (int, float)) or isinstance(lease_s, bool) or not 0 < lease_s < math.inf:
            raise ConfigError(f"lease_s={shown(lease_s)}: must be a positive number of seconds")
        super().__init__(name, namespace, float(lease_s))
        self._engine, self._ask, self._sessions = engine, ask, sessions

    def stream(self, messages: Any, tools: Any = (), **options: Any) -> Stream:
        """`Engine.stream` for this session and in its namespace; the session goes on from the answer once that is read to its end."""
        return self._ask(messages, tools, session=self, namespace=self.namespace, **options)

    def generate(self, messages: Any, tools: Any = (), **options: Any) -> Completion:
        """The whole answer at once; options as of `stream`."""
        return self.stream(messages, tools, **options).completion

    @property
    def tokens(self) -> int:
        """Length of its chain, under the weights of now; 0 before the first answer, and once its lease is over."""
        known = self._known
        return known.prefix_tokens if known else 0

    @property
    def _known(self) -> ToolGroup | None:
        self._engine.check_open()
        return self._sessions.last(self.namespace, self.name)

    def fork(self, name: str) -> Session:
        """Begin another session where this one is: both share its pages. ConfigError: it has no answer, or the name is taken."""
        self._sessions.copy([replace(self._last(), superseded=())], name, self.lease_s)
        return Session(self._engine, self._ask, self._sessions, name, self.namespace, self.lease_s)

    def rename(self, name: str) -> None:
        """Give it another name. ConfigError: it has no answer, or the name is taken."""
        self._last()
        self._sessions.rename(self.namespace, self.name, name, self.lease_s)
        self.name = name

    def export(self, file: str | Path, *, clear: bool = False) -> int:
        """Write it to a new file, its tokens in clear; returns the bytes. clear: although the store is encrypted. StoreError: it cannot."""
        from .store.admin.archive import export_group

        known, disk = self._last(), self._sessions.flushed()
        if disk is None:
            raise ConfigError(f"session {self.name!r}: only a session in a store on disk can be exported; give the engine a store")
        return export_group(disk.folder, disk.index, known, Path(file), clear=clear)

    def import_archive(self, file: str | Path) -> int:
        """Begin it with a session that was exported; returns its tokens. ConfigError: it has an answer of its own, or there is no disk."""
        from .store.admin.archive import import_group

        if self.tokens or (disk := self._sessions.flushed()) is None:
            raise ConfigError(f"session {self.name!r}: an archive is imported under a name without answers, into a store on disk")
        done = import_group(disk.folder, disk.index, Path(file), name=SESSION + self.name, namespace=self.namespace)
        return done.group.prefix_tokens

    def close(self) -> None:
        """End it: its name and its pins go, and its pages are the first to be evicted. An answer that still runs begins it anew."""
        self._engine.check_open()
        self._sessions.close(self.namespace, self.name)

    def _last(self) -> ToolGroup:
        if (known := self._known) is None:
            raise ConfigError(f"session {self.name!r} in namespace {self.namespace!r} has no answer, or its lease is over: ask first")
        return known
