"""`python -m benchmarks.layout`: the options of strategies.py, and its tables."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from agentcache import traces
from agentcache.bench import report
from agentcache.bench.environment import machine, versions
from agentcache.bench.options import Dtype, DtypeOption, JsonOption, Loading, ModelOption, ShapeOption, ThreadsOption, numbers
from agentcache.engine import Engine
from agentcache.terminal import report_errors

from . import strategies


def layout(
    workload: Annotated[list[Path], typer.Option(help="A recorded trace (.jsonl); may be given several times.")],
    tools_dir: Annotated[Path | None, typer.Option(help="Folder of the catalogs that traces name; default: ../tools.")] = None,
    prompts: Annotated[str, typer.Option(help="Tokens of system prompt and tools, with commas.")] = "500,5000,50000",
    calls: Annotated[str, typer.Option(help="Model calls of a session, with commas.")] = "3,10,50",
    sessions: Annotated[int, typer.Option(min=1, help="Sessions of each size; each is asked under every strategy.")] = 10,
    cached_price: Annotated[float, typer.Option(min=0.0, max=1.0, help="What a cached token costs, of a computed one's price.")] = 0.1,
    time: Annotated[bool, typer.Option("--time", help="Also ask an engine, and time each first token (slow).")] = False,
    model: ModelOption = None,
    shape: ShapeOption = None,
    dtype: DtypeOption = Dtype.bfloat16,
    threads: ThreadsOption = None,
    json_file: JsonOption = None,
) -> None:
    """A text that changes at every call, by where it stands: share of tokens reused, tokens computed, cost, time to first token."""
    with report_errors():
        if threads is not None:
            torch.set_num_threads(threads)
        episodes = [one for path in workload for one in traces.read(path, tools_dir)]
        loaded, tokenizer = Loading(model, shape, dtype).weights(traces.texts(episodes))

        def engine_of(strategy: str) -> Engine:
            return Engine(loaded, tokenizer, store=None, layout=strategies.options(strategy))

        with report.Progress() as say:
            found: dict[str, Any] = {"bench": "layout", "machine": machine(), "versions": versions()}
            found |= strategies.run(
                tokenizer,
                episodes,
                numbers(prompts, "prompts"),
                numbers(calls, "calls"),
                sessions,
                cached_price,
                engine_of if time else None,
                say,
            )
        report.finish(found, [_table(found)], json_file)


def _table(found: dict[str, Any]) -> Any:
    """One line per size and strategy."""

    def ratio(value: tuple[float, float, float] | None) -> str:
        return "-" if value is None else f"{value[0]:.3f} [{value[1]:.3f}, {value[2]:.3f}]"

    rows = [
        [
            report.number(cell["prompt"]),
            report.number(cell["calls"]),
            name,
            f"{100 * one['hit_share']:.1f}",
            report.number(one["computed_tokens"] / cell["sessions"]),
            ratio(one["computed_over_front"]),
            ratio(one["cost_over_front"]),
            ratio(one["ttft_over_front"]),
        ]
        for cell in found["cells"]
        for name, one in cell["strategies"].items()
    ]
    columns = ["prompt", "calls", "strategy", "reused %", "computed/session", "computed/front", "cost/front", "TTFT/front"]
    caption = "ratios to the strategy `front` over the same sessions, with 95 % intervals"
    return report.table("where a text that changes at every call stands", columns, rows, caption)


if __name__ == "__main__":
    typer.run(layout)
