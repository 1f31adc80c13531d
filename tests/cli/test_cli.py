"""The command line: answers at once, and says things plainly."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

import agentcache_llm
from agentcache import Schema, __version__, terminal
from agentcache.bench import families, report
from agentcache.cli import app as cli
from agentcache.cli.store import given_system, given_tools
from agentcache.errors import ConfigError
from agentcache.layout.declared import read_rules
from agentcache.lint.templated import read_template
from agentcache.policy import Policy
from agentcache.server.tenants import Tenants
from tests import models
from tests.checkout import ROOT


def _run(*arguments: str) -> tuple[int, str]:
    done = CliRunner().invoke(cli.app, arguments, env={"COLUMNS": "120", "TERM": "dumb"})
    if done.exception and not isinstance(done.exception, SystemExit):
        raise done.exception
    return done.exit_code, done.output


def test_help_names_every_verb() -> None:
    code, said = _run("--help")
    assert code == 0
    assert {"demo", "doctor", "bench"} <= set(said.split())


def test_help_cuts_no_sentence_in_80_columns() -> None:
    for words in ([], ["bench"], ["receipts"]):
        done = CliRunner().invoke(cli.app, [*words, "--help"], env={"COLUMNS": "80"})
        assert "..." not in done.output.split("Commands:")[1], done.output


def test_an_error_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(typer.Exit), terminal.report_errors():
        raise ConfigError("first\nsecond")
    assert capsys.readouterr().err == "agentcache: first second\n"


def test_help_loads_little() -> None:
    program = (
        "import sys; sys.argv = ['agentcache', '--help']\n"
        "import agentcache_llm\n"
        "try: agentcache_llm.main()\n"
        "except SystemExit as end: assert not end.code\n"
        "print(*({'torch', 'transformers', 'numpy', 'rich.markdown'} & set(sys.modules)), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert "demo" in done.stdout
    assert done.stderr.strip() == ""


def test_version() -> None:
    assert _run("--version") == (0, f"agentcache {__version__}\n")


def test_module_is_the_command() -> None:
    done = subprocess.run([sys.executable, "-m", "agentcache", "--version"], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == f"agentcache {__version__}\n"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="only Linux has it")
def test_a_full_disk_is_told_in_one_line() -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run([sys.executable, "-m", "agentcache", "--version"], cwd=ROOT, stdout=full, stderr=subprocess.PIPE, text=True)
    assert (done.returncode, done.stderr) == (1, "agentcache: its output cannot be written: No space left on device\n")


def test_doctor_json_says_versions_machine_and_numerics() -> None:
    code, said = _run("doctor", "--json")
    report = json.loads(said)
    assert code == 0
    assert report["installation"] == "ok"
    assert report["versions"]["agentcache"] == __version__
    assert report["machine"]["cores"] >= 1
    assert report["numerics"]["float32"]["numerics"]


def test_doctor_table_shows_nested_rows() -> None:
    code, said = _run("doctor")
    assert code == 0
    assert "  torch " in said
    assert "bitwise" in said
    assert "{" not in said


def test_doctor_of_a_model(model_folder: Path) -> None:
    done = CliRunner().invoke(cli.app, ["doctor", "--json", "--model", str(model_folder)])
    model = json.loads(done.stdout)["model"]
    assert model["family"] == "qwen3"
    assert model["reuse"] is True


@pytest.mark.parametrize(
    ("family", "told", "layers"),
    [
        (
            "gemma3_text",
            {
                "reuse": True,
                "proof": "made by this load",
                "reused": "prefixes of any length",
                "promise": "the bits",
                "KV bytes per token": 1024,
            },
            {"attend to the last 48 tokens": 2, "attend to all tokens": 2},
        ),
        (
            "gemma3n_text",
            {"reuse": True, "promise": "the bits", "KV bytes per token": 512},
            {"attend to the last 48 tokens": 2, "attend to all tokens": 2, "of these, read what an earlier one keeps": 2},
        ),
        (
            "gpt_oss",
            {"reuse": True, "promise": "the bits", "KV bytes per token": 1024},
            {"attend to the last 48 tokens, with sinks": 2, "attend to all tokens, with sinks": 2},
        ),
        ("longcat_flash", {"reuse": True, "promise": "the greedy tokens of reuse off, no bits: experts"}, None),
        (  # per checkpoint: 3 layers of 4 states 16 * 16, and of 4 numbers for 128 channels, in fp32
            "qwen3_5_text",
            {"reuse": True, "reused": "prefixes up to a checkpoint", "KV bytes per token": 256, "bytes per checkpoint": 18432},
            {"attend to all tokens": 1, "keep a state that does not grow": 3},
        ),
        (
            "youtu",
            {"reuse": True, "promise": "the bits", "KV bytes per token": 640},
            {"attend to all tokens": 4, "of these, latent: pages hold latents": 4},
        ),
        ("llama", {"reuse": True, "proof": "none needed", "promise": "the bits", "KV bytes per token": 1024}, {"attend to all tokens": 4}),
        (
            "recurrent_gemma",
            {  # the second reason is transformers 5.20's
                "reuse": False,
                "why not": ("continued after 64 tokens", "cut after (1, 64"),
                "reused": "nothing",
                "promise": "the model's own",
            },
            None,
        ),
        (
            "deepseek_v32",
            {"reuse": True, "promise": "the greedy tokens", "KV bytes per token": 896},
            {
                "attend to all tokens": 4,
                "of these, choose the tokens that they see: pages hold an indexer's keys, too": 4,
                "of these, latent: pages hold latents": 4,
            },
        ),
        (
            "inkling_text",
            {"reuse": False, "proof": "none made", "why not": "attention of 'InklingAttention' depends on 'position_bias' (a"},
            None,
        ),
    ],
)
def test_doctor_prints_the_verdict(family: str, told: dict[str, object], layers: dict[str, int] | None, tmp_path: Path) -> None:
    families.build(family).save_pretrained(tmp_path)
    models.toy_tokenizer().save_pretrained(tmp_path)
    done = CliRunner().invoke(cli.app, ["doctor", "--json", "--model", str(tmp_path)])
    assert done.exit_code == 0, done.output
    said = json.loads(done.stdout)["model"]
    assert layers is None or said["layers"] == layers
    assert ("why not" in said) is not said["reuse"]
    for label, value in told.items():
        assert said[label].startswith(value) if isinstance(value, str | tuple) else said[label] == value, label


def test_doctor_says_plainly_that_a_model_is_missing() -> None:
    code, said = _run("doctor", "--model", "/no/such/model")
    assert code == 1
    assert said.startswith("agentcache: model '/no/such/model' cannot be loaded")


def test_doctor_fails_when_the_installation_is_mixed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("agentcache_llm.conflict", lambda: "something is in the way")
    monkeypatch.setattr("agentcache_llm._quick_conflict", lambda: None)
    monkeypatch.setattr(sys, "argv", ["agentcache", "doctor"])
    with pytest.raises(SystemExit) as ended:
        agentcache_llm.main()
    assert ended.value.code == 1
    assert "something is in the way" in capsys.readouterr().out


@pytest.mark.parametrize(
    "command",
    [
        ["demo", "--json"],
        ["bench", "store", "--json"],
        ["bench", "latency", "--json"],
        ["bench", "segments", "--json"],
        ["calibrate", "--out"],
    ],
)
def test_an_unwritable_file_is_refused_before_computing(command: list[str], tmp_path: Path) -> None:
    code, said = _run(*command, str(tmp_path / "none" / "x"))
    assert code == 2
    assert "is in a folder that is not there" in " ".join(said.replace("│", " ").split())
    code, said = _run(*command, str(tmp_path))
    assert code == 2
    assert "is a folder" in " ".join(said.replace("│", " ").split())


def test_figures_are_printed_though_the_disk_is_full(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    full = tmp_path / "gone" / "x.json"
    report.Run(None, report.Progress(), {}, full).keep({"part": 1})  # more parts are to come
    assert "cannot be written" in capsys.readouterr().err
    with pytest.raises(ConfigError, match=r"x\.json' cannot be written: No such file"):
        report.finish({"part": 2}, [], full)
    assert json.loads(capsys.readouterr().out) == {"part": 2}


@pytest.mark.parametrize(
    "command",
    [
        "warm embedded --system x --store STORE",
        "serve embedded --port 0",
        "replay FILE",
        "bench latency",
        "bench quality",
        "bench families",
    ],
    ids=lambda command: " ".join(command.split()[:2]),
)
def test_a_device_that_is_not_there_is_refused(command: str, tmp_path: Path) -> None:
    asked = tmp_path / "asked.jsonl"
    asked.write_text('{"messages": [{"role": "user", "content": "hello"}]}\n')
    code, said = _run(*command.replace("FILE", str(asked)).replace("STORE", str(tmp_path / "store")).split(), "--device", "nowhere")
    assert code == 1
    assert "device='nowhere': cannot be used here" in " ".join(said.split())


def test_calibrate_looks_at_its_store_first(tmp_path: Path) -> None:
    (tmp_path / "store").write_text("no folder")
    code, said = _run("calibrate", "--made-up", "1", "--model", "/no/such/model", "--store", str(tmp_path / "store"))
    assert code == 1
    assert "/no/such/model" not in said


def test_rows_of_a_report() -> None:
    report = {"a": {"b": True, "c_bytes": 2**31, "d": None, "e": ["x", 1], "f": []}}
    rows = [(label.strip(), value) for label, value in terminal.lines(report)]
    assert rows == [("a", ""), ("b", "yes"), ("c", "2.0 GB"), ("d", "unknown"), ("e", "x, 1"), ("f", "none")]


READERS: dict[str, tuple[Callable[[Path], Any], str]] = {
    "tools": (given_tools, '[{"type": "function"}]'),
    "system prompt": (lambda path: given_system(str(path)), "You are a clerk."),
    "rules": (read_rules, "[[volatile]]\npattern = '^It is .*$'\n"),
    "schema": (lambda path: Schema.from_file(path).name, "name = 'desk'\n[[parts]]\nname = 'a'\ntext = 'b'\n"),
    "policy": (lambda path: Policy.read(path).rules, "[[rule]]\nrequests = 2\n"),
    "keys": (lambda path: Tenants.read(path, 4).of(None, "k" * 40).name, f"[one]\nkey = {'k' * 40!r}\n"),
    "chat template": (read_template, "{% for message in messages %}{{ message.content }}{% endfor %}"),
}


@pytest.mark.parametrize("kind", READERS)
def test_a_byte_order_mark_is_no_part_of_a_file(tmp_path: Path, kind: str) -> None:
    read, text = READERS[kind]
    found = []
    for encoding in ("utf-8", "utf-8-sig"):
        (tmp_path / "given").write_text(text, encoding)
        found.append(read(tmp_path / "given"))
    assert found[0] == found[1]


def test_tools_nested_too_deep_are_refused(tmp_path: Path) -> None:
    (tmp_path / "tools.json").write_text("[" * 100_000)
    with pytest.raises(ConfigError, match="cannot be read"):
        given_tools(tmp_path / "tools.json")
