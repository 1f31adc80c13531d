"""`python -m benchmarks.store`: `agentcache bench store` beside other formats, and what a large index costs.

Mapped formats look faster until their bytes are touched: every row here touches every byte.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from rich.table import Table
from safetensors.torch import load_file, save_file

from agentcache.bench import report, store
from agentcache.bench.environment import Samples, machine, versions
from agentcache.bench.options import Dtype, DtypeOption, JsonOption, RepeatsOption, Shape
from agentcache.kv import PAGE_TOKENS
from agentcache.kv_spec import KVSpec
from agentcache.store.disk.disk_tier import DiskTier
from agentcache.store.disk.folder import Folder
from agentcache.store.disk.index import Index
from agentcache.store.keys import Scope
from agentcache.terminal import report_errors
from agentcache.types import StoreOptions

from . import llama_cpp

_BATCH = 6 * 200
app = typer.Typer(add_completion=False)


def _touch(tensors: dict[str, torch.Tensor]) -> None:
    for tensor in tensors.values():
        tensor.view(torch.int16 if tensor.dtype.itemsize == 2 else torch.int32).sum()


class Files(store.Files):
    """Also safetensors and torch.load, and a sequence file of llama.cpp's where llama-cpp-python is installed."""

    def __init__(self, spec: KVSpec, tokens: int, place: Path) -> None:
        super().__init__(spec, tokens, place)
        self.whole, self.pickled = place / "whole.safetensors", place / "whole.pt"
        save_file(self.tensors, self.whole)
        torch.save(self.tensors, self.pickled)
        self.foreign = llama_cpp.sequence(spec, tokens, place)

    def close(self) -> None:
        super().close()
        if self.foreign is not None:
            self.foreign.close()

    def ways(self) -> dict[str, tuple[list[Path], Callable[[], Any]]]:
        found = super().ways() | {
            "safetensors": ([self.whole], lambda: _touch(load_file(self.whole))),
            "torch.load": ([self.pickled], lambda: _touch(torch.load(self.pickled, weights_only=True))),
        }
        return found | ({"llama.cpp": ([self.foreign.file], self.foreign.load)} if self.foreign else {})

    def writes(self) -> dict[str, Callable[[], Any]]:
        return super().writes() | ({"llama.cpp": self.foreign.write} if self.foreign else {})

    def check(self) -> None:
        if self.foreign is not None:
            self.foreign.check()


def lookups(entries: int, repeats: int, place: Path, say: store.Say = lambda _: None) -> dict[str, Any]:
    """Medians with so many rows in the index, of prompts of six pages: opening the store, lookups that find all of one, and nothing."""
    spec, scope = KVSpec(28, 8, 128, torch.bfloat16), Scope("bench", "bench")
    folder, samples = Folder.open(place / "many"), Samples()
    tokens = 6 * PAGE_TOKENS
    with Index(folder) as index:
        for first in range(0, entries, _BATCH):
            say(f"{first:,} of {entries:,} rows")
            prompts = [store.rows_of(spec, tokens, scope, first + number) for number in range(0, _BATCH, 6)]
            index.restore([replace(row, blob=f"{row.page_key.hex()}-0") for rows in prompts for row in rows])
        rows = index.total()[0]
    asked, other = (np.concatenate([row.ids for row in prompt]) for prompt in (prompts[-1], store.rows_of(spec, tokens, scope, 1 << 40)))

    def once(disk: DiskTier) -> None:
        for name, ids in (("first_ms", asked), ("hit_ms", asked), ("miss_ms", other)):
            samples.add(name, store.ms(partial(disk.index.longest, scope, ids, tokens)))
        assert sum(common for _, common in disk.index.longest(scope, asked, tokens)) == tokens
        assert not disk.index.longest(scope, other, tokens)
        disk.close()

    for _ in range(max(9, repeats)):
        began = time.perf_counter()
        disk = DiskTier(StoreOptions(folder.path))
        samples.add("open_ms", (time.perf_counter() - began) * 1e3)
        once(disk)
    return {"rows": rows, **{name: samples.median(name) for name in ("open_ms", "first_ms", "hit_ms", "miss_ms")}}


def index_table(found: dict[str, Any]) -> Table:
    """One line: what a large index costs."""
    columns = {"open ms": "open_ms", "first lookup ms": "first_ms", "lookup ms": "hit_ms", "miss ms": "miss_ms"}
    return report.table(f"an index of {found['rows']:,} pages", list(columns), [[report.number(found[key], 2) for key in columns.values()]])


@app.command()
def main(
    shape: Annotated[Shape, typer.Option(help="A known shape: how large its pages are.")] = Shape.qwen3_06b,
    tokens: Annotated[int, typer.Option(min=1, help="How long the stored prompt is.")] = 2850,
    repeats: RepeatsOption = 5,
    dtype: DtypeOption = Dtype.bfloat16,
    entries: Annotated[int, typer.Option(min=0, help="Also: opening and lookups with so many pages in the index.")] = 0,
    store_dir: Annotated[Path | None, typer.Option(help="Where the files are made and removed; a disk, not memory.")] = None,
    json_file: JsonOption = None,
) -> None:
    """Pages to disk and back, beside raw files, safetensors, torch.load and llama.cpp."""
    with report_errors():
        with tempfile.TemporaryDirectory(dir=store_dir) as folder, report.Progress() as say:
            found: dict[str, Any] = {"bench": "store", "machine": machine(), "versions": versions(("torch", "safetensors", "blake3"))}
            with closing(Files(store.spec_of(shape.value, dtype.value), tokens, Path(folder))) as files:
                found |= {"shape": shape.value, "dtype": dtype.value, **store.run(files, repeats, say)}
            tables = [report.store_table(found)]
            if entries:
                found["index"] = many = lookups(entries, repeats, Path(folder), say)
                tables.append(index_table(many))
        report.finish(found, tables, json_file)


if __name__ == "__main__":
    app()
