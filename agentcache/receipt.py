"""The receipt of one request, and its account. Knows nothing of how tokens are reused or computed.

The rest of the engine tells an `Account` facts, and only the account writes the receipt. Token counts are inclusive:

    prompt_tokens    = cached_tokens + computed_tokens
    cached_tokens    holds copied_tokens, disk_tokens, segment_tokens          computed_tokens    holds halo_tokens, resumed_tokens
    ttft_ms          = layout_ms + load_ms + queue_ms + match_ms + prefill_ms

Times are milliseconds on a monotonic clock, read after the device has finished.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Collection, Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

from .types import FinishReason, Grade, Layout, Missed, Move, Reason, Refusal, Segment, Span


@dataclass(frozen=True, slots=True)
class AttachedPart:
    """Prompt tokens [start, stop) that were attached, with the adapter that computed them."""

    start: int
    stop: int
    # its digest and name; "" of the base
    adapter: str
    name: str
    # only so many of the lowest layers are attached; None: all
    layers: int | None = None


@dataclass(slots=True)
class Receipt:
    """The cost and the savings of one request. JSON-able by `as_dict`."""

    # of its own
    id: str = ""
    # when its request came, by time.time()
    began: float = 0.0
    namespace: str = "default"
    # name of the model, as the engine was given it
    model: str = ""
    # "int8" if the engine quantized them; "" as the model brought them
    weights: str = ""
    # digest of the adapter; "" of the base
    adapter: str = ""
    prompt_tokens: int = 0
    # attached in all layers
    cached_tokens: int = 0
    # run through the model, in all layers or above one
    computed_tokens: int = 0
    # computed in the layers of the adapter only; the lowest `shared_layers` are attached
    resumed_tokens: int = 0
    shared_layers: int = 0
    # cached, and taken from other positions, by consent: `segments` says which
    segment_tokens: int = 0
    # computed again at the heads of segments
    halo_tokens: int = 0
    # slots of a shared page that branching it copied
    copied_tokens: int = 0
    # the model's own ids, put back in place of their text
    spliced_tokens: int = 0
    # the last tokens of the prompt, from the start of text for this request only: the next prompt does not share them
    ephemeral_tokens: int = 0
    # tokens of the completion after such text: the next prompt computes them again
    repeated_tokens: int = 0
    # cached, and read from disk for this request
    disk_tokens: int = 0
    disk_bytes: int = 0
    completion_tokens: int = 0
    # tokens of the completion that were guessed, and computed along with the one before
    drafted_tokens: int = 0
    # tokens of the completion that spell the thought before the answer
    reasoning_tokens: int = 0
    # tokens before it are exact
    exact_until: int = 0
    # whether the bits equal those of reuse off
    bitwise: bool = False
    # how near the keys and values are to computed ones
    precision: Grade = "exact"
    # how the layers are run: "stepped", "generic" or "stock"
    path: str = ""
    # ranges that were not reused, or not as well as they could be, and why
    refusals: tuple[Refusal, ...] = ()
    # in words, each difference between the prompt and the stock rendering
    differences: tuple[str, ...] = ()
    spans: tuple[Span, ...] = ()
    # what became of text that was declared volatile
    moves: tuple[Move, ...] = ()
    segments: tuple[Segment, ...] = ()
    # the attached tokens by the adapter that computed them, where the engine has adapters
    attached_parts: tuple[AttachedPart, ...] = ()
    # where asked for: digests of the experts that its tokens chose, by layer, and the share of them that is another without reuse
    routes: tuple[str, ...] = ()
    routes_changed: float | None = None
    # what the prompt is to its session: "exact" its last prompt again, "extend" after its answer, "diverge" another; "" it begins one
    resumed: str = ""
    # why the prompt did not go on from the one before it in its conversation, if it did not
    missed: Missed | None = None
    finish_reason: FinishReason | None = None
    layout_ms: float = 0.0
    # until the pages are there, from disk or from another process
    load_ms: float = 0.0
    # until the device takes the request
    queue_ms: float = 0.0
    match_ms: float = 0.0
    prefill_ms: float = 0.0
    # from the call to the first token
    ttft_ms: float = 0.0
    # from the first token to the last
    decode_ms: float = 0.0
    # what computing the cached tokens would have cost
    saved_ms: float = 0.0
    saved_flops: float = 0.0
    # whether `as_dict` leaves out names of tools
    redacted: bool = False
    notes: list[str] = field(default_factory=list)

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


class Account:
    """The only writer of one request's receipt. From one thread at a time; it reads the clock itself."""

    def __init__(self, receipt: Receipt, called: float) -> None:
        self.receipt = receipt
        self._called = called
        self._started = self._first = 0.0  # by time.perf_counter(): on the device, first token chosen

    @classmethod
    def open(
        cls, layout: Layout, namespace: str, model: str, called: float, redacted: bool = False, weights: str = "", adapter: str = ""
    ) -> Account:
        """Begin the account of a prompt that was rendered just now. called: when its request came, by time.perf_counter()."""
        receipt = Receipt(
            id=uuid.uuid4().hex,
            began=time.time(),
            namespace=namespace,
            model=model,
            weights=weights,
            adapter=adapter,
            prompt_tokens=len(layout.ids),
            spliced_tokens=layout.spliced_tokens,
            ephemeral_tokens=layout.ephemeral_tokens,
            moves=layout.moves,
            differences=layout.differences,
            spans=layout.spans,
            redacted=redacted,
        )
        receipt.layout_ms = (time.perf_counter() - called) * 1e3
        return cls(receipt, called)

    def reopen(self) -> None:
        """Begin the account of the prompt's tokens again: none is cached or computed yet. The facts about the layout stay."""
        receipt = self.receipt
        receipt.cached_tokens = receipt.computed_tokens = receipt.segment_tokens = receipt.halo_tokens = receipt.copied_tokens = 0
        receipt.disk_tokens = receipt.disk_bytes = receipt.exact_until = receipt.resumed_tokens = receipt.shared_layers = 0
        receipt.load_ms = receipt.queue_ms = receipt.match_ms = 0.0
        receipt.segments, receipt.attached_parts, receipt.precision, receipt.bitwise = (), (), "exact", False
        receipt.refusals = tuple(known for known in receipt.refusals if known.reason == Reason.POLICY)

    def record_note(self, note: str) -> None:
        """Add words for the caller."""
        self.receipt.notes.append(note)

    def record_resumed(self, word: str) -> None:
        """Say what the prompt is to its session."""
        self.receipt.resumed = word

    def record_refusals(self, refusals: Iterable[Refusal]) -> None:
        """Add reasons why something is not reused."""
        self.receipt.refusals += tuple(refusals)

    def retract(self, reasons: Collection[Reason]) -> None:
        """Take back refusals that hold no longer."""
        self.receipt.refusals = tuple(known for known in self.receipt.refusals if known.reason not in reasons)

    # -- the prompt ------------------------------------------------------------------------------------------------

    def record_prefetch(self, ms: float, bytes: int, refusals: Iterable[Refusal], notes: Iterable[str], tokens: int = 0) -> None:
        """Add pages that came from disk, or from another process. tokens: of the prompt's own prefix."""
        self.receipt.load_ms += ms
        self.receipt.disk_bytes += bytes
        self.receipt.disk_tokens += tokens
        self.record_refusals(refusals)
        self.receipt.notes += notes

    def record_start(self) -> None:
        """The device takes the request."""
        self._started = time.perf_counter()
        waited = (self._started - self._called) * 1e3
        self.receipt.queue_ms = max(0.0, waited - self.receipt.layout_ms - self.receipt.load_ms)

    def record_plan(self, path: str, cached_tokens: int, computed_tokens: int, resumed: tuple[int, int] = (0, 0)) -> None:
        """Say how the prompt is computed; once tokens are answered, its counts are final. resumed: tokens, and their attached layers."""
        self.receipt.path = path
        if not self.receipt.completion_tokens:
            self.receipt.cached_tokens, self.receipt.computed_tokens = cached_tokens, computed_tokens
            self.receipt.resumed_tokens, self.receipt.shared_layers = resumed

    def record_attached_parts(self, parts: Iterable[AttachedPart]) -> None:
        """Name the adapters that computed what is attached to the prompt."""
        if not self.receipt.completion_tokens:
            self.receipt.attached_parts = tuple(parts)

    def record_routes(self, digests: tuple[str, ...], changed: float) -> None:
        """Say which experts the tokens chose, and how many others without reuse."""
        self.receipt.routes, self.receipt.routes_changed = digests, changed

    def record_stock(self, tokens: int) -> None:
        """All of these tokens go through transformers' own cache."""
        self.receipt.path, self.receipt.bitwise = "stock", False
        self.receipt.computed_tokens = self.receipt.computed_tokens or tokens

    def record_grade(self, grade: Grade, bitwise: bool, refusals: Iterable[Refusal]) -> None:
        """Record how near to exact the state of the next token is; answered tokens stay as recorded."""
        receipt = self.receipt
        answered = receipt.completion_tokens > 0
        receipt.bitwise = bitwise and (receipt.bitwise or not answered)
        receipt.precision = receipt.precision if answered and receipt.precision != "exact" else grade
        self.record_refusals(refusals)

    def record_attached(self, refusals: Iterable[Refusal], cached_tokens: int, copied_tokens: int) -> None:
        """The prompt is attached; at most `cached_tokens` are what came from disk: a small memory may have dropped some again."""
        self.record_refusals(refusals)
        self.receipt.disk_tokens = min(self.receipt.disk_tokens, cached_tokens)
        self.receipt.copied_tokens = copied_tokens
        self.receipt.match_ms = (time.perf_counter() - self._started) * 1e3

    def record_forward(self, bitwise: bool, note: str = "") -> None:
        """A forward ran. bitwise: with the kernels of all before it. note: what else happened, told once."""
        self.receipt.bitwise = self.receipt.bitwise and bitwise
        if note and note not in self.receipt.notes:
            self.record_note(note)

    def record_recompute(self, refusals: Iterable[Refusal]) -> None:
        """Pages from disk are not used: the prompt is computed."""
        self.record_refusals(refusals)
        self.receipt.disk_tokens = 0

    # -- segments --------------------------------------------------------------------------------------------------

    def record_segments(self, segments: tuple[Segment, ...]) -> None:
        """These segments are attached."""
        self.receipt.segments = segments
        self.receipt.segment_tokens = sum(segment.whole_tokens for segment in segments)
        self.receipt.halo_tokens = sum(segment.halo_tokens for segment in segments)

    def record_refused_segment(self, segment: Segment, refusal: Refusal) -> None:
        """One of them is computed after all."""
        self.record_refusals([refusal])
        self.receipt.segments = tuple(other for other in self.receipt.segments if other != segment)
        self.receipt.halo_tokens -= segment.halo_tokens
        self.record_recomputed(segment.whole_tokens)

    def record_recomputed(self, tokens: int) -> None:
        """So many of a segment's tokens are computed after all."""
        self.receipt.segment_tokens -= tokens
        self.receipt.cached_tokens -= tokens
        self.receipt.computed_tokens += tokens

    def record_no_segments(self, prefix_tokens: int) -> None:
        """The prompt is computed after its exact prefix, of which at most all but the last token is cached."""
        receipt = self.receipt
        receipt.cached_tokens = min(prefix_tokens, receipt.prompt_tokens - 1)
        receipt.computed_tokens = receipt.prompt_tokens - receipt.cached_tokens
        self.record_segments(())

    # -- the completion --------------------------------------------------------------------------------------------

    def record_filled(self) -> None:
        """The prompt is computed."""
        self._first = time.perf_counter()
        self.receipt.prefill_ms = (self._first - self._started) * 1e3 - self.receipt.match_ms
        self.receipt.ttft_ms = (self._first - self._called) * 1e3

    def record_token(self) -> None:
        """A token is decoded."""
        if not self._first:
            self.record_filled()
        self.receipt.completion_tokens += 1
        self.receipt.decode_ms = (time.perf_counter() - self._first) * 1e3 if self.receipt.completion_tokens > 1 else 0.0

    def record_drafted(self) -> None:
        """A drafted token proved right."""
        self.receipt.drafted_tokens += 1

    def record_end(self, reason: FinishReason | None, exact_until: int | None) -> None:
        """The request is answered, or ended otherwise. exact_until: of its sequence, None where it has none."""
        if not self._first and reason in ("stop", "length"):  # an answer without tokens
            self.record_filled()
        self.receipt.finish_reason = reason or self.receipt.finish_reason
        self.receipt.exact_until = self.receipt.exact_until if exact_until is None else exact_until

    def record_message(self, reasoning_tokens: int, calls: bool) -> None:
        """The completion is read. calls: it holds whole tool calls."""
        self.receipt.reasoning_tokens = reasoning_tokens
        if calls and self.receipt.finish_reason == "stop":
            self.receipt.finish_reason = "tool_calls"

    def record_saving(self, ms: float, flops: float, repeated_tokens: int, missed: Missed | None) -> None:
        """Say what reuse saved, and what the next prompt computes again."""
        self.receipt.saved_ms, self.receipt.saved_flops = ms, flops
        self.receipt.repeated_tokens, self.receipt.missed = repeated_tokens, missed
