"""Drafts: fewer forwards for the same tokens, bits and pages."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from agentcache import Constraint, Engine, Sampling
from agentcache.bench import families
from agentcache.drafts import DRAFT_ROWS, DRAFTED_TOKENS, repeated
from agentcache.errors import ConfigError
from agentcache.model.kernels import jit
from agentcache.store.keys import as_ids
from agentcache.types import PAGE_TOKENS
from tests import models, saved_adapters
from tests.engines import TOOLS, Spy, chat, check_store, decode, engine, long_text
from tests.families import DENSE

FP32, BF16 = torch.float32, torch.bfloat16
TOKENS = 40
SAID = "The Adler passed at noon, the Bodil at four. "
ASKED = chat("Which ships passed? " + SAID)


def answer(running: Engine, messages: Any = ASKED, drafts: int = 7, tools: Any = (), **options: Any) -> tuple[Any, list[torch.Tensor], int]:
    """The completion, which repeats the prompt in parts, the logits of its tokens, and how many forwards it took."""
    rows, before = list[torch.Tensor](), running.scheduler.rounds
    sampling = options.pop("sampling", None) or decode(TOKENS, forced=f"{SAID}At four! Who? {SAID}", draft_tokens=drafts)
    done = running.generate(messages, tools, sampling=sampling, on_logits=lambda row: rows.append(row.clone()), **options)
    return done, rows, running.scheduler.rounds - before


def same(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return len(one) == len(other) and all(map(torch.equal, one, other))


KINDS = [("llama_bias", FP32), ("qwen3", BF16), ("mistral_window", FP32), ("qwen2_window", BF16), ("granite", BF16), ("smollm3", FP32)]


@pytest.mark.parametrize(("name", "dtype"), KINDS, ids=str)
def test_tokens_and_bits_are_those_without_drafts(name: str, dtype: torch.dtype) -> None:
    family, overrides = DENSE[name]
    with engine(model=models.build(family, dtype, **overrides)) as running:
        plain, rows, alone = answer(running, drafts=0, namespace="plain")
        drafted, others, fewer = answer(running, namespace="drafted")
        assert drafted.ids == plain.ids
        assert same(rows, others)
        assert (plain.receipt.drafted_tokens, alone - fewer) == (0, drafted.receipt.drafted_tokens)
        assert 0 < drafted.receipt.drafted_tokens < TOKENS - 4, "some prove right, some do not"
        longer = [*ASKED, {"role": "assistant", "content": drafted.text}, {"role": "user", "content": "And then?"}]
        off, wanted, _ = answer(running, longer, reuse="off", namespace="drafted")
        hit, found, _ = answer(running, longer, namespace="drafted")
        assert hit.receipt.cached_tokens > drafted.receipt.prompt_tokens
        assert (hit.ids, same(wanted, found)) == (off.ids, True), "pages of a drafted answer are those of any other"


def check_states_go_back(running: Engine, **options: Any) -> None:
    """Check bits, pages and checkpoints of answers of which some drafts prove right and some wrong."""
    plain, rows, alone = answer(running, drafts=0, namespace="plain", **options)
    for namespace in ("drafted", "drafted", "plain"):  # a miss and two hits
        drafted, others, fewer = answer(running, namespace=namespace, **options)
        assert (drafted.ids, same(rows, others)) == (plain.ids, True)
        assert 0 < drafted.receipt.drafted_tokens < TOKENS - 4
        assert fewer < alone - 8
    longer = [*ASKED, {"role": "assistant", "content": drafted.text}, {"role": "user", "content": "And then?"}]
    off, wanted, _ = answer(running, longer, reuse="off", drafts=0, **options)
    hit, found, _ = answer(running, longer, namespace="drafted", **options)
    assert (hit.ids, same(wanted, found)) == (off.ids, True)
    with ThreadPoolExecutor(3) as pool:
        for together, found, _ in pool.map(lambda n: answer(running, namespace=str(n), **options), range(3)):
            assert (together.ids, same(rows, found)) == (plain.ids, True)


@pytest.mark.parametrize(("name", "dtype"), [("qwen3_5_text", FP32), ("falcon_h1", BF16), ("lfm2", FP32)], ids=str)
def test_states_go_back_where_a_draft_proves_wrong(name: str, dtype: torch.dtype) -> None:
    with engine(model=families.build(name, dtype)) as running:
        check_states_go_back(running)


@pytest.mark.parametrize(("name", "target"), [("qwen3_5_text", "in_proj_qkv"), ("lfm2", "in_proj"), ("falcon_h1", "in_proj")])
def test_states_go_back_under_an_adapter(name: str, target: str, tmp_path: Path) -> None:
    folder = saved_adapters.save_for(families.build(name), tmp_path, target_modules=[target, "v_proj"])
    with engine(model=families.build(name)) as running:
        running.add_adapter("one", folder)
        check_states_go_back(running, adapter="one")
        assert not same(answer(running, adapter="one")[1], answer(running)[1])


@pytest.mark.skipif(jit.compiler() is None, reason="needs llvmlite and PyTorch's OpenMP runtime")
@pytest.mark.parametrize(("name", "dtype"), [("qwen3_5_text", BF16), ("falcon_h1", FP32), ("lfm2", BF16)], ids=str)
def test_states_go_back_with_int8_weights(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    families.build(name, dtype).save_pretrained(tmp_path)
    models.toy_tokenizer().save_pretrained(tmp_path)
    with Engine(str(tmp_path), store=None, weights="int8", dtype=dtype) as running:
        check_states_go_back(running)
        assert answer(running)[0].receipt.weights == "int8"


@pytest.mark.parametrize("temperature", [0.0, 0.7])
@pytest.mark.parametrize("penalty", [1.0, 1.3])
def test_what_is_drawn_and_told_is_the_same(temperature: float, penalty: float) -> None:
    settings = {"max_tokens": 40, "temperature": temperature, "repetition_penalty": penalty, "seed": 3, "top_k": 20, "logprobs": 2}
    with engine() as running:
        made = [answer(running, sampling=Sampling(draft_tokens=n, **settings), reuse="off")[0] for n in (0, 1, 3, 7, 50)]
    assert {one.ids for one in made} == {made[0].ids}
    assert all((one.logprobs, one.text) == (made[0].logprobs, made[0].text) for one in made)
    assert made[0].receipt.drafted_tokens == 0
    assert made[-1].receipt.drafted_tokens == made[-2].receipt.drafted_tokens, "a forward has few rows"


@pytest.mark.parametrize("words", range(72, 78))
def test_an_answer_crosses_a_page(words: int) -> None:
    with engine() as running:
        asked = chat(long_text(words))
        plain, rows, _ = answer(running, asked, drafts=0, reuse="off")
        assert plain.receipt.prompt_tokens < PAGE_TOKENS < plain.receipt.prompt_tokens + TOKENS
        drafted, others, _ = answer(running, asked)
        assert (drafted.ids, same(rows, others)) == (plain.ids, True)
        hit, again, _ = answer(running, asked)
        assert (hit.ids, same(rows, again)) == (plain.ids, True)
        check_store(running.store)


def test_an_answer_ends_where_it_is_to_end() -> None:
    with engine() as running:
        whole = answer(running, drafts=0)[0].text
        for limit in range(1, 20, 3):
            for more in ({"max_tokens": limit, "ignore_eos": True}, {"max_tokens": 60, "stop": (whole[limit : limit + 2],)}):
                plain, drafted = (answer(running, sampling=Sampling(**more, draft_tokens=n))[0] for n in (0, 7))
                assert (drafted.ids, drafted.text, drafted.receipt.finish_reason) == (plain.ids, plain.text, plain.receipt.finish_reason)


def test_what_a_grammar_forces_takes_no_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agentcache.drafts.repeated", lambda ids: [])
    with engine() as running:
        given_: dict[str, Any] = {"tools": TOOLS, "constraint": Constraint("get_weather")}
        plain, rows, alone = answer(running, sampling=Sampling(max_tokens=60, draft_tokens=0), **given_)
        drafted, others, fewer = answer(running, sampling=Sampling(max_tokens=60), **given_)
    assert (drafted.ids, same(rows, others)) == (plain.ids, True)
    assert fewer < alone - 8


def test_forced_tokens_that_are_scored_are_known() -> None:
    with engine() as running:
        plain, scored = (
            running.generate(ASKED, sampling=decode(24, forced="At four! Who? I say.", draft_tokens=n, logprobs=1)) for n in (0, 7)
        )
        assert scored.logprobs == plain.logprobs
        assert scored.receipt.drafted_tokens >= 7 > plain.receipt.drafted_tokens


def test_agents_that_decode_share_the_rows() -> None:
    with engine() as running:
        alone = [running.generate(chat(f"{n} " * 20), sampling=decode(24, draft_tokens=0)).ids for n in range(10)]
        spy = Spy(running)
        with ThreadPoolExecutor(10) as pool:
            together = list(pool.map(lambda n: running.generate(chat(f"{n} " * 20), sampling=decode(24)).ids, range(10)))
        decoding = [sum(count for _, count in parts) for parts in spy.forwards if all(count <= DRAFT_ROWS for _, count in parts)]
    assert together == alone
    assert DRAFT_ROWS < max(decoding) <= 10, "ten agents have a row each"


def test_a_draft_that_is_not_finite_harms_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    with engine() as running:
        plain, rows, _ = answer(running, drafts=0, reuse="off")
        inner, spoiled = running.model.forward, 0

        def forward(ids: torch.Tensor, parts: list[Any], regimes: list[str], wanted: Any) -> torch.Tensor:
            nonlocal spoiled
            out = inner(ids, parts, regimes, wanted).clone()
            if len(wanted) > 1:  # the last draft
                spoiled += 1
                out[-1] = float("nan")
                page = parts[0].sequence.pages[-1]
                page.layer_values[-1][:, page.filled + len(wanted) - 1] = float("nan")
            return out

        monkeypatch.setattr(running.model, "forward", forward)
        drafted, others, _ = answer(running)
        assert spoiled
        assert (drafted.ids, same(rows, others)) == (plain.ids, True)
        monkeypatch.undo()
        hit, _, _ = answer(running, [*ASKED, {"role": "assistant", "content": drafted.text}, {"role": "user", "content": "So?"}])
        assert hit.receipt.cached_tokens > drafted.receipt.prompt_tokens


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral"])
def test_experts_compute_a_token_at_a_time(family: str) -> None:
    with engine(family) as running:
        done, _, forwards = answer(running)
    assert (done.receipt.drafted_tokens, forwards) == (0, TOKENS)


def test_a_model_that_promises_no_bits_has_no_drafts() -> None:
    with engine() as running:
        running.model.support = replace(running.model.support, row_pure=False)
        assert answer(running)[0].receipt.drafted_tokens == 0


def test_frequencies_that_change_with_the_length_are_not_crossed() -> None:
    rope = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10_000.0}
    model = models.build("llama", max_position_embeddings=256, rope_parameters=rope)
    with engine(model=model) as running:
        asked, said = chat(long_text(26)), {"max_tokens": 60, "forced": SAID * 4, "ignore_eos": True}
        plain, rows, _ = answer(running, asked, sampling=Sampling(**said, draft_tokens=0), reuse="off")
        assert plain.receipt.prompt_tokens < 256 - 30 < 256 + 10 < plain.receipt.prompt_tokens + 60
        drafted, others, _ = answer(running, asked, sampling=Sampling(**said), reuse="off")
    assert (drafted.ids, same(rows, others)) == (plain.ids, True)
    assert drafted.receipt.drafted_tokens > 4


def test_the_price_of_a_prompt_is_not_learnt_from_drafts() -> None:
    with engine() as running:
        running.generate(chat(long_text(60)), sampling=decode(1))
        known = running.scheduler.ms_per_token
        assert known
        done = running.generate(chat(long_text(60)), sampling=decode(200))
        assert (done.receipt.computed_tokens, running.scheduler.ms_per_token) == (1, known)
        assert done.receipt.drafted_tokens


@pytest.mark.parametrize("wrong", [-1, 1.5, True, None, "7"])
def test_a_number_of_drafts_is_checked(wrong: Any) -> None:
    with pytest.raises(ConfigError, match="draft_tokens="):
        Sampling(draft_tokens=wrong)


def oracle(ids: list[int]) -> list[int]:
    """The same by trying every length and place."""
    for length in range(len(DRAFTED_TOKENS) - 1, 0, -1):
        for end in range(len(ids) - 1, length - 1, -1):
            if ids[end - length : end] == ids[len(ids) - length :]:
                return ids[end : end + DRAFTED_TOKENS[length]]
    return []


@given(st.lists(st.integers(0, 3), min_size=1, max_size=40))
def test_a_draft_follows_the_longest_repetition(ids: list[int]) -> None:
    assert repeated(as_ids(ids)) == oracle(ids)


def test_a_draft_follows_the_latest_place() -> None:
    assert repeated(np.array([1, 2, 3, 1, 2, 4, 9, 1, 2], np.uint32)) == [4, 9, 1]
    assert repeated(np.array([5], np.uint32)) == []
