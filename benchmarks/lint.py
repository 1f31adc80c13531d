"""`python -m benchmarks.lint`: what lint says of recorded episodes as they are, and with faults put in on purpose. Loads no model."""

from __future__ import annotations

import random
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from agentcache.bench.options import JsonOption
from agentcache.bench.report import Progress, finish, table
from agentcache.errors import ConfigError
from agentcache.lint import Cause, Options, Report, lint
from agentcache.terminal import report_errors
from agentcache.traces import Episode, read

from .lint_faults import FAULTS, append_only, injected, requests, scored

TOGETHER = 6  # conversations that are mixed where ids are left out


@dataclass(slots=True)
class _Score:
    """Right and wrong names, per cause; "none" is one of them."""

    right: Counter[str] = field(default_factory=Counter)
    said: Counter[str] = field(default_factory=Counter)
    true: Counter[str] = field(default_factory=Counter)
    wrong: Counter[tuple[str, str]] = field(default_factory=Counter)

    def add(self, true: Cause | None, said: Cause | None) -> None:
        one, other = str(true or "none"), str(said or "none")
        self.true[one] += 1
        self.said[other] += 1
        if one == other:
            self.right[one] += 1
        else:
            self.wrong[one, other] += 1

    def rows(self) -> list[dict[str, Any]]:
        """Per cause: how often it was there, precision and recall."""
        out = []
        for cause in [*map(str, Cause), "none"]:
            true, said, right = self.true[cause], self.said[cause], self.right[cause]
            if true or said:
                precision, recall = (round(right / said, 4) if said else None), (round(right / true, 4) if true else None)
                out.append({"class": cause, "n": true, "precision": precision, "recall": recall})
        return out


def run(paths: Sequence[Path], tools_dir: Path | None, episodes: int | None, seed: int, say: Callable[[str], None]) -> dict[str, Any]:
    """families: shares and causes as recorded; faults: shares with each fault; classes: precision and recall; mixed: without ids."""
    score, found = _Score(), dict[str, Any](families=[], faults=[])
    shares: dict[str, list[int]] = defaultdict(lambda: [0, 0, 0])
    alarms = clean_steps = 0
    mixed, began = _Score(), time.perf_counter()
    for path in paths:
        read_in = list(read(path, tools_dir, episodes=episodes))
        say(f"{path.stem}: {len(read_in)} episodes")
        plain = _linted([(episode.id, requests(episode)) for episode in read_in])
        row, bad, steps = _recorded(path.stem, read_in, plain)
        found["families"].append(row)
        alarms, clean_steps = alarms + bad, clean_steps + steps
        for name in FAULTS:
            _fault(name, read_in, plain, seed, score, shares)
        _mix(read_in, seed, mixed)
    found["faults"] = [
        {"fault": name, "reused_before": _share(row[0], row[2]), "reused_after": _share(row[1], row[2]), "tokens": row[2]}
        for name, row in shares.items()
    ]
    found |= {"classes": score.rows(), "wrong": _listed(score), "clean_steps": clean_steps, "false_alarms": alarms}
    return found | {"mixed": mixed.rows(), "mixed_wrong": _listed(mixed), "seed": seed, "seconds": round(time.perf_counter() - began, 1)}


def _linted(conversations: Sequence[tuple[str, list[dict[str, Any]]]]) -> Report:
    return lint([{"conversation_id": name, **body} for name, bodies in conversations for body in bodies], Options())


def _recorded(family: str, episodes: Sequence[Episode], report: Report) -> tuple[dict[str, Any], int, int]:
    """One family as it is: shares, causes, and alarms where the oracle sees none."""
    clean = [
        pair
        for episode in episodes
        for bodies in [requests(episode)]
        for pair in [True, *map(append_only, bodies, bodies[1:])][: len(bodies)]
    ]
    totals = report.totals()
    alarms = sum(fine and step.cause is not None for fine, step in zip(clean, report.steps, strict=True))
    missed = sum(not fine and step.cause is None for fine, step in zip(clean, report.steps, strict=True))
    row = {
        "family": family,
        "requests": totals["requests"],
        "reused_share": totals["reused_share"],
        "possible_share": totals["possible_share"],
        "causes": totals["causes"],
        "false_alarms": alarms,
        "missed": missed,
        "hazards": [f"{hazard.cause} in {hazard.writer}" for hazard, _, _ in report.hazards][:8],
    }
    return row, alarms, sum(clean)


def _fault(name: str, episodes: Sequence[Episode], plain: Report, seed: int, score: _Score, shares: dict[str, list[int]]) -> None:
    """One fault in every episode, against its labels; shares over the steps where it is. plain: what lint says of them as recorded."""
    made = [(episode.id, *injected(episode, name, seed)) for episode in episodes]
    before = plain.steps
    after = _linted([(one, bodies) for one, bodies, _ in made]).steps
    at = 0
    for _, bodies, labels in made:
        for number in scored(labels):
            step = after[at + number]
            score.add(labels[number], step.cause)
            if labels[number] is not None:
                was = before[at + number]
                shares[name][0] += round(was.reused / max(1, was.tokens) * step.tokens)
                shares[name][1] += step.reused
                shares[name][2] += step.tokens
        at += len(bodies)


def _mix(episodes: Sequence[Episode], seed: int, score: _Score) -> None:
    """Some conversations at a time in one stream without ids, one fault in each."""
    rng = random.Random(seed)
    names = list(FAULTS)
    for start in range(0, len(episodes), TOGETHER):
        some = [
            (*injected(episode, names[(start + at) % len(names)], seed),) for at, episode in enumerate(episodes[start : start + TOGETHER])
        ]
        places = [0] * len(some)
        stream, wanted = [], list[Any]()
        while any(place < len(bodies) for place, (bodies, _) in zip(places, some)):
            at = rng.choice([n for n, (bodies, _) in enumerate(some) if places[n] < len(bodies)])
            stream.append(some[at][0][places[at]])
            wanted.append(some[at][1][places[at]] if places[at] in scored(some[at][1]) else "unscored")
            places[at] += 1
        for label, step in zip(wanted, lint(stream, Options()).steps, strict=True):
            if label != "unscored":
                score.add(label, step.cause)


def _share(part: int, whole: int) -> float | None:
    return round(part / whole, 4) if whole else None


def _listed(score: _Score) -> dict[str, int]:
    return {f"{true} -> {said}": count for (true, said), count in score.wrong.most_common(20)}


def files(workload: Path) -> list[Path]:
    """The trace files of a folder, or the one file."""
    found = [workload] if workload.is_file() else sorted(workload.glob("*.jsonl")) or sorted(workload.glob("traces/*.jsonl"))
    if not found:
        raise ConfigError(f"workload {str(workload)!r} has no .jsonl files: give a folder of traces, or one file")
    return found


def tables(found: Mapping[str, Any]) -> list[Table]:
    """Families as recorded, faults, classes, and the same without ids."""

    def share(value: float | None) -> str:
        return "-" if value is None else f"{value:.1%}"

    families = [
        [row["family"], str(row["requests"]), share(row["reused_share"]), share(row["possible_share"]), str(row["false_alarms"])]
        + [", ".join(f"{cause} {count}" for cause, count in row["causes"].items()) or "none"]
        for row in found["families"]
    ]
    faults = [[row["fault"], share(row["reused_before"]), share(row["reused_after"]), f"{row['tokens']:,}"] for row in found["faults"]]

    def classes(rows: Sequence[Mapping[str, Any]]) -> list[list[str]]:
        return [[row["class"], str(row["n"]), share(row["precision"]), share(row["recall"])] for row in rows]

    alarms = f"{found['false_alarms']} false alarms in {found['clean_steps']} clean steps"
    return [
        table("as recorded", ["family", "requests", "reused", "possible", "false alarms", "causes"], families, alarms),
        table("with faults, where they are", ["fault", "reused before", "after", "tokens"], faults),
        table("naming them", ["class", "n", "precision", "recall"], classes(found["classes"])),
        table("conversations mixed, without ids", ["class", "n", "precision", "recall"], classes(found["mixed"])),
    ]


app = typer.Typer(add_completion=False)


@app.command()
def main(
    workload: Annotated[Path, typer.Option(help="Recorded episodes: a folder of .jsonl files, or one file.")],
    tools_dir: Annotated[Path | None, typer.Option(help="Folder of the tool catalogs; default: ../tools beside the file.")] = None,
    episodes: Annotated[int | None, typer.Option(min=1, help="At most so many of each file.")] = None,
    seed: Annotated[int, typer.Option(help="Of the faults that are put in.")] = 0,
    json_file: JsonOption = None,
) -> None:
    """How well `agentcache lint` names what is wrong: episodes as recorded, and with faults put in; loads no model."""
    with report_errors():
        with Progress() as say:
            found = {"bench": "lint", **run(files(workload), tools_dir, episodes, seed, say)}
        finish(found, tables(found), json_file)


if __name__ == "__main__":
    app()
