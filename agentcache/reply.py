"""What a completion says: reasoning, text and calls, at once or piece by piece. Knows nothing of how its tokens came about.

A call is known by an id made from the prompt and its place in the answer: the same in every process, and different at each step.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

from .inflight import Request
from .model.call_stream import CallStream, Delta
from .model.grammar import Grammars
from .model.response import ResponseStream, template_of
from .model.tool_calls import THINK, parse, split_thought
from .store.keys import as_ids
from .types import Constraint, Layout, Message, Tool

ID_CHARS = 9  # what the strictest templates ask for: nine letters and digits
_DIGITS = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"


def tool_name(tool: Tool | Mapping[str, Any]) -> str:
    """The function's name, from any shape of a tool that was rendered."""
    return tool.name if isinstance(tool, Tool) else str(tool.get("function", tool).get("name", ""))


def expect(
    request: Request, layout: Layout, tools: Iterable[Tool | Mapping[str, Any]], constraint: Constraint | None, grammars: Grammars
) -> None:
    """Tell the request what its completion may be. Raises before anything is computed if nothing could satisfy the constraint."""
    listed = list(tools)
    request.tools = frozenset(map(tool_name, listed))
    request.opened = layout.text.rstrip().endswith(THINK)
    if constraint is None:
        request.reading = _reading(request, layout, listed, grammars)
        return
    if constraint.tool_choice == "none" or (constraint.structured and not listed):
        request.tools = None
    guide = grammars.guide(constraint, listed, layout.text)
    if request.forced:
        request.receipt.notes.append("forced tokens: the constraint was not applied")
        return
    request.guide = guide
    if listed and not grammars.form.known:
        request.receipt.notes.append("calls are held to Hermes' form: how this chat template writes them is not known")


def _reading(
    request: Request, layout: Layout, tools: list[Tool | Mapping[str, Any]], grammars: Grammars
) -> Callable[[], ResponseStream] | None:
    """What takes the answer apart by the tokenizer's own response template; None where there is none, or the prompt begins no answer.

    Answers under a constraint are not read by it: they are written in the forms that our own parsers read.
    """
    try:
        template = template_of(grammars.tokenizer)
    except ValueError as error:
        request.receipt.notes.append(f"the tokenizer's response template is broken, our own parsers read the answer: {error}")
        return None
    begun = template.begun(layout.text) if template else None
    if template is None or begun is None:
        return None
    shown = [{"name": tool.name, "parameters": tool.parameters} if isinstance(tool, Tool) else dict(tool) for tool in tools]
    return lambda: ResponseStream(template, begun, shown, request.tools or ())


def message_of(request: Request) -> Message:
    """The assistant message that the request's text spells."""
    if request.reading is not None:
        whole = request.reading()
        whole.push(request.text.text)
        whole.finish(cut=request.receipt.finish_reason == "length")
        message = whole.message
    elif request.tools is None:
        reasoning, text = split_thought(request.text.text, request.opened)
        return Message("assistant", text.strip(), reasoning=reasoning)
    else:
        message = parse(request.text.text, request.tools, opened=request.opened)
    if not message.tool_calls:
        return message
    return replace(message, tool_calls=tuple(replace(call, id=call_id(request, n)) for n, call in enumerate(message.tool_calls)))


class Reader:
    """The same, piece by piece, while the text comes."""

    def __init__(self, request: Request) -> None:
        self._request = request
        self._parser = CallStream(request.tools, opened=request.opened) if request.reading is None else request.reading()

    def push(self, text: str) -> list[Delta]:
        """What has become certain with this text."""
        return self._named(self._parser.push(text))

    def finish(self) -> list[Delta]:
        """The rest, now that nothing follows."""
        if isinstance(self._parser, ResponseStream):
            return self._named(self._parser.finish(cut=self._request.receipt.finish_reason == "length"))
        return self._named(self._parser.finish())

    def _named(self, pieces: list[Delta]) -> list[Delta]:
        return [replace(piece, id=call_id(self._request, piece.index)) if piece.kind == "call" else piece for piece in pieces]


def call_id(request: Request, index: int) -> str:
    """The id of call number `index` of an answer."""
    prompt = as_ids(request.ids[: request.receipt.prompt_tokens])
    number = int.from_bytes(hashlib.blake2b(prompt.tobytes() + index.to_bytes(4, "big"), digest_size=8).digest(), "big")
    return "".join(_DIGITS[number // len(_DIGITS) ** place % len(_DIGITS)] for place in range(ID_CHARS))
