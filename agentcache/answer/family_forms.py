"""The form in which a chat template shows a probe call. Knows no tokens.

A row is a pattern of the text in which chat templates of a family show it, and the family's form.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any

from ..errors import PromptError
from ..types import Layout, Message, Tool, ToolCall
from .call_forms import CALL_AFTER_SPACE, HERMES, PROBE_ARGUMENTS, PROBE_TOOL, WITH_NAME, CallForm


def rows() -> Iterator[tuple[str, CallForm]]:
    """All rows, in the order in which they are tried."""
    # Qwen 2.5 and 3, Hermes, Granite 4, EXAONE 4 and many more
    yield rf"<tool_call>{CALL_AFTER_SPACE}(?P<after>\s*\}}\s*</tool_call>)", HERMES
    from . import json_forms, tag_forms  # which these need not

    yield from json_forms.ROWS
    yield from tag_forms.ROWS
    # templates that show no calls: Granite 3.3's, and those that prescribe Hermes' form
    yield r"<\|start_of_role\|>(?:available_)?tools<\|end_of_role\|>", replace(json_forms.LISTED, trigger="<|tool_call|>", close="]")
    yield r"<tool_call>\s*\{['\"](?:name|arguments)['\"]: *<[^{}]+>\}\s*</tool_call>", HERMES


def form_by(render: Callable[..., Layout], tokenizer: Any) -> CallForm:
    """The form that a chat template shows. render: a renderer's, of prompts of this tokenizer."""
    tool = Tool(PROBE_TOOL, "", {"type": "object", "properties": {"zarg": {"type": "string"}}})
    call = ToolCall(PROBE_TOOL, PROBE_ARGUMENTS, "call00001")  # as the layout numbers it: there is nothing to report
    asked = [Message("user", "zask"), Message("assistant", "", (call,))]
    try:
        shown = render(asked, [tool], namespace="grammar", generation=False).text
        prompt = render(asked[:1], [tool], namespace="grammar").text
    except PromptError:  # a template without tools, or without calls
        shown = prompt = ""
    words: Iterable[str] = getattr(tokenizer, "get_added_vocab", dict)()  # some templates show no calls whose marks are tokens
    return form_of("\n".join((shown, *words)), shown[turn_start(prompt, shown) :])


def turn_start(prompt: str, shown: str) -> int:
    """Where the assistant's turn starts: the end of what both begin with, outside of a mark."""
    common = len(os.path.commonprefix((prompt, shown)))
    half = re.search(r"[<\[][^<>\[\]\s]*\Z", prompt[:common]) if common < len(prompt) else None
    return half.start() if half else common


def form_of(shown: str, turn: str = "") -> CallForm:
    """The form in which a chat template shows the probe call; Hermes' form, not known, where no row has it.

    turn: of the text that is shown, the assistant's turn.
    """
    literals: dict[str, Any]
    for pattern, form in rows():
        if found := re.search(pattern, shown):
            literals = found.groupdict()
            return replace(form, **literals)
    from . import json_forms, tag_forms

    for pattern, form in (*json_forms.TURNS, *tag_forms.TURNS):
        if found := re.match(pattern, turn):
            literals = found.groupdict()
            if opened := literals.get("trigger"):  # a mark that no row names: by it the form is read
                closed = {"close": literals["close"].strip()} if literals["close"] else {}
                literals["fields"] = {"tool_calls": {"open": opened, **closed, **WITH_NAME}}
            return replace(form, **literals)
    return CallForm(known=False)
