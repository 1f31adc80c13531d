"""The form in which a model family writes thoughts, text and calls. Knows no tokens, and no chat template.

A call form is       trigger open call (joint call)* close      and a call      before NAME between ARGUMENTS after

    Hermes, Qwen     <tool_call>                \\n{"name": "    ", "arguments":     }\\n</tool_call>   joined by \\n<tool_call>
    Mistral          [TOOL_CALLS]  open [       {"name": "      ", "arguments":     }                 joined by ", ", closed by ]
    Llama 3          (none: the whole text)     {"name": "      ", "parameters":    }
    Qwen3-Coder      <tool_call>                \\n<function=   >\\n   arguments as tags     </function>\\n</tool_call>

By its literal text a grammar holds a model to a form. By its response template, of the format that tokenizers bring, the parser reads it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

PROBE_TOOL, PROBE_ARGUMENTS = "zprobe_fn", {"zarg": "zval"}  # a call by which a chat template shows its form
# patterns of its arguments, and of the call in JSON
VALUE = r'\{\s*"zarg"\s*:\s*"zval"\s*\}'
CALL = rf'(?P<before>\{{\s*"name"\s*:\s*"){PROBE_TOOL}(?P<between>"\s*,\s*"(?:arguments|parameters)"\s*:\s*){VALUE}'
CALL_AFTER_SPACE = CALL.replace("(?P<before>", r"(?P<before>\s*")
THINK, THINK_END = "<think>", "</think>"

Fields = Mapping[str, Mapping[str, Any]]

# Response templates as transformers reads them, but for four things. Several fields may hold calls: tool_calls, and the same with a suffix.
# A call in JSON ends with its JSON, whatever its strings say; only then must its close mark follow, where it has one. Calls of one field
# are a list in Python, or in JSON. What opens the field "marks" is the end of a section of calls, and dropped.
PYTHON_CALLS, MARKS = "tool_calls_python", "marks"
WITH_NAME = {"repeats": True, "content": "json", "transform": {"type": "function", "function": "{content}"}}
NAMED = {"repeats": True, "content": "json", "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}}}
FIRST = r"(?<=\A(?:\s*<think>.*?</think>)?\s*)"


def tagged_call(opened: str, closed: str, argument: str) -> dict[str, Any]:
    """Patterns around a call whose arguments are tags, and of one argument."""
    return {**NAMED, "open_pattern": opened, "close_pattern": closed, "content": "xml-inline", "content_args": {"tag_pattern": argument}}


PLAIN: Fields = {
    "tool_calls": {"open": "<tool_call>", "close": "</tool_call>", **WITH_NAME},
    "tool_calls_listed": {"open": "[TOOL_CALLS]", **WITH_NAME},
    "tool_calls_closed": {
        "open": ["<TOOLCALL>", "<tool_calls>", "<|tool_call|>"],
        "close_pattern": r"</TOOLCALL>|</tool_calls>|<\|/tool_call\|>|\Z",
        **WITH_NAME,
    },
    PYTHON_CALLS: {"open": "<|tool_call_start|>", "close": "<|tool_call_end|>", "repeats": True},
    "tool_calls_bare": {"open_pattern": FIRST + r'(?=(?:\[\s*)?\{"name")', "close_pattern": r"\s*\Z", **WITH_NAME},  # all of the text
}


@dataclass(frozen=True, slots=True)
class CallKeys:
    """The keys of a call's name and arguments. Without a name the JSON is the arguments alone."""

    name: str = "name"
    arguments: tuple[str, ...] = ("arguments", "parameters")
    optional: bool = True  # whether a call may have no arguments


@dataclass(frozen=True, slots=True)
class CallForm:
    """One family's form of answers."""

    # literal text, as above; joint: None if only one call can be written
    trigger: str = "<tool_call>"
    open: str = ""
    before: str = '\n{"name": "'
    between: str = '", "arguments": '
    after: str = "}\n</tool_call>"
    joint: str | None = "\n<tool_call>"
    close: str = ""
    known: bool = True  # whether calls are written as the chat template shows them
    # literal text around key and value of each argument; None: arguments are a JSON object
    argument: tuple[str, str, str] | None = None
    # between arguments; None: each may be left out by itself. Their values are JSON, but for texts between these quotes
    comma: str | None = None
    quotes: tuple[str, str] | None = None
    # literal text around a thought, and around text that is no call
    thought: tuple[str, str] = (THINK, THINK_END)
    answer: tuple[str, str] = ("", "")
    # of the response template; without a field of its own for thoughts it reads one that stands first
    fields: Fields = field(default_factory=lambda: PLAIN, compare=False, repr=False)

    @property
    def template(self) -> dict[str, Any]:
        """The response template, by which the form is read."""
        opened, closed = self.thought
        thought = {"open_pattern": r"\A\s*" + re.escape(opened), "close": closed}
        return {"start_anchor_pattern": r"\Z", "fields": {"reasoning_content": thought, **self.fields}}

    @property
    def literals(self) -> tuple[str, ...]:
        """All literal text that a completion of this form may hold."""
        calls = (self.trigger, self.open, self.before, self.between, self.after, self.joint or "", self.close)
        return (*calls, *(self.argument or ()), self.comma or "", *(self.quotes or ()), *self.thought, *self.answer)


HERMES = CallForm()


def spelled(call: str) -> dict[str, Any]:
    """The literal text of a call as a model writes it, with NAME and ARGUMENTS in their places."""
    before, _, rest = call.partition("NAME")
    between, _, after = rest.partition("ARGUMENTS")
    return {"before": before, "between": between, "after": after}


def sectioned(opened: str, closed: str, calls: Mapping[str, Any], fields: Fields | None = None, **more: Any) -> CallForm:
    """A form whose calls stand in a section of their own, between these marks. calls: the field of one of them."""
    calls = {**calls, "open_pattern": rf"(?:{re.escape(opened)}\s*)?{calls['open_pattern']}"}
    return CallForm(opened, close=closed, fields={**(fields or {}), "tool_calls": calls, MARKS: {"open": closed}}, **more)


def load(text: str) -> Any:
    """The JSON value of a text; None if it is none."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None
