"""The parts of `python -m benchmarks.segments` on the made-up world, and what they sum up to. Knows no command line."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from agentcache.approximate.calibrate.trials import LEAST, Say, Trials
from agentcache.bench.quality_cases import STYLES
from agentcache.calibration import PRECISIONS, Calibration
from agentcache.errors import ConfigError
from agentcache.traces import Episode

from . import segments_episodes, segments_find, segments_paired, segments_sampled, segments_tasks
from .segments_rows import Rows, settings_of

PROBE = 0.1
HALO = 8
Keep = Callable[[dict[str, Any]], None]


@dataclass(frozen=True, slots=True)
class Options:
    """paired: requests; episodes: dialogues per style; sampled: requests drawn with five seeds; agents: requests at a time.

    rows: file that single results are kept in, from which an ended run goes on.
    """

    paired: int = 0
    episodes: int = 0
    sampled: int = 0
    styles: Sequence[str] = ("hermes",)
    tools: int = 8
    families: Sequence[str] = segments_tasks.FAMILIES
    agents: int = 8
    rows: Path | None = None
    ablations: bool = True

    def __post_init__(self) -> None:
        if unknown := [each for each in self.styles if each not in STYLES]:
            raise ConfigError(f"styles={unknown[0]!r}: choose from {', '.join(map(repr, STYLES))}")

    @property
    def any(self) -> bool:
        """Whether anything is asked for."""
        return bool(self.paired or self.episodes or self.sampled)


def begun(path: Path | None) -> Calibration | None:
    """The setting that a file of rows was begun with: an ended run goes on with it, without looking for one again."""
    if path is None or not path.is_file() or (known := settings_of(path)) is None:
        return None
    ours = known["methods"]["ours"]
    return Calibration(**{**ours, "steps": tuple((int(at), int(layer)) for at, layer in ours["steps"])})


def methods(trials: Trials, ours: Calibration, ablations: bool) -> dict[str, Calibration]:
    """What whole answers are compared under: ours and no repair; ours without its margin; ours without its tail, a halo of 8, and ours
    with a probe."""
    found = {"ours": ours, "bare": trials.calibration(0)}
    if ours.margin:
        found["no margin"] = replace(ours, margin=0.0)
    if ablations:
        found["halo 8"] = trials.calibration(HALO, tail=ours.tail)
        found |= {"no tail": replace(ours, tail=0)} if ours.tail else {}
        found["probe"] = replace(ours if ours.steps[0][0] else found["halo 8"], probe=PROBE)  # a probe looks at the halo
    return {name: replace(known, measured={}) for name, known in found.items()}


def variations(trials: Trials, ours: Calibration) -> dict[str, Calibration]:
    """The calibration, no repair at all, and one thing changed at a time."""
    layers = ours.layers
    half = layers // 2
    found = {f"halo {halo}": trials.calibration(halo) for halo in (4, 8, 16, 32)}
    for share in (0.08, 0.16):
        found[f"halo 8, share {share:g}"] = trials.calibration(8, share=share)
    for layer in sorted({layers // 4, half, 3 * layers // 4} - {0}):
        found[f"halo 8, from layer {layer} to 64"] = trials.calibration(steps=((8, layer), (64, layers)))
    found["halo 8, probe 0.1"] = trials.calibration(8, probe=0.1)
    found |= {f"halo 8, {precision}": trials.calibration(8, precision=precision) for precision in PRECISIONS[1:]}
    found = {name: replace(known, tail=ours.tail) for name, known in found.items()}
    found |= {"bare": trials.calibration(0, LEAST), "ours": ours, **({"no tail": replace(ours, tail=0)} if ours.tail else {})}
    return {name: replace(known, kl=ours.kl) for name, known in found.items()}


def run(trials: Trials, ours: Calibration, options: Options, say: Say, keep: Keep) -> None:
    """All parts that are asked for; `keep` gets each one's sums."""
    if not options.any:
        return
    tried = methods(trials, ours, options.ablations)
    engine = trials.engine
    assert engine.fingerprint is not None
    settings = {
        "fingerprint": engine.fingerprint.whole,
        "tools": options.tools,
        "families": list(options.families),
        "styles": list(options.styles),
        "methods": {name: asdict(known) for name, known in tried.items()},
    }
    rows = Rows(options.rows, settings)
    if options.paired or options.sampled:
        wanted = segments_tasks.chosen(options.families)
        tasks = segments_tasks.tasks(max(options.paired, options.sampled), options.tools, wanted)
        segments_paired.Paired(engine, tried, options.agents).run(tasks[: options.paired], rows, say)
        keep({"paired": segments_paired.summaries(rows.of("paired"))})
        segments_sampled.Sampled(engine, tried["ours"]).run(tasks[: options.sampled], rows, say)
        keep({"sampled": segments_sampled.summary(rows.of("sampled"))} if options.sampled else {})
    if options.episodes:
        played = segments_episodes.Episodes(engine, {name: tried[name] for name in ("ours", "bare")})
        wanted = segments_tasks.chosen(options.families, segments_tasks.EPISODES)
        runs = [
            replace(run, number=at * options.episodes + run.number)
            for at, style in enumerate(options.styles)
            for run in segments_tasks.runs(options.episodes, options.tools, style, families=wanted)
        ]
        played.run(runs, rows, say)
        keep({"episodes": segments_episodes.summaries(rows.of("episodes"))})


def finding(found: Mapping[str, Sequence[Episode]], tokenizer: Any, say: Say) -> dict[str, Any]:
    """What finds text, on episodes by where they come from: windows of 32, 64 and 128, thresholds 0.6 to 0.9."""
    return segments_find.run({name: list(episodes) for name, episodes in found.items()}, tokenizer, say=say)
