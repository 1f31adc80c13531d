"""Agents on your own models: an agent step pays only for its new tokens.

Importing this package loads neither torch nor transformers nor any framework: public names are looked up when first used.
"""

from __future__ import annotations

import importlib
import os
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from . import foreign_settings
    from .answer.parser import Delta, InvalidCall
    from .calibration import Calibration
    from .caller_warnings import CallerWarnings
    from .client import RemoteEngine
    from .counters import AnswerCounts
    from .document_packs import Arrangement, Document, Learnt
    from .engine import Engine
    from .events import Chunk
    from .layout.declared import volatile
    from .miss_warnings import MissWarnings
    from .model.loading import Loading
    from .model_facts import ModelFacts
    from .prompt_schema import Part, Schema
    from .receipt import Receipt
    from .recorder import Recorder
    from .session import Session
    from .shared_engines import EngineLease
    from .store.tool_group import ToolGroup
    from .stream import Completion, Stream

from . import embedded, errors
from .types import (
    PASSAGES,
    Constraint,
    Forgotten,
    Layout,
    LayoutOptions,
    Logprob,
    Message,
    Missed,
    Move,
    Reason,
    Refusal,
    Sampling,
    Span,
    StoreOptions,
    Tool,
    ToolCall,
)

# OpenMP reads it when torch is loaded. Beside a busy program, threads that spin for long take each other's cores: ten times the wait
if "torch" not in sys.modules and "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "2000")

__version__ = "0.1.0"
DISTRIBUTION = "agentcache-llm"  # how agentcache_llm.py tells this package from a stranger's of the same name

_NAMES = {
    "answer.parser": "Delta InvalidCall",
    "calibration": "Calibration",
    "caller_warnings": "CallerWarnings",
    "client": "RemoteEngine",
    "counters": "AnswerCounts",
    "document_packs": "Arrangement Document Learnt",
    "engine": "Engine",
    "events": "Chunk",
    "foreign_settings": "foreign_settings",
    "layout.declared": "volatile",
    "miss_warnings": "MissWarnings",
    "model.loading": "Loading",
    "model_facts": "ModelFacts",
    "prompt_schema": "Part Schema",
    "receipt": "Receipt",
    "recorder": "Recorder",
    "session": "Session",
    "shared_engines": "EngineLease",
    "store.tool_group": "ToolGroup",
    "stream": "Completion Stream",
}
_LAZY = {name: module for module, names in _NAMES.items() for name in names.split()}

__all__ = [
    "AnswerCounts", "Arrangement", "Calibration", "CallerWarnings", "Chunk", "Completion", "Constraint", "Delta",
    "Document", "Engine", "EngineLease", "Forgotten", "InvalidCall", "Layout", "LayoutOptions", "Learnt", "Loading",
    "Logprob", "Message", "MissWarnings", "Missed", "ModelFacts", "Move", "PASSAGES", "Part", "Reason", "Receipt",
    "Recorder", "Refusal", "RemoteEngine", "Sampling", "Schema", "Session", "Span", "StoreOptions", "Stream", "Tool",
    "ToolCall", "ToolGroup", "__version__", "embedded", "errors", "foreign_settings", "volatile",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = importlib.import_module(f".{_LAZY[name]}", __name__)
    value = module if name == _LAZY[name] else getattr(module, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
