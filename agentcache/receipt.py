"""The account of one request: what was reused, what was computed, why, and what it cost. Knows nothing of how it was done.

Buckets are inclusive: prompt_tokens = cached_tokens + computed_tokens; copied_tokens (slots copied by branching a shared page) lie inside
cached_tokens, and so do segment_tokens (taken from other positions, by consent: `segments` says which) and disk_tokens (read from disk for
this request, disk_bytes of it); halo_tokens (of segments, computed again) lie inside computed_tokens; spliced_tokens (the model's own ids
put back) lie anywhere in the prompt. missed: why the prompt did not go on from the one before it in its conversation, if it did not.
moves: what became of text that was declared volatile; ephemeral_tokens, the last ones of the prompt, and repeated_tokens, the completion
behind them, are its price: what comes next computes them again, or does without. reasoning_tokens lie inside completion_tokens: those that
spell the thought before the answer, if there is one. Times are milliseconds on a monotonic clock, read after
the device has finished, one behind the other: layout_ms, load_ms until the pages are there (from disk, or from another process), queue_ms
until the device takes the request, match_ms, prefill_ms; their sum is ttft_ms, from the call to the first token. decode_ms goes from the
first token to the last.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from .types import FinishReason, Grade, Missed, Move, Refusal, Segment, Span


@dataclass(slots=True)
class Receipt:
    """What one request cost and saved. bitwise: these bits equal those of reuse off. JSON-able by `as_dict`."""

    namespace: str = "default"
    model: str = ""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    computed_tokens: int = 0
    segment_tokens: int = 0
    halo_tokens: int = 0
    copied_tokens: int = 0
    spliced_tokens: int = 0
    ephemeral_tokens: int = 0
    repeated_tokens: int = 0
    disk_tokens: int = 0
    disk_bytes: int = 0
    completion_tokens: int = 0
    reasoning_tokens: int = 0
    exact_until: int = 0
    bitwise: bool = False
    precision: Grade = "exact"
    path: str = ""
    refusals: tuple[Refusal, ...] = ()
    differences: tuple[str, ...] = ()
    spans: tuple[Span, ...] = ()
    moves: tuple[Move, ...] = ()
    segments: tuple[Segment, ...] = ()
    missed: Missed | None = None
    finish_reason: FinishReason | None = None
    layout_ms: float = 0.0
    load_ms: float = 0.0
    queue_ms: float = 0.0
    match_ms: float = 0.0
    prefill_ms: float = 0.0
    ttft_ms: float = 0.0
    decode_ms: float = 0.0
    saved_ms: float = 0.0
    saved_flops: float = 0.0
    redacted: bool = False
    notes: list[str] = field(default_factory=list)

    def clear(self) -> None:
        """Open the account of the prompt's tokens again: nothing of them is cached or computed yet. What the layout said of them stays."""
        self.cached_tokens = self.computed_tokens = self.segment_tokens = self.halo_tokens = self.copied_tokens = 0
        self.disk_tokens = self.disk_bytes = self.exact_until = 0
        self.load_ms = self.queue_ms = self.match_ms = 0.0
        self.refusals, self.segments, self.precision, self.bitwise = (), (), "exact", False

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON values; refusals and spans as objects. No text of prompt or completion is in it; redacted, not even names of tools."""
        plain = asdict(self)
        if self.redacted and self.differences:
            plain["differences"] = [f"{len(self.differences)} differences from the stock prompt (redacted)"]
        if self.redacted and self.missed is not None:
            plain["missed"] |= {"writer": "(redacted)", "fix": "(redacted)"}  # both may name a tool
        for refusal in plain["refusals"]:
            refusal["reason"] = str(refusal["reason"])
        return {key: list(value) if isinstance(value, tuple) else value for key, value in plain.items()}

    @property
    def usage(self) -> dict[str, Any]:
        """Token counts in OpenAI's shape."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
            "completion_tokens_details": {"reasoning_tokens": self.reasoning_tokens},
        }

    def __str__(self) -> str:
        why = "; ".join(f"{r.reason} [{r.start}, {r.stop}) {r.detail}".rstrip() for r in self.refusals)
        return (
            f"{self.prompt_tokens} prompt tokens = {self.cached_tokens} cached + {self.computed_tokens} computed ({why}); "
            f"{self.completion_tokens} completion tokens; first token after {self.ttft_ms:.0f} ms, decode {self.decode_ms:.0f} ms"
        )
