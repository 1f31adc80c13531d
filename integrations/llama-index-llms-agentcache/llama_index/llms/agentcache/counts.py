"""Counts of answers as LlamaIndex's instrumentation tells of them. Changes no request."""

from __future__ import annotations

from typing import Any

from llama_index.core.bridge.pydantic import PrivateAttr
from llama_index.core.instrumentation.event_handlers import BaseEventHandler
from llama_index.core.instrumentation.events import BaseEvent

from agentcache import AnswerCounts

from .events import ReceiptEvent


class CacheCounts(BaseEventHandler):
    """Counts of the answers of every AgentCacheLLM in this process, by family and label, as `Engine.stats` has them.

    `get_dispatcher().add_event_handler(CacheCounts())` begins. At most four refusals of an answer are counted: more are no part of `raw`.
    """

    _answers: AnswerCounts = PrivateAttr(default_factory=AnswerCounts)

    @classmethod
    def class_name(cls) -> str:
        return "AgentCacheCounts"

    @property
    def stats(self) -> dict[str, dict[str, float]]:
        """The counts so far."""
        return self._answers.stats(None)

    def handle(self, event: BaseEvent, **kwargs: Any) -> None:
        """Count an answer that has ended."""
        if isinstance(event, ReceiptEvent):
            told = event.receipt
            written = {"completion_tokens": told["usage"]["completion_tokens"], "finish_reason": told["finish_reason"]}
            self._answers.count({**told["receipt"], **written})
