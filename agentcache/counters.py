"""Counts of one engine's requests, by family and label: each is added once, from the receipt it ended with. Knows no server and no text.

    requests   by finish reason, "filled" (warmed, pinned) or "failed"       refusals   by reason: ranges of tokens that were not reused
    tokens     computed, memory, disk, segment: of prompts; completion       ttft_s, token_s   times in seconds, as histograms

A histogram counts values up to each bound, without those of the bounds below it, and their "sum".
"""

from __future__ import annotations

import math
import threading
from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

from .namespace_lru import Covering, NamespaceLRU
from .receipt import Receipt

BOUNDS: Mapping[str, Sequence[float]] = {
    "ttft_s": (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 120.0, math.inf),
    "token_s": (0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, math.inf),
    "watch_kl": (1e-5, 1e-4, 1e-3, 1e-2, 0.1, 1.0, math.inf),
}
COUNTED = ("cached_tokens", "disk_tokens", "segment_tokens", "computed_tokens", "completion_tokens", "ttft_ms", "decode_ms")
NAMESPACES = 1024  # with counts of their own; those that were silent longest lose theirs, and stay in the sums
Stats = dict[str, dict[str, float]]


def observed(family: str, value: float) -> Counter[tuple[str, str]]:
    """The counts of one value in a histogram."""
    bounds = BOUNDS[family]
    return Counter({(family, f"{bounds[bisect_left(bounds, value)]:g}"): 1, (family, "sum"): value})  # type: ignore[dict-item]


def of_receipt(receipt: Receipt, end: str) -> Counter[tuple[str, str]]:
    """The counts of one request. end: the reason of its end, on the device."""
    memory = max(0, receipt.cached_tokens - receipt.disk_tokens - receipt.segment_tokens)
    found = {"computed": receipt.computed_tokens, "memory": memory, "disk": receipt.disk_tokens, "segment": receipt.segment_tokens}
    counts = Counter({("tokens", name): tokens for name, tokens in (found | {"completion": receipt.completion_tokens}).items()})
    counts["requests", end] = 1
    counts.update(("refusals", str(refusal.reason)) for refusal in receipt.refusals)
    if receipt.completion_tokens:
        counts += observed("ttft_s", receipt.ttft_ms / 1e3)
    if receipt.completion_tokens > 1:
        counts += observed("token_s", receipt.decode_ms / 1e3 / (receipt.completion_tokens - 1))
    return counts


def by_family(counts: Iterable[tuple[tuple[str, str], float]]) -> Stats:
    """Counts as one table per family."""
    out: Stats = {}
    for (family, label), count in counts:
        out.setdefault(family, {})[label] = count
    return out


class Counters:
    """Sums over requests. ended: receipts to be added, which the device's thread appends. Thread safe."""

    def __init__(self, ended: deque[tuple[Receipt, str]]) -> None:
        self._ended, self._lock = ended, threading.Lock()
        self._all: Counter[tuple[str, str]] = Counter()
        self._own: NamespaceLRU[str, Counter[tuple[str, str]]] = NamespaceLRU(NAMESPACES)

    def add(self) -> None:
        """Add the receipts that wait."""
        with self._lock:
            while self._ended:
                receipt, end = self._ended.popleft()
                counts = of_receipt(receipt, end)
                self._all.update(counts)
                self._own.put(receipt.namespace, "", (self._own.get(receipt.namespace, "") or Counter()) + counts)

    def stats(self, namespace: str | None) -> Stats:
        """All counts, or those of one namespace."""
        self.add()
        with self._lock:
            return by_family(sorted((self._all if namespace is None else self._own.get(namespace, "") or Counter()).items()))

    def forget(self, deletion: Covering) -> None:
        """Forget the counts of a namespace of which something was deleted on purpose; sums over all of them stay."""
        self.add()
        self._own.forget(deletion)


class AnswerCounts(Counters):
    """The same of answers that it is told of, as callbacks of frameworks hear of them."""

    def __init__(self) -> None:
        super().__init__(deque())

    def count(self, account: Mapping[str, Any]) -> None:
        """Count one answer: its receipt as plain values."""
        refusals = [SimpleNamespace(reason=one["reason"]) for one in account.get("refusals", ())]
        told: Any = SimpleNamespace(**{**dict.fromkeys(COUNTED, 0), "namespace": "default", **account, "refusals": refusals})
        self._ended.append((told, account.get("finish_reason") or "failed"))
