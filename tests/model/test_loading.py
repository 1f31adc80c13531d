"""Folders as users have them, that cannot be loaded whole: each is refused in words that name what is wrong, and the way out."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from agentcache.errors import ConfigError, ModelLoadError
from agentcache.model import unreadable
from agentcache.model.loading import load
from agentcache.model.unreadable import said
from tests import models
from tests.saved_adapters import save_for


def test_a_folder_that_holds_no_model_is_named(tmp_path: Path) -> None:
    models.build("llama").save_pretrained(tmp_path / "checkpoint-10")
    with pytest.raises(ModelLoadError, match="cannot be loaded: it holds no config.json, as save_pretrained writes it"):
        load(tmp_path)


def test_a_config_that_transformers_refuses_is_named(tmp_path: Path) -> None:
    models.build("qwen3").save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 5}))
    with pytest.raises(ModelLoadError, match=r"`num_hidden_layers` \(5\) must be equal"):
        load(tmp_path)


def test_weights_of_other_shapes_than_the_configs_are_named(tmp_path: Path) -> None:
    models.build("llama").save_pretrained(tmp_path)
    models.build("llama", vocab_size=640).config.save_pretrained(tmp_path)
    with pytest.raises(ModelLoadError, match=r"shapes of its weights are not those of its config.json: transformers' report"):
        load(tmp_path)


def test_a_sentencepiece_model_names_the_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("tiktoken")  # which transformers tries instead
    models.build("llama").save_pretrained(tmp_path)
    (tmp_path / "tokenizer.model").write_bytes(b"\x0e\n\x05<unk>")
    monkeypatch.setitem(sys.modules, "sentencepiece", None)
    monkeypatch.setattr(unreadable, "find_spec", lambda name: None)
    with pytest.raises(ModelLoadError, match=r"tokenizer.model, which sentencepiece reads: pip install sentencepiece protobuf"):
        load(tmp_path)


def test_a_key_that_is_missing_is_called_one() -> None:
    assert said(KeyError("mrope")) == "KeyError: 'mrope'"


def test_a_package_that_is_missing_is_called_one() -> None:
    error = ModuleNotFoundError("No module named 'torchao.quantization'", name="torchao.quantization")
    assert said(error) == "it needs the Python package 'torchao', which is not installed: install it"


@pytest.mark.parametrize("config", [{"quant_method": "modelopt", "quant_algo": "FP8"}, None], ids=str)
@pytest.mark.parametrize("family", ["llama", "mixtral"])
def test_weights_without_their_scales_are_refused(family: str, config: dict[str, str] | None, tmp_path: Path) -> None:
    models.build(family).save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    names = [name for name in weights if name.endswith("weight") and weights[name].ndim == 2 and (".experts." in name or family == "llama")]
    for name in [name for name in names if ".layers." in name]:  # as NVIDIA's and vLLM's tools write one scale for each weight
        weights |= {name: weights[name].to(torch.float8_e4m3fn), f"{name}_scale": torch.tensor(0.01)}
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    said = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(said | ({"quantization_config": config} if config else {})))
    with pytest.raises(ModelLoadError, match=r"does not read the scales 'model.layers.0.*weight_scale' and \d+ more"):
        load(tmp_path, models.toy_tokenizer())


def test_scales_of_layers_that_are_not_loaded_are_left_out(tmp_path: Path) -> None:
    models.build("llama").save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors") | {"model.layers.9.mlp.up_proj.weight_scale": torch.ones(1)}
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    load(tmp_path, models.toy_tokenizer())


def test_a_damaged_file_of_the_tokenizer_is_named(tmp_path: Path) -> None:
    models.build("llama").save_pretrained(tmp_path)
    models.toy_tokenizer().save_pretrained(tmp_path)
    (tmp_path / "tokenizer.json").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n")
    with pytest.raises(ModelLoadError, match="JSON beside its weights, which begins 'version https://git.* is damaged .* download it"):
        load(tmp_path)


def test_an_adapter_without_tokenizer_has_its_bases(tmp_path: Path) -> None:
    model, base = models.build("qwen3"), tmp_path / "base"
    model.save_pretrained(base)
    models.toy_tokenizer().save_pretrained(base)
    model.name_or_path = model.config._name_or_path = str(base)
    made, tokenizer = load(save_for(model, tmp_path / "adapter"))
    assert "default" in made.peft_config
    assert tokenizer.get_vocab() == models.toy_tokenizer().get_vocab()


def test_an_adapter_that_is_not_read_whole_is_named(tmp_path: Path) -> None:
    model, base = models.build("qwen3"), tmp_path / "base"
    model.save_pretrained(base)
    model.name_or_path = model.config._name_or_path = str(base)
    with pytest.raises(ModelLoadError, match=r"no '.*lora_magnitude_vector.* name its base as the model, and this folder in adapters="):
        load(save_for(model, tmp_path / "adapter", use_dora=True), models.toy_tokenizer())


def test_an_adapter_without_peft_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    models.build("qwen3").save_pretrained(tmp_path)
    (tmp_path / "adapter_config.json").write_text("{}")
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(ConfigError, match=r"needs peft; pip install 'agentcache-llm\[adapters\]'"):
        load(tmp_path)
