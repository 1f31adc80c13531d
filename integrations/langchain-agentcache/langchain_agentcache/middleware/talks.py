"""What is remembered of each conversation: the tools that it was shown, and its last prompt. Knows nothing of models.

Conversations are kept apart: what one was shown, another may not be allowed to see.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from langchain.agents.middleware.types import ModelRequest
from langchain_core.runnables.config import ensure_config

from .culprit import Seen

CONVERSATIONS = 256  # remembered; of one that is older, the next step is like its first
Key = tuple[str, ...]


@dataclass(slots=True)
class Talk:
    """One conversation."""

    tools: dict[str, Any]
    seen: Seen | None = None


class Talks:
    """The conversations of one middleware. tools: by name, what each of them is shown from its first step on."""

    def __init__(self, tools: Mapping[str, Any]) -> None:
        self._first = dict(tools)
        self._lock = threading.Lock()
        self._talks: OrderedDict[Key, Talk] = OrderedDict()

    def shown(self, request: ModelRequest[Any], wanted: Mapping[str, Any]) -> dict[str, Any]:
        """The tools of this step's prompt, by name: those of earlier steps keep their place, new ones go last."""
        with self._lock:
            talk = self._of(request)
            talk.tools.update(wanted)
            return dict(talk.tools)

    def before(self, request: ModelRequest[Any], now: Seen) -> Seen | None:
        """The prompt of the conversation's last step, None if this is its first; the next time it is `now`."""
        with self._lock:
            talk = self._of(request)
            before, talk.seen = talk.seen, now
            return before

    def _of(self, request: ModelRequest[Any]) -> Talk:
        key = _key(request)
        if key is None:
            return Talk(dict(self._first))
        talk = self._talks.setdefault(key, Talk(dict(self._first)))
        self._talks.move_to_end(key)
        while len(self._talks) > CONVERSATIONS:
            self._talks.popitem(last=False)
        return talk


def _key(request: ModelRequest[Any]) -> Key | None:
    """Agent, place in the graph, thread and first message. None if that has no id: another's may lie at its address tomorrow."""
    first = request.messages[0].id if request.messages else None
    if first is None:
        return None
    config = ensure_config()
    said, about = config.get("configurable") or {}, config.get("metadata") or {}
    nodes = [part.partition(":")[0] for part in str(said.get("checkpoint_ns") or "").split("|")]  # behind the ":", the run
    return str(about.get("lc_agent_name") or ""), "|".join(nodes), str(said.get("thread_id") or ""), first
