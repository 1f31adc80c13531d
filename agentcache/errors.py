"""Every error agentcache raises on purpose. Knows nothing of models, stores or frameworks.

    AgentCacheError                       each docstring says when; in brackets, the built-in error that it is as well
    ├── ConfigError (ValueError)          CalibrationError, ForeignPackageError
    ├── ModelError                        ModelLoadError (OSError), DeviceMapError
    ├── PromptError (ValueError)          MessageError, ToolSchemaError, TemplateError, SchemaError, ContextOverflowError
    ├── GenerationError                   NonFiniteLogitsError, WeightsChangedError, OutOfMemoryError (MemoryError), CancelledError
    ├── StoreError (OSError)              StoreFormatError, StorePermissionError, StoreCorruptError, StoreBusyError, StoreFullError,
    │                                     StoreLostError, BlobError
    ├── PolicyError
    └── EngineClosedError (RuntimeError)  EngineForkedError

StoreWarning and ReuseWarning, warnings, tell what a request need not fail for. A message states the value that was refused (`!r`) and the
way out.
"""

from __future__ import annotations

import os
import reprlib

# What code of models, tokenizers and disks may raise. A fault must reach its own request, not the thread that serves the others.
FAULTS = (Exception,)


_short = reprlib.Repr()
_short.maxlevel, _short.maxstring, _short.maxother, _short.maxdict, _short.maxlist = 3, 120, 120, 4, 4


def shown(value: object) -> str:
    """A value as an error shows it: repr(), at most 200 characters, whatever it is."""
    try:
        return _short.repr(value)[:200]
    except (ValueError, RecursionError):  # a number too long to write
        return f"<{type(value).__name__}>"


class AgentCacheError(Exception):
    """Base of all errors that agentcache raises on purpose."""


class ConfigError(AgentCacheError, ValueError):
    """A setting or an argument cannot work."""


class CalibrationError(ConfigError):
    """Reuse at other positions was asked for without a calibration of this model, or with one that cannot be used."""


class ForeignPackageError(ConfigError):
    """Another distribution's `agentcache` was found first on the import path."""


class ModelError(AgentCacheError):
    """The model cannot be used."""


class ModelLoadError(ModelError, OSError):
    """The model's path or id cannot be loaded."""


class DeviceMapError(ModelError):
    """The weights are spread over several devices or offloaded."""


class PromptError(AgentCacheError, ValueError):
    """The request cannot be turned into a prompt."""


class MessageError(PromptError):
    """Messages, tool calls or tool results are malformed."""


class ToolSchemaError(PromptError):
    """A tool is not a function schema."""


class TemplateError(PromptError):
    """The tokenizer has no chat template, or the template raised."""


class SchemaError(PromptError):
    """A prompt schema is malformed, or has no such part, choice or hole, or is not the one that was learnt."""


class ContextOverflowError(PromptError):
    """The prompt does not fit the model's context; raised before any prefill.

    prompt_tokens and context_tokens are token counts, the first an estimate of two digits where it is several times the other;
    over_tokens is by how much the request is too long. max_tokens: the least that a completion needs. setting: what made the
    context shorter than the model's, with its value.
    """

    def __init__(self, prompt_tokens: int, context_tokens: int, max_tokens: int = 0, setting: str = "") -> None:
        self.prompt_tokens = prompt_tokens
        self.context_tokens = context_tokens
        self.max_tokens = max_tokens
        self.over_tokens = prompt_tokens + max_tokens - context_tokens
        self.setting = setting
        asked = f" + {max_tokens} for the completion" if max_tokens else ""
        place = f"{setting}, which counts both," if setting else f"the context of {context_tokens} tokens"
        raised = f"raise {setting.partition('=')[0]}, " if setting else ""
        super().__init__(
            f"prompt of {prompt_tokens} tokens{asked} exceeds {place} by {self.over_tokens}: "
            f"{raised}shorten the history, or bind fewer tools"
        )


class GenerationError(AgentCacheError):
    """The request failed while it ran."""


class NonFiniteLogitsError(GenerationError):
    """The model produced NaN or infinite logits; no page of this request stays cached."""


class WeightsChangedError(GenerationError):
    """The model's weights, adapters or code changed while the request ran: its answer would be of two models."""


class OutOfMemoryError(GenerationError, MemoryError):
    """Not enough memory even when the request ran alone."""


class CancelledError(GenerationError):
    """The caller cancelled the stream before it ended."""


class PolicyError(AgentCacheError):
    """A rule of the engine's policy refuses a request or a pin."""


class EngineClosedError(AgentCacheError, RuntimeError):
    """The engine was closed."""


class EngineForkedError(EngineClosedError):
    """The engine was made before this process was forked: its threads stayed in the parent, where it runs on."""

    @classmethod
    def of(cls, parent: int) -> EngineForkedError:
        """The error of an engine or a stream that process `parent` made."""
        return cls(
            f"made in process {parent!r}, of which this one ({os.getpid()!r}) is a forked child without its threads: make an engine here, "
            "after the fork (gunicorn: in post_fork, without --preload; Celery: worker_process_init; ProcessPoolExecutor: initializer=), "
            "or start processes with 'spawn'"
        )


class StoreError(AgentCacheError, OSError):
    """The store on disk cannot do what was asked."""


class StoreFormatError(StoreError):
    """The store was written by another version, or is encrypted with another key, or with none."""


class StorePermissionError(StoreError):
    """The store's folder belongs to another user, or others may read or write it."""


class StoreCorruptError(StoreError):
    """The index of the store is damaged; it can be made again from the pages."""


class StoreBusyError(StoreError):
    """Other processes kept the index of the store locked for too long."""


class StoreFullError(StoreError):
    """The disk, or the store's budget, has no room for this."""


class ReuseWarning(UserWarning):
    """Reuse does less than it was asked for: the answers are right all the same."""


class StoreLostError(StoreError):
    """The folder of the store was deleted while it was open, or another one is in its place."""


class StoreWarning(UserWarning):
    """Something about the store on disk that a user should know; requests go on without it."""


class BlobError(StoreError):
    """One stored page is damaged, cut short, foreign, or does not belong to its row."""
