"""A process of its own that asks, forks, forgets and writes as it is told, a line of JSON each. Holds no tests."""

from __future__ import annotations

import json
import sys
from typing import Any

from agentcache import Engine, StoreOptions
from agentcache.types import Message
from tests.engines import decode


def obey(model: str, store: str) -> None:
    """Answer one line after the other until there are none."""
    with Engine(model, store=StoreOptions(store, check_one_in=0, refuse_slow=False, turns="int8")) as running:
        said: Any
        print(json.dumps({"ready": True}), flush=True)
        for line in sys.stdin:
            told = json.loads(line)
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
            print(json.dumps(said), flush=True)
