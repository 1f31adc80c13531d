"""LangChain's own unit tests for chat models."""

from __future__ import annotations

from typing import Any

from langchain_agentcache import ChatAgentCache
from langchain_core.language_models import BaseChatModel
from langchain_tests.unit_tests import ChatModelUnitTests


class TestChatAgentCacheUnit(ChatModelUnitTests):
    """Nothing is loaded here: weights come with the first request."""

    @property
    def chat_model_class(self) -> type[BaseChatModel]:
        return ChatAgentCache

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {"model": "Qwen/Qwen3-0.6B"}

    @property
    def init_from_env_params(self) -> tuple[dict[str, str], dict[str, Any], dict[str, Any]]:
        return {"AGENTCACHE_DIR": "/somewhere"}, {"model": "Qwen/Qwen3-0.6B"}, {"cache_dir": "/somewhere"}
