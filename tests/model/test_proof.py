"""What an earlier process proved is not proven again, as long as code, config and kernels are the same."""

from __future__ import annotations

import os
import threading
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers.utils import logging

from agentcache import Engine
from agentcache.bench import families
from agentcache.model import mixer_kernels, proof, recurrent
from agentcache.model.attention_interface import shadow
from agentcache.model.family import Support
from agentcache.model.hf import HFModel
from agentcache.model.loading import first_layers
from tests import models
from tests.engines import chat, decode, engine, long_text
from tests.families import tokens
from tests.processes import Child
from tests.saved_adapters import answer, same

pytestmark = pytest.mark.usefixtures("compiled_anew")


@pytest.fixture
def proofs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The model types that are proven from now on."""
    found: list[str] = []
    prove = proof.prove
    monkeypatch.setenv("AGENTCACHE_DIR", str(tmp_path / "store"))
    monkeypatch.setattr(proof, "prove", lambda model, window: found.append(model.support.name) or prove(model, window))
    return found


def load(family: str, **options: int) -> HFModel:
    return load_own(families.build(family, **options))


def load_own(model: Any) -> HFModel:
    held = HFModel(model)
    held.close()
    return held


def test_a_family_is_proven_once(proofs: list[str]) -> None:
    first, again = load("gemma2"), load("gemma2", seed=1)
    assert proofs == ["gemma2"]
    assert first.support == again.support
    assert [first.support.proof, again.support.proof] == ["made", "found"]
    assert first.bitwise


def load_later(parent: Connection, folder: Path, store: Path) -> None:
    """In a process of its own: what its engine says of the proof."""
    os.environ["AGENTCACHE_DIR"] = str(store)
    with Engine(str(folder)) as running:
        parent.send((running.model.support.paged, running.model.support.proof))


@pytest.mark.parametrize("family", ["lfm2", "recurrent_gemma"])
def test_two_processes_make_one_proof(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AGENTCACHE_DIR", str(tmp_path / "store"))
    families.build(family).save_pretrained(tmp_path)
    models.toy_tokenizer().save_pretrained(tmp_path)
    paged = not families.TINY[family].unpaged
    with Engine(str(tmp_path)) as running:
        assert (running.model.support.paged, running.model.support.proof) == (paged, "made")
    assert Child(load_later, tmp_path, tmp_path / "store").end() == (paged, "found")


def test_progress_is_shown_where_a_proof_takes_long(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    logging.enable_progress_bar()  # a test before this one may have switched it off
    monkeypatch.setattr(proof, "SHOWN_AFTER_S", 600)
    load("gemma2")
    assert "Proving" not in capsys.readouterr().err
    monkeypatch.setattr(proof, "SHOWN_AFTER_S", 0)
    for family, parts in (("gemma2", "4/4"), ("lfm2", "3/3")):
        load(family)
        said = capsys.readouterr().err
        assert "Proving reuse" in said
        assert parts in said
    logging.disable_progress_bar()
    try:
        load("gemma2")
    finally:
        logging.enable_progress_bar()
    assert capsys.readouterr().err == ""


def test_a_model_proves_itself_beside_the_device_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    def prove(*given: Any) -> tuple[str, bool]:
        found.append(threading.current_thread())
        running.generate(chat("What of the tide?"), sampling=decode(3))
        return original(*given)

    found, original = list[threading.Thread](), proof.prove
    with engine(store=None) as running:
        monkeypatch.setattr(proof, "prove", prove)  # the other engine answers while this one's model is proven
        with engine(model=families.build("gemma2"), store=None) as second:
            assert second.model.support.proof == "made"
    assert [thread.name.startswith("agentcache-loader") for thread in found] == [True]


def test_a_refusal_is_remembered_too(proofs: list[str]) -> None:
    assert load("recurrent_gemma").support == load("recurrent_gemma").support
    assert proofs == ["recurrent_gemma"]
    assert not load("recurrent_gemma").support.paged


def test_another_config_is_proven(proofs: list[str]) -> None:
    load("gemma2")
    model = families.build("gemma2")
    model.config.attn_logit_softcapping = 20.0
    HFModel(model).close()
    assert proofs == ["gemma2", "gemma2"]


class Bare(transformers.Phi3ForCausalLM):
    """Code that knows no cache."""

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None) -> Any:
        return super().forward(input_ids, attention_mask)


class Narrow(transformers.Phi3ForCausalLM):
    """Code that is older than `logits_to_keep`."""

    def forward(self, input_ids: torch.Tensor, position_ids: Any = None, past_key_values: Any = None, use_cache: Any = None) -> Any:
        return super().forward(input_ids, None, position_ids, past_key_values, use_cache=use_cache)


class Wide(transformers.Phi3ForCausalLM):
    """In the same file, with all keywords."""

    limit = 1


def test_classes_of_one_file_are_proven_apart(proofs: list[str]) -> None:
    def own(kind: type[Any], **settings: int) -> Any:
        model = families.build("phi3")
        model.__class__ = kind
        vars(model).update(settings)
        return model

    assert load_own(own(Wide)).support.paged
    assert "unexpected keyword argument 'logits_to_keep'" in load_own(own(Narrow)).support.why
    assert load_own(own(Wide)).support.proof == "found"
    assert load_own(own(Wide, limit=2)).support.proof == "made"
    assert proofs == ["phi3"] * 3


@pytest.mark.parametrize("kind", [Bare, Narrow])
def test_a_forward_of_fewer_keywords_answers_whole(kind: type[Any]) -> None:
    model, ids = families.build("phi3"), tokens(60)
    model.__class__ = kind
    held = HFModel(model)
    logits, state = held.stock(torch.tensor(ids), None)
    for _ in range(4):
        torch.testing.assert_close(logits, model(torch.tensor([ids])).logits[0, -1].detach(), rtol=0, atol=1e-4)
        ids.append(int(logits.argmax()))
        logits, state = held.stock(torch.tensor(ids[-1:]), state)
    held.close()


def test_a_patched_module_is_proven_each_time(proofs: list[str]) -> None:
    for _ in range(2):
        model = families.build("phi3")
        mlp = model.model.layers[0].mlp
        mlp.forward = lambda x, inner=mlp.forward: inner(x)
        HFModel(model).close()
    assert proofs == ["phi3", "phi3"]


def test_a_verdict_that_was_changed_is_not_believed(proofs: list[str], tmp_path: Path) -> None:
    load("recurrent_gemma")
    (kept,) = (tmp_path / "store" / "kernels").glob("*.o")
    kept.write_bytes(kept.read_bytes().replace(b"false", b" true"))
    assert not load("recurrent_gemma").support.paged
    assert proofs == ["recurrent_gemma", "recurrent_gemma"]


def test_the_layers_of_a_proof_cover_all_kinds() -> None:
    held = HFModel(families.build("gemma3_text"))
    model, decoder = held.model, held.decoder
    with first_layers(held):
        assert [len(held.decoder.layers), held.config.layer_types[:2]] == [2, ["sliding_attention", "full_attention"]]
        assert held.model.get_decoder() is held.decoder
        assert len(decoder.layers) == len(model.model.layers) == 4, "others compute with it"
    assert (held.model, held.decoder) == (model, decoder)
    with pytest.raises(ZeroDivisionError), first_layers(held):
        raise ZeroDivisionError
    assert len(held.decoder.layers) == 4
    assert torch.isfinite(shadow(held, torch.arange(70), [69])[0]).all()
    held.close()


@pytest.mark.parametrize("family", ["gemma3_text", "deepseek_v32", "lfm2"])
def test_a_second_load_leaves_a_busy_engine_alone(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, proven, meanwhile = families.build(family), proof.proven, list[Any]()
    with engine(model=model, store=None) as running:

        def ask() -> tuple[tuple[int, ...], torch.Tensor]:
            return answer(running, chat(long_text(60)), None, "off")[0]

        monkeypatch.setattr(proof, "proven", lambda *given: meanwhile.append(ask()) or proven(*given))
        expected = ask()
        HFModel(model).close()
    assert same(expected, meanwhile[0])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("family", "sound"), [("jamba", False), ("recurrent_gemma", False), ("granite_swa", True), ("lfm2", True)])
def test_rounding_hides_no_loss_of_state(family: str, sound: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mixer_kernels, "install", lambda _: False)  # Jamba's reference starts anew after each piece
    held = HFModel(families.build(family, dtype))
    assert held.support.paged is sound, held.support.why
    held.close()


def test_another_choice_of_experts_is_no_loss_of_state(proofs: list[str]) -> None:
    held = HFModel(families.build("qwen3_next", seed=1))  # on some processors rounding chooses other experts for token 18
    assert not held.support.why
    held.close()


class _Mean(torch.nn.Module):
    """A layer's MLP beside the mean of the tokens so far, which no cache keeps."""

    def __init__(self, mlp: torch.nn.Module) -> None:
        super().__init__()
        self.mlp = mlp

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.mlp(x) + (x.cumsum(1) / torch.arange(1, x.shape[1] + 1)[:, None]).to(x.dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_rounding_hides_no_loss_of_what_no_cache_keeps(dtype: torch.dtype) -> None:
    model = families.build("granite", dtype)
    model.model.layers[1].mlp = _Mean(model.model.layers[1].mlp)
    held = HFModel(model)
    assert held.support.why.startswith("cut after (1, 64, 101) tokens, ")
    held.close()


@pytest.mark.parametrize("family", ["qwen3_5_text", "bamba", "lfm2", "zaya", "falcon_h1", "mamba2"])
def test_pieces_run_in_one_forward_have_the_bits_of_each(family: str, proofs: list[str]) -> None:
    held = HFModel(families.build(family))
    assert held.support.packs_pieces
    ids, cuts = torch.randint(0, held.vocab, (300,), generator=torch.Generator().manual_seed(3)), [64, 192]
    places = [*range(0, 300, 13), 299]
    apart = proof._run(held, ids, [*cuts, 300], places, cuts=cuts)
    joined = proof._run(held, ids, [300], places, cuts=cuts, alignment=held.support.alignment)
    assert torch.equal(apart[1], joined[1])
    for one, other in zip(proof._states(apart[0], cuts), proof._states(joined[0], cuts), strict=True):
        assert torch.equal(one, other)
    seamless = held.support.alignment == 1
    assert [known.cuts for known in joined[0].pages[0].checkpoints.values()] == ([(), ()] if seamless else [(64,), (64, 192)])
    held.close()


def test_layers_that_cannot_be_cut_keep_their_pieces_apart(proofs: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recurrent.RecurrentState, "note", lambda self, layer, stop: None)
    assert load("lfm2").support == Support("lfm2", True, "", True, False, 64)


def test_states_that_are_mixed_up_keep_sequences_and_pieces_apart(proofs: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    rows = recurrent._rows
    monkeypatch.setattr(recurrent, "_rows", lambda state, given, start, stop, own=None: rows(state, given, start, stop))
    assert load("qwen3_5_text").support == Support("qwen3_5_text", True, "", True, False, 64)


def test_layers_that_see_other_rows_keep_pieces_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    held = HFModel(families.build("bamba"))
    norm = type(held.decoder.layers[0].input_layernorm)
    forward = norm.forward
    assert proof.prove(held, 0) == ("", True, True, 1)
    monkeypatch.setattr(norm, "forward", lambda self, x: forward(self, x + x.shape[1] / 1e7))
    assert proof.prove(held, 0) == ("", True, False, 64)
    held.close()
