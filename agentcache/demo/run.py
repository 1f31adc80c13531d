"""`agentcache demo`: one task, with reuse off, cold, warm, and in a second process that finds the tool group on disk. Knows only the public
face of the engine.

A step's prompt is the last one plus some hundred tokens, and only those are run through the model: time to first token follows the computed
tokens, not the prompt tokens.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from ..engine import Engine
from ..receipt import Receipt
from ..store.tool_group import ToolGroup
from ..types import Message, Sampling, StoreOptions
from .tools import TOWN, Desk, described, result_of

MODES = {
    "off": "nothing is cached: each step computes its whole prompt",
    "cold": "nothing is known at the start, each step caches what it computed",
    "warm": "the tool group was computed before the task came",
    "second": "another process, started later: it finds the tool group on disk",
}
SHOWN = ("prompt_tokens", "cached_tokens", "computed_tokens", "ttft_ms", "decode_ms")
MOST_STEPS = 8  # of one question
TOOLS = tuple(described(getattr(Desk, name)) for name in TOWN["tools"])
Conversations = Sequence[Sequence[Sequence[str]]]  # of each, the questions with their right answers
Label = Callable[[str], Callable[[int, int], None]]


@dataclass(slots=True)
class Replay:
    """One way through the task."""

    receipts: list[Receipt] = field(default_factory=list)  # of each step
    drawn: tuple[int, ...] = ()  # the ids of all answers, in which all ways must agree
    lines: list[str] = field(default_factory=list)  # the dialogue

    def total(self, name: str) -> float:
        """Sum of one of the receipts' figures over the steps."""
        return float(sum(getattr(receipt, name) for receipt in self.receipts))


def engine_of(store: StoreOptions) -> Engine:
    """The embedded model, its kernels chosen and its buffers made."""
    from transformers.utils import logging

    logging.disable_progress_bar()  # ten megabytes are there before a bar is
    engine = Engine("embedded", store=store)
    engine.generate("Warming up.", sampling=Sampling(max_tokens=2), namespace="warm-up", reuse="off")
    return engine


def play(engine: Engine, conversations: Conversations, label: Label, **options: Any) -> Replay:
    """Each conversation to its end, with a desk of its own; greedy, so that every way through says the same."""
    done, desk = Replay(), Desk()
    for turns in conversations:
        messages = [Message("system", TOWN["system"])]
        for question, answer in turns:
            messages.append(Message("user", question))
            done.lines.append(f"user     {question}")
            for _ in range(MOST_STEPS):
                told = label(f"step {len(done.receipts) + 1}")
                completion = engine.stream(messages, TOOLS, sampling=Sampling(max_tokens=96), on_progress=told, **options).completion
                done.receipts.append(completion.receipt)
                done.drawn += completion.ids
                messages.append(said := completion.message)
                if not said.tool_calls:
                    done.lines.append(f"answer   {said.content}" + ("" if said.content == answer else f"   (right would be: {answer})"))
                    break
                for call in said.tool_calls:
                    result = result_of(desk, call)
                    given = ", ".join(f"{name}={value!r}" for name, value in call.arguments.items())
                    done.lines.append(f"  call   {call.name}({given})  ->  {result}")
                    messages.append(Message("tool", result, tool_call_id=call.id, name=call.name))
    return done


def _replay(engine: Engine, conversations: Conversations, mode: str, progress: Progress) -> Replay:
    """The task from its beginning to its end in one mode."""
    bar = progress.add_task(mode, total=1)

    def label(text: str) -> Callable[[int, int], None]:
        progress.update(bar, description=f"{mode}: {text}", completed=0)
        return lambda at, of: progress.update(bar, completed=at, total=of)

    space = "warm" if mode == "second" else mode
    played = play(engine, conversations, label, namespace=space, reuse="off" if mode == "off" else "exact")
    progress.remove_task(bar)
    return played


def _second_process(conversations: Conversations, folder: str) -> Replay:
    """The task in a process of its own, which reads `folder` and writes nothing there."""
    spec = json.dumps({"conversations": conversations, "folder": folder})
    ran = subprocess.run([sys.executable, "-m", __name__], input=spec, capture_output=True, text=True, check=False)
    if ran.returncode:
        raise RuntimeError(f"the second process failed: {ran.stderr[-2000:]}")
    told = json.loads(ran.stdout.splitlines()[-1])
    return Replay([Receipt(**one) for one in told["receipts"]], tuple(told["drawn"]))


def _second(spec: Mapping[str, Any]) -> dict[str, Any]:
    """The second process: play the task and tell its figures."""
    with engine_of(StoreOptions(spec["folder"], write_bytes_per_hour=0, check_one_in=0, refuse_slow=False)) as engine:
        done = _replay(engine, spec["conversations"], "second", Progress(disable=True))
    names = (*SHOWN, "disk_tokens", "bitwise")
    return {"receipts": [{name: getattr(r, name) for name in names} for r in done.receipts], "drawn": done.drawn}


def check(replays: Mapping[str, Replay], group_tokens: int) -> None:
    """AssertionError unless the modes saw the same prompts, paid what they say, and drew the same tokens."""
    off = replays["off"]
    for mode, one in replays.items():
        assert one.drawn == off.drawn, f"{mode} draws {one.drawn}, reuse off draws {off.drawn}"
        assert len(one.receipts) == len(off.receipts), f"{mode} took {len(one.receipts)} steps, reuse off {len(off.receipts)}"
        for mine, base in zip(one.receipts, off.receipts, strict=True):
            assert mine.prompt_tokens == base.prompt_tokens, "modes saw different prompts"
            assert mine.cached_tokens + mine.computed_tokens == mine.prompt_tokens, "a token is missing from the account"
    assert off.total("cached_tokens") == 0, "reuse off reused something"
    assert replays["second"].total("disk_tokens") == group_tokens, "the second process did not find the whole tool group"


def _table(replays: Mapping[str, Replay]) -> Table:
    table = Table("step", "mode", title="each step of the task", title_justify="left")
    for name in ("prompt", "cached", "computed", "TTFT ms", "decode ms"):
        table.add_column(name, justify="right")
    off = replays["off"]
    for number in range(len(off.receipts)):
        for mode, one in replays.items():
            cells = [f"{getattr(one.receipts[number], name):,.0f}" for name in SHOWN]
            table.add_row(str(number + 1) if mode == "off" else "", mode, *cells, end_section=mode == "second")
    for mode, one in replays.items():
        sums = [f"{one.total(name):,.0f}" for name in SHOWN]
        table.add_row("sum" if mode == "off" else "", mode, *sums, style="bold", end_section=mode == "second")
    for mode in ("cold", "warm", "second"):
        ratios = [f"{off.total(name) / replays[mode].total(name):.1f}x less" for name in ("computed_tokens", "ttft_ms")]
        table.add_row("ratio" if mode == "cold" else "", mode, "", "", *ratios, "")
    return table


def _sentence(replays: Mapping[str, Replay], group: ToolGroup, bitwise: bool) -> str:
    off, second = replays["off"], replays["second"]
    waited = {mode: f"{one.total('ttft_ms') / 1e3:.1f} s" for mode, one in replays.items()}
    warming = f"{group.computed_tokens:,} tokens computed once, in {group.warm_ms / 1e3:.1f} s, before the task came"
    return (
        f"Over {len(off.receipts)} steps the agent waited {waited['off']} for first tokens without reuse, {waited['cold']} from a cold "
        f"start, {waited['warm']} with its tool group warm ({warming}), and "
        f"{waited['second']} in a second process that read {second.total('disk_tokens'):,.0f} tokens from disk. All drew "
        f"the same {len(off.drawn)} tokens{', from bit-identical state' if bitwise else ''}."
    )


def run(console: Console, conversations: Conversations = TOWN["conversations"]) -> dict[str, Any]:
    """The task in all modes; prints the dialogue and the table, and returns every figure as plain JSON values."""
    asked = sum(map(len, conversations))
    console.print(f"A harbour town's visitors' desk: {len(TOOLS)} real tools, {asked} questions, the embedded model decides.")
    for mode, meaning in MODES.items():
        console.print(f"  [bold]{mode:<7}[/bold]{meaning}")
    columns = (TextColumn("{task.description:<20}"), BarColumn(), MofNCompleteColumn(), TextColumn("prompt tokens"), TimeElapsedColumn())
    with (
        tempfile.TemporaryDirectory() as place,
        engine_of(StoreOptions(folder := str(Path(place) / "store"))) as engine,
        Progress(*columns, console=console, transient=True) as progress,
    ):
        replays = {mode: _replay(engine, conversations, mode, progress) for mode in ("off", "cold")}
        bar = progress.add_task("warm: tool group", total=None)
        told = lambda done, total: progress.update(bar, completed=done, total=total)  # noqa: E731
        group = engine.warm(TOWN["system"], TOOLS, name="desk", namespace="warm", on_progress=told)
        engine.flush()
        progress.update(bar, description="second process", completed=0, total=None)
        second = _second_process(conversations, folder)
        progress.remove_task(bar)
        replays |= {"warm": _replay(engine, conversations, "warm", progress), "second": second}
    bitwise = all(r.bitwise for one in replays.values() for r in one.receipts)
    check(replays, group.computed_tokens)
    for line in replays["off"].lines:
        console.print(f"  {escape(line)}", highlight=False)
    console.print(_table(replays))
    console.print(_sentence(replays, group, bitwise))
    modes = {mode: {"disk_tokens": one.total("disk_tokens"), "steps": [r.as_dict() for r in one.receipts]} for mode, one in replays.items()}
    warming = {"warm_ms": group.warm_ms, "warm_tokens": group.computed_tokens}
    return {"tools": len(TOOLS), "said": replays["off"].lines, "bitwise": bitwise, **warming, "modes": modes}


if __name__ == "__main__":
    print(json.dumps(_second(json.load(sys.stdin))))
