"""LlamaIndex on your own models, with agentcache: each step of an agent pays only for its new tokens."""

from llama_index.llms.agentcache.base import AgentCacheLLM
from llama_index.llms.agentcache.canonical import canonical_tool
from llama_index.llms.agentcache.counts import CacheCounts
from llama_index.llms.agentcache.errors import NoToolCallError, StructuredOutputError
from llama_index.llms.agentcache.events import ReceiptEvent
from llama_index.llms.agentcache.memory import AppendOnlyMemory
from llama_index.llms.agentcache.passages import CacheAwareOrder, LearnNodes
from llama_index.llms.agentcache.react import StableReActAgent, StableReActFormatter, StableReActOutputParser
from llama_index.llms.agentcache.recording import RequestRecorder
from llama_index.llms.agentcache.replay import ReplayLLM
from llama_index.llms.agentcache.workflow import SharedAgentWorkflow, answer_at_tail

__all__ = [
    "AgentCacheLLM",
    "AppendOnlyMemory",
    "CacheAwareOrder",
    "CacheCounts",
    "LearnNodes",
    "NoToolCallError",
    "ReceiptEvent",
    "ReplayLLM",
    "RequestRecorder",
    "SharedAgentWorkflow",
    "StableReActAgent",
    "StableReActFormatter",
    "StableReActOutputParser",
    "StructuredOutputError",
    "answer_at_tail",
    "canonical_tool",
]
