"""What can go wrong here and nowhere in the engine. Knows nothing of LlamaIndex.

AgentCacheError
├── ConfigError (ValueError)            an option, a tool choice or a workflow that cannot work
└── GenerationError
    ├── NoToolCallError (ValueError)    the model answered in words where a call was demanded
    └── StructuredOutputError (ValueError)  the answer is no object of the class that was asked for
"""

from __future__ import annotations

from agentcache.errors import GenerationError


class NoToolCallError(GenerationError, ValueError):
    """The response has no tool call although one was demanded."""


class StructuredOutputError(GenerationError, ValueError):
    """The model's text does not give an object of the output class."""
