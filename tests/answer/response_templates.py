"""Response templates in the shapes that model families bring, answers in them, and a tokenizer that brings one. Holds no tests."""

from __future__ import annotations

from typing import Any

from tests import models

ANCHOR = "<|im_start|>assistant\n"
FUNCTION = {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}}
# What model families bring, in their shapes: calls as one JSON object; as tags in tags; behind channels; as a list.
OBJECT: dict[str, Any] = {
    "defaults": {"role": "assistant"},
    "start_anchor": ANCHOR,
    "fields": {
        "reasoning_content": {"open": "<think>", "close_pattern": r"</think>\s*", "content": "text"},
        "tool_calls": {
            "open": "<tool_call>",
            "close_pattern": r"</tool_call>\s*",
            "repeats": True,
            "content": "json",
            "transform": {"type": "function", "function": "{content}"},
        },
        "content": {"close_pattern": r"<\|im_end\|>\s*", "content": "text"},
    },
}
TAGS: dict[str, Any] = {
    "defaults": {"role": "assistant"},
    "start_anchor": ANCHOR,
    "fields": {
        "thinking": {"open": "<think>", "close": "</think>", "content": "text"},
        "tool_calls": {
            "open_pattern": r"<tool_call>\s*<function=(?P<name>\w+)>",
            "close": "</tool_call>",
            "repeats": True,
            "content": "xml-inline",
            "content_args": {"tag_pattern": r"<parameter=(?P<key>\w+)>\s*(?P<value>.*?)\s*</parameter>"},
            "transform": FUNCTION,
        },
    },
}
CHANNELS: dict[str, Any] = {
    "defaults": {"role": "assistant"},
    "start_anchor": ANCHOR,
    "fields": {
        "thinking": {"open": "<|channel|>analysis<|message|>", "close": "<|end|>", "repeats": True, "join": "\n"},
        "content": {"open": "<|channel|>final<|message|>", "close": "<|end|>"},
        "tool_calls": {
            "open_pattern": r"<\|channel\|>commentary to=functions\.(?P<name>\w+).*?<\|message\|>",
            "close": "<|call|>",
            "repeats": True,
            "content": "json",
            "transform": FUNCTION,
        },
    },
}
TAGGED = "<tool_call>\n<function=tide>\n<parameter=harbour>\n7\n</parameter>\n<parameter=days>\n3\n</parameter>\n</function>\n</tool_call>"
CHANNEL = '<|channel|>commentary to=functions.tide <|constrain|>json<|message|>{"harbour": "Averil"}'


def tokenizer(template: dict[str, Any] | None) -> Any:
    made = models.toy_tokenizer()
    made.response_template = template
    return made
