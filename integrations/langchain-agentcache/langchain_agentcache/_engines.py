"""Engines of this process: weights are loaded when first needed, once for all chat models that name the same. Knows no messages."""

from __future__ import annotations

import json
import threading
import uuid
import weakref
from collections.abc import Callable, Mapping
from typing import Any

from agentcache import Engine

_lock = threading.Lock()
_by_name: dict[str, Engine] = {}
_by_object: weakref.WeakValueDictionary[tuple[int, str], Engine] = weakref.WeakValueDictionary()
_loading: dict[str, threading.Lock] = {}
_identities: weakref.WeakKeyDictionary[Engine, str] = weakref.WeakKeyDictionary()


def named(model: str, options: Mapping[str, Any]) -> Engine:
    """The process's engine of this model with these options; loads it if it is the first time."""
    key = json.dumps([model, sorted(options.items())], default=repr)
    return _shared(key, lambda: _by_name.get(key), lambda made: _by_name.__setitem__(key, made), lambda: Engine(model, **options))


def of_object(model: Any, tokenizer: Any, options: Mapping[str, Any]) -> Engine:
    """The engine of a loaded model; it goes with the last chat model that uses it."""
    key = (id(model), json.dumps(sorted(options.items()), default=repr))
    made = lambda: Engine(model, tokenizer, **options)  # noqa: E731
    return _shared(repr(key), lambda: _by_object.get(key), lambda engine: _by_object.__setitem__(key, engine), made)


def _shared(key: str, known: Callable[[], Engine | None], keep: Callable[[Engine], None], make: Callable[[], Engine]) -> Engine:
    with _lock:
        if (engine := known()) is not None and not engine._closed:
            return engine
        alone = _loading.setdefault(key, threading.Lock())
    with alone:  # others that want the same wait here; who wants another model does not
        with _lock:
            if (engine := known()) is not None and not engine._closed:
                return engine
        engine = make()
        with _lock:
            keep(engine)
        return engine


def loaded(model: str, options: Mapping[str, Any]) -> Engine | None:
    """The engine, if it is there already."""
    with _lock:
        return _by_name.get(json.dumps([model, sorted(options.items())], default=repr))


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
