"""`python -m benchmarks.turn_noise`: answers after int8 turns beside answers after exact ones that were only computed or rounded otherwise.

Physics: logits of bfloat16 lie 1/16 nat apart from 8 on. Choices that are closer change with the order of a sum, whatever stores the turns.

    int8            as StoreOptions(turns="int8") stores them
    transformers    exact: by transformers' own forward, in the same dtype
    neighbours      exact but for the last bit: each number is as it is, or the next one of its dtype above or below, by chance
    bfloat16        rounded to it, after a model of float32

All ways of one answer run in one forward, over the tokens of the exact answer: rows of a forward do not depend on one another.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Annotated, Any

import torch
import typer

from agentcache.approximate.calibrate.trials import lossy_copy, nothing_kept
from agentcache.bench import report
from agentcache.bench.environment import machine
from agentcache.bench.options import Dtype, DtypeOption, JsonOption, Loading, Shape, ShapeOption, ThreadsOption
from agentcache.divergence import divergence
from agentcache.engine import Engine
from agentcache.kv import Page, Sequence
from agentcache.model.attention import Part
from agentcache.model.loading import cache_in, cache_name
from agentcache.store.entry import Entry
from agentcache.terminal import report_errors
from agentcache.traces import Call
from agentcache.types import Sampling
from benchmarks.lossy_turns import requests

CHANCE = torch.Generator().manual_seed(1)
States = list[tuple[torch.Tensor, torch.Tensor]]  # keys [heads, tokens, width] and values of each layer


@dataclass(slots=True)
class Way:
    """What one way has changed so far. near: (answer, nats by which the exact choice was ahead, nats by which it is not any more)."""

    changed: int = 0
    flips: int = 0
    near: list[tuple[int, float, float]] = field(default_factory=list)
    divergences: list[float] = field(default_factory=list)

    @property
    def found(self) -> dict[str, Any]:
        known = torch.tensor(self.divergences, dtype=torch.float64)
        kl = {"kl_mean": float(known.mean()), "kl_p99": float(known.quantile(0.99)), "kl_most": float(known.max())}
        top1 = 1 - self.flips / len(known)
        return {"tokens": len(known), "top1": top1, "changed_calls": self.changed, **kl, "close_choices": self.near}


def neighbour(x: torch.Tensor) -> torch.Tensor:
    """Each number as it is, or one last bit more or less."""
    _, exponent = torch.frexp(x.float())
    step = torch.ldexp(torch.full_like(x, torch.finfo(x.dtype).eps, dtype=torch.float32), exponent - 1)
    return (x.float() + step * torch.randint(-1, 2, x.shape, generator=CHANCE)).to(x.dtype)


def copied(entry: Entry, way: str, since: int, stock: States) -> Page:
    """The page with its turns, from token `since` of the prompt on, as a way has them."""
    page = entry.page
    assert page is not None
    first = max(0, since - entry.first)
    if way == "int8":
        return lossy_copy(page, way, first)
    found, some, at = page.copy(page.filled), slice(first, page.filled), slice(entry.first + first, entry.first + page.filled)
    for keys, values, (own_keys, own_values) in zip(found.layer_keys, found.layer_values, stock, strict=True):
        for kept, own in ((keys[..., some], own_keys[:, at].transpose(1, 2)), (values[:, some], own_values[:, at])):
            kept.copy_(own if way == "transformers" else neighbour(kept) if way == "neighbours" else kept.bfloat16())
    return found


@contextmanager
def in_place_of(pages: dict[Entry, Page]) -> Iterator[None]:
    """Entries have these pages meanwhile."""
    known = {entry: entry.page for entry in pages}
    for each in (pages, known):
        for entry, page in each.items():
            entry.page = page
        if each is pages:
            yield


def answers(
    engine: Engine, plain: Any, asked: list[Call], ways: list[str], most: int, longest: int, say: report.Progress
) -> dict[str, Any]:
    """What each way changes of so many calls (answers, where none is a call), and how many rows of exact logits have two first choices."""
    found, calls, tied = {way: Way() for way in ways}, 0, 0
    for number, call in enumerate(asked):
        namespace, exact = f"noise {number}", list[torch.Tensor]()
        given: Any = {"tools": call.tools, "namespace": namespace, "sampling": Sampling(max_tokens=longest)}
        done = engine.generate(call.prompt, **given, on_logits=lambda row, kept=exact: kept.append(row.clone()))
        layout = engine.renderer.render(call.prompt, call.tools, namespace=namespace)
        calls, tied = calls + len(done.message.tool_calls), tied + sum(len(set(row.topk(2).values.tolist())) == 1 for row in exact)
        entries = [one for one in engine.store.tree.entries(namespace) if one.page and one.first + one.page.filled > layout.prefix_tokens]
        with torch.inference_mode():
            states = cache_in(plain.model(torch.tensor([[*layout.ids, *done.ids]])), cache_name(plain.model))
        stock = [(layer.keys[0], layer.values[0]) for layer in states.layers]
        pages = {way: {one: copied(one, way, layout.prefix_tokens, stock) for one in entries} for way in ways}
        rows = forced(engine, namespace, list(pages.values()), layout.ids, done.ids)
        for way, near in zip(ways, rows, strict=True):
            one = found[way]
            one.divergences += [divergence(row, other) for row, other in zip(exact, near, strict=True)]
            flips = [(row, other) for row, other in zip(exact, near, strict=True) if row.argmax() != other.argmax()]
            one.flips += len(flips)
            one.near += [(number, gap(row, other), gap(other, row)) for row, other in flips[:1]]
            if any(int(row.argmax()) != id for row, id in zip(near, done.ids, strict=True)):  # else the answer is the same
                with nothing_kept(engine), in_place_of(pages[way]):
                    one.changed += engine.generate(call.prompt, **given).message.tool_calls != done.message.tool_calls
        engine.store.clear(namespace)
        if number % 25 == 24:
            say(f"{number + 1} answers, {calls} calls: changed {', '.join(f'{way} {one.changed}' for way, one in found.items())}")
        if calls >= most:
            break
    return {"answers": number + 1, "calls": calls, "tied_choices": tied, **{way: one.found for way, one in found.items()}}


def gap(row: torch.Tensor, other: torch.Tensor) -> float:
    """Nats by which a row's first choice is ahead of another row's."""
    return float(row.max() - row[int(other.argmax())])


def forced(engine: Engine, namespace: str, ways: list[dict[Entry, Page]], prompt: Any, answer: tuple[int, ...]) -> list[torch.Tensor]:
    """Logits of each token of the answer, [tokens, vocab] for each way, after that way's pages of the prompt."""
    model, tokens, tail = engine.model, len(prompt) - 1, [prompt[-1], *answer[:-1]]
    assert model.spec is not None and model.rotary is not None
    chain: dict[int, Entry] = {}
    for entry in sorted(engine.store.tree.entries(namespace), key=lambda one: len(one.ids)):
        chain[entry.first] = entry
    parts = []
    for number, pages in enumerate(ways):
        sequence = Sequence(model.spec)
        sequence.attach([pages.get(one) or one.page for _, one in sorted(chain.items())], tokens)  # type: ignore[misc]
        sequence.reserve(len(tail))
        parts.append(Part(sequence, tokens, len(tail), number * len(tail)))
    regime = model.rotary.regime(tokens + len(tail)) or ""
    with torch.inference_mode():
        rows = model.forward(torch.tensor(tail * len(ways)), parts, [regime] * len(ways), range(len(tail) * len(ways)))
    for part in parts:
        part.sequence.close()
    return list(rows.split(len(tail)))


def main(
    calls: Annotated[int, typer.Option(min=1, help="Tool calls of the embedded model.")] = 1000,
    shape: ShapeOption = Shape.qwen3_06b,
    prompts: Annotated[int, typer.Option(min=1, help="Prompts of random weights.")] = 16,
    dtype: DtypeOption = Dtype.bfloat16,
    threads: ThreadsOption = None,
    json_file: JsonOption = None,
) -> None:
    """Tool calls and first choices that int8 turns change, beside those that the dtype's own noise changes."""
    with report_errors(), report.Progress() as say:
        found: dict[str, Any] = {"machine": machine(), "dtype": dtype.value, "shape": str(shape and shape.value)}
        ways = ["int8", "transformers", "neighbours", *(["bfloat16"] if dtype is Dtype.float32 else [])]
        every = list(requests())
        some = [call for number, call in enumerate(every) if number % 37 == 5][:prompts]
        texts = [json.dumps([call.prompt, call.tools]) for call in every]
        for name, loading, asked, longest in (
            ("embedded", Loading("embedded", None, dtype, threads), every, 128),
            ("random", Loading(None, shape, dtype, threads), some, 32),
        ):
            plain, _ = loading.weights(texts)
            with loading.engine(texts) as engine:
                found[name] = answers(engine, plain, asked, ways, calls, longest, say)
        report.finish(found, [], json_file)


if __name__ == "__main__":
    typer.run(main)
