"""Requests written down, one JSON object a line, for `agentcache lint` and `agentcache calibrate`. Knows no engine and no framework.

    {"conversation_id": ..., "model": ..., "messages": [...], "tools": [...], "response": {"choices": [{"message": ...}], "usage": ...}}

A raw text prompt stands as "prompt" in the place of "messages", its answer as "text" in the place of "message". The file holds the prompts
in clear: only its owner may read it.
"""

from __future__ import annotations

import errno
import json
import os
import stat
import sys
import threading
import warnings
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from .errors import ConfigError, StoreWarning
from .types import Message, Tool

Said = Message | Mapping[str, Any]


class Recorder(AbstractContextManager["Recorder"]):
    """A file that requests are appended to. Safe to use from many threads; several processes may append to one file.

    A recording never fails a request: what cannot be written ends it, with one StoreWarning. Close it, or use it as a context manager.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(os.path.expanduser(path))
        self._lock = threading.Lock()
        self._file: int | None = None
        try:
            self._file = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT | getattr(os, "O_BINARY", 0), 0o600)
            self._regular = stat.S_ISREG(os.fstat(self._file).st_mode)
            if self._regular and sys.platform != "win32":  # one that was there may be open to others
                os.fchmod(self._file, 0o600)
        except OSError as error:
            self.close()
            raise ConfigError(
                f"Recorder({str(path)!r}): {error.strerror or error}; name a file of your own, in a folder that may be written"
            ) from error

    def record(
        self,
        messages: Sequence[Said] | str,
        tools: Sequence[Tool | Mapping[str, Any]] = (),
        answer: Said | str | None = None,
        *,
        conversation: str | None = None,
        model: str = "",
        finish_reason: str | None = None,
        usage: Mapping[str, Any] | None = None,
    ) -> None:
        """Append one request, messages in OpenAI's chat shape or a raw prompt, and its answer if there is one.

        conversation: an id that all requests of one conversation share. Dicts are written as they are.
        """
        try:
            asked = {"prompt": messages} if isinstance(messages, str) else {"messages": [_message(each) for each in messages]}
            body: dict[str, Any] = {"conversation_id": conversation, "model": model, **asked, "tools": [_tool(tool) for tool in tools]}
            if answer is not None:
                said = {"text": answer} if isinstance(answer, str) else {"message": _message(answer)}
                body["response"] = {"choices": [{"index": 0, **said, "finish_reason": finish_reason}], "usage": dict(usage or {})}
            line = json.dumps(body, ensure_ascii=False, default=repr)
        except (TypeError, ValueError, RecursionError) as error:  # keys that are no text, values that hold themselves
            warnings.warn(f"recording {str(self.path)!r}: a request was left out: {error}", StoreWarning, stacklevel=2)
            return
        try:
            self._append(f"{line}\n".encode("utf-8", "replace"))
        except OSError as error:
            self.close()
            warnings.warn(f"recording {str(self.path)!r} ended: {error}; requests go on without it", StoreWarning, stacklevel=2)

    def _append(self, line: bytes) -> None:
        with self._lock:
            found = os.fstat(self._file) if self._file is not None and self._regular else None
            if found is not None and not found.st_nlink:
                raise FileNotFoundError(errno.ENOENT, "the file was deleted")
            if self._file is not None and found is not None and found.st_size:
                os.lseek(self._file, found.st_size - 1, os.SEEK_SET)
                if os.read(self._file, 1) != b"\n":  # half a line, of a process that found the disk full
                    line = b"\n" + line
            while line and self._file is not None:
                line = line[os.write(self._file, line) :]

    def close(self) -> None:
        """End the recording; later records are not written. Closing twice is fine."""
        with self._lock:
            file, self._file = self._file, None
        if file is not None:
            os.close(file)

    def __exit__(self, *exc: object) -> None:
        self.close()


def _message(said: Said) -> dict[str, Any]:
    """A message in OpenAI's shape."""
    if not isinstance(said, (Message, Mapping)):
        raise TypeError(f"{said!r:.80} is no message: give a Message, or a dict; of a Completion its `message`")
    if not isinstance(said, Message):
        return dict(said)
    calls = [
        {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": json.dumps(call.arguments, ensure_ascii=False)}}
        for call in said.tool_calls
    ]
    more = {"reasoning_content": said.reasoning, "tool_calls": calls, "tool_call_id": said.tool_call_id, "name": said.name}
    return {"role": said.role, "content": said.content, **{key: value for key, value in more.items() if value}}


def _tool(tool: Tool | Mapping[str, Any]) -> dict[str, Any]:
    """A tool in OpenAI's shape."""
    if not isinstance(tool, Tool):
        return dict(tool)
    return {"type": "function", "function": {"name": tool.name, "description": tool.description, "parameters": dict(tool.parameters)}}
