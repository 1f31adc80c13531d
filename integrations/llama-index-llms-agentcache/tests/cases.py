"""A tiny engine, tools and texts for the tests of this package. Holds no tests."""

from __future__ import annotations

import functools
import json
from typing import Any

from llama_index.core.base.llms.types import ChatMessage
from llama_index.core.tools import FunctionTool

from agentcache import Engine, toy

VOCAB = 700
TEXTS = (
    "You are the keeper of a lighthouse. You may call functions and you answer in plain sentences.",
    '<tool_call>\n{"name": "tide", "arguments": {"harbour": "Port Averil", "days": 3}}\n</tool_call>',
    'Thought: I need a tool.\nAction: tide\nAction Input: {"harbour": "Port Averil"}\nObservation: high water at 14:05',
    "Thought: I can answer without using any more tools.\nAnswer: High water is at 14:05. <think>\nLet me see.\n</think>",
    "You are designed to help with a variety of tasks, from answering questions to providing summaries to other types of analyses.",
)


@functools.cache
def _tokenizer() -> Any:
    return toy.tokenizer(TEXTS * 4, VOCAB).backend_tokenizer


def tokenizer() -> Any:
    """A ChatML tokenizer with tools; the same ids every time."""
    from transformers import PreTrainedTokenizerFast

    made = PreTrainedTokenizerFast(
        tokenizer_object=_tokenizer(), eos_token="<|im_end|>", pad_token="<|endoftext|>", additional_special_tokens=["<|im_start|>"]
    )
    made.chat_template = toy.CHAT_TEMPLATE
    return made


def tiny(**options: Any) -> Engine:
    """An engine over a random model of two layers."""
    options = {"store": None, "memory_bytes": 256 << 20, **options}
    return Engine(toy.model(VOCAB, layers=2, hidden=128), tokenizer(), **options)


def tide(harbour: str) -> str:
    """When is high water in a harbour?"""
    return f"high water in {harbour} at 14:05"


def wind(harbour: str, hour: int = 12) -> str:
    """The wind in a harbour at an hour of today."""
    return f"{harbour} {hour}h: north, 4"


def tools() -> list[FunctionTool]:
    return [FunctionTool.from_defaults(tide), FunctionTool.from_defaults(wind)]


def call(name: str, **arguments: Any) -> str:
    """A completion that calls a tool, as Hermes-style models write it."""
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def user(text: str) -> ChatMessage:
    return ChatMessage(role="user", content=text)


def system(text: str) -> ChatMessage:
    return ChatMessage(role="system", content=text)
