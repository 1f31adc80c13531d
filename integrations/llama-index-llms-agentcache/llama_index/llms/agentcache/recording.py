"""Requests written down as LlamaIndex's instrumentation tells of them, for `agentcache lint` and `calibrate`. Changes no request."""

from __future__ import annotations

import os
from typing import Any

from llama_index.core.bridge.pydantic import PrivateAttr
from llama_index.core.instrumentation import get_dispatcher
from llama_index.core.instrumentation.event_handlers import BaseEventHandler
from llama_index.core.instrumentation.events import BaseEvent

from agentcache import Recorder

from .events import ReceiptEvent


class RequestRecorder(BaseEventHandler):
    """Appends each request of every AgentCacheLLM in this process to a file, prompts and answers in clear, from `with` to its end.

    Prompts are those that the engine took: with a superset's tools, without what a memory left out. conversation: an id that all of them
    share; None has their readers find the conversations by what the requests share.
    """

    _recorder: Recorder = PrivateAttr()
    _conversation: str | None = PrivateAttr()

    def __init__(self, path: str | os.PathLike[str], conversation: str | None = None) -> None:
        super().__init__()
        self._recorder, self._conversation = Recorder(path), conversation

    @classmethod
    def class_name(cls) -> str:
        return "AgentCacheRequestRecorder"

    def handle(self, event: BaseEvent, **kwargs: Any) -> None:
        """Write down a request that has ended."""
        if isinstance(event, ReceiptEvent):
            about = {name: event.receipt[name] for name in ("model", "finish_reason", "usage")}
            self._recorder.record(event.prompt, event.tools, event.answer, conversation=self._conversation, **about)

    def __enter__(self) -> RequestRecorder:
        get_dispatcher().add_event_handler(self)
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Hear no more events and end the file. Closing twice is fine."""
        handlers = get_dispatcher().event_handlers
        handlers[:] = [one for one in handlers if one is not self]
        self._recorder.close()
