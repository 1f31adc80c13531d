"""Suffixes of regular expressions: one of them is a whole match."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentcache.answer.regex_suffixes import suffixes

PART = st.sampled_from(
    ["a", r"\d", r"\W", "[^a-c]", "[x-z]", ".", "(b|cd)", "(?:e{2,5})", "f?", "(gh)+", "i*?", "(j(k|l{3}))", r"\\", "[^\\d\\s]"]
)


@given(st.lists(PART, min_size=1, max_size=6).map("".join))
def test_one_suffix_is_a_whole_match(pattern: str) -> None:
    assert any(re.fullmatch(pattern, text) for text in suffixes(pattern))


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [("(ab)+c", ["", "c", "bc", "abc"]), (r"(\d+\.)+x", ["", "x", ".x", "0.x"]), (r"\p{L}+", []), ("(", []), ("(?=a)a", [])],
)
def test_suffixes_come_from_each_place(pattern: str, expected: list[str]) -> None:
    assert suffixes(pattern) == expected
