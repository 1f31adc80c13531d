"""The soak of a server, for seconds: leaving clients and malformed bodies leave nothing on it."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path

import pytest

pytest.importorskip("uvicorn")

from agentcache.bench import servers
from benchmarks.serve_soak import leaks, soak

HELD = {"rss_bytes": 100, "descriptors": 10, "pinned_pages": 0, "running": 0, "pages": 5}


@pytest.mark.enable_socket
@pytest.mark.allow_hosts(["127.0.0.1"])
def test_a_short_soak_leaves_nothing(tmp_path: Path) -> None:
    with servers.agentcache("embedded", str(tmp_path)) as served:
        held, told = asyncio.run(soak(served, [1.2, 1.2], clients=6))
    assert {"whole", "left", "malformed, refused"} == set(told)
    after = {**held[-1], "rss_bytes": held[0]["rss_bytes"], "descriptors": held[0]["descriptors"]}  # two seconds are too short to judge
    assert leaks(held[0], after, told) == []
    assert held[-1]["descriptors"] < held[0]["descriptors"] + 5, "tens of requests were answered, or left"


@pytest.mark.parametrize(
    ("changed", "told", "found"),
    [
        ({"rss_bytes": 103, "pages": 9}, "whole", []),
        ({"rss_bytes": 104}, "whole", ["memory grew"]),
        ({"descriptors": 11}, "whole", ["file descriptors are left"]),
        ({"pinned_pages": 1}, "whole", ["pages are pinned"]),
        ({"running": 1}, "whole", ["requests still run"]),
        ({}, "no answer: ReadError", ["requests had no answer"]),
        ({}, "malformed, 500", ["requests failed"]),
        ({}, "503", ["requests failed"]),
    ],
)
def test_each_leak_is_named(changed: dict[str, int], told: str, found: list[str]) -> None:
    assert leaks(HELD, {**HELD, **changed}, Counter([told])) == found
