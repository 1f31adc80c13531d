"""`python -m benchmarks.serve_soak`: many clients of one server, a third of whom leave midway, and what it holds at the end.

Physics: prompts are drawn from a fixed set, so that pages, records and connections reach their number in the warm-up; what grows after it
is a leak.
"""

from __future__ import annotations

import asyncio
import json
import random
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Annotated, Any

import httpx
import typer

from agentcache.bench import servers
from agentcache.terminal import report_errors

from . import process_figures

SYSTEM = "Answer in one sentence. " + "The harbour master reads the tables of the day before he answers. " * 20
QUESTIONS = [f"Get the invoice A-{number}." for number in range(1200, 1232)]
TOOL = {"type": "function", "function": {"name": "get_invoice", "parameters": {"type": "object", "properties": {"id": {"type": "string"}}}}}
ROUTES = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/engine/stream", "/query", "/tools")
MALFORMED = (
    b"",
    b"{",
    b"\xff\xfe",
    b"[" * 5000,
    b'{"messages": 5, "prompt": 5, "input": 5}',
    b'{"messages": [{"role": "user", "content": "x"}], "tools": [5], "max_tokens": 1}',
    b'{"messages": [{"role": "nobody", "content": "x"}], "max_tokens": 1}',
    b'{"input": [{"type": "image"}], "max_output_tokens": 1}',
    b'{"prompt": "x", "temperature": NaN}',
)
LEAVE, BROKEN = 1 / 3, 0.1  # shares of requests
RSS_GROWTH = 0.03
SETTLE_S = 10.0
ANSWER_S = 300.0  # a busy machine is no leak


@dataclass
class Soak:
    """Clients of one server that ask until their time is over, and the counts of what they were told."""

    url: str
    end: float
    told: Counter[str] = field(default_factory=Counter)

    async def client(self, seed: int) -> None:
        """Ask in streams, leave some of them, and send malformed bodies."""
        chance = random.Random(seed)
        async with httpx.AsyncClient(base_url=self.url, timeout=ANSWER_S, trust_env=False) as http:
            while time.monotonic() < self.end:
                try:
                    told = await (self._malformed(http, chance) if chance.random() < BROKEN else self._ask(http, chance))
                except httpx.TransportError as error:
                    told = f"no answer: {type(error).__name__}"
                self.told[told] += 1

    async def _malformed(self, http: httpx.AsyncClient, chance: random.Random) -> str:
        body, headers = chance.choice(MALFORMED), {"content-type": "application/json"}
        answer = await http.post(chance.choice(ROUTES), content=body, headers=headers)
        return "malformed, refused" if answer.status_code == 400 else f"malformed, {answer.status_code}"

    async def _ask(self, http: httpx.AsyncClient, chance: random.Random) -> str:
        messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": chance.choice(QUESTIONS)}]
        body = {"messages": messages, "max_tokens": 24, "stream": True, **({"tools": [TOOL]} if chance.random() < 0.5 else {})}
        leave = chance.random() < LEAVE
        async with http.stream("POST", "/v1/chat/completions", json=body) as answer:
            if answer.status_code != 200:
                return str(answer.status_code)
            said = ""
            async for line in answer.aiter_lines():
                said = line or said
                if leave and line:
                    return "left"
                if line == "data: [DONE]":
                    return "whole"
        return f"no end: {said[:80]}"


async def settled(served: servers.Served, http: httpx.AsyncClient) -> dict[str, int]:
    """Count what the server holds once no request runs."""
    end = time.monotonic() + SETTLE_S
    status = (await http.get("/status")).json()
    while status["requests"]["running"] and time.monotonic() < end:
        await asyncio.sleep(0.1)
        status = (await http.get("/status")).json()
    memory = status["models"][0]["memory"]
    return {
        **process_figures.held(served.pid),
        "running": status["requests"]["running"],
        "pinned_pages": memory["pinned_pages"],
        "pages": memory["pages"],
    }


async def soak(served: servers.Served, phases_s: list[float], clients: int) -> tuple[list[dict[str, int]], Counter[str]]:
    """(held at the end of each phase, answers)."""
    told, held = Counter[str](), []
    async with httpx.AsyncClient(base_url=served.url, timeout=ANSWER_S, trust_env=False) as http:
        for phase, seconds in enumerate(phases_s):
            running = Soak(served.url, time.monotonic() + seconds)
            await asyncio.gather(*(running.client(phase * clients + number) for number in range(clients)))
            told += running.told
            held.append(await settled(served, http))
            typer.echo(json.dumps({"phase": phase, "seconds": seconds, **held[-1], "answers": dict(running.told)}), err=True)
    return held, told


def leaks(before: dict[str, int], after: dict[str, int], told: Counter[str]) -> list[str]:
    """Name what a server must not have done."""
    bad = {
        "memory grew": after["rss_bytes"] > before["rss_bytes"] * (1 + RSS_GROWTH),
        "file descriptors are left": after["descriptors"] > before["descriptors"],
        "pages are pinned": after["pinned_pages"] > 0,
        "requests still run": after["running"] > 0,
        "requests had no answer": any(said.startswith("no ") for said in told),
        "requests failed": any(said.startswith("5") or ", 5" in said for said in told),
    }
    return [name for name, holds in bad.items() if holds]


def main(
    minutes: Annotated[float, typer.Option(help="Of the whole run; a sixth of it is the warm-up.")] = 30.0,
    clients: Annotated[int, typer.Option(help="That ask at once.")] = 32,
) -> None:
    """Soak a server of the embedded model; exit 1 if it leaks, fails, or leaves a request without an answer."""
    with report_errors(), tempfile.TemporaryDirectory() as folder, servers.agentcache("embedded", folder) as served:
        held, told = asyncio.run(soak(served, [minutes * 10] * 6, clients))
    found = leaks(held[0], held[-1], told)
    growth = held[-1]["rss_bytes"] / held[0]["rss_bytes"] - 1
    line: dict[str, Any] = {"benchmark": "serve_soak", "minutes": minutes, "clients": clients, "answers": dict(told)}
    print(json.dumps({**line, "rss_growth": round(growth, 4), "after_warm_up": held[0], "at_end": held[-1], "leaks": found}))
    raise typer.Exit(bool(found))


if __name__ == "__main__":
    typer.run(main)
