"""What is remembered of each conversation: the tools that it was shown, and its last prompt. Knows nothing of models.

Conversations are kept apart: what one was shown, another may not be allowed to see.
"""

from __future__ import annotations

import itertools
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from langchain.agents.middleware.types import ModelRequest
from langchain_core.messages import BaseMessage
from langchain_core.runnables.config import ensure_config

from .culprit import Seen

CONVERSATIONS = 256  # remembered; of one that is older, the next step is like its first
Key = tuple[str, ...]


@dataclass(slots=True)
class Talk:
    """One conversation."""

    tools: dict[str, Any]
    seen: Seen | None = None
    messages: frozenset[str] = frozenset()  # ids, of its last step


class Talks:
    """The conversations of one middleware. tools: by name, what each of them is shown from its first step on."""

    def __init__(self, tools: Mapping[str, Any]) -> None:
        self._first = dict(tools)
        self._lock = threading.Lock()
        self._talks: OrderedDict[Key, Talk] = OrderedDict()
        self._numbers = itertools.count(1)

    def shown(
        self, request: ModelRequest[Any], wanted: Mapping[str, Any], choice: Callable[[], Mapping[str, Any]] = dict
    ) -> dict[str, Any]:
        """The tools of this step's prompt, by name: those of earlier steps keep their place, new ones go last.

        choice: finds the tools among which the wanted ones were chosen; they are shown as well, and asked for where a tool is new.
        """
        with self._lock:
            talk = self._of(request)
            if wanted.keys() - talk.tools.keys():
                talk.tools.update({name: tool for name, tool in choice().items() if name not in talk.tools})
            talk.tools.update(wanted)
            return dict(talk.tools)

    def answered(self, request: ModelRequest[Any], answer: Iterable[BaseMessage]) -> None:
        """The conversation goes on from these messages, too."""
        with self._lock:
            talk = self._of(request)
            talk.messages |= {message.id for message in answer if message.id}

    def before(self, request: ModelRequest[Any], now: Seen) -> Seen | None:
        """The prompt of the conversation's last step, None if this is its first; the next time it is `now`."""
        with self._lock:
            talk = self._of(request)
            before, talk.seen = talk.seen, now
            return before

    def _of(self, request: ModelRequest[Any]) -> Talk:
        state = getattr(request, "state", None) or {}  # what was shortened for the model may stand there
        ids = frozenset(message.id for message in (*request.messages, *state.get("messages", ())) if message.id)
        key = self._key(ids)
        if key is None:
            return Talk(dict(self._first))
        talk = self._talks.setdefault(key, Talk(dict(self._first)))
        talk.messages = ids
        self._talks.move_to_end(key)
        while len(self._talks) > CONVERSATIONS:
            self._talks.popitem(last=False)
        return talk

    def _key(self, ids: frozenset[str]) -> Key | None:
        """Agent, place in the graph and thread. Without a thread: those, and a number; a request goes on from the one with which it shares
        a message, however it was trimmed. None if no message has an id: another's may lie at its address tomorrow.
        """
        config = ensure_config()
        said, about = config.get("configurable") or {}, config.get("metadata") or {}
        nodes = [part.partition(":")[0] for part in str(said.get("checkpoint_ns") or "").split("|")]  # behind the ":", the run
        place = str(about.get("lc_agent_name") or ""), "|".join(nodes), str(said.get("thread_id") or "")
        if place[2]:
            return place
        if not ids:
            return None
        known = (key for key in reversed(self._talks) if key[:3] == place and not ids.isdisjoint(self._talks[key].messages))
        return next(known, None) or (*place, str(next(self._numbers)))
