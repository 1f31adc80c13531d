"""The package as it is installed: names, layout and claims that LlamaIndex, pip and readers rely on."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import llama_index.llms.agentcache as package
import pytest
from cases import VOCAB, tokenizer
from llama_index.llms.agentcache import names

from agentcache import toy

ROOT = Path(__file__).parents[1]
CODE = ROOT / "llama_index" / "llms" / "agentcache"
README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```python\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)


def test_namespace_packages_have_no_init() -> None:
    assert not (ROOT / "llama_index" / "__init__.py").exists()
    assert not (ROOT / "llama_index" / "llms" / "__init__.py").exists()
    assert (CODE / "py.typed").is_file()


def test_pyproject_follows_the_convention() -> None:
    tomllib = pytest.importorskip("tomllib")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    assert project["project"]["name"] == "llama-index-llms-agentcache"
    assert project["tool"]["hatch"]["build"]["targets"]["wheel"]["include"] == ["llama_index/"]
    assert project["tool"]["llamahub"]["import_path"] == package.__name__ == "llama_index.llms.agentcache"
    needed = [re.split(r"[\[<>=]", one)[0] for one in project["project"]["dependencies"]]
    assert needed == ["agentcache-llm", "llama-index-core"]
    authors = project["tool"]["llamahub"]["class_authors"]
    assert all(hasattr(package, name) for name in authors)


def test_public_names_are_there_and_told() -> None:
    assert package.__all__ == sorted(package.__all__)
    for name in package.__all__:
        assert hasattr(package, name)
    told = {
        "AgentCacheLLM",
        "AppendOnlyMemory",
        "SharedAgentWorkflow",
        "StableReActAgent",
        "StableReActFormatter",
        "answer_at_tail",
        "ReceiptEvent",
        "RequestRecorder",
    }
    assert all(f"`{name}" in README for name in told)


def test_nothing_is_imported_but_what_is_declared() -> None:
    known = {"agentcache", "llama_index", "pydantic", "pydantic_core", "torch"}  # llama-index-core's own, and agentcache-llm's
    found = set()
    for path in CODE.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) and node.level == 0 else []
            found |= {name.split(".")[0] for name in names}
    standard = __import__("sys").stdlib_module_names
    assert found - set(standard) - {"__future__"} == known


def test_files_stay_small() -> None:
    for path in CODE.glob("*.py"):
        assert len(path.read_text(encoding="utf-8").splitlines()) <= 350, path.name


def _run_program(number: int, source: str) -> None:
    exec(compile(source, f"README.md, program {number + 1}", "exec", dont_inherit=True), {"__name__": "readme"})


@pytest.mark.filterwarnings("error::agentcache.errors.ReuseWarning")
def test_the_first_program_prints_what_the_readme_shows(capsys: pytest.CaptureFixture[str]) -> None:
    """As it stands, on the embedded model."""
    pytest.importorskip("llguidance")
    _run_program(0, BLOCKS[0])
    (shown,) = re.findall(r"^It prints:\n\n```\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)
    assert capsys.readouterr().out == shown


@pytest.mark.parametrize("number", range(1, len(BLOCKS)))
def test_programs_of_the_readme_run(number: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The others as they stand, on a tiny random model."""
    toy.model(VOCAB, layers=1, hidden=128).save_pretrained(tmp_path)
    tokenizer().save_pretrained(tmp_path)
    source = BLOCKS[number]
    assert '"Qwen/Qwen3-0.6B"' in source
    if "structured_predict" in source:
        pytest.importorskip("llguidance")
    source = source.replace('"Qwen/Qwen3-0.6B"', repr(str(tmp_path)))
    _run_program(number, source.replace("max_tokens=256", "max_tokens=200, store=None, constrain=False"))
    assert capsys.readouterr().out


def test_the_tables_of_names_are_what_the_code_knows() -> None:
    """Each setting that is refused stands in the README, and each that is renamed."""
    tables = README[README.index("### From HuggingFaceLLM") : README.index("### Servers and forks")]
    loading = {name for name, instead in names.INSTEAD.items() if instead == names.LOAD and name != "tokenizer_name"}
    elsewhere = {"attn_implementation", "num_beams", "num_output", "stop_sequences"}
    assert {name for name in {*names.INSTEAD, *names.SAME} - loading - elsewhere if name not in tables} == set()


def test_readme_and_examples_speak_of_the_same_figures() -> None:
    rows = re.findall(
        r"^\| [^|]+ \| `?[^|]+`? \| (\d+) % / (\d+) % \| ([\d,]+) \| [^|]+ \| (\d+) % / (\d+) % \| ([\d,]+) \|$", README, re.MULTILINE
    )
    assert len(rows) == 5
    for theirs_mean, _, theirs, ours_mean, _, ours in rows:
        assert int(ours_mean) > int(theirs_mean)
        assert int(ours.replace(",", "")) < int(theirs.replace(",", ""))


def test_links_of_the_readme_exist() -> None:
    for named in re.findall(r"`(?:python )?((?:examples|tests)/[\w/]+\.py)`", README):
        base = ROOT.parents[1] if named.startswith("examples") else ROOT
        assert (base / named).is_file(), named
