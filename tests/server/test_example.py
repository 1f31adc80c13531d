"""The example of two agents, and the commands of docs/serve.md, against a running server."""

from __future__ import annotations

import re
import runpy
import subprocess
import textwrap

import pytest

from tests.checkout import ROOT
from tests.serving import Served

PAGE = (ROOT / "docs" / "serve.md").read_text()


def test_the_second_agent_finds_what_the_first_computed(served: Served, capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(ROOT / "examples" / "serve_two_agents.py"))["main"](served.url)
    found = [tuple(map(int, pair)) for pair in re.findall(r"(\d+) of (\d+) tokens cached", capsys.readouterr().out)]
    assert len(found) == 4
    assert found[0][0] < 64
    assert all(cached > 0.8 * prompt for cached, prompt in found[1:])


def test_without_a_server_the_example_says_what_to_start() -> None:
    url = "http://127.0.0.1:1"
    with pytest.raises(SystemExit, match=rf"^{url}: .*refused.* Start a server there first: agentcache serve embedded &$"):
        runpy.run_path(str(ROOT / "examples" / "serve_two_agents.py"))["main"](url)


@pytest.mark.parametrize("command", re.findall(r"^    (curl -s .*?\}')$", PAGE, re.M | re.S))
def test_the_pages_commands_work(served: Served, command: str) -> None:
    said = command.replace("http://127.0.0.1:8787", served.url).replace("curl -s", "curl -sf")
    done = subprocess.run(["bash", "-c", said], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith("{")


def test_the_pages_program_works(served: Served, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("openai")
    (source,) = re.findall(r"^    from openai .*?(?=^\S)", PAGE, re.M | re.S)
    exec(compile(textwrap.dedent(source).replace("http://127.0.0.1:8787", served.url), "serve.md", "exec"), {})
    assert capsys.readouterr().out.strip().isdigit()
