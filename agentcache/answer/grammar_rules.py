"""The grammar of one request, as text: free text, reasoning, calls in the form of a model's family, JSON by a schema. Knows no tokens.

A completion is      [thought] text | [thought] [text] trigger calls
with a call form of  trigger open call (joint call)* close      and a call of      before NAME between ARGUMENTS after
and, where text stands between marks of its own, either it or calls.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from ..types import Constraint
from .call_forms import CallForm
from .tag_values import choices, dereferenced, is_text, meant, shown

Thinking = Literal["none", "may", "open"]  # whether a thought may come first; open: the prompt has begun one

# JSON as json.dumps and the templates' tojson write it. Free whitespace would let a weak model write nothing else.
_SPACING = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
_OPEN_ENDED = {"additionalProperties", "patternProperties", "anyOf", "oneOf"}
_FORMATS = frozenset("date-time time date duration email hostname ipv4 ipv6 uuid uri".split())  # those that llguidance enforces
_COUNTS = frozenset(f"{most}{what}" for most in ("min", "max") for what in ("Items", "Length", "Properties", "Contains"))
_ANY = r"(.|\n)*"
_MARK = re.compile(r"<[^<>]*>")
_NO_NAME, _NO_KEYWORD = re.compile(r'[\n"<>]'), re.compile(r"""[\n"'<>:,={}()\[\]]""")
_CONTROL = r"[\x00-\x08\x0b-\x1f]"  # that no reader of quoted texts takes


def arguments_schema(parameters: Mapping[str, Any] | None) -> dict[str, Any]:
    """A tool's parameters as the schema that its arguments are held to."""
    return closed({"type": "object", "properties": {}, **dereferenced(parameters or {})})


def unwritable(name: str, form: CallForm) -> bool:
    """Tell whether the name of an argument would be taken for something else where it is no JSON."""
    return not name or name != name.strip() or bool((_NO_NAME if form.comma is None else _NO_KEYWORD).search(name))


def closed(schema: Any, close: bool = True) -> Any:
    """The schema with no other properties in objects that name theirs, where it does not say; equal or narrower, never wider.

    Under allOf and the like several schemas describe one object: there nothing is closed. Keywords that say nothing are left out.
    """
    if isinstance(schema, list):
        return [closed(one, close) for one in schema]
    if not isinstance(schema, Mapping):
        return schema
    schema = {key: _count(key, value) for key, value in schema.items() if not _says_nothing(key, value)}
    close = close and not any(key in schema for key in ("allOf", "if", "not", "unevaluatedProperties", "dependentSchemas"))
    out: dict[str, Any] = {}
    for key, value in schema.items():
        if key in ("properties", "$defs", "definitions", "patternProperties"):
            out[key] = {name: closed(one, close) for name, one in value.items()} if isinstance(value, Mapping) else value
        elif key in ("items", "prefixItems", "anyOf", "oneOf", "allOf", "additionalProperties"):
            out[key] = closed(value, close)
        else:
            out[key] = value
    if close and isinstance(schema.get("properties"), Mapping) and not schema.keys() & _OPEN_ENDED:
        required = schema.get("required") if isinstance(schema.get("required"), (list, tuple)) else ()
        unnamed = [name for name in required if isinstance(name, str) and name not in out["properties"]]  # they may have any value
        out["properties"] = {**out["properties"], **dict.fromkeys(unnamed, {})}
        out["additionalProperties"] = False
    return out


def _count(key: str, value: Any) -> Any:
    """The value of a keyword: 2.0 of a count, which JSON Schema takes, as the integer that grammars take."""
    return int(value) if key in _COUNTS and isinstance(value, float) and value.is_integer() else value


def _says_nothing(key: str, value: Any) -> bool:
    """Whether a keyword refuses no value: JSON Schema takes a format for a note, where nobody checks it."""
    if key == "format":
        return isinstance(value, str) and value not in _FORMATS
    return (key == "uniqueItems" and value is False) or (key == "propertyNames" and value in (True, {}, {"type": "string"}))


def spaced(schema: Mapping[str, Any]) -> str:
    """A schema as the text that a grammar takes, with our spacing."""
    return json.dumps({**schema, "x-guidance": _SPACING}, ensure_ascii=False)


def grammar(constraint: Constraint, tools: Mapping[str, Mapping[str, Any]], form: CallForm, thinking: Thinking, regex: str = "") -> str:
    """The grammar of one request, as llguidance takes it. tools: schemas of the arguments, by name, of those that may be called.

    regex: the constraint's, made fit for a grammar.
    """
    calls = bool(tools) and constraint.tool_choice != "none"
    lines = _thoughts(thinking, form)
    lines += _texts(constraint, calls, form, thinking, regex)
    if calls:
        lines += _calls(tools, form, constraint.parallel and constraint.tool_choice in ("auto", "any"))
    lark = "%llguidance {}\n" + "\n".join(lines) + "\n"
    if constraint.grammar is None:
        return lark
    parts = [{"name": "completion", "lark_grammar": lark}, {"name": "custom", "lark_grammar": constraint.grammar}]
    return json.dumps({"grammars": parts})


def _thoughts(thinking: Thinking, form: CallForm) -> list[str]:
    if thinking == "none":
        return ["start: rest"]
    opened, closed = map(_pattern, form.thought)
    thought = "thought: thought_text" + ("" if form.answer[0] else " /\\n{0,2}/")
    if thinking == "open":
        return ["start: thought rest", thought, f"thought_text[lazy]: /{_ANY}{closed}/"]
    return ["start: thought rest | first", thought, f"thought_text[lazy]: /{opened}{_ANY}{closed}/"]


def _texts(constraint: Constraint, calls: bool, form: CallForm, thinking: Thinking, regex: str) -> list[str]:
    """What comes behind the thought, or first where there is none (then it must not look like one)."""
    whole = _quoted(form.trigger) + " calls" if form.trigger else "calls"
    if constraint.structured or constraint.calls:
        marked = " ".join((_quoted(form.answer[0]), "structured", _quoted(form.answer[1]))).strip()
        text = marked if constraint.structured else whole
        lines = [f"rest: {text}{f' | {whole}' if constraint.structured and calls else ''}"]
        lines += ["first: rest"] if thinking == "may" else []
        return lines + (_structured(constraint, regex) if constraint.structured else [])
    never = rf"\s*{_pattern(form.thought[0])}{_ANY}"
    return _free("rest", calls, form, ()) + (_free("first", calls, form, (never,)) if thinking == "may" else [])


def _structured(constraint: Constraint, regex: str) -> list[str]:
    if constraint.regex is not None:
        return [f"structured: /{regex}/"]
    if constraint.grammar is not None:
        return ["structured: @custom"]
    schema = {"type": "object"} if constraint.schema is True else closed(constraint.schema)
    return [f"structured: %json {spaced(schema)}"]


def _free(rule: str, calls: bool, form: CallForm, never: Sequence[str]) -> list[str]:
    """Free text that is no call, or with calls behind it. A lazy rule ends where the trigger does: from there on it is a call."""
    if form.answer[0]:  # either text or calls, each behind its own mark
        marks = "|".join(_pattern(mark) for mark in (form.trigger, *form.answer) if mark)
        text = f"{rule.upper()}_TEXT: /{_ANY}/ & ~/{_ANY}({marks}){_ANY}/"
        closed = f"{rule}_closed[lazy]: {rule.upper()}_TEXT {_quoted(form.answer[1])}" if form.answer[1] else ""
        body = f"({rule.upper()}_TEXT | {rule}_closed)" if closed else f"{rule.upper()}_TEXT"
        whole = f" | {_quoted(form.trigger)} calls" if calls else ""
        return [f"{rule}: {_quoted(form.answer[0])} {body}{whole}", text, closed]
    never = [*never, *([] if calls and form.trigger else [_looks_like_a_call(form)])]
    text = f"{rule.upper()}_TEXT: /{_ANY}/" + "".join(f" & ~/{pattern}/" for pattern in never)
    if not calls:
        return [f"{rule}: {rule.upper()}_TEXT", text]
    if not form.trigger:
        return [f"{rule}: {rule.upper()}_TEXT | calls", text]
    head = f"{rule}_head[lazy]: {rule.upper()}_TEXT {_quoted(form.trigger)}"
    return [f"{rule}: {rule.upper()}_TEXT | {rule}_head calls", text, head]


def _looks_like_a_call(form: CallForm) -> str:
    if form.trigger:
        return _ANY + _pattern(form.trigger) + _ANY
    if form.argument:
        return rf"\s*{_pattern(form.open)}[\w.-]+{_pattern(form.between)}{_ANY}"
    return r"\s*(\[\s*)?\{\"name\"" + _ANY


def _calls(tools: Mapping[str, Mapping[str, Any]], form: CallForm, parallel: bool) -> list[str]:
    more = f" ({_quoted(form.joint)} call)*" if parallel and form.joint is not None else ""
    lines = [f"calls: {_quoted(form.open)} call{more} {_quoted(form.close)}", f"call: {' | '.join(f'call_{n}' for n in range(len(tools)))}"]
    for number, (name, schema) in enumerate(tools.items()):
        spelled = name if form.argument else json.dumps(name, ensure_ascii=False)[1:-1]
        lines.append(f"call_{number}: {_quoted(form.before + spelled + form.between)} args_{number} {_quoted(form.after)}")
        lines += _arguments(number, schema, form) if form.argument else [f"args_{number}: %json {spaced(schema)}"]
    return lines


def _arguments(number: int, schema: Mapping[str, Any], form: CallForm) -> list[str]:
    """Rules of call number `number`'s arguments, each by itself; the first rule is all of them. Optional ones may be left out."""
    assert form.argument is not None
    before, between, after = form.argument
    required = set(schema.get("required") or ())
    parts, lines = [], []
    for place, (key, each) in enumerate((schema.get("properties") or {}).items()):
        rule, value = f"value_{number}_{place}", meant(each, schema)
        text = str(is_text(value, schema)).lower()
        parts.append((f"{_quoted(before + key + between.replace('{is_text}', text))} {rule}", key in required))
        if form.comma is None:
            lines += _value(rule, value, schema, after, _marks(after + form.after))
        else:
            lines += _in_list(rule, value, schema, form)
    if form.comma is not None:
        return [*_joined(f"args_{number}", parts, form.comma), *lines]
    written = [f"({part}){'' if needed else '?'}" for part, needed in parts] or ['""']
    return [f"args_{number}: {' '.join(written)}", *lines]


def _joined(rule: str, parts: Sequence[tuple[str, bool]], comma: str) -> list[str]:
    """Rules of these parts with commas between them, of which those that are not needed may be left out. The first is of all of them."""
    lines, first, later = [], '""', '""'
    for place, (part, needed) in reversed([*enumerate(parts)]):
        lines.append(f"{rule}_{place}: {part} {later}")
        more = f"{_quoted(comma)} {rule}_{place}"
        first, later = (f"{rule}_{place}", more) if needed else (f"({rule}_{place} | {first})", f"({more} | {later})")
    return [f"{rule}: {first}", *lines]


def _in_list(rule: str, schema: Mapping[str, Any], root: Mapping[str, Any], form: CallForm, above: tuple[Any, ...] = ()) -> list[str]:
    """A value among arguments with commas: JSON, but for texts between quotes of the form, alone and in lists and objects.

    above: the schemas around it; one that holds itself is JSON from there on, which readers take as well.
    """
    assert form.comma is not None
    opened, closed = form.quotes or ('"', '"')
    listed = choices(schema)
    if form.quotes and listed is not None and all(isinstance(choice, str) for choice in listed):
        return [f"{rule}: {' | '.join(_quoted(opened + choice + closed) for choice in listed)}"]
    if form.quotes and listed is None and is_text(schema, root):
        return [
            f"{rule}: {_quoted(opened)} {rule}_text",
            *_value(f"{rule}_text", schema, root, closed, f"{_marks(closed + form.after)}|{_CONTROL}"),
        ]
    kind, inside = None if schema in above else schema.get("type"), (*above, schema)
    if form.quotes and kind == "array" and isinstance(schema.get("items"), Mapping):
        least, most = schema.get("minItems", 0), schema.get("maxItems")
        counts = f"{{{max(least - 1, 0)},{'' if most is None else most - 1}}}"
        more = f" ({_quoted(form.comma)} {rule}_item){counts}" if most is None or most > 1 else ""
        items = '""' if most == 0 else f"{rule}_item{more}" if least else f"({rule}_item{more})?"
        return [f'{rule}: "[" {items} "]"', *_in_list(f"{rule}_item", meant(schema["items"], root), root, form, inside)]
    if form.quotes and kind == "object" and schema.get("properties") and isinstance(schema["properties"], Mapping):
        needed, parts, lines = set(schema.get("required") or ()), [], list[str]()
        for place, (key, each) in enumerate(schema["properties"].items()):
            parts.append((f"{_quoted(key + ':')} {rule}_at{place}", key in needed))
            lines += _in_list(f"{rule}_at{place}", meant(each, root), root, form, inside)
        return [f'{rule}: "{{" {rule}_all "}}"', *_joined(f"{rule}_all", parts, form.comma), *lines]
    return [f"{rule}: {_json(schema, root)}"]


def _value(rule: str, schema: Mapping[str, Any], root: Mapping[str, Any], end: str, never: str) -> list[str]:
    """A value and its end. never: a regex of what no text may hold, as a reader would take it for the end."""
    if (listed := choices(schema)) is not None:
        return [f"{rule}: {' | '.join(_quoted(shown(choice) + end) for choice in listed)}"]
    if not is_text(schema, root):
        return [f"{rule}: {_json(schema, root)} {_quoted(end)}"]
    least, most = schema.get("minLength", 0), schema.get("maxLength", "")
    text = rf"(.|\n){{{least},{most}}}" if least or most != "" else _ANY
    if isinstance(pattern := schema.get("pattern"), str):
        text = _whole(pattern)
    return [f"{rule}[lazy]: {rule.upper()} {_quoted(end)}", f"{rule.upper()}: /{text}/ & ~/{_ANY}({never}){_ANY}/"]


def _json(schema: Mapping[str, Any], root: Mapping[str, Any]) -> str:
    shared = {key: root[key] for key in ("$defs", "definitions") if key in root}
    return f"%json {spaced({**schema, **shared})}"


def _marks(text: str) -> str:
    """A regex of the marks in a literal."""
    return "|".join(map(_pattern, _MARK.findall(text)))


def _whole(pattern: str) -> str:
    """A JSON schema's pattern, which may be found anywhere, as a regex of the whole text."""
    head = "" if pattern.startswith("^") else _ANY
    tail = "" if pattern.endswith("$") and not pattern.endswith(r"\$") else _ANY
    inner = pattern.removeprefix("^")
    inner = inner if tail else inner[:-1]
    return f"{head}({inner}){tail}".replace("/", r"\/")


def _quoted(text: str) -> str:
    """A literal; nothing for the empty one."""
    return json.dumps(text, ensure_ascii=False) if text else ""


def _pattern(text: str) -> str:
    """A regex of a literal text."""
    return re.escape(text).replace("\\\n", r"\n").replace("/", r"\/")
