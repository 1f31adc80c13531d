"""Renderers over chat templates of tests/chat_templates, conversations for them, and checks of a layout. Holds no tests."""

from __future__ import annotations

import copy
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from agentcache.layout import Renderer
from agentcache.types import Layout
from tests.chat_templates import CHATML, episode, tokenizer, tool

TOOLS = [tool("search", 'Finds "flights" and more.'), tool("book", "Books one.")]
_CUT = [episode(n, system)[:stop] for system in (True, False) for n in (0, 2) for stop in (1, 2, 4, 6, None)]
CONVERSATIONS = [messages for messages in _CUT if messages[-1]["role"] in ("user", "tool")]


def renderer_of(template: str | None = CHATML, kind: str = "byte_bpe") -> Renderer:
    return Renderer(tokenizer(kind), chat_template=template)


def stock_ids(renderer_tokenizer: Any, template: str, messages: list[Any], tools: list[Any]) -> list[int]:
    out = renderer_tokenizer.apply_chat_template(
        messages, tools=tools or None, chat_template=template, add_generation_prompt=True, tokenize=True
    )
    return list(out["input_ids"])


def templates_at_hand() -> Iterator[tuple[str, str, Any]]:
    """(name, template, a tokenizer with its special tokens) of a folder of third-party *.jinja files, which AGENTCACHE_TEMPLATES names.

    llama-cpp-python's sdist vendors some.
    """
    folder = os.environ.get("AGENTCACHE_TEMPLATES")
    if not folder:
        pytest.skip("AGENTCACHE_TEMPLATES is not set")
    for path in sorted(Path(folder).glob("*.jinja")):
        template, made = path.read_text(), copy.deepcopy(tokenizer())
        special = re.findall(r"<\|[^|<>\s]{1,40}\|>|<｜[^｜<>\s]{1,40}｜>|\[/?[A-Z_]{3,30}\]|<(?:start|end)_of_turn>", template)
        made.add_special_tokens({"extra_special_tokens": sorted(set(special))})
        yield path.name, template, made


def check_cover(layout: Layout) -> None:
    edges = [0, *(span.stop for span in layout.spans)]
    assert [span.start for span in layout.spans] == edges[:-1]
    assert edges[-1] == len(layout.ids)
    assert all(span.stop > span.start for span in layout.spans)
