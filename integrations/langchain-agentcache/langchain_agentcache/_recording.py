"""RequestRecorder: the requests of a LangChain program, written down for `agentcache lint` and `agentcache calibrate`. Changes none."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any
from uuid import UUID

from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.messages import AIMessage, BaseMessage, convert_to_openai_messages
from langchain_core.outputs import ChatGeneration, LLMResult
from typing_extensions import override

from agentcache import Recorder

_CONVERSATIONS = ("conversation_id", "session_id", "thread_id")  # LangGraph tells the last one of the thread that it was given


class RequestRecorder(BaseCallbackHandler):
    """Writes each request of a chat or text model, of any provider, and its answer as one line of JSON.

    >>> agent.invoke(..., {"callbacks": [RequestRecorder("requests.jsonl")]})

    to: a file, which this opens and appends to, or a Recorder, which stays yours to close. A request's conversation is the `thread_id`,
    `session_id` or `conversation_id` of its metadata; one without is told by what it says. A request that fails has no answer.
    """

    def __init__(self, to: Recorder | str | os.PathLike[str]) -> None:
        self.recorder = to if isinstance(to, Recorder) else Recorder(to)
        self._own = self.recorder is not to
        self._asked: dict[UUID, dict[str, Any]] = {}

    @override
    def on_chat_model_start(
        self, serialized: dict[str, Any], messages: list[list[BaseMessage]], *, run_id: UUID, metadata: Any = None, **kwargs: Any
    ) -> None:
        self._asked[run_id] = _request([_plain(each) for each in messages[0]], metadata, kwargs)

    @override
    def on_llm_start(self, serialized: dict[str, Any], prompts: list[str], *, run_id: UUID, metadata: Any = None, **kwargs: Any) -> None:
        self._asked[run_id] = _request(prompts[0], metadata, kwargs)

    @override
    def on_llm_end(self, response: LLMResult, *, run_id: UUID, **kwargs: Any) -> None:
        asked = self._asked.pop(run_id, None)
        generation = response.generations[0][0] if response.generations and response.generations[0] else None
        if asked is None or generation is None:
            return
        if not isinstance(generation, ChatGeneration) or not isinstance(message := generation.message, AIMessage):
            self.recorder.record(answer=generation.text, **asked)
            return
        reason = message.response_metadata.get("finish_reason")
        self.recorder.record(answer=_plain(message), finish_reason=reason, usage=message.usage_metadata or {}, **asked)

    @override
    def on_llm_error(self, error: BaseException, *, run_id: UUID, **kwargs: Any) -> None:
        if (asked := self._asked.pop(run_id, None)) is not None:
            self.recorder.record(**asked)

    def close(self) -> None:
        """End the recording, if the file is this one's own."""
        if self._own:
            self.recorder.close()

    def __enter__(self) -> RequestRecorder:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def _request(said: Sequence[Mapping[str, Any]] | str, metadata: Mapping[str, Any] | None, kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """What `Recorder.record` takes of one request."""
    known, sent = metadata or {}, kwargs.get("invocation_params") or {}
    conversation = next((str(known[name]) for name in _CONVERSATIONS if known.get(name)), None)
    model = str(known.get("ls_model_name") or sent.get("model") or "")
    return {"messages": said, "tools": list(sent.get("tools") or ()), "conversation": conversation, "model": model}


def _plain(message: BaseMessage) -> dict[str, Any]:
    """A message in OpenAI's shape, with its thought; of blocks that this shape lacks, such as films, the texts."""
    try:
        made = convert_to_openai_messages([message])[0]
    except (ValueError, KeyError):
        texts = [part if isinstance(part, str) else str(part.get("text") or "") for part in message.content]
        made = convert_to_openai_messages([message.model_copy(update={"content": "\n".join(filter(None, texts))})])[0]
    thought = message.additional_kwargs.get("reasoning_content")
    return {**made, "reasoning_content": thought} if isinstance(thought, str) and thought else dict(made)
