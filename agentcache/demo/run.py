"""`agentcache demo`: one task, with reuse off, cold, warm, and in a second process that finds the tool group on disk. Knows only the public
face of the engine.

Why a warm step is fast: a step's prompt is the last one plus some hundred tokens, and only those are run through the model. Time to first
token therefore follows the computed tokens, not the prompt tokens.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from ..engine import Engine
from ..receipt import Receipt
from ..store.tool_group import ToolGroup
from ..types import Sampling, StoreOptions
from . import tasks
from .tasks import Replay, Task

MODES = {
    "off": "nothing is kept: each step computes its whole prompt",
    "cold": "nothing is known at the start, each step keeps what it computed",
    "warm": "the tool group was computed before the task came",
    "second": "another process, started later: it finds the tool group on disk",
}
REUSING = ("cold", "warm", "second")
SHOWN = ("prompt_tokens", "cached_tokens", "computed_tokens", "ttft_ms", "decode_ms")


def warm(engine: Engine, task: Task, on_progress: Callable[[int, int], None]) -> ToolGroup:
    """Compute (or find) the task's tool group and pin it."""
    return engine.warm(task.system, task.tools, name=task.name, namespace="warm", on_progress=on_progress)


def first_breath(engine: Engine) -> None:
    """Kernels are chosen and buffers made on first use."""
    engine.generate("Warming up.", sampling=Sampling(max_tokens=2), namespace="warm-up", reuse="off")


def second_process(task: Task, folder: str) -> Replay:
    """The task in a process of its own, which reads `folder` and writes nothing there."""
    spec = {**task.spec(), "folder": folder}
    ran = subprocess.run([sys.executable, "-m", "agentcache.demo.run"], input=json.dumps(spec), capture_output=True, text=True, check=False)
    if ran.returncode:
        raise RuntimeError(f"the second process failed: {ran.stderr[-2000:]}")
    told = json.loads(ran.stdout.splitlines()[-1])
    return Replay([Receipt(**one) for one in told["receipts"]], tuple(told["drawn"]))


def _second(spec: Mapping[str, Any]) -> dict[str, Any]:
    """The second process: play the task and tell its figures."""
    task, options = tasks.made(spec), StoreOptions(spec["folder"], write_bytes_per_hour=0, check_one_in=0, refuse_slow=False)
    with task.build(options) as engine:
        first_breath(engine)
        done = replay(engine, task, "second", Progress(disable=True))
    kept = (*SHOWN, "disk_tokens", "bitwise")
    return {"receipts": [{name: getattr(r, name) for name in kept} for r in done.receipts], "drawn": done.drawn}


def replay(engine: Engine, task: Task, mode: str, progress: Progress) -> Replay:
    """The task from its beginning to its end in one mode."""
    bar = progress.add_task(mode, total=1)

    def shown(label: str) -> Callable[[int, int], None]:
        progress.update(bar, description=f"{mode}: {label}", completed=0)
        return lambda at, of: progress.update(bar, completed=at, total=of)

    options = {"namespace": "warm" if mode == "second" else mode, "reuse": "off" if mode == "off" else "exact"}
    played = task.play(engine, options, shown)
    progress.remove_task(bar)
    return played


def _check(replays: Mapping[str, Replay], group_tokens: int) -> None:
    """The modes saw the same prompts, paid what they say, and draw the same tokens next."""
    off = replays["off"]
    for mode, one in replays.items():
        assert one.drawn == off.drawn, f"{mode} draws {one.drawn}, reuse off draws {off.drawn}"
        assert len(one.receipts) == len(off.receipts), f"{mode} took {len(one.receipts)} steps, reuse off {len(off.receipts)}"
        for mine, base in zip(one.receipts, off.receipts, strict=True):
            assert mine.prompt_tokens == base.prompt_tokens, "modes saw different prompts"
            assert mine.cached_tokens + mine.computed_tokens == mine.prompt_tokens, "a token is missing from the account"
    assert off.total("cached_tokens") == 0, "reuse off reused something"
    if "second" in replays:
        assert replays["second"].disk_tokens == group_tokens, "the second process did not find the whole tool group"


def _table(replays: Mapping[str, Replay]) -> Table:
    table = Table(title="each step of the task", title_justify="left", caption_justify="left")
    table.add_column("step", justify="right")
    table.add_column("mode")
    for name in ("prompt", "cached", "computed", "TTFT ms", "decode ms"):
        table.add_column(name, justify="right")
    count = len(replays["off"].receipts)
    for number in range(count):
        for mode, one in replays.items():
            r = one.receipts[number]
            cells = [str(r.prompt_tokens), str(r.cached_tokens), str(r.computed_tokens), f"{r.ttft_ms:,.0f}", f"{r.decode_ms:,.0f}"]
            table.add_row(str(number + 1) if mode == "off" else "", mode, *cells, end_section=mode == "second")
    for mode, one in replays.items():
        sums = [f"{one.total(name):,.0f}" for name in SHOWN]
        table.add_row("sum" if mode == "off" else "", mode, *sums, style="bold", end_section=mode == "second")
    for mode in REUSING:
        off, one = replays["off"], replays[mode]
        ratios = [f"{off.total(name) / one.total(name):.1f}x less" for name in ("computed_tokens", "ttft_ms")]
        table.add_row("ratio" if mode == "cold" else "", mode, "", "", *ratios, "")
    return table


def _sentence(replays: Mapping[str, Replay], group: ToolGroup, bitwise: bool) -> str:
    off, second = replays["off"], replays["second"]
    waited = {mode: f"{one.total('ttft_ms') / 1e3:.1f} s" for mode, one in replays.items()}
    warming = f"{group.computed_tokens:,} tokens computed once, in {group.warm_ms / 1e3:.1f} s, before the task came"
    return (
        f"Over {len(off.receipts)} steps the agent waited {waited['off']} for first tokens without reuse, {waited['cold']} from a cold "
        f"start, {waited['warm']} with its tool group warm ({warming}), and "
        f"{waited['second']} in a second process that read {second.disk_tokens:,} tokens from disk. All drew "
        f"the same {len(off.drawn)} tokens{', from bit-identical state' if bitwise else ''}."
    )


def run(console: Console, task: Task | None = None) -> dict[str, Any]:
    """The task in all modes; prints the dialogue and the table, and returns every figure as plain JSON values."""
    task = task or tasks.task()
    console.print(task.title)
    for mode, meaning in MODES.items():
        console.print(f"  [bold]{mode:<7}[/bold]{meaning}")
    columns = (TextColumn("{task.description:<20}"), BarColumn(), MofNCompleteColumn(), TextColumn("prompt tokens"), TimeElapsedColumn())
    with (
        tempfile.TemporaryDirectory() as place,
        task.build(StoreOptions(folder := str(Path(place) / "store"))) as engine,
        Progress(*columns, console=console, transient=True) as progress,
    ):
        first_breath(engine)
        replays = {mode: replay(engine, task, mode, progress) for mode in ("off", "cold")}
        bar = progress.add_task("second process", total=None)
        warm(engine, task, lambda done, total: progress.update(bar, description="warm: tool group", completed=done, total=total))
        group = engine.groups[0]
        engine.flush()
        progress.update(bar, description="second process", completed=0, total=None)
        second = second_process(task, folder)
        progress.remove_task(bar)
        replays |= {"warm": replay(engine, task, "warm", progress), "second": second}
        bitwise = all(r.bitwise for one in replays.values() for r in one.receipts)
    _check(replays, group.computed_tokens)
    for line in replays["off"].lines:
        console.print(f"  {escape(line)}", highlight=False)
    console.print(_table(replays))
    console.print(_sentence(replays, group, bitwise))
    return {
        "tools": len(task.tools),
        "said": replays["off"].lines,
        "bitwise": bitwise,
        "modes": {
            mode: {
                "warm_ms": group.warm_ms if mode == "warm" else 0.0,
                "warm_tokens": group.computed_tokens if mode == "warm" else 0,
                "disk_tokens": one.disk_tokens,
                "steps": [r.as_dict() for r in one.receipts],
            }
            for mode, one in replays.items()
        },
    }


if __name__ == "__main__":
    print(json.dumps(_second(json.load(sys.stdin))))
