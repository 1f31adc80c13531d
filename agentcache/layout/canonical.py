"""Messages in one canonical form, each worked out once: ordered, ids by position. Knows nothing of templates or tokens."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from itertools import groupby
from typing import Any

from ..namespace_lru import Covering, NamespaceLRU
from ..types import Message, ToolCall
from .plain import Plain, answered, check_list, pair_results, plain_message

REASONING_KEYS = ("reasoning_content", "reasoning", "thinking")  # the names transformers itself treats as one
ABSENT = "absent content rendered as empty text"  # a note that only matters where a template tells the two apart
KNOWN_MESSAGES = 16_384  # messages worked out already: 150 episodes of 100
KNOWN_CHARS = 32_000_000  # of them: the strings are mostly the caller's own

_SURROGATE = re.compile("[\ud800-\udfff]")
_ENCODE = json.JSONEncoder(ensure_ascii=False, check_circular=False).encode
_ENCODE_SORTED = json.JSONEncoder(ensure_ascii=False, check_circular=False, sort_keys=True, default=str).encode


@dataclass(frozen=True, slots=True)
class Turn:
    """One message as the template gets it."""

    source: int  # its index in the caller's list
    data: Plain  # must not be modified
    digest: bytes = b""  # of its content, without ids
    notes: tuple[str, ...] = ()  # differences from the caller's message; "{}" in them stands for the index

    @property
    def chars(self) -> int:
        """Characters that it takes to remember it, roughly."""
        return 200 + len(self.data.get("content", "")) * 2

    @property
    def kind(self) -> str:
        """The role, or "call" for an assistant turn that calls tools."""
        return "call" if self.data.get("tool_calls") else str(self.data["role"])


class Canon:
    """Canonical messages, each worked out once: agents send the same messages again at every step.

    Remembered by namespace and value (a string keeps its hash, so this costs no look at the text), the least recently used go first.
    clean: breaks what may not be spelled; clean_system: the same for system text, whose author may show how results look.
    """

    def __init__(self, clean: Callable[[str], str], clean_system: Callable[[str], str]) -> None:
        self._clean = clean
        self._clean_system = clean_system
        self._known: NamespaceLRU[tuple[Any, ...], Turn] = NamespaceLRU(KNOWN_MESSAGES, KNOWN_CHARS, lambda turn: turn.chars)

    def forget(self, deletion: Covering) -> None:
        """Forget the messages of namespaces of which something was deleted on purpose."""
        self._known.forget(deletion)

    def messages(self, messages: Sequence[Message | Mapping[str, Any]], namespace: str) -> tuple[list[Turn], list[str], bool]:
        """(turns, differences in words, whether call ids were changed); raises MessageError."""
        check_list(messages)
        turns = [self.turn(index, message, namespace) for index, message in enumerate(messages)]
        pair_results([turn.data for turn in turns])
        notes = dict.fromkeys(note.replace("{}", str(turn.source)) for turn in turns for note in turn.notes)  # ordered, without repeats
        turns = _order_results(self._merge_system(turns, notes, namespace), notes)
        turns, renamed = _number_calls(turns)
        return turns, list(notes), renamed

    def turn(self, index: int, message: Message | Mapping[str, Any], namespace: str) -> Turn:
        """One message in canonical form, its call ids still as given."""
        key = _value_key(message)
        known = None if key is None else self._known.get(namespace, key)
        if known is None:
            notes: dict[str, None] = {}
            plain = plain_message(index, message)
            data = _canonical_message(plain, self._clean_system if plain["role"] == "system" else self._clean, notes)
            known = Turn(index, data, digest_of(data), tuple(notes))
            if key is not None:
                self._known.put(namespace, key, known)
        return known if known.source == index else replace(known, source=index)

    def _merge_system(self, turns: list[Turn], notes: dict[str, None], namespace: str) -> list[Turn]:
        """Several leading system messages as one: 15 of 67 known templates drop or refuse the second."""
        count = next((n for n, turn in enumerate(turns) if turn.data["role"] != "system"), len(turns))
        if count < 2:
            return turns
        notes[f"{count} leading system messages merged into one"] = None
        text = "\n\n".join(turn.data["content"] for turn in turns[:count])
        return [self.turn(turns[0].source, Message("system", text), namespace), *turns[count:]]


def _value_key(message: Message | Mapping[str, Any]) -> tuple[Any, ...] | None:
    """All that the canonical form depends on, hashable, or None where it is not cheap to tell."""
    if isinstance(message, Message):
        made = message.tool_calls or ()
        if type(made) not in (tuple, list) or not all(isinstance(call, ToolCall) for call in made):
            return None
        calls: Any = [(call.id, call.name, call.arguments) for call in made]
        fields = [message.role, message.content, message.tool_call_id, message.name, message.reasoning]
    elif type(message) is dict:
        if "content" not in message and message.get("role") != "assistant":
            return None  # refused, where None is empty text
        calls = message.get("tool_calls")
        fields = [message.get(key) for key in ("role", "content", "tool_call_id", "name", *REASONING_KEYS)]
    else:
        return None
    if not all(field is None or type(field) is str for field in fields):
        return None
    try:
        return (type(message), _ENCODE(calls) if calls else "", *fields)
    except (TypeError, ValueError, RecursionError):  # no JSON: the renderer raises the error
        return None


def digest_of(message: Plain) -> bytes:
    """A name for what a canonical message says: without ids, and the same for arguments in another key order."""
    said = {key: value for key, value in message.items() if value and key != "tool_call_id"}
    if "tool_calls" in said:
        said["tool_calls"] = [call["function"] for call in said["tool_calls"]]
    return hashlib.blake2b(_ENCODE_SORTED(said).encode("utf-8", "surrogatepass"), digest_size=16).digest()


def text_of(content: Any) -> str:
    """The text of a content field: None, a string, or text parts."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    return "".join(part if isinstance(part, str) else part["text"] for part in content)


def _canonical_message(message: Plain, clean: Callable[[str], str], notes: dict[str, None]) -> Plain:
    def cleaned(text: str) -> str:
        given = _exact(text)
        valid = given.encode("utf-8", "replace").decode() if _SURROGATE.search(given) else given  # a broken decoder leaves such
        if valid is not given:
            notes["message {}: lone surrogates replaced"] = None
        safe = clean(valid)
        if safe != valid:
            notes["message {}: text that spells a special token was neutralised"] = None
        return safe

    out: Plain = {"role": _exact(message["role"])}
    content = message.get("content")
    if content is None:
        notes[ABSENT] = None
    elif not isinstance(content, str):
        notes["message {}: content parts joined into one text"] = None
    out["content"] = cleaned(text_of(content))  # transformers drops None before rendering, and some templates fail on the absent key
    reasoning = next((message[key] for key in REASONING_KEYS if isinstance(message.get(key), str)), None)
    if reasoning is not None:
        out["reasoning_content"] = cleaned(reasoning)
    if message.get("tool_calls"):
        out["tool_calls"] = [_canonical_call(call, cleaned) for call in message["tool_calls"]]
        if any(list(call["function"]) != ["name", "arguments"] for call in message["tool_calls"]):
            notes["tool calls rewritten as function{name, arguments}"] = None
    if isinstance(message.get("name"), str):
        out["name"] = cleaned(message["name"])
    if message.get("tool_call_id") is not None:
        out["tool_call_id"] = str(message["tool_call_id"])  # as the call's own: no template sees it, a position takes its place
    return out


def _canonical_call(call: Plain, clean: Callable[[str], str]) -> Plain:
    function = call["function"]
    body = {"name": clean(function["name"]), "arguments": mapped(function["arguments"], clean)}
    return {"id": None if call.get("id") is None else str(call["id"]), "type": "function", "function": body}


def _exact(text: str) -> str:
    """A plain string: a template would show a member of a string Enum by its name, JSON by its text."""
    return str.__str__(text)


def mapped(value: Any, clean: Callable[[str], str]) -> Any:
    """`value` with `clean` applied to every string in it, keys included, which are strings as in JSON, as are members of an Enum."""
    if isinstance(value, str):
        return clean(_exact(value))
    if isinstance(value, Mapping):
        return {clean(_exact(key) if isinstance(key, str) else _ENCODE(key)): mapped(item, clean) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [mapped(item, clean) for item in value]
    return json.loads(_ENCODE(value)) if isinstance(value, Enum) else value


def _order_results(turns: list[Turn], notes: dict[str, None]) -> list[Turn]:
    """Tool results in the order of their calls: templates without ids pair them by position."""
    out: list[Turn] = []
    rank: dict[str, int] = {}
    for are_results, group in groupby(turns, lambda turn: turn.data["role"] == "tool"):
        run = list(group)
        if not are_results:
            calls = next((made for turn in reversed(run) if (made := turn.data.get("tool_calls"))), None)
            rank = rank if calls is None else {call["id"]: place for place, call in enumerate(calls) if call["id"] is not None}
        elif all(turn.data.get("tool_call_id") in rank for turn in run):
            ordered = sorted(run, key=lambda turn: rank[turn.data["tool_call_id"]])
            if ordered != run:
                notes[f"messages {run[0].source} to {run[-1].source}: tool results put in the order of their calls"] = None
            run = ordered
        out += run
    return out


def _number_calls(turns: list[Turn]) -> tuple[list[Turn], bool]:
    """Call ids as a function of position: "call00001", nine alphanumerics (Mistral refuses any other length)."""
    out: list[Turn] = []
    waiting: list[tuple[str | None, str]] = []
    count, changed = 0, False
    for turn in turns:
        data = turn.data
        if data.get("tool_calls"):
            waiting = []
            calls = []
            for call in data["tool_calls"]:
                count += 1
                new = f"call{count:05d}"
                changed |= call["id"] != new
                waiting.append((call["id"], new))
                calls.append({**call, "id": new})
            data = {**data, "tool_calls": calls}
        elif data["role"] == "tool":
            position = answered(waiting, data)
            assert position is not None, "checked by plain_messages"
            data = {**data, "tool_call_id": waiting.pop(position)[1]}
        out.append(turn if data is turn.data else replace(turn, data=data))
    return out, changed
