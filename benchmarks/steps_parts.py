"""The measurements of `python -m benchmarks.steps`, each one function: a running engine in, plain JSON values out.

Contexts are filled with random keys and values where only the time behind them matters: no prefill is needed, and bits cost the same.
"""

from __future__ import annotations

import contextlib
import statistics
import threading
import time
from collections.abc import Sequence as Seq
from dataclasses import replace
from typing import Any

import torch
from transformers import AutoConfig

from agentcache import Engine, Stream, toy
from agentcache.bench import baselines, catalog, engine_timing
from agentcache.bench.environment import Samples, percentile, watch
from agentcache.bench.shapes import TOKENIZER_VOCAB, fill, random_model
from agentcache.checkpoints import CHECKPOINT_TOKENS
from agentcache.errors import CancelledError
from agentcache.kv import Sequence
from agentcache.layout.tokenise import common_length
from agentcache.runner import Work
from agentcache.store.keys import as_ids
from agentcache.types import Message

from . import disk, random_caches
from .process_figures import peak_bytes

_TOOLS = 20
ADMITTED_TOOLS = 10
LATER_TOKENS = 190  # new in a later step: a tool result and what stands around it
STEPS = 20  # of an agent whose checkpoints are counted
HISTORY_TOKENS = 650  # of the turn before it, so that 20 tools and history are 3 to 4 thousand tokens


def _fitted(engine: Engine, before: list[Any], tools: Any, number: int, tokens: int) -> list[Any]:
    """`before` and a user turn that adds about `tokens`, opening unlike other numbers' turns."""
    base = len(engine.renderer.render(before, tools, generation=False).ids) if before else 0

    def count(text: str) -> int:
        return len(engine.renderer.render([*before, Message("user", text)], tools).ids) - base

    return [*before, Message("user", catalog.user_turn(number, tokens, count))]


def later_step(engine: Engine, repeats: int) -> dict[str, Any]:
    """A step of about 190 new tokens behind 3 to 4 thousand: ours against a DynamicCache kept by hand, both up to the first token."""
    tools, namespace = catalog.tools(_TOOLS), "later-step"
    opening = _fitted(engine, [Message("system", catalog.SYSTEM)], tools, 0, HISTORY_TOKENS)
    forced = tuple(engine.tokenizer("I will look that up.", add_special_tokens=False)["input_ids"]) + (engine.tokenizer.eos_token_id,)
    answer = engine.generate(opening, tools, sampling=engine_timing.greedy(len(forced), forced), namespace=namespace)
    history = [*opening, answer.message]
    steps = [_fitted(engine, history, tools, number + 1, LATER_TOKENS) for number in range(repeats + 1)]
    prompts = [list(engine.renderer.render(step, tools, namespace=namespace).ids) for step in steps]
    known = common_length(prompts[0], prompts[1])  # the step before, and what the template writes between turns
    assert known >= answer.receipt.prompt_tokens, f"only {known} tokens are shared with the step before"
    recurrent = engine.model.spec is not None and engine.model.spec.recurrent
    again = 2 * CHECKPOINT_TOKENS if recurrent else 1  # tokens after the last checkpoint
    engine_timing.ask(engine, steps[0], tools, 1, namespace=namespace)
    sequence = engine_timing.resident(engine, namespace, prompts[0][: known + 1])
    cache = baselines.cache_of(engine.model.model, sequence, prompts[0][:known])
    sequence.close()
    baselines.kept(engine.model.model, cache, prompts[0][known:])
    samples = Samples()
    for number in range(1, repeats + 1):
        drawn = []
        for name in ("ours", "kept") if number % 2 else ("kept", "ours"):
            with watch() as load:
                if name == "kept":
                    done = baselines.kept(engine.model.model, cache, prompts[number][known:])
                else:
                    done, receipt = engine_timing.ask(engine, steps[number], tools, 1, namespace=namespace)
                    assert 0 <= known - receipt.cached_tokens < again, f"{known} tokens were known, {receipt.cached_tokens} were reused"
            drawn.append(done.ids[0])
            samples.add(name, done.ttft_ms)
            samples.note(name, load)
        samples.add("agree", float(drawn[0] == drawn[1]))
    prompt = len(prompts[-1])
    mine, theirs = samples.median("ours"), samples.median("kept")
    assert mine is not None and theirs is not None
    figures = {"prompt_tokens": prompt, "new_tokens": prompt - known, "ms": mine, "kept_ms": theirs, "ratio": mine / theirs}
    return {**figures, "agreement": statistics.mean(samples.values["agree"]), "repeats": repeats, "load": samples.report()}


def _filled(engine: Engine, namespace: str, tokens: int) -> str:
    """A text prompt of about `tokens` tokens whose pages, but for the last token, are kept with random contents."""
    spec, numerics = engine.model.spec, engine.model.numerics
    assert spec is not None and numerics is not None
    words = catalog.SYSTEM.split()
    text = " ".join(words[n % len(words)] for n in range(tokens))
    while (size := len(engine.renderer.render(text, namespace=namespace).ids)) > tokens:
        text = text[: max(1, int(len(text) * min(0.99, tokens / size)))]
    ids = list(engine.renderer.render(text, namespace=namespace).ids)
    sequence, block = Sequence(spec), random_caches.noise(spec)
    sequence.reserve(len(ids))
    for number, page in enumerate(sequence.pages):
        fill(page.keys, block, start=number * 7919)
        fill(page.values, block, start=number * 7919 + 31)
    sequence.advance(len(ids))
    sequence.close()
    engine.store.admit(engine_timing.scope_of(engine, namespace, len(ids)), as_ids(ids), sequence.pages, frozenset({numerics.digest}))
    return text


def decode_at(engine: Engine, context: int, tokens: int, repeats: int, stock: Any) -> dict[str, Any]:
    """ms per decoded token behind `context` tokens: ours through the whole engine; `stock` as a bare loop of forwards, with both caches."""
    namespace = f"decode-{context}"
    assert engine.model.spec is not None
    spec = replace(engine.model.spec, dtype=stock.dtype)
    text, samples = _filled(engine, namespace, context), Samples()
    for number in range(repeats + 1):
        for name in ("stock", "static", "ours") if number % 2 else ("ours", "static", "stock"):
            if name == "ours":
                with watch() as load:
                    done, receipt = engine_timing.ask(engine, text, (), tokens + 1, namespace=namespace)
                assert receipt.computed_tokens == 1, f"{receipt.computed_tokens} prompt tokens were computed: the pages were not used"
                took = done.decode_ms
            else:
                cache = random_caches.random_cache(stock, spec, context, tokens + 1, static=name == "static")
                with watch() as load:
                    took = statistics.median(random_caches.decode(stock, cache, tokens + 1)[1:])
            if number:
                samples.add(name, took)
                samples.note(name, load)
    engine.store.clear(namespace)
    figures = {f"{name}_ms": samples.median(name) for name in ("stock", "static")} | {"ms": samples.median("ours")}
    ratios = {f"{name}_over_ours": (samples.median(name) or 0.0) / (samples.median("ours") or 1.0) for name in ("stock", "static")}
    return {
        "context_tokens": context,
        **figures,
        **ratios,
        "stock_dtype": str(stock.dtype),
        "tokens": tokens,
        "repeats": repeats,
        "load": samples.report(),
    }


class _Reader(threading.Thread):
    """Reads a stream to its end and notes when each token came."""

    def __init__(self, stream: Stream) -> None:
        super().__init__(daemon=True)
        self.stream = stream
        self.stamps: list[float] = []
        self.start()

    def run(self) -> None:
        with contextlib.suppress(CancelledError):  # some are stopped by whoever measures
            for chunk in self.stream:
                self.stamps += [time.perf_counter()] * len(chunk.ids)


def mixed(engine: Engine, prefill_tokens: int = 3000) -> dict[str, Any]:
    """Time between tokens of a decoding request while another prefills: median and 95th percentile, beside the time without one."""
    tools, namespace = catalog.tools(_TOOLS), "mixed"
    asks = _fitted(engine, [Message("system", catalog.SYSTEM)], tools, 0, 70)
    words = catalog.SYSTEM.split()
    long = " ".join(words[n % len(words)] for n in range(prefill_tokens))
    while len(engine.renderer.render(long).ids) > prefill_tokens:
        long = long[: int(len(long) * 0.99)]
    alone, _ = engine_timing.ask(engine, long, (), 1, namespace="mixed-other", reuse="off")
    with watch() as load:
        decoding = _Reader(engine.stream(asks, tools, sampling=engine_timing.greedy(100_000), namespace=namespace))
        while len(decoding.stamps) < 9 and decoding.is_alive():
            time.sleep(0.005)
        began = time.perf_counter()
        done, receipt = engine_timing.ask(engine, long, (), 1, namespace="mixed-other", reuse="off")
        ended = time.perf_counter()
        decoding.stream.close()
        decoding.join()
        stamps = decoding.stamps
    inside = [at for at in stamps if began <= at <= ended]
    quiet = [b - a for a, b in zip(stamps, stamps[1:]) if b < began]
    gaps = [(b - a) * 1e3 for a, b in zip(inside, inside[1:])]
    assert len(gaps) >= 2, f"only {len(inside)} tokens came during the prefill: it was too short, or it stalled the decoding"
    return {
        "prefill_tokens": receipt.prompt_tokens,
        "prefill_ms": done.ttft_ms,
        "prefill_over_alone": done.ttft_ms / alone.ttft_ms,
        "decoded_tokens": len(inside),
        "gap_p95_ms": percentile(gaps, 0.95),
        "gap_median_ms": statistics.median(gaps),
        "gap_alone_ms": statistics.median(quiet) * 1e3,
        "load": {"foreign": load.foreign, "load_average": load.average},
    }


def rounds(engine: Engine, repeats: int, context: int = 1536) -> list[dict[str, float]]:
    """Rounds that compute rows of a prompt behind `context` tokens: alone, and with a token of a request behind 2,900; median ms.

    Only while the engine is idle: it runs the model in this thread.
    """
    spec, ids, run = engine.model.spec, [5 + n % 500 for n in range(2900)], engine.scheduler.runner.run
    assert spec is not None
    regime = engine.model.regime(len(ids)) or ""

    def filled(length: int) -> Sequence:
        sequence = Sequence(spec, state=engine.model.new_state())
        while sequence.length < length:
            run([Work(sequence, ids[sequence.length : min(length, sequence.length + 512)], regime)])
        return sequence

    def timed(**rows: int) -> float:
        found = []
        for _ in range(repeats):
            works = [Work(at[name], ids[at[name].length :][:count], regime) for name, count in rows.items()]
            lengths, began = {name: at[name].length for name in rows}, time.perf_counter()
            run(works)
            found.append((time.perf_counter() - began) * 1e3)
            for name, length in lengths.items():
                at[name].truncate(length)
        return statistics.median(found)

    at = {"filling": filled(context), "decoding": filled(len(ids) - 1)}
    return [{"rows": 0, "with_token_ms": timed(decoding=1)}] + [
        {"rows": rows, "alone_ms": timed(filling=rows), "with_token_ms": timed(decoding=1, filling=rows)}
        for rows in (16, 32, 48, 64, 96, 128, 256)
    ]


def _rate(engine: Engine, count: int, tokens: int, namespace: str, first: int) -> float:
    """Tokens per second of `count` requests that decode at once, counted while all of them do."""
    tools = catalog.tools(_TOOLS)
    system = [Message("system", catalog.SYSTEM)]
    asks = [_fitted(engine, system, tools, first + number, 40) for number in range(count)]
    readers = [_Reader(engine.stream(each, tools, sampling=engine_timing.greedy(tokens), namespace=namespace)) for each in asks]
    for reader in readers:
        reader.join()
    start, stop = max(r.stamps[0] for r in readers), min(r.stamps[-1] for r in readers)
    inside = sum(start < at <= stop for r in readers for at in r.stamps)
    assert stop > start and inside >= count, "the requests did not decode at the same time: ask for more tokens"
    return inside / (stop - start)


def agents(engine: Engine, count: int, tokens: int, repeats: int) -> dict[str, Any]:
    """Tokens per second of `count` agents decoding on one tool group, against one agent."""
    namespace, samples = "agents", Samples()
    engine.warm(catalog.SYSTEM, catalog.tools(_TOOLS), name="agents", namespace=namespace)
    most = len(catalog.OPENINGS) - count
    for number in range(repeats + 1):
        for name, size in (("one", 1), ("all", count)) if number % 2 else (("all", count), ("one", 1)):
            with watch() as load:
                rate = _rate(engine, size, tokens, namespace, (number * (count + 1)) % most)
            if number:
                samples.add(name, rate)
                samples.note(name, load)
    engine.release("agents", namespace=namespace)
    one, every = samples.median("one"), samples.median("all")
    assert one is not None and every is not None
    return {"agents": count, "one_per_s": one, "all_per_s": every, "ratio": every / one, "repeats": repeats, "load": samples.report()}


def tiny() -> tuple[Any, Any]:
    """(model, tokenizer) so small that only the work around the forwards takes time."""
    none = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "vocab_size": TOKENIZER_VOCAB}
    heads = {"num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 32, "tie_word_embeddings": True}
    rope = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}, "rms_norm_eps": 1e-6, "max_position_embeddings": 131072}
    model = random_model(AutoConfig.for_model("qwen3", **sizes, **heads, **rope, **none), torch.float32)
    return model, toy.tokenizer(catalog.training_texts(), TOKENIZER_VOCAB)


def overhead(sizes: Seq[int] = (3_000, 37_000), steps: int = 5) -> dict[str, Any]:
    """Layout, lookup and planning per step of a growing conversation, ms, at about these prompt lengths; on a one-layer model."""
    figures = {}
    with Engine(*tiny(), store=None) as engine:
        tools, history, namespace = catalog.tools(_TOOLS), [Message("system", catalog.SYSTEM)], "overhead"
        number = 0
        for size in sizes:
            while len(engine.renderer.render(history, tools, generation=False, namespace=namespace).ids) < size - LATER_TOKENS * steps:
                history = _grown(engine, history, tools, number, 900)
                number = (number + 1) % len(catalog.OPENINGS)
            engine.generate(history, tools, sampling=engine_timing.greedy(1), namespace=namespace)
            receipts = []
            for _ in range(steps):
                history = _grown(engine, history, tools, number, LATER_TOKENS)
                number = (number + 1) % len(catalog.OPENINGS)
                _, receipt = engine_timing.ask(engine, history, tools, 1, namespace=namespace)
                assert receipt.computed_tokens < 2 * LATER_TOKENS, f"{receipt.computed_tokens} computed: the step before was not reused"
                receipts.append(receipt)
            both = [r.layout_ms + r.match_ms for r in receipts]
            figures[str(size)] = {
                "prompt_tokens": receipts[-1].prompt_tokens,
                "ms": statistics.median(both),
                "worst_ms": max(both),
                "layout_ms": statistics.median(r.layout_ms for r in receipts),
                "match_ms": statistics.median(r.match_ms for r in receipts),
            }
    return figures


def _grown(engine: Engine, history: list[Message], tools: Any, number: int, tokens: int) -> list[Message]:
    """The conversation with one more exchange of about so many tokens. Rendered nowhere: the engine meets the text for the first time."""
    size = round(tokens * 0.9)  # a word of the made-up turns is about one token
    text = catalog.user_turn(number, size, lambda text: text.count(" ") + 1)
    return [*history, *([Message("assistant", "Done.")] if history[-1].role == "user" else []), Message("user", text)]


def memory(engine: Engine, tokens: int = 8) -> dict[str, Any]:
    """Peak resident bytes of one warm-up and one hit, against what was resident before, live KV x 1.15 and one chunk buffer."""
    tools, namespace, spec = catalog.tools(_TOOLS), "memory", engine.model.spec
    assert spec is not None
    asks = _fitted(engine, [Message("system", catalog.SYSTEM)], tools, 0, 70)
    lengths = []

    def work() -> None:
        engine.warm(catalog.SYSTEM, tools, name="memory", namespace=namespace)
        _, receipt = engine_timing.ask(engine, asks, tools, tokens, namespace=namespace)
        lengths.append(receipt.prompt_tokens + tokens)

    engine.generate("Warming up.", sampling=engine_timing.greedy(2), namespace="warm-up", reuse="off")
    before, peak = peak_bytes(work)
    engine.release("memory", namespace=namespace)
    engine.store.clear(namespace)
    live, buffer = lengths[0] * spec.token_bytes, chunk_buffer_bytes(engine)
    bound = before + int(1.15 * live) + buffer
    figures = {"before_bytes": before, "peak_bytes": peak, "live_kv_bytes": live, "chunk_buffer_bytes": buffer, "bound_bytes": bound}
    return {**figures, "within": peak <= bound}


def chunk_buffer_bytes(engine: Engine) -> int:
    """What one chunk's forward may hold beside weights and KV: its activations in fp32, attention scores, one row of logits."""
    config, spec = engine.model.config, engine.model.spec
    assert spec is not None
    per_token = 8 * config.hidden_size + 4 * config.intermediate_size + 4 * config.num_attention_heads * spec.head_dim
    return 4 * (engine.scheduler.chunk_tokens * per_token + 4 * engine.model.vocab) + (64 << 20)


def admitting(engine: Engine, repeats: int) -> dict[str, Any]:
    """What keeping costs a request: a cold prompt and its answer, with and without writing to disk behind it."""
    tools, samples = catalog.tools(ADMITTED_TOOLS), Samples()
    for number in range(repeats + 1):
        for writing in (True, False) if number % 2 else (False, True):
            namespace, name = f"admitting-{number}-{writing}", "with" if writing else "without"
            messages = [{"role": "system", "content": catalog.SYSTEM}, {"role": "user", "content": catalog.OPENINGS[number]}]
            disk.allow_writing(engine, writing)
            with watch() as load:
                done, receipt = engine_timing.ask(engine, messages, tools, 16, namespace=namespace)
            assert receipt.cached_tokens == 0, f"{receipt.cached_tokens} tokens of a cold prompt were known"
            disk.allow_writing(engine, False)
            assert bool(disk.blobs(engine, namespace)) == writing, "pages were written, or were not, against what was measured"
            engine.store.clear(namespace)
            if number:
                samples.add(name, done.total_ms)
                samples.note(name, load)
    took, bare = samples.median("with"), samples.median("without")
    assert took is not None and bare is not None
    figures = {"prompt_tokens": receipt.prompt_tokens, "ms": took, "without_ms": bare, "ratio": took / bare}
    return {**figures, "repeats": repeats, "load": samples.report()}


def checkpoints(engine: Engine) -> dict[str, Any]:
    """Bytes of checkpoints in memory and on disk, of a tool group alone and after an agent of STEPS steps. Nothing is timed."""
    assert engine.store.disk is not None
    tools, namespace, index = catalog.tools(_TOOLS), "checkpoints", engine.store.disk.index
    disk.allow_writing(engine, True)
    engine.warm(catalog.SYSTEM, tools, name="bench", namespace=namespace)
    engine.flush()
    group = sum(row.checkpoint_bytes for row in index.rows(namespace=namespace))
    history = [Message("system", catalog.SYSTEM)]
    forced = tuple(engine.tokenizer("I will look that up.", add_special_tokens=False)["input_ids"]) + (engine.tokenizer.eos_token_id,)
    for step in range(STEPS):
        history = _fitted(engine, history, tools, step % len(catalog.OPENINGS), LATER_TOKENS)
        answer = engine.generate(history, tools, sampling=engine_timing.greedy(len(forced), forced), namespace=namespace)
        history = [*history, answer.message]
        engine.flush()
    disk.allow_writing(engine, False)
    rows = list(index.rows(namespace=namespace))
    pages = [entry.page for entry in engine.store.tree.entries() if entry.page is not None and entry.scope.namespace == namespace]
    held = sum(known.bytes for page in pages for known in page.checkpoints.values())
    written = sum(row.checkpoint_bytes for row in rows)
    bytes_, stored = sum(page.bytes for page in pages), sum(row.bytes for row in rows)
    figures = {"prompt_tokens": answer.receipt.prompt_tokens, "again_tokens": answer.receipt.computed_tokens, "group_bytes": group}
    figures |= {"memory_bytes": held, "memory_pages": len(pages), "memory_count": sum(len(page.checkpoints) for page in pages)}
    return {**figures, "disk_bytes": written, "memory_share": held / bytes_, "disk_share": written / stored}
