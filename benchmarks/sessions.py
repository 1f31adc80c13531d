"""`python -m benchmarks.sessions`: the first token of a session that another process left, after its pages were read from a cold disk.

Physics: the first process computes all tokens, in time that grows with them and a little faster. The second reads their pages, as fast as
the disk and the hash are, and computes the new turn.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from agentcache.bench import catalog, engine_timing
from agentcache.bench.environment import machine
from agentcache.bench.options import Dtype, DtypeOption, JsonOption, Loading, Shape, ShapeOption, ThreadsOption, write
from agentcache.bench.store import drop_caches
from agentcache.store.disk.folder import Folder
from agentcache.terminal import report_errors
from agentcache.types import Sampling, StoreOptions

ANSWER = "It passed at noon."  # of every turn: random weights write what no tokenizer reads back
QUESTION = "And what did the keeper write down after that?"


def conversation(engine: Any, tokens: int) -> list[dict[str, str]]:
    """A system prompt and one long question, of about so many tokens."""
    text, number = "", 0
    while len(engine.tokenizer(text, add_special_tokens=False)["input_ids"]) < tokens:
        text += " ".join(f"Entry {number + i}: ship {(number + i) * 7919 % 10007} passed to the north." for i in range(200)) + "\n"
        number += 200
    ids = engine.tokenizer(text, add_special_tokens=False)["input_ids"][:tokens]
    return [{"role": "system", "content": catalog.SYSTEM}, {"role": "user", "content": engine.tokenizer.decode(ids)}]


def turn(spec: dict[str, Any]) -> dict[str, Any]:
    """One process: the first turn of a session, or the next one from a cold disk. The model and its kernels are warm."""
    given = spec["loading"]
    loading = Loading(None, Shape(given["shape"]), Dtype(given["dtype"]), given["threads"])
    talk = Path(spec["talk"])
    with loading.engine(store=StoreOptions(spec["store"], refuse_slow=False)) as engine:
        engine.generate([{"role": "user", "content": catalog.SYSTEM}], sampling=engine_timing.greedy(2), namespace="warm-up", reuse="off")
        session = engine.session("bench")
        messages = json.loads(talk.read_text()) if talk.exists() else conversation(engine, spec["tokens"])
        drop_caches(list(Folder.open(spec["store"]).blobs.rglob("*.safetensors")))
        ids = tuple(engine.tokenizer(ANSWER, add_special_tokens=False)["input_ids"])
        receipt = (done := session.generate(messages, sampling=Sampling(max_tokens=len(ids), forced=ids, draft_tokens=0))).receipt
        talk.write_text(json.dumps([*messages, asdict(done.message), {"role": "user", "content": QUESTION}]))
        assert engine.flush(600.0), "the session is not on disk"
        told = ("resumed", "prompt_tokens", "cached_tokens", "disk_tokens", "disk_bytes", "ttft_ms", "load_ms", "layout_ms")
        return {name: getattr(receipt, name) for name in told}


def main(
    shape: ShapeOption = Shape.qwen3_06b,
    tokens: Annotated[int, typer.Option(min=512, help="Tokens of the session.")] = 8192,
    repeats: Annotated[int, typer.Option(min=1, help="Processes that go on with it; the median is told.")] = 3,
    dtype: DtypeOption = Dtype.bfloat16,
    threads: ThreadsOption = None,
    store_dir: Annotated[Path | None, typer.Option(help="Where the store of this run is made and removed; a disk, not memory.")] = None,
    json_file: JsonOption = None,
) -> None:
    """Time to first token of a session in the process that computes it, and of its next turn in others."""
    with report_errors(), tempfile.TemporaryDirectory(dir=store_dir) as folder:
        loading = asdict(Loading(None, shape, dtype, threads))
        spec = {"loading": loading, "store": f"{folder}/store", "talk": f"{folder}/talk.json", "tokens": tokens}
        first, *others = (_started(spec) for _ in range(repeats + 1))
        for other in others:
            assert (other["resumed"], first["resumed"]) == ("extend", ""), f"the session was not found: {other}"
            assert other["disk_tokens"] == other["cached_tokens"] >= first["prompt_tokens"], "pages of the session were computed again"
        resumed = sorted(others, key=lambda one: float(one["ttft_ms"]))[len(others) // 2]
        found = {"machine": machine(), "tokens": tokens, "cold": first, "resumed": resumed, "ratio": first["ttft_ms"] / resumed["ttft_ms"]}
        if json_file is not None:
            write(json_file, json.dumps(found, indent=1) + "\n")
        print(json.dumps(found))


def _started(spec: dict[str, Any]) -> dict[str, Any]:
    command = [sys.executable, "-m", "benchmarks.sessions", "turn", json.dumps(spec)]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    if ran.returncode:
        raise RuntimeError(f"a process failed: {ran.stderr[-2000:]}")
    found: dict[str, Any] = json.loads(ran.stdout.strip().splitlines()[-1])
    return found


if __name__ == "__main__":
    if sys.argv[1:2] == ["turn"]:
        print(json.dumps(turn(json.loads(sys.argv[2]))))
    else:
        typer.run(main)
