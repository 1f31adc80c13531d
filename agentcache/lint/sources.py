"""JSON values out of files of any size, and out of a program's own objects, one at a time. Knows nothing of their meaning."""

from __future__ import annotations

import json
import os
import pkgutil
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from io import BytesIO
from itertools import chain
from pathlib import Path
from typing import IO, Any

from ..errors import ConfigError
from .json_stream import CHUNK, JsonStream, Note, is_message


def open_values(source: str, note: Note) -> Iterator[tuple[int, Any]]:
    """(line, value) of a file, of standard input ("-"), or of `module:object`; what cannot be read is told to note(line, why)."""
    if source == "-":
        return _of_bytes(sys.stdin.buffer, note)
    path = Path(source)
    if path.is_dir():
        raise ConfigError(f"{source!r} is a folder: give one file of recorded requests")
    if not path.exists():
        if re.fullmatch(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*", source):
            return _of_object(source)
        raise ConfigError(f"{source!r} is not there: give a .jsonl file of recorded requests, or module:object")
    try:
        return _of_file(path.open("rb"), note)
    except OSError as error:
        raise ConfigError(f"{source!r} cannot be read: {error.strerror or error}") from error


def _of_file(file: IO[bytes], note: Note) -> Iterator[tuple[int, Any]]:
    with file:
        yield from _of_bytes(file, note)


def _of_object(source: str) -> Iterator[tuple[int, Any]]:
    """The requests that `module:object` yields or returns; the object's code runs."""
    sys.path.insert(0, os.getcwd())
    try:
        found: Any = pkgutil.resolve_name(source)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"{source!r}: {error}; give module:object, importable from here, that is or returns requests") from error
    finally:
        sys.path.remove(os.getcwd())
    found = found() if callable(found) else found
    if isinstance(found, Mapping):
        found = [found]
    if isinstance(found, (str, bytes)) or not isinstance(found, Iterable):
        raise ConfigError(f"{source!r} gives {type(found).__name__}: it must be, or return, an iterable of requests (dicts)")
    return enumerate(found, 1)


def _of_bytes(file: IO[bytes], note: Note) -> Iterator[tuple[int, Any]]:
    head = file.read(CHUNK)
    text = head.removeprefix(b"\xef\xbb\xbf")
    first, newline, _ = text.lstrip().partition(b"\n")
    start = 1 + text[: len(text) - len(text.lstrip())].count(b"\n")
    if text.lstrip()[:1] == b"[" and not _is_list_line(first, bool(newline)):
        return JsonStream(text, file, note).values()
    if text.lstrip()[:1] == b"{" and newline and _goes_on(first, text.lstrip(), len(head) == CHUNK):
        return JsonStream(text, file, note).values()
    return _lines(text.lstrip(), file, start, note)


def _is_list_line(line: bytes, ended: bool) -> bool:
    """True if a line that starts with "[" is one request, a bare list of messages, and not the start of an array of requests."""
    try:
        value = json.loads(line) if ended or len(line) < CHUNK else None
    except (ValueError, RecursionError):
        return False
    return isinstance(value, list) and bool(value) and is_message(value[0])


def _goes_on(first: bytes, text: bytes, more: bool) -> bool:
    """True if an object is spread over several lines: the first line is no value, nor is any of the next ones."""
    lines = text.split(b"\n")[1:4]
    cut = more and text.count(b"\n") <= len(lines)  # the last of them goes on after the bytes read
    if cut and lines.pop()[:1] == b"{":
        return False  # in an object that is spread, a key stands there, or a space
    for line in (first, *lines):
        try:
            json.loads(line)
            return False
        except (ValueError, RecursionError):
            continue
    return True


def _lines(head: bytes, file: IO[bytes], start: int, note: Note) -> Iterator[tuple[int, Any]]:
    whole, _, begun = head.rpartition(b"\n")
    rest = begun + file.readline() if begun else b""
    lines = chain(whole.split(b"\n") if whole else (), [rest] if rest else (), file)
    for number, line in enumerate(lines, start):
        if not line.strip():
            continue
        try:
            yield number, json.loads(line.decode("utf-8"))
        except UnicodeDecodeError as error:
            note(number, f"not UTF-8 at byte {error.start}: left out")
        except RecursionError:
            note(number, "nested too deeply: left out")
        except ValueError as error:
            if line.lstrip()[:1] == b"{" and getattr(error, "msg", "") == "Extra data":  # a program that ends no line
                yield from JsonStream(line, BytesIO(), note, number).values()
            else:
                note(number, _why(error))


def _why(error: ValueError) -> str:
    if isinstance(error, json.JSONDecodeError):
        half = error.pos >= len(error.doc.rstrip()) - 1 or error.msg.startswith("Unterminated string")
        return f"{'half-written' if half else 'not JSON'} ({error.msg} at column {error.colno}): left out"
    return f"not JSON ({error}): left out"
