"""What decides keys and values changes the digests from its layer on; what does not, does not; the second look is cheap."""

from __future__ import annotations

import sys
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch
import transformers

from agentcache.bench import families
from agentcache.model import behaviour, fingerprint
from agentcache.model.fingerprint import Fingerprint
from agentcache.model.hf import HFModel
from agentcache.model.state_token import StateToken
from tests import models
from tests.families import Run, greedy, tokens
from tests.processes import Child

ROPE = {"rope_type": "default", "rope_theta": 5000.0}


def layers(model: Any, kernel: str) -> tuple[str, ...]:
    """The digests of somebody who has never seen this model."""
    return Fingerprint(model, kernel).layers


def first_difference(one: tuple[str, ...], other: tuple[str, ...]) -> int | None:
    """The first layer whose digest differs; every later one must differ too."""
    differs = [a != b for a, b in zip(one, other, strict=True)]
    first = differs.index(True) if True in differs else None
    assert first is None or all(differs[first:])
    return first


def bump(parameter: torch.Tensor) -> None:
    with torch.no_grad():
        parameter.view(-1)[-1] += 0.5


EDITS: dict[str, tuple[Callable[[Any], torch.Tensor], int | None]] = {
    "embedding": (lambda m: m.model.embed_tokens.weight, 0),
    "layer 0": (lambda m: m.model.layers[0].self_attn.k_proj.weight, 0),
    "layer 1, mlp": (lambda m: m.model.layers[1].mlp.down_proj.weight, 1),
    "layer 2, norm": (lambda m: m.model.layers[2].input_layernorm.weight, 2),
    "frequencies": (lambda m: m.model.rotary_emb.inv_freq, 0),
    "final norm": (lambda m: m.model.norm.weight, None),
    "head": (lambda m: m.lm_head.weight, None),
}


@pytest.mark.parametrize("edit", EDITS)
def test_a_weight_counts_from_its_layer_on(edit: str) -> None:
    model = models.build("qwen2")
    known = Fingerprint(model, "aten")
    before = known.layers
    assert len(before) == 3
    where, first = EDITS[edit]
    bump(where(model))
    assert first_difference(before, layers(model, "aten")) == first
    assert known.layers == layers(model, "aten"), "an edit in place went unnoticed"


def test_a_tied_head_is_the_embedding() -> None:
    model = models.build("qwen2", tie_word_embeddings=True)
    before = layers(model, "aten")
    bump(model.lm_head.weight)
    assert first_difference(before, layers(model, "aten")) == 0


@pytest.mark.parametrize(
    "other",
    [
        {"rope_parameters": ROPE},
        {"rms_norm_eps": 1e-5},
        {"use_sliding_window": True, "sliding_window": 32, "max_window_layers": 0},
        {"hidden_act": "gelu"},
        {"num_key_value_heads": 2, "num_attention_heads": 8},
        {"max_position_embeddings": 2048},
    ],
    ids=str,
)
def test_configs_that_decide_numbers_count(other: dict[str, Any]) -> None:
    assert first_difference(layers(models.build("qwen2"), "aten"), layers(models.build("qwen2", **other), "aten")) == 0


def test_configs_that_decide_no_numbers_do_not() -> None:
    model = models.build("qwen2")
    before = layers(model, "aten")
    model.config.use_cache, model.config.eos_token_id, model.config._name_or_path = False, 7, "elsewhere"
    model.set_attn_implementation("eager")
    assert layers(model, "aten") == before
    assert layers(models.build("qwen2"), "aten") == before


def test_type_kernel_and_versions_count(monkeypatch: pytest.MonkeyPatch) -> None:
    model = models.build("qwen2")
    before = layers(model, "aten")
    assert first_difference(before, layers(model, "onednn")) == 0
    assert first_difference(before, layers(models.build("qwen2", torch.bfloat16), "aten")) == 0
    for module, name in ((fingerprint.transformers, "__version__"), (fingerprint.torch, "__version__"), (fingerprint, "REVISION")):
        with monkeypatch.context() as patch:
            patch.setattr(module, name, "0.0")
            assert first_difference(before, layers(model, "aten")) == 0, name
    with monkeypatch.context() as patch:
        patch.setattr(behaviour, "_code_of", lambda *_: "patched")
        assert first_difference(before, layers(model, "aten")) == 0
    assert layers(model, "aten") == before


def test_quantisation_counts() -> None:
    model = models.build("qwen2")
    before = layers(model, "aten")
    model.config.quantization_config = transformers.BitsAndBytesConfig(load_in_8bit=True)
    eight = layers(model, "aten")
    model.config.quantization_config = transformers.BitsAndBytesConfig(load_in_8bit=True, llm_int8_threshold=0.0)
    assert len({before, eight, layers(model, "aten")}) == 3


def test_scales_beside_quantised_weights_count() -> None:
    class State:
        absmax = torch.ones(4)

    model = models.build("qwen2")
    model.model.layers[1].mlp.up_proj.weight.quant_state = State()
    before = layers(model, "aten")
    State.absmax = torch.full((4,), 2.0)
    assert first_difference(before, layers(model, "aten")) == 1


class Adapter(torch.nn.Module):
    """Built as PEFT builds a LoRA layer, down to the `weight` that shows the base alone."""

    def __init__(self, base: torch.nn.Linear) -> None:
        super().__init__()
        self.base_layer = base
        self.scaling = {"default": 1.0}
        self._active_adapter = ["default"]
        self.lora_A = torch.nn.ModuleDict({"default": torch.nn.Linear(base.in_features, 4, bias=False)})
        self.lora_B = torch.nn.ModuleDict({"default": torch.nn.Linear(4, base.out_features, bias=False)})

    @property
    def weight(self) -> torch.Tensor:
        return self.base_layer.weight

    @property
    def bias(self) -> torch.Tensor | None:
        return self.base_layer.bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self._active_adapter:
            return self.base_layer(x)
        return self.base_layer(x) + self.scaling["default"] * self.lora_B["default"](self.lora_A["default"](x))


def test_adapters_count_from_their_layer_on() -> None:
    model, ids = models.build("llama"), tokens(40)
    held = HFModel(model)
    known = Fingerprint(model, "aten")
    digests = [known.layers]
    assert held.stepped
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        adapter = Adapter(model.model.layers[1].self_attn.v_proj)
    model.model.layers[1].self_attn.v_proj = adapter
    digests.append(known.layers)
    assert not held.stepped
    expected = greedy(model, ids, 1)
    assert int(Run(held, ids).chunks().logits[39].argmax()) == expected[0]
    adapter.scaling["default"] = 4.0
    digests.append(known.layers)
    adapter._active_adapter = []
    digests.append(known.layers)
    bump(adapter.lora_B["default"].weight)
    digests.append(known.layers)
    assert [first_difference(digests[0], other) for other in digests[1:]] == [1, 1, 1, 1]
    assert len(set(digests)) == 5
    held.close()


def test_a_hook_in_a_layer_counts() -> None:
    model = models.build("llama")
    known, held = Fingerprint(model, "aten"), HFModel(model)
    before = known.layers
    hook = model.model.layers[1].mlp.register_forward_hook(lambda module, args, output: output + 1)
    assert first_difference(before, known.layers) == 1
    assert not held.stepped
    hook.remove()
    assert known.layers == before
    assert held.stepped


def test_the_hook_of_gradient_checkpointing_does_not_count() -> None:
    model = models.build("llama")
    before = layers(model, "aten")
    model.enable_input_require_grads()  # as gradient checkpointing does, and leaves it so
    assert model.get_input_embeddings()._forward_hooks
    known, held = Fingerprint(model, "aten"), HFModel(model)
    assert known.layers == before
    assert (held.stepped, held.bitwise) == (True, True)
    token = known.token
    assert token is not None
    hook = model.get_input_embeddings().register_forward_hook(lambda module, args, output: output * 2)
    assert token.tensors_changed(), "another one beside it is noticed amid a forward"
    assert known.layers != before
    assert not held.stepped
    hook.remove()
    assert known.layers == before


def test_our_own_hooks_and_switches_do_not_count() -> None:
    model = models.build("phi3")
    before = layers(model, "aten")
    held = HFModel(model)
    Run(held, tokens(20)).chunks()
    assert layers(model, "aten") == before
    held.close()
    assert layers(model, "aten") == before


def test_frequencies_that_follow_the_last_call_do_not_count() -> None:
    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
    model = models.build("llama", max_position_embeddings=32, rope_parameters=rope)
    before = layers(model, "aten")
    greedy(model, tokens(50), 2)
    assert layers(model, "aten") == before


def test_the_second_look_hashes_nothing() -> None:
    model = models.build("qwen2")
    known = Fingerprint(model, "aten")
    first = known.layers, known.whole
    whole = known.hashed_bytes
    weight = model.model.layers[0].mlp.up_proj.weight
    greedy(model, tokens(10), 2)
    assert (known.layers, known.whole, known.hashed_bytes) == (*first, whole)
    bump(weight)
    assert known.layers != first[0]
    assert known.hashed_bytes == whole + weight.nbytes, "what was not written to was hashed again"
    weight.data.view(-1)[1] += 1.0  # torch does not count it, and no sample has it
    stale = known.layers
    known.invalidate()
    assert known.layers != stale
    assert known.hashed_bytes == 2 * whole + weight.nbytes


def test_a_replaced_tensor_is_noticed() -> None:
    model = models.build("qwen2")
    known = Fingerprint(model, "aten")
    before = known.layers
    model.model.layers[2].mlp.up_proj.weight = torch.nn.Parameter(torch.zeros(128, 64))
    assert first_difference(before, known.layers) == 2


LOADED = "gpt_oss gemma3_text qwen3_5_text youtu mixtral qwen3".split()  # of each kind of layers one


def fingerprints(names: list[str]) -> dict[str, str]:
    """Of tiny models that are loaded one after another; experts in fewer bits are transformers' own."""
    found = {}
    for name in names:
        model = families.build(name)
        model.quantization_method = "none" if name == "gpt_oss" else None
        held = HFModel(model)
        found[name] = held.fingerprint.whole if held.fingerprint else ""
        held.close()
    return found


def load_in_order(parent: Connection, names: list[str]) -> None:
    """In a process of its own, which has loaded no model."""
    parent.send(fingerprints(names))


def test_models_loaded_before_change_no_fingerprint() -> None:
    child = Child(load_in_order, LOADED[::-1])
    own, other = fingerprints(LOADED), child.end()
    assert all(own.values())
    assert own == other


def test_another_model_that_is_loading_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    token = StateToken(models.build("qwen3"))
    for name in ("tie_weights", "init_weights"):  # transformers exchanges them in the base of all models until it is loaded
        monkeypatch.setattr(transformers.PreTrainedModel, name, lambda self: None)
    assert not token.changed()
    monkeypatch.setattr(transformers.PreTrainedModel, "forward", lambda self: None, raising=False)
    assert token.changed()


def test_a_function_beside_a_forward_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also once others were described."""
    model = models.build("llama")
    known = Fingerprint(model, "aten")
    before = known.layers
    monkeypatch.setattr(sys.modules[type(model.model.rotary_emb).__module__], "rotate_half", lambda x: x)
    assert first_difference(before, known.layers) == first_difference(before, layers(model, "aten")) == 0


@pytest.mark.parametrize("kind", ["longrope", "dynamic", "default"])
def test_another_inv_freq_of_the_last_call_is_no_change(kind: str) -> None:
    """As dynamic NTK exchanges it at a longer prompt, beside shorter ones; longrope does up to transformers 5.20."""
    long = {"short_factor": [1.0] * 8, "long_factor": [4.0] * 8, "original_max_position_embeddings": 128, "factor": 4.0}
    rope = {"rope_type": kind, "rope_theta": 10000.0, **{"longrope": long, "dynamic": {"factor": 4.0}, "default": {}}[kind]}
    model = models.build("llama", max_position_embeddings=512, rope_parameters=rope)
    token, rotary = StateToken(model), model.model.rotary_emb
    rotary.register_buffer("inv_freq", rotary.inv_freq * 2, persistent=False)
    assert token.changed() is (kind == "default")
    rotary.register_buffer("original_inv_freq", rotary.original_inv_freq.clone(), persistent=False)
    assert token.changed(), "what the next frequencies are made of is another"
