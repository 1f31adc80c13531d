"""The demo's tools: a visitors' desk of a small harbour town, in plain Python. Knows nothing of models or engines."""

from __future__ import annotations

import ast
import datetime
import json
import math
import operator
import unicodedata
from collections.abc import Callable, Mapping
from importlib.resources import files
from typing import Any

_SIGNS: Mapping[type[ast.AST], Callable[..., Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.USub: operator.neg,
    ast.UAdd: operator.pos,
}
LONGEST = 200  # characters of an expression: what a person would type, and nothing that takes long


def arithmetic(expression: str) -> float:
    """The value of an expression of numbers, + - * / and brackets. Nothing is evaluated but these; ValueError names what else there is."""
    if len(expression) > LONGEST:
        raise ValueError(f"an expression of {len(expression)} characters is too long: at most {LONGEST}")
    try:
        tree = ast.parse(expression.strip(), mode="eval").body
    except (SyntaxError, ValueError, MemoryError, RecursionError) as error:
        raise ValueError(f"{expression!r} is no arithmetic expression") from error
    return _value(tree)


def _value(node: ast.AST) -> float:
    if isinstance(node, ast.Constant) and isinstance(node.value, (int, float)) and not isinstance(node.value, bool):
        return float(node.value)  # so that nothing grows without bounds
    if isinstance(node, ast.BinOp) and type(node.op) in _SIGNS:
        return float(_SIGNS[type(node.op)](_value(node.left), _value(node.right)))
    if isinstance(node, ast.UnaryOp) and type(node.op) in _SIGNS:
        return float(_SIGNS[type(node.op)](_value(node.operand)))
    raise ValueError(f"{ast.unparse(node)!r} is neither a number nor + - * /")


def plain(number: float) -> str:
    """Without a needless fraction. Raises ValueError where there is no number."""
    if not math.isfinite(number):
        raise ValueError(f"the result {number!r} is too large for a number")
    return f"{number:.12g}"


class Desk:
    """A desk's texts, notes and tickets. Each method named in TOOLS is a tool: its docstring is what the model reads."""

    def __init__(self) -> None:
        self.texts: dict[str, str] = json.loads(files("agentcache").joinpath("demo", "town.json").read_text("utf-8"))["texts"]
        self.notes: list[str] = []
        self.tickets: dict[str, str] = {}

    def search(self, query: str) -> str:
        """Look up facts."""
        words = _words(query)
        found = max(self.texts, key=lambda title: (len(words & _words(title)), len(words & _words(self.texts[title]))))
        return self.texts[found] if words & (_words(found) | _words(self.texts[found])) else "nothing found"

    def calculator(self, expression: str) -> str:
        """Evaluate an arithmetic expression."""
        return plain(arithmetic(expression))

    def create_note(self, title: str) -> str:
        """Create a note."""
        self.notes.append(title)
        return _told(status="done")

    def delete_note(self, title: str) -> str:
        """Delete the note."""
        if title not in self.notes:
            return _told(error="not found")
        self.notes.remove(title)
        return _told(status="done")

    def list_notes(self) -> str:
        """List the notes."""
        return _told(notes=", ".join(self.notes))

    def book_ticket(self, place: str, date: str) -> str:
        """Book a ticket."""
        code = f"T{len(self.tickets) + 41}"
        self.tickets[code] = f"{place}, {date}"
        return _told(status="done", code=code)

    def cancel_ticket(self, ticket_id: str) -> str:
        """Cancel the ticket."""
        return _told(status="done") if self.tickets.pop(ticket_id, None) else _told(error="not found")

    def get_calendar(self, date: str) -> str:
        """Get the calendar."""
        try:
            return _told(day=datetime.date.fromisoformat(date).strftime("%A"))
        except ValueError:
            return _told(error="invalid input")

    def convert_length(self, metres: float) -> str:
        """Convert a length."""
        return _told(feet=round(metres / 0.3048, 1))

    def count_words(self, text: str) -> str:
        """Count the words."""
        return _told(count=len(text.split()))


def _words(text: str) -> set[str]:
    plain_text = unicodedata.normalize("NFKD", text).casefold()
    return {word for word in "".join(c if c.isalnum() else " " for c in plain_text).split() if word not in ("the", "of", "a", "in")}


def _told(**found: Any) -> str:
    return json.dumps(found, ensure_ascii=False)
