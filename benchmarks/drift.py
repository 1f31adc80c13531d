"""`python -m benchmarks.drift`: what storing pages with fewer bits does to a model's answers, against the exact pages. Times nothing."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import asdict, dataclass
from typing import Annotated, Any

import torch
import typer
from rich.table import Table

from agentcache.approximate.calibrate.trials import lossy_copy
from agentcache.bench import catalog, report
from agentcache.bench.options import Dtype, DtypeOption, JsonOption, Loading, ModelOption, ShapeOption, ThreadsOption
from agentcache.bench.report import Cell, drawn, of
from agentcache.divergence import divergence
from agentcache.engine import Engine
from agentcache.errors import ConfigError
from agentcache.kv import PAGE_TOKENS, Sequence
from agentcache.kv_spec import KVSpec
from agentcache.model.hf import HFModel
from agentcache.runner import Runner, Work
from agentcache.store.disk import quantize
from agentcache.terminal import report_errors


@dataclass(frozen=True, slots=True)
class Drift:
    """Of the next token's distribution behind lossy pages, over `tokens` places: KL(exact ‖ lossy) in nats, and how often both agree."""

    tokens: int
    mean_kl: float
    most_kl: float
    top1_agreement: float


def drift(model: HFModel, ids: Seq[int], tail: Seq[int], precision: str) -> Drift:
    """Run `tail` token by token behind the exact pages of `ids` and behind lossy ones, and compare the logits."""
    assert model.spec is not None and model.rotary is not None
    runner, regime = Runner(model), model.rotary.regime(len(ids) + len(tail)) or ""
    exact = Sequence(model.spec)
    for start in range(0, len(ids), PAGE_TOKENS):
        runner.run([Work(exact, list(ids[start : start + PAGE_TOKENS]), regime, wanted=False)])
    near = Sequence(model.spec)
    near.attach([lossy_copy(page, precision) for page in exact.pages], len(ids))
    kl, agree = [], 0
    for token in tail:
        pair = runner.run([Work(sequence, [token], regime) for sequence in (exact, near)])
        one, other = (outcome.logits for outcome in pair)
        assert one is not None and other is not None, pair
        kl.append(divergence(one, other))
        agree += int(one.argmax() == other.argmax())
    exact.close()
    near.close()
    return Drift(len(tail), sum(kl) / len(kl), max(kl), agree / len(tail))


def token_bytes(spec: KVSpec, precision: str) -> float:
    """What a token of a full page takes on disk, headers aside."""
    if precision == "exact":
        return float(spec.token_bytes)
    keys, values = (torch.zeros(spec.kv_heads, *shape) for shape in ((spec.head_dim, PAGE_TOKENS), (PAGE_TOKENS, spec.head_dim)))
    return spec.layers * sum(part.nbytes for part in quantize.quantize(keys, values, precision).values()) / PAGE_TOKENS


def run(engine: Engine, tokens: int, tail: int, say: Callable[[str], None] = lambda _: None) -> dict[str, Any]:
    """Each precision on the same prompt: tool schemas, as agents send them."""
    spec = engine.model.spec
    if spec is None:
        raise ConfigError(f"model {engine.name!r} has no pages ({engine.model.support.why}): there is nothing to store")
    ids = list(engine.renderer.render(catalog.SYSTEM, namespace="drift").ids)
    for tool in catalog.tools(100):
        if len(ids) >= tokens + tail:
            break
        ids += engine.renderer.render(json.dumps(tool), namespace="drift").ids
    if len(ids) < tokens + tail:
        raise ConfigError(f"tokens={tokens!r}, tail={tail!r}: the prompt has {len(ids)} tokens only")
    rows = []
    for precision in ("int8", "int4"):
        say(f"drift of {precision}")
        found = drift(engine.model, ids[:tokens], ids[tokens : tokens + tail], precision)
        share = token_bytes(spec, precision) / token_bytes(spec, "exact")
        rows.append({"precision": precision, "bytes_per_token": token_bytes(spec, precision), "share": share, **asdict(found)})
    return {"prompt_tokens": tokens, "tail_tokens": tail, "exact_bytes_per_token": token_bytes(spec, "exact"), "rows": rows}


def drift_table(found: Mapping[str, Any]) -> Table:
    """One line per precision."""
    columns: dict[str, Cell] = {"": lambda row: str(row["precision"]), "bytes/token": of("bytes_per_token"), "of exact": of("share", 2)}
    columns |= {"mean KL": lambda row: f"{row['mean_kl']:.2e}", "most KL": lambda row: f"{row['most_kl']:.2e}"}
    columns |= {"same top-1": of("top1_agreement", 3)}
    title = f"{found['tail_tokens']} next tokens behind {found['prompt_tokens']:,} stored ones, against exact pages"
    return drawn(title, columns, found["rows"])


app = typer.Typer(add_completion=False)


@app.command()
def main(
    model: ModelOption = None,
    shape: ShapeOption = None,
    tokens: Annotated[int, typer.Option(min=1, help="How long the stored prompt is.")] = 1024,
    tail: Annotated[int, typer.Option(min=1, help="Tokens behind it at which answers are compared.")] = 64,
    dtype: DtypeOption = Dtype.bfloat16,
    threads: ThreadsOption = None,
    json_file: JsonOption = None,
) -> None:
    """What int8 and int4 storage does to a model's next tokens: KL and top-1 agreement against exact pages, and bytes."""
    with report_errors(), report.measuring("drift", Loading(model, shape, dtype, threads), json_file) as measured:
        measured.keep(run(measured.engine, tokens, tail, measured.say))
        measured.tables.append(drift_table(measured.found))


if __name__ == "__main__":
    app()
