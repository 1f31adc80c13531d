"""Recorded answers through the real path: prompts, keys and values are computed, only the words are given. Knows no agents.

For benchmarks and tests of agents: what a step costs follows from its prompt, and a recorded answer makes prompts repeatable.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from llama_index.core.base.llms.types import ChatMessage, ChatResponse
from llama_index.core.bridge.pydantic import PrivateAttr

from agentcache import Completion, Receipt
from agentcache.errors import ConfigError

from .answer import Answer
from .base import AgentCacheLLM
from .requests import Ask

Line = str | Callable[[Sequence[ChatMessage] | str], str]


class ReplayLLM(AgentCacheLLM):
    """An AgentCacheLLM that answers with the lines of a script, one per request; a function makes its line from the messages."""

    _script: deque[Line] = PrivateAttr(default_factory=deque)
    _receipts: list[Receipt] = PrivateAttr(default_factory=list)

    def __init__(self, *args: Any, script: Iterable[Line] = (), **options: Any) -> None:
        super().__init__(*args, **options)
        self._script.extend(script)

    @property
    def receipts(self) -> list[Receipt]:
        """The engine's account of each request so far."""
        return self._receipts

    def expect(self, *lines: Line) -> None:
        """Further answers."""
        self._script.extend(lines)

    def _ask(self, messages: Sequence[ChatMessage] | str, given: Mapping[str, Any]) -> tuple[Ask, Answer]:
        ask, answer = super()._ask(messages, given)
        if not self._script:
            raise ConfigError(f"the script is over: nothing to answer after {len(self._receipts)} requests")
        line = self._script.popleft()
        text = line if isinstance(line, str) else line(messages)
        ids = [*self.count(text), *([end] if (end := self.engine.tokenizer.eos_token_id) is not None else [])]
        return replace(ask, sampling=replace(ask.sampling, forced=tuple(ids), max_tokens=len(ids))), answer

    def _finish(self, ask: Ask, answer: Answer, completion: Completion, *told: Any) -> ChatResponse:
        self._receipts.append(completion.receipt)
        return super()._finish(ask, answer, completion, *told)


def kept(receipts: Sequence[Receipt]) -> list[float]:
    """For each request but the first, the share of the prompt before it that was still the start of this one."""
    return [min(1.0, one.cached_tokens / before.prompt_tokens) for before, one in zip(receipts, receipts[1:])]
