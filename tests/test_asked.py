"""What a request and an engine may be asked beside the prompt: probabilities, a shorter context, code and revisions of a model, copies."""

from __future__ import annotations

import copy
import json
import pickle
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tokenizers.normalizers import Strip

from agentcache import Constraint, Engine, Sampling
from agentcache.errors import ConfigError, ContextOverflowError, MessageError, ModelLoadError
from tests.models import build, toy_tokenizer

PROMPT = "The keeper writes down the wind,"


@pytest.fixture(scope="module")
def engine() -> Any:
    """A small engine that keeps nothing on disk."""
    with Engine(build("llama"), toy_tokenizer(), store=None, memory_bytes=64 << 20) as made:
        yield made


# -- how likely each token was -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("temperature", "penalty"), [(0.0, 1.0), (0.9, 1.5)])
def test_logprobs_are_of_the_model_s_own_distribution(engine: Engine, temperature: float, penalty: float) -> None:
    rows: list[torch.Tensor] = []
    sampling = Sampling(max_tokens=7, temperature=temperature, repetition_penalty=penalty, seed=3, logprobs=2)
    done = engine.generate(PROMPT, sampling=sampling, on_logits=lambda row: rows.append(row.clone()))
    assert [each.token for each in done.logprobs] == list(done.ids)
    for row, each in zip(rows, done.logprobs):
        logs = row.log_softmax(-1)
        assert each.logprob == pytest.approx(float(logs[each.token]), abs=1e-6)
        assert [token for token, _ in each.top] == logs.topk(2).indices.tolist()


def test_logprobs_under_a_constraint(engine: Engine) -> None:
    done = engine.generate(PROMPT, sampling=Sampling(max_tokens=9, logprobs=0), constraint=Constraint(regex="[0-9]{4}"))
    assert len(done.logprobs) == len(done.ids)
    assert all(each.top == () and each.logprob < 0 for each in done.logprobs)


def test_nothing_is_told_unasked(engine: Engine) -> None:
    assert engine.generate(PROMPT, sampling=Sampling(max_tokens=2)).logprobs == ()
    for wrong in (-1, True, 1.5):
        with pytest.raises(ConfigError, match=f"logprobs={wrong!r}: must be None or how many"):
            Sampling(logprobs=wrong)  # type: ignore[arg-type]


# -- a shorter context -------------------------------------------------------------------------------------------------


def test_a_context_holds_prompt_and_completion(engine: Engine) -> None:
    prompt = engine.generate(PROMPT, sampling=Sampling(max_tokens=1)).receipt.prompt_tokens
    done = engine.generate(PROMPT, sampling=Sampling(max_tokens=50, ignore_eos=True, context_tokens=prompt + 3))
    assert (len(done.ids), done.finish_reason) == (3, "length")
    with pytest.raises(
        ContextOverflowError, match=f"exceeds context_tokens={prompt}, which counts both, by 1: raise context_tokens"
    ) as caught:
        engine.stream(PROMPT, sampling=Sampling(context_tokens=prompt))
    assert (caught.value.context_tokens, caught.value.over_tokens) == (prompt, 1)
    whole = engine.model.context_tokens
    with pytest.raises(ContextOverflowError, match=f"exceeds the context of {whole} tokens by .*: shorten the history"):
        engine.stream("tide " * whole, sampling=Sampling(context_tokens=whole + 1))
    for wrong in (0, True, 1.5):
        with pytest.raises(ConfigError, match=f"context_tokens={wrong!r}: must be None or an integer of at least 1"):
            Sampling(context_tokens=wrong)  # type: ignore[arg-type]


# -- copies ------------------------------------------------------------------------------------------------------------


def test_a_copy_is_the_engine_itself(engine: Engine) -> None:
    assert copy.deepcopy({"engine": engine})["engine"] is engine
    with pytest.raises(ConfigError, match="cannot be pickled: it holds weights and threads; make one in each process"):
        pickle.dumps(engine)


# -- revisions, tokens, code -------------------------------------------------------------------------------------------


def test_what_the_hub_is_told(model_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """To the model's loader and to the tokenizer's."""
    told: list[dict[str, Any]] = []
    for name in ("AutoModelForCausalLM", "AutoTokenizer"):
        kind = getattr(transformers, name)
        original = kind.from_pretrained

        def loading(model: Any, original: Any = original, **options: Any) -> Any:
            told.append({key: value for key, value in options.items() if key in ("revision", "token", "trust_remote_code")})
            return original(model_folder, **{key: value for key, value in options.items() if key not in ("revision", "token")})

        monkeypatch.setattr(f"agentcache.model.loading.{name}.from_pretrained", loading)
    Engine("owner/model", store=None, memory_bytes=0, revision="v2", token="secret").close()
    assert told == [{"revision": "v2", "token": "secret", "trust_remote_code": False}] * 2


CODE = """
from transformers import LlamaConfig, LlamaForCausalLM
class OwnConfig(LlamaConfig):
    model_type = "own-lighthouse"
class OwnForCausalLM(LlamaForCausalLM):
    config_class = OwnConfig
"""


@pytest.fixture
def own_code(model_folder: Path, tmp_path: Path) -> Path:
    """A model folder that brings code."""
    place = tmp_path / "own"
    shutil.copytree(model_folder, place)
    build("llama").save_pretrained(place)
    toy_tokenizer().save_pretrained(place)
    (place / "own_code.py").write_text(CODE)
    config = json.loads((place / "config.json").read_text())
    names = {"AutoConfig": "own_code.OwnConfig", "AutoModelForCausalLM": "own_code.OwnForCausalLM"}
    (place / "config.json").write_text(json.dumps({**config, "model_type": "own-lighthouse", "auto_map": names}))
    return place


def test_code_of_a_model_runs_if_it_is_trusted(own_code: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr("builtins.input", lambda *said: pytest.fail("nobody sits at a terminal"))
    with pytest.raises(ModelLoadError, match="trust_remote_code=True"):
        Engine(str(own_code), store=None)
    with Engine(str(own_code), store=None, memory_bytes=0, trust_remote_code=True) as made:
        assert type(made.model.model).__name__ == "OwnForCausalLM"
        assert made.generate(PROMPT, sampling=Sampling(max_tokens=2)).ids


def test_what_cannot_be_had_is_said(model_folder: Path) -> None:
    with pytest.raises(ConfigError, match="revision='v2' with the folder .*, which holds one revision: name the Hugging Face id"):
        Engine(str(model_folder), revision="v2", store=None)
    for options in ({"revision": "v2"}, {"token": "x"}, {"trust_remote_code": True}):
        with pytest.raises(ConfigError, match="revision, token and trust_remote_code apply to a model id or folder"):
            Engine(build("llama"), toy_tokenizer(), store=None, **options)
    with Engine(str(model_folder), dtype="torch.bfloat16", store=None, memory_bytes=0) as made:
        assert made.model.dtype is torch.bfloat16, "as a dtype is printed"


# -- what new users try ------------------------------------------------------------------------------------------------


def test_misplaced_settings_name_their_place(engine: Engine, model_folder: Path) -> None:
    with pytest.raises(TypeError, match=r"max_tokens=4: a request has no such option; pass sampling=Sampling\(max_tokens=4\)"):
        engine.generate(PROMPT, max_tokens=4)
    with pytest.raises(TypeError, match=r"max_token=4: a request has no such option; docs/configure.md has all; did you mean max_tokens"):
        engine.generate(PROMPT, max_token=4)
    with pytest.raises(TypeError, match=r"max_tokens=4: an engine has no such option; it is a field of Sampling"):
        Engine(model_folder, store=None, max_tokens=4)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match=r"stor=None: an engine has no such option; docs/configure.md has all; did you mean store\?"):
        Engine(model_folder, stor=None)  # type: ignore[call-arg]


def test_values_of_other_kinds_are_named(engine: Engine) -> None:
    with pytest.raises(ConfigError, match=r"sampling=\{'max_tokens': 4\}: must be a Sampling, such as Sampling\(max_tokens=64\)"):
        engine.generate(PROMPT, sampling={"max_tokens": 4})
    with pytest.raises(ConfigError, match=r"constraint='any': must be a Constraint, such as Constraint\('any'\)"):
        engine.generate(PROMPT, constraint="any")


def test_what_is_no_model_is_named() -> None:
    with pytest.raises(ConfigError, match="model=None: must be a Hugging Face id, a folder, or a loaded model"):
        Engine(None)
    pipe = transformers.TextGenerationPipeline(build("llama"), toy_tokenizer())
    with pytest.raises(ConfigError, match=r"of a pipeline pass pipe.model and pipe.tokenizer"):
        Engine(pipe, pipe.tokenizer)


def test_a_tokenizer_of_another_model_is_named() -> None:
    model, tokenizer = build("llama"), toy_tokenizer()
    model.resize_token_embeddings(max(tokenizer(PROMPT)["input_ids"]))  # one too few
    with Engine(model, tokenizer, store=None) as running:
        with pytest.raises(ConfigError, match=r"the prompt has id \d+, the model has \d+ ids: pass the tokenizer that belongs"):
            running.generate(PROMPT)
        with pytest.raises(ConfigError, match="the prompt has id"):
            running.warm(PROMPT)


def test_a_prompt_without_tokens_is_named() -> None:
    tokenizer = toy_tokenizer()
    tokenizer.backend_tokenizer.normalizer = Strip()
    with Engine(build("llama"), tokenizer, store=None) as running, pytest.raises(MessageError, match="the prompt '  ' has no tokens"):
        running.generate("  ")


def test_ids_that_a_model_is_given_later_are_known() -> None:
    model, tokenizer = build("llama"), toy_tokenizer()
    with Engine(model, tokenizer, store=None) as running:
        tokenizer.add_tokens(["foozle"])
        with pytest.raises(ConfigError, match="id 600, the model has 600 ids"):
            running.generate("a foozle")
        model.resize_token_embeddings(601)
        assert len(running.generate("a foozle", sampling=Sampling(max_tokens=3, ignore_eos=True)).ids) == 3
