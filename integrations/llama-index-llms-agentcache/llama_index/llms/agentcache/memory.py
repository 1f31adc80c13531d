"""A chat memory that only ever grows at its end. Knows nothing of tokens but how to count them.

The usual buffers drop the oldest message at every turn once they are full, so that every turn starts a new prompt. Here nothing is
dropped until `token_limit` is passed; then whole turns go at once, down to `keep_share` of it, and the next many turns append again.

    messages   m0 m1 m2 m3 m4 m5 m6 m7 ...
                        ^ start              what the model is shown: [start, end)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import llama_index.core
from llama_index.core.base.llms.types import ChatMessage, MessageRole
from llama_index.core.bridge.pydantic import Field, PrivateAttr, ValidationError, model_validator
from llama_index.core.llms.llm import LLM
from llama_index.core.memory.types import BaseMemory

from agentcache import foreign_settings
from agentcache.errors import ConfigError

from .base import AgentCacheLLM
from .host import counting

Count = Callable[[str], Sequence[Any]]


class AppendOnlyMemory(BaseMemory):
    """Everything said, in order; `get` leaves out old turns only when it must, and then many at once.

    Messages are handed out as they are kept: what an agent writes into one (a workflow's state) stays in it, and the next step's prompt
    starts as this one's. token_limit None never leaves anything out; the engine then refuses what is too long by name.
    """

    messages: list[ChatMessage] = Field(default_factory=list, description="All messages, oldest first.")
    start: int = Field(default=0, ge=0, description="The first message that the model is shown.")
    token_limit: int | None = Field(default=None, description="Leave out old turns once the rest counts more tokens.")
    keep_share: float = Field(default=0.5, description="The share of token_limit that is left then.")
    counter: str = Field(default="", description="The model that counts the tokens, by its name: for a memory that is restored.")

    _count: Count | None = PrivateAttr(default=None)
    _sizes: list[int] = PrivateAttr(default_factory=list)

    def __init__(self, **settings: Any) -> None:
        try:
            super().__init__(**settings)
        except ValidationError as error:
            raise ConfigError(foreign_settings.in_words(error)) from error

    @model_validator(mode="after")
    def _check(self) -> AppendOnlyMemory:
        if self.token_limit is not None and self.token_limit < 1:
            raise ConfigError(f"token_limit={self.token_limit!r}: must be positive, or None for no limit")
        if not 0.0 < self.keep_share < 1.0:
            raise ConfigError(f"keep_share={self.keep_share!r}: must lie between 0 and 1")
        return self

    @classmethod
    def class_name(cls) -> str:
        return "AppendOnlyMemory"

    @classmethod
    def from_defaults(
        cls,
        chat_history: list[ChatMessage] | None = None,
        llm: LLM | None = None,
        token_limit: int | None = None,
        keep_share: float = 0.5,
        tokenizer_fn: Count | None = None,
        **kwargs: Any,
    ) -> AppendOnlyMemory:
        """llm: counts the tokens, and gives the limit where none is said: three quarters of its context."""
        if kwargs:
            raise ConfigError(f"unknown options {sorted(kwargs)!r}")
        if not isinstance(llm, (LLM, type(None))):
            raise ConfigError(f"llm={llm!r:.100}: must be an LLM, which counts the tokens, or None")
        if token_limit is None and llm is not None:
            token_limit = llm.metadata.context_window * 3 // 4
        made = cls(messages=list(chat_history or []), token_limit=token_limit, keep_share=keep_share)
        if tokenizer_fn is None and isinstance(llm, AgentCacheLLM):
            made.counter = llm.engine.name
        else:
            made._count = tokenizer_fn
        return made

    def get(self, input: str | None = None, **kwargs: Any) -> list[ChatMessage]:
        """What the model is to be shown."""
        self._leave_out()
        return self.messages[self.start :]

    def get_all(self) -> list[ChatMessage]:
        return list(self.messages)

    def put(self, message: ChatMessage) -> None:
        self.messages.append(message)

    def set(self, messages: list[ChatMessage]) -> None:
        """Make it these messages. What is the same from the start on stays as it was."""
        if self.messages != messages[: len(self.messages)]:
            self.start, self._sizes = 0, []
        self.messages = list(messages)
        del self._sizes[len(self.messages) :]

    def reset(self) -> None:
        self.messages, self.start, self._sizes = [], 0, []

    def __getstate__(self) -> dict[str, Any]:
        other = self.model_copy()
        other._count = None  # a pickled one would bring a model with it
        return super(AppendOnlyMemory, other).__getstate__()

    def _leave_out(self) -> None:
        """Move `start` to the user turn from which on at most keep_share of the limit is left; at least the last turn stays."""
        if self.token_limit is None:
            return
        self._sizes += [self._size(message) for message in self.messages[len(self._sizes) :]]
        left = sum(self._sizes[self.start :])
        if left <= self.token_limit:
            return
        turns = [at for at in range(self.start + 1, len(self.messages)) if self.messages[at].role == MessageRole.USER]
        for at in turns:
            if sum(self._sizes[at:]) <= self.token_limit * self.keep_share or at == turns[-1]:
                self.start = at
                return

    def _size(self, message: ChatMessage) -> int:
        text = "\n".join(getattr(block, "text", None) or block.model_dump_json() for block in message.blocks)
        count = self._counting()
        return len(count(text)) if count else len(text) // 4  # about four characters per token

    def _counting(self) -> Count | None:
        """What was given; else an open model of the counter's name, which may come and go; else `Settings.tokenizer`, if it was set."""
        found = counting(self.counter) if self.counter else None
        return self._count or found or llama_index.core.global_tokenizer  # not by get_tokenizer: that would load one from the network
