"""`agentcache lint` as a command: what it prints, writes and answers, and that text of a trace never becomes markup or control."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from agentcache.cli import app as cli
from agentcache.layout.declared import read_rules
from tests.checkout import ROOT
from tests.lint.requests import SYSTEM, conversation, with_system_line

NASTY = "</pre><script>alert(1)</script><img src=x onerror=alert(2)>\x1b]0;title\x07\u202e"


def run(*arguments: str | Path) -> tuple[int, str]:
    done = CliRunner().invoke(cli.app, ["lint", *map(str, arguments)], env={"COLUMNS": "160", "TERM": "dumb"})
    if done.exception and not isinstance(done.exception, SystemExit):
        raise done.exception
    return done.exit_code, done.output


@pytest.fixture
def clocked(tmp_path: Path) -> Path:
    """A log whose system text tells the time, to the second, behind a name that no page may obey."""
    bodies = with_system_line(conversation(2), [f"The current time is 2031-03-14 09:2{number}:53 UTC {NASTY}." for number in range(3)])
    return written(tmp_path / "clocked.jsonl", bodies)


@pytest.fixture
def clean(tmp_path: Path) -> Path:
    return written(tmp_path / "clean.jsonl", conversation(3))


def written(path: Path, bodies: list[dict[str, Any]]) -> Path:
    path.write_text("".join(f"{json.dumps({'conversation_id': NASTY, **body})}\n" for body in bodies), encoding="utf-8")
    return path


def test_steps_are_told_apart_without_colours(clocked: Path) -> None:
    _, said = run(clocked)
    assert "█ reused" in said
    assert "▒ computed again" in said
    assert "░ new" in said


def test_exit_codes(clocked: Path, clean: Path) -> None:
    assert run(clean)[0] == 0
    assert run(clocked)[0] == 1
    assert run(clocked, "--exit-zero")[0] == 0
    assert run(clocked, "--fail-under", "0.01")[0] == 0
    assert run(clocked, "--fail-under", "0.9")[0] == 1
    assert run(clean, "--fail-under", "0.99")[0] == 1


def test_the_summary_names_cause_writer_cost_and_fix(clocked: Path, clean: Path) -> None:
    _, said = run(clocked)
    for part in ("reusable as sent", "clock", "system", "tokens computed again", "Move the time out of system", "request 2", "hazards"):
        assert part in said
    assert "every request goes on" in run(clean)[1]
    assert "\x1b]" not in said
    assert "\x07" not in said
    assert "\u202e" not in said


def test_json_has_every_finding(clocked: Path) -> None:
    code, said = run(clocked, "--json", "--price-per-million", "3", "0.3")
    found = json.loads(said)
    assert code == 1
    assert len(found["findings"]) == 2
    assert {"request", "class", "writer", "token", "char", "cost_tokens", "fix", "conversation", "context"} <= set(found["findings"][0])
    assert found["findings"][0]["class"] == "clock"
    totals = found["totals"]
    assert totals["price"]["wasted"] == pytest.approx(totals["again_tokens"] * 2.7 / 1e6, abs=1e-6)
    assert totals["price"]["as_sent"] == pytest.approx(((totals["prompt_tokens"] - totals["reused_tokens"]) * 3 + totals["reused_tokens"] * 0.3) / 1e6, abs=1e-6)  # fmt: skip # noqa: E501


class _Page(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.open: list[str] = []
        self.attributes: set[str] = set()
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes |= {name for name, _ in attrs}
        if tag not in ("meta", "img"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def test_the_page_is_whole_and_obeys_no_trace(clocked: Path, tmp_path: Path) -> None:
    run(clocked, "--html", tmp_path / "page.html")
    source = (tmp_path / "page.html").read_text(encoding="utf-8")
    page = _Page()
    page.feed(source)
    page.close()
    assert page.open == []
    assert not {"script", "img", "link", "iframe", "object", "form"} & set(page.tags)
    assert not {name for name in page.attributes if name.startswith("on")} | page.attributes & {"src", "href"}
    assert "&lt;script&gt;alert(1)" in source
    assert page.text.count("█") == 3 * 3 + 3  # three requests, and what the colours mean
    assert "Move the time out of system" in page.text
    assert not re.search(r"https?://", source)
    assert "\u202e" not in source


def test_redacted_output_has_no_text_of_the_trace(clocked: Path, tmp_path: Path) -> None:
    bad = clocked.read_text() + '{"messages": [{"role": "petrel-role", "content": 1}, "Petrel"]}\n'
    clocked.write_text(bad)
    outputs = [run(clocked, "--redact", "--html", tmp_path / "page.html")[1], run(clocked, "--redact", "--json")[1]]
    for said in (*outputs, (tmp_path / "page.html").read_text()):
        for secret in ("Petrel", "petrel", "alert", "2031", "09:2", "ledger", "berth is"):
            assert secret not in said, secret
    assert json.loads(outputs[1])["findings"][0]["class"] == "clock"


def test_suggested_layout_is_what_the_engine_reads(clocked: Path, tmp_path: Path) -> None:
    path = tmp_path / "layout.toml"
    run(clocked, "--suggest-layout", path)
    assert len(read_rules(path)) == 1  # and is a file that can be read, whatever the trace says
    bodies = with_system_line(conversation(2), [f"Be brief. The current time is 2031-03-14 09:2{n}:53 UTC. Be kind." for n in range(3)])
    run(written(tmp_path / "log.jsonl", bodies), "--suggest-layout", path)
    (rule,) = read_rules(path)
    assert 'class = "clock"' in path.read_text()
    for now in ("2031-03-14 09:20:53 UTC", "2032-11-01 23:59:01 UTC"):
        system = SYSTEM.replace("\n", f"\nBe brief. The current time is {now}. Be kind.\n", 1)
        assert rule.search(system), rule.pattern
        left = rule.sub("", system)
        assert now not in left
        assert "Be kind." in left
        assert "Answer in one sentence." in left
    assert not rule.search(SYSTEM)


def test_counters_and_changed_lines_are_suggested_too(tmp_path: Path) -> None:
    bodies = with_system_line(conversation(2), [f"Step {number} of 9\nWeather: {'fog' * number}!" for number in range(1, 4)])
    run(written(tmp_path / "log.jsonl", bodies), "--suggest-layout", tmp_path / "layout.toml")
    rules = read_rules(tmp_path / "layout.toml")
    assert any(rule.search("Step 17 of 9") for rule in rules)
    run(written(tmp_path / "clean.jsonl", conversation(2)), "--suggest-layout", tmp_path / "layout.toml")
    assert read_rules(tmp_path / "layout.toml") == ()


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        ((), "--template"),
        (("nowhere.jsonl",), "nowhere.jsonl"),
        (("LOG", "--template", "x.jinja"), "one of them"),
        (("LOG", "--redact", "--suggest-layout", "x.toml"), "--redact"),
        (("LOG", "--chat-template", "x.jinja"), "--tokenizer"),
        (("LOG", "--price-per-million", "1", "2"), "two prices"),
        (("LOG", "--html", "no/such/folder/x.html"), "x.html"),
        (("LOG", "--tokenizer", "no/such/tokenizer"), "no/such/tokenizer"),
        (("EMPTY",), "no request"),
    ],
)
def test_what_cannot_work_is_said_in_one_line(clean: Path, tmp_path: Path, arguments: tuple[str, ...], word: str) -> None:
    (tmp_path / "empty.jsonl").write_text('{"a": 1}\n')
    named = {"LOG": str(clean), "EMPTY": str(tmp_path / "empty.jsonl")}
    code, said = run(*(named.get(argument, argument) for argument in arguments))
    assert code == 1
    assert said.startswith("agentcache: ")
    assert word in said
    assert said.count("\n") == 1


@pytest.mark.parametrize(
    "over",
    ["--html x.html", "--redact", "--suggest-layout x.toml", "--tokenizer T", "--chat-template x.jinja", "--price-per-million 3 0.3"]
    + ["--fail-under 0", "--across", "--transcripts", "--tools-first", "--system-first"],
)
def test_what_does_not_go_with_a_template_is_named(tmp_path: Path, over: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    code, said = run("--template", "T", *over.split())
    assert (code, said.count("\n")) == (1, 1)
    assert said.startswith("agentcache: --template='T'")
    assert over.split()[0] in said.partition("leave out")[2]
    assert list(tmp_path.iterdir()) == []


def test_code_that_is_run_is_said_to_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "pier_log.py").write_text(f"REQUESTS = {conversation(1)!r}\n")
    code, said = run("pier_log:REQUESTS")
    sys.modules.pop("pier_log", None)
    assert code == 0
    assert "pier_log:REQUESTS is imported and run" in said


def test_lint_loads_no_torch(clean: Path) -> None:
    program = (
        f"import sys; sys.argv = ['agentcache', 'lint', {str(clean)!r}]\n"
        "import agentcache_llm\n"
        "try: agentcache_llm.main()\n"
        "except SystemExit as end: assert not end.code\n"
        "print(*({'torch', 'transformers', 'numpy'} & set(sys.modules)), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert "1 conversation" in done.stdout
    assert done.stderr.strip() == ""
