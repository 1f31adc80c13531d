"""LangChain's own integration tests for chat models, offline: a small model through the real path, scripted where meaning is asked for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import script
from langchain_agentcache import ChatAgentCache
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage
from langchain_tests.integration_tests import ChatModelIntegrationTests


def _second(path: Path) -> str:
    return script.save(path, seed=1)


class TestChatAgentCacheIntegration(ChatModelIntegrationTests):
    """Every flag that a text model can have is on."""

    @pytest.fixture(autouse=True)
    def _folder(self, model_folder: str) -> None:
        """The model lies there before a test names it."""

    @property
    def chat_model_class(self) -> type[BaseChatModel]:
        return ChatAgentCache

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {"model": script.folder("first", script.save), "memory_bytes": 64 << 20, "max_tokens": 150, "temperature": 1.0, "seed": 7}

    @property
    def supports_json_mode(self) -> bool:
        return True

    @property
    def supports_anthropic_inputs(self) -> bool:
        return True

    @property
    def supports_model_override(self) -> bool:
        return True

    @property
    def model_override_value(self) -> str:
        return script.folder("second", _second)

    @property
    def supported_usage_metadata_details(self) -> dict[str, list[str]]:
        both = ["cache_read_input", "cache_creation_input", "reasoning_output"]
        return {"invoke": both, "stream": both}

    def _asked(self, text: str, stream: bool) -> AIMessage:
        model = self.chat_model_class(**{**self.chat_model_params, "max_tokens": 40})
        if not stream:
            return model.invoke(text)
        whole = None
        for chunk in model.stream(text):
            whole = chunk if whole is None else whole + chunk
        assert isinstance(whole, AIMessage)
        return whole

    def invoke_with_cache_read_input(self, *, stream: bool = False) -> AIMessage:
        text = "Which ships passed the lighthouse in the night of the storm, and which of them turned back? " * 3
        self._asked(text, stream)
        again = self._asked(text, stream)
        assert again.usage_metadata
        assert again.usage_metadata["input_token_details"]["cache_read"] == again.usage_metadata["input_tokens"] - 1
        return again

    def invoke_with_cache_creation_input(self, *, stream: bool = False) -> AIMessage:
        first = self._asked(f"A question that nobody asked before, stream={stream}: {id(self)}?", stream)
        assert first.usage_metadata
        assert first.usage_metadata["input_token_details"]["cache_creation"] > 0
        return first

    def invoke_with_reasoning_output(self, *, stream: bool = False) -> AIMessage:
        thinking = "<think>\nThe tide turns at noon, so it is high at three.\n</think>\n\nAt three."
        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(script.LINES, "When is high water? Think first.", thinking)
            return self._asked("When is high water? Think first.", stream)
