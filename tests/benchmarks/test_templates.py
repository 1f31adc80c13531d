"""Chat templates of real models, tried: which are refused, whose calls are read."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tests import chat_templates

pytest.importorskip("llguidance")


def test_a_folder_of_templates_is_tried(tmp_path: Path) -> None:
    from benchmarks import templates

    app = templates.typer.Typer()
    app.command()(templates.main)
    odd = chat_templates.CHATML.replace("<tool_call>", "CALL").replace("</tool_call>", "LLAC")
    refusing = "{{ raise_exception('no') }}"
    for name, text in {"chatml": chat_templates.CHATML, "odd": odd, "refusing": refusing, "twin": chat_templates.CHATML}.items():
        (tmp_path / f"{name}.jinja").write_text(text)
    done = CliRunner().invoke(app, [str(tmp_path), "--json", str(tmp_path / "found.json")])
    assert done.exit_code == 0, done.output
    rows = {row["template"]: row for row in json.loads((tmp_path / "found.json").read_text())["rows"]}
    assert rows.keys() == {"chatml.jinja", "odd.jinja", "refusing.jinja"}
    assert [rows[f"{name}.jinja"]["calls"] for name in ("chatml", "odd", "refusing")] == ["read", "not read", "-"]
    assert [rows[f"{name}.jinja"]["equal"] for name in ("chatml", "odd", "refusing")] == [True, True, None]
    assert rows["chatml.jinja"]["new_tokens"] < rows["chatml.jinja"]["prompt_tokens"] / 2
    assert "no" in rows["refusing.jinja"]["why"]
