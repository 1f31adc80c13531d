"""`python -m benchmarks.quality`: `agentcache bench quality` on freshly drawn cases, and more questions.

rows         per split and number of tools: the figures, and those of the baselines of quality_baselines.py
shares       the same for the requests that depend on what stands before them, and for those that do not
paired       the same requests with reuse and with reuse off, tokens that reuse spared, answers of the same tokens
speed        to the first token of a prompt of which nothing is kept, one at a time, and tokens a second from there: medians
variants     the same requests with tools shuffled, another system text, history in front: figures, and how many calls are the same
clock        per style and role: the same episodes with a clock at each prompt's tail and without; solved, and solved in one run only
sensitivity  see quality_spoil.py
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from agentcache.bench import quality, report
from agentcache.bench.options import Dtype, DtypeOption, JsonOption, Loading, OwnModelOption, ThreadsOption, ToolsDir, names, numbers
from agentcache.bench.quality import Ask, all_of, asking
from agentcache.bench.quality_cases import PER_CATALOG, SPLITS, Case, Episode
from agentcache.bench.quality_score import FIGURES, Said, figures
from agentcache.engine import Engine
from agentcache.errors import ConfigError, GenerationError
from agentcache.terminal import report_errors
from agentcache.types import Sampling
from examples.embedded import cases as drawn

from . import quality_spoil
from .quality_baselines import BASELINES, baselines

PARTS = ("rows", "shares", "paired", "speed", "variants", "clock", "sensitivity")
app = typer.Typer(add_completion=False)


@dataclass(frozen=True, slots=True)
class Parts:
    """What is asked beside `agentcache bench quality`."""

    # requests of each part; dialogues per style of `clock`
    variants: int = 0
    clock: int = 0
    sensitivity: int = 0
    speed: int = 0
    paired: int = 0
    # splits and numbers of tools of rows, and how many requests each has
    splits: Sequence[str] = SPLITS
    sizes: Sequence[int] = (5, 20, 50)
    count: int = 0
    styles: Sequence[str] = ("hermes", "langchain", "llamaindex")
    tools: int = 20  # tools of the requests of all other parts
    agents: int = 8  # requests at a time


class Found:
    """The rows of a report so far, by part."""

    def __init__(self, keep: quality.Keep) -> None:
        self.keep, self.parts = keep, {name: list[dict[str, Any]]() for name in PARTS}

    def add(self, part: str, row: dict[str, Any]) -> None:
        self.parts[part].append(row)
        self.keep({part: self.parts[part]})


def more(engine: Engine, parts: Parts, source: drawn.Drawn, say: quality.Say, keep: quality.Keep = lambda part: None) -> dict[str, Any]:
    """The parts that are asked for; `keep` gets each row when it is there."""
    ask, found = asking(engine), Found(keep)
    for split in parts.splits:
        for tools in parts.sizes if parts.count else ():
            _cell(ask, found, source.selections(split, tools, parts.count), {"split": split, "tools": tools}, parts.agents, say)
    if parts.paired:
        found.add("paired", _paired(engine, parts, source, say))
    if parts.speed:
        found.add("speed", _speed(engine, parts, source, say))
    if parts.variants:
        _variants(ask, found, parts, source, say)
    for style in parts.styles if parts.clock else ():
        _clock(ask, found, source.episodes(style, parts.clock), parts.agents, say)
    if parts.sensitivity:
        for row in quality_spoil.run(engine, source.selections("unseen tools", parts.tools, parts.sensitivity), say):
            found.add("sensitivity", row)
    return found.parts


def _cell(ask: Ask, found: Found, cases: Sequence[Case], of: dict[str, Any], agents: int, say: quality.Say) -> None:
    """The figures of these cases, and of those that depend on context and those that do not; the baselines beside each."""
    row, said = quality.asked(ask, cases, agents, f"{of['split']}, {of['tools']} tools", say)
    found.add("rows", {**of, **row, **baselines(cases)})
    for context in (False, True):
        some = [number for number, case in enumerate(cases) if case.context is context]
        if some:
            mine = [cases[number] for number in some]
            part = {**figures(mine, [said[number] for number in some]), **baselines(mine)}
            found.add("shares", {**of, "share": "context" if context else "independent", **part})


def _paired(engine: Engine, parts: Parts, source: drawn.Drawn, say: quality.Say) -> dict[str, Any]:
    """Each request twice: on the cached tool group, and with everything computed anew."""
    cases = source.selections("unseen tools", parts.tools, parts.paired)
    kept, said = quality.asked(asking(engine), cases, parts.agents, "with reuse", say)
    anew, again = quality.asked(asking(engine, "off"), cases, parts.agents, "without", say)
    spared, alike = sum(one.cached for one in said), sum(one.ids == other.ids and not one.failed for one, other in zip(said, again))
    if not spared or any(other.cached for other in again):
        raise GenerationError(
            f"nothing is compared: {spared!r} tokens were reused in one run, {sum(o.cached for o in again)!r} in the other"
        )
    return {"tools": parts.tools, "n": len(cases), "same": alike, "cached_tokens": spared, "reuse": kept, "off": anew}


def _variants(ask: Ask, found: Found, parts: Parts, source: drawn.Drawn, say: quality.Say) -> None:
    asked = drawn.variants("unseen tools", parts.tools, parts.variants, source.seed, source.held)
    plain: list[Said] = []
    for name in drawn.VARIANTS:
        row, said = quality.asked(ask, asked[name], parts.agents, name, say)
        plain = plain or said
        same = sum((one.name, one.arguments) == (other.name, other.arguments) for one, other in zip(plain, said))
        found.add("variants", {"variant": name, "tools": parts.tools, "same": same, **row})


def _clock(ask: Ask, found: Found, plain: Sequence[Episode], agents: int, say: quality.Say) -> None:
    style = plain[0].style

    def solved(played: Sequence[Episode], what: str) -> list[bool]:
        steps = all_of(partial(quality.solved, ask), played, agents, lambda done: say(f"{style}, {what}: {done} of {len(played)}"))
        return [done == len(one.steps) for one, done in zip(played, steps)]

    without = solved(plain, "no clock")
    for role in ("user", "system"):
        clocked = solved([drawn.with_clock(one, role) for one in plain], f"a clock told by the {role}")
        lost, won = (sum(a > b for a, b in zip(one, other)) for one, other in ((without, clocked), (clocked, without)))
        row = {"style": style, "role": role, "n": len(plain), "without": sum(without), "with": sum(clocked), "lost": lost, "won": won}
        found.add("clock", row)


def _speed(engine: Engine, parts: Parts, source: drawn.Drawn, say: quality.Say) -> dict[str, Any]:
    tools, times = parts.tools, parts.speed
    cases = source.selections("unseen tools", tools, PER_CATALOG * times)[::PER_CATALOG]
    calm = Sampling(max_tokens=quality.ANSWER_TOKENS)
    found = [engine.generate(case.prompt, case.tools, sampling=calm, reuse="off").receipt for case in cases]
    say("speed")
    rates = [1e3 * (one.completion_tokens - 1) / one.decode_ms for one in found if one.decode_ms]
    prompt_tokens, ttft_ms = (statistics.median(getattr(one, name) for one in found) for name in ("prompt_tokens", "ttft_ms"))
    rate = statistics.median(rates) if rates else None
    return {"tools": tools, "n": times, "prompt_tokens": prompt_tokens, "ttft_ms": ttft_ms, "tokens_per_s": rate}


def tables(found: dict[str, Any]) -> list[Table]:
    """Of the parts that were asked for."""
    rows = [[row["split"], str(row["tools"]), row["share"], *quality.cells(row)] for row in found["shares"]]
    bases = [[row["split"], str(row["tools"]), *(quality.share(row, name) for name in BASELINES)] for row in found["rows"]]
    changed = [[row["variant"], str(row["tools"]), *quality.cells(row), str(row["same"])] for row in found["variants"]]
    clocks = [[str(row[name]) for name in ("style", "role", "n", "without", "with", "lost", "won")] for row in found["clock"]]
    speed = [
        [str(row["tools"]), *(report.number(row[name]) for name in ("prompt_tokens", "ttft_ms", "tokens_per_s"))] for row in found["speed"]
    ]
    spoilt = [
        [row["kind"], row["share"], str(row["n"]), quality.share(row, "tsa"), quality.share(row, "em")]
        + [report.number(row[name], 3) for name in ("cosine", "kl", "same")]
        for row in found["sensitivity"]
    ]
    columns = ["kind", "share", "n", "tsa", "em", "cosine", "KL", "same"]
    return [
        report.table("right tool of the baselines", ["split", "tools", *BASELINES], bases),
        report.table("with context: text before the tool or the request decides", ["split", "tools", "share", "n", *FIGURES], rows),
        report.table("reuse off, one at a time", ["tools", "prompt tokens", "first token ms", "tokens/s"], speed),
        report.table("changed where it changes nothing", ["variant", "tools", "n", *FIGURES, "same call"], changed),
        report.table("dialogues solved with a clock at the tail", ["style", "told by", "n", "without", "with", "lost", "won"], clocks),
        report.table("KV spoilt on purpose", columns, spoilt, "same: answers as with exact KV"),
    ]


@app.command()
def main(
    model: OwnModelOption = "embedded",
    tools: Annotated[str, typer.Option(help="Tool counts, with commas.")] = "5,20,50",
    splits: Annotated[str, typer.Option(help="seen, held-out requests, unseen tools, unseen words.")] = "all",
    count: Annotated[int, typer.Option("--n", min=0, help="Requests per split and tool count.")] = 1000,
    episodes: Annotated[int, typer.Option(min=0, help="Dialogues of several calls, per style.")] = 480,
    styles: Annotated[str, typer.Option(help="Of hermes, langchain, langchain text, llamaindex.")] = "hermes,langchain,llamaindex",
    selection: Annotated[list[Path] | None, typer.Option(help="A file of cases (.jsonl); may be given several times.")] = None,
    tools_dir: ToolsDir = None,
    speed: Annotated[int, typer.Option(min=0, help="So many one at a time, with nothing kept: times.")] = 9,
    paired: Annotated[int, typer.Option(min=0, help="Also: so many requests with reuse and without, answers compared.")] = 0,
    sensitivity: Annotated[int, typer.Option(min=0, help="Also: so many requests with KV spoilt on purpose.")] = 0,
    variants: Annotated[int, typer.Option(min=0, help="Also: so many with tools shuffled, another system text, history in front.")] = 0,
    clock: Annotated[int, typer.Option(min=0, help="Also: so many dialogues per style with a clock at the tail and without.")] = 0,
    held: Annotated[str, typer.Option(help="Held-out part of the world: test, or validation.")] = drawn.HELD,
    seed: Annotated[str, typer.Option(help="Another word draws other requests.")] = drawn.SEED,
    agents: Annotated[int, typer.Option(min=1, help="Requests at a time.")] = 8,
    dtype: DtypeOption = Dtype.bfloat16,
    threads: ThreadsOption = None,
    json_file: JsonOption = None,
) -> None:
    """How well a model chooses tools, on as many cases as you like, drawn with any seed."""
    with report_errors():
        if held not in ("test", "validation"):
            raise ConfigError(f"held={held!r}: choose from 'test', 'validation'")
        named, files = names(splits) if splits != "all" else SPLITS, tuple(selection or ())
        styled, sizes = names(styles), numbers(tools, "tools")
        wanted = quality.Options(sizes, named, 0, episodes, styled, files, tools_dir, agents)
        source = drawn.Drawn(seed, held)
        parts = Parts(variants, clock, sensitivity, speed, paired, named, sizes, count, styled, agents=agents)
        with report.measuring("quality", Loading(model, None, dtype, threads), json_file) as run:
            run.keep({"held": held, "seed": seed})
            run.keep(quality.run(run.engine, wanted, run.say, run.keep, source))
            run.keep(more(run.engine, parts, source, run.say, run.keep))
            run.tables += [*quality.tables(run.found), *tables(run.found)]


if __name__ == "__main__":
    app()
