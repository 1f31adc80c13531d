"""What LlamaIndex's instrumentation hears beside its own events. Knows nothing of how it came about."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from llama_index.core.bridge.pydantic import Field
from llama_index.core.instrumentation.events import BaseEvent
from pydantic import SkipValidation

from agentcache import Message


class ReceiptEvent(BaseEvent):
    """The account of one request: model, finish_reason, usage in OpenAI's shape, and the receipt, as in a response's `raw`.

    prompt, tools, answer: as the engine took and gave them, for handlers in this process; what dumps the event leaves them out.
    """

    receipt: dict[str, Any]
    prompt: SkipValidation[Sequence[Message] | str] = Field(default="", exclude=True, repr=False)
    tools: SkipValidation[Sequence[dict[str, Any]]] = Field(default=(), exclude=True, repr=False)
    answer: SkipValidation[Message | str] = Field(default="", exclude=True, repr=False)

    @classmethod
    def class_name(cls) -> str:
        return "AgentCacheReceiptEvent"
