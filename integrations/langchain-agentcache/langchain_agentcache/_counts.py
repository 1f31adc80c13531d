"""Counts of answers as LangChain's callbacks hear of them. Changes no request."""

from __future__ import annotations

from typing import Any

from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.outputs import ChatGeneration, LLMResult

from agentcache import AnswerCounts

from ._output import told_account


class CacheCounts(BaseCallbackHandler):
    """Counts of the answers of all models that it is a callback of, by family and label, as `Engine.stats` has them.

    `config={"callbacks": [counts]}` counts one run, `callbacks=[counts]` in a model all of its requests. Refusals that others caused, and
    requests that failed, are in the engine's own counts only.
    """

    def __init__(self) -> None:
        self._answers = AnswerCounts()

    @property
    def stats(self) -> dict[str, dict[str, float]]:
        """The counts so far."""
        return self._answers.stats(None)

    def on_llm_end(self, response: LLMResult, **kwargs: Any) -> None:
        """Count an answer that has ended."""
        for generation in (one for some in response.generations for one in some):
            if isinstance(generation, ChatGeneration):
                said, account = generation.message.response_metadata, told_account(generation.message)
            else:
                said = generation.generation_info or {}
                account = said.get("agentcache")
            if account is not None:
                for told in filter(None, (account, account.get("draft"))):
                    self._answers.count({**told, "finish_reason": said.get("finish_reason")})
