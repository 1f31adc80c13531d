"""Calls in Python: a list of calls with keyword arguments, as text. Runs nothing of it."""

from __future__ import annotations

import ast
import json
import re
from typing import Any

from ..types import ToolCall
from .tag_values import expression

_SPELLED = re.compile(
    r"""("(?:\\.|[^"\\])*"|'(?:\\.|[^'\\])*')|(?<=[(,])(\s*)([^\s"'<>:,={}()\[\]][^"'<>:,={}()\[\]]*?)(?=\s*=(?!=))""", re.DOTALL
)
_JSON = {"true": True, "false": False, "null": None}


def python_calls(text: str) -> list[ToolCall]:
    """The calls of a list, or the one call; none if the text is anything else, or an argument is no JSON value."""
    try:
        names = list[str]()

        def numbered(found: re.Match[str]) -> str:
            if found[1] is not None:
                return found[1]
            names.append(found[3])
            return f"{found[2]}_{len(names) - 1}"

        tree = expression(_SPELLED.sub(numbered, text))
        return [_call(node, names) for node in (tree.elts if isinstance(tree, ast.List) else [tree])]
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        return []


def _call(node: ast.expr, names: list[str]) -> ToolCall:
    """names: of all arguments, which the tree has by their number: what JSON takes for a name, Python may not, as `from`."""
    if not isinstance(node, ast.Call) or node.args:
        raise ValueError("no call with keyword arguments only")
    arguments: dict[str, Any] = {}
    for keyword in node.keywords:
        if keyword.arg is None or (name := names[int(keyword.arg[1:])]) in arguments:
            raise ValueError("an argument has no name, or another's")
        value = ast.literal_eval(_Constants().visit(keyword.value))
        arguments[name] = json.loads(json.dumps(value))
    return ToolCall(ast.unparse(node.func), arguments)


class _Constants(ast.NodeTransformer):
    """JSON's names of constants, as templates write them in dicts."""

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return ast.Constant(_JSON[node.id]) if node.id in _JSON else node
