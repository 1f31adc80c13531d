"""Reuse of every family of families.py: a tool group, the next step, and that step in another process, against reuse off."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import transformers
from blake3 import blake3

from ..engine import Engine
from ..errors import AgentCacheError, ConfigError
from ..model.proof import MODEL_FAULTS
from ..toy import tokenizer
from ..types import StoreOptions
from . import catalog, families
from .engine_timing import greedy
from .environment import Keep, Say

TOOLS = catalog.tools(3)
NEW = 12  # tokens of each answer
ASKED = "Tell me which papers of the ship that came in last night are still open, and who has to sign them before noon."
THEN = "And what will the harbour charge for the second crane, if unloading takes longer than the tide allows?"
UNREUSED = {"group": 0, "step": 0, "second_process": 0, "equal": None, "bitwise": None}


@dataclass(frozen=True, slots=True)
class Answer:
    """An answer: its ids and text, how many tokens of its prompt were cached, BLAKE3 of its logits."""

    ids: tuple[int, ...]
    text: str
    cached_tokens: int
    logits: str


def run(names: Sequence[str], like: torch.Tensor, say: Say, keep: Keep) -> list[dict[str, Any]]:
    """Measure these families one after the other. like: of the type and device of their weights. keep: gets all rows so far after each."""
    if unknown := [name for name in names if name not in families.TINY]:
        raise ConfigError(f"only={unknown[0]!r} is no family: use some of {', '.join(sorted(families.TINY))}")
    rows: list[dict[str, Any]] = []
    another = ProcessPoolExecutor(1, get_context("spawn"), _start, (torch.get_num_threads(),))  # starts when it is asked first
    with _new_folder() as folder, another as second, _quiet():
        for number, name in enumerate(names, 1):
            say(f"{number} of {len(names)}: {name}")
            try:
                row = _measured(name, like, folder, second)
            except (*MODEL_FAULTS, AgentCacheError) as error:  # the other families are measured all the same
                row = {"path": "failed", **UNREUSED, "why": f"{type(error).__name__}: {error}"}
            rows.append({"family": name, **row})
            keep({"rows": rows, "summary": summary(rows)})
    return rows


def summary(rows: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    """Number of families tried, of those reused everywhere, and of those with the tokens, and the bits, of reuse off."""
    reused = [row for row in rows if row["group"] and row["step"] and row["second_process"]]
    return {"tried": len(rows), "reused": len(reused)} | {key: sum(bool(row[key]) for row in reused) for key in ("equal", "bitwise")}


def markdown(rows: Sequence[Mapping[str, Any]]) -> str:
    """The rows as a table, families of like outcome in one line."""
    alike: dict[tuple[Any, ...], list[Mapping[str, Any]]] = {}
    for row in sorted(rows, key=lambda row: str(row["family"])):
        alike.setdefault((row["path"], row["equal"], row["bitwise"], row["why"]), []).append(row)
    lines = ["| families | path | group | step | second process | equal | bitwise | why |", "|" + " --- |" * 8]
    for (path, equal, bitwise, why), found in sorted(alike.items(), key=lambda each: (each[0][0], -len(each[1]))):
        ranges = [_range([row[key] for row in found]) for key in ("group", "step", "second_process")]
        outcomes = [{None: "-", True: "yes", False: "no"}[one] for one in (equal, bitwise)]
        cells = [", ".join(row["family"] for row in found), path, *ranges, *outcomes, why.replace("<", "&lt;")]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _range(numbers: list[int]) -> str:
    low, high = min(numbers), max(numbers)
    return f"{low}" if low == high else f"{low}-{high}"


def _measured(name: str, like: torch.Tensor, folder: Path, second: ProcessPoolExecutor) -> dict[str, Any]:
    first: list[Any] = [{"role": "system", "content": catalog.SYSTEM}, {"role": "user", "content": ASKED}]
    began = time.perf_counter()
    with _engine(name, like, folder) as engine:
        model, loaded_ms = engine.model, (time.perf_counter() - began) * 1e3
        about = {"path": _path(model), "promised": model.bitwise, "load_ms": round(loaded_ms, 1)}
        if not model.support.paged:
            return {**about, **UNREUSED, "why": model.support.why}
        engine.warm(catalog.SYSTEM, TOOLS, name="group")
        pairs = [[_ask(engine, first, reuse) for reuse in (None, "off")]]
        then = [*first, {"role": "assistant", "content": pairs[0][0].text}, {"role": "user", "content": THEN}]
        pairs.append([_ask(engine, then, reuse) for reuse in (None, "off")])
        engine.flush()
    pairs.append([second.submit(_ask_anew, name, like.dtype, like.device, folder, then).result(), pairs[1][1]])
    cached = dict(zip(("group", "step", "second_process"), (hit.cached_tokens for hit, _ in pairs), strict=True))
    equal, bitwise = (all(getattr(hit, of) == getattr(off, of) for hit, off in pairs) for of in ("ids", "logits"))
    return {**about, **cached, "equal": equal, "bitwise": bitwise, "why": _why(pairs, bitwise, model.bitwise)}


def _path(model: Any) -> str:
    if not model.support.paged:
        return "stock"
    if model.spec.recurrent:
        return "checkpoints"
    return "own loop" if model.stepped else "pages"


def _why(pairs: list[list[Answer]], bitwise: bool, promised: bool) -> str:
    """Why a family that is reused has other tokens, or no bits."""
    for where, (hit, off) in zip(("the first step", "the next step", "the second process"), pairs, strict=True):
        if hit.ids != off.ids:
            at = next(at for at, (one, other) in enumerate(zip(hit.ids, off.ids, strict=True)) if one != other)
            return f"token {at + 1} of {where} differs"
    if promised and not bitwise:
        return "bits were promised and differ"
    return "" if promised else "tokens are promised: bits depend on the tokens beside"


def _ask(engine: Engine, messages: list[Any], reuse: Any = None) -> Answer:
    digest = blake3()

    def take(logits: torch.Tensor) -> None:
        digest.update((logits.float() + 0.0).cpu().numpy().tobytes())  # -0 is 0

    done = engine.generate(messages, TOOLS, sampling=greedy(NEW), reuse=reuse, on_logits=take)
    return Answer(done.ids, done.text, done.receipt.cached_tokens, digest.hexdigest())


def _engine(name: str, like: torch.Tensor, folder: Path) -> Engine:
    """An engine on a family's tiny model, whose pages go to a folder of its own."""
    made = tokenizer(catalog.training_texts(), families.VOCAB)
    return Engine(families.build(name, like.dtype).to(like.device), made, store=StoreOptions(folder / name, refuse_slow=False))


@contextmanager
def _new_folder() -> Iterator[Path]:
    """A folder for stores and verdicts, so that nothing is remembered of earlier runs; removed at the end."""
    with tempfile.TemporaryDirectory() as folder, patch.dict(os.environ, AGENTCACHE_DIR=str(Path(folder) / "verdicts")):
        yield Path(folder)


@contextmanager
def _quiet() -> Iterator[None]:
    """No hints of transformers at kernels that are not installed."""
    before = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    try:
        yield
    finally:
        transformers.logging.set_verbosity(before)


def _start(threads: int) -> None:
    """Begin the second process."""
    torch.set_num_threads(threads)
    transformers.logging.set_verbosity_error()


def _ask_anew(name: str, dtype: torch.dtype, device: torch.device, folder: Path, messages: list[Any]) -> Answer:
    """In the second process: load the family there, and answer."""
    with _engine(name, torch.empty(0, dtype=dtype, device=device), folder) as engine:
        return _ask(engine, messages)
