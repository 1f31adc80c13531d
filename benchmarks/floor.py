"""`python -m benchmarks.floor`: where the time of a prefill, a hit and a decoded token goes, and how far it is from what is possible.

Floors: a prefill cannot take less than its FLOPs by the fastest product here, a decoded token not less than reading weights and KV once.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Annotated, Any
from unittest import mock

import torch
import typer

from agentcache.bench import catalog, engine_timing, report
from agentcache.bench.options import Dtype, DtypeOption, JsonOption, Loading, ModelOption, ShapeOption, ThreadsOption, WeightsOption
from agentcache.engine import Engine
from agentcache.model import hf, steps
from agentcache.model.kernels import dispatch, layer
from agentcache.terminal import report_errors

BYTES = 1 << 29  # read to find the bandwidth: more than any cache
TRIES = 7
PARTS: dict[str, tuple[tuple[Any, str], ...]] = {
    "products": ((steps, "linear"), (steps, "linears")),
    "layers but attention": ((layer.Programs, "enter"), (layer.Programs, "middle")),
    "attention": ((steps, "attended"),),
    "writing KV": ((steps, "_write"),),
    "norms and angles": ((dispatch, "norm"), (dispatch, "heads")),
    "head": ((steps, "head"),),
    "forward": ((hf.HFModel, "forward"),),
}


def _fastest(run: Callable[[], Any]) -> float:
    """Seconds of the fastest call."""
    run()
    took = []
    for _ in range(TRIES):
        began = time.perf_counter()
        run()
        took.append(time.perf_counter() - began)
    return min(took)


@torch.inference_mode()
def limits(engine: Engine) -> dict[str, float]:
    """Bytes per second that can be read, and FLOPs per second of the fastest product: PyTorch's, or ours."""
    numerics, dtype = engine.model.numerics, engine.model.dtype
    assert numerics is not None
    whole = torch.ones(BYTES // 4)
    weights = torch.ones(BYTES // dtype.itemsize // 1024, 1024, dtype=dtype)
    one, many = torch.ones(numerics.rows, 1024, dtype=dtype), torch.ones(512, 1024, dtype=dtype)
    read = min(_fastest(whole.sum), _fastest(lambda: dispatch.linear(numerics.kernel, one, weights)))
    square, part = torch.ones(1536, 1536), weights[:2048]
    flops = [
        2 * 1536**3 / _fastest(lambda: square @ square),
        2 * 512 * part.numel() / _fastest(lambda: dispatch.linear(numerics.kernel, many, part)),
    ]
    return {"bytes_per_s": BYTES / read, "flops_per_s": max(flops)}


@contextmanager
def timed() -> Iterator[dict[str, float]]:
    """ms spent in each part while it is open, in the outer one of two; `forward` holds the others."""
    spent, inside = dict.fromkeys(PARTS, 0.0), list[str]()

    def clock(part: str, run: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            if inside not in ([], ["forward"]):  # the head is a product, too
                return run(*args, **options)
            inside.append(part)
            began = time.perf_counter()
            try:
                return run(*args, **options)
            finally:
                spent[inside.pop()] += (time.perf_counter() - began) * 1e3

        return call

    with ExitStack() as patched:
        for part, owner, name in ((part, *place) for part, places in PARTS.items() for place in places):
            patched.enter_context(mock.patch.object(owner, name, clock(part, getattr(owner, name))))
        yield spent


def _median(found: list[dict[str, float]]) -> dict[str, float]:
    return {name: statistics.median(one[name] for one in found) for name in found[0]}


def measure(engine: Engine, count: int, repeats: int, decode: int, say: Callable[[str], None]) -> dict[str, Any]:
    """A prefill of `count` tools, a hit of the tail, and a decoded token: ms of each part, and the floor."""
    say("limits of the machine")
    bounds, tools = limits(engine), catalog.tools(count)
    prompts = [engine_timing.prompt_of(engine, tools, number, 70) for number in range(repeats + 1)]
    engine.warm(catalog.SYSTEM, tools, name="floor")
    engine_timing.ask(engine, prompts[0][0], tools, 2)
    found: dict[str, list[dict[str, float]]] = {"prefill": [], "hit": [], "decode": []}
    for number in range(1, repeats + 1):
        for what, new, options in (("prefill", 1, {"reuse": "off"}), ("hit", 1, {}), ("decode", 1 + decode, {})):
            if what == "prefill" and number > 1:
                continue
            say(f"{what}, {number} of {repeats}")
            with timed() as spent:
                done, receipt = engine_timing.ask(engine, prompts[number][0], tools, new, **options)
            if what == "decode":
                assert receipt.computed_tokens <= 2, f"{receipt.computed_tokens} tokens of a known prompt were computed"
                found[what].append({part: ms / new for part, ms in spent.items()} | {"all": done.decode_ms})
            else:
                assert (receipt.cached_tokens == 0) == (what == "prefill")
                found[what].append(spent | {"all": done.ttft_ms, "tokens": float(receipt.computed_tokens)})
    say("limits of the machine, again")
    bounds = {name: max(value, bounds[name]) for name, value in limits(engine).items()}
    parts = {what: _median(one) for what, one in found.items()}
    prompt, tail = (int(parts[what].pop("tokens")) for what in ("prefill", "hit"))
    spec, model = engine.model.spec, engine.model
    assert spec is not None
    weights = sum(p.nbytes for p in model.decoder.layers.parameters()) + model.model.get_output_embeddings().weight.nbytes
    floors = {
        "prefill": model.flops(prompt) / bounds["flops_per_s"],
        "hit": (model.flops(prompt) - model.flops(prompt - tail)) / bounds["flops_per_s"],
        "decode": (weights + prompt * spec.token_bytes) / bounds["bytes_per_s"],
    }
    return {
        "limits": bounds, "prompt_tokens": prompt, "tail_tokens": tail, "weight_bytes": weights, "kv_bytes": prompt * spec.token_bytes,
        "parts_ms": parts, "floor_ms": {what: seconds * 1e3 for what, seconds in floors.items()}, "repeats": repeats,
    }  # fmt: skip


def main(
    model: ModelOption = None,
    shape: ShapeOption = None,
    tools: Annotated[int, typer.Option(min=1, help="Tools of the prefix.")] = 20,
    repeats: Annotated[int, typer.Option(min=1, help="Medians of how many hits and answers; the prefill runs once.")] = 5,
    decode: Annotated[int, typer.Option(min=1, help="Tokens decoded.")] = 16,
    dtype: DtypeOption = Dtype.bfloat16,
    weights: WeightsOption = None,
    threads: ThreadsOption = None,
    json_file: JsonOption = None,
) -> None:
    """Floors of this machine, and where the time above them goes."""
    with report_errors(), report.measuring("floor", Loading(model, shape, dtype, threads, quantized=weights), json_file) as run:
        run.keep(found := measure(run.engine, tools, repeats, decode, run.say))
        rows = [{"": what, **parts, "floor": found["floor_ms"][what]} for what, parts in found["parts_ms"].items()]
        columns: dict[str, report.Cell] = {"": lambda row: row[""], **{part: report.of(part, 1) for part in [*rows[0]][1:]}}
        run.tables.append(report.drawn("ms", {**columns, "of it": lambda row: f"{row['all'] / row['floor']:.2f}"}, rows))


if __name__ == "__main__":
    typer.run(main)
