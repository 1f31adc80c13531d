"""The one parser of completions: reasoning, text, calls and their arguments, each as soon as it is certain. Knows nothing of tokens.

A response template says where they lie. Nothing is lost: a call that is malformed or cut short stays text of the message. The text may come
in any pieces; all at once is one of them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from ..types import Message, ToolCall
from .response_template import Kind, Mark, Region, ResponseTemplate, template_for

if TYPE_CHECKING:  # of a completion that calls
    from .call_json import CallReader, Told

CUT, MALFORMED = "cut short: the completion ends inside it", "malformed: not an object with a name and arguments"
DeltaKind = Literal["text", "reasoning", "call", "arguments", "cut"]


@dataclass(frozen=True, slots=True)
class Delta:
    """A piece of an answer.

    call: call number `index` begins, `text` is its tool's name, `id` its own. arguments: the next piece of their JSON text.
    cut: that call is none, as the completion ended in it or it is malformed; with `text` after them its arguments are no JSON, however
    kindly they are read.
    """

    kind: DeltaKind
    text: str
    index: int = 0
    id: str = ""


@dataclass(frozen=True, slots=True)
class InvalidCall:
    """A call that a completion began and that is none: cut short, or malformed. Never one to run; its text stays in the message's content.

    name: empty if it was not written whole. arguments: their text, as far as it came. error: why, in words. id: the id under which deltas
    told of it, None if they told of none.
    """

    name: str
    arguments: str
    error: str
    id: str | None = None


class AnswerParser:
    """Deltas of one completion, and in the end its message.

    begun: what of the answer the prompt has begun. tools: as they were rendered; arguments without types of their own take them from there.
    names: of tools, None for any; a call without a mark is one only if it names one of them. identify: the id of call number so much.
    """

    def __init__(
        self,
        template: ResponseTemplate,
        begun: str = "",
        *,
        tools: Sequence[Any] = (),
        names: Collection[str] | None = None,
        identify: Callable[[int], str] | None = None,
    ) -> None:
        self._template, self._tools, self._identify = template, list(tools), identify
        self._names = None if names is None else frozenset(names)
        self._text, self._begun = begun, len(begun)
        self._at = 0  # the text before it is read
        self._region: Region | None = None  # one that a mark has opened: its start, its body's, and what the mark names
        self._start = self._body = 0
        self._named = ""
        self._calls: CallReader | None = None
        self._space: dict[str, str | None] = {"text": None, "reasoning": None}  # held back; None: nothing was told yet
        self._said: dict[str, list[str]] = {"text": [], "reasoning": []}
        self._made: list[ToolCall | InvalidCall] = []
        self._told = 0  # calls
        self._cut = ""
        self._thought_ends = 0
        self._out: list[Delta] = []
        self._read(final=False)
        self._out, self._said = [], {"text": [], "reasoning": []}

    def push(self, text: str) -> list[Delta]:
        """What has become certain with this text."""
        self._text += text
        return self._read(final=False)

    def finish(self, cut: str = "") -> list[Delta]:
        """The rest, now that nothing follows. cut: what ended the completion, if not the model."""
        self._cut = cut
        out = self._read(final=True)
        if self._template.sink is None and not self._made and not any(self._said.values()):  # nothing is where the template looks for it
            plain = template_for()
            calls = any(region.kind == "call" for region in self._template.regions)
            self._template = plain if calls else plain.without_calls()
            self._text, self._begun, self._at = self._text[self._begun :], 0, 0
            out += self._read(final=True)
        return out

    @property
    def message(self) -> Message:
        """The message that the completion spells; whole once `finish` was called."""
        calls = tuple(call for call in self._made if isinstance(call, ToolCall))
        thought = "".join(self._said["reasoning"]).strip() or None
        return Message("assistant", "".join(self._said["text"]).strip(), calls, reasoning=thought)

    @property
    def invalid_calls(self) -> tuple[InvalidCall, ...]:
        """The calls that the completion began and that are none."""
        return tuple(call for call in self._made if isinstance(call, InvalidCall))

    @property
    def thinks(self) -> bool:
        """Whether a thought is open."""
        return self._region is not None and self._region.kind == "reasoning"

    @property
    def thought_chars(self) -> int:
        """How many characters of the completion there are up to the end of its thought."""
        return max(0, self._thought_ends - self._begun)

    def _read(self, *, final: bool) -> list[Delta]:
        while self._step(final):
            pass
        out, self._out = self._out, []
        return out

    def _step(self, final: bool) -> bool:
        """Read to the next mark, or as far as is certain; whether there is more to read."""
        if self._region is None:
            return self._outside(final)
        if self._calls is not None:
            return self._in_calls(self._region, self._calls, final)
        return self._inside(self._region, final)

    # -- regions ---------------------------------------------------------------------------------------------------

    def _outside(self, final: bool) -> bool:
        sink = self._template.sink
        marks = [(region.open, region) for region in self._template.regions if region.open]
        found, region, stop = self._find([*marks, *([(sink.close, sink)] if sink and sink.close else [])], final)
        if sink is not None:
            self._say(sink.kind, self._at, stop)
        self._at = stop if found is None else found.end()
        if found is None:
            return False
        if region is sink:
            return bool(found.end() > found.start())
        if region.kind != "mark":
            self._open(region, found)
        elif not self._made or isinstance(self._made[-1], InvalidCall):
            self._say("text", found.start(), found.end())
        return True

    def _open(self, region: Region, found: Any) -> None:
        self._region, self._start, self._body = region, found.start(), found.end()
        self._named = found.groupdict().get("name") or ""
        if region.keys is not None:
            from .call_json import CallReader

            unmarked = self._body == self._start
            self._calls = CallReader(region.keys, self._body, self._named, self._names if unmarked else None)
        elif region.join and region.kind != "call" and self._space[region.kind] is not None:
            self._tell(region.kind, region.join)

    def _inside(self, region: Region, final: bool) -> bool:
        found, _, stop = self._find([(region.close, region)] if region.close else [], final)
        if region.kind != "call":
            self._say(region.kind, self._at, stop)
        self._at = stop
        if found is None and not final:
            return False
        end = found.end() if found else stop
        if region.kind == "call":
            self._finish_calls(region, stop, end, ended=found is None)
        self._region, self._at = None, end
        return found is not None

    def _find(self, marks: Sequence[tuple[Mark, Region]], final: bool) -> tuple[Any, Any, int]:
        """The first of these marks that is whole, its region, and where the text before it ends, or what is certain of it."""
        best, region, certain = None, None, len(self._text)
        for mark, each in marks:
            found = mark.pattern.search(self._text, self._at, partial=not final)
            if found is None:
                continue
            if not final and mark.open_ended(found, self._text):
                certain = min(certain, found.start())
            elif best is None or (found.start(), -found.end()) < (best.start(), -best.end()):
                best, region = found, each
        if best is None or best.start() >= certain:
            return None, None, certain
        return best, region, best.start()

    def _say(self, kind: Kind, start: int, stop: int) -> None:
        text = self._text[start:stop]
        self._tell(kind, text)
        if kind == "reasoning" and text.strip():
            self._thought_ends = start + len(text.rstrip())

    def _tell(self, kind: Kind, text: str) -> None:
        """Text as it is, but for white space around all of its kind."""
        held = self._space[kind]
        text = text.lstrip() if held is None else held + text
        kept = text.rstrip()
        if kept:
            self._out.append(Delta("reasoning" if kind == "reasoning" else "text", kept))
            self._said[kind].append(kept)
        self._space[kind] = text[len(kept) :] if kept or held is not None else None

    # -- calls -----------------------------------------------------------------------------------------------------

    def _in_calls(self, region: Region, calls: CallReader, final: bool) -> bool:
        self._take(calls.read(self._text, final=final))
        end = self._end(region, calls, final) if calls.state == "over" else None
        if end is not None:
            self._take(calls.confirm())
        elif calls.state == "text" and self._template.sink is not None and not self._closes(region, calls.at):
            end = max(self._body, self._start + 1)  # the mark is only spoken of
            self._say("text", self._start, end)
        elif calls.state in ("text", "bad", "cut"):
            end = self._give_up(region, calls, final)
        if end is None:
            return False
        self._region, self._calls, self._at = None, None, end
        return True

    def _take(self, told: Sequence[Told]) -> None:
        for each in told:
            if isinstance(each, ToolCall):
                self._made.append(replace(each, id=self._id(self._told)))
                self._told += 1
            elif each[0] == "call":
                self._out.append(Delta("call", each[1], self._told, self._id(self._told) or ""))
            else:
                self._out.append(Delta("arguments", each[1], self._told))

    def _closes(self, region: Region, at: int) -> bool:
        return region.close is not None and region.close.pattern.match(self._text, at, partial=True) is not None

    def _id(self, index: int) -> str | None:
        return self._identify(index) if self._identify else None

    def _end(self, region: Region, calls: CallReader, final: bool) -> int | None:
        """Where a region of whole calls ends, half a mark at the end of all included; None if that is not known yet."""
        if region.close is None:
            return calls.at
        found = region.close.pattern.match(self._text, calls.after_space(self._text), partial=True)
        if found is None:
            calls.state = "bad"
        elif final or not region.close.open_ended(found, self._text):
            return int(found.end())
        return None

    def _give_up(self, region: Region, calls: CallReader, final: bool) -> int | None:
        """Make text of a region, from the call on that is none, up to the next mark that closes it. Where that ends, if it is known."""
        start, body = (calls.start, calls.start) if calls.count else (self._start, self._body)
        close = region.close if calls.state != "cut" else None
        found = close.pattern.search(self._text, body, partial=not final) if close else None
        if not final and (close is None or found is None or close.open_ended(found, self._text)):
            return None
        stop, end = (found.start(), found.end()) if found else (len(self._text), len(self._text))
        name, arguments = calls.half(self._text, stop)
        if calls.told:
            self._out.append(Delta("cut", calls.unreadable, self._told))
            self._said["text"].append((self._space["text"] or "") + self._text[start:end])
            self._space["text"] = ""
        else:
            self._say("text", start, end)
        marked = self._body > self._start
        if marked or calls.told or (arguments and calls.state == "cut"):  # an object without a mark is no call only because it has a name
            self._refuse(name, arguments, ended=found is None or not found.group().strip(), told=calls.told)
        return end

    def _finish_calls(self, region: Region, stop: int, end: int, *, ended: bool) -> None:
        """Make calls of a region whose calls are no JSON, or text. ended: by the end of the completion."""
        from .call_json import whole

        body = self._text[self._body : stop]
        half = region.close.pattern.search(body, partial=True) if ended and region.close else None
        opened = self._text[self._start : self._body]
        inner = body[: half.start()] if half else body
        text = opened + inner if half else self._text[self._start : end]
        calls = [] if ended and self._cut else region.calls(text, inner, None if self._template.typed else self._tools)
        name = self._named
        if self._names is not None and not opened:  # without a mark it is a call only if it names a tool
            name = next((one for one in self._names if re.match(rf"\[\s*{re.escape(one)}\(", body)), "")
            calls = calls if name else []
        for call in calls:
            self._take(whole(self._typed(call) if self._template.typed else call))
        if not calls:
            self._say("text", self._start, end)
            if name or opened or self._names is None:
                self._refuse(name, body, ended=ended, told=False)

    def _refuse(self, name: str, arguments: str, *, ended: bool, told: bool) -> None:
        error = f"{CUT}, {self._cut}" if ended and self._cut else MALFORMED
        self._made.append(InvalidCall(name, arguments, error, self._id(self._told) if told else None))
        self._told += told

    def _typed(self, call: ToolCall) -> ToolCall:
        from .tag_values import value_of

        known = {each["name"]: each.get("parameters") or {} for tool in self._tools if "name" in (each := tool.get("function", tool))}
        schema, said = known.get(call.name, {}), call.arguments.items()
        return ToolCall(call.name, {key: value_of(value, schema, key) if isinstance(value, str) else value for key, value in said})
