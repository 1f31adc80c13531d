"""Recorded requests asked again, without reuse and with all the reuse that is allowed, and the answers compared. Prints nothing.

off         the reference: everything is computed
exact       its tokens, and its bits where a receipt promises them; asked twice, so that every prompt is found cached once
lossy       its calls, where the store keeps pages with fewer bits
segments    its calls, and on average the bounds of the calibration, where one is given

Distributions are compared up to the first token that differs: until then both follow the same text.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import islice
from statistics import fmean
from typing import Any
from uuid import uuid4

import torch

from .calibration import Calibration
from .divergence import divergence
from .engine import Engine
from .errors import AgentCacheError, ConfigError, shown
from .layout.tokenise import common_length
from .lint.provider_formats import ProviderFormats
from .lint.sources import open_values
from .lint.templated import openai_tool, plain_message
from .lint.values import Request
from .matching import fingerprint_of
from .page import Page
from .page_check import CLOSE, alike
from .store.keys import Scope, as_ids
from .stream import Completion
from .types import PAGE_TOKENS, Reason, Reuse, Sampling

LEFT_OUT = 20  # reasons told of requests that are left out; further ones are counted
WRONG = (Reason.BAD_BLOB, Reason.NON_FINITE)  # refusals of cached pages that are not what was computed


@dataclass(frozen=True, slots=True)
class Difference:
    """The first answer that reuse changed."""

    request: int  # its number in the source
    line: int
    conversation: str | None
    way: str  # "off", "exact", "lossy" or "segments"
    reason: str  # "ids", "bits", "calls", "recorded", "kl", "top1", "error", or the reason of a refused page
    detail: str
    page: int | None = None  # the first cached page that is not what computing it gives
    token: int | None = None  # of the prompt, the first wrong one there
    span: str | None = None  # the kind of the span that holds it


@dataclass(slots=True)
class Outcome:
    """The result of one replay."""

    requests: int = 0  # compared
    left_out: int = 0
    why_left_out: list[str] = field(default_factory=list)
    ways: tuple[str, ...] = ()
    bitwise: int = 0  # answers compared bit by bit
    calls: int = 0  # answers of the reference that hold tool calls
    prompt_tokens: int = 0  # of all answers with reuse
    cached_tokens: int = 0
    kl: float | None = None  # mean of answers after segments, nats per token
    top1: float | None = None  # share of their first choices that are equal
    difference: Difference | None = None


@dataclass(frozen=True, slots=True)
class _Answer:
    completion: Completion
    logits: list[torch.Tensor]

    @property
    def calls(self) -> list[list[Any]]:
        return [[call.name, call.arguments] for call in self.completion.message.tool_calls]


def read(source: str, transcripts: bool, limit: int) -> tuple[list[Request], list[str]]:
    """The first requests of a source, as `agentcache lint` reads them, and what of it cannot be read. ConfigError: there are none."""
    problems: list[str] = []

    def note(line: int, said: str, *values: object) -> None:
        problems.append(f"line {line}: {said % tuple(map(shown, values)) if values else said}")

    found = list(islice(ProviderFormats(transcripts).read(open_values(source, note), note), limit))
    if not found:
        raise ConfigError(f"{source!r} has no request that can be read ({'; '.join(problems[:3]) or 'it is empty'})")
    return found, problems


class Replay:
    """Asks one engine each request in every way. recorded: hold the reference's calls against the recorded ones, too."""

    def __init__(
        self,
        engine: Engine,
        calibration: Calibration | None = None,
        *,
        namespace: str = "default",
        adapter: str | None = None,
        tokens: int = 128,
        recorded: bool = False,
    ) -> None:
        self.engine, self.namespace, self.adapter, self._recorded = engine, namespace, adapter, recorded
        self._sampling, self._calibration = Sampling(max_tokens=tokens), calibration
        disk = engine.store.disk
        near: dict[str, Reuse | Calibration] = {} if calibration is None else {"segments": calibration}
        # the least exact first: each finds what earlier requests left, and not the exact pages of this one
        self._ways = near | ({"lossy": "lossy"} if disk and disk.precision != "exact" else {}) | {"exact": "exact", "exact again": "exact"}
        self._near: list[tuple[float, float, Request]] = []  # KL, share of equal first choices

    def run(self, requests: Sequence[Request], tell: Callable[[int], None] = lambda done: None) -> Outcome:
        """Compare them in their order, up to the first difference. tell: hears how many are done."""
        out = Outcome(ways=tuple(dict.fromkeys(way.removesuffix(" again") for way in self._ways)))
        for done, request in enumerate(requests):
            tell(done)
            out.difference = self._compare(request, out)
            if out.difference is not None:
                break
        if self._near:
            out.kl, out.top1 = fmean(one[0] for one in self._near), fmean(one[1] for one in self._near)
            out.difference = out.difference or self._beyond(out.kl, out.top1)
        return out

    def _compare(self, request: Request, out: Outcome) -> Difference | None:
        """Ask one request in every way; the first difference."""
        try:
            asked = request.prompt if request.prompt is not None else [plain_message(said) for said in (*request.system, *request.history)]
            tools = [openai_tool(json.loads(tool.text)) for tool in request.tools]
            off = self._ask(asked, tools, "off")
        except AgentCacheError as error:  # beyond the context, or refused by the chat template: with reuse as without
            out.left_out += 1
            out.why_left_out += [f"request {request.number}: {error}"] if len(out.why_left_out) < LEFT_OUT else []
            return None
        out.requests += 1
        out.calls += bool(off.calls)
        if self._recorded and request.answer is not None and off.calls != (said := _recorded(request)):
            return _difference(request, "off", "recorded", f"calls {shown(off.calls)} instead of the recorded {shown(said)}")
        for name, reuse in self._ways.items():
            way = name.removesuffix(" again")
            try:
                answer = self._ask(asked, tools, reuse)
            except AgentCacheError as error:
                return _difference(request, way, "error", f"{type(error).__name__}: {error}")
            out.prompt_tokens += answer.completion.receipt.prompt_tokens
            out.cached_tokens += answer.completion.receipt.cached_tokens
            if (why := self._why(request, off, answer, out)) is not None:
                exact = answer.completion.receipt.precision == "exact"
                return _difference(request, way, *why, **(self._place(asked, tools, answer) if exact else {}))
        return None

    def _ask(self, asked: Any, tools: Any, reuse: Reuse | Calibration) -> _Answer:
        rows: list[torch.Tensor] = []
        done = self.engine.generate(
            asked, tools, sampling=self._sampling, namespace=self.namespace, adapter=self.adapter, reuse=reuse,
            on_logits=lambda row: rows.append(row.clone()),
        )  # fmt: skip
        return _Answer(done, rows)

    def _why(self, request: Request, off: _Answer, answer: _Answer, out: Outcome) -> tuple[str, str] | None:
        """Reason and detail of a difference, None if there is none."""
        receipt, ids, wanted = answer.completion.receipt, answer.completion.ids, off.completion.ids
        equal = common_length(ids, wanted)
        if receipt.precision != "exact":
            if receipt.segments:
                pairs = list(zip(off.logits, answer.logits, strict=False))[: equal + 1]
                self._near.append((fmean(divergence(*pair) for pair in pairs), fmean(a.argmax() == b.argmax() for a, b in pairs), request))
            return None if answer.calls == off.calls else ("calls", f"{shown(answer.calls)} instead of {shown(off.calls)}")
        for refusal in receipt.refusals:
            if refusal.reason in WRONG:
                return str(refusal.reason), refusal.detail or refusal.reason.words
        if ids != wanted:
            return "ids", f"token {equal} of the answer is {[*ids, None][equal]!r} instead of {[*wanted, None][equal]!r}"
        if receipt.bitwise and off.completion.receipt.bitwise:
            out.bitwise += 1
            for at, (a, b) in enumerate(zip(answer.logits, off.logits, strict=True)):
                if not torch.equal(a, b):
                    return "bits", f"the logits of token {at} of the answer differ by up to {float((a - b).abs().max()):.3g}"
        return None

    def _place(self, asked: Any, tools: Any, answer: _Answer) -> dict[str, Any]:
        """The first cached page of a prompt that differs from a computed one, which a namespace of its own gets for that."""
        engine, receipt, scratch = self.engine, answer.completion.receipt, f"replay {uuid4().hex}"
        with suppress(AgentCacheError):
            layout = engine.renderer.render(asked, tools, namespace=self.namespace)
            ids, regime = as_ids(layout.ids), engine.model.regime(len(layout.ids))
            if regime is None or engine.fingerprint is None:
                return {}
            try:
                engine.generate(asked, tools, sampling=Sampling(max_tokens=1), namespace=scratch, adapter=self.adapter)
                acting = next((one for one in engine.model.adapters.values() if one.name == self.adapter), None)
                scopes = (Scope(name, fingerprint_of(engine.fingerprint.whole, acting), regime) for name in (scratch, self.namespace))
                own, kept = (engine.store.match(scope, ids) for scope in scopes)
                for number, (right, page) in enumerate(zip(own.pages, kept.pages, strict=False)):
                    filled = min(kept.tokens - number * PAGE_TOKENS, PAGE_TOKENS)
                    if not alike(right, page, filled, 0 if receipt.bitwise else CLOSE):
                        token = number * PAGE_TOKENS + (_first(right, page, filled) if receipt.bitwise else 0)
                        span = next((span.kind for span in receipt.spans if span.start <= token < span.stop), None)
                        return {"page": number, "token": token, "span": span}
            finally:
                engine.forget(namespace=scratch)
        return {}

    def _beyond(self, kl: float, top1: float) -> Difference | None:
        """A mean beyond the calibration's bounds, at the request that is farthest."""
        bound = self._calibration
        assert bound is not None
        if kl > bound.kl:
            worst = max(self._near, key=lambda one: one[0])
            return _difference(
                worst[2], "segments", "kl", f"mean KL {kl:.3g} nats per token, calibrated {bound.kl:.3g}; here {worst[0]:.3g}"
            )
        if top1 < bound.top1:
            worst = min(self._near, key=lambda one: one[1])
            return _difference(
                worst[2], "segments", "top1", f"{top1:.3f} equal first choices, calibrated {bound.top1:.3f}; here {worst[1]:.3f}"
            )
        return None


def _first(right: Page, page: Page, tokens: int) -> int:
    """The first token at which the keys or values of two pages differ; 0 if only checkpoints do."""
    differs = torch.zeros(tokens, dtype=torch.bool, device=right.blocks[0][0].device)
    for (keys, values), (other_keys, other_values) in zip(right.blocks, page.blocks, strict=True):
        differs |= (keys[..., :tokens] != other_keys[..., :tokens]).flatten(0, -2).any(0)
        differs |= (values[..., :tokens, :] != other_values[..., :tokens, :]).any(-1).flatten(0, -2).any(0)
    return int(differs.int().argmax())


def _difference(request: Request, way: str, reason: str, detail: str, **place: Any) -> Difference:
    return Difference(request.number, request.line, request.track, way, reason, detail, **place)


def _recorded(request: Request) -> list[list[Any]]:
    assert request.answer is not None
    return [[call.name, _parsed(call.arguments)] for call in request.answer.calls]


def _parsed(arguments: str) -> Any:
    try:
        return json.loads(arguments)
    except ValueError:
        return arguments
