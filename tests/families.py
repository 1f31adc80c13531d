"""Packed forwards for tests, one call each: run ids through a model in chosen chunks, packs and branches, and compare bits."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from agentcache import kv
from agentcache.kv import PAGE_TOKENS
from agentcache.model.attention import Part
from agentcache.model.hf import HFModel

# every dense family and shape that is paged: (name in tests.models, overrides)
DENSE: dict[str, tuple[str, dict[str, Any]]] = {
    "llama_mha": ("llama_mha", {}),
    "llama_gqa": ("llama", {}),
    "llama_mqa": ("llama_mqa", {}),
    "llama_bias": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {}),
    "qwen2_window": ("qwen2", {"use_sliding_window": True, "sliding_window": 96, "max_window_layers": 1}),
    "mistral": ("mistral", {}),
    "mistral_window": ("mistral_window", {"sliding_window": 96}),
    "phi3": ("phi3", {}),
    "granite": ("granite", {}),
    "olmo2": ("olmo2", {}),
    "smollm3": ("smollm3", {}),
}
STEPPED = [name for name in DENSE if name.split("_")[0] in ("llama", "qwen2", "qwen3", "mistral")]


def tokens(count: int, seed: int = 0, vocab: int = 600) -> list[int]:
    """Random ids that two calls make alike."""
    return torch.randint(0, vocab, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


class Run:
    """One sequence on its way through a model: ids so far, its pages, and the logits of every row that was run."""

    def __init__(self, model: HFModel, ids: Iterable[int] = (), regime: str | None = None) -> None:
        assert model.spec is not None
        self.model = model
        self.ids = list(ids)
        self.sequence = kv.Sequence(model.spec)
        self.regime = regime if regime is not None else model.regime(len(self.ids)) or ""
        self.logits: dict[int, torch.Tensor] = {}

    @property
    def rest(self) -> int:
        """Tokens not run yet."""
        return len(self.ids) - self.sequence.length

    def chunks(self, *sizes: int) -> Run:
        """Run the rest in chunks of these sizes; what they leave over goes last, in pieces of at most 512."""
        for size in sizes:
            if self.rest > 0:
                pack((self, min(size, self.rest)))
        while self.rest > 0:
            pack((self, min(512, self.rest)))
        return self

    def branch(self, length: int, ids: Iterable[int] | None = None) -> Run:
        """Another sequence that starts from this one's pages up to `length`."""
        other = Run(self.model, self.ids if ids is None else ids, self.regime)
        if length:
            other.sequence.attach(self.sequence.pages[: -(-length // PAGE_TOKENS)], length)
        return other

    def layer(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of one layer, [tokens, kv_heads, head_dim]."""
        return self.sequence.read(layer)

    def close(self) -> None:
        """Give the last page up, so that another may append to it."""
        self.sequence.close()


def pack(*members: tuple[Run, int], last: bool = False) -> None:
    """One forward over the next `count` tokens of each member; the logits of every row are kept, or of each member's last one."""
    model = members[0][0].model
    parts, regimes, ids = [], [], []
    for run, count in members:
        start = run.sequence.length
        run.sequence.reserve(count)
        parts.append(Part(run.sequence, start, count, len(ids)))
        regimes.append(run.regime)
        ids += run.ids[start : start + count]
    wanted = [row for part in parts for row in range(part.offset + (part.count - 1 if last else 0), part.offset + part.count)]
    logits = dict(zip(wanted, model.forward(torch.tensor(ids), parts, regimes, wanted), strict=True))
    for (run, count), part in zip(members, parts, strict=True):
        part.sequence.advance(count)
        for row in range(count):
            if part.offset + row in logits:
                run.logits[part.start + row] = logits[part.offset + row]


def differing(one: Run, other: Run, upto: int | None = None) -> list[str]:
    """Where two runs of the same ids differ in their bits: layers' keys or values, or the logits both have."""
    upto = min(one.sequence.length, other.sequence.length) if upto is None else upto
    assert upto > 0
    assert one.ids[:upto] == other.ids[:upto]
    found = []
    for layer in range(one.sequence.spec.layers):
        for name, a, b in zip(("keys", "values"), one.sequence.read(layer, 0, upto), other.sequence.read(layer, 0, upto), strict=True):
            if not torch.equal(a, b):
                first = int((a != b).flatten(1).any(1).nonzero()[0])
                found.append(f"{name} of layer {layer} from position {first}")
    for at in sorted(set(one.logits) & set(other.logits)):
        if not torch.equal(one.logits[at], other.logits[at]):
            found.append(f"logits of position {at}")
    return found[:8]


def greedy(model: Any, ids: Sequence[int], count: int) -> list[int]:
    """What transformers' own generate appends to ids."""
    given = torch.tensor([list(ids)])
    with torch.inference_mode():
        out = model.generate(
            given, attention_mask=torch.ones_like(given), do_sample=False, max_new_tokens=count, min_new_tokens=count, pad_token_id=0
        )
    return out[0, len(ids) :].tolist()


def stock_logits(model: Any, ids: Sequence[int]) -> torch.Tensor:
    """Logits of all positions by transformers' own forward, [tokens, vocab] in fp32."""
    with torch.inference_mode():
        return model(input_ids=torch.tensor([list(ids)]), use_cache=False).logits[0].float()
