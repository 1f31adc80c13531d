"""What wrong keys and values do to answers: a prompt's tools get KV that is spoilt on purpose, or was computed apart. Repairs nothing.

    exact           as computed                                        other context   behind another system prompt, re-indexed
    shifted         re-indexed by 64 positions too few                 swapped         the right tool has its neighbour's KV
    alone           each tool apart, nothing before it, re-indexed     dummy           the same behind dummy tokens
    behind system   each tool behind the real system prompt only, re-indexed

Only the tools' KV is replaced: what stands before them is exact, what stands behind is computed on top, as a segment cache without
repair does it. A model whose answers stay right here cannot tell whether such a cache works.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import DynamicCache

from agentcache.bench.quality import ANSWER_TOKENS, hermes
from agentcache.bench.quality_cases import Case
from agentcache.bench.quality_score import Said, figures
from agentcache.engine import Engine
from agentcache.errors import ConfigError
from agentcache.model.loading import cache_name

from .answers import parse

KINDS = ("exact", "other context", "shifted", "swapped", "alone", "dummy", "behind system")
SHIFT = 64
SHARES: dict[str, Callable[[Case], bool]] = {
    "all": lambda case: True,
    "independent": lambda case: not case.context,
    "context": lambda case: case.context,
    # what is right stands in another tool, whose KV is spoilt too; with rivals, the thing alone does not lead there
    "another tool": lambda case: case.kind in ("like", "above"),
    "with rivals": lambda case: case.kind in ("like", "above") and case.rivals,
}
KV = list[tuple[torch.Tensor, torch.Tensor]]  # per layer: keys and values [1, kv heads, tokens, head dim]


@dataclass(frozen=True, slots=True)
class Prompt:
    """Ids of a prompt; its tools are the segments [cuts[0], cuts[1]), [cuts[1], cuts[2]) ... without gaps."""

    ids: tuple[int, ...]
    cuts: tuple[int, ...]


def prompt(engine: Engine, case: Case) -> Prompt:
    """Rendered as the stock template does; ConfigError where the tools cannot be found in the text."""
    text = engine.tokenizer.apply_chat_template(list(case.prompt), tools=list(case.tools), tokenize=False, add_generation_prompt=True)
    coded = engine.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    starts, at = [], 0
    for tool in case.tools:
        at = text.find(json.dumps(tool, ensure_ascii=False), at)
        if at < 0:
            raise ConfigError(
                f"model={engine.name!r}: its template does not show tool {tool['function']['name']!r} as JSON, so it cannot be spoilt"
            )
        starts.append(at)
        at += 1
    ends = [*starts[1:], starts[-1] + len(json.dumps(case.tools[-1], ensure_ascii=False))]
    first = [next(n for n, (_, stop) in enumerate(coded["offset_mapping"]) if stop > start) for start in starts]
    last = next(n for n, (_, stop) in enumerate(coded["offset_mapping"]) if stop >= ends[-1]) + 1
    return Prompt(tuple(coded["input_ids"]), (*first, last))


# Keys and values


def cache_of(kv: KV) -> Any:
    """A cache of transformers' that holds this KV."""
    made = DynamicCache()
    for layer, (keys, values) in enumerate(kv):
        made.update(keys, values, layer)
    return made


def kv_of(cache: Any, start: int, stop: int) -> KV:
    """A copy of the KV of tokens [start, stop)."""
    return [(layer.keys[:, :, start:stop].clone(), layer.values[:, :, start:stop].clone()) for layer in cache.layers]


def computed(model: Any, before: KV | None, ids: Sequence[int]) -> KV:
    """The KV of ids behind `before`."""
    cache = cache_of(before) if before else DynamicCache()
    start = before[0][0].shape[2] if before else 0
    model(input_ids=torch.tensor([list(ids)]), use_cache=True, logits_to_keep=1, **{cache_name(model): cache})
    return kv_of(cache, start, start + len(ids))


def turned(model: Any, kv: KV, by: int) -> KV:
    """Re-indexed: keys as if computed `by` positions later. Values have no position."""
    angles = by * model.get_decoder().rotary_emb.inv_freq.double()
    cos, sin = (torch.cat((part, part)) for part in (angles.cos(), angles.sin()))

    def turn(keys: torch.Tensor) -> torch.Tensor:
        wide, half = keys.double(), keys.shape[-1] // 2
        return (wide * cos + torch.cat((-wide[..., half:], wide[..., :half]), -1) * sin).to(keys.dtype)

    return [(turn(keys), values) for keys, values in kv]


def joined(*parts: KV) -> KV:
    """KV of several runs of tokens, one behind the other."""
    return [(torch.cat([part[0] for part in layer], 2), torch.cat([part[1] for part in layer], 2)) for layer in zip(*parts)]


def cut(kv: KV, start: int, stop: int) -> KV:
    """The KV of tokens [start, stop), not copied."""
    return [(keys[:, :, start:stop], values[:, :, start:stop]) for keys, values in kv]


class Spoiler:
    """The prefixes of one catalog in all kinds. `other`: a prompt with other text before its tools."""

    def __init__(self, model: Any, given: Prompt, other: Prompt, dummy: int) -> None:
        self.model, self.given, self.other, self.dummy = model, given, other, dummy
        self.exact = computed(model, None, given.ids[: given.cuts[-1]])
        self.system = cut(self.exact, 0, given.cuts[0])
        self._made: dict[str, KV] = {}

    def prefix(self, kind: str, chosen: int) -> KV:
        """KV up to the last tool's end. chosen: the tool that "swapped" is about."""
        if kind == "exact":
            return self.exact
        if kind == "swapped":
            return self._swapped(chosen)
        if kind not in self._made:
            self._made[kind] = joined(self.system, getattr(self, f"_{kind.replace(' ', '_')}")())
        return self._made[kind]

    def _other_context(self) -> KV:
        first = self.given.cuts[0]
        before = self.other.ids[: self.other.cuts[0]]
        tools = computed(self.model, computed(self.model, None, before), self.given.ids[first : self.given.cuts[-1]])
        return turned(self.model, tools, first - len(before))

    def _shifted(self) -> KV:
        return turned(self.model, cut(self.exact, self.given.cuts[0], self.given.cuts[-1]), -SHIFT)

    def _alone(self) -> KV:
        return self._apart(None, 0)

    def _dummy(self) -> KV:
        return self._apart(computed(self.model, None, [self.dummy] * SHIFT), SHIFT)

    def _behind_system(self) -> KV:
        return self._apart(self.system, self.given.cuts[0])

    def _apart(self, before: KV | None, start: int) -> KV:
        """Each tool computed behind `before`, which ends at `start`."""
        pairs = list(zip(self.given.cuts, self.given.cuts[1:]))
        return joined(*(turned(self.model, computed(self.model, before, self.given.ids[a:b]), a - start) for a, b in pairs))

    def _swapped(self, chosen: int) -> KV:
        cuts = self.given.cuts
        other = chosen + 1 if chosen + 2 < len(cuts) else chosen - 1
        length = min(cuts[chosen + 1] - cuts[chosen], cuts[other + 1] - cuts[other])
        moved = turned(self.model, cut(self.exact, cuts[other], cuts[other] + length), cuts[chosen] - cuts[other])
        return joined(cut(self.exact, 0, cuts[chosen]), moved, cut(self.exact, cuts[chosen] + length, cuts[-1]))


# Asking


def answered(engine: Engine, prefix: KV, tail: Sequence[int], told: Sequence[int]) -> tuple[list[int], torch.Tensor]:
    """The greedy answer behind prefix and tail, and the logits [len(told), vocab] that predict the tokens of `told` (or of the answer)."""
    model, ends = engine.model.model, engine.model.stop_ids | {engine.tokenizer.eos_token_id}
    cache = cache_of(prefix)

    def logits_of(ids: Sequence[int], **options: Any) -> torch.Tensor:
        given = {cache_name(model): cache, **options}
        return model(input_ids=torch.tensor([list(ids)]), use_cache=True, **given).logits[0]  # type: ignore[no-any-return]

    logits = logits_of(tail, logits_to_keep=1)
    behind, seen, drawn = cache.get_seq_length(), [logits[-1:]], [int(logits[-1].argmax())]
    while drawn[-1] not in ends and len(drawn) < ANSWER_TOKENS:
        logits = logits_of(drawn[-1:], logits_to_keep=1)
        seen.append(logits[-1:])
        drawn.append(int(logits[-1].argmax()))
    if not told or list(told) == drawn:
        return drawn, torch.cat(seen)
    cache = cache_of(kv_of(cache, 0, behind))
    rest = logits_of(told[:-1]) if len(told) > 1 else seen[0][:0]
    return drawn, torch.cat((seen[0], rest))


def _distance(one: torch.Tensor, other: torch.Tensor) -> tuple[float, float]:
    """Mean cosine of logits, and mean KL(one ‖ other) in nats."""
    cosine = torch.nn.functional.cosine_similarity(one.double(), other.double(), dim=-1).mean()
    logs = torch.log_softmax(one.double(), -1), torch.log_softmax(other.double(), -1)
    return float(cosine), float((logs[0].exp() * (logs[0] - logs[1])).sum(-1).mean())


@torch.inference_mode()
def run(engine: Engine, cases: Sequence[Case], say: Callable[[str], None]) -> list[dict[str, Any]]:
    """A row per kind and share: the figures of quality_score.py, mean cosine and KL of the logits along the exact run's answer, and how
    many answers were the same."""
    prompts = [prompt(engine, case) for case in cases]
    said: dict[str, list[Said]] = defaultdict(list)
    apart: dict[str, list[tuple[float, float, bool]]] = defaultdict(list)
    spoiler, catalog = None, -1
    dummy = engine.tokenizer("\n", add_special_tokens=False)["input_ids"][0]
    for number, (case, given) in enumerate(zip(cases, prompts)):
        if spoiler is None or case.catalog != catalog:
            other = next((one for one in prompts[number:] + prompts if one.ids[: one.cuts[0]] != given.ids[: given.cuts[0]]), given)
            spoiler, catalog = Spoiler(engine.model.model, given, other, dummy), case.catalog
        names = [str(tool["function"]["name"]) for tool in case.tools]
        chosen = names.index(case.right.name) if case.right is not None else 0
        told: list[int] = []
        exact = torch.empty(0)
        for kind in KINDS:
            drawn, logits = answered(engine, spoiler.prefix(kind, chosen), given.ids[given.cuts[-1] :], told)
            if kind == "exact":
                told, exact = drawn, logits
            said[kind].append(hermes(parse(engine.tokenizer.decode(drawn, skip_special_tokens=True))))
            apart[kind].append((*_distance(exact, logits), drawn == told))
        say(f"spoilt KV: {number + 1} of {len(cases)}")
    return [_row(kind, share, cases, said[kind], apart[kind]) for kind in KINDS for share in SHARES]


def _row(kind: str, share: str, cases: Sequence[Case], said: Sequence[Said], apart: Sequence[tuple[float, float, bool]]) -> dict[str, Any]:
    some = [number for number, case in enumerate(cases) if SHARES[share](case)]
    found: Mapping[str, Any] = figures([cases[number] for number in some], [said[number] for number in some])
    means = [sum(apart[number][at] for number in some) / len(some) if some else None for at in range(3)]
    return {"kind": kind, "share": share, "tools": len(cases[0].tools), **found, "cosine": means[0], "kl": means[1], "same": means[2]}
