"""`python -m benchmarks.react`: `agentcache bench react` held against an oracle, and each tool group cached once.

An oracle that remembers every token sequence counts the new tokens of each prompt; the engine may compute those, and one per call.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any
from weakref import ReferenceType, ref

import typer
from rich.table import Table

from agentcache import traces
from agentcache.bench import react, report
from agentcache.bench.engine_timing import scope_of
from agentcache.bench.options import Dtype, DtypeOption, JsonOption, Loading, ModelOption, ShapeOption, ThreadsOption, ToolsDir
from agentcache.kv import PAGE_TOKENS, Page
from agentcache.receipt import Receipt
from agentcache.store.keys import as_ids
from agentcache.terminal import report_errors

from .oracle import Oracle

SLACK = 1.02  # computed tokens may exceed new ones by this factor, and by one per call
app = typer.Typer(add_completion=False)


@dataclass
class Held(react.Replay):
    """A replay that counts new tokens, and asserts that episodes share the pages of their tool group."""

    oracle: Oracle = field(default_factory=Oracle)
    new_tokens: int = 0
    # pages of each tool group, by its ids
    groups: dict[tuple[int, ...], list[ReferenceType[Page]]] = field(default_factory=dict)
    group_pages: int = 0  # whole pages of the longest group

    def count(self, call: traces.Call, receipt: Receipt, drawn: list[int], done: react.Sums) -> None:
        super().count(call, receipt, drawn, done)
        prompt = list(self.engine.renderer.render(call.prompt, call.tools, namespace=self.namespace).ids)
        assert len(prompt) == receipt.prompt_tokens, f"rendered again it has {len(prompt)} tokens, not {receipt.prompt_tokens}"
        self.new_tokens += len(prompt) - self.oracle.known(prompt)
        self.oracle.add(prompt + drawn)

    def episode(self, one: traces.Episode, say: react.Say = lambda _: None) -> react.Sums:
        sums = super().episode(one, say)
        if sums.calls:
            self._hold_once(one)
        return sums

    def _hold_once(self, one: traces.Episode) -> None:
        """AssertionError unless the whole pages of the episode's tool group are those of all episodes before it."""
        call = one.calls[0]
        layout = self.engine.renderer.render(call.prompt, call.tools, namespace=self.namespace)
        whole, ids = layout.prefix_tokens // PAGE_TOKENS, list(layout.ids)
        found = self.engine.store.match(scope_of(self.engine, self.namespace, len(ids)), as_ids(ids)).pages[:whole]
        held = self.groups.setdefault(tuple(ids[: layout.prefix_tokens]), [])
        for before, page in zip(held, found):
            first = before()  # None: evicted meanwhile
            assert first is None or first is page, f"episode {one.id!r} holds its own copy of a tool group that was cached already"
        held[:] = [ref(page) for page in found]
        self.group_pages = max(self.group_pages, len(found))

    def family(self, episodes: list[traces.Episode], say: react.Say = lambda _: None) -> dict[str, Any]:
        found = super().family(episodes, say)
        bound = SLACK * self.new_tokens + found["calls"]
        groups = {"group_pages": self.group_pages, "tool_groups": len(self.groups)}
        return {**found, "new_tokens": self.new_tokens, "within_bound": found["computed_tokens"] <= bound, **groups}


def table(families: Mapping[str, Mapping[str, Any]]) -> Table:
    """One line per family of episodes."""
    columns: dict[str, report.Cell] = {"family": lambda row: str(row["family"]), "calls": report.of("calls")}
    columns |= {"new": report.of("new_tokens"), "computed": report.of("computed_tokens")}
    columns |= {
        "(computed-calls)/new": lambda row: f"{(row['computed_tokens'] - row['calls']) / max(1, row['new_tokens']):.3f}",
        "in bound": lambda row: "yes" if row["within_bound"] else "NO",
        "group pages": report.of("group_pages"),
    }
    return report.drawn("against the oracle", columns, [{"family": name, **row} for name, row in families.items()])


@app.command()
def main(
    workload: Annotated[list[Path], typer.Option(help="A recorded trace (.jsonl); may be given several times.")],
    tools_dir: ToolsDir = None,
    episodes: Annotated[int | None, typer.Option(min=1, help="At most so many of each trace.")] = None,
    off: Annotated[bool, typer.Option("--off/--no-off", help="Also time each call with reuse off.")] = True,
    model: ModelOption = None,
    shape: ShapeOption = None,
    dtype: DtypeOption = Dtype.bfloat16,
    threads: ThreadsOption = None,
    json_file: JsonOption = None,
) -> None:
    """Replay recorded agent episodes: tokens computed against tokens new, and the time of every call."""
    with report_errors():
        families = {path.stem: list(traces.read(path, tools_dir, episodes=episodes)) for path in workload}
        texts = [text for read in families.values() for text in traces.texts(read)]
        with report.measuring("react", Loading(model, shape, dtype, threads), json_file, texts) as run:
            run.keep(react.run(run.engine, families, run.say, Held, off=off))
            run.tables += [report.react_table(run.found["families"]), table(run.found["families"])]


if __name__ == "__main__":
    app()
