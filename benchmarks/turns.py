"""`python -m benchmarks.turns`: agents that take turns on one device whose memory holds fewer of them.

Physics: without a disk each turn computes all its tokens again. With one, pages are read: before the first token, or ahead of the request,
while the agent before it decodes. With memory for all nothing is read. Agents do not share a prefix.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from agentcache import Engine
from agentcache.bench.environment import machine
from agentcache.bench.options import Dtype, DtypeOption, JsonOption, Loading, Shape, ShapeOption, ThreadsOption, write
from agentcache.terminal import report_errors
from agentcache.types import Sampling, StoreOptions

from .sessions import ANSWER, conversation

PAUSE_S = 0.02  # of the agent's own work between its answer and the next agent's request


class Agents:
    """Conversations that go on in turns; each turn is told by its receipt."""

    def __init__(self, engine: Engine, count: int, tokens: int, answer: int) -> None:
        self.engine, self.talks = engine, list[list[Any]]()
        for number in range(count):
            system, question = conversation(engine, tokens)
            self.talks.append([{**system, "content": f"Agent {number}. {system['content']}"}, question])
        ids = tuple(engine.tokenizer(ANSWER, add_special_tokens=False)["input_ids"])
        self._sampling = Sampling(max_tokens=answer, forced=ids * (answer // len(ids) + 1), ignore_eos=True, draft_tokens=0)

    def turn(self, number: int) -> dict[str, float]:
        """Ask an agent, and let it go on."""
        began = time.perf_counter()
        done = self.engine.session(f"agent-{number}").generate(self.talks[number], sampling=self._sampling)
        took, receipt = (time.perf_counter() - began) * 1e3, done.receipt
        self.talks[number] += [done.message, {"role": "user", "content": "And what did the keeper write down after that?"}]
        time.sleep(PAUSE_S)
        told = ("prompt_tokens", "cached_tokens", "disk_tokens", "computed_tokens", "ttft_ms", "load_ms")
        return {name: getattr(receipt, name) for name in told} | {"ms": took}


def run(engine: Engine, count: int, tokens: int, answer: int, steps: int, known: bool) -> dict[str, Any]:
    """All agents in turns, so many times. known: in one order; else in orders of which none repeats what came before."""
    agents, told, new = Agents(engine, count, tokens, answer), list[dict[str, float]](), 0.0
    lengths: dict[int, float] = {}
    for step in range(steps):
        stride = 1 if known else (1, 3, 5, 7)[step % 4]
        for at in range(count):
            number = at * stride % count
            found = agents.turn(number)
            if step:
                new += found["prompt_tokens"] - lengths[number]
                told.append(found)
            lengths[number] = found["prompt_tokens"] + answer - 1
        engine.flush(600.0)
    later = told[count:]  # the order is known from the second round on
    medians = {name: statistics.median(one[name] for one in later) for name in ("ttft_ms", "load_ms", "ms")}
    sums = {name: sum(one[name] for one in told) for name in ("cached_tokens", "disk_tokens", "computed_tokens")}
    return {**medians, **sums, "new_tokens": new, "turns": len(told), "read_turns": sum(one["disk_tokens"] > 0 for one in later)}


def main(
    shape: ShapeOption = Shape.qwen3_06b,
    agents: Annotated[int, typer.Option(min=2, help="Agents that take turns.")] = 8,
    room: Annotated[int, typer.Option(min=1, help="Agents that fit in memory.")] = 3,
    steps: Annotated[int, typer.Option(min=4, help="Turns of each.")] = 10,
    off_steps: Annotated[int, typer.Option(min=3, help="Turns of each without a disk.")] = 3,
    tokens: Annotated[int, typer.Option(min=512, help="Tokens of an agent's first prompt.")] = 1500,
    answer: Annotated[int, typer.Option(min=4, help="Tokens of an answer.")] = 32,
    dtype: DtypeOption = Dtype.bfloat16,
    threads: ThreadsOption = None,
    store_dir: Annotated[Path | None, typer.Option(help="Where stores of this run are made and removed; a disk, not memory.")] = None,
    json_file: JsonOption = None,
) -> None:
    """Times of a turn with pages read ahead, read when asked, never read, and without a disk."""
    with report_errors(), tempfile.TemporaryDirectory(dir=store_dir) as folder:
        loading = Loading(None, shape, dtype, threads)
        with loading.engine(store=None) as engine:
            assert engine.model.spec is not None
            bytes_of = engine.model.spec.token_bytes * (tokens + 200 + steps * (answer + 40))
        found: dict[str, Any] = {"machine": machine(), "agents": agents, "room": room, "tokens": tokens, "answer": answer}
        ways = {"ahead": (room, True, True), "asked": (room, False, True), "memory": (agents + 1, True, True), "off": (room, True, False)}
        for way, (held, known, disk) in ways.items():
            store = StoreOptions(f"{folder}/{way}", refuse_slow=False) if disk else None
            with loading.engine(store=store, memory_bytes=int(bytes_of * held)) as engine:
                engine.generate("Good morning.", sampling=Sampling(max_tokens=2), namespace="warm-up")
                found[way] = run(engine, agents, tokens, answer, steps if disk else off_steps, known)
                print(json.dumps({way: found[way]}), flush=True)
        ahead, asked, memory, off = (found[way] for way in ways)
        found["computed_over_new"] = ahead["computed_tokens"] / ahead["new_tokens"]
        found["ttft_over_off"] = ahead["ttft_ms"] / off["ttft_ms"]
        for name, key in (("hidden", "ttft_ms"), ("hidden_net", "ms")):  # of the wait for pages; of whole turns: reading slows decoding
            found[name] = (asked[key] - ahead[key]) / (asked[key] - memory[key])
        if json_file is not None:
            write(json_file, json.dumps(found, indent=1) + "\n")
        print(json.dumps(found))


if __name__ == "__main__":
    typer.run(main)
