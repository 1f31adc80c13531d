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

from .call_site import PromptState

CONVERSATIONS = 256  # remembered; of one that is older, the next step is like its first
Key = tuple[str, ...]


@dataclass(slots=True)
class Conversation:
    """One conversation."""

    tools: dict[str, Any]
    prompt: PromptState | None = None
    messages: frozenset[str] = frozenset()  # ids, of its last step


class Conversations:
    """The conversations of one middleware. tools: by name, what each of them is shown from its first step on."""

    def __init__(self, tools: Mapping[str, Any]) -> None:
        self._first = dict(tools)
        self._lock = threading.Lock()
        self._conversations: OrderedDict[Key, Conversation] = OrderedDict()
        self._numbers = itertools.count(1)

    def shown(
        self, request: ModelRequest[Any], wanted: Mapping[str, Any], choice: Callable[[], Mapping[str, Any]] = dict
    ) -> dict[str, Any]:
        """The tools of this step's prompt, by name: those of earlier steps keep their place, new ones go last.

        choice: finds the tools among which the wanted ones were chosen; they are shown as well, and asked for where a tool is new.
        """
        with self._lock:
            conversation = self._of(request)
            if wanted.keys() - conversation.tools.keys():
                conversation.tools.update({name: tool for name, tool in choice().items() if name not in conversation.tools})
            conversation.tools.update(wanted)
            return dict(conversation.tools)

    def answered(self, request: ModelRequest[Any], answer: Iterable[BaseMessage]) -> None:
        """The conversation goes on from these messages, too."""
        with self._lock:
            conversation = self._of(request)
            conversation.messages |= {message.id for message in answer if message.id}

    def before(self, request: ModelRequest[Any], now: PromptState) -> PromptState | None:
        """The prompt of the conversation's last step, None if this is its first; the next time it is `now`."""
        with self._lock:
            conversation = self._of(request)
            before, conversation.prompt = conversation.prompt, now
            return before

    def _of(self, request: ModelRequest[Any]) -> Conversation:
        state = getattr(request, "state", None) or {}  # what was shortened for the model may stand there
        ids = frozenset(message.id for message in (*request.messages, *state.get("messages", ())) if message.id)
        key = self._key(ids)
        if key is None:
            return Conversation(dict(self._first))
        conversation = self._conversations.setdefault(key, Conversation(dict(self._first)))
        conversation.messages = ids
        self._conversations.move_to_end(key)
        while len(self._conversations) > CONVERSATIONS:
            self._conversations.popitem(last=False)
        return conversation

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
        known = (key for key in reversed(self._conversations) if key[:3] == place and not ids.isdisjoint(self._conversations[key].messages))
        return next(known, None) or (*place, str(next(self._numbers)))
