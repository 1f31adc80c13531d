"""Choosing the next token, with transformers' own logits processors, and turning tokens into text. Knows nothing of KV or requests."""

from __future__ import annotations

import bisect
import math
from collections.abc import Sequence
from typing import Any

import torch
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from ..errors import ConfigError
from ..types import Logprob, Sampling

COLDEST = 1e-5  # a temperature below it is greedy: logits divided by less would overflow
UNFINISHED = "\ufffd"  # what a decoder shows for bytes that are no whole character yet


def forced_ids(sampling: Sampling, tokenizer: Any, vocab: int) -> Sequence[int]:
    """The ids of `forced`, a text or ids already; ConfigError for ids that the model has not."""
    if isinstance(sampling.forced, str):
        return tokenizer(sampling.forced, add_special_tokens=False)["input_ids"]  # type: ignore[no-any-return]
    if any(not 0 <= token < vocab for token in sampling.forced):
        raise ConfigError(f"forced={sampling.forced!r}: ids must lie in [0, {vocab})")
    return sampling.forced


class Sampler:
    """Next tokens for one request, in the order in which `generate` applies its processors. Reproducible by seed, whatever the packing."""

    def __init__(self, sampling: Sampling, device: torch.device) -> None:
        self._greedy = sampling.temperature < COLDEST
        self._generator: torch.Generator | None = None
        self._penalised = sampling.repetition_penalty != 1.0
        self._seen: set[int] = set()
        self._looked = 0
        steps: list[Any] = [RepetitionPenaltyLogitsProcessor(float(sampling.repetition_penalty))] if self._penalised else []
        if not self._greedy:
            self._generator = torch.Generator(device=device)
            if sampling.seed is None:
                self._generator.seed()
            else:
                self._generator.manual_seed(sampling.seed)
            if sampling.temperature != 1.0:
                steps.append(TemperatureLogitsWarper(float(sampling.temperature)))
            if sampling.top_k > 0:
                steps.append(TopKLogitsWarper(sampling.top_k))
            if sampling.top_p < 1.0:
                steps.append(TopPLogitsWarper(float(sampling.top_p)))
            if sampling.min_p:
                steps.append(MinPLogitsWarper(float(sampling.min_p)))
        self._steps = LogitsProcessorList(steps)

    def gap(self, logits: torch.Tensor, ids: list[int]) -> float:
        """Nats by which the greedy choice is ahead of the next best; infinite where chance decides."""
        if not self._greedy or len(logits) < 2:
            return math.inf
        first, second = self._processed(logits, ids).topk(2).values.tolist()
        return float(first - second)

    def _processed(self, logits: torch.Tensor, ids: list[int]) -> torch.Tensor:
        return self._steps(self._known(ids, logits.device), logits[None])[0] if self._steps else logits

    def __call__(self, logits: torch.Tensor, ids: list[int]) -> int:
        """The next id from logits [vocab] (fp32) after all ids so far: `ids` must be the list of the last call, grown."""
        logits = self._processed(logits, ids)
        if self._greedy:
            return int(logits.argmax())
        return int(torch.multinomial(torch.softmax(logits, -1), 1, generator=self._generator))

    def _known(self, ids: list[int], device: torch.device) -> torch.Tensor:
        """The ids [1, count] that a penalty looks at, each once: it penalises a repeated id no more."""
        if not self._penalised:
            return torch.empty(1, 0, dtype=torch.long, device=device)
        self._seen.update(ids[self._looked :])
        self._looked = len(ids)
        return torch.tensor([sorted(self._seen)], device=device)


def logprob_of(logits: torch.Tensor, token: int, top: int) -> Logprob:
    """How likely `token` was under logits [vocab], and the `top` likeliest."""
    logs = logits.float().log_softmax(-1)
    best = logs.topk(min(top, len(logs)))
    return Logprob(token, float(logs[token]), tuple(zip(best.indices.tolist(), best.values.tolist())))


class TextStream:
    """Text of a growing completion: whole characters only, held back where a stop string may be starting, cut where one begins.

    With several stop strings the one that is complete first counts, so that the text does not depend on where tokens end.
    """

    def __init__(self, tokenizer: Any, stop: tuple[str, ...], hidden: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self._stop = stop
        self._hidden = hidden
        self._ids: list[int] = []
        self._ends: list[int] = []  # length of the text after each pushed id
        self._from = self._read = 0  # ids [_from, _read) are the left context in which those after are decoded
        self.text = ""
        self._sent = 0
        self.stopped = ""  # the stop string that ended the text

    def push(self, token: int) -> str:
        """Add one id; returns the text that has become certain."""
        if self.stopped:
            return ""
        if token not in self._hidden:
            self._ids.append(token)
            self.text += self._fresh()
        self._ends.append(len(self.text))
        return self._release(final=False) if token not in self._hidden else ""

    def finish(self) -> str:
        """The rest of the text, incomplete characters included."""
        if not self.stopped:
            whole = self._decode(0, len(self._ids))
            if whole.startswith(self.text):
                self.text = whole
        return self._release(final=True)

    @property
    def spelled(self) -> int | None:
        """How many of the pushed ids spell exactly `text`; None if a stop string cut inside one."""
        if not self.stopped:
            return len(self._ends)
        if not self.text:
            return 0
        return next((count for count, end in enumerate(self._ends, 1) if end == len(self.text)), None)

    def tokens_of(self, chars: int) -> int:
        """How many of the pushed ids it takes to spell the first `chars` characters."""
        return min(bisect.bisect_left(self._ends, chars) + 1, len(self._ends)) if chars else 0

    def _decode(self, start: int, stop: int) -> str:
        if start == stop:
            return ""
        text = self._tokenizer.decode(self._ids[start:stop], skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return str(text)

    def _fresh(self) -> str:
        """The text that the last ids add. They are decoded with a few ids before them: some decoders drop a space at the very start."""
        before, whole = self._decode(self._from, self._read), self._decode(self._from, len(self._ids))
        if whole.endswith(UNFINISHED) or len(whole) <= len(before):
            return ""
        self._from, self._read = self._read, len(self._ids)
        return whole[len(before) :]

    def _release(self, final: bool) -> str:
        if self.stopped:
            return ""
        found = [(at + len(stop), at, stop) for stop in self._stop if (at := self.text.find(stop, self._sent)) >= 0]
        if found:
            _, at, self.stopped = min(found)
            self.text = self.text[:at]
        held = 0 if final or self.stopped else self._maybe_stop()
        ready = self.text[self._sent : len(self.text) - held]
        self._sent += len(ready)
        return ready

    def _maybe_stop(self) -> int:
        """Length of the longest end of the text that begins a stop string."""
        longest = 0
        for stop in self._stop:
            for size in range(min(len(stop) - 1, len(self.text) - self._sent), longest, -1):
                if self.text.endswith(stop[:size]):
                    longest = size
                    break
        return longest
