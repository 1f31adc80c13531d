"""`python -m benchmarks.documents`: the speed of learning and of ordering passages, and first tokens over learnt ones in another order.

Physics: learning is prefill, and its pages are written while the next ones are computed. A learnt passage costs a copy of its keys and
values and the computation of its halo; the exact prefix ends where the first passage differs.
"""

from __future__ import annotations

import random
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from agentcache.approximate.calibrate import questions
from agentcache.bench import engine_timing, report
from agentcache.bench.options import Dtype, DtypeOption, JsonOption, Loading, ModelOption, ShapeOption, ThreadsOption
from agentcache.calibration import Calibration
from agentcache.engine import Engine
from agentcache.terminal import report_errors
from agentcache.types import PASSAGES, Message, StoreOptions

WORDS = "harbour quay mole lamp tide wind rope crane ferry pilot cargo anchor chart bell fog signal basin lock pier mast".split()
SYSTEM = "Answer from the texts, in one sentence."


def passage(number: int, tokens: int, count: Callable[[str], int]) -> str:
    """A made-up text of about so many tokens; each number has its own."""
    rng = random.Random(number)
    text = f"Note {number}:"
    while count(text) < tokens:
        text += f" {rng.choice(WORDS)} {rng.randrange(1000)}"
    return text


def prompt(passages: str, question: str = "") -> list[Message]:
    return [Message("system", SYSTEM), Message("user", f"{passages}\n\n{question}" if question else passages)]


def bare(engine: Engine, prompts: Sequence[list[Message]]) -> tuple[int, float]:
    """Tokens of these prompts, and seconds to compute them with nothing read or kept."""
    began, tokens = time.perf_counter(), 0
    for messages in prompts:
        tokens += engine_timing.ask(engine, messages, (), 1, reuse="off")[1].computed_tokens
    return tokens, time.perf_counter() - began


def learnt(engine: Engine, texts: Sequence[str], pack_tokens: int, parts: int = 5) -> dict[str, Any]:
    """The speed of learning against that of the bare prefill of the same prompts: the median of parts, each followed by its own prefill."""
    speeds, packs, tokens, size = list[tuple[float, float]](), 0, 0, -(-len(texts) // parts)
    for at in range(0, len(texts), size):
        part = texts[at : at + size]
        began = time.perf_counter()
        done = engine.learn(part, messages=prompt(PASSAGES), pack_tokens=pack_tokens)
        seconds = time.perf_counter() - began
        shown: dict[str, list[str]] = {}
        for text, one in zip(part, done.documents, strict=True):
            shown.setdefault(one.group, []).append(text)
        computed, plain = bare(engine, [prompt("\n\n".join(pack)) for pack in shown.values()])
        speeds.append((done.computed_tokens / seconds, computed / plain))
        packs, tokens = packs + len(shown), tokens + done.computed_tokens
    began = time.perf_counter()
    again = engine.learn(texts, messages=prompt(PASSAGES), pack_tokens=pack_tokens)
    learn, plain = (statistics.median(each) for each in zip(*speeds, strict=True))
    speed = {"learn_tokens_per_s": learn, "bare_tokens_per_s": plain, "of_bare": statistics.median(one / other for one, other in speeds)}
    counted = {"passages": len(texts), "packs": packs, "computed_tokens": tokens, "again_tokens": again.computed_tokens}
    return {**counted, **speed, "again_ms": (time.perf_counter() - began) * 1e3}


def attached(engine: Engine, texts: Sequence[str], top: int, halo: int, repeats: int, say: Callable[[str], None]) -> dict[str, Any]:
    """First tokens over learnt passages in random order: by the exact prefix, and attached with a halo. Nothing is kept of them."""
    known, spec = engine.model.fingerprint, engine.model.spec
    assert known is not None and spec is not None
    engine.learn(texts, messages=prompt(PASSAGES), pack_tokens=1, namespace="attach")
    by_hand = Calibration(known.whole, spec.layers, ((halo, spec.layers),), min_tokens=2 * halo, kl=1.0, tail=16, watch_one_in=1 << 30)
    rng, rows = random.Random(0), dict[str, list[Any]](exact=[], approximate=[])
    tree = engine.store.tree.eviction
    budget, tree.budget_bytes = tree.budget_bytes, 0  # cached pages serve; none is added
    for number in range(repeats):
        say(f"order {number + 1} of {repeats}")
        chosen = rng.sample(list(texts), top)
        asked = prompt("\n\n".join(chosen), f"Question {number}: what does the pilot say?")
        for name in sorted(rows, reverse=bool(number % 2)):
            timed, receipt = engine_timing.ask(
                engine, asked, (), 1, namespace="attach", reuse=by_hand if name == "approximate" else "exact"
            )
            rows[name].append((timed.ttft_ms, receipt))
    tree.budget_bytes = budget
    exact, near = ([ms for ms, _ in rows[name]] for name in ("exact", "approximate"))
    passage_tokens = sum(len(engine.renderer.ids(text, "attach")) for text in chosen) * repeats
    spared = sum(receipt.cached_tokens for _, receipt in rows["approximate"])
    spared -= repeats * engine.probe(prompt("", "x"), namespace="attach").memory_tokens  # of what stands before the passages
    return {
        "top": top, "halo": halo, "passage_tokens": passage_tokens // repeats, "n": repeats,
        "exact_ms": statistics.median(exact), "approximate_ms": statistics.median(near),
        "speedup": statistics.median(one / other for one, other in zip(exact, near, strict=True)),
        "not_computed": spared / passage_tokens,
    }  # fmt: skip


def ordered(engine: Engine, texts: Sequence[str], prompts: int, repeats: int) -> dict[str, Any]:
    """The time to order all of these passages, of which earlier prompts showed six each; and first tokens in that order."""
    rng = random.Random(1)
    for number in range(prompts):
        engine_timing.ask(engine, prompt("\n\n".join(rng.sample(list(texts), 6)), f"Question {number}?"), (), 1, namespace="order")
    asked = [(rng.sample(list(texts), len(texts)), f"Question {prompts + number}: what does the pilot say?") for number in range(repeats)]
    found = costs(engine, asked, "order")
    assert found["gained"] == 1.0, "an order that gains nothing says nothing of its cost"
    return {"passages": len(texts), "prompts": prompts, **found}


def costs(engine: Engine, asked: Sequence[tuple[Sequence[str], str]], namespace: str, before: int = 0) -> dict[str, Any]:
    """Time of ordering passages before each question, and of the first token in that order: medians, from question `before` on."""
    rows = list[tuple[float, float]]()
    gained = 0
    for found, question in asked:
        engine.flush()  # as while passages are retrieved
        began = time.perf_counter()
        order = engine.arrange(found, prompt(PASSAGES, question), namespace=namespace)
        ms = (time.perf_counter() - began) * 1e3
        gained += order.cached_tokens > order.given_tokens
        shown = prompt("\n\n".join(found[each] for each in order.order), question)
        rows.append((ms, engine_timing.ask(engine, shown, (), 1, namespace=namespace)[0].ttft_ms))
    order_ms, ttft_ms = (statistics.median(each) for each in zip(*rows[before:], strict=True))
    share = statistics.median(one / other for one, other in rows[before:])
    return {"order_ms": order_ms, "ttft_ms": ttft_ms, "of_ttft": share, "gained": gained / len(asked)}


def main(
    model: ModelOption = None,
    shape: ShapeOption = None,
    passages: Annotated[int, typer.Option(min=1, help="Passages that are learnt; times are taken against the bare prefill.")] = 1000,
    tokens: Annotated[int, typer.Option(min=8, help="Tokens of each of them.")] = 30,
    pack_tokens: Annotated[int, typer.Option(min=1, help="Passages of a pack have at most so many.")] = 2048,
    chunks: Annotated[int, typer.Option(min=0, help="Passages that are then learnt alone, to be asked for in other orders; 0: none.")] = 24,
    chunk_tokens: Annotated[int, typer.Option(min=16, help="Tokens of each of these.")] = 256,
    top: Annotated[int, typer.Option(min=1, help="Passages of a prompt.")] = 8,
    halo: Annotated[int, typer.Option(min=1, help="Tokens that are computed anew at the head of an attached passage.")] = 8,
    prompts: Annotated[int, typer.Option(min=0, help="Cached prompts of six passages each, along which 20 are ordered; 0: none.")] = 100,
    repeats: Annotated[int, typer.Option(min=1, help="Orders that are asked for; times are medians.")] = 10,
    dtype: DtypeOption = Dtype.bfloat16,
    threads: ThreadsOption = None,
    store_dir: Annotated[Path | None, typer.Option(help="Where the store of this run is made and removed.")] = None,
    json_file: JsonOption = None,
) -> None:
    """Learning against the bare prefill; what ordering costs; first tokens over passages in random order, attached or not."""
    with report_errors(), tempfile.TemporaryDirectory(dir=store_dir) as folder:
        loading = Loading(model, shape, dtype, threads)
        store = StoreOptions(Path(folder) / "store", refuse_slow=False)
        with report.measuring("documents", loading, json_file, [passage(n, 99, len) for n in range(200)], store) as run:
            engine: Engine = run.engine

            def count(text: str) -> int:
                return len(engine.renderer.ids(text, "count"))

            bare(engine, [prompt(passage(-1, 600, count))])  # the first forwards find and compile kernels
            if chunks:  # first: they leave memory where learning fills it
                texts = [passage(10**6 + n, chunk_tokens, count) for n in range(chunks)]
                row = attached(engine, texts, top, halo, repeats, run.say)
                run.keep({"attach": row})
                columns = {name: report.of(name) for name in ("top", "halo", "passage_tokens", "n")}
                columns |= {name: report.of(name, 1) for name in ("exact_ms", "approximate_ms", "speedup")}
                run.tables.append(report.drawn("first token", {**columns, "not computed": report.of("not_computed", 3)}, [row]))
            run.say(f"learning {passages} passages")
            found = learnt(engine, [passage(n, tokens, count) for n in range(passages)], pack_tokens)
            run.keep({"learn": found})
            columns = {name: report.of(name) for name in ("passages", "packs", "computed_tokens", "again_tokens")}
            columns |= {name: report.of(name, 1) for name in ("learn_tokens_per_s", "bare_tokens_per_s", "again_ms")}
            run.tables.append(report.drawn("learning", {**columns, "of bare": report.of("of_bare", 3)}, [found]))
            if prompts:
                run.say(f"{prompts} prompts, and orders along them")
                rows = [ordered(engine, [passage(n, tokens, count) for n in range(20)], prompts, repeats)]
                run.say("questions of our conversations")
                said = [(one.found, one.text) for one in questions.questions(None, None, 6)[:prompts]]
                rows.append({"passages": 6, "prompts": len(said), **costs(engine, said, "conversations", len(said) // 4)})
                run.keep({"order": rows[0], "conversations": rows[1]})
                columns = {"passages": report.of("passages"), "prompts": report.of("prompts")}
                columns |= {name: report.of(name, 2) for name in ("order_ms", "ttft_ms")}
                run.tables.append(report.drawn("order", {**columns, "of ttft": report.of("of_ttft", 4)}, rows))


if __name__ == "__main__":
    typer.run(main)
