"""Middleware for `create_agent`. Needs langchain, which the chat model alone does not."""

from __future__ import annotations

try:
    import langchain.agents.middleware  # noqa: F401
except ImportError as error:
    raise ImportError(
        "AgentCacheMiddleware requires 'langchain' to be installed: `pip install 'langchain-agentcache[middleware]'`."
    ) from error

from .prompt import AgentCacheMiddleware

__all__ = ["AgentCacheMiddleware"]
