"""LangChain on agentcache: a chat model, a text model and a middleware. Translates; decides nothing about what is reused.

from langchain_agentcache import ChatAgentCache, AgentCacheLLM, AgentCacheMiddleware
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

import agentcache_llm

agentcache_llm.check()  # a stranger's package of the same name is named before anything breaks

from ._version import __version__  # noqa: E402

if TYPE_CHECKING:
    from ._counts import CacheCounts
    from ._passages import CacheAwareOrder, LearnDocuments
    from ._recording import RequestRecorder
    from .chat_models import ChatAgentCache
    from .llms import AgentCacheLLM
    from .middleware import AgentCacheMiddleware

_LAZY = {
    "ChatAgentCache": "chat_models",
    "AgentCacheLLM": "llms",
    "AgentCacheMiddleware": "middleware",
    "CacheAwareOrder": "_passages",
    "CacheCounts": "_counts",
    "LearnDocuments": "_passages",
    "RequestRecorder": "_recording",
}

__all__ = [
    "AgentCacheLLM",
    "AgentCacheMiddleware",
    "CacheAwareOrder",
    "CacheCounts",
    "ChatAgentCache",
    "LearnDocuments",
    "RequestRecorder",
    "__version__",
]


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f".{_LAZY[name]}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
