"""Engines of this process: weights are loaded when first needed, once for all models that name the same. Knows no messages."""

from __future__ import annotations

import json
import os
import threading
import uuid
import weakref
from collections.abc import Callable, Mapping
from typing import Any

from agentcache import Engine

_lock = threading.Lock()
_by_name: dict[str, Engine] = {}
_by_object: weakref.WeakValueDictionary[str, Engine] = weakref.WeakValueDictionary()
_loading: dict[str, threading.Lock] = {}
_identities: weakref.WeakKeyDictionary[Engine, str] = weakref.WeakKeyDictionary()


class Lease:
    """One user of engines that were made here. A copy or a pickle of it is another user, and no reason for two models to differ."""

    __slots__ = ("__weakref__",)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Lease)


_Users = weakref.WeakValueDictionary[int, Lease]  # by their ids
_users: weakref.WeakKeyDictionary[Engine, _Users] = weakref.WeakKeyDictionary()


def _begin_child() -> None:
    """In a forked child no lock is held by a thread of the parent. What is known by name is loaded anew: its engine counts as closed."""
    global _lock
    _lock = threading.Lock()
    _loading.clear()


os.register_at_fork(after_in_child=_begin_child)


def _key(model: Any, options: Mapping[str, Any]) -> str:
    """A token lets in, and changes no weights."""
    return json.dumps([model, sorted((name, value) for name, value in options.items() if name != "token")], default=repr)


def named(model: str, options: Mapping[str, Any], lease: Lease) -> Engine:
    """The process's engine of this model with these options; loads it if it is the first time."""
    key = _key(model, options)
    return _shared(key, lambda: _by_name.get(key), lambda made: _by_name.__setitem__(key, made), lambda: Engine(model, **options), lease)


def of_object(model: Any, tokenizer: Any, options: Mapping[str, Any], lease: Lease) -> Engine:
    """The engine of a loaded model; it goes with the last model of ours that uses it."""
    key = _key([id(model), id(tokenizer)], options)  # both live as long as the engine
    made = lambda: Engine(model, tokenizer, **options)  # noqa: E731
    return _shared(key, lambda: _by_object.get(key), lambda engine: _by_object.__setitem__(key, engine), made, lease)


def _shared(
    key: str, known: Callable[[], Engine | None], keep: Callable[[Engine], None], make: Callable[[], Engine], lease: Lease
) -> Engine:
    def used() -> Engine | None:
        if (engine := known()) is None or engine.closed:
            return None
        _users.setdefault(engine, weakref.WeakValueDictionary())[id(lease)] = lease
        return engine

    with _lock:
        if (engine := used()) is not None:
            return engine
        alone = _loading.setdefault(key, threading.Lock())
    with alone:  # others that want the same wait here; who wants another model does not
        with _lock:
            if (engine := used()) is not None:
                return engine
        engine = make()
        with _lock:
            keep(engine)
            _users[engine] = weakref.WeakValueDictionary({id(lease): lease})
        return engine


def join(engine: Engine, lease: Lease) -> None:
    """Another user of an engine that was made here: a copy of a model has a lease of its own."""
    with _lock:
        if engine in _users:
            _users[engine][id(lease)] = lease


def made_here(engine: Engine) -> bool:
    """Whether the engine was loaded by name or made of a pipeline, not passed by its owner."""
    return engine in _users


def leave(lease: Lease) -> None:
    """End a use; close what nobody uses any more."""
    with _lock:
        left = []
        for engine, users in list(_users.items()):
            if users.pop(id(lease), None) is not None and not users:
                left.append(engine)
        for key in [key for key, engine in _by_name.items() if engine in left]:
            del _by_name[key]
    for engine in left:
        engine.close()


def loaded(model: str, options: Mapping[str, Any]) -> Engine | None:
    """The engine, if it is there already."""
    with _lock:
        return _by_name.get(_key(model, options))


def identity(engine: Engine) -> str:
    """What tells this engine from every other one, of this process or another: a name may stand for several, an id is used again."""
    with _lock:
        return _identities.setdefault(engine, uuid.uuid4().hex)


def close_all() -> None:
    """Close the engines that were loaded by name; the next request loads them again."""
    with _lock:
        engines = list(_by_name.values())
        _by_name.clear()
    for engine in engines:
        engine.close()
