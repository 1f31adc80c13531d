"""Answers read without a prompt and a model: by the marks that need no family. Knows no engine."""

from __future__ import annotations

from collections.abc import Collection

from agentcache import Message
from agentcache.answer.call_forms import THINK
from agentcache.answer.parser import AnswerParser
from agentcache.answer.response_template import template_for


def parse(text: str, names: Collection[str] | None = None, *, opened: bool = False) -> Message:
    """The assistant message that a text spells in one of the forms that need no template.

    names: of the tools that were offered, None if not known. opened: the prompt ended in the beginning of a thought.
    """
    parser = AnswerParser(template_for(), THINK if opened else "", names=names)
    parser.push(text)
    parser.finish()
    return parser.message
