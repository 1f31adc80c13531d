"""Two requests of one conversation: every way in which the later does not go on from the earlier, in the order of the prompt."""

from __future__ import annotations

import json
from collections.abc import Sequence

from ..layout.tokenise import common_length
from .history import Turned, similar, speaks_of_summary, turned
from .texts import causes, parsed, window
from .values import Cause, Change, Request, Said, Shown


def compare(was: Request, now: Request) -> list[Change]:
    """The changes, system and tools in the order in which their provider shows them, then the history."""
    if was.prompt is not None or now.prompt is not None:
        return _prompts(was.prompt or "", now.prompt or "")
    history = turned(was.history, now.history)
    front = [*_tools(was.tools, now.tools), *_system(was, now, history)]
    if not now.tools_first:
        front.reverse()
    return [*front, *_history(history, was, now)]


def who(said: Said) -> str:
    """A message as findings name it."""
    return f"message {said.source} ({said.role})"


def _system(was: Request, now: Request, history: Turned | None) -> list[Change]:
    old, new = was.system, now.system
    at = common_length([said.content for said in old], [said.content for said in new])
    if at == len(old) == len(new):
        return []
    name, cut = "system" if at == 0 else f"system message {at}", history is not None and history.cause in (Cause.TRUNCATED, Cause.SUMMARY)
    if at == len(old) or at == len(new):
        said, verb = (new[at], "put in") if at < len(new) else (old[at], "taken out")
        cause = Cause.SUMMARY if cut or (at and speaks_of_summary(said.content)) else Cause.STATE
        return [Change(cause, "system", name, f"a system message was {verb}")]
    cause, detail = _system_text(old[at].content, new[at].content)
    whole = not similar(old[at].content, new[at].content, 0.6)  # not a system text in which something changed
    if (cut and (at or whole)) or (at and cause is Cause.STATE and speaks_of_summary(new[at].content)):
        cause, detail = Cause.SUMMARY, "the system message before the history was written anew"
    return [Change(cause, "system", name, detail)]


def _system_text(was: str, now: str) -> tuple[Cause, str]:
    found = causes(was, now, in_system=True)
    first = found[0]
    if first is Cause.ORDER:
        return first, "the same lines or items in another order"
    if first in (Cause.CLOCK, Cause.ID) or (first is not None and None not in found):
        more = sorted({str(cause) for cause in found[1:] if cause is not None and cause is not first})
        return first, f"a {first} in it changed" + (f", and a {' and a '.join(more)}" if more else "")
    start, was_stop, now_stop = window(was, now)
    old, new = was[start:was_stop].split("\n"), now[start:now_stop].split("\n")
    if any(speaks_of_summary("\n".join(line for line in one if line not in other)) for one, other in ((old, new), (new, old))):
        return Cause.SUMMARY, "a summary in it was written anew"
    return Cause.STATE, "its text changed"


def _tools(was: Sequence[Shown], now: Sequence[Shown]) -> list[Change]:
    at = common_length([tool.text for tool in was], [tool.text for tool in now])
    if at == len(was) == len(now):
        return []
    old, new = [tool.name for tool in was], [tool.name for tool in now]
    writer = f"tool {at} {new[at]!r}" if at < len(new) else f"tool {at} {old[at]!r} (gone)"
    added, gone = [name for name in new if name not in old], [name for name in old if name not in new]
    if at < len(old) and at < len(new) and old[at] == new[at]:
        cause, detail = _tool_text(was[at].text, now[at].text)
        return [Change(cause, "tools", writer, detail)]
    said = "; ".join(f"{what} {_few(names)}" for what, names in (("added", added), ("gone", gone)) if names)
    kept_old, kept_new = [name for name in old if name in new], [name for name in new if name in old]
    swapped = kept_old != kept_new
    here_swapped = at < len(old) and at < len(new) and old[at] in new and new[at] in old
    if swapped and (here_swapped or not (added or gone)):
        return [Change(Cause.ORDER, "tools", writer, "the tools are in another order" + (f"; {said}" if said else ""))]
    return [Change(Cause.TOOL_SET, "tools", writer, said or "a tool is shown more than once")]


def _few(names: Sequence[str]) -> str:
    return ", ".join(map(repr, names[:4])) + (f" and {len(names) - 4} more" if len(names) > 4 else "")


def _tool_text(was: str, now: str) -> tuple[Cause, str]:
    """The schema of one tool changed: the order of its keys or items, a volatile value in it, or its words."""
    old, new = parsed(was), parsed(now)
    if json.dumps(old, sort_keys=True) == json.dumps(new, sort_keys=True):
        return Cause.ORDER, "the keys of its schema are in another order"
    if _unordered(old) == _unordered(new):
        return Cause.ORDER, "a list in its schema is in another order"
    found = causes(was, now, in_system=True)
    if found[0] in (Cause.CLOCK, Cause.ID):
        return found[0], f"a {found[0]} in its schema changed"
    if found[0] is Cause.ORDER:
        return Cause.ORDER, "items in its schema are in another order"
    return Cause.TOOL_SET, "its schema changed"


def _unordered(value: object) -> object:
    """A JSON value in which the order of lists does not count either."""
    if isinstance(value, dict):
        return {key: _unordered(each) for key, each in sorted(value.items())}
    if isinstance(value, list):
        return sorted(map(_unordered, value), key=lambda each: json.dumps(each, sort_keys=True))
    return value


def _history(history: Turned | None, was: Request, now: Request) -> list[Change]:
    if history is None:
        return []
    gone = history.cause is Cause.TRUNCATED or history.detail.endswith("taken out again")
    writer = who((was if gone else now).history[history.at])
    return [Change(cause, "history", writer, history.detail) for cause in (history.cause, *history.also)]


def _prompts(was: str, now: str) -> list[Change]:
    """Raw text: its lines are what messages are elsewhere."""
    if now.startswith(was) or was.startswith(now):
        return []
    old, new = was.split("\n"), now.split("\n")
    at = common_length(old, new)
    if at == len(old) - 1 and at < len(new) and new[at].startswith(old[at].rstrip()):
        return [Change(Cause.EDITED, "prompt", f"line {at + 1}", "white space at the end of the previous prompt was not kept")]
    cause, detail = _lines(old[at:], new[at:], at < len(old) / 4)
    return [Change(cause, "prompt", f"line {at + 1}", detail)]


def _lines(old: list[str], new: list[str], front: bool) -> tuple[Cause, str]:
    """front: the first quarter of a raw prompt, which is taken for what a system text is elsewhere."""
    where = {line: number for number, line in reversed(list(enumerate(new))) if line.strip()}
    best: tuple[int, int] | None = None
    for number, line in enumerate(old[:400]):
        if line in where and _goes_on(old, number, new, where[line]) and (best is None or number + where[line] < sum(best)):
            best = (number, where[line])
    if best is None:
        return Cause.EDITED, "its text changed, and nothing after it stayed"
    gone, come = best
    removed, inserted = "\n".join(old[:gone]), "\n".join(new[:come])
    if sorted(old[:gone]) == sorted(new[:come]):
        return Cause.ORDER, "the same lines in another order"
    if removed.endswith(inserted):  # a window may cut inside a line
        return Cause.TRUNCATED, f"{gone - come} lines dropped" if gone > come else "the start of a line dropped"
    if speaks_of_summary(inserted):
        return Cause.SUMMARY, "a summary before the history was written anew"
    if not removed.strip():
        return (Cause.STATE if front else Cause.EDITED), f"{come} lines put in"
    found = causes(removed, inserted, in_system=True)
    if found[0] is Cause.ORDER or found[0] in (Cause.CLOCK, Cause.ID) or (found[0] is not None and None not in found):
        return found[0] or Cause.EDITED, f"a {found[0]} in it changed"
    if len(removed) > 2 * len(inserted) and gone > come:
        return Cause.TRUNCATED, f"{gone} lines replaced by {come}"
    return (Cause.STATE if front else Cause.EDITED), f"{gone} lines replaced by {come}"


def _goes_on(old: list[str], at: int, new: list[str], to: int) -> bool:
    """True if from here on the two go on alike: some lines, or the rest of the earlier one."""
    size = min(4, len(old) - 1 - at, len(new) - to)  # the last line of the earlier one may have been half a line
    return size > 0 and old[at : at + size] == new[to : to + size]
