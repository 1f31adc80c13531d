"""`agentcache bench adapters`: what it costs to change the adapter of a long prompt. Random adapters: timing does not depend on them.

Physics: a LoRA of the upper half needs half of the layers of a prefix anew, one that acts from its invocation on needs none. Tokens count
by layers: a token that half of the layers run is half a token.
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ..engine import Engine
from ..errors import ConfigError
from ..receipt import Receipt
from ..store.deletion import Deletion
from . import catalog
from .engine_timing import ask, greedy, prompt_of
from .environment import Keep, Samples, Say, watch

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
ROBIN = "round robin"
ANSWER = 8  # tokens of each answer of the round robin


@dataclass(frozen=True, slots=True)
class Options:
    """Sizes of a run."""

    tools: int
    tail: int
    rank: int
    repeats: int
    # of the round robin on one tool group, and requests of each
    adapters: int
    steps: int


def random_adapter(engine: Engine, folder: Path, rank: int, first_layer: int, seed: int, invocation: list[int] | None = None) -> Path:
    """A folder as PEFT saves it, with a LoRA of the attention of all layers from one on."""
    from peft import LoraConfig
    from safetensors.torch import save_file

    named, random = dict(engine.model.model.named_modules()), torch.Generator().manual_seed(seed)
    weights = {}
    for path, module in named.items():
        layer = next((int(part) for part in path.split(".") if part.isdigit()), -1)
        if layer >= first_layer and path.rpartition(".")[2] in ATTENTION:
            outs, ins = module.weight.shape
            weights[f"base_model.model.{path}.lora_A.weight"] = torch.randn(rank, ins, generator=random) / ins**0.5
            weights[f"base_model.model.{path}.lora_B.weight"] = torch.randn(outs, rank, generator=random) / rank**0.5
    if not weights:
        raise ConfigError(f"model {engine.name!r} has no layers named {', '.join(ATTENTION)}: it is not measured")
    folder.mkdir()
    save_file(weights, folder / "adapter_model.safetensors")
    given = {"r": rank, "lora_alpha": rank, "target_modules": list(ATTENTION), "task_type": "CAUSAL_LM"}
    LoraConfig(**given, alora_invocation_tokens=invocation).save_pretrained(folder)
    return folder


def by_layers(engine: Engine, receipt: Receipt) -> float:
    """Tokens that were computed, those of some layers in part."""
    assert engine.model.spec is not None
    return receipt.computed_tokens - receipt.resumed_tokens * receipt.shared_layers / engine.model.spec.layers


def run(engine: Engine, options: Options, say: Say, keep: Keep) -> None:
    """Rows of each kind of adapter, then the round robin."""
    if engine.model.spec is None:
        raise ConfigError(f"model {engine.name!r} has no pages ({engine.model.support.why}): there is nothing to compare")
    layers, tools = engine.model.spec.layers, catalog.tools(options.tools)
    layout = engine.renderer.render([{"role": "user", "content": "?"}])
    opening = next(list(layout.ids[span.start : span.stop]) for span in layout.spans if span.kind == "generation")
    kinds = {"activated": (0, opening), "upper half": (layers // 2, None), "all layers": (0, None)}
    with tempfile.TemporaryDirectory() as place:
        for seed, (kind, (first, invocation)) in enumerate(kinds.items()):
            engine.add_adapter(kind, random_adapter(engine, Path(place) / kind, options.rank, first, seed, invocation))
        engine.warm(catalog.SYSTEM, tools, name="bench", namespace="bench")
        samples, rows = Samples(), list[dict[str, Any]]()
        for kind, (first, invocation) in kinds.items():
            rows.append(_switches(engine, tools, kind, 5 * options.repeats * len(rows), options, samples, say))
            tail = rows[-1].pop("tail_tokens")
            own = 0.0 if invocation else rows[-1]["prompt_tokens"] - tail
            rows[-1]["new_tokens"] = round(own * (layers - first) / layers + tail, 1)
            keep({"rows": rows, "load": samples.report()})
        for kind in kinds:
            engine.remove_adapter(kind)
        rows.append(_round_robin(engine, tools, Path(place), options, say))
    keep({"rows": rows, "load": samples.report(), "repeats": options.repeats})


def _switches(engine: Engine, tools: Any, kind: str, first: int, options: Options, samples: Samples, say: Say) -> dict[str, Any]:
    """Medians of interleaved first tokens: of a base hit, a change to an adapter, a change back to a known one, a hit of it, and without
    reuse. first: number of the first turn."""
    digest, rows, equal = engine.adapters[kind], Samples(), True
    prompt_tokens = tail_tokens = 0
    computed = 0.0
    logits: list[torch.Tensor] = []

    def one(way: str, messages: Any, adapter: str | None, reuse: Any = "exact") -> tuple[Any, Receipt]:
        kept = {"namespace": "bench", "on_logits": lambda row: logits.append(row.clone())}
        with watch() as load:
            done, receipt = ask(engine, messages, tools, 2, adapter=adapter, reuse=reuse, **kept)
        rows.add(f"{way}_ttft_ms", done.ttft_ms)
        samples.note(f"{kind}, {way}", load)
        return done.ids, receipt

    for repeat in range(options.repeats):
        say(f"{kind}: repeat {repeat + 1} of {options.repeats}")
        engine.store.drop_deleted(Deletion(fingerprint=f"+{digest}"))
        asked = [prompt_of(engine, tools, first + 5 * repeat + at, options.tail)[0] for at in range(5)]  # none twice: all is new to all
        logits.clear()
        one("base_hit", asked[0], None)
        hashed = engine.fingerprint.hashed_bytes if engine.fingerprint else 0
        found, receipt = one("switch", asked[1], kind)
        one("base_hit", asked[2], None)
        (_, back), (_, hit) = one("back", asked[3], kind), one("hit", asked[4], kind)
        rows.add("back_over_hit", back.ttft_ms / hit.ttft_ms)
        assert engine.fingerprint is None or engine.fingerprint.hashed_bytes == hashed, "a change of adapter hashed weights"
        expected, _ = one("cold", asked[1], kind, "off")
        equal = equal and found == expected and all(torch.equal(a, b) for a, b in zip(logits[2:4], logits[-2:], strict=True))
        prompt_tokens, computed = receipt.prompt_tokens, by_layers(engine, receipt)
        tail_tokens = prompt_tokens - engine.renderer.render(asked[1], tools).prefix_tokens
    ways = {f"{way}_ttft_ms": rows.median(f"{way}_ttft_ms") for way in ("switch", "base_hit", "back", "hit", "cold")}
    about = {"kind": kind, "prompt_tokens": prompt_tokens, "tail_tokens": tail_tokens}
    ways["back_over_hit"] = rows.median("back_over_hit")
    return {**about, **ways, "computed_tokens": round(computed, 1), "equal": equal}


def _round_robin(engine: Engine, tools: Any, place: Path, options: Options, say: Say) -> dict[str, Any]:
    """Adapters of the upper half take turns on one tool group, each in a conversation of its own."""
    assert engine.model.spec is not None
    spec, names = engine.model.spec, [f"agent {number}" for number in range(options.adapters)]
    for seed, name in enumerate(names):
        engine.add_adapter(name, random_adapter(engine, place / name, options.rank, spec.layers // 2, 100 + seed))
    engine.store.clear()
    group = engine.warm(catalog.SYSTEM, tools, name="robin", namespace="robin")
    before, computed, new = engine.store.bytes, 0.0, 0.0
    talks: dict[str, list[Any]] = {name: [] for name in names}
    held = dict.fromkeys(names, group.prefix_tokens)
    for step in range(options.steps):
        for number, name in enumerate(names):
            say(f"{ROBIN}: step {step + 1} of {options.steps}, {name}")
            messages, _ = prompt_of(engine, tools, step * len(names) + number, options.tail)
            talks[name] += messages[bool(step) :]
            done = engine.generate(talks[name], tools, namespace="robin", adapter=name, sampling=greedy(ANSWER))
            talks[name].append(done.message)
            receipt = done.receipt
            computed += by_layers(engine, receipt)
            new += receipt.prompt_tokens - held[name] + (0 if step else group.prefix_tokens * (1 - (spec.layers // 2) / spec.layers))
            held[name] = receipt.prompt_tokens + receipt.completion_tokens - 1
    about = {"kind": ROBIN, "adapters": options.adapters, "steps": options.steps, "prompt_tokens": max(held.values())}
    sizes = {"group_bytes": before, "store_bytes": engine.store.bytes}
    return {**about, "computed_tokens": round(computed, 1), "new_tokens": round(new, 1), **sizes, "equal": None}
