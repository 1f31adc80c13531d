"""An answer in one request of the engine, or in two: the second one turns what the model has said into an object. Knows no LangChain.

The schema of a `response_format` stands in the prompt as one more tool, which the model cannot call while it works. Once it answers in
words, it is asked for the answer as JSON, and must call that tool: the arguments are the object. So an agent's steps end where they end
without a form, and its prompts stay one prefix.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import replace

from agentcache import Completion, Delta, Message, Receipt, Stream
from agentcache.errors import CancelledError

from ._caller_warnings import tell_empty, tell_shortened
from ._miss_hints import tell_missed
from .errors import OutputCutError

ASK = "Give the answer as JSON."


class Answer:
    """The answer that `stream` begins. Leaving it early frees the device; use it as a context manager.

    formed: the stream's call is the object. then: opens the request that makes an object of a message without calls. form: the tool that
    shows its schema; before that request its calls are none.
    tell: warn of what was computed again. draft: the receipt of the first request, once there is a second one.
    """

    def __init__(
        self, stream: Stream, *, formed: bool = False, then: Callable[[Message], Stream] | None = None, form: str = "", tell: bool = True
    ) -> None:
        self._stream, self._formed, self._then, self._form, self._tell = stream, formed, then, form, tell
        self._early = set[int]()  # calls of the form
        self._words: list[Delta] = []  # of the first request: told only if a call follows
        self._text = ""  # of the first request, as far as its deltas are text
        self._thought: str | None = None
        self._closed = False
        self.draft: Receipt | None = None

    def deltas(self) -> Iterator[Delta]:
        """The answer piece by piece."""
        for delta in self._stream.deltas():
            yield from self._passed(delta)
        yield from self.deltas() if self._goes_on() else self._rest()

    async def adeltas(self) -> AsyncIterator[Delta]:
        """The same for `async for`."""
        async for delta in self._stream.adeltas():
            for each in self._passed(delta):
                yield each
        if self._then is not None and await asyncio.to_thread(self._goes_on):
            async for each in self.adeltas():
                yield each
            return
        for each in self._rest():
            yield each

    def completed(self) -> Completion:
        """The whole answer; runs what is left of it. Raises OutputCutError for an object that is not whole."""
        self._goes_on()
        return self._read(self._stream.completion)

    async def acompleted(self) -> Completion:
        """The same, awaited."""
        async for _ in self._stream:
            pass
        if self._then is not None and await asyncio.to_thread(self._goes_on):
            return await self.acompleted()
        return self._read(self._stream.completion)

    def _passed(self, delta: Delta) -> list[Delta]:
        if self._formed:
            return [Delta("text", delta.text)] if delta.kind == "arguments" else [delta] if delta.kind == "reasoning" else []
        if delta.kind == "call" and delta.text == self._form:
            self._early.add(delta.index)
        if delta.kind != "text" and delta.kind != "reasoning" and delta.index in self._early:
            return []
        if delta.kind == "text":
            self._text += delta.text
        if self._then is None or delta.kind == "reasoning":
            return [delta]
        if delta.kind == "text":
            self._words.append(delta)
            return []
        told, self._words = [*self._words, delta], []
        return told

    def _rest(self) -> list[Delta]:
        """What was not told yet: words that no call followed, and the text of a call that is none, which belongs to the content."""
        content = self._stream.completion.message.content
        untold = content[len(self._text) :] if not self._formed and content.startswith(self._text) else ""
        return [*self._words, *([Delta("text", untold)] if untold else [])]

    def _goes_on(self) -> bool:
        """Whether a second request follows; opens it."""
        if self._then is None:
            return False
        done, then, self._then = self._stream.completion, self._then, None
        said = self._without_form(done.message)
        if said.tool_calls or done.invalid_calls:
            return False
        if self._closed:
            raise CancelledError("the answer was closed before it ended")
        self._words, self._thought, self.draft = [], done.message.reasoning, done.receipt
        self._stream, self._formed = then(said), True
        if self._closed:
            self._stream.close()
        return True

    def _without_form(self, message: Message) -> Message:
        return replace(message, tool_calls=tuple(call for call in message.tool_calls if call.name != self._form))

    def _read(self, done: Completion) -> Completion:
        if self._tell:
            first = self.draft or done.receipt  # the second request goes on from the first
            tell_missed(first.as_dict()["missed"] if first.missed else None)
        tell_shortened(done)
        if not self._formed:
            tell_empty(done)
            return replace(done, message=self._without_form(done.message))
        if done.cut or not done.message.tool_calls:
            raise OutputCutError(done.receipt.finish_reason, done.receipt.completion_tokens, done.text)
        said = json.dumps(dict(done.message.tool_calls[0].arguments), ensure_ascii=False)
        message = Message("assistant", said, reasoning=done.message.reasoning or self._thought)
        return replace(done, message=message, receipt=replace(done.receipt, finish_reason="stop"))

    def close(self) -> None:
        """Stop the request under way; nothing follows it."""
        self._closed = True
        self._stream.close()

    def __enter__(self) -> Answer:
        return self

    def __exit__(self, *exc: object) -> None:
        self._stream.__exit__(*exc)
