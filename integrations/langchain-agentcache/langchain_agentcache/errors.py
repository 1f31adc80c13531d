"""agentcache's errors under LangChain's names, so that both `except` clauses work. Knows nothing of how they come about.

ContextOverflowError        the prompt does not fit; SummarizationMiddleware shortens it and tries again
ModelInvalidRequestError    messages, tools or settings that cannot work
ModelNotFoundError          there is no such model
ModelTimeoutError           `timeout` has passed; may be tried again
ModelFailedError            the request failed while it ran
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from langchain_core import exceptions as theirs

from agentcache import errors as own

__all__ = [
    "ContextOverflowError",
    "ModelFailedError",
    "ModelInvalidRequestError",
    "ModelNotFoundError",
    "ModelTimeoutError",
    "translated",
]


class ContextOverflowError(theirs.ContextOverflowError, own.ContextOverflowError):
    """The prompt is longer than the model's context; raised before anything is computed."""


class ModelInvalidRequestError(theirs.ModelInvalidRequestError, own.PromptError, own.ConfigError):
    """Messages, tools or settings cannot work."""


class ModelNotFoundError(theirs.ModelNotFoundError, own.ModelLoadError):
    """The model's path or id cannot be loaded."""


class ModelTimeoutError(theirs.ModelTimeoutError, own.GenerationError):
    """The time given with `timeout` has passed; what was computed stays reusable."""


class ModelFailedError(theirs.ModelError, own.GenerationError):
    """The request failed while it ran."""


@contextmanager
def translated() -> Iterator[None]:
    """agentcache's errors raised inside leave as ours."""
    try:
        yield
    except theirs.ModelError:
        raise
    except own.ContextOverflowError as error:
        raise ContextOverflowError(error.prompt_tokens, error.context_tokens, error.max_tokens) from error
    except (own.PromptError, own.ConfigError) as error:
        raise ModelInvalidRequestError(str(error)) from error
    except own.ModelLoadError as error:
        raise ModelNotFoundError(str(error)) from error
    except own.GenerationError as error:
        raise ModelFailedError(str(error)) from error
