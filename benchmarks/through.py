"""One recorded task through a framework's agents, with its own local class and with ours: `python -m benchmarks.through langchain`."""

from __future__ import annotations

import importlib.util
from enum import Enum
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any

import torch
import typer

from agentcache.bench import report
from agentcache.bench.environment import machine, versions
from agentcache.bench.options import Dtype, DtypeOption, JsonOption, Loading, ModelOption, Shape, ShapeOption, ThreadsOption, to_write
from agentcache.errors import ConfigError
from agentcache.terminal import report_errors

from . import through_langchain, through_llamaindex, through_task
from .episode import load_episode

KNOWN = {module.NAME: module for module in (through_langchain, through_llamaindex)}
Framework = Enum("Framework", {name: name for name in KNOWN}, type=str)  # type: ignore[misc]

app = typer.Typer(add_completion=False)


def framework(name: str) -> ModuleType:
    """The module that knows a framework. ConfigError: something it needs is not installed."""
    needed: dict[str, str] = KNOWN[name].NEEDED
    if missing := [package for module, package in needed.items() if not _installed(module)]:
        raise ConfigError(f"{name}: not installed: {', '.join(missing)}; pip install {' '.join(missing)}")
    return KNOWN[name]


def _installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # of a package that holds it
        return False


@app.command()
def through(
    name: Annotated[Framework, typer.Argument(help="The framework.")],
    calls: Annotated[int | None, typer.Option(min=1, help="At most so many calls of the model.")] = None,
    model: ModelOption = None,
    shape: ShapeOption = None,
    dtype: DtypeOption = Dtype.bfloat16,
    threads: ThreadsOption = None,
    plot: Annotated[Path | None, typer.Option(metavar="FILE", callback=to_write, help="A picture (PNG) of the calls' times.")] = None,
    json_file: JsonOption = None,
) -> None:
    """One recorded task through a framework's agents, with its own local class and with ours, side by side."""
    with report_errors():
        if threads is not None:
            torch.set_num_threads(threads)
        task, loading = load_episode(), Loading(model, shape, dtype)
        found: dict[str, Any] = {"bench": "through", "machine": {**machine(), "threads": torch.get_num_threads()}, "versions": versions()}
        with report.Progress() as say:
            done = through_task.run(framework(name.value), lambda: loading.weights(task.texts), task, calls=calls, say=say)
        found |= {"model": {"name": model or (shape or Shape.small).value, "dtype": dtype.value}, **done}
        if plot is not None:
            through_task.plot(found, plot)
        report.finish(found, through_task.tables(found), json_file)


if __name__ == "__main__":
    app()
