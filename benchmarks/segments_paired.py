"""Requests answered with moved text and with everything computed: tool, arguments, words; by tier, family, and kind of request.

    keep      what went before is answered and kept, `agents` namespaces at a time
    off       the whole prompt is computed, the answer decoded greedily: what the others are held against
    near      the same ids forced behind reused text: KL and first choices at every token; decoded freely where a choice differs

Prompts are packed as an engine packs those of several agents, so nothing here is a time: segments_episodes.py takes those.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass

import torch

from agentcache.approximate.calibrate.trials import bound, nothing_kept, stored_as
from agentcache.bench.quality import ANSWER_TOKENS, hermes
from agentcache.bench.quality_score import Ratio, Said, right, same
from agentcache.calibration import Calibration
from agentcache.divergence import divergence
from agentcache.engine import Engine
from agentcache.model.hf import HFModel
from agentcache.receipt import Receipt
from agentcache.store.entry import common
from agentcache.store.keys import as_ids
from agentcache.types import Reason, Reuse, Sampling

from .segments_rows import Row, Rows
from .segments_tasks import Prompt, Task

REFUSED = (Reason.PROBE, Reason.UNSURE, Reason.DRIFT, Reason.NON_FINITE)
TIERS = ("exact", "calibrated", "refused")
Say = Callable[[str], None]


@dataclass(slots=True)
class Told:
    """One answer: its ids, what it calls, the logits [vocab] before each id, and its account."""

    ids: tuple[int, ...]
    said: Said
    logits: list[torch.Tensor]
    receipt: Receipt


def ask(engine: Engine, prompt: Prompt, namespace: str, reuse: Reuse | Calibration, sampling: Sampling | None = None) -> Told:
    """One prompt, greedily unless said otherwise."""
    seen: list[torch.Tensor] = []
    done = engine.generate(
        prompt.messages,
        prompt.tools,
        sampling=sampling or Sampling(max_tokens=ANSWER_TOKENS),
        namespace=namespace,
        reuse=reuse,
        on_logits=lambda row: seen.append(row.clone()),
    )
    return Told(done.ids, hermes(done.message), seen, done.receipt)


def tier(receipt: Receipt) -> str:
    """How a request was served: behind segments, without because they were refused, or by its exact prefix alone."""
    if not receipt.segments and any(refusal.reason in REFUSED for refusal in receipt.refusals):
        return "refused"
    return "exact" if receipt.precision == "exact" else "calibrated"


def agree(one: Said, other: Said) -> tuple[bool, bool]:
    """Whether two answers call the same tool (or both none), and with the same arguments."""
    tool = one.name == other.name and one.failed == other.failed
    return tool, tool and same(one.arguments, other.arguments)


def flops(model: HFModel, receipt: Receipt, known: Calibration | None) -> dict[str, float]:
    """Of this prompt: as served (spent), by its exact prefix alone (exact), and without reuse (off)."""
    whole, prefix = model.flops(receipt.prompt_tokens), model.flops(receipt.cached_tokens - receipt.segment_tokens)
    taken = sum(part.whole_tokens for part in receipt.segments)
    copied = sum(model.flops(part.stop) - model.flops(part.stop - part.whole_tokens) for part in receipt.segments)
    copied *= receipt.segment_tokens / taken if taken else 0.0  # without those that were computed again
    spared = known.spared(receipt.segments) * whole / receipt.prompt_tokens if known else 0.0
    return {"spent": whole - prefix - copied - spared, "exact": whole - prefix, "off": whole}


def distance(one: Sequence[int], other: Sequence[int]) -> int:
    """Levenshtein's, in tokens."""
    line = list(range(len(other) + 1))
    for row, a in enumerate(one, 1):
        left, line = line, [row]
        for column, b in enumerate(other, 1):
            line.append(min(left[column] + 1, line[-1] + 1, left[column - 1] + (a != b)))
    return line[-1]


class Paired:
    """Asks tasks of one engine under each method, `agents` at a time."""

    def __init__(self, engine: Engine, methods: Mapping[str, Calibration], agents: int = 8) -> None:
        self.engine, self.methods, self.agents = engine, dict(methods), agents
        self.boundaries = tuple(sorted({layer for known in methods.values() for layer in known.boundaries}))

    def run(self, tasks: Sequence[Task], rows: Rows, say: Say) -> None:
        """Each task that the rows do not have yet."""
        done = rows.done("paired")
        left = [task for task in tasks if task.number not in done]
        with ThreadPoolExecutor(self.agents) as pool:
            for at in range(0, len(left), self.agents):
                for row in self._group(left[at : at + self.agents], pool):
                    rows.add(row)
                say(f"paired: {len(done) + min(at + self.agents, len(left))} of {len(tasks)}")

    def _group(self, tasks: Sequence[Task], pool: ThreadPoolExecutor) -> list[Row]:
        engine = self.engine
        names = [f"paired {task.number}" for task in tasks]
        try:
            engine.model.keep_boundaries(self.boundaries)
            kept = list(pool.map(self.keep, tasks, names))
            found: list[dict[str, Row]] = [{} for _ in tasks]
            with nothing_kept(engine):
                off = list(pool.map(lambda task, name: ask(engine, task.asked, name, "off"), tasks, names))
                for method, known in self.methods.items():
                    with ExitStack() as stored:
                        for name in names:
                            stored.enter_context(stored_as(engine, name, known.precision))
                        near = pool.map(self._near, tasks, names, [known] * len(tasks), off)
                        for at, row in enumerate(near):
                            found[at][method] = row
        finally:
            for name in names:
                engine.store.clear(name)
        return [self._row(*each) for each in zip(tasks, kept, off, found, strict=True)]

    def keep(self, task: Task, namespace: str) -> int:
        """Answer what went before; returns the text-match bound of what is asked, in tokens."""
        engine = self.engine
        engine.generate(task.before.messages, task.before.tools, sampling=Sampling(max_tokens=1), namespace=namespace, reuse="exact")
        was, now = (
            as_ids(engine.renderer.render(prompt.messages, prompt.tools, namespace=namespace).ids) for prompt in (task.before, task.asked)
        )
        return bound([was], now, common(was, now))

    def _near(self, task: Task, namespace: str, known: Calibration, off: Told) -> Row:
        forced = Sampling(max_tokens=len(off.ids), forced=off.ids, ignore_eos=True)
        along = ask(self.engine, task.asked, namespace, known, forced)
        pairs = list(zip(off.logits, along.logits, strict=True))
        equal = [bool(one.argmax() == other.argmax()) for one, other in pairs]
        free = off if all(equal) and not known.margin else ask(self.engine, task.asked, namespace, known)
        kl = [divergence(one, other) for one, other in pairs]
        unsure = any(refusal.reason == Reason.UNSURE for refusal in free.receipt.refusals)
        receipt, (tool, arguments) = free.receipt if unsure else along.receipt, agree(off.said, free.said)
        spent = flops(self.engine.model, along.receipt, known)
        if unsure:  # both were paid for: what was computed behind moved text, and all of it
            spent["spent"] += spent["exact"]
        return {
            "tier": tier(receipt),
            "prefix_tokens": receipt.cached_tokens - receipt.segment_tokens,
            "reused_tokens": receipt.segment_tokens,
            "halo_tokens": receipt.halo_tokens,
            "computed_tokens": receipt.computed_tokens,
            "refused": sum(refusal.reason in REFUSED for refusal in receipt.refusals),
            **{f"{name}_flops": value for name, value in spent.items()},
            "kl": sum(kl) / len(kl),
            "kl_first": kl[0],
            "kl_most": max(kl),
            "top1": sum(equal) / len(equal),
            "same": free.ids == off.ids,
            "distance": distance(off.ids, free.ids) / max(len(off.ids), len(free.ids)),
            "tool": tool,
            "arguments": arguments,
            "right": right(task.case, free.said),
        }

    def _row(self, task: Task, most: int, off: Told, found: Mapping[str, Row]) -> Row:
        return {
            "part": "paired",
            "number": task.number,
            "family": task.family,
            "catalog": task.case.catalog,
            "kind": task.case.kind,
            "context": task.case.context,
            "tools": len(task.asked.tools),
            "prompt_tokens": off.receipt.prompt_tokens,
            "answer_tokens": len(off.ids),
            "bound_tokens": most,
            "right": right(task.case, off.said),
            "methods": dict(found),
        }


# Counting

_SUMS = ("prefix_tokens", "reused_tokens", "halo_tokens", "computed_tokens", "refused", "spent_flops", "exact_flops", "off_flops")
_MEANS = ("kl", "kl_first", "top1", "same", "distance", "tool", "arguments", "right")


def summary(rows: Sequence[Row], method: str) -> Row:
    """Sums and means of one method over some requests. decision: all first choices equal. changed: right or wrong otherwise than off.
    kl_ours: what the same requests drift by under "ours", so that what a probe refuses can be judged.

    Intervals (`tool_ci`, `arguments_ci`) at 95 %: the wider of Wilson's and of a bootstrap over catalogs.
    """
    mine = [(row, row["methods"][method]) for row in rows if method in row["methods"]]
    n = len(mine)
    found: Row = {"n": n}
    if not n:
        return found
    found |= {name: sum(row[name] for row, _ in mine) for name in ("prompt_tokens", "bound_tokens")}
    found |= {name: sum(near[name] for _, near in mine) for name in _SUMS}
    found |= {name: sum(near[name] for _, near in mine) / n for name in _MEANS}
    for name in ("tool", "arguments"):
        of: dict[int, tuple[float, float]] = {}
        for row, near in mine:
            part, whole = of.get(row["catalog"], (0.0, 0.0))
            of[row["catalog"]] = (part + near[name], whole + 1)
        found[f"{name}_ci"] = Ratio(of).interval()
    return found | {
        "kl_first_p99": sorted(near["kl_first"] for _, near in mine)[math.ceil(0.99 * n) - 1],
        "kl_most": max(near["kl_most"] for _, near in mine),
        "decision": sum(near["top1"] == 1.0 for _, near in mine) / n,
        "kl_ours": sum(row["methods"]["ours"]["kl"] for row, _ in mine) / n if "ours" in mine[0][0]["methods"] else None,
        "right_off": sum(row["right"] for row, _ in mine) / n,
        "changed": sum(row["right"] != near["right"] for row, near in mine) / n,
        "of_bound": found["reused_tokens"] / found["bound_tokens"] if found["bound_tokens"] else None,
        "flops_of_exact": found["spent_flops"] / found["exact_flops"],
        "flops_of_off": found["spent_flops"] / found["off_flops"],
        "prompts": {name: sum(near["tier"] == name for _, near in mine) / n for name in TIERS},
    }


def summaries(rows: Sequence[Row]) -> list[Row]:
    """By method: all; by kind of request; by tier; by family."""
    found = []
    for method in dict.fromkeys(name for row in rows for name in row["methods"]):
        cuts: list[tuple[str, str, list[Row]]] = [("all", "all", list(rows))]
        cuts += [("share", "context" if yes else "independent", [row for row in rows if row["context"] is yes]) for yes in (True, False)]
        cuts += [("tier", name, [row for row in rows if row["methods"][method]["tier"] == name]) for name in TIERS]
        cuts += [("family", name, [row for row in rows if row["family"] == name]) for name in dict.fromkeys(row["family"] for row in rows)]
        found += [{"by": by, "of": name, "method": method, **summary(some, method)} for by, name, some in cuts if some]
    return found
