"""The demo's tools: a visitors' desk of a small harbour town, in plain Python. Knows nothing of engines."""

from __future__ import annotations

import ast
import datetime
import inspect
import json
import unicodedata
from collections.abc import Callable
from importlib.resources import files
from typing import Any

from ..types import Tool, ToolCall

TOWN: dict[str, Any] = json.loads(files(__package__).joinpath("town.json").read_text("utf-8"))
TYPES = {"str": "string", "int": "integer", "float": "number"}
LONGEST = 200  # characters of an expression: what a person would type, and nothing that takes long
_SIGNS = (ast.Expression, ast.BinOp, ast.UnaryOp, ast.Add, ast.Sub, ast.Mult, ast.Div, ast.USub, ast.UAdd)


def arithmetic(expression: str) -> float:
    """The value of an expression of numbers, + - * / and brackets; ValueError for any other expression."""
    if len(expression) > LONGEST:
        raise ValueError(f"an expression of {len(expression)} characters is too long: at most {LONGEST}")
    try:
        tree = ast.parse(expression.strip(), mode="eval")
    except (SyntaxError, ValueError, MemoryError, RecursionError) as error:
        raise ValueError(f"{expression!r} is no arithmetic expression") from error
    for node in ast.walk(tree):
        if not isinstance(node, _SIGNS) and type(getattr(node, "value", None)) not in (int, float):
            raise ValueError(f"{ast.unparse(node)!r} is neither a number nor + - * /")
    return float(eval(compile(tree, "calculator", "eval"), {}))


class Desk:
    """A desk's texts, notes and tickets. Each method is a tool: its docstring is what the model reads."""

    def __init__(self) -> None:
        self.texts: dict[str, str] = TOWN["texts"]
        self.notes: list[str] = []
        self.tickets: dict[str, str] = {}

    def search(self, query: str) -> str:
        """Look up facts."""
        words = _words(query)
        found = max(self.texts, key=lambda title: (len(words & _words(title)), len(words & _words(self.texts[title]))))
        return self.texts[found] if words & (_words(found) | _words(self.texts[found])) else "nothing found"

    def calculator(self, expression: str) -> str:
        """Evaluate an arithmetic expression."""
        return f"{arithmetic(expression):.12g}"

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


def described(method: Callable[..., str]) -> Tool:
    """A method as a tool: its docstring and the types of its parameters."""
    parameters = [one for one in inspect.signature(method).parameters.values() if one.name != "self"]
    properties = {one.name: {"type": TYPES[str(one.annotation)]} for one in parameters}
    schema = {"type": "object", "properties": properties, "required": [one.name for one in parameters]}
    return Tool(method.__name__, inspect.getdoc(method) or "", schema)


def result_of(desk: Desk, call: ToolCall) -> str:
    """The result of a call. A model may call anything with anything: a wrong call gets an error as its result."""
    if call.name not in TOWN["tools"]:
        return _told(error="no such tool")
    try:
        return str(getattr(desk, call.name)(**call.arguments))
    except (TypeError, ValueError, ArithmeticError, AttributeError) as error:
        return _told(error=str(error)[:200])


def _words(text: str) -> set[str]:
    plain_text = unicodedata.normalize("NFKD", text).casefold()
    return {word for word in "".join(c if c.isalnum() else " " for c in plain_text).split() if word not in ("the", "of", "a", "in")}


def _told(**found: Any) -> str:
    return json.dumps(found, ensure_ascii=False)
