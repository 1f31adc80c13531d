"""ModelFacts: what is known of a model from its files, or from a running engine."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from transformers import XLNetConfig, XLNetLMHeadModel

from agentcache import Engine, ModelFacts, Sampling, embedded
from agentcache.errors import ContextOverflowError
from agentcache.layout import rendering
from agentcache.toy import CHAT_TEMPLATE
from tests import models
from tests.chat_templates import CHATML
from tests.engines import engine

NO_TOOLS = "{% for m in messages %}{{ '<|im_start|>' + m.role + m.content + '<|im_end|>' }}{% endfor %}"


def test_of_a_folder_and_of_its_engine(model_folder: Path) -> None:
    found = ModelFacts.of_files(str(model_folder))
    assert found.context_tokens == json.loads((model_folder / "config.json").read_text())["max_position_embeddings"]
    assert (found.reasoning, found.tool_calling) == (False, True)
    with Engine(str(model_folder), store=None) as engine:
        assert ModelFacts.of_engine(engine) == found
        assert ModelFacts.of_engine(engine, chat_template=NO_TOOLS).tool_calling is False


@pytest.mark.parametrize(
    ("rope", "tokens"),
    [
        ({"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}, 256),  # as Qwen's model cards say it
        ({"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}, 64),  # as DeepSeek's config says it
        ({"type": "linear", "factor": 2.0}, 128),
        ({"type": "dynamic", "factor": 2.0}, 128),
        ({"type": "llama3", "factor": 32.0, "low_freq_factor": 1, "high_freq_factor": 4, "original_max_position_embeddings": 16}, 64),
    ],
)
def test_a_context_that_rope_stretches(rope: dict[str, Any], tokens: int, tmp_path: Path) -> None:
    models.build("qwen2", max_position_embeddings=64).save_pretrained(tmp_path)
    models.toy_tokenizer().save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "rope_parameters": None, "rope_theta": 1e6, "rope_scaling": rope}))
    assert ModelFacts.of_files(str(tmp_path)).context_tokens == tokens
    with Engine(str(tmp_path), store=None) as engine:
        assert ModelFacts.of_engine(engine).context_tokens == tokens
        assert engine.generate("tide " * (tokens // 8), sampling=Sampling(ignore_eos=True)).receipt.prompt_tokens < tokens
        with pytest.raises(ContextOverflowError):
            engine.generate("tide and wind " * tokens)


def test_a_context_of_minus_one_has_no_bound() -> None:
    config = XLNetConfig(vocab_size=1200, d_model=32, n_layer=1, n_head=2, d_inner=64)
    assert config.max_position_embeddings == -1
    with engine(model=XLNetLMHeadModel(config).eval(), store=None) as running:
        assert running.generate("tide", sampling=Sampling(max_tokens=2)).receipt.path == "stock"
        assert ModelFacts.of_engine(running).context_tokens is None


def test_of_a_chat_template_that_is_given(model_folder: Path) -> None:
    of = lambda template: ModelFacts.of_files(str(model_folder), chat_template=template)  # noqa: E731
    assert of(NO_TOOLS).tool_calling is False
    assert of(CHAT_TEMPLATE + "{%- if enable_thinking is defined %}{{- '<think>' }}{%- endif %}").reasoning is True
    assert of(NO_TOOLS + "{# [THINK] #}").reasoning is True
    assert of(CHATML).later_system is True
    assert of("{% for %}").tool_calling is False, "it shows nothing"


def test_a_chat_template_in_the_file_of_a_processor(model_folder: Path, tmp_path: Path) -> None:
    shutil.copytree(model_folder, tmp_path / "copy")
    (tmp_path / "copy" / "chat_template.jinja").unlink()
    (tmp_path / "copy" / "chat_template.json").write_text(json.dumps({"chat_template": CHATML}))
    assert ModelFacts.of_files(str(tmp_path / "copy")).later_system is True
    with Engine(str(tmp_path / "copy"), store=None) as engine:
        assert ModelFacts.of_engine(engine).later_system is True
        assert engine.tokenizer.chat_template == CHATML


def test_of_a_chat_template_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendering, "LIMIT_S", 0.05)
    loops = "{% for a in range(9999) %}{% for b in range(9999) %}{% endfor %}{% endfor %}"
    assert ModelFacts.of_files("", chat_template=loops) == ModelFacts(reasoning=False), "it cannot be tried out"


def test_a_response_template_with_a_place_for_thoughts(model_folder: Path, tmp_path: Path) -> None:
    shutil.copytree(model_folder, tmp_path / "copy")
    config = tmp_path / "copy" / "tokenizer_config.json"
    said = json.loads(config.read_text(encoding="utf-8"))
    config.write_text(json.dumps({**said, "response_template": {"fields": {"thinking": {"open": "<|a|>", "close": "<|b|>"}}}}))
    assert ModelFacts.of_files(str(tmp_path / "copy")).reasoning is True
    config.write_text("{broken")
    assert ModelFacts.of_files(str(tmp_path / "copy")).context_tokens == ModelFacts.of_files(str(model_folder)).context_tokens


@pytest.mark.parametrize("name", ["", "nobody/has-this", "no such name"])
def test_what_is_not_here_is_unknown(name: str) -> None:
    assert ModelFacts.of_files(name) == ModelFacts()


def test_of_the_embedded_model() -> None:
    found = ModelFacts.of_files(embedded.NAME)
    assert (found.context_tokens, found.tool_calling) == (8192, True)
