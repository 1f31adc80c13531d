"""Incremental tokenisation equals tokenising the whole, for every kind of tokenizer; special-token text is broken."""

from __future__ import annotations

import json
import random
from array import array
from pathlib import Path
from typing import Any

import pytest
import transformers
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from agentcache.errors import ConfigError, MessageError
from agentcache.layout.tokenise import BACK, EMPTY, Encoded, Encoder, Neutraliser, Splice, common_length, in_transformers_form
from tests.chat_templates import CORPUS, KINDS, SPECIAL, tokenizer

PIECES = [
    *" \n\t.abAB17é字",
    *("aa", "ab", "ba", "   ", "\n\n", " the", "tool", "123456", "e\u0301", "🎉", "<", "|", "<|", "|>", "im_start", "[INST", "]"),
    *("<|im_start|>", "<|im_end|>", "<s>", "</s>", "<|left|>", "<|right|>", "<think>", "[INST]", *CORPUS),
]
SHARDS = ["<|left|>", "<|right|>", "<|", "|>", "im_", "start", "<", " ", "x", "[", "]"]
TEXT = st.lists(st.sampled_from(PIECES), max_size=12).map("".join)
LONG = st.tuples(st.integers(0, 2**32), st.integers(0, 300)).map(lambda pair: _long(*pair))
RELAXED = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])


def _long(seed: int, size: int) -> str:
    draw = random.Random(seed)
    pieces = draw.sample(PIECES, draw.randint(1, len(PIECES)))
    return "".join(draw.choice(pieces) for _ in range(size))


@pytest.mark.parametrize("kind", KINDS)
@RELAXED
@given(shared=LONG, old=TEXT, new=st.one_of(TEXT, LONG))
@example(shared=_long(76314, 126), old="", new=" ")  # characters that a vocabulary has no token for shift the ends of all behind them
def test_resume_equals_the_whole(kind: str, shared: str, old: str, new: str) -> None:
    encoder = Encoder(tokenizer(kind))
    known, text = encoder.whole(shared + old), shared + new
    resumed, spent = encoder.resume(known, common_length(known.text, text), text)
    whole = encoder.whole(text)
    assert resumed.ids == whole.ids
    assert resumed.ends == whole.ends
    assert spent <= len(text)


@pytest.mark.parametrize("kind", KINDS)
@RELAXED
@given(seed=st.integers(0, 2**32), size=st.integers(100, 600), extra=st.integers(0, 40))
@example(seed=0, size=182, extra=38)  # a Unigram model breaks the tie of two segmentations by rounding
def test_resume_in_runs_of_two_letters(kind: str, seed: int, size: int, extra: int) -> None:
    draw = random.Random(seed)
    text = "".join(draw.choices("ab", (draw.random() + 0.01, 1), k=size))
    encoder = Encoder(tokenizer(kind))
    known = encoder.whole(text[: size - 10])
    longer = text + "a" * extra
    assert encoder.resume(known, size - 10, longer)[0].ids == encoder.whole(longer).ids


@pytest.mark.parametrize("kind", KINDS)
def test_growing_text_costs_what_is_new(kind: str) -> None:
    encoder, draw = Encoder(tokenizer(kind)), random.Random(3)
    known, text = EMPTY, ""
    for step in range(30):
        new = " ".join("".join(draw.choices("abcde123", k=5)) + " the tool" for _ in range(20)) + "<|im_end|>"
        text += new
        known, spent = encoder.resume(known, len(known.text), text)
        if step > 3:
            assert spent < len(new) + 10 * BACK, "the new text and 64 tokens"
    assert known.ids == encoder.whole(text).ids


def test_the_same_text_is_not_tokenised_again() -> None:
    encoder = Encoder(tokenizer())
    known = encoder.whole("some text <|im_end|>")
    assert encoder.resume(known, len(known.text), known.text) == (known, 0)


def test_texts_in_memory_share_the_objects_of_ids() -> None:
    encoder = Encoder(tokenizer())
    first, second = (encoder.whole(text) for text in ("<|im_start|>what is it<|im_end|>", "what it is<|im_end|><|im_start|>"))
    assert set(second.ids) == set(first.ids)
    assert max(first.ids) > 256, "Python has one object for each smaller number"
    assert {*map(id, second.ids)} == {*map(id, first.ids)}


def test_ids_behind_a_splice_are_kept() -> None:
    encoder = Encoder(tokenizer())
    base = encoder.whole("question <|im_start|>")
    end = encoder.encode("<|im_end|>")[0]
    odd = [encoder.encode(letter)[0][0] for letter in "answer"] + end  # not as the tokenizer would write it
    text = base.text + "answer<|im_end|>"
    splice = Splice(b"k", 1, len(base.text), len(text), len(base.ids), len(base.ids) + len(odd), True)
    known = Encoded(text, base.ids + odd, base.ends + array("i", [len(text)]) * len(odd), (splice,))
    longer, _ = encoder.append(known, text + "\nmore text")
    assert longer.ids == known.ids + encoder.encode("<|im_end|>\nmore text")[0][1:]
    again, _ = encoder.resume(longer, len(longer.text), longer.text + " and more " * 50)
    assert again.ids == known.ids + encoder.encode("<|im_end|>\nmore text" + " and more " * 50)[0][1:]


@given(one=st.text(alphabet="ab", max_size=300), other=st.text(alphabet="ab", max_size=300), shared=st.text(alphabet="ab", max_size=300))
def test_common_length(one: str, other: str, shared: str) -> None:
    one, other = shared + one, shared + other
    expected = next((n for n, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
    assert common_length(one, other) == expected


@pytest.mark.parametrize("kind", KINDS)
@RELAXED
@given(
    pieces=st.lists(st.sampled_from([*SPECIAL, "<|left|>", "<|right|>", "<|", "|>", "im_", "start", "<", " ", "x", "[", "]"]), max_size=10)
)
def test_neutralised_text_holds_no_control_token(kind: str, pieces: list[str]) -> None:
    encoder = Encoder(tokenizer(kind))
    text = "".join(pieces)
    ids, _ = encoder.encode(Neutraliser(encoder)(text))
    control = set(encoder.control) - {tokenizer(kind).unk_token_id}
    assert not control & set(ids)
    spelled = control & set(encoder.encode(text)[0])
    assert spelled or Neutraliser(encoder)(text) == text, "text without control tokens is left alone"


def test_text_that_is_not_unicode_is_refused() -> None:
    with pytest.raises(MessageError, match="surrogate"):
        Encoder(tokenizer()).encode("broken \ud83d emoji")


class Slow:
    """A tokenizer without offsets: everything is tokenised whole."""

    is_fast = False
    all_special_ids = ()

    def __call__(self, text: str, **_: object) -> dict[str, list[int]]:
        return {"input_ids": [ord(char) for char in text]}


def test_a_slow_tokenizer_tokenises_the_whole() -> None:
    encoder = Encoder(Slow())
    known = encoder.whole("abc")
    longer, spent = encoder.resume(known, 3, "abcd")
    assert (longer.ids, len(longer.ends), spent) == ([97, 98, 99, 100], 0, 4)


class MistralCommonBackend:
    """As transformers' class of this name: it renders no template, and saves itself in transformers' form."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def save_pretrained(self, folder: str, *, save_format: str) -> None:
        assert save_format == "hf"
        if self.inner is None:
            raise OSError("tekken.json file is unavailable")
        self.inner.save_pretrained(folder)


def test_a_tokenizer_of_mistral_common_is_converted(toy_tokenizer: Any) -> None:
    made = in_transformers_form(MistralCommonBackend(toy_tokenizer))
    assert (made.chat_template, made.encode(CORPUS[0])) == (toy_tokenizer.chat_template, toy_tokenizer.encode(CORPUS[0]))
    assert in_transformers_form(toy_tokenizer) is toy_tokenizer


@pytest.mark.parametrize("model_type", ["qwen3", "gemma"])  # no ids at all; one unknown id for all words
def test_a_folder_without_a_tokenizer_is_named(tmp_path: Path, model_type: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
    with pytest.raises(ConfigError, match=f"{tmp_path.name}.*has no vocabulary .* tokenizer.save_pretrained"):
        in_transformers_form(transformers.AutoTokenizer.from_pretrained(tmp_path))


def test_a_processor_gives_its_tokenizer_and_template(toy_tokenizer: Any) -> None:
    class ProcessorMixin:
        tokenizer, chat_template = toy_tokenizer, toy_tokenizer.chat_template

    class Processor(ProcessorMixin):
        pass

    assert in_transformers_form(Processor()) is toy_tokenizer
    toy_tokenizer.chat_template = None
    made = in_transformers_form(Processor())
    assert (made.chat_template, toy_tokenizer.chat_template) == (ProcessorMixin.chat_template, None)


def test_one_that_cannot_be_converted_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"tekken.json file is unavailable\): load it by AutoTokenizer"):
        in_transformers_form(MistralCommonBackend(None))
