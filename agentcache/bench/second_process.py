"""The hit of a tool group on disk, asked of other processes that have just loaded the model."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from dataclasses import asdict
from typing import Any

from ..types import StoreOptions
from . import catalog, disk, engine_timing
from .latency import Options, Scene
from .options import Dtype, Loading, Shape

NEW = 2  # tokens that each answer has


def ask(loading: Loading, store: str, scene: Scene, options: Options) -> dict[str, Any]:
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
    return {kind: {name: statistics.median(each[kind][name] for each in found) for name in found[0][kind]} for kind in ("cold", "warm")}


def _started(given: str) -> dict[str, Any]:
    ran = subprocess.run([sys.executable, "-m", __name__, given], capture_output=True, text=True, check=False)
    if ran.returncode:
        raise RuntimeError(f"the second process failed: {ran.stderr[-2000:]}")
    found: dict[str, Any] = json.loads(ran.stdout.strip().splitlines()[-1])
    return found


def _main(spec: dict[str, Any]) -> dict[str, Any]:
    """The second process: load the model, then ask both turns."""
    given = spec["loading"]
    loading = Loading(given["model"], Shape(given["shape"]) if given["shape"] else None, Dtype(given["dtype"]), given["threads"])
    with loading.engine(store=StoreOptions(spec["store"], refuse_slow=False)) as engine:
        engine.generate([{"role": "user", "content": catalog.SYSTEM}], sampling=engine_timing.greedy(2), namespace="warm-up", reuse="off")
        tools, found = catalog.tools(spec["tools"]), {}
        for kind, turn in zip(("cold", "warm"), spec["turns"], strict=True):
            messages, _ = engine_timing.prompt_of(engine, tools, turn, spec["tail"])
            done, receipt = disk.hit(engine, spec["namespace"], messages, tools, NEW, kind == "cold")
            found[kind] = {"ttft_ms": done.ttft_ms, "ids": done.ids, "disk_tokens": receipt.disk_tokens, "load_ms": receipt.load_ms}
            assert receipt.bitwise or not engine.model.bitwise, "pages of the first process have other numerics here"
        disk.allow_writing(engine, False)
    return found


if __name__ == "__main__":
    print(json.dumps(_main(json.loads(sys.argv[1]))))
