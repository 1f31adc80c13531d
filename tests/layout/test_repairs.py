"""Repaired chat templates: the same for a prompt of one turn, prefix-preserving behind it, and refused where they have nothing to do."""

from __future__ import annotations

from datetime import date
from typing import Any

import pytest

from agentcache import LayoutOptions
from agentcache.errors import ConfigError, TemplateError
from agentcache.layout import Renderer
from agentcache.layout.repairs import REPAIRS, applicable
from agentcache.lint.templates import probe, wordless
from tests.chat_templates import CHATML, DATED, FIRST_USER, LAST_USER, REASONING, episode, tokenizer, tool
from tests.layout.renderers import templates_at_hand

TOOLS = [tool("search", "Finds flights."), tool("book", "Books one.")]
THINKS = REASONING.replace("ns.last", "ns.last_query_index").replace("namespace(last=-1)", "namespace(last_query_index=-1)")
ONE_TURN = [episode(1, system)[:stop] for system in (True, False) for stop in (1, 2) if episode(1, system)[:stop][-1]["role"] == "user"]
TURNS = [
    *episode(1, True)[:4],
    {"role": "assistant", "content": "Take TP0.", "reasoning_content": "It is the only one."},
    {"role": "user", "content": "And back?"},
]


def fresh(template: str, tok: Any = None, **options: Any) -> Renderer:
    return Renderer(tok or tokenizer(), chat_template=template, tail=LayoutOptions(**options))


@pytest.mark.parametrize(("name", "template"), [("tools-first", LAST_USER), ("keep-thinking", THINKS)])
def test_a_repair_spares_one_turn_and_preserves_prefixes(name: str, template: str) -> None:
    original, repaired = fresh(template), fresh(template, repairs=(name,))
    for messages in ONE_TURN:
        for tools in (TOOLS, []):
            assert repaired.render(messages, tools).text == original.render(messages, tools).text

    def kept(renderer: Renderer) -> bool:
        before = renderer.render(TURNS[:-1], TOOLS, generation=False).text
        return renderer.render(TURNS, TOOLS).text.startswith(before)

    assert not kept(original)
    assert kept(repaired)


def test_tools_first_keeps_the_system_text_that_the_original_drops() -> None:
    messages = episode(1, True)[:4]
    assert messages[0]["content"] not in fresh(LAST_USER).render(messages, TOOLS).text
    assert messages[0]["content"] in fresh(LAST_USER, repairs=("tools-first",)).render(messages, TOOLS).text
    assert fresh(LAST_USER).report.tools_at == "last user"
    assert fresh(LAST_USER, repairs=("tools-first",)).report.tools_at != "last user"


def test_a_repair_without_use_and_an_unknown_one_are_refused() -> None:
    for names, said in ((("keep-thinking",), "nothing to change"), (("tools-last",), "'keep-thinking', 'tools-first'")):
        with pytest.raises(ConfigError, match=said):
            fresh(CHATML, repairs=names).render(ONE_TURN[0])
    with pytest.raises(ConfigError, match="tuple of names"):
        LayoutOptions(repairs="tools-first")  # type: ignore[arg-type]


def test_a_pinned_date_is_what_templates_print() -> None:
    assert "Date: 2026-01-31\n" in fresh(DATED, date="2026-01-31").render(ONE_TURN[0]).text
    assert "Today: 31 Jan 2026" in fresh(FIRST_USER, date="2026-01-31").render(ONE_TURN[0]).text
    assert "Date: 2026-01-31" not in fresh(DATED).render(ONE_TURN[0]).text
    for wrong in ("31 Jan 2026", "2026-02-31", 5):
        with pytest.raises(ConfigError, match="give a day"):
            LayoutOptions(date=wrong)  # type: ignore[arg-type]


def test_every_template_at_hand() -> None:
    applied: dict[str, list[str]] = {name: [] for name in (*REPAIRS, "date")}
    today = date.today().isoformat()
    for file, template, tok in templates_at_hand():
        for name in applied:
            if name == "date" and ("strftime_now" not in template or "%H" in template):
                continue
            try:
                repaired = fresh(template, tok, date=today) if name == "date" else fresh(template, tok, repairs=(name,))
                repaired.render(ONE_TURN[0], TOOLS)
            except (ConfigError, TemplateError):
                continue
            for messages in ONE_TURN:
                for tools in (TOOLS, []):
                    assert repaired.render(messages, tools).text == fresh(template, tok).render(messages, tools).text, (file, name)
            applied[name].append(file)
    assert all(applied.values()), applied


def test_what_applies_is_what_can_be_asked_for() -> None:
    known = {"tools-first": LAST_USER, "keep-thinking": THINKS, "date": DATED}
    assert {name: applicable(template) for name, template in known.items()} == {name: [name] for name in known}
    assert applicable(CHATML) == []
    assert [one.answer for one in probe(wordless(LAST_USER)) if one.name == "can be repaired"] == ["tools-first"]
