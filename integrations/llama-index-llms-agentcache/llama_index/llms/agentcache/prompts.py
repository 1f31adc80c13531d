"""Prompts that a user's own functions write: LlamaIndex's messages_to_prompt and completion_to_prompt. Knows no engine.

Such a function writes all that the model reads: the chat template is not asked, and no tools can be shown.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

from llama_index.core.base.llms.generic_utils import messages_to_prompt
from llama_index.core.base.llms.types import ChatMessage
from llama_index.core.llms.llm import LLM, default_completion_to_prompt

from agentcache.errors import ConfigError

Write = Callable[[Any], str]


def of_messages(llm: LLM) -> Write | None:
    """The user's function that writes a prompt of messages, if there is one."""
    return None if llm.messages_to_prompt is messages_to_prompt else llm.messages_to_prompt


def of_text(llm: LLM) -> Write | None:
    """The same of a text to complete."""
    return None if llm.completion_to_prompt is default_completion_to_prompt else llm.completion_to_prompt


def not_written_down(llm: LLM) -> list[str]:
    """Names of settings that live in this process only: functions, and a parser."""
    given = {"messages_to_prompt": of_messages(llm), "completion_to_prompt": of_text(llm), "output_parser": llm.output_parser}
    return [name for name, value in given.items() if value is not None]


def written(write: Write, what: Sequence[ChatMessage] | str, tools: Collection[str] = ()) -> str:
    """The whole prompt; refuses tools, of which such a function is told nothing."""
    if tools:
        raise ConfigError(
            f"messages_to_prompt={write!r:.100} writes the whole prompt and is told of no tools, but there are {tuple(tools)!r}: "
            "leave it out, or use StableReActAgent, which shows tools as text"
        )
    prompt = write(what)
    if not isinstance(prompt, str):
        raise ConfigError(f"{write!r:.100} wrote {prompt!r:.200}: must return the prompt as a text")
    return prompt
