"""`agentcache demo`: one recorded agent episode, replayed with reuse off, cold, warm, and in a second process that finds the tool group
on disk. Knows only the public face of the engine.

Why a warm step is fast: a step's prompt is the last one plus some hundred tokens, and only those are run through the model. Time to first
token therefore follows the computed tokens, not the prompt tokens. The model has random weights: arithmetic costs the same, and the
recorded completions are forced through decoding, so that all modes answer the same prompts.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from .engine import Engine
from .episode import Episode, load_episode
from .receipt import Receipt
from .types import Message, Sampling, StoreOptions, ToolGroup

VOCAB = 4096
CHECKED_TOKENS = 16  # drawn behind the whole episode: they depend on all keys and values that were reused on the way
MODES = {
    "off": "nothing is kept: each step computes its whole prompt",
    "cold": "nothing is known at the start, each step keeps what it computed",
    "warm": "the tool group was computed before the task came",
    "second": "another process, started later: it finds the tool group on disk",
}
REUSING = ("cold", "warm", "second")
SHOWN = ("prompt_tokens", "cached_tokens", "computed_tokens", "ttft_ms", "decode_ms")


@dataclass(slots=True)
class Replay:
    """What one mode did: a receipt per step, the ids drawn at the end, and what warming cost beforehand."""

    mode: str
    receipts: list[Receipt] = field(default_factory=list)
    drawn: tuple[int, ...] = ()
    warm_ms: float = 0.0
    warm_tokens: int = 0
    disk_tokens: int = 0

    def total(self, name: str) -> float:
        """Sum of one of the receipts' figures over the steps."""
        return float(sum(getattr(receipt, name) for receipt in self.receipts))


def warm(engine: Engine, episode: Episode, on_progress: Callable[[int, int], None]) -> ToolGroup:
    """Compute (or find) the episode's tool group and pin it."""
    return engine.warm(episode.system, episode.tools, name="museum", namespace="warm", on_progress=on_progress)


def build(episode: Episode, layers: int, hidden: int, store: StoreOptions | None) -> Engine:
    """The demo's engine: equal arguments give equal weights and ids, in every process."""
    from . import toy

    return Engine(toy.model(VOCAB, layers=layers, hidden=hidden), toy.tokenizer(episode.texts, VOCAB), store=store)


def first_breath(engine: Engine) -> None:
    """Kernels are chosen and buffers made on first use."""
    engine.generate("Warming up.", sampling=Sampling(max_tokens=2), namespace="warm-up", reuse="off")


def second_process(episode: Episode, layers: int, hidden: int, folder: str) -> Replay:
    """Replay the episode in a process of its own, which reads `folder` and writes nothing there."""
    spec = {"steps": [list(step) for step in episode.steps], "layers": layers, "hidden": hidden, "folder": folder}
    ran = subprocess.run([sys.executable, "-m", "agentcache.demo"], input=json.dumps(spec), capture_output=True, text=True, check=False)
    if ran.returncode:
        raise RuntimeError(f"the second process failed: {ran.stderr[-2000:]}")
    told = json.loads(ran.stdout.splitlines()[-1])
    receipts = [Receipt(**one) for one in told.pop("receipts")]
    return Replay("second", receipts, tuple(told.pop("drawn")), **told)


def _second(spec: Mapping[str, Any]) -> dict[str, Any]:
    """What that process does."""
    episode = replace(load_episode(), steps=tuple((text, tuple(results)) for text, results in spec["steps"]))
    options = StoreOptions(spec["folder"], write_bytes_per_hour=0, check_one_in=0)
    with build(episode, spec["layers"], spec["hidden"], options) as engine:
        first_breath(engine)
        done = replay(engine, episode, "second", Progress(disable=True))
    receipts = [{**{name: getattr(r, name) for name in SHOWN}, "bitwise": r.bitwise} for r in done.receipts]
    return {"receipts": receipts, "drawn": done.drawn, "disk_tokens": done.disk_tokens}


def replay(engine: Engine, episode: Episode, mode: str, progress: Progress) -> Replay:
    """Run the episode step by step in one mode; every completion is the recorded one."""
    done = Replay(mode)
    bar = progress.add_task(mode, total=1)

    def shown(label: str) -> Any:
        progress.update(bar, description=label, completed=0)
        return lambda at, of: progress.update(bar, completed=at, total=of)

    namespace = "warm" if mode == "second" else mode
    options: dict[str, Any] = {"namespace": namespace, "reuse": "off" if mode == "off" else "exact"}
    messages = [Message("system", episode.system), Message("user", episode.task)]
    for number, (text, results) in enumerate(episode.steps, 1):
        ids = engine.tokenizer(text, add_special_tokens=False)["input_ids"] + [engine.tokenizer.eos_token_id]
        sampling = Sampling(max_tokens=len(ids), forced=tuple(ids))
        label = shown(f"{mode}: step {number} of {len(episode.steps)}")
        completion = engine.stream(messages, episode.tools, sampling=sampling, on_progress=label, **options).completion
        assert completion.ids == tuple(ids), "the recorded completion was not the one that was decoded"
        done.receipts.append(completion.receipt)
        done.disk_tokens += completion.receipt.disk_tokens
        messages.append(completion.message)
        calls = completion.message.tool_calls
        assert len(calls) == len(results), f"step {number}: {len(calls)} tool calls understood, {len(results)} results recorded"
        messages += [Message("tool", result, tool_call_id=call.id, name=call.name) for call, result in zip(calls, results)]
    messages.append(Message("user", "Thank you. Anything else?"))
    draw = Sampling(max_tokens=CHECKED_TOKENS, temperature=1.0, seed=7, ignore_eos=True)
    done.drawn = engine.stream(messages, episode.tools, sampling=draw, on_progress=shown(f"{mode}: check"), **options).completion.ids
    progress.remove_task(bar)
    return done


def _check(replays: Mapping[str, Replay]) -> None:
    """The modes saw the same prompts, paid what they say, and draw the same tokens behind them."""
    off = replays["off"]
    for one in replays.values():
        assert one.drawn == off.drawn, f"{one.mode} draws {one.drawn}, reuse off draws {off.drawn}"
        for mine, base in zip(one.receipts, off.receipts, strict=True):
            assert mine.prompt_tokens == base.prompt_tokens, "modes saw different prompts"
            assert mine.cached_tokens + mine.computed_tokens == mine.prompt_tokens, "a token is missing from the account"
    assert off.total("cached_tokens") == 0, "reuse off reused something"
    if "second" in replays:
        assert replays["second"].disk_tokens == replays["warm"].warm_tokens, "the second process did not find the whole tool group"


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


def _sentence(replays: Mapping[str, Replay], bitwise: bool) -> str:
    off, cold, warm, second = (replays[mode] for mode in MODES)
    waited = {mode: f"{one.total('ttft_ms') / 1e3:.1f} s" for mode, one in replays.items()}
    return (
        f"Over {len(off.receipts)} steps the agent waited {waited['off']} for first tokens without reuse, {waited['cold']} from a cold "
        f"start, {waited['warm']} with its tool group warm ({warm.warm_tokens:,} tokens computed once, in {warm.warm_ms / 1e3:.1f} s, "
        f"before the task came), and {waited['second']} in a second process that read {second.disk_tokens:,} tokens from disk. All drew "
        f"the same {CHECKED_TOKENS} tokens behind the whole episode{', from bit-identical state' if bitwise else ''}."
    )


def run(console: Console, *, layers: int = 4, hidden: int = 384, episode: Episode | None = None) -> dict[str, Any]:
    """Replay the episode in all modes, print the table, and return every figure as plain JSON values."""
    episode = episode or load_episode()
    console.print(f"A museum's operations assistant with {len(episode.tools)} tools, {len(episode.steps)} recorded steps, a random model.")
    for mode, meaning in MODES.items():
        console.print(f"  [bold]{mode:<7}[/bold]{meaning}")
    columns = (TextColumn("{task.description:<20}"), BarColumn(), MofNCompleteColumn(), TextColumn("prompt tokens"), TimeElapsedColumn())
    with (
        tempfile.TemporaryDirectory() as place,
        build(episode, layers, hidden, StoreOptions(folder := str(Path(place) / "store"))) as engine,
        Progress(*columns, console=console, transient=True) as progress,
    ):
        first_breath(engine)
        replays = {mode: replay(engine, episode, mode, progress) for mode in ("off", "cold")}
        bar = progress.add_task("second process", total=None)
        warm(engine, episode, lambda done, total: progress.update(bar, description="warm: tool group", completed=done, total=total))
        warmed = engine.groups[0]
        engine.flush()
        progress.update(bar, description="second process", completed=0, total=None)
        second = second_process(episode, layers, hidden, folder)
        progress.remove_task(bar)
        replays |= {"warm": replay(engine, episode, "warm", progress), "second": second}
        replays["warm"].warm_ms, replays["warm"].warm_tokens = warmed.warm_ms, warmed.computed_tokens
        bitwise = all(r.bitwise for one in replays.values() for r in one.receipts)
    _check(replays)
    console.print(_table(replays))
    console.print(_sentence(replays, bitwise))
    return {
        "tools": len(episode.tools),
        "bitwise": bitwise,
        "modes": {
            mode: {
                "warm_ms": one.warm_ms,
                "warm_tokens": one.warm_tokens,
                "disk_tokens": one.disk_tokens,
                "steps": [r.as_dict() for r in one.receipts],
            }
            for mode, one in replays.items()
        },
    }


if __name__ == "__main__":
    print(json.dumps(_second(json.load(sys.stdin))))
