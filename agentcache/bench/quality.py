"""`agentcache bench quality`: how well a model chooses tools and fills their arguments. Knows no options of a command line.

Why cases are generated: nobody can have learnt them by heart, and what is unseen is known (quality_world/world.py splits words, tools
and values by hashing). The embedded model's training saw the split "seen" and the forms of requests; other models saw none of it.
Word overlap can solve many single requests, so BM25 over the same requests stands beside each figure.
"""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.table import Table

from ..engine import Engine
from ..errors import ConfigError, GenerationError
from ..types import Sampling
from . import quality_spoil
from .quality_cases import PER_CATALOG, SPLITS, STYLES, VARIANTS, Case, Episode, episodes, read, selections, variants, with_clock
from .quality_play import ANSWER_TOKENS, Ask, all_of, all_solved, asking
from .quality_score import FIGURES, Ratio, Said, figures
from .report import table

PARTS = ("rows", "shares", "episodes", "selection", "speed", "variants", "paired", "clock", "sensitivity")
Keep = Callable[[dict[str, Any]], None]


@dataclass(frozen=True, slots=True)
class Options:
    """What is asked. held: the part of the world that is kept for "test" or "validation"; agents: requests at a time.

    sensitivity: so many requests with KV spoilt on purpose (quality_spoil.py). paired: so many with reuse and without. variants: so many
    with something changed that changes nothing about what is right. clock: so many episodes per style without a clock at the tail, with one
    that the user tells, and with one that the system tells. speed: so many one at a time, with nothing kept.
    """

    tools: Sequence[int] = (5, 20, 50)
    splits: Sequence[str] = SPLITS
    count: int = 200
    episodes: int = 100
    episode_tools: int = 8
    styles: Sequence[str] = ("hermes", "langchain", "llamaindex")
    selection: Sequence[Path] = ()
    tools_dir: Path | None = None
    held: str = "test"
    seed: str = "bench"
    agents: int = 8
    sensitivity: int = 0
    sensitivity_tools: int = 20
    paired: int = 0
    variants: int = 0
    clock: int = 0
    speed: int = 9

    def __post_init__(self) -> None:
        for name, given, known in (
            ("split", self.splits, SPLITS),
            ("style", self.styles, STYLES),
            ("held", (self.held,), ("test", "validation")),
        ):
            if unknown := [each for each in given if each not in known]:
                raise ConfigError(f"{name}={unknown[0]!r}: choose from {', '.join(map(repr, known))}")


@dataclass(slots=True)
class _Found:
    """What the report has so far."""

    keep: Keep
    parts: dict[str, list[dict[str, Any]]] = field(default_factory=lambda: defaultdict(list))

    def add(self, part: str, row: dict[str, Any]) -> None:
        self.parts[part].append(row)
        self.keep({part: self.parts[part]})


def run(engine: Engine, options: Options, say: Callable[[str], None], keep: Keep = lambda part: None) -> dict[str, Any]:
    """All of it; `keep` gets each part of the report when it is done.

    rows      per split and number of tools: n and the figures of quality_score.py
    shares    the same for the requests that depend on what stands before them, and for those that do not
    episodes  per style: n, solved, and both per kind of dialogue
    selection per file of cases
    speed     to the first token of a prompt of which nothing is kept, one at a time, and tokens a second from there: medians
    paired    the same requests with reuse and with reuse off, how many tokens reuse spared, how many answers are the same tokens
    clock     per style and role: the same episodes with a clock at each prompt's tail and without; solved, and solved in one run only
    variants  the same requests with tools shuffled, another system text, history in front: figures, and how many calls are the same
    sensitivity  see quality_spoil.py
    """
    ask, found, began = asking(engine), _Found(keep), time.perf_counter()
    for split in options.splits:
        for tools in options.tools if options.count else ():
            _cell(ask, found, options, split, tools, say)
    for style in options.styles if options.episodes else ():
        found.add("episodes", _episodes(ask, options, style, say))
    for path in options.selection:
        cases = read(path, options.tools_dir)
        found.add("selection", {"file": path.name, **_asked(ask, cases, options.agents, path.name, say)[0]})
    if options.speed:
        found.add("speed", _speed(engine, options, say))
    if options.variants:
        _variants(ask, found, options, say)
    if options.paired:
        found.add("paired", _paired(engine, options, say))
    for style in options.styles if options.clock else ():
        _clock(ask, found, options, style, say)
    if options.sensitivity:
        for row in quality_spoil.run(engine, options.sensitivity, options.sensitivity_tools, options.seed, options.held, say):
            found.add("sensitivity", row)
    seconds = round(time.perf_counter() - began, 1)
    setting = {"held": options.held, "seed": options.seed, "agents": options.agents, "seconds": seconds}
    keep(setting)
    empty: dict[str, Any] = {name: [] for name in PARTS}
    return {**empty, **found.parts, **setting}


def _asked(ask: Ask, cases: Sequence[Case], agents: int, what: str, say: Callable[[str], None]) -> tuple[dict[str, Any], list[Any]]:
    said = all_of(ask, cases, agents, lambda done: say(f"{what}: {done} of {len(cases)}") if done % 10 == 0 else None)
    return figures(cases, said), said


def _cell(ask: Ask, found: _Found, options: Options, split: str, tools: int, say: Callable[[str], None]) -> None:
    cases = selections(split, tools, options.count, options.seed, options.held)
    row, said = _asked(ask, cases, options.agents, f"{split}, {tools} tools", say)
    found.add("rows", {"split": split, "tools": tools, **row})
    for context in (False, True):
        some = [number for number, case in enumerate(cases) if case.context is context]
        if some:
            part = figures([cases[number] for number in some], [said[number] for number in some])
            found.add("shares", {"split": split, "tools": tools, "share": "context" if context else "independent", **part})


def _paired(engine: Engine, options: Options, say: Callable[[str], None]) -> dict[str, Any]:
    """Each request twice: on the kept tool group, and with everything computed anew."""
    tools = options.sensitivity_tools
    cases = selections("unseen tools", tools, options.paired, options.seed, options.held)
    kept, said = _asked(asking(engine), cases, options.agents, "with reuse", say)
    anew, again = _asked(asking(engine, "off"), cases, options.agents, "without", say)
    spared, alike = sum(one.cached for one in said), sum(one.ids == other.ids and not one.failed for one, other in zip(said, again))
    if not spared or any(other.cached for other in again):
        raise GenerationError(
            f"nothing is compared: {spared!r} tokens were reused in one run, {sum(o.cached for o in again)!r} in the other"
        )
    return {"tools": tools, "n": len(cases), "same": alike, "cached_tokens": spared, "reuse": kept, "off": anew}


def _speed(engine: Engine, options: Options, say: Callable[[str], None]) -> dict[str, Any]:
    tools, times = options.sensitivity_tools, options.speed
    cases = selections("unseen tools", tools, PER_CATALOG * times, options.seed, options.held)[::PER_CATALOG]
    calm = Sampling(max_tokens=ANSWER_TOKENS)
    found = [engine.generate(case.prompt, case.tools, sampling=calm, reuse="off").receipt for case in cases]
    say("speed")
    rates = [1e3 * (one.completion_tokens - 1) / one.decode_ms for one in found if one.decode_ms]
    prompt_tokens, ttft_ms = (statistics.median(getattr(one, name) for one in found) for name in ("prompt_tokens", "ttft_ms"))
    rate = statistics.median(rates) if rates else None
    return {"tools": tools, "n": times, "prompt_tokens": prompt_tokens, "ttft_ms": ttft_ms, "tokens_per_s": rate}


def _variants(ask: Ask, found: _Found, options: Options, say: Callable[[str], None]) -> None:
    asked = variants("unseen tools", options.sensitivity_tools, options.variants, options.seed, options.held)
    plain: list[Said] = []
    for name in VARIANTS:
        row, said = _asked(ask, asked[name], options.agents, name, say)
        plain = plain or said
        same = sum((one.name, one.arguments) == (other.name, other.arguments) for one, other in zip(plain, said))
        found.add("variants", {"variant": name, "tools": options.sensitivity_tools, "same": same, **row})


def _clock(ask: Ask, found: _Found, options: Options, style: str, say: Callable[[str], None]) -> None:
    plain = episodes(style, options.clock, options.episode_tools, seed=options.seed, held=options.held)

    def solved(played: Sequence[Episode], what: str) -> list[bool]:
        steps = all_solved(ask, played, options.agents, lambda done: say(f"{style}, {what}: {done} of {len(played)}"))
        return [done == len(one.steps) for one, done in zip(played, steps)]

    without = solved(plain, "no clock")
    for role in ("user", "system"):
        clocked = solved([with_clock(one, role) for one in plain], f"a clock told by the {role}")
        lost, won = (sum(a > b for a, b in zip(one, other)) for one, other in ((without, clocked), (clocked, without)))
        row = {"style": style, "role": role, "n": len(plain), "without": sum(without), "with": sum(clocked), "lost": lost, "won": won}
        found.add("clock", row)


def _episodes(ask: Ask, options: Options, style: str, say: Callable[[str], None]) -> dict[str, Any]:
    played = episodes(style, options.episodes, options.episode_tools, seed=options.seed, held=options.held)
    steps = all_solved(ask, played, options.agents, lambda done: say(f"{style}: {done} of {len(played)}") if done % 5 == 0 else None)
    kinds: dict[str, list[int]] = defaultdict(lambda: [0, 0])
    for one, done in zip(played, steps):
        kinds[one.kind][0] += done == len(one.steps)
        kinds[one.kind][1] += 1
    catalogs: dict[int, list[bool]] = defaultdict(list)
    for one, done in zip(played, steps):
        catalogs[one.catalog].append(done == len(one.steps))
    ratio = Ratio({catalog: (sum(solved), len(solved)) for catalog, solved in catalogs.items()})
    right = {"steps": sum(len(one.steps) for one in played), "steps_before_first_error": sum(steps)}
    return {
        "style": style,
        "n": len(played),
        "solved": ratio.value,
        "solved_ci": ratio.interval(),
        "tools": options.episode_tools,
        **right,
        "kinds": {kind: {"solved": count[0], "n": count[1]} for kind, count in sorted(kinds.items())},
    }


# Showing


def _share(row: Mapping[str, Any], name: str, interval: bool = True) -> str:
    if row[name] is None:
        return "-"
    low, high = row[f"{name}_ci"]
    return f"{row[name]:.3f}" + (f" ({low:.2f}-{high:.2f})" if interval else "")


def tables(found: Mapping[str, Any]) -> list[Table]:
    """Rows, shares, episodes, files of cases; nothing for what was not asked."""
    shown = [name.removesuffix("_tsa").replace("_", " ") for name in FIGURES]
    caption = "95 % intervals; fpr of requests that no tool fits, the others of those that one fits; behind them, tsa of the baselines"

    def cells(row: Mapping[str, Any]) -> list[str]:
        return [str(row["n"]), *(_share(row, name, interval=not name.endswith("_tsa")) for name in FIGURES)]

    rows = [[row["split"], str(row["tools"]), *cells(row)] for row in found["rows"]]
    shares = [[row["split"], str(row["tools"]), row["share"], *cells(row)] for row in found["shares"]]
    files = [[row["file"], *cells(row), str(row["too_long"])] for row in found["selection"]]
    changed = [[row["variant"], str(row["tools"]), *cells(row), str(row["same"])] for row in found["variants"]]
    speed = [
        [
            str(row["tools"]),
            f"{row['prompt_tokens']:.0f}",
            f"{row['ttft_ms']:.0f}",
            f"{row['tokens_per_s']:.0f}" if row["tokens_per_s"] else "-",
        ]
        for row in found["speed"]
    ]
    played = [[row["style"], str(row["tools"]), str(row["n"]), _share(row, "solved")] for row in found["episodes"]]
    clocks = [[str(row[name]) for name in ("style", "role", "n", "without", "with", "lost", "won")] for row in found["clock"]]
    spoilt = [
        [row["kind"], row["share"], str(row["n"]), _share(row, "tsa"), _share(row, "em")]
        + [f"{row[name]:.3f}" if row[name] is not None else "-" for name in ("cosine", "kl", "same")]
        for row in found["sensitivity"]
    ]
    return [
        table("choosing a tool and filling its arguments", ["split", "tools", "n", *shown], rows, caption),
        table("by whether what is right depends on text before the tool or the request", ["split", "tools", "share", "n", *shown], shares),
        table("dialogues of several calls, every step right", ["style", "tools", "n", "solved"], played),
        table("changed where it changes nothing", ["variant", "tools", "n", *shown, "same call"], changed),
        table("dialogues solved with a clock at the tail", ["style", "told by", "n", "without", "with", "lost", "won"], clocks),
        table(
            "KV spoilt on purpose", ["kind", "share", "n", "tsa", "em", "cosine", "KL", "same"], spoilt, "same: answers as with exact KV"
        ),
        table("reuse off, one at a time", ["tools", "prompt tokens", "first token ms", "tokens/s"], speed),
        table("files of cases", ["file", "n", *shown, "too long"], files),
    ]
