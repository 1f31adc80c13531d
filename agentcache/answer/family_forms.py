"""The form in which a chat template shows a probe call. Knows no tokens.

A row is a pattern of the text in which chat templates of a family show it, and the family's form.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from .call_forms import WITH_NAME, CallForm
from .json_forms import HERMES, LISTED, ROWS, TURNS


def rows() -> Iterator[tuple[str, CallForm]]:
    """All rows, in the order in which they are tried."""
    yield from ROWS
    from . import tag_forms  # which most templates need not

    yield from tag_forms.ROWS
    # templates that show no calls: Granite 3.3's, and those that prescribe Hermes' form
    yield r"<\|start_of_role\|>(?:available_)?tools<\|end_of_role\|>", replace(LISTED, trigger="<|tool_call|>", close="]")
    yield r'<tool_call>\s*\{"name": *<[^<>]+>, *"arguments": *<[^<>]+>\}\s*</tool_call>', HERMES


def form_of(shown: str, turn: str = "") -> CallForm:
    """The form in which a chat template shows the probe call; Hermes' form, not known, where no row has it.

    turn: of the text that is shown, the assistant's turn.
    """
    literals: dict[str, Any]
    for pattern, form in rows():
        if found := re.search(pattern, shown):
            literals = found.groupdict()
            return replace(form, **literals)
    for pattern, form in TURNS:
        if found := re.match(pattern, turn):
            literals = found.groupdict()
            if opened := literals.get("trigger"):  # a mark that no row names: by it the form is read
                closed = {"close": literals["close"].strip()} if literals["close"] else {}
                literals["fields"] = {"tool_calls": {"open": opened, **closed, **WITH_NAME}}
            return replace(form, **literals)
    return CallForm(known=False)
