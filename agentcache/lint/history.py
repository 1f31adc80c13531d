"""Two message lists of one conversation: the first place where the later one does not go on from the earlier, and the change there."""

from __future__ import annotations

import ast
import json
import re
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from ..layout.tokenise import common_length
from .texts import causes, parsed, same_items, shared_end
from .values import Cause, Said
from .volatile import masked

_THOUGHT = re.compile(r"<(think|thinking|thought|reasoning|scratchpad)>.*?(</\1>|\Z)\s*", re.DOTALL | re.IGNORECASE)
_SUMMARY = re.compile(
    r"\b(summar(y|ies|i[sz]ed?)|(conversation|history|context|messages|discussion) so far|(earlier|previous|prior) (conversation|messages|turns|discussion|steps)"  # noqa: E501
    r"|recap|condensed|compacted|what (has )?happened|progress (notes?|report|so far)|notes? (so far|up to now))\b",
    re.IGNORECASE,
)
MANY = 8  # places of one message that are tried


class Turned(NamedTuple):
    """A change of the history, and the index of the first difference in both lists."""

    cause: Cause
    at: int
    detail: str
    also: tuple[Cause, ...] = ()


def speaks_of_summary(text: str) -> bool:
    """True if a text says that it stands for earlier messages."""
    return _SUMMARY.search(text[:400]) is not None


def unthought(text: str) -> str:
    """Text without reasoning blocks."""
    return _THOUGHT.sub("", text).strip() if "<" in text else text.strip()


def alike(said: Said) -> tuple[object, ...]:
    """Equal for the same message written differently: without ids, reasoning, clocks and the form of JSON."""
    calls = tuple((call.name, _meant(call.arguments)) for call in said.calls)
    words = masked(unthought(said.content) if said.role == "assistant" else said.content.strip())
    value = parsed(words)
    return said.role, words if value is None else json.dumps(value, sort_keys=True, ensure_ascii=False), calls


def _meant(arguments: str) -> str:
    """The value of arguments, also dumped twice or printed as Python does."""
    value: object = parsed(arguments)
    if value is None and arguments.lstrip()[:1] == '"':
        try:
            value = parsed(str(json.loads(arguments)))
        except ValueError:
            value = None
    if value is None and arguments.lstrip()[:1] == "{":
        try:
            value = ast.literal_eval(arguments.strip())
        except (ValueError, SyntaxError, RecursionError, MemoryError):
            value = None
    return arguments.strip() if value is None else json.dumps(value, sort_keys=True, ensure_ascii=False, default=repr)


def turned(was: Sequence[Said], now: Sequence[Said]) -> Turned | None:
    """The change that keeps `now` from starting with `was`; None if there is none, or if `now` only stops earlier."""
    first = common_length(was, now)
    if first >= len(was) or first >= len(now):
        return None
    old, new = [alike(said) for said in was[first:]], [alike(said) for said in now[first:]]
    front = not any(said.role == "assistant" for said in was[:first])
    if old[0] == new[0]:
        return _rewritten(was[first], now[first], first)
    if _unwrapped(was[first], now[first]):
        return Turned(Cause.EDITED, first, "what stood around it was taken out again")
    if (kept := _permuted(old, new)) > 1:
        return Turned(Cause.ORDER, first, f"the same {kept} messages in another order")
    if _calls_dropped(was[first], now[first]):
        return Turned(Cause.REASONING, first, "what the model said beside its call, or before its answer, is gone")
    if front and was[first].role == now[first].role != "tool" and all(speaks_of_summary(one[first].content) for one in (was, now)):
        return Turned(Cause.SUMMARY, first, "the summary before the history was written anew")
    gone, come = _moved(old, new)
    if come == 0 and gone:
        return _removed(was, now, first, gone)
    if len(old) == 1 and come and old[0][0] != "assistant" and new[0][0] == "assistant":  # answered, and sent once more after that
        return Turned(Cause.EDITED, first, f"the last message ({old[0][0]}) was not kept: taken out again")
    if gone == 0 and come:
        cause = Cause.SUMMARY if front else Cause.EDITED
        return Turned(cause, first, f"{counted(come, 'message')} put in before it")
    if gone is None or come is None:
        return _replaced_tail(was[first:], now[first:], first, front)
    if gone == come:
        return _in_place(was, now, first, front)
    cause = Cause.SUMMARY if gone > come else Cause.EDITED
    return Turned(cause, first, f"{counted(gone, 'message')} replaced by {come}")


def _unwrapped(was: Said, now: Said) -> bool:
    """True if a user's message was first shown inside more text, such as a workflow's state or retrieved passages, and is bare now."""
    bare = now.content.strip()
    return was.role == now.role == "user" and len(bare) < len(was.content.strip()) and bool(bare) and was.content.strip().endswith(bare)


def _moved(old: list[tuple[object, ...]], new: list[tuple[object, ...]]) -> tuple[int | None, int | None]:
    """(messages gone, messages come) before the lists go on alike; None, None if nothing of the old one comes back.

    Results like "ok" stand in many places: a place from which all of the rest comes back is believed before one that is nearer.
    """
    where: dict[tuple[object, ...], list[int]] = {}
    for at, key in enumerate(new):
        where.setdefault(key, []).append(at)
    best: tuple[bool, int, int, int] | None = None
    for at, key in enumerate(old):
        for found in where.get(key, ())[:MANY]:
            run = common_length(old[at:], new[found:])
            rank = (at + run < len(old), at + found, at, found)
            if best is None or rank < best:
                best = rank
        if best is not None and not best[0] and at >= best[1]:
            break
    return (None, None) if best is None else best[2:]


def _permuted(old: list[tuple[object, ...]], new: list[tuple[object, ...]]) -> int:
    """Count the messages from here on that are the same in another order: results in the order in which they arrived."""
    seen: Counter[tuple[object, ...]] = Counter()
    for count, (one, other) in enumerate(zip(old[:16], new[:16]), 1):
        seen[one] += 1
        seen[other] -= 1
        if not any(seen.values()):
            return count
    return 0


def _rewritten(was: Said, now: Said, at: int) -> Turned:
    """The same message in other words."""
    if was.content.strip() != now.content.strip() and unthought(was.content) != unthought(now.content):
        return _text_changed(was, now, at)
    if was.reasoning != now.reasoning or was.content.strip() != now.content.strip():
        gone = len(was.reasoning) + len(was.content) > len(now.reasoning) + len(now.content)
        return Turned(Cause.REASONING, at, f"its reasoning is {'gone' if gone else 'another'}")
    if [call.arguments for call in was.calls] != [call.arguments for call in now.calls]:
        name = next(one.name for one, other in zip(was.calls, now.calls) if one.arguments != other.arguments)
        return Turned(Cause.ARGUMENTS, at, f"the arguments of {name!r} are the same, written differently")
    if [call.id for call in was.calls] != [call.id for call in now.calls] or was.call_id != now.call_id:
        return Turned(Cause.ID, at, "ids of tool calls made anew")
    return Turned(Cause.EDITED, at, "white space around it, or its name, changed")


def _text_changed(was: Said, now: Said, at: int) -> Turned:
    """The content of a message changed where it stands."""
    if parsed(was.content) is not None and parsed(was.content) == parsed(now.content):
        if same_items(was.content, now.content):
            return Turned(Cause.ORDER, at, "the same JSON with its keys in another order")
        return Turned(Cause.EDITED, at, "the same JSON, written differently")
    found = causes(was.content, now.content)
    more = tuple(dict.fromkeys(cause for cause in found[1:] if cause is not None and cause is not found[0]))
    if found[0] is None or (None in found and found[0] not in (Cause.CLOCK, Cause.ID)):
        return Turned(Cause.EDITED, at, "its text changed")
    return Turned(found[0], at, f"a {found[0]} in it changed" if found[0] is not Cause.ORDER else "its items are in another order", more)


def _calls_dropped(was: Said, now: Said) -> bool:
    """True if an assistant message lost its text before its call or its answer, and nothing else."""
    if was.role != "assistant" or now.role != "assistant" or alike(was)[2] != alike(now)[2]:
        return False
    old, new = unthought(was.content), unthought(now.content)
    return len(new) < len(old) and (bool(was.calls) and not new or bool(new) and old.endswith(new))


def _removed(was: Sequence[Said], now: Sequence[Said], at: int, gone: int) -> Turned:
    """Messages that are gone: text for one request, which no turn answered, or the history itself."""
    said = was[at : at + gone]
    # what stood before the newest message, and has a successor there now: written for each request
    moving = at + gone == len(was) - 1 and len(now) > 1 and now[-2].role == said[0].role
    put_in = any(one.role == "assistant" for one in was[:at]) and was[at - 1].role != "assistant"
    if any(one.role in ("assistant", "tool") for one in said) or not (moving or put_in):
        return Turned(Cause.TRUNCATED, at, f"{counted(gone, 'message')} dropped")
    return Turned(Cause.EDITED, at, f"{counted(gone, f'{said[0].role} message')} taken out again")


def _in_place(was: Sequence[Said], now: Sequence[Said], at: int, front: bool) -> Turned:
    """One message, or as many as before, changed where they stand; what follows stayed."""
    old, new = was[at], now[at]
    found = _text_changed(old, new, at) if old.role == new.role else Turned(Cause.EDITED, at, f"{old.role} became {new.role}")
    doubled = old.role in ("user", "system") and at + 1 < len(was) and was[at + 1].role in ("user", "assistant")
    if found.cause is Cause.EDITED and front and doubled and (speaks_of_summary(new.content) or speaks_of_summary(old.content)):
        return Turned(Cause.SUMMARY, at, "the text before the history was written anew")
    return found


def _replaced_tail(old: Sequence[Said], new: Sequence[Said], at: int, front: bool) -> Turned:
    """Nothing of what stood from here on comes back."""
    same = old[0].role == new[0].role and old[0].role != "assistant"
    rewritten = same and (similar(old[0].content, new[0].content) or common_length(old[0].content, new[0].content) >= 12)
    if len(old) == 1 and (rewritten or (same and at)):
        return _text_changed(old[0], new[0], at)
    gone = f"{counted(len(old), 'message')} replaced by {len(new)}"
    if speaks_of_summary(new[0].content) and new[0].role != "assistant":
        return Turned(Cause.SUMMARY, at, gone)
    if at == 0:  # nothing of the history is left; what an answer follows was there before it, in other words
        invented = len(new) > 1 and new[0].role in ("user", "system") and new[1].role == "assistant"
        return Turned(Cause.SUMMARY if rewritten or invented else Cause.TRUNCATED, at, gone)
    if len(old) == 1:
        return Turned(Cause.EDITED, at, f"the last message ({old[0].role}) was not kept: taken out again")
    if new[0].role != "assistant" and old[0].role != new[0].role and (front or len(new) < len(old)):
        return Turned(Cause.SUMMARY, at, gone)
    if same:
        return _text_changed(old[0], new[0], at)
    return Turned(Cause.EDITED, at, f"went back to an earlier state: {gone}")


def similar(was: str, now: str, share: float = 0.2) -> bool:
    """True if two texts start and end alike for a good part of the shorter."""
    head = common_length(was, now)
    most = min(len(was), len(now))
    return head + shared_end(was, now, most - head) >= share * most


def counted(number: int, what: str) -> str:
    """A number of things, in words."""
    return f"{number:,} {what}{'' if number == 1 else 's'}"
