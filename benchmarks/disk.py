"""`python -m benchmarks.disk`: first tokens of a tool group on disk, in a process that has the model and in one that has just loaded it.

Physics: the group's bytes are read once, from disk or from the system's page cache, each is hashed once, and then the tail runs as after
resident pages. So a hit is the floor plus the time to read; hashing costs nothing where cores are free.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from agentcache.bench import baselines, catalog, engine_timing, report
from agentcache.bench.baselines import Timed
from agentcache.bench.environment import Samples, watch
from agentcache.bench.latency import Options, Scene, prepare
from agentcache.bench.options import Dtype, DtypeOption, JsonOption, Loading, ModelOption, Shape, ShapeOption, ThreadsOption, numbers
from agentcache.bench.store import drop_caches, raw_ms
from agentcache.engine import Engine
from agentcache.errors import ConfigError
from agentcache.store.policy import WriteBudget
from agentcache.terminal import report_errors
from agentcache.types import StoreOptions

METHODS = ("stock", "cold", "warm", "memory", "floor")
NEW = 2  # tokens that each answer has
app = typer.Typer(add_completion=False)


def _options(folder: str) -> StoreOptions:
    """Nothing is refused, and no hit is audited: an audit takes the device's idle moments, in which other requests are timed."""
    return StoreOptions(folder, refuse_slow=False, check_one_in=0)


def blobs(engine: Engine, namespace: str) -> list[Path]:
    """The files that hold a namespace's pages, in order."""
    disk = engine.store.disk
    if disk is None:
        raise ConfigError("there is no store on disk: the engine was made with store=None")
    rows = sorted(disk.index.rows(namespace=namespace), key=lambda row: row.place)
    return [disk.folder.blobs / row.blob[:2] / f"{row.blob}.safetensors" for row in rows]


def read_ms(paths: Sequence[Path]) -> dict[str, float]:
    """Raw reading, from a cold and from a warm page cache."""
    buffer = bytearray(max(path.stat().st_size for path in paths))
    for at in range(0, len(buffer), 4096):
        buffer[at] = 1
    drop_caches(paths)
    return {"read_cold_ms": raw_ms(paths, buffer), "read_warm_ms": raw_ms(paths, buffer)}


def allow_writing(engine: Engine, allowed: bool) -> None:
    """Let pages be written from now on, or stop it: nothing is written while something is timed."""
    disk = engine.store.disk
    assert disk is not None
    engine.flush(120.0)
    disk.writer.budget = WriteBudget(disk.options.write_bytes_per_hour if allowed else 0)


def hit(engine: Engine, namespace: str, messages: Any, tools: Any, new: int, cold: bool) -> tuple[Timed, Any]:
    """A request whose pages are on disk only; (times, receipt). The engine must not refuse slow disks: their cost is measured."""
    engine.store.clear(namespace)
    if cold:
        drop_caches(blobs(engine, namespace))
    done, receipt = engine_timing.ask(engine, messages, tools, new, namespace=namespace)
    came = f"{receipt.disk_tokens} of {receipt.cached_tokens} came from disk: {receipt.refusals}"
    assert receipt.disk_tokens == receipt.cached_tokens > 0, came
    return done, receipt


def resume(scene: Scene) -> None:
    """After pages came back from disk: the group pinned again, turn 0 known again, nothing else."""
    scene.engine.store.clear(scene.namespace)
    group = scene.engine.warm(catalog.SYSTEM, scene.tools, name="bench", namespace=scene.namespace)
    assert group.computed_tokens <= 1, f"{group.computed_tokens} tokens of the group were not on disk"
    engine_timing.ask(scene.engine, scene.turns[0], scene.tools, 2, namespace=scene.namespace)


def methods(scene: Scene, number: int) -> dict[str, Callable[[], Timed]]:
    """Each way to answer turn `number`."""
    engine, ids = scene.engine, scene.prompts[number]

    def from_disk(cold: bool) -> Timed:
        done, _ = hit(engine, scene.namespace, scene.turns[number], scene.tools, NEW, cold)
        resume(scene)
        return done

    return {
        "stock": lambda: baselines.generate(engine.model.model, ids, NEW),
        "cold": lambda: from_disk(True),
        "warm": lambda: from_disk(False),
        "memory": lambda: engine_timing.ask(engine, scene.turns[number], scene.tools, NEW, namespace=scene.namespace)[0],
        "floor": lambda: engine_timing.floor(engine, scene.namespace, ids, scene.prefix)[0],
    }


def measure(scene: Scene, options: Options, say: Callable[[str], None]) -> Samples:
    """All methods, repeat by repeat, in an order that rotates; hits must draw the same tokens."""
    samples = Samples()
    resume(scene)
    for number in range(1, options.repeats + 1):
        ways, done, turn = methods(scene, number), dict[str, Timed](), number % len(METHODS)
        for name in (*METHODS[turn:], *METHODS[:turn]):
            if name != "stock" or number <= options.slow_repeats:
                say(f"{len(scene.tools)} tools, repeat {number} of {options.repeats}: {name}")
                with watch() as load:
                    done[name] = ways[name]()
                samples.note(name, load)
                samples.add(f"{name}_ms", done[name].ttft_ms)
        assert done["cold"].ids == done["warm"].ids == done["memory"].ids, "hits from disk and from memory drew other tokens"
        scene.engine.store.clear(scene.namespace)  # mapped files cannot be dropped from the page cache
        for name, took in read_ms(blobs(scene.engine, scene.namespace)).items():
            samples.add(name, took)
        resume(scene)
    return samples


# Other processes


def second_process(loading: Loading, store: str, scene: Scene, options: Options) -> dict[str, Any]:
    """Medians over `slow_repeats` processes, from a cold and a warm page cache; all must draw the tokens of this one."""
    turns = (1, min(2, options.repeats))
    about = {"store": store, "namespace": scene.namespace, "tools": len(scene.tools), "tail": options.tail, "turns": turns}
    given = json.dumps({"loading": asdict(loading), **about})
    scene.engine.store.clear(scene.namespace)  # files mapped here cannot be dropped from the page cache there
    found = [_started(given) for _ in range(options.slow_repeats)]
    for kind, turn in zip(("cold", "warm"), turns, strict=True):
        own, _ = engine_timing.ask(scene.engine, scene.turns[turn], scene.tools, NEW, namespace=scene.namespace)
        for each in found:
            assert list(own.ids) == list(each[kind].pop("ids")), f"the second process drew other tokens ({kind})"
    figures = ("ttft_ms", "disk_tokens", "load_ms")
    medians = {kind: {name: statistics.median(each[kind][name] for each in found) for name in figures} for kind in ("cold", "warm")}
    return {"second_process": medians, **{f"second_{kind}_ms": medians[kind]["ttft_ms"] for kind in medians}}


def _started(given: str) -> dict[str, Any]:
    ran = subprocess.run([sys.executable, "-m", "benchmarks.disk", "serve", given], capture_output=True, text=True, check=False)
    if ran.returncode:
        raise RuntimeError(f"the second process failed: {ran.stderr[-2000:]}")
    found: dict[str, Any] = json.loads(ran.stdout.strip().splitlines()[-1])
    return found


def _main(spec: dict[str, Any]) -> dict[str, Any]:
    """The second process: load the model, then ask both turns."""
    given = spec["loading"]
    loading = Loading(given["model"], Shape(given["shape"]) if given["shape"] else None, Dtype(given["dtype"]), given["threads"])
    with loading.engine(store=_options(spec["store"])) as engine:
        engine.generate([{"role": "user", "content": catalog.SYSTEM}], sampling=engine_timing.greedy(2), namespace="warm-up", reuse="off")
        tools, found = catalog.tools(spec["tools"]), {}
        for kind, turn in zip(("cold", "warm"), spec["turns"], strict=True):
            messages, _ = engine_timing.prompt_of(engine, tools, turn, spec["tail"])
            done, receipt = hit(engine, spec["namespace"], messages, tools, NEW, kind == "cold")
            found[kind] = {"ttft_ms": done.ttft_ms, "ids": done.ids, "disk_tokens": receipt.disk_tokens, "load_ms": receipt.load_ms}
            assert receipt.bitwise or not engine.model.bitwise, "pages of the first process have other numerics here"
        allow_writing(engine, False)
    return found


def table(rows: Sequence[dict[str, Any]]) -> Table:
    """One line per number of tools."""
    columns = {name: report.of(name) for name in ("tools", "prefix_tokens")} | {"MB": report.of("group_bytes", 1, 1e6)}
    columns |= {name: report.of(f"{name}_ms", 1) for name in (*METHODS, "read_cold", "read_warm")}
    columns |= {"stock/cold": lambda row: f"{row['stock_ms'] / row['cold_ms']:.1f}x"}
    columns |= {f"2nd {kind}": report.of(f"second_{kind}_ms", 1) for kind in ("cold", "warm")}
    return report.drawn("first token with the tool group on disk, ms (page cache cold or warm; 2nd: another process)", columns, rows)


@app.command()
def main(
    model: ModelOption = None,
    shape: ShapeOption = None,
    tools: Annotated[str, typer.Option(help="Tool counts, with commas.")] = "5,10,20,50,100",
    tail: Annotated[int, typer.Option(min=1, help="Tokens after the tools: user turn and generation prompt.")] = 70,
    repeats: Annotated[int, typer.Option(min=1, help="Medians of how many, interleaved.")] = 9,
    slow_repeats: Annotated[int, typer.Option(min=1, help="The same for stock, and for other processes.")] = 3,
    dtype: DtypeOption = Dtype.bfloat16,
    threads: ThreadsOption = None,
    store_dir: Annotated[Path | None, typer.Option(help="Where the store of this run is made and removed; a disk, not memory.")] = None,
    json_file: JsonOption = None,
) -> None:
    """Time to first token with the tool group on disk, beside stock generate, a hit in memory, and raw reads of its files."""
    with report_errors():
        options = Options(numbers(tools, "tools"), tail, repeats, min(repeats, slow_repeats))
        loading, rows = Loading(model, shape, dtype, threads), list[dict[str, Any]]()
        if store_dir is not None:
            store_dir.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=store_dir) as folder:
            place = str(Path(folder) / "store")
            with report.measuring("disk", loading, json_file, store=_options(place)) as run:
                for count in sorted(options.tools):
                    allow_writing(run.engine, True)
                    scene = prepare(run.engine, count, options)
                    allow_writing(run.engine, False)
                    if scene is None:
                        continue
                    samples = measure(scene, options, run.say)
                    row = {"tools": count, "prefix_tokens": scene.prefix, "group_bytes": scene.group.kv_bytes, "load": samples.report()}
                    row |= {name: samples.median(name) for name in samples.values}
                    run.say(f"{count} tools: other processes")
                    rows.append({**row, **second_process(loading, place, scene, options)})
                    run.engine.release("bench", namespace=scene.namespace)
                    run.engine.store.clear(scene.namespace)
                    run.keep({"rows": rows, "options": asdict(options)})
                run.tables.append(table(rows))


if __name__ == "__main__":
    if sys.argv[1:2] == ["serve"]:
        print(json.dumps(_main(json.loads(sys.argv[2]))))
    else:
        app()
