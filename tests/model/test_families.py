"""Every family against transformers' own forward; experts and quantised weights by tokens; what cannot be paged, and the owner's model."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import T5Config

from agentcache.bench import families
from agentcache.errors import ConfigError, DeviceMapError, ModelError, ModelLoadError
from agentcache.model import attention_interface, loading
from agentcache.model.attention_interface import ATTENTION, shadow
from agentcache.model.family import STEPPED as OWN_LOOP
from agentcache.model.hf import HFModel
from agentcache.model.loading import load
from tests import models
from tests.families import DENSE, STEPPED, Run, greedy, pack, stock_logits, tokens

FP32, BF16 = torch.float32, torch.bfloat16
BITSANDBYTES = pytest.mark.filterwarnings("ignore:MatMul8bitLt. inputs will be cast:UserWarning")


pytestmark = pytest.mark.usefixtures("one_thread")


# -- dense families ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [*DENSE, "llama_tied", "granite_tied"])
def test_logits_equal_the_stock_forward(name: str) -> None:
    family, overrides = DENSE[name] if name in DENSE else (name.removesuffix("_tied"), {"tie_word_embeddings": True})
    model, ids = models.build(family, **overrides), tokens(560)
    stock = stock_logits(model, ids)
    held = HFModel(model)
    run = Run(held, ids).chunks(200, 1, 330)
    assert held.stepped is (name in STEPPED or name == "llama_tied")
    assert max(float((row - stock[at]).abs().max()) for at, row in run.logits.items()) < 1e-4
    held.close()


@pytest.mark.parametrize("name", ["mistral_window", "qwen2_window"])
def test_the_window_matters(name: str) -> None:
    family, overrides = DENSE[name]
    ids = tokens(200)
    run = Run(HFModel(models.build(family, **overrides)), ids).chunks()
    unwindowed = models.build(family, **({} if family == "qwen2" else {**overrides, "sliding_window": None}))
    stock = stock_logits(unwindowed, ids)
    assert float((run.logits[199] - stock[199]).abs().max()) > 1e-2
    assert float((run.logits[50] - stock[50]).abs().max()) < 1e-4


@pytest.mark.parametrize("name", ["llama_gqa", "qwen3", "mistral_window", "phi3", "granite", "olmo2", "smollm3"])
def test_bf16_errs_at_most_four_times_as_much_as_stock(name: str) -> None:
    family, overrides = DENSE[name]
    model, ids = models.build(family, BF16, initializer_range=0.05, **overrides), tokens(300)
    exact = models.build(family, BF16, initializer_range=0.05, **overrides).double()
    exact.model.rotary_emb.double()
    truth = stock_logits(exact, ids).double()
    stock = stock_logits(model, ids).double() - truth
    run = Run(HFModel(model), ids).chunks(100, 1, 70)
    ours = torch.stack([run.logits[at] for at in range(300)]).double() - truth
    assert 0 < ours.pow(2).mean().sqrt() <= 4 * stock.pow(2).mean().sqrt()
    assert ours.abs().max() <= 4 * stock.abs().max()


def test_the_own_loop_runs_the_families_it_names() -> None:
    assert {models.build(DENSE[name][0]).config.model_type for name in STEPPED} == OWN_LOOP


@pytest.mark.usefixtures("compiled_anew")
@pytest.mark.parametrize("family", families.TINY)
def test_every_family_proves_itself(family: str) -> None:
    model = families.build(family)
    held, expected = HFModel(model), families.TINY[family].unpaged
    assert (held.support.paged, held.support.why == "") == (not expected, not expected), held.support.why
    assert expected in held.support.why
    if not expected and not families.TINY[family].recurrent:
        ids = tokens(200)
        stock, _ = shadow(held, torch.tensor(ids), list(range(200)))
        run = Run(held, ids).chunks(70, 1, 100)
        off = [at for at, row in run.logits.items() if float((row - stock[at]).abs().max()) > 1e-3 * float(stock.abs().max())]
        assert len(off) <= 20 * families.TINY[family].experts, off
    if not expected:
        assert (held.bitwise, held.spec.recurrent) == (families.TINY[family].bits, families.TINY[family].recurrent)
    held.close()


# -- experts and quantised weights: tokens -------------------------------------------------------------------------------


def decode(run: Run, count: int, *company: Run) -> list[int]:
    """Greedy tokens behind what the run has, each decoded beside one more token of its company."""
    for _ in range(count):
        run.ids.append(int(run.logits[len(run.ids) - 1].argmax()))
        pack((run, 1), *[(other, 1) for other in company if other.rest])
    return run.ids[-count:]


def episode(model: HFModel, reuse: bool) -> list[torch.Tensor]:
    """Three steps of an agent, each 30 new tokens behind the last answer: with reuse from the last step's pages, in company.

    Returns the logits before each token.
    """
    ids, said, last = tokens(540), [], None
    for step in range(3):
        ids = ids + tokens(30, seed=step)
        company = Run(model, tokens(40, seed=9))
        if last is not None and reuse:
            run = last.branch(last.sequence.length, ids)
            pack((company, 7), (run, 11))
        else:
            run = Run(model, ids)
        run.chunks()
        before = len(run.ids)
        decode(run, 6, *([company] if reuse else []))
        said += [run.logits[at - 1].float() for at in range(before, before + 6)]
        ids, last = list(run.ids), run
    return said


def assert_same_tokens(some: list[torch.Tensor], others: list[torch.Tensor]) -> None:
    """The same greedy tokens, up to a tie: where rows are not by themselves, as in int8 with outliers, logits differ by their rounding."""
    for at, (one, other) in enumerate(zip(some, others, strict=True)):
        drift = float((one - other).abs().max())
        assert drift < 0.03 * float(one.max() - one.min()), f"token {at}: logits differ by {drift}"
        if one.argmax() != other.argmax():
            assert float(one.max() - one[other.argmax()]) <= 2 * drift, f"token {at}: another one, and no tie"
            return  # from here on they answer different prompts


@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral"])
def test_experts_give_the_same_tokens(family: str, dtype: torch.dtype) -> None:
    model, ids = models.build(family, dtype), tokens(300)
    stock = stock_logits(model, ids)
    held = HFModel(model)
    assert (held.bitwise, held.stepped, held.support.paged) == (True, False, True)
    if dtype == FP32:
        run = Run(held, ids).chunks(130, 1)
        assert max(float((row - stock[at]).abs().max()) for at, row in run.logits.items()) < 1e-4
    assert_same_tokens(episode(held, reuse=True), episode(held, reuse=False))


@BITSANDBYTES
@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
@pytest.mark.parametrize("bits", [4, 8])
def test_quantised_weights_give_the_same_tokens(bits: int, dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("bitsandbytes")
    from agentcache.model.fingerprint import Fingerprint

    models.build("qwen3", dtype).save_pretrained(tmp_path)
    loaded, _ = load(tmp_path, models.toy_tokenizer(), load_in_4bit=bits == 4, load_in_8bit=bits == 8)
    used: list[int] = []
    stock = HFModel.stock
    monkeypatch.setattr(HFModel, "stock", lambda self, ids, state: used.append(len(ids)) or stock(self, ids, state))
    held = HFModel(loaded)
    assert used == [1], "processors with 16-bit units repack weights at their first use, which must not come after hashing"
    assert (held.bitwise, held.stepped, held.support.paged, held.quantized) == (False, False, True, True)
    known = Fingerprint(held.model, "aten")
    before = known.layers
    assert_same_tokens(episode(held, reuse=True), episode(held, reuse=False))
    assert known.layers == before, "the first use repacked the weights"
    again, _ = load(tmp_path, models.toy_tokenizer(), load_in_4bit=bits == 4, load_in_8bit=bits == 8)
    assert Fingerprint(HFModel(again).model, "aten").layers == before, "another process would not find these pages"
    held.close()


# -- what cannot be paged ------------------------------------------------------------------------------------------------

UNPAGED: dict[str, tuple[dict[str, Any], str]] = {
    "Mamba": ({"state_size": 6}, "continued after 64 tokens"),  # no whole vector: its reference starts anew
    "Bloom": ({"n_head": 4}, "no layer calls attention"),
    "RecurrentGemma": ({"lru_width": 64, "attention_window_size": 32}, "continued after 64 tokens"),
    "Mpt": ({"n_layers": 2, "n_heads": 2, "d_model": 64}, "no list of layers"),
    "MiniMax": ({"num_local_experts": 4, "block_size": 32}, "uses cache of its own"),
}


@pytest.mark.parametrize("name", UNPAGED)
def test_other_layers_answer_through_the_stock_path(name: str) -> None:
    settings, why = UNPAGED[name]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        config = getattr(transformers, f"{name}Config")(**{**models._BASE, **settings})
        kind = getattr(transformers, f"{name}ForCausalLM", None) or getattr(transformers, f"{name}LMHeadModel")
        model = kind(config).eval()
    ids = tokens(60)
    expected = greedy(model, ids, 8)
    held = HFModel(model)
    assert (held.support.paged, held.spec, held.numerics, held.bitwise, held.stepped) == (False, None, None, False, False)
    assert why in held.support.why
    logits, state = held.stock(torch.tensor(ids), None)
    found = []
    for _ in range(8):
        found.append(int(logits.argmax()))
        logits, state = held.stock(torch.tensor(found[-1:]), state)
    assert found == expected
    held.close()


@pytest.mark.usefixtures("compiled_anew")
def test_a_family_that_is_broken_on_purpose_fails_its_proof(monkeypatch: pytest.MonkeyPatch) -> None:
    def why(family: str, **broken: Any) -> str:
        with monkeypatch.context() as patched:
            read = attention_interface.attention_of
            patched.setattr(attention_interface, "attention_of", lambda *given: replace(read(*given), **broken))
            held = HFModel(families.build(family))
            assert held.support.paged is (not held.support.why)
            return held.support.why

    assert why("gemma2") == ""
    assert "not its own" in why("gemma2", softcap=0.0)
    assert "not its own" in why("gemma3_text", window=0)
    assert "not its own" in why("llama4_text", chunk=0)


def test_soft_caps_are_not_left_to_sdpa(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers 5.20, the last for Python 3.10, gives Gemma 2 an attention without them: it was refused."""
    families.build("gemma2").save_pretrained(tmp_path / "gemma2")
    monkeypatch.setattr(transformers.Gemma2PreTrainedModel, "_supports_sdpa", True)
    loaded, _ = loading.load(str(tmp_path / "gemma2"), models.toy_tokenizer())
    assert HFModel(loaded).support.paged


def test_layers_with_a_memory_of_their_own_are_found() -> None:
    class Remembers(torch.nn.Module):  # adds the mean of all tokens so far of its call
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + x.cumsum(1) / torch.arange(1, x.shape[1] + 1)[None, :, None]

    model = families.build("phi3")
    model.model.layers[1].post_attention_layernorm = Remembers()
    assert "cut after" in HFModel(model).support.why


def test_attention_by_means_unknown_is_named() -> None:
    model = families.build("phi3")
    inner = model.model.layers[1].self_attn.forward
    model.model.layers[1].self_attn.forward = lambda *args, **kw: inner(*args, gates=torch.ones(1), **kw)
    assert "'gates'" in HFModel(model).support.why


def test_modules_that_differ_from_their_family_are_named() -> None:
    def why(change: Callable[[Any], object], family: str = "llama") -> str:
        model = models.build(family)
        change(model)
        held = HFModel(model)
        assert held.support.paged is (not held.support.why)
        return held.support.why

    assert "its proof failed" in why(lambda m: setattr(m.model.layers[1].self_attn, "k_proj", torch.nn.Linear(64, 65)))
    assert "proof failed" in why(lambda m: m.model.layers[1].mlp.to(BF16))
    assert "compiled in place" in why(lambda m: m.compile(backend="eager"), "phi3")
    assert "compiled in place" in why(lambda m: setattr(m, "forward", torch.compile(m.forward, backend="eager")))

    class Own(type(models.build("llama").model.layers[0].self_attn)):  # type: ignore[misc]
        def forward(self, *args: Any, **kw: Any) -> Any:
            raise NotImplementedError

    assert "NotImplementedError" in why(lambda m: setattr(m.model.layers[0].self_attn, "__class__", Own))


# -- loading, wrappers, devices ------------------------------------------------------------------------------------------


def test_fewer_bits_without_bitsandbytes_name_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"load_in_4bit=True: needs bitsandbytes; pip install 'agentcache-llm\[bitsandbytes\]'"):
        load("embedded", load_in_4bit=True)


def test_unknown_models_are_refused_with_the_way_out(tmp_path: Path) -> None:
    for path in ("/no/such/folder", str(tmp_path)):
        with pytest.raises(ModelLoadError, match="Pass a folder, a Hugging Face id of a causal model, or 'embedded'"):
            load(path)
    with pytest.raises(ModelLoadError, match="'embeded' cannot be loaded: there is no such folder; did you mean 'embedded'"):
        load("embeded")
    (tmp_path / "config.json").write_text('{"model_type": "no_such_type"}')
    with pytest.raises(ModelLoadError, match="no_such_type"):
        load(tmp_path)
    T5Config(num_layers=1).save_pretrained(tmp_path)
    with pytest.raises(ModelLoadError, match=r"AutoModel: AutoModelForCausalLM\. Pass a folder"):  # and not which ones there are
        load(tmp_path)
    with pytest.raises(ConfigError, match="pass its tokenizer too"):
        load(models.build("llama"))
    with pytest.raises(ConfigError, match="load the model that way yourself"):
        load(models.build("llama"), models.toy_tokenizer(), load_in_4bit=True)
    for given in (models.build("llama"), "embedded"):
        with pytest.raises(ConfigError, match=r"tokenizer='a/name': must be the model's tokenizer, as AutoTokenizer loads it"):
            load(given, "a/name")
    for other in (object(), torch.nn.Linear(2, 2), "a name", models.build("llama").model):
        with pytest.raises(ModelError, match="is not a causal language model"):
            HFModel(other)


@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin"])
@pytest.mark.parametrize("left", [b"", b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n"], ids=["empty", "pointer"])
def test_a_damaged_file_of_weights_is_named(name: str, left: bytes, tmp_path: Path) -> None:
    models.build("llama").config.save_pretrained(tmp_path)
    (tmp_path / name).write_bytes(left)
    with pytest.raises(ModelLoadError, match="cannot be loaded: a file of its weights is damaged: download it again"):
        load(tmp_path)


def test_weights_that_are_cut_are_damaged(tmp_path: Path) -> None:
    models.build("llama").save_pretrained(tmp_path)
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[: weights.stat().st_size // 2])
    with pytest.raises(ModelLoadError, match="a file of its weights is damaged"):
        load(tmp_path)


def _of_another_head(tmp_path: Path) -> None:
    models.build("llama").model.save_pretrained(tmp_path)


def _of_fewer_layers(tmp_path: Path) -> None:
    models.build("llama").save_pretrained(tmp_path)
    models.build("llama", num_hidden_layers=4).config.save_pretrained(tmp_path)


@pytest.mark.parametrize(
    ("save", "lost"), [(_of_another_head, "'lm_head.weight'"), (_of_fewer_layers, r"'model.layers.3.mlp.down_proj.weight' and 6 more")]
)
def test_weights_that_files_do_not_hold_are_named(save: Any, lost: str, tmp_path: Path) -> None:
    save(tmp_path)
    with pytest.raises(ModelLoadError, match=f"its files hold no {lost}"):
        load(tmp_path, models.toy_tokenizer())


def test_several_devices_are_named() -> None:
    model = models.build("llama")
    model.hf_device_map = {"model.embed_tokens": "cpu", "model.layers": 0}
    with pytest.raises(DeviceMapError, match=r"\['0', 'cpu'\]"):
        HFModel(model)
    model.hf_device_map = {"": "disk"}
    with pytest.raises(DeviceMapError, match="disk"):
        HFModel(model)
    model.hf_device_map = {"": "cpu"}
    assert HFModel(model).support.paged
    model.model.layers[2].to("meta")
    with pytest.raises(DeviceMapError, match=r"'cpu', 'meta'"):
        HFModel(model)


def test_wrappers_are_taken_off_or_refused() -> None:
    class Config:
        is_prompt_learning = False

    class Wrapper(torch.nn.Module):  # as PEFT's
        def __init__(self, inner: Any) -> None:
            super().__init__()
            self.inner = inner
            self.peft_config = {"default": Config()}

        def get_base_model(self) -> Any:
            return self.inner

    model = models.build("llama")
    assert HFModel(torch.compile(model, backend="eager")).model is model
    wrapper = Wrapper(model)
    assert HFModel(wrapper).model is model
    Config.is_prompt_learning = True
    with pytest.raises(ModelError, match="'Wrapper' with a prompt-learning adapter"):
        HFModel(wrapper)
    with pytest.raises(ModelError, match="'DataParallel'"):
        HFModel(torch.nn.DataParallel(model))


def test_weights_that_are_not_dense_are_refused() -> None:
    model = models.build("llama")
    layer = model.model.layers[1].mlp.up_proj
    layer.weight = torch.nn.Parameter(layer.weight.detach().to_sparse(), requires_grad=False)
    with pytest.raises(ModelError, match=r"'model.layers.1.mlp.up_proj.weight' has layout torch.sparse_coo"):
        HFModel(model)


# -- the owner's model object --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("family", ["llama", "phi3", "mistral_window", "olmo2", "mixtral"])
def test_the_owners_generate_goes_on_working(family: str, attention: str) -> None:
    model, ids = models.build(family, **({"sliding_window": 32} if family == "phi3" else {})), tokens(70)
    model.set_attn_implementation(attention)
    model.train()

    def observed() -> tuple[list[int], torch.Tensor, torch.Tensor]:
        padded = torch.tensor([ids[:40], [0] * 10 + ids[:30]])
        mask = torch.tensor([[1] * 40, [0] * 10 + [1] * 30])
        was, _ = model.training, model.eval()
        with torch.inference_mode():
            batch = model(padded, attention_mask=mask).logits
        found = (greedy(model, ids, 8), stock_logits(model, ids), batch)
        model.train(was)
        return found

    before = observed()
    held = HFModel(model)
    while_held = [observed()]
    Run(held, ids).chunks(30, 1)
    while_held.append(observed())
    held.close()
    assert model.config._attn_implementation == attention
    assert model.training
    assert not model.get_decoder().rotary_emb._forward_hooks
    for after in (*while_held, observed()):
        assert after[0] == before[0]
        assert torch.equal(after[1], before[1])
        assert torch.equal(after[2], before[2])


@pytest.mark.parametrize("first", [0, 1])
def test_the_last_of_two_engines_gives_training_back(first: int) -> None:
    model = models.build("qwen3").train()
    held = [HFModel(model), HFModel(model)]
    held[first].close()
    assert not model.training, "the other one computes without dropout"
    held[1 - first].close()
    assert model.training


def test_an_owner_who_changes_the_attention_is_followed() -> None:
    model, ids = models.build("granite"), tokens(40)
    held = HFModel(model)
    expected = Run(held, ids).chunks().logits[39]
    model.set_attn_implementation("eager")
    assert torch.equal(Run(held, ids).chunks().logits[39], expected)
    assert model.config._attn_implementation == f"{ATTENTION}_eager"
    held.close()


def test_a_users_subclass_of_eager_attention_is_proven() -> None:
    model, ids = models.build("granite"), tokens(40)
    model.set_attn_implementation("eager")
    for layer in model.model.layers:
        layer.self_attn.__class__ = type("Own", (type(layer.self_attn),), {"__module__": __name__})
    expected, held = stock_logits(model, ids), HFModel(model)
    assert not held.support.why
    assert torch.equal(stock_logits(model, ids), expected)
    held.close()


def test_two_engines_on_one_model() -> None:
    model, ids = models.build("granite"), tokens(40)
    one, other = HFModel(model), HFModel(model)
    expected = Run(one, ids).chunks().logits[39]
    one.close()
    assert torch.equal(Run(other, ids).chunks().logits[39], expected)
    other.close()
    assert model.config._attn_implementation == "sdpa"


def test_closing_an_engine_lets_anothers_forward_run_on() -> None:
    model, ids = models.build("granite"), tokens(40)
    one, other = HFModel(model), HFModel(model)
    expected = Run(one, ids).chunks().logits[39]
    adopt = other._use_our_attention
    other._use_our_attention = lambda: (adopt(), one.close())[0]  # type: ignore[method-assign]
    assert torch.equal(Run(other, ids).chunks().logits[39], expected)
    other.close()
    assert model.config._attn_implementation == "sdpa"


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_the_last_of_three_engines_gives_a_model_back(order: tuple[int, ...]) -> None:
    model = families.build("bamba", mamba_chunk_size=256).train()
    ids = tokens(150)
    held = [HFModel(model) for _ in order]
    expected = Run(held[order[-1]], ids).chunks().logits[149]
    for at in order[:-1]:
        held[at].close()
        assert {m.chunk_size for m in model.modules() if hasattr(m, "chunk_size")} == {64}
        assert not model.training
    assert torch.equal(Run(held[order[-1]], ids).chunks().logits[149], expected)
    held[order[-1]].close()
    assert {m.chunk_size for m in model.modules() if hasattr(m, "chunk_size")} == {256}
    assert model.training
    assert model.config._attn_implementation == "sdpa"
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_recurrent_layers_work_on_short_chunks_while_they_are_held() -> None:
    model = families.build("bamba", mamba_chunk_size=256)

    def sizes() -> set[int]:
        return {module.chunk_size for module in model.modules() if hasattr(module, "chunk_size")}

    held = HFModel(model)
    assert sizes() == {64}
    assert held.mixers is not None
    with held.mixers.given():
        assert sizes() == {256}
    assert sizes() == {64}
    held.close()
    assert sizes() == {256}


def test_layers_that_bypass_our_attention_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    held = HFModel(models.build("granite"))
    monkeypatch.setattr(held, "_use_our_attention", lambda: None)
    held.model.set_attn_implementation("sdpa")
    with pytest.raises(RuntimeError, match="0 of the model's layers"):
        Run(held, tokens(10)).chunks()
