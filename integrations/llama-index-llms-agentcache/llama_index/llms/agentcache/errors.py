"""What can go wrong here and nowhere in the engine. Knows nothing of LlamaIndex.

AgentCacheError
├── ConfigError (ValueError)            an option, a tool choice or a workflow that cannot work
└── GenerationError
    ├── NoToolCallError (ValueError)    no call where one was demanded, or one that was cut short
    └── StructuredOutputError (ValueError)  the answer is no object of the class that was asked for
"""

from __future__ import annotations

from agentcache.errors import GenerationError


class NoToolCallError(GenerationError, ValueError):
    """The response has no tool call although one was demanded, or the only one was cut short."""


class StructuredOutputError(GenerationError, ValueError):
    """The model's text does not give an object of the output class."""
