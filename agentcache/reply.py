"""What a completion says: reasoning, text and calls, at once or piece by piece. Knows nothing of how its tokens came about.

A call's id is made from the prompt, the turn that the caller names, and the call's place in the answer: the same in every process, and
different at each turn.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

from .answer.call_stream import CallStream, Delta
from .answer.grammar import Grammars
from .answer.guide import LONGEST, Guide
from .answer.response_template import ResponseStream, reads, template_for, template_of
from .answer.tool_calls import CUT, MALFORMED, THINK, InvalidCall, Made, read, split_thought
from .errors import AgentCacheError
from .receipt import Account
from .request import Expected, Running
from .store.keys import as_ids
from .types import Constraint, Layout, Message, Sampling, Tool, ToolCall

ID_CHARS = 9  # what the strictest templates ask for: nine letters and digits
_DIGITS = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"


def tool_name(tool: Tool | Mapping[str, Any]) -> str:
    """The function's name, from any shape of a tool that was rendered."""
    return tool.name if isinstance(tool, Tool) else str(tool.get("function", tool).get("name", ""))


def asks_for_thought(template_kwargs: Mapping[str, Any] | None) -> bool:
    """Whether a request has its chat template ask for a thought, by one of the names that templates know."""
    return any(bool((template_kwargs or {}).get(name)) for name in ("enable_thinking", "thinking"))


def expect(
    layout: Layout,
    tools: Iterable[Tool | Mapping[str, Any]],
    constraint: Constraint | None,
    grammars: Grammars,
    account: Account,
    sampling: Sampling,
    *,
    thinks: bool = False,
) -> tuple[Expected, Guide | None]:
    """Find out what the completion of a prompt may be. Raises before anything is computed if nothing could satisfy the constraint.

    thinks: a thought may come before an answer of prescribed form, too.
    """
    listed, guide, namespace, forced = list(tools), None, account.receipt.namespace, bool(sampling.forced)
    names: frozenset[str] | None = frozenset(map(tool_name, listed))
    if constraint is None and grammars.strict and listed and not forced:
        try:
            constraint = Constraint()
            guide = grammars.guide(constraint, listed, layout.text, namespace, max_tokens=sampling.max_tokens)
        except AgentCacheError as error:  # nobody asked for it: the request goes on without
            constraint = None
            why = "(redacted)" if account.receipt.redacted else str(error)  # it names a tool, and shows its schema
            account.record_note(f"calls are not held to their schemas: {why}")
    elif constraint is not None:
        room = LONGEST if forced else sampling.max_tokens
        guide = grammars.guide(constraint, listed, layout.text, namespace, max_tokens=room, thinks=thinks)
    if constraint is not None and (constraint.tool_choice == "none" or (constraint.structured and not listed)):
        names = None
    held = constraint is not None and not forced
    # what is only text has no calls to find in it
    parser = None if names is None else _parser(layout, listed, grammars, account, names, held=held)
    opened = layout.text.rstrip().endswith(THINK)
    if constraint is None or forced:
        if constraint is not None:
            account.record_note("forced tokens: the constraint was not applied")
        return Expected(names, opened, False, parser), None
    if listed and not grammars.form.known:
        account.record_note("calls are held to Hermes' form: how this chat template writes them is not known")
    return Expected(names, opened, constraint.structured or constraint.calls, parser), guide


def _parser(
    layout: Layout, tools: list[Tool | Mapping[str, Any]], grammars: Grammars, account: Account, names: frozenset[str], *, held: bool
) -> Callable[[], ResponseStream] | None:
    """What takes the answer apart by a response template, the tokenizer's own where it has one; None where our own parsers do.

    held: the answer is held to a constraint, and so written in a form that is known; only a template that reads this form back is asked.
    """
    try:
        own = template_of(grammars.tokenizer)
    except ValueError as error:
        account.record_note(f"the tokenizer's response template is broken, ours reads the answer: {error}")
        own = None
    made = template_for(grammars.form) if held or own is None else None
    template = made or own
    begun = template.begun(layout.text) if template else None
    if template is None or begun is None or (held and not reads(template, begun, grammars.form)):
        return None
    shown = [{"name": tool.name, "parameters": tool.parameters} if isinstance(tool, Tool) else dict(tool) for tool in tools]
    return lambda: ResponseStream(template, begun, shown, names)


def message_of(request: Running) -> tuple[Message, tuple[InvalidCall, ...]]:
    """The assistant message that the request's text spells, and the calls that it began and that are none."""
    made: Made = ()
    expected, spelled = request.asked.expected, request.decoding.text
    if expected.parser is not None:
        reader = expected.parser()
        reader.push(spelled.text)
        reader.finish(cut=request.receipt.finish_reason == "length")
        message, made = reader.read()
    elif expected.tools is None:
        reasoning, text = split_thought(spelled.text, expected.opened)
        message = Message("assistant", text.strip(), reasoning=reasoning)
    else:
        message, made = read(spelled.text, expected.tools, opened=expected.opened)
    reasoning_tokens = spelled.tokens_of(_end_of(message.reasoning, spelled.text)) if message.reasoning else 0
    request.account.record_message(reasoning_tokens, calls=bool(message.tool_calls))
    calls, invalid, told = list[ToolCall](), list[InvalidCall](), 0
    for call in made:
        named = None if call.id is None and isinstance(call, InvalidCall) else call_id(request, told)
        told += named is not None
        if isinstance(call, ToolCall):
            calls.append(replace(call, id=named))
        else:
            invalid.append(replace(call, id=named, error=_why(request, call.error)))
    return replace(message, tool_calls=tuple(calls)), tuple(invalid)


def _why(request: Running, error: str) -> str:
    """Why a call is none, with what ended the completion in it."""
    if error == CUT and request.receipt.finish_reason == "length":
        return f"{CUT}, at max_tokens={request.asked.sampling.max_tokens}: raise it"
    return f"{CUT}, at a stop string" if error == CUT and request.decoding.text.stopped else MALFORMED


def cut_short(request: Running, message: Message, invalid: tuple[InvalidCall, ...]) -> bool:
    """Whether the completion ended inside what was asked for: an object, a call, or a thought with no answer behind it."""
    out_of_tokens = request.receipt.finish_reason == "length"
    guide, formed, stopped = request.decoding.guide, request.asked.expected.formed, request.decoding.text.stopped
    if guide is not None and (guide.cut or not guide.accepting or (formed and out_of_tokens and not guide.over)):
        return True
    if formed and stopped:
        return True
    answered = message.content or message.tool_calls or not message.reasoning
    return (out_of_tokens or stopped) and (any(call.error.startswith(CUT) for call in invalid) or not answered)


def _end_of(thought: str, text: str) -> int:
    """Where the thought ends in the text, or its last line does: some families write several, which become one."""
    for part in (thought, thought.strip().rpartition("\n")[2]):
        if (at := text.find(part)) >= 0:
            return at + len(part)
    return 0


class Reader:
    """The same, piece by piece, while the text comes."""

    def __init__(self, request: Running) -> None:
        self._request = request
        expected = request.asked.expected
        self._parser = CallStream(expected.tools, opened=expected.opened) if expected.parser is None else expected.parser()

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


def call_id(request: Running, index: int) -> str:
    """The id of call number `index` of an answer. Equal prompts of different turns, as trimming makes them, give different ids."""
    said = as_ids(request.asked.layout.ids).tobytes() + index.to_bytes(4, "big")
    turn = hashlib.blake2b(request.asked.turn.encode("utf-8", "surrogatepass"), digest_size=32).digest()
    number = int.from_bytes(hashlib.blake2b(said, key=turn, digest_size=8).digest(), "big")
    return "".join(_DIGITS[number // len(_DIGITS) ** place % len(_DIGITS)] for place in range(ID_CHARS))
