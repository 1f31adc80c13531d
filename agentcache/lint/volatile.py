"""Values that change by themselves: dates and times, ids, numbers. Knows texts only, nothing of requests."""

from __future__ import annotations

import re
from typing import NamedTuple

from .values import Cause

_MONTH = r"(?:Jan(?:uary)?|Feb(?:ruary)?|Mar(?:ch)?|Apr(?:il)?|May|June?|July?|Aug(?:ust)?|Sept?(?:ember)?|Oct(?:ober)?|Nov(?:ember)?|Dec(?:ember)?)"  # noqa: E501
# Months in other languages, by their first letters: between a day and a year nothing else is likely to stand.
_FOREIGN = r"(?:jan|jän|gen|ene|fe[bv]|fév|m[aä]r|a[pbv]r|ma[igy]|mei|ju[nil]|giu|lug|a[uoû][uûtg]|ago|se[pt]|o[ckut]t|out|nov|d[eéi][cz])[^\W\d_]*"  # noqa: E501
_DAY = r"(?:Mon|Tues?|Wed(?:nes)?|Thu(?:rs)?|Fri|Sat(?:ur)?|Sun)(?:day)?"
_TIME = r"\d{1,2}(?::\d{2}(?::\d{2}(?:[.,]\d{1,9})?)?(?:\s?[AaPp]\.?[Mm]\b\.?)?|\s?[Hh]\s?\d{2}\b)"
_ZONE = r"(?:\s?(?:Z\b|UTC|GMT|[ECMP][SD]?T\b|CES?T\b)|\s?[+-]\d{2}:?\d{2}\b)"
_DATE = rf"(?:\d{{4}}[-/.]\d{{1,2}}[-/.]\d{{1,2}}|\d{{1,2}}[-/.]\d{{1,2}}[-/.]\d{{4}}|\d{{4}}年\d{{1,2}}月\d{{1,2}}日|(?:{_DAY},?\s+)?(?:\d{{1,2}}(?:st|nd|rd|th|\.)?\s+(?:of\s+|de\s+)?(?:{_MONTH}|(?i:{_FOREIGN}))\.?,?\s+(?:de\s+)?\d{{4}}|{_MONTH}\.?\s+\d{{1,2}}(?:st|nd|rd|th)?,?\s+\d{{4}}))"  # noqa: E501
_STAMP = rf"{_DATE}(?:(?:T|,?\s+(?:at\s+)?){_TIME}{_ZONE}{{0,2}})?"
_EPOCH = r"(?:1[4-9]|2[01])\d{8}(?:\d{3}|\d{6}|\d{9})?(?:\.\d+)?"
_UUID = r"[0-9a-fA-F]{8}-(?:[0-9a-fA-F]{4}-){3}[0-9a-fA-F]{12}"
_MIXED = r"(?=[A-Za-z0-9]*\d)(?=[A-Za-z0-9]*[A-Za-z])[A-Za-z0-9]"  # letters and digits in one word
_TAGGED = r"[A-Za-z]{2,16}[_-](?=[A-Za-z0-9]*\d)[A-Za-z0-9]{6,}"
# An id, if it looks random. No look goes beyond its end: a long rule of dashes would be looked through from each of them.
_RUN = r"(?=[\w+/-]{0,127}\d)(?=[\w+/-]{0,127}[A-Za-z])[A-Za-z0-9](?:[A-Za-z0-9]|[_+/-](?=[A-Za-z0-9_+/-])){8,127}={0,2}"

# The alternatives in the order in which they win; a match is one value, never a piece of one.
_VALUES = (
    rf"(?P<stamp>(?<![\w.-]){_STAMP}|(?<!\d)\d{{8}}T\d{{4,6}}Z?\b)",
    rf"(?P<time>(?<![\w:.]){_TIME}{_ZONE}{{0,2}}(?![\w:]))",
    rf"(?P<id>\b(?:{_UUID}|0x[0-9a-fA-F]{{4,}}|(?=[0-9a-f]*[a-f])(?=[0-9a-f]*\d)[0-9a-f]{{7,64}}|{_TAGGED}|{_MIXED}{{8,64}})\b)",
    rf"(?P<epoch>(?<![\w.]){_EPOCH}(?![\w]))",
    rf"(?P<run>(?<![A-Za-z0-9]){_RUN})",
    rf"(?P<daytime>\b(?:{_DAY}|{_MONTH}|morning|afternoon|evening|night|noon|midnight|[AaPp][Mm])\b)",
    r"(?P<number>\d+(?:[.,]\d+)*)",
    r"(?P<word>[^\W\d]+)",
    r"(?P<space>\s+)",
    r"(?P<mark>.)",
)
_VALUE = re.compile("|".join(_VALUES), re.DOTALL)
_NO_RUN = re.compile("|".join(each for each in _VALUES if "<run>" not in each), re.DOTALL)
_ID_WORD = r"(?:\b|_)(?:ids?|uuid|guid|session|nonce|hash|sha\d*|token|salt|seed|pid|fingerprint|etag|key)(?:\b|_)"
# Words before a bare number that name it (the nearest one counts), and words right after it, which count more.
_CUES = re.compile(
    r"(?P<clock>\b(?:time|date|clock|now|today|timestamp|elapsed|uptime|since|weekday|datum|uhr)(?![a-z]))"
    rf"|(?P<id>{_ID_WORD})"
    r"|(?P<counter>step|turn|count|counter|iteration|attempt|remaining|left|budget|used|number|round|call|retries|version|tokens|messages|progress)",
    re.IGNORECASE,
)
_AFTER = re.compile(
    r"(?P<near>[smhd]\b)|[\s-]{0,2}(?:(?P<clock>(?:hours?|hrs?|minutes?|mins?|seconds?|secs?|ms|days?)\b|ago\b|o'clock)"
    r"|(?P<counter>%|(?:\w+\s+){0,2}(?:steps?|turns?|calls?|tokens?|messages?|attempts?|rounds?|times|iterations?|retries|tries|requests?|left|remaining|so far|used|done)\b))",  # noqa: E501
    re.IGNORECASE,
)
_ID_CUE = re.compile(_ID_WORD, re.IGNORECASE)
_NOW_CUE = re.compile(
    r"\b(current(ly)?|now|today(?:'s)?|as of|generated (at|on)|timestamp|date|time|updated|datum|uhrzeit)\b", re.IGNORECASE
)
_NEAR = 48  # characters before a value in which a word names it


class Value(NamedTuple):
    """A piece of text and its kind: a group name of the pattern above."""

    kind: str
    text: str


def values(text: str) -> list[Value]:
    """The text cut into values, words, white space and marks; joined, they are the text."""
    out: list[Value] = []
    at = 0
    while found := _VALUE.match(text, at):
        if found.lastgroup == "run":
            known = _random(found[0])
            found = found if known else _NO_RUN.match(text, at)
            assert found is not None
            out.append(Value("id" if known else str(found.lastgroup), found[0]))
        else:
            out.append(Value(str(found.lastgroup), found[0]))
        at = found.end()
    return out


def _random(run: str) -> bool:
    """True if letters, digits and cases alternate as no writer does: `V1StGXR8_Z5jdHi6B-myT`, not `getUser2` or `python-3`."""
    kinds = ["0" if c.isdigit() else "a" if c.islower() else "A" for c in run if c.isalnum()]
    turns = sum(one != other and one + other != "Aa" for one, other in zip(kinds, kinds[1:]))
    return turns >= 3 and turns >= 0.27 * len(kinds)


_OF_KIND = {"stamp": Cause.CLOCK, "time": Cause.CLOCK, "epoch": Cause.CLOCK, "daytime": Cause.CLOCK, "id": Cause.ID}
_PLAIN = ("space", "mark")


def kind_of(was: list[Value], now: list[Value], before: str, after: str, in_system: bool) -> Cause | None:
    """The class of a changed region, if it is only volatile values: `before` and `after` are the text around it."""
    told = [value for value in (*was, *now) if value.kind not in _PLAIN]
    if not told or not was or not now:
        return None
    kinds = {value.kind for value in told}
    near = before[-_NEAR:].rpartition("\n")[2]
    if kinds <= {"stamp", "time", "epoch", "daytime", "number"} and kinds != {"number"}:
        return Cause.CLOCK
    if kinds == {"number"}:
        return _number(near, after, in_system)
    if _ID_CUE.search(near) and all(_like_id(value) for value in told):
        return Cause.ID
    if kinds <= {"id", "number", "epoch"} and "id" in kinds:
        return Cause.ID
    if kinds <= {"id", "number", "word"} and "id" in kinds and not any(value.kind == "space" for value in (*was, *now)):
        return Cause.ID  # random words now and then have no digit
    return None


def _like_id(value: Value) -> bool:
    return value.kind in ("id", "number", "epoch") or (value.kind == "word" and len(value.text) >= 6 and not value.text.islower())


def _number(near: str, after: str, in_system: bool) -> Cause | None:
    """A bare number, by the words around it."""
    if (after_it := _AFTER.match(after[:40].partition("\n")[0])) is not None:
        return Cause.CLOCK if after_it["clock"] or after_it["near"] else Cause.COUNTER
    cues = [found.lastgroup for found in _CUES.finditer(near[-24:])]
    if cues:
        return Cause(cues[-1])
    return Cause.COUNTER if in_system else None


class Spot(NamedTuple):
    """A volatile value found in one text."""

    cause: Cause
    start: int
    stop: int


def spots(text: str, strict: bool = False) -> list[Spot]:
    """Values that are likely to be another in the next request. strict: only where nothing else can be meant (tool schemas).

    A date without a time of day, or a time alone, needs a word before it in its sentence that speaks of now: policies and examples are
    full of dates.
    """
    out = []
    for found in _SURE.finditer(text):
        kind, start = str(found.lastgroup), found.start()
        near = text[max(0, start - _NEAR) : start].rpartition("\n")[2]
        if kind == "id":
            out.append(Spot(Cause.ID, start, found.end()))
        elif not _EXAMPLE.search(near) and (_NOW_CUE.search(_ENDS.split(near)[-1]) or (kind == "stamp" and not strict and ":" in found[0])):
            out.append(Spot(Cause.CLOCK, start, found.end()))
    return out


_SURE = re.compile(
    rf"(?P<stamp>(?<![\w.-]){_STAMP}|(?<!\d)\d{{8}}T\d{{4,6}}Z?\b)|(?P<id>\b(?:{_UUID}|0x[0-9a-fA-F]{{6,}})\b)|(?P<time>(?<![\w:.]){_TIME}{_ZONE}{{0,2}}(?![\w:]))"
)
_EXAMPLE = re.compile(r"(e\.g\.|for example|such as|example|format|like|default|i\.e\.)[^.\n]*$", re.IGNORECASE)


def masked(text: str) -> str:
    """The text with its clocks and ids replaced by their kind: equal for texts that differ in nothing else."""
    return _MASKED.sub(lambda found: f"<{found.lastgroup}>", text)


_MASKED = re.compile(
    rf"(?P<clock>(?<![\w.-]){_STAMP}|(?<!\d)\d{{8}}T\d{{4,6}}Z?\b|(?<![\w:.]){_TIME}{_ZONE}{{0,2}}(?![\w:])|(?<![\w.]){_EPOCH}(?![\w]))"
    rf"|(?P<id>\b(?:{_UUID}|0x[0-9a-fA-F]{{4,}}|(?=[0-9a-f]*[a-f])(?=[0-9a-f]*\d)[0-9a-f]{{8,64}})\b)"
)


def hidden(text: str) -> str:
    """The text with nothing of it left but kinds and lengths."""
    shown = " \n\"',.:;{}[]()<>"
    return "".join(text if kind in _PLAIN and text in shown else f"<{kind} {len(text)}>" for kind, text in values(text))


def pattern(text: str, start: int, stop: int) -> str:
    """A regular expression for the sentence around text[start:stop] in which volatile values are patterns."""
    left = max((found.end() for found in _ENDS.finditer(text, max(0, start - 400), start)), default=max(0, start - 400))
    ending = _ENDS.search(text, stop, stop + 400)  # no further: a table in one line is looked through for each of its values
    right = min(len(text), stop + 400) if ending is None else ending.start() + (ending[0][0] != "\n")
    line = text[left:right]
    offset, out = left, []
    for value in values(line):
        inside = offset < stop and offset + len(value.text) > start
        offset += len(value.text)
        if (value.kind in _OF_KIND and value.kind != "daytime") or (inside and value.kind not in _PLAIN):
            out.append(_general(value))
        else:
            out.append(re.escape(value.text).replace("\\ ", " "))
    return "".join(out)


def line_pattern(text: str, at: int) -> str:
    """A regular expression for the rest of a line whose start is known; "" if nothing stands before `at` in it."""
    start = text[text.rfind("\n", 0, at) + 1 : at]
    return re.escape(start).replace("\\ ", " ") + r"[^\n]*" if len(start.strip()) >= 4 else ""


_ENDS = re.compile(r"[.!?]\s+|\n+")


def _general(value: Value) -> str:
    if value.kind == "id":
        tag = re.match(r"(?![0-9a-fA-F]+-)[A-Za-z]+[_-]", value.text)
        return re.escape(tag[0]) + r"[0-9A-Za-z]+" if tag else r"[0-9A-Za-z-]+"
    runs = re.finditer(r"(\d+)|([^\W\d_]+)|(\s+)|(.)", value.text)
    return "".join(r"\d+" if run[1] else r"[^\W\d_]+" if run[2] else r"\s+" if run[3] else re.escape(run[4]) for run in runs)
