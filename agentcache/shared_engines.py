"""Engines that several users share: one per model and options in a process, closed with its last user. Knows no requests and no models."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping
from typing import Any
from weakref import WeakKeyDictionary, WeakSet, WeakValueDictionary

_lock = threading.Lock()
_engines: WeakValueDictionary[str, Any] = WeakValueDictionary()  # by model and options
_users: WeakKeyDictionary[Any, WeakSet[EngineLease]] = WeakKeyDictionary()
_turns: WeakValueDictionary[str, threading.Lock] = WeakValueDictionary()  # to load: one at a time, of each


def _begin_child() -> None:
    """In a forked child no lock is held by a thread of the parent; the parent's engines count as closed there."""
    global _lock
    _lock = threading.Lock()
    _turns.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_begin_child)


class EngineLease:
    """A user of shared engines and of timed pins: both stay until its `release`, or until it is collected.

    It serves again after that. A copy or a pickle of it is another user, so far of nothing. Release it, or use it as a context manager.
    """

    __slots__ = ("__weakref__", "_engines", "_pins")

    def __init__(self) -> None:
        self._engines: set[Any] = set()
        self._pins: set[Callable[[EngineLease], None]] = set()

    def join(self, engine: Any) -> bool:
        """Use an engine that others share; False for one that is not shared, which its owner closes."""
        with _lock:
            if engine not in _users:
                return False
            self._use(engine)
        return True

    @staticmethod
    def is_shared(engine: Any) -> bool:
        """Tell whether `Engine.shared` made this engine."""
        return engine in _users

    def _use(self, engine: Any) -> None:
        self._engines.add(engine)
        _users.setdefault(engine, WeakSet()).add(self)

    def add_pins(self, drop: Callable[[EngineLease], None]) -> None:
        """Note pins that end with this lease: `drop` unpins them."""
        self._pins.add(drop)

    def release(self) -> None:
        """Unpin what only this user wants pinned, and close the engines that only it uses. Releasing twice is fine."""
        pins, self._pins = self._pins, set()
        for drop in pins:
            drop(self)
        with _lock:
            unused = []
            for engine in self._engines:
                _users[engine].discard(self)
                if not _users[engine]:
                    unused.append(engine)
            self._engines.clear()
            for key in [key for key, engine in _engines.items() if engine in unused]:
                del _engines[key]
        for engine in unused:
            engine.close()

    def __reduce__(self) -> tuple[type[EngineLease], tuple[()]]:
        return type(self), ()

    def __enter__(self) -> EngineLease:
        return self

    def __exit__(self, *exc: object) -> None:
        self.release()


def shared_engine(make: Callable[..., Any], model: Any, tokenizer: Any, lease: EngineLease, options: Mapping[str, Any]) -> Any:
    """The engine of this process for a model and its options, used by the lease; made for the first lease."""
    key = _key(make, model, tokenizer, options)
    if (engine := _joined(key, lease)) is not None:
        return engine
    with _lock:
        turn = _turns.setdefault(key, threading.Lock())
    with turn:  # others that want the same wait here; who wants another model does not
        if (engine := _joined(key, lease)) is not None:
            return engine
        made = make(model, tokenizer, **options)
        with _lock:
            _engines[key] = made
            lease._use(made)
        return made


def _joined(key: str, lease: EngineLease) -> Any:
    with _lock:
        engine = _engines.get(key)
        if engine is None or engine.closed:
            return None
        lease._use(engine)
        return engine


def _key(make: Callable[..., Any], model: Any, tokenizer: Any, options: Mapping[str, Any]) -> str:
    """The model and options of an engine as a key. No other object has an id while its engine lives; a token changes no weights."""
    weights = os.fspath(model) if isinstance(model, (str, os.PathLike)) else id(model)
    plain = {name: os.fspath(value) if isinstance(value, os.PathLike) else value for name, value in options.items() if name != "token"}
    plain["dtype"] = str(options.get("dtype")).removeprefix("torch.")
    return repr((make, weights, id(tokenizer), sorted(plain.items())))
