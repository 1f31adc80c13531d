"""The forms in which model families write thoughts and calls, a row each. Knows no tokens.

A call form is       trigger open call (joint call)* close      and a call      before NAME between ARGUMENTS after

    Hermes, Qwen     <tool_call>                \\n{"name": "    ", "arguments":     }\\n</tool_call>   joined by \\n<tool_call>
    Mistral          [TOOL_CALLS]  open [       {"name": "      ", "arguments":     }                 joined by ", ", closed by ]
    Llama 3          (none: the whole text)     {"name": "      ", "parameters":    }
    Qwen3-Coder      <tool_call>                \\n<function=   >\\n   parameters as tags    </function>\\n</tool_call>

A row has the literal text around names and arguments, by which grammars hold a model to the form, and a response template, as tokenizers
bring them, by which the parser reads it. Which row a model follows is read off a probe call that its chat template renders.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

THINK, THINK_END = "<think>", "</think>"
PROBE_TOOL, PROBE_ARGUMENTS = "zprobe_fn", {"zarg": "zval"}

Fields = Mapping[str, Mapping[str, Any]]

# Response templates as transformers reads them, but for two things. Several fields may hold calls: those called tool_calls and a suffix.
# A call in JSON ends with its JSON, whatever its strings say; only then must its close mark follow, where it has one.
_THOUGHT = {"open_pattern": r"\A\s*<think>", "close": THINK_END}  # one further on is spoken of
_FIRST = r"(?<=\A(?:\s*<think>.*?</think>)?\s*)"
_JSON = {"repeats": True, "content": "json", "transform": {"type": "function", "function": "{content}"}}
_TAGS = {"tag_pattern": r"<parameter=(?P<key>[^>\n]+)>\n?(?P<value>.*?)\n?</parameter>"}

PLAIN: Fields = {
    "reasoning_content": _THOUGHT,
    "tool_calls": {"open": "<tool_call>", "close": "</tool_call>", **_JSON},
    "tool_calls_listed": {"open": "[TOOL_CALLS]", **_JSON},
    "tool_calls_bare": {"open_pattern": _FIRST + r'(?=\{"name")', "close_pattern": r"\s*\Z", **_JSON},  # without a mark: all of the text
}
TAGGED: Fields = {
    "reasoning_content": _THOUGHT,
    "tool_calls": {
        "open_pattern": r"<tool_call>\s*<function=(?P<name>[^>\n]+)>",
        "close_pattern": r"</function>\s*</tool_call>",
        "repeats": True,
        "content": "xml-inline",
        "content_args": _TAGS,
        "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}},
    },
}


@dataclass(frozen=True, slots=True)
class CallForm:
    """One family's form of calls."""

    # literal text, as above; joint: None if there is only ever one call
    trigger: str = "<tool_call>"
    open: str = ""
    before: str = '\n{"name": "'
    between: str = '", "arguments": '
    after: str = "}\n</tool_call>"
    joint: str | None = "\n<tool_call>"
    close: str = ""
    # whether it was read off the chat template
    known: bool = True
    # literal text around key and value of each argument; None: arguments are a JSON object
    argument: tuple[str, str, str] | None = None
    # what the parser reads
    fields: Fields = field(default_factory=lambda: PLAIN, compare=False, repr=False)


_NAME = r'\{\s*"name"\s*:\s*"'
_ARGUMENTS = PROBE_TOOL + r'(?P<between>"\s*,\s*"(?:arguments|parameters)"\s*:\s*)\{\s*"zarg"\s*:\s*"zval"\s*\}'
HERMES = CallForm()
TAGS = CallForm(
    before="\n<function=",
    between=">\n",
    after="</function>\n</tool_call>",
    argument=("<parameter=", ">\n", "\n</parameter>\n"),
    fields=TAGGED,
)
# how a chat template of the family shows the probe call: groups are the literal text that differs from template to template
ROWS: tuple[tuple[str, CallForm], ...] = (
    (rf"<tool_call>\s*<function={PROBE_TOOL}>\s*<parameter=zarg>\s*zval\s*</parameter>\s*</function>\s*</tool_call>", TAGS),
    (rf"<tool_call>(?P<before>\s*{_NAME}){_ARGUMENTS}(?P<after>\s*\}}\s*</tool_call>)", HERMES),
    (rf"\[TOOL_CALLS\](?P<open>\s*\[\s*)(?P<before>{_NAME}){_ARGUMENTS}", CallForm("[TOOL_CALLS]", after="}", joint=", ", close="]")),
    (rf"(?P<before>{_NAME}){_ARGUMENTS}(?P<after>\s*\}})", CallForm("", joint=None)),
)


def form_of(shown: str) -> CallForm:
    """The form in which a chat template shows the probe call; Hermes' form, not known, where no row has it."""
    for pattern, form in ROWS:
        if found := re.search(pattern, shown):
            literals: dict[str, Any] = found.groupdict()
            return replace(form, **literals)
    return CallForm(known=False)
