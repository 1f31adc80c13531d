"""`agentcache bench latency`: time to first token and per further token, ours against what users run today, for growing tool lists.

Physics: a prompt costs 2 FLOPs per weight and token, plus attention over all tokens before; a hit pays that for the tail only, and reads
weights and resident KV once. So stock time grows with the tools, ours with the tail, and the floor is the forward of the tail alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from functools import partial
from types import MappingProxyType
from typing import Any

from ..engine import Engine
from ..errors import ConfigError
from ..layout.tokenise import common_length
from ..store.tool_group import ToolGroup
from . import baselines, catalog, engine_timing
from .environment import Keep, Samples, Say, watch

METHODS = ("stock", "static", "recipe", "kept", "off", "hit", "floor")
SLOW = frozenset({"stock", "static", "off"})  # these compute the whole prompt
TIE = {"float32": 1e-3, "bfloat16": 0.5, "float16": 0.05}  # logits closer may swap places between two kernels, more so with experts


@dataclass(frozen=True, slots=True)
class Options:
    """Settings of a run."""

    tools: tuple[int, ...] = (5, 10, 20, 50, 100)  # numbers of tools
    tail: int = 70  # tokens after the prefix
    repeats: int = 9  # values of a median
    slow_repeats: int = 9  # the same of slow methods
    decode: int = 8  # tokens of an answer

    def __post_init__(self) -> None:
        most = len(catalog.OPENINGS) - 1
        if not 1 <= self.repeats <= most:
            raise ConfigError(f"repeats={self.repeats!r}: must be 1 to {most}")
        if not 1 <= self.slow_repeats <= self.repeats:
            raise ConfigError(f"slow_repeats={self.slow_repeats!r}: must be 1 to repeats={self.repeats!r}")


@dataclass(slots=True)
class Scene:
    """One tool count, made ready: the group is warm, `prefix` tokens of each turn's prompt are resident, and in a DynamicCache too.

    stock: the model that transformers' ways run; the engine's own, or its copy in another type. others: further engines, by name.
    """

    engine: Engine
    stock: Any
    namespace: str
    tools: tuple[dict[str, Any], ...]
    group: ToolGroup
    turns: list[list[dict[str, str]]]
    prompts: list[list[int]]
    prefix: int
    others: Mapping[str, Any] = field(default_factory=dict)
    cache: Any = None
    agreed: dict[str, list[bool]] = field(default_factory=dict)
    gaps: list[float] = field(default_factory=list)


def prepare(engine: Engine, count: int, options: Options, stock: Any = None) -> Scene | None:
    """Warm the group of `count` tools and make as many different turns as there are repeats; None if the context is too short."""
    tools = catalog.tools(count)
    made = [engine_timing.prompt_of(engine, tools, number, options.tail) for number in range(options.repeats + 1)]
    prompts = [ids for _, ids in made]
    if max(map(len, prompts)) + options.decode + 1 > engine.model.context_tokens:
        return None
    namespace = f"tools-{count}"
    group = engine.warm(catalog.SYSTEM, tools, name="bench", namespace=namespace)
    prefix = common_length(prompts[0], prompts[1])
    if engine.model.spec is not None and engine.model.spec.recurrent:  # turns go on from the group's checkpoint
        prefix = group.prefix_tokens
    assert group.prefix_tokens <= prefix <= group.prefix_tokens + 2, f"turns share {prefix} tokens, the group holds {group.prefix_tokens}"
    stock = engine.model.model if stock is None else stock
    return Scene(engine, stock, namespace, tools, group, [messages for messages, _ in made], prompts, prefix)


def methods(scene: Scene, number: int, new: int) -> dict[str, Callable[[], baselines.Timed]]:
    """Each way to answer turn `number` with `new` tokens (kept and floor: with one)."""
    engine, ids, model = scene.engine, scene.prompts[number], scene.stock

    def off() -> baselines.Timed:
        done, receipt = engine_timing.ask(engine, scene.turns[number], scene.tools, new, namespace=scene.namespace, reuse="off")
        assert receipt.cached_tokens == 0, f"reuse off reused {receipt.cached_tokens} tokens"
        return done

    def hit() -> baselines.Timed:
        done, receipt = engine_timing.ask(engine, scene.turns[number], scene.tools, new, namespace=scene.namespace)
        known = scene.prefix if number else scene.group.prefix_tokens
        assert receipt.cached_tokens == known, f"a hit of {known} tokens was to be timed, the receipt says {receipt.cached_tokens}"
        assert receipt.computed_tokens == len(ids) - known, f"{receipt.computed_tokens} computed, the tail has {len(ids) - known}"
        return done

    def floor() -> baselines.Timed:
        done, logits = engine_timing.floor(engine, scene.namespace, ids, scene.prefix)
        best, second = logits.topk(2).values.tolist()
        scene.gaps.append(best - second)
        return done

    def stock(run: Callable[[], baselines.Timed]) -> baselines.Timed:
        with engine.model.mixers.given() if engine.model.mixers else nullcontext():
            return run()

    return {
        "stock": lambda: stock(lambda: baselines.generate(model, ids, new)),
        "static": lambda: stock(lambda: baselines.static(model, ids, new)),
        "recipe": lambda: stock(lambda: baselines.recipe(model, scene.cache, ids, new)),
        "kept": lambda: stock(lambda: baselines.kept(model, scene.cache, ids[scene.prefix :])),
        "off": off,
        "hit": hit,
        "floor": floor,
        **{name: partial(other.answer, ids, scene.prefix, new) for name, other in scene.others.items()},
    }


def check(scene: Scene, done: dict[str, baselines.Timed], dtype: str) -> None:
    """Our ways draw the same tokens; the stock ways the same first token, unless the two best logits are a tie. Notes each agreement.

    Where no bits are promised, as on a GPU, a tie may be drawn otherwise by any of them.
    """
    bitwise = scene.engine.model.bitwise
    assert not bitwise or done["floor"].ids[0] == done["hit"].ids[0], "the floor drew another token than the hit"
    if "off" in done and bitwise:
        assert done["off"].ids == done["hit"].ids, f"reuse off drew {done['off'].ids}, the hit {done['hit'].ids}"
    for name in (*(() if bitwise else ("off", "floor")), "stock", "static", "recipe", "kept", *scene.others):
        if name in done:
            same = done[name].ids[0] == done["hit"].ids[0]
            tie = scene.gaps[-1] <= TIE.get(dtype, 0.0) or name in scene.others  # these round elsewhere: it is noted
            assert same or tie, f"{name} drew token {done[name].ids[0]}, the hit {done['hit'].ids[0]}, {scene.gaps[-1]:.3f} apart: no tie"
            scene.agreed.setdefault(name, []).append(same)


def measure(scene: Scene, options: Options, say: Say) -> Samples:
    """All methods, repeat by repeat, in an order that rotates: what disturbs the machine disturbs them alike."""
    samples, dtype, new = Samples(), str(scene.engine.model.dtype).removeprefix("torch."), 1 + options.decode
    first, names = methods(scene, 0, 2), (*METHODS, *scene.others)
    first["hit"]()  # the first call of each path allocates; it also makes turn 0 known, so that later hits are `prefix` long
    sequence = engine_timing.resident(scene.engine, scene.namespace, scene.prompts[0][: scene.prefix + 1])
    scene.cache = baselines.cache_of(scene.stock, sequence, scene.prompts[0][: scene.prefix])
    sequence.close()
    compiles = () if scene.stock.device.type == "cpu" else ("static",)
    for name in (*compiles, "recipe", "kept", "floor", *scene.others):
        first[name]()
    for number in range(1, options.repeats + 1):
        ways, done = methods(scene, number, new), {}
        turn = number % len(names)
        for name in (*names[turn:], *names[:turn]):
            if name in SLOW and number > options.slow_repeats:
                continue
            say(f"{len(scene.tools)} tools, repeat {number} of {options.repeats}: {name}")
            with watch() as load:
                one = done[name] = ways[name]()
            samples.note(name, load)
            for figure in ("ttft_ms", "decode_ms", "total_ms"):
                samples.add(f"{name}_{figure}", getattr(one, figure))
        check(scene, done, dtype)
    return samples


def row(scene: Scene, samples: Samples) -> dict[str, Any]:
    """One line of the table: medians, sizes, what warming costs and when it has paid for itself."""
    median = {name: samples.median(name) for name in samples.values}
    stock_ttft, hit_ttft, floor = median["stock_ttft_ms"], median["hit_ttft_ms"], median["floor_ttft_ms"]
    stock_total, hit_total = median["stock_total_ms"], median["hit_total_ms"]
    assert stock_ttft and hit_ttft and floor and stock_total and hit_total
    saved = stock_total - hit_total
    lengths = sorted(len(ids) for ids in scene.prompts[1:])
    prompt = lengths[len(lengths) // 2]
    figures = {f"{name}_ttft_ms": median[f"{name}_ttft_ms"] for name in METHODS if name != "floor"}
    figures |= {f"{name}_decode_ms": median[f"{name}_decode_ms"] for name in ("stock", "static", "recipe", "off")}
    figures |= {f"{name}_{figure}": median[f"{name}_{figure}"] for name in scene.others for figure in ("ttft_ms", "decode_ms")}
    figures |= {f"{name}_total_ms": median[f"{name}_total_ms"] for name in ("stock", "static", "recipe", "off", "hit")}
    return {
        "tools": len(scene.tools),
        "prompt_tokens": prompt,
        "prefix_tokens": scene.prefix,
        "tail_tokens": prompt - scene.prefix,
        **figures,
        "floor_ms": floor,
        "decode_ms": median["hit_decode_ms"],
        "warm_ms": scene.group.warm_ms,
        "group_bytes": scene.group.kv_bytes,
        "break_even_requests": scene.group.warm_ms / saved if saved > 0 else None,
        "saved_ms_per_1000": 1000 * saved - scene.group.warm_ms,
        "speedup": stock_ttft / hit_ttft,
        "hit_over_floor": hit_ttft / floor,
        "off_over_stock": (median["off_ttft_ms"] or 0.0) / stock_ttft,
        "agreement": {name: sum(same) / len(same) for name, same in scene.agreed.items()},
        "top2_gap_min": min(scene.gaps),
        "repeats": samples.repeats,
        "load": samples.report(),
    }


def warm_up(engine: Engine, stock: Any) -> None:
    """Run each path once on a short prompt: kernels are chosen and buffers made on first use."""
    ids = list(engine.renderer.render([{"role": "user", "content": catalog.SYSTEM}]).ids)
    baselines.generate(stock, ids, 2)
    if stock.device.type == "cpu":
        baselines.static(stock, ids, 2)
    engine.generate([{"role": "user", "content": catalog.SYSTEM}], sampling=engine_timing.greedy(2), namespace="warm-up", reuse="off")


def run(
    engine: Engine,
    options: Options,
    say: Say = lambda _: None,
    keep: Keep = lambda _: None,
    stock: Any = None,
    others: Mapping[str, Any] = MappingProxyType({}),
) -> dict[str, Any]:
    """All tool counts, smallest first: rows, and the counts whose prompts do not fit the model's context. `keep` gets them row by row.

    stock: another model for transformers' ways than the engine's. others: further engines by name, with `answer(ids, prefix, new)`.
    """
    rows: list[dict[str, Any]] = []
    too_long: list[int] = []
    stock = engine.model.model if stock is None else stock
    stock_dtype = str(stock.dtype).removeprefix("torch.")
    found = {"rows": rows, "too_long": too_long, "options": asdict(options), "stock_dtype": stock_dtype}
    keep(found)
    warm_up(engine, stock)
    for count in sorted(options.tools):
        say(f"{count} tools: warming")
        scene = prepare(engine, count, options, stock)
        if scene is None:
            too_long.append(count)
            continue
        scene.others = others
        rows.append(row(scene, measure(scene, options, say)))
        engine.release("bench", namespace=scene.namespace)
        engine.store.clear(scene.namespace)
        keep(found)
    return found
