"""Choosing the next token, with transformers' own logits processors, and turning tokens into text. Knows nothing of KV or requests."""

from __future__ import annotations

from typing import Any

import torch
from tokenizers.decoders import DecodeStream
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from ..types import Sampling


class Sampler:
    """Next tokens for one request, in the order in which `generate` applies its processors. Reproducible by seed, whatever the packing."""

    def __init__(self, sampling: Sampling, device: torch.device) -> None:
        self._greedy = sampling.temperature == 0.0
        self._generator = torch.Generator(device=device)
        if sampling.seed is None:
            self._generator.seed()
        else:
            self._generator.manual_seed(sampling.seed)
        steps: list[Any] = []
        if sampling.repetition_penalty != 1.0:
            steps.append(RepetitionPenaltyLogitsProcessor(sampling.repetition_penalty))
        if not self._greedy:
            if sampling.temperature != 1.0:
                steps.append(TemperatureLogitsWarper(sampling.temperature))
            if sampling.top_k:
                steps.append(TopKLogitsWarper(sampling.top_k))
            if sampling.top_p < 1.0:
                steps.append(TopPLogitsWarper(sampling.top_p))
            if sampling.min_p:
                steps.append(MinPLogitsWarper(sampling.min_p))
        self._steps = LogitsProcessorList(steps)

    def __call__(self, logits: torch.Tensor, ids: list[int]) -> int:
        """The next id from logits [vocab] (fp32) behind all ids so far."""
        if self._steps:
            logits = self._steps(torch.tensor([ids], device=logits.device), logits[None])[0]
        if self._greedy:
            return int(logits.argmax())
        return int(torch.multinomial(torch.softmax(logits, -1), 1, generator=self._generator))


class TextStream:
    """Text of a growing completion: whole characters only, held back where a stop string may be starting, cut where one begins."""

    def __init__(self, tokenizer: Any, stop: tuple[str, ...], hidden: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self._stop = stop
        self._hidden = hidden
        fast = getattr(tokenizer, "backend_tokenizer", None)
        self._stream = DecodeStream(skip_special_tokens=False) if fast is not None else None
        self._fast = fast
        self._ids: list[int] = []
        self.text = ""
        self._sent = 0
        self.stopped = False

    def push(self, token: int) -> str:
        """Add one id; returns the text that has become certain."""
        if token in self._hidden:
            return ""
        self._ids.append(token)
        if self._stream is not None:
            self.text += self._stream.step(self._fast, token) or ""
        else:
            whole = self._tokenizer.decode(self._ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
            self.text = whole.rstrip("\ufffd")
        return self._release(final=False)

    def finish(self) -> str:
        """The rest of the text, incomplete characters included."""
        if not self.stopped:
            whole = self._tokenizer.decode(self._ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
            if whole.startswith(self.text):
                self.text = whole
        return self._release(final=True)

    def _release(self, final: bool) -> str:
        if self.stopped:
            return ""
        cuts = [at for stop in self._stop if (at := self.text.find(stop, max(0, self._sent - len(stop)))) >= 0]
        if cuts:
            self.text, self.stopped = self.text[: min(cuts)], True
        held = 0 if final or self.stopped else self._maybe_stop()
        ready = self.text[self._sent : len(self.text) - held]
        self._sent = max(self._sent, len(self.text) - held)
        return ready

    def _maybe_stop(self) -> int:
        """Length of the longest end of the text that begins a stop string."""
        longest = 0
        for stop in self._stop:
            for size in range(min(len(stop) - 1, len(self.text)), longest, -1):
                if self.text.endswith(stop[:size]):
                    longest = size
                    break
        return longest
