"""A process of its own that asks, forks, forgets and writes as it is told. Holds no tests."""

from __future__ import annotations

from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from agentcache import Engine, StoreOptions
from agentcache.types import Message
from tests.engines import decode


def obey(parent: Connection, model: Path, store: Path) -> None:
    """Answer one thing after the other until it is killed."""
    with Engine(str(model), store=StoreOptions(store, check_one_in=0, refuse_slow=False, turns="int8")) as running:
        said: Any
        parent.send("ready")
        while True:
            told = parent.recv()
            what, namespace = told.pop("do"), told.pop("namespace", "default")
            if what == "ask":
                messages = [Message(**one) for one in told.pop("messages")]
                done = running.generate(messages, namespace=namespace, sampling=decode(4), **told)
                layout = running.renderer.render(messages, namespace=namespace)
                receipt = done.receipt
                said = {
                    "text": done.text,
                    "cached": receipt.cached_tokens,
                    "spliced": receipt.spliced_tokens,
                    "ids": [*layout.ids, *done.ids],
                }
            elif what == "fork":
                said = {"tokens": running.session(told["session"], namespace=namespace).fork(told["name"]).tokens}
            elif what == "forget":
                gone = running.forget(namespace=namespace, **told)
                said = {"pages": gone.pages, "memory_pages": gone.memory_pages}
            else:
                said = {"written": running.flush(30.0)}
            parent.send(said)
