"""Tokens of log-probabilities as bytes: together they are the answer, whichever tokenizer wrote it."""

from __future__ import annotations

import json
from itertools import accumulate

import pytest

from agentcache.server.token_bytes import shown, token_bytes
from tests.chat_templates import tokenizer
from tests.serving import ASKED, Served

TEXT = "naïve façade 😀  tokens, 中文 aa"


@pytest.mark.parametrize("kind", ["byte_bpe", "metaspace_bpe", "unigram"])
def test_bytes_of_all_tokens_are_the_text(kind: str) -> None:
    made = tokenizer(kind)
    text = TEXT if kind != "unigram" else TEXT.replace("  ", " ")
    ids = made(text, add_special_tokens=False)["input_ids"]
    assert b"".join(token_bytes(made, token) for token in ids).decode().removeprefix(" ") == text.removeprefix(" ")


def test_a_fallback_byte_is_itself() -> None:
    class Fallback:
        def decode(self, ids: list[int]) -> str:
            return "\ufffd"

        def convert_ids_to_tokens(self, token: int) -> str:
            return f"<0x{token:02X}>"

    assert token_bytes(Fallback(), 0xC3) == b"\xc3"
    assert shown(b"\xc3") == "\\xc3"


def test_answers_tell_the_bytes_of_parts_of_characters(served: Served) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"const": "été 🎉"}}}
    with served.client() as http:
        asked = {"messages": ASKED, "max_tokens": 64, "logprobs": True, "top_logprobs": 2, "response_format": form}
        choice = http.post("/v1/chat/completions", json=asked).json()["choices"][0]
        told = [bytes(one["bytes"]) for one in choice["logprobs"]["content"]]
        assert json.loads(b"".join(told).decode()) == json.loads(choice["message"]["content"]) == "été 🎉"
        assert max(map(len, told)) < len("🎉".encode()), "of several tokens each"
        text = http.post("/v1/completions", json={"prompt": "Zürich été 日本 " * 8, "max_tokens": 24, "logprobs": 20}).json()["choices"][0]
    lengths = [len(one.encode("latin-1", "ignore").decode("unicode_escape")) for one in text["logprobs"]["tokens"]]
    assert len(text["logprobs"]["text_offset"]) == len(lengths)
    assert text["logprobs"]["text_offset"][-1] < len(text["text"]) <= sum(accumulate(lengths))
    assert all(len(top) == 20 for top in text["logprobs"]["top_logprobs"]), "no token takes another's place"
