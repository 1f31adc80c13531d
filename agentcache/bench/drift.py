"""What storing pages with fewer bits does to a model's answers: measured on given tokens, against the exact pages. Times nothing."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import torch

from ..kv import PAGE_TOKENS, Page, Sequence
from ..model.hf import HFModel
from ..runner import Runner, Work
from ..store import lossy


@dataclass(frozen=True, slots=True)
class Drift:
    """Of the next token's distribution behind lossy pages, over `tokens` places: KL(exact ‖ lossy) in nats, and how often both agree."""

    tokens: int
    mean_kl: float
    most_kl: float
    top1_agreement: float


def lossy_copy(page: Page, precision: str) -> Page:
    """The page as it comes back from a store of that precision."""
    found = page.copy(page.filled)
    for layer in range(page.spec.layers):
        keys, values = page.layer_keys[layer][..., : page.filled], page.layer_values[layer][:, : page.filled]
        parts = lossy.quantise(keys, values, precision)
        lossy.dequantise(parts, precision, found.layer_keys[layer][..., : page.filled], found.layer_values[layer][:, : page.filled])
    return found


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
        logs = torch.log_softmax(one.double(), -1), torch.log_softmax(other.double(), -1)
        kl.append(float((logs[0].exp() * (logs[0] - logs[1])).sum()))
        agree += int(one.argmax() == other.argmax())
    exact.close()
    near.close()
    return Drift(len(tail), sum(kl) / len(kl), max(kl), agree / len(tail))
