"""Every program in examples/ runs and says what its docstring promises."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.checkout import ROOT
from tests.processes import program
from tests.saved_adapters import save_for

EXAMPLES = {
    "adapters.py": (["ROUTER", "CALLER", "JUDGE"], "judge: "),
    "agent_loop.py": (["What is 17 * 23?"], "step 0: "),
    "many_agents.py": ([], "shop: "),
}


def saved(role: str, model_folder: Path, folder: Path) -> str:
    """An adapter of that model: a LoRA of the upper half, a DoRA, or one that acts from the answer on."""
    model, tokenizer = AutoModelForCausalLM.from_pretrained(model_folder), AutoTokenizer.from_pretrained(model_folder)
    invocation = tokenizer.encode("<|im_start|>assistant\n", add_special_tokens=False)
    upper = list(range(model.config.num_hidden_layers // 2, model.config.num_hidden_layers))
    kinds = {"ROUTER": {"layers_to_transform": upper}, "CALLER": {"use_dora": True}, "JUDGE": {"alora_invocation_tokens": invocation}}
    return str(save_for(model, folder, **kinds[role]))


def test_every_example_is_run_here_or_by_its_integration() -> None:
    found = {path.name for path in (ROOT / "examples").glob("*.py")}
    assert {name for name in found if not name.startswith(("langchain_", "llamaindex_", "serve_"))} == set(EXAMPLES)
    assert "serve_two_agents.py" in (ROOT / "tests" / "server" / "test_example.py").read_text(encoding="utf-8")
    tests = [path.parent for path in (ROOT / "integrations").rglob("test_examples.py")]
    assert len(tests) == 2, "the others are run by the tests of their integration, which check that they run all of them"


@pytest.mark.parametrize("name", sorted(EXAMPLES))
def test_example_runs(name: str, model_folder: Path, tmp_path: Path) -> None:
    arguments, said = EXAMPLES[name]
    arguments = [saved(word, model_folder, tmp_path / word) if word.isupper() else word for word in arguments]
    printed, _ = program((ROOT / "examples" / name).read_text(encoding="utf-8"), model_folder, *arguments)
    assert said in printed
    assert "cached" in printed
