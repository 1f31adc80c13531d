"""The socket of a server, and its end: running answers are told before their connections close."""

from __future__ import annotations

import asyncio
import socket
from types import FrameType
from typing import Any

import uvicorn

from ..errors import ConfigError


class EndingServer(uvicorn.Server):
    """A server that sets `closing` when a signal ends it."""

    def __init__(self, app: Any, closing: asyncio.Event) -> None:
        # without WebSockets, which no route speaks: uvicorn would load a library for them, whichever release is installed
        super().__init__(uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=3, access_log=False, ws="none"))
        self._closing = closing

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Take a signal, on the loop's thread."""
        self._closing.set()
        super().handle_exit(sig, frame)


def listening(host: str, port: int) -> socket.socket:
    """A socket that listens there. ConfigError: it cannot."""
    try:
        listener = socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET, backlog=1024)
    except (OSError, OverflowError) as error:
        raise ConfigError(f"--host={host!r} --port={port!r}: cannot listen there: {error}") from error
    # connections inherit it: asyncio passes over sockets made this way, and a body waited 40 ms for the headers' acknowledgement
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listener
