"""JSON values one after the other, or in an array, out of a stream of any size: a damaged one is passed over. Knows no files.

A buffer holds little more than one value. Only the outermost array is opened; if it is one request, a list of messages, it is one value.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Callable, Iterator
from typing import IO, Any

CHUNK = 1 << 20  # bytes read at a time
MOST = 64 << 20  # characters of one value, beyond which it is taken for damaged
TRIES = 500  # places in damaged text at which a value might begin and does not, before the rest is left out; some more for each value
TRIES_EACH = 4
NEAR = 16  # characters before the end of the buffer where an error may only say that the value goes on

Note = Callable[[int, str], None]

_SPACE = re.compile(r"[ \t\r\n,]*")
_BEGINS = re.compile(r"[\n,][ \t\r\n]*(?=[{\[])")  # where a value may begin after a damaged one


def is_message(value: Any) -> bool:
    """True if a value is a message: a list that starts with one is a request, and no array of requests."""
    return isinstance(value, dict) and "role" in value


class JsonStream:
    """The values of one stream, in order, with their lines, from `first` on; what cannot be read is told to note(line, why)."""

    def __init__(self, head: bytes, file: IO[bytes], note: Note, first: int = 1) -> None:
        self._file, self._note = file, note
        self._decoder = json.JSONDecoder()
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._buffer = self._utf8.decode(head)
        self._at, self._line, self._ended = 0, first, False
        self._tries = TRIES
        self._inside = False  # the outermost array is open
        self._messages: list[Any] | None = None  # so far, of an outermost array that is one request
        self._since = 1

    def values(self) -> Iterator[tuple[int, Any]]:
        """(line, value) of each."""
        while self._skip():
            if self._buffer[self._at] == ("]" if self._inside else "["):
                yield from self._bracket()
                continue
            try:
                value, stop = self._value()
            except (ValueError, RecursionError) as error:
                if not self._resumed(error):
                    break
                continue
            line = self._line
            self._tries += TRIES_EACH
            self._pass(stop)
            if self._messages is None and self._inside and is_message(value):
                self._messages = []
            if self._messages is not None:
                self._messages.append(value)
            else:
                yield line, value
        if self._messages:
            yield self._since, self._messages

    def _bracket(self) -> Iterator[tuple[int, Any]]:
        """The outermost array begins, or ends."""
        if self._messages is not None:
            yield self._since, self._messages
        self._inside, self._messages, self._since = not self._inside, None, self._line
        self._pass(self._at + 1)

    def _skip(self) -> bool:
        """True if a value, or a bracket, stands after spaces and commas."""
        while True:
            found = _SPACE.match(self._buffer, self._at)
            assert found is not None
            self._pass(found.end())
            if self._at < len(self._buffer):
                if self._inside or self._buffer[self._at] != "]":
                    return True
                self._pass(self._at + 1)  # of an array whose beginning is lost
            elif not self._more():
                return False

    def _pass(self, stop: int) -> None:
        self._line += self._buffer.count("\n", self._at, stop)
        self._at = stop

    def _more(self) -> bool:
        """Reads on, doubling: a large value is not decoded again for each chunk."""
        if self._ended:
            return False
        more = self._file.read(max(CHUNK, len(self._buffer) - self._at))
        self._ended = not more
        self._buffer, self._at = self._buffer[self._at :] + self._utf8.decode(more, self._ended), 0
        return True

    def _value(self) -> tuple[Any, int]:
        """The value at this place, and its end; reads on where the buffer ends inside it. Raises what decoding raises."""
        while True:
            try:
                value, stop = self._decoder.raw_decode(self._buffer, self._at)
            except json.JSONDecodeError as error:
                cut = error.msg.startswith("Unterminated string") or error.pos >= len(self._buffer) - NEAR
                if not cut or len(self._buffer) - self._at > MOST or not self._more():
                    raise
                continue
            if stop < len(self._buffer) or not self._more():  # a number may go on
                return value, stop

    def _resumed(self, error: ValueError | RecursionError) -> bool:
        """Tells of a damaged value; whether another one follows that can be read."""
        line = self._line
        self._pass(self._at + 1)
        found = self._search()
        why = "nested too deeply" if isinstance(error, RecursionError) else f"not JSON ({getattr(error, 'msg', error)})"
        if not found and not self._tries:
            why = "damaged from here to the end, or nested too deeply"
        elif not found and isinstance(error, json.JSONDecodeError):
            why = "half-written or not JSON from here to the end"
        self._note(line, f"{why}: left out")
        return found

    def _search(self) -> bool:
        """Move to the next value, if there is one: after a line or a comma, and no piece of the damaged one."""
        while True:
            found = _BEGINS.search(self._buffer, self._at)
            if found is None:
                self._pass(max(self._at, len(self._buffer.rstrip(" \t\r\n,"))))  # what stands before a bracket that is not read yet stays
                if not self._more():
                    return False
                continue
            self._pass(found.end())
            try:
                value, stop = self._value()
            except (ValueError, RecursionError):
                self._tries -= 1  # each may look through all that was read: without a bound, megabytes of brackets take hours
                if not self._tries:
                    return False
                continue
            if self._whole(value):
                return True
            self._pass(stop)

    def _whole(self, value: Any) -> bool:
        """True if a value after a damaged one is no piece of that: a message, a part of one, a tool."""
        if self._messages is not None:
            return is_message(value)
        if isinstance(value, list):
            return bool(value) and is_message(value[0])
        return isinstance(value, dict) and not {"role", "type", "function"} & value.keys()
