"""Which token comes next, and what of its text may be shown."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from agentcache import Sampling
from agentcache.errors import ConfigError
from agentcache.model.sampling import Sampler, TextStream
from tests import models
from tests.engines import chat, decode, engine, long_text

CPU = torch.device("cpu")
PROMPT = chat("Which ships passed?")
EMOJI = "tide é 灯台 🌊 end 𝄞!"


def draw(logits: list[float], count: int = 400, **fields: Any) -> set[int]:
    sampler = Sampler(Sampling(**{"temperature": 1.0, "seed": 1, **fields}), CPU)
    return {sampler(torch.tensor(logits), [0]) for _ in range(count)}


def test_greedy_takes_the_first_of_the_best() -> None:
    assert draw([1.0, 3.0, 3.0], 3, temperature=0.0) == {1}


def test_filters_keep_what_they_should() -> None:
    logits = torch.tensor([0.5, 0.3, 0.15, 0.05]).log().tolist()
    assert draw(logits) == {0, 1, 2, 3}
    assert draw(logits, top_k=2) == {0, 1}
    assert draw(logits, top_k=99) == {0, 1, 2, 3}
    assert draw(logits, top_k=-1) == {0, 1, 2, 3}, "off, as in vLLM"
    assert draw(logits, top_p=0.75) == {0, 1}
    assert draw(logits, top_p=1e-9) == draw(logits, top_p=0) == {0}
    assert draw(logits, min_p=0.25) == {0, 1, 2}
    assert draw(logits, temperature=0.02) == {0}
    assert draw(logits, temperature=1e-300) == {0}, "logits divided by almost nothing are infinite"


def test_samples_follow_the_distribution() -> None:
    odds = torch.tensor([0.5, 0.3, 0.15, 0.05])
    sampler = Sampler(Sampling(temperature=2.0, seed=3), CPU)
    seen = torch.bincount(torch.tensor([sampler(odds.log(), []) for _ in range(4000)]), minlength=4) / 4000
    expected = odds.sqrt() / odds.sqrt().sum()
    assert torch.allclose(seen, expected, atol=0.03)


@pytest.mark.parametrize("fields", [{"temperature": 2, "top_p": 1, "min_p": 0, "repetition_penalty": 2}, {"temperature": 1}])
def test_whole_numbers_are_numbers(fields: dict[str, Any]) -> None:
    assert Sampler(Sampling(seed=0, **fields), CPU)(torch.zeros(5), [1]) in range(5)


def test_penalty_equals_that_of_all_ids_at_once() -> None:
    from transformers import RepetitionPenaltyLogitsProcessor

    logits, ids = torch.randn(50), [3, 7, 3, 3, 9]
    sampler = Sampler(Sampling(repetition_penalty=5.0), CPU)
    for count in (3, 4, 5):
        stock = RepetitionPenaltyLogitsProcessor(5.0)(torch.tensor([ids[:count]]), logits[None])[0]
        assert sampler(logits, ids[:count]) == int(stock.argmax())


@pytest.mark.parametrize("penalty", [1.0, 1.7])
def test_greedy_ids_are_those_of_generate(penalty: float) -> None:
    model = models.build("llama")
    with engine(model=model) as running:
        ours = running.generate(PROMPT, sampling=decode(24, repetition_penalty=penalty)).ids
        ids = torch.tensor([running.renderer.render(PROMPT).ids])
    with torch.no_grad():
        theirs = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=24, do_sample=False, repetition_penalty=penalty, pad_token_id=0
        )
    assert ours == tuple(theirs[0, ids.shape[1] :].tolist())


def test_a_seed_gives_equal_ids_alone_packed_and_hit() -> None:
    fields: dict[str, Any] = {"temperature": 1.2, "top_p": 0.95, "top_k": 50, "min_p": 0.001, "repetition_penalty": 1.1, "seed": 11}
    with engine() as running:
        cold = running.generate(PROMPT, sampling=decode(16, **fields))
        hit = running.generate(PROMPT, sampling=decode(16, **fields))
        others = [running.stream(chat(long_text(9, i)), sampling=decode(16, temperature=1.0, seed=i)) for i in range(3)]
        packed = running.generate(PROMPT, sampling=decode(16, **fields))
        assert all(len(other.completion.ids) == 16 for other in others)
        assert hit.receipt.cached_tokens > 0
        assert cold.ids == hit.ids == packed.ids
        assert cold.ids != running.generate(PROMPT, sampling=decode(16, **{**fields, "seed": 12})).ids
        free = {running.generate(PROMPT, sampling=decode(16, temperature=1.2)).ids for _ in range(3)}
        assert len(free) > 1, "without a seed each request is another"


# -- text --------------------------------------------------------------------------------------------------------------


def first_complete(text: str, stops: tuple[str, ...]) -> str:
    """The oracle: read character by character, cut before the stop string that is complete first (the longest of those)."""
    for end in range(len(text) + 1):
        ended = [stop for stop in stops if text[:end].endswith(stop)]
        if ended:
            return text[: end - max(map(len, ended))]
    return text


def pieces(tokenizer: Any, text: str, chance: random.Random) -> list[int]:
    """Ids of a text, tokenised in random pieces so that tokens end anywhere."""
    ids: list[int] = []
    while text:
        size = chance.randint(1, 6)
        ids += tokenizer(text[:size], add_special_tokens=False)["input_ids"]
        text = text[size:]
    return ids


@settings(derandomize=True, deadline=None, max_examples=60)
@given(st.text("abé🌊 ", max_size=24), st.lists(st.text("abé🌊", min_size=1, max_size=4), max_size=3), st.integers(0, 99))
def test_stop_strings_cut_exactly_and_never_leak(text: str, stops: list[str], seed: int) -> None:
    tokenizer = models.toy_tokenizer()
    stream = TextStream(tokenizer, tuple(stops), frozenset())
    expected, shown = first_complete(text, tuple(stops)), ""
    for token in pieces(tokenizer, text, random.Random(seed)):
        shown += stream.push(token)
        assert expected.startswith(shown), "text behind the cut was shown"
    shown += stream.finish()
    assert shown == stream.text == expected
    assert bool(stream.stopped) == (expected != text)
    assert text.startswith(expected + stream.stopped)
    assert stream.stopped in ("", *stops)


def test_the_first_complete_stop_string_counts() -> None:
    tokenizer = models.toy_tokenizer()
    (token,) = tokenizer(" the", add_special_tokens=False)["input_ids"]
    stream = TextStream(tokenizer, (" the", "h"), frozenset())
    assert stream.push(token) == stream.text == " t"
    assert stream.stopped == "h"


def test_characters_split_over_tokens_are_shown_whole() -> None:
    tokenizer = models.toy_tokenizer()
    ids = tokenizer(EMOJI, add_special_tokens=False)["input_ids"]
    stream = TextStream(tokenizer, (), frozenset())
    shown = [stream.push(token) for token in ids]
    assert len(ids) > len(EMOJI)
    assert not any("\ufffd" in piece for piece in shown)
    assert "".join(shown) == EMOJI
    assert stream.finish() == ""
    cut = TextStream(tokenizer, (), frozenset())
    assert [cut.push(token) for token in tokenizer("🌊", add_special_tokens=False)["input_ids"][:-1]] == ["", "", ""]
    assert set(cut.finish()) == {"\ufffd"}


@settings(derandomize=True, deadline=None, max_examples=40)
@given(st.lists(st.integers(0, models.VOCAB - 1), max_size=40))
def test_any_ids_give_the_text_of_all_ids(ids: list[int]) -> None:
    tokenizer = models.toy_tokenizer()
    stream = TextStream(tokenizer, (), frozenset())
    shown = "".join([stream.push(token) for token in ids]) + stream.finish()
    assert shown == stream.text == tokenizer.decode(ids, clean_up_tokenization_spaces=False)


def test_hidden_ids_show_nothing_and_cost_nothing() -> None:
    tokenizer = models.toy_tokenizer()
    end = tokenizer.eos_token_id
    a, b = tokenizer("ab", add_special_tokens=False)["input_ids"][:1], tokenizer("!", add_special_tokens=False)["input_ids"]
    stream = TextStream(tokenizer, ("zz",), frozenset([end]))
    assert [stream.push(i) for i in (*a, end, *b, end)][1::2] == ["", ""]
    assert stream.spelled == 4


def test_spelled_says_how_many_ids_make_the_text() -> None:
    tokenizer = models.toy_tokenizer()
    ids = [tokenizer.convert_tokens_to_ids(letter) for letter in "abcXYd"]
    on_border, inside = TextStream(tokenizer, ("XY",), frozenset()), TextStream(tokenizer, ("XY",), frozenset())
    for token in ids:
        on_border.push(token)
    assert (on_border.text, on_border.spelled) == ("abc", 3)
    merged = tokenizer(" the", add_special_tokens=False)["input_ids"]
    assert len(merged) == 1
    inside = TextStream(tokenizer, ("he",), frozenset())
    inside.push(ids[0])
    inside.push(merged[0])
    assert (inside.text, inside.spelled) == ("a t", None)


# -- where a completion ends -------------------------------------------------------------------------------------------


def test_a_stop_string_inside_a_forced_completion_ends_it() -> None:
    with engine() as running, running.stream(PROMPT, sampling=decode(50, forced="one two ENDED three", stop=("ENDED", "xx"))) as stream:
        shown = [chunk.text for chunk in stream]
        done = stream.completion
        assert "".join(shown) == done.text == "one two "
        assert done.finish_reason == "stop"
        assert len(done.ids) < 50


def test_max_tokens_and_eos() -> None:
    with engine() as running:
        end = running.tokenizer.eos_token_id
        assert len(running.generate(PROMPT, sampling=decode(5)).ids) == 5
        done = running.generate(PROMPT, sampling=Sampling(max_tokens=9, forced=(50, 51, end)))
        assert (done.ids, done.finish_reason) == ((50, 51, end), "stop")
        inside = running.generate(PROMPT, sampling=Sampling(max_tokens=4, forced=(50, end, 51, 52)))
        assert (inside.ids, inside.finish_reason) == ((50, end, 51, 52), "length"), "forced ids are decoded to their end"
        ignored = running.generate(PROMPT, sampling=decode(4, forced=(50, end)))
        assert (len(ignored.ids), ignored.finish_reason) == (4, "length")
        assert "<|im_end|>" not in ignored.text


def test_every_eos_of_the_generation_config_ends() -> None:
    model = models.build("qwen3")
    model.generation_config.eos_token_id = [77, 78]
    with engine(model=model) as running:
        for end in (77, 78, running.tokenizer.eos_token_id):
            done = running.generate(PROMPT, sampling=Sampling(max_tokens=9, forced=(50, end)))
            assert (done.ids, done.finish_reason) == ((50, end), "stop")


BAD: list[tuple[str, Any]] = [
    *[("max_tokens", value) for value in (0, -1, 1.5, "9", True, None)],
    *[("temperature", value) for value in (-0.1, float("nan"), float("inf"), "hot")],
    *[("top_p", value) for value in (-0.1, -1, 1.01, float("nan"), "all")],
    *[("top_k", value) for value in (-2, 2.5, True)],
    *[("min_p", value) for value in (-0.1, 1.0, float("nan"))],
    *[("repetition_penalty", value) for value in (0.0, -2, float("inf"), float("nan"))],
    *[("seed", value) for value in (-1, 1 << 64, 1.5, "x")],
    *[("stop", value) for value in ("text", ("",), (1,))],
    *[("forced", value) for value in ((1.5,), ("a",))],
]


@pytest.mark.parametrize(("name", "value"), BAD, ids=str)
def test_a_setting_that_cannot_work_is_refused_with_its_value(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"^{name}=") as caught:
        Sampling(**{name: value})
    assert repr(value) in str(caught.value)
