"""`python -m benchmarks.serve_idle`: what connections cost that ask nothing.

Physics: an idle connection is a socket, a protocol and its buffers on the server's loop; no thread and no page.
"""

from __future__ import annotations

import asyncio
import json
from typing import Annotated

import typer

from agentcache.bench import servers
from agentcache.terminal import report_errors

from .process_figures import held

MOST_BYTES = 100 << 20
ASKED = b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"


async def idle(served: servers.Served, connections: int) -> tuple[int, int]:
    """(bytes that so many connections add to the server, connections that were answered), each after one answer."""
    before, port = held(served.pid)["rss_bytes"], int(served.url.rsplit(":", 1)[1])
    opened = [await asyncio.open_connection("127.0.0.1", port) for _ in range(connections)]
    answered = 0
    for reader, writer in opened:
        writer.write(ASKED)
        answered += (await reader.readline()).startswith(b"HTTP/1.1 200")
    added = held(served.pid)["rss_bytes"] - before
    for _, writer in opened:
        writer.close()
    return added, answered


def main(connections: Annotated[int, typer.Option(help="To open at once.")] = 1000) -> None:
    """Open them to a server of the embedded model; exit 1 if they cost more than 100 MB, or one is not answered."""
    with report_errors(), servers.agentcache("embedded") as served:
        added, answered = asyncio.run(idle(served, connections))
    print(json.dumps({"benchmark": "serve_idle", "connections": connections, "answered": answered, "added_bytes": added}))
    raise typer.Exit(added > MOST_BYTES or answered < connections)


if __name__ == "__main__":
    typer.run(main)
