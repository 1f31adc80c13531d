"""What LlamaIndex's instrumentation hears beside its own events. Knows nothing of how it came about."""

from __future__ import annotations

from typing import Any

from llama_index.core.instrumentation.events import BaseEvent


class ReceiptEvent(BaseEvent):
    """The account of one request: model, finish_reason, usage in OpenAI's shape, and the receipt, as in a response's `raw`."""

    receipt: dict[str, Any]

    @classmethod
    def class_name(cls) -> str:
        return "AgentCacheReceiptEvent"
