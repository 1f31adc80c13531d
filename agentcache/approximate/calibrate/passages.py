"""`agentcache bench rag`: questions over retrieved passages, in the retriever's order and in the cache's, with and without reuse.

Physics: a prefix is reused up to the first passage that differs, so order decides what is found. By consent passages are attached at other
positions: each was computed alone, and lacks what it would have read of the passages before it, unless it is repaired.
"""

from __future__ import annotations

import re
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any

import torch

from ...calibration import Calibration
from ...engine import Engine
from ...layout.request import Rendered
from ...types import PASSAGES, Reuse, Sampling
from .questions import Question, prompt
from .trials import answered

Row = dict[str, Any]
COUNTED = ("prompt_tokens", "computed_tokens", "cached_tokens", "segment_tokens")  # of each receipt


@dataclass(frozen=True, slots=True)
class Way:
    """A way to ask all questions. calibration: of approximate reuse; repair: its name in the table."""

    order: str
    reuse: Reuse
    calibration: Calibration | None = None
    repair: str = ""


@dataclass(slots=True)
class Tally:
    """Sums of one way."""

    tokens: Counter[str] = field(default_factory=Counter)  # of prompts and passages, and how they were come by
    order_ms: list[float] = field(default_factory=list)
    ttft_ms: list[float] = field(default_factory=list)
    answers: list[str] = field(default_factory=list)
    right: list[bool] = field(default_factory=list)
    f1: list[float] = field(default_factory=list)
    kl: list[float] = field(default_factory=list)
    first: list[torch.Tensor] = field(default_factory=list)


def ask(engine: Engine, asked: Sequence[Question], way: Way, exact: Tally | None, say: Callable[[str], None], tokens: int) -> Tally:
    """Ask all questions one way, in a namespace of its own. exact: the answers of full prefill, which these are held against."""
    found, space = Tally(), f"rag {way.order} {way.reuse} {way.repair}"
    if way.calibration is not None:  # each passage alone, at the place of the first one
        engine.learn(
            sorted({text for one in asked for text in one.found}), messages=prompt(PASSAGES, "", ""), namespace=space, pack_tokens=1
        )
    start = engine.renderer.render(prompt(PASSAGES, "", ""), namespace=space)
    assert isinstance(start, Rendered)
    head = start.encoded.tokens_before(start.text.index(PASSAGES))
    for number, one in enumerate(asked):
        say(f"{space.rstrip()}: {number + 1} of {len(asked)}")
        order, ranks, texts = tuple(range(len(one.found))), "", list(one.found)
        started = time.perf_counter()
        if way.order == "cache-aware":
            arranged = engine.arrange(texts, prompt(PASSAGES, "", one.text), namespace=space)
            order, ranks = arranged.order, arranged.ranks
            found.order_ms.append((time.perf_counter() - started) * 1e3)
        sampling = Sampling(max_tokens=tokens, forced=one.begin, stop=(".", "\n"))
        begun = len(engine.tokenizer(one.begin, add_special_tokens=False)["input_ids"]) if one.begin else 0
        messages = prompt("\n\n".join(texts[each] for each in order), ranks, one.text)
        answer, logits = answered(engine, messages, sampling=sampling, namespace=space, reuse=way.calibration or way.reuse)
        receipt, passage_tokens = answer.receipt, sum(len(engine.renderer.ids(text, space)) for text in texts)
        found.tokens.update({kind: getattr(receipt, kind) for kind in COUNTED})
        found.tokens["passage_tokens"] += passage_tokens
        found.tokens["passage_cached_tokens"] += min(passage_tokens, max(0, receipt.cached_tokens - head))
        found.ttft_ms.append(receipt.ttft_ms)
        said = answer.text.removeprefix(one.begin).strip(" .\n")
        found.answers.append(said)
        found.right.append(any(_normal(said) == _normal(right) for right in one.answers))
        found.f1.append(max((f1(said, right) for right in one.answers), default=0.0))
        found.first.append(torch.log_softmax(logits[min(begun, len(logits) - 1)].float(), -1))
        if exact is not None:
            full = exact.first[number]
            found.kl.append(float((full.exp() * (full - found.first[-1])).sum()))
    return found


def row(way: Way, found: Tally, exact: Tally, n: int) -> Row:
    """The figures of one way."""
    paired = sum(found.right) - sum(exact.right)
    return {
        "order": way.order,
        "reuse": way.reuse,
        "repair": way.repair,
        **{kind: found.tokens[kind] for kind in (*COUNTED, "passage_tokens")},
        "hit_share": round(found.tokens["passage_cached_tokens"] / found.tokens["passage_tokens"], 4),
        "order_ms": round(statistics.median(found.order_ms), 3) if found.order_ms else 0.0,
        "ttft_ms": round(statistics.median(found.ttft_ms), 3),
        "right": sum(found.right) / n,
        "right_less_full": paired / n,
        "f1": round(sum(found.f1) / n, 4),
        "agreement": sum(one == other for one, other in zip(found.answers, exact.answers, strict=True)) / n,
        "kl": round(sum(found.kl) / n, 5) if found.kl else 0.0,
        "n": n,
    }


def run(engine: Engine, asked: Sequence[Question], ways: Sequence[Way], say: Callable[[str], None], tokens: int = 24) -> Iterator[Row]:
    """A row for full prefill in the order of the retriever, then for each way."""
    full = Way("retrieved", "off")
    exact = ask(engine, asked, full, None, say, tokens)
    yield row(full, exact, exact, len(asked))
    for way in ways:
        yield row(way, ask(engine, asked, way, exact, say, tokens), exact, len(asked))
        engine.forget(namespace=f"rag {way.order} {way.reuse} {way.repair}")


def ways(engine: Engine, halos: Sequence[int], shares: Sequence[float], calibration: Calibration | None) -> list[Way]:
    """Exact reuse in both orders; approximate reuse in both under a calibration, or repaired by each halo, alone and with each share of
    the other tokens computed again: those that the question attends to most, and those that deviate most."""
    found = [Way("retrieved", "exact"), Way("cache-aware", "exact")]
    known, spec = engine.model.fingerprint, engine.model.spec
    if calibration is not None:
        return [*found, *(Way(order, "approximate", calibration, "calibrated") for order in ("retrieved", "cache-aware"))]
    if known is None or spec is None or engine.model.unrotated is None:
        return found
    for halo in halos:
        steps = ((halo, spec.layers),)
        made = Calibration(known.whole, spec.layers, steps, max(8, 2 * halo), kl=10.0, tail=16, watch_one_in=1 << 30)
        found.append(Way("retrieved", "approximate", made, f"halo {halo}"))
        for by, share in product(("question", "deviation"), shares if engine.model.stepped else ()):
            found.append(Way("retrieved", "approximate", replace(made, share=share, share_by=by), f"halo {halo}, {share:g} by {by}"))
    return found


def _normal(text: str) -> str:
    return " ".join(re.findall(r"\w+", re.sub(r"\b(a|an|the)\b", " ", text.lower())))


def f1(said: str, right: str) -> float:
    """Words in common, as SQuAD and HotpotQA count them."""
    ours, theirs = _normal(said).split(), _normal(right).split()
    same = sum((Counter(ours) & Counter(theirs)).values())
    return 2 * same / (len(ours) + len(theirs)) if same else 0.0
