"""The socket of a server."""

from __future__ import annotations

import socket

import pytest

from agentcache.server.listening import listening

pytestmark = [pytest.mark.enable_socket, pytest.mark.allow_hosts(["127.0.0.1"])]


def test_an_answer_is_sent_without_waiting_for_an_acknowledgement() -> None:
    with listening("127.0.0.1", 0) as listener, socket.create_connection(listener.getsockname()):
        connection, _ = listener.accept()
        with connection:
            assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
