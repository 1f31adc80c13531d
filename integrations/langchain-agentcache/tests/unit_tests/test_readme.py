"""The README's programs run as they stand, one behind the other; its table has every setting."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import script
from langchain_agentcache import AgentCacheLLM, ChatAgentCache
from langchain_core.language_models import BaseChatModel

README = (Path(__file__).resolve().parents[2] / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```python\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)
PRINTED = re.search(r"^```text\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)
assert PRINTED


def _answer(messages: Any, tools: Any, constraint: Any) -> str | None:
    """A model that knows what it must call."""
    said = {"any": script.call("tide", harbour="Port Averil"), "Tide": script.call("Tide", harbour="Port Averil", hour=3)}
    return said.get(constraint.tool_choice) if constraint else None


def test_programs_run(model_folder: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # they write files
    monkeypatch.setattr(script, "answer", _answer)
    names: dict[str, Any] = {"__name__": "__main__"}
    for number, block in enumerate(BLOCKS, 1):
        exec(compile(block.replace('"Qwen/Qwen3-0.6B"', repr(model_folder)), f"README.md, program {number}", "exec"), names)
    said = capsys.readouterr().out
    assert "'name': 'tide'" in said
    assert re.search(r"harbour='.*' hour=\d+", said)
    assert re.search(r"'cache_read': [1-9]\d", said)
    assert said.startswith(PRINTED.group(1)), "what it says that the first program prints"


def test_every_setting_is_named() -> None:
    own = (ChatAgentCache.model_fields.keys() | AgentCacheLLM.model_fields.keys()) - BaseChatModel.model_fields.keys() - {"streaming"}
    table = README[README.index("## Settings") :]
    assert [name for name in sorted(own) if f"`{name}`" not in table] == []
