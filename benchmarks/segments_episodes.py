"""Dialogues of several steps played whole: with reuse off, by the exact prefix alone, and with moved text. Success and milliseconds.

What another session computed is kept before the first step (its prompt behind another date, another agent, another tool list); from
there on each method keeps what it computes, as an engine does. Every step is asked as recorded, so that methods can be held step by step.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence

from agentcache.bench.quality import ANSWER_TOKENS, hermes, react
from agentcache.bench.quality_score import Ratio, Said, right
from agentcache.calibration import Calibration
from agentcache.engine import Engine
from agentcache.types import Reuse, Sampling

from .segments_paired import TIERS, Say, agree, flops, tier
from .segments_rows import Row, Rows
from .segments_tasks import Run


class Episodes:
    """Plays dialogues, one at a time, the methods' order rotating."""

    def __init__(self, engine: Engine, methods: Mapping[str, Calibration]) -> None:
        self.engine = engine
        self.methods: dict[str, Reuse | Calibration] = {"off": "off", "exact": "exact", **methods}

    def run(self, runs: Sequence[Run], rows: Rows, say: Say) -> None:
        """Each dialogue that the rows do not have yet."""
        done = rows.done("episodes")
        for run in runs:
            if run.number not in done:
                rows.add(self._row(run))
                say(f"episodes: {run.number + 1} of {len(runs)}")

    def _row(self, run: Run) -> Row:
        names = list(self.methods)
        at = run.number % len(names)
        played = {name: self._play(run, name) for name in names[at:] + names[:at]}
        said = {name: [one for one, _ in steps] for name, steps in played.items()}
        found: dict[str, Row] = {}
        for name in names:
            rights = [right(case, one) for case, one in zip(run.episode.steps, said[name], strict=True)]
            same = [agree(one, other) for one, other in zip(said["off"], said[name], strict=True)]
            found[name] = {
                "solved": all(rights),
                "right": sum(rights),
                "tool": sum(tool for tool, _ in same),
                "arguments": sum(arguments for _, arguments in same),
                **{key: [figures[key] for _, figures in played[name]] for key in played[name][0][1]},
            }
        steps = len(run.steps)
        head = {"family": run.family, "style": run.episode.style, "kind": run.episode.kind, "context": run.episode.steps[0].context}
        return {"part": "episodes", "number": run.number, **head, "steps": steps, "methods": found}

    def _play(self, run: Run, name: str) -> list[tuple[Said, Row]]:
        engine, method, namespace = self.engine, self.methods[name], f"episode {run.number} {name}"
        known = method if isinstance(method, Calibration) else None
        engine.model.keep_boundaries(known.boundaries if known else ())
        stop = () if run.episode.style == "hermes" else ("\nObservation:",)
        sampling = Sampling(max_tokens=ANSWER_TOKENS, stop=stop)
        found = []
        try:
            engine.generate(run.before.messages, run.before.tools, sampling=Sampling(max_tokens=1), namespace=namespace, reuse="exact")
            for prompt, case in zip(run.steps, run.episode.steps, strict=True):
                began = time.perf_counter()
                done = engine.generate(prompt.messages, prompt.tools, sampling=sampling, namespace=namespace, reuse=method)
                ms = (time.perf_counter() - began) * 1e3
                said = hermes(done.message) if case.style == "hermes" else react(done.text, case)
                receipt = done.receipt
                figures = {
                    "ms": ms,
                    "step_ms": receipt.ttft_ms,
                    "tier": tier(receipt),
                    "prompt_tokens": receipt.prompt_tokens,
                    "computed_tokens": receipt.computed_tokens,
                    "reused_tokens": receipt.segment_tokens,
                    "flops": flops(engine.model, receipt, known)["spent"],
                }
                found.append((said, figures))
        finally:
            engine.store.clear(namespace)
        return found


def summaries(rows: Sequence[Row]) -> list[Row]:
    """A row per style, family ("all" too) and method. ms: medians per episode (whole answers) and per step (to the first token).

    tiers: the same steps by how each was served; ms: with its answer.
    """
    found = []
    for style in dict.fromkeys(row["style"] for row in rows):
        styled = [row for row in rows if row["style"] == style]
        for family in ("all", *dict.fromkeys(row["family"] for row in styled)):
            some = [row for row in styled if family in ("all", row["family"])]
            found += [_summary(some, style, family, name) for name in some[0]["methods"]]
    return found


def _summary(rows: Sequence[Row], style: str, family: str, name: str) -> Row:
    mine = [row["methods"][name] for row in rows]
    exact, off = ([row["methods"][other] for row in rows] for other in ("exact", "off"))
    steps = sum(row["steps"] for row in rows)
    firsts = [ms for each in mine for ms in each["step_ms"]]
    solved = Ratio({row["number"]: (float(each["solved"]), 1.0) for row, each in zip(rows, mine, strict=True)})
    return {
        "style": style,
        "family": family,
        "method": name,
        "n": len(rows),
        "steps": steps,
        "solved": solved.value,
        "solved_ci": solved.interval(),
        "changed": sum(one["solved"] != other["solved"] for one, other in zip(mine, off, strict=True)) / len(rows),
        "tool": sum(each["tool"] for each in mine) / steps,
        "arguments": sum(each["arguments"] for each in mine) / steps,
        "prompt_tokens": sum(sum(each["prompt_tokens"]) for each in mine),
        "computed_tokens": sum(sum(each["computed_tokens"]) for each in mine),
        "reused_tokens": sum(sum(each["reused_tokens"]) for each in mine),
        "flops_of_exact": sum(sum(each["flops"]) for each in mine) / sum(sum(each["flops"]) for each in exact),
        "flops_of_off": sum(sum(each["flops"]) for each in mine) / sum(sum(each["flops"]) for each in off),
        "tiers": {name: tiered for name in TIERS if (tiered := _tier(mine, name))},
        "step_ms": statistics.median(firsts),
        "first_step_ms": statistics.median([each["step_ms"][0] for each in mine]),
        "episode_ms": statistics.median([sum(each["ms"]) for each in mine]),
        "off_over_ours": statistics.median([sum(o["ms"]) / sum(m["ms"]) for o, m in zip(off, mine, strict=True)]),
        "exact_over_ours": statistics.median([sum(o["ms"]) / sum(m["ms"]) for o, m in zip(exact, mine, strict=True)]),
        "first_exact_over_ours": statistics.median([o["step_ms"][0] / m["step_ms"][0] for o, m in zip(exact, mine, strict=True)]),
    }


def _tier(played: Sequence[Row], name: str) -> Row:
    """The steps of one method that were served so; empty if none was."""
    steps = [at for each in played for at in zip(*(each[key] for key in ("tier", "reused_tokens", "step_ms", "ms")), strict=True)]
    if not (mine := [step for step in steps if step[0] == name]):
        return {}
    _, reused, first, whole = zip(*mine, strict=True)
    return {"steps": len(mine), "reused_tokens": sum(reused), "step_ms": statistics.median(first), "ms": statistics.median(whole)}
