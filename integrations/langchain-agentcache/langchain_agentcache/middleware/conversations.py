"""What is remembered of each conversation: the tools that it was shown, and its last prompt. Knows nothing of models.

Conversations are kept apart: what one was shown, another may not be allowed to see.
"""

from __future__ import annotations

import itertools
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from langchain.agents.middleware.types import ModelRequest
from langchain_core.messages import BaseMessage

from .._sessions import place
from .call_site import PromptState

CONVERSATIONS = 256  # remembered; of one that is older, the next step is like its first
Key = tuple[Any, ...]


@dataclass(slots=True)
class Conversation:
    """One conversation, held by the step that found it. Safe to use from many threads."""

    tools: dict[str, Any]
    prompt: PromptState | None = None
    answers: frozenset[str] = frozenset()  # ids of the answers that it goes on from
    lock: threading.Lock = field(default_factory=threading.Lock)

    def shown(self, wanted: Mapping[str, Any], choice: Callable[[], Mapping[str, Any]] = dict) -> dict[str, Any]:
        """The tools of this step's prompt, by name: those of earlier steps keep their place, new ones go last.

        choice: finds the tools among which the wanted ones were chosen; they are shown as well, and asked for where a tool is new.
        """
        with self.lock:
            if wanted.keys() - self.tools.keys():
                self.tools.update({name: tool for name, tool in choice().items() if name not in self.tools})
            self.tools.update(wanted)
            return dict(self.tools)

    def answered(self, answer: Iterable[BaseMessage]) -> None:
        """The conversation goes on from these messages."""
        with self.lock:
            self.answers |= {message.id for message in answer if message.id}

    def before(self, now: PromptState) -> PromptState | None:
        """The prompt of the last step, None if this is the first; the next time it is `now`."""
        with self.lock:
            before, self.prompt = self.prompt, now
            return before


class Conversations:
    """The conversations of one middleware. tools: by name, what each of them is shown from its first step on."""

    def __init__(self, tools: Mapping[str, Any]) -> None:
        self._first = dict(tools)
        self._lock = threading.Lock()
        self._known: OrderedDict[Key, Conversation] = OrderedDict()
        self._numbers = itertools.count(1)

    def find(self, request: ModelRequest[Any]) -> Conversation:
        """The conversation that this step goes on; a new one if it goes on none."""
        state = getattr(request, "state", None) or {}  # what was shortened for the model may stand there
        ids = frozenset(message.id for message in (*request.messages, *state.get("messages", ())) if message.id)
        with self._lock:
            key = self._key(ids, _tenant(request))
            found = self._known.setdefault(key, Conversation(dict(self._first)))
            with found.lock:
                found.answers &= ids
            self._known.move_to_end(key)
            while len(self._known) > CONVERSATIONS:
                self._known.popitem(last=False)
            return found

    def _key(self, ids: frozenset[str], tenant: Key) -> Key:
        """Tenant, agent, place in the graph and thread. Without a thread: those, and a number; a request goes on from the conversation that
        gave one of its answers, however it was trimmed. Other messages say nothing: examples that are shown to everybody have one id.
        """
        here = (*tenant, *place())
        if here[-1]:
            return here
        known = (key for key in reversed(self._known) if key[: len(here)] == here and not ids.isdisjoint(self._known[key].answers))
        return next(known, None) or (*here, str(next(self._numbers)))


def _tenant(request: ModelRequest[Any]) -> Key:
    """Whose conversation it is: users of different namespaces may have one thread id. A server takes the namespace from the key."""
    model, said = getattr(request, "model", None), getattr(request, "model_settings", {})
    return said.get("namespace", getattr(model, "namespace", None)), getattr(model, "api_key", None)
