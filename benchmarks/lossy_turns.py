"""`python -m benchmarks.lossy_turns`: answers after turns in int8 and int4, held against exact ones, and the bytes of an idle session.

Physics: int8 keeps a number within 1/254 of the largest under its scale, int4 within 1/30 of its group's range. A call breaks where two
choices were closer than what that moves the logits.

    embedded model    tool calls of frozen requests and dialogues, as calls: all turns are in fewer bits
    random weights    equal first choices: nothing of such a model is sure, so it is the hardest of all
    a session         bytes of its pages on disk before and after it was idle, and what an answer says of them
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from dataclasses import asdict
from typing import Annotated, Any

import typer

from agentcache.approximate.calibrate import turns
from agentcache.bench import quality_cases, report
from agentcache.bench.environment import machine
from agentcache.bench.options import Dtype, DtypeOption, JsonOption, Loading, Shape, ShapeOption, ThreadsOption, write
from agentcache.store.disk import idle_turns
from agentcache.terminal import report_errors
from agentcache.traces import Call
from agentcache.types import Sampling, StoreOptions
from benchmarks.sessions import ANSWER, QUESTION, conversation

TAIL = 0.02  # nats: KL allowed at the 99th percentile, as of `agentcache calibrate --turns`


def requests() -> Iterator[Call]:
    """Steps of the frozen dialogues, then decisions on tools that the embedded model's training never saw."""
    played = [step for episode in quality_cases.episodes("hermes", 100) for step in episode.steps]
    alone = [one for split in ("unseen tools", "unseen words") for tools in (5, 20) for one in quality_cases.selections(split, tools, 200)]
    for case in (*played, *quality_cases.selections("unseen tools", 8, 200), *alone):
        assert not isinstance(case.prompt, str)
        yield Call([dict(message) for message in case.prompt], tuple(dict(tool) for tool in case.tools), "")


def idle_session(loading: Loading, folder: str, tokens: int, precision: Any) -> dict[str, Any]:
    """Bytes of a session's pages before and after it was idle, and the receipt of an answer that accepts what they became."""
    with loading.engine(store=StoreOptions(folder, turns=precision, refuse_slow=False, check_one_in=0)) as engine:
        session, disk = engine.session("bench"), engine.store.disk
        assert disk is not None
        ids = tuple(engine.tokenizer(ANSWER, add_special_tokens=False)["input_ids"])
        said = conversation(engine, tokens)
        done = session.generate(said, sampling=Sampling(max_tokens=len(ids), forced=ids))
        assert engine.flush(600.0), "the session is not on disk"
        before = {row.page_key: row.bytes for row in disk.index.rows()}
        disk.writer.after(lambda: idle_turns.rewrite_all(disk, 0.0, lambda row: None))
        assert engine.flush(600.0), "its turns are not rewritten"
        after = {row.page_key: row.bytes for row in disk.index.rows() if row.precision == precision}
        engine.store.clear()
        said = [*said, asdict(done.message), {"role": "user", "content": QUESTION}]
        near = engine.generate(said, session="bench", reuse="lossy", sampling=Sampling(max_tokens=2, ignore_eos=True)).receipt
        exact = engine.generate(said, session="bench", sampling=Sampling(max_tokens=2, ignore_eos=True)).receipt
        assert (near.precision, exact.precision) == (precision, "exact"), "an exact request got pages of fewer bits"
        told = {name: getattr(near, name) for name in ("precision", "prompt_tokens", "cached_tokens", "disk_tokens")}
        pages = {"pages": len(before), "rewritten": len(after)}
        return {**pages, "exact_bytes": sum(before[key] for key in after), "bytes": sum(after.values()), "lossy_answer": told,
                "exact_answer_cached_tokens": exact.cached_tokens}  # fmt: skip


def main(
    calls: Annotated[int, typer.Option(min=1, help="Tool calls of the embedded model.")] = 1000,
    shape: ShapeOption = Shape.qwen3_06b,
    prompts: Annotated[int, typer.Option(min=1, help="Prompts of random weights.")] = 16,
    answer: Annotated[int, typer.Option(min=1, help="Tokens of each of their answers.")] = 32,
    tokens: Annotated[int, typer.Option(min=1024, help="Tokens of the session.")] = 4096,
    dtype: DtypeOption = Dtype.bfloat16,
    threads: ThreadsOption = None,
    json_file: JsonOption = None,
) -> None:
    """Tool calls and first choices after int8 and int4, and the bytes of an idle session's turns."""
    with report_errors(), report.Progress() as say:
        found: dict[str, Any] = {"machine": machine(), "shape": str(shape and shape.value), "kl_p99_allowed": TAIL}

        def keep(name: str, value: Any) -> None:
            found[name] = value
            if json_file is not None:
                write(json_file, json.dumps(found, indent=1) + "\n")

        with tempfile.TemporaryDirectory() as folder:
            keep("session", idle_session(Loading(None, shape, dtype, threads), folder, tokens, "int8"))
        with Loading("embedded", None, dtype, threads).engine() as engine:
            embedded = turns.measure(engine, requests(), turns.PRECISIONS, say, most_calls=calls)
        keep("embedded", {name: asdict(one) | {"passed": one.passes(TAIL)} for name, one in embedded.items()})
        texts = [json.dumps([call.prompt, call.tools]) for call in requests()]
        with Loading(None, shape, dtype, threads).engine(texts) as engine:
            some = [call for number, call in enumerate(requests()) if number % 37 == 5][:prompts]
            keep("random", {name: asdict(one) for name, one in turns.measure(engine, some, turns.PRECISIONS, say, answer).items()})
        report.finish(found, [report.turns_table(embedded, [name for name, one in embedded.items() if one.passes(TAIL)])], json_file)


if __name__ == "__main__":
    typer.run(main)
