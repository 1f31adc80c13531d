"""The programs examples/llamaindex_*.py, each run with recorded answers in place of a model's."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cases import call

EXAMPLES = Path(__file__).parents[3] / "examples"
SCRIPTS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "function_agent": (
        (
            call("high_water", harbour="Port Averil") + "\n" + call("high_water", harbour="Sorrel Bay"),
            "At 14:05 and 15:40.",
            call("minutes_between", first="14:05", second="15:40"),
            "95 minutes.",
        ),
        ("high_water({'harbour': 'Sorrel Bay'}) = 15:40", "minutes_between", "95 minutes."),
    ),
    "react_agent": (
        (
            'Thought: I need a tool.\nAction: lamp\nAction Input: {"name": "Averil Head"}\n',
            "Thought: I can answer.\nAnswer: One white flash every 10 seconds.",
            'Thought: I need a tool.\nAction: lamp\nAction Input: {"name": "Sorrel Mole"}\n',
            "Thought: I can answer.\nAnswer: Fixed red.",
        ),
        ("And Sorrel Mole? Fixed red.", "cached_tokens"),
    ),
    "sessions": (
        (call("last_ship"), "The Aurora.", "At 12:40."),
        ("  new: 0 tokens cached", "  extend: ", "Which ship passed last? The Aurora.", "When was that? At 12:40."),
    ),
    "workflow": (
        (
            call("find_berth", length_m=32),
            call("handoff", to_agent="office", reason="The fee is asked for."),
            call("fee", berth="north quay 3", nights=2),
            "North quay 3, 36 crowns.",
        ),
        ("office: ", "North quay 3, 36 crowns."),
    ),
    "documents": (
        ("At 12:40.", "With the flood.", "To Sorrel Bay.", "At 07:15.", call("search_log", input="the lamp"), "On 4 March.", "Yes."),
        ("When did the Aurora come in with salt? At 12:40.", "Yes.", "learnt: ['log-0', 'log-1', 'log-2', 'log-3']"),
    ),
    "rag": (
        ("At 12:40.", "To Sorrel Bay.", call("ask_log", input="Was the lamp cleaned?"), "On 4 March.", "Yes, on 4 March."),
        ("When did the Aurora come in? At 12:40.", "Yes, on 4 March.", "cached_tokens"),
    ),
}


def _load(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(f"llamaindex_{name}", EXAMPLES / f"llamaindex_{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_example_is_run_here() -> None:
    assert {path.stem.removeprefix("llamaindex_") for path in EXAMPLES.glob("llamaindex_*.py")} == {*SCRIPTS, "kept"}


@pytest.mark.parametrize("name", sorted(SCRIPTS))
def test_example_runs(llm: Callable[..., Any], run: Callable[..., Any], capsys: pytest.CaptureFixture[str], name: str) -> None:
    script, said = SCRIPTS[name]
    model = llm(*script)
    run(_load(name).main(model))
    printed = capsys.readouterr().out
    for words in said:
        assert words in printed
    assert len(model.receipts) == len(script)


def test_passages_that_two_questions_share_are_computed_once(llm: Callable[..., Any], run: Callable[..., Any]) -> None:
    model = llm(*SCRIPTS["rag"][0])
    run(_load("rag").main(model))
    first, second = model.receipts[:2]
    assert second.cached_tokens > 0.7 * first.prompt_tokens


@pytest.mark.slow
def test_figures_of_the_readme_are_what_is_measured(capsys: pytest.CaptureFixture[str]) -> None:
    figures = _load("kept").main()
    assert json.loads(capsys.readouterr().out.splitlines()[-1]) == figures
    for theirs, ours in (
        ("ReActAgent", "StableReActAgent"),
        ("AgentWorkflow", "SharedAgentWorkflow"),
        ("output_cls", "answer_at_tail"),
        ("ChatMemoryBuffer", "AppendOnlyMemory"),
        ("without", "with_superset"),
    ):
        assert figures[ours]["mean"] > figures[theirs]["mean"], ours
        assert figures[ours]["computed"] < figures[theirs]["computed"], ours
    for ours in ("StableReActAgent", "SharedAgentWorkflow", "answer_at_tail"):
        assert figures[ours]["lowest"] == 1.0
