"""Windows and anchors of a prompt: the same text has the same ones wherever it stands, and what is known is not looked at again."""

from __future__ import annotations

import re
from collections.abc import Sequence

import pytest

from agentcache.approximate.windows import STRIDE, WINDOW, TokenTexts, Window, _Part, canonical, windows
from agentcache.types import Layout, Span

VOCABULARY: list[str] = []
WORDS = "harbour tide wind anchor gull rope mast sail deck crew storm port chart lamp bell".split()


def ids_of(text: str) -> list[int]:
    """One token per word, with the white space before it."""
    found = []
    for piece in re.findall(r"\s*\w+|\s*[^\w\s]|\s+$", text):
        if piece not in VOCABULARY:
            VOCABULARY.append(piece)
        found.append(VOCABULARY.index(piece))
    return found


def texts(ids: Sequence[int]) -> list[str]:
    return [VOCABULARY[token] for token in ids]


def prompt(*parts: str, ephemeral: int = 0) -> Layout:
    """A layout with one span per part; one that starts with a bracket is the tools."""
    ids: list[int] = []
    spans = []
    for part in parts:
        own = ids_of(part)
        kind = "tools" if part.startswith("[") else "turn"
        spans.append(Span(kind, len(ids), len(ids) + len(own)))  # type: ignore[arg-type]
        ids += own
    return Layout(ids, tuple(spans), "".join(parts), ephemeral_tokens=ephemeral)


def prose(seed: int, count: int) -> str:
    return " ".join(WORDS[(seed * 7 + i * i * (seed + 3) + i // 5) % len(WORDS)] for i in range(count))


def at_anchors(layout: Layout) -> list[str]:
    """What the tokens say at which windows start."""
    return [texts(layout.ids)[token].strip() for token in _Part(layout, texts, 0, len(layout.ids) - layout.ephemeral_tokens).anchors()]


def said(found: Sequence[Window]) -> list[tuple[str, ...]]:
    return [window.words for window in found]


def test_words_forget_case_space_times_and_ids() -> None:
    one = "Call_0081 AT 2026-11-21T10:00:01Z:  Order\n#481516 of 9f1c2d3e-0000-4000-8000-1234567890ab  took 3 days, v2"
    two = "call_4711 at 2025-01-02 09:59:\tORDER #99999 of 11111111-2222-3333-4444-555555555555 took 3 days, V2"
    words = [word for _, word in canonical(one)]
    assert words == [word for _, word in canonical(two)]
    assert words == "<id> at <time> : order # <id> of <id> took 3 days , v2".split()
    assert [word for _, word in canonical("took 4 days")] != [word for _, word in canonical("took 3 days")]
    at = canonical("ab  Cd")
    assert at == [(0, "ab"), (4, "cd")]


def test_anchors_of_a_react_prompt() -> None:
    text = f"""Question: {prose(1, 30)}
Thought 1: {prose(2, 20)}
Action 1: Search[ {prose(3, 12)} ]
Observation 1: {prose(4, 30)}

{prose(5, 40)}
Action: look
Action Input: {prose(6, 20)}
"""
    paragraph = prose(5, 1)
    assert at_anchors(prompt(text)) == ["Question", "Thought", "Action", "Observation", paragraph, "Action"]  # its input is near


def test_anchors_of_messages_schemas_results_and_documents() -> None:
    schemas = [f'{{"type": "function", "function": {{"name": "f{i}", "description": "{prose(i, 12)}"}}}}' for i in range(3)]
    layout = prompt(
        prose(1, 20), f"[{', '.join(schemas)}]", prose(2, 20), f"{prose(3, 12)} <tool_response> {prose(4, 12)}",
        f"{prose(5, 12)}\n# Tides\n{prose(6, 12)}\nDocument 2: {prose(7, 12)}",
    )  # fmt: skip
    messages = [prose(number, 1) for number in (1, 2, 3, 5)]
    assert at_anchors(layout) == [messages[0], "[", "{", "{", "{", *messages[1:3], "<", messages[3], "#", "Document"]


def test_schemas_are_anchors_where_no_span_says_so() -> None:
    text = " ".join(f'{{"type": "function", "function": {{"name": "f{i}", "description": "{prose(i, 6)}"}}}}' for i in range(3))
    assert at_anchors(prompt(f"{prose(1, 20)} {text}")) == [prose(1, 1), "{", "{", "{"]


@pytest.mark.parametrize("line", ["Context:", "---------------------", "=== "])
def test_text_under_a_rule_or_one_word_has_an_anchor(line: str) -> None:
    assert at_anchors(prompt(f"{prose(1, 20)}\n{line}\n{prose(2, 20)}")) == [prose(1, 1), prose(2, 1)]


def test_long_texts_in_json_results_are_anchors() -> None:
    results = ", ".join(f'{{"id": {i}, "text": "{prose(i, 20)}"}}' for i in range(3))
    layout = prompt(f"{prose(1, 20)} [{results}]", prose(2, 20))
    assert at_anchors(layout) == [prose(1, 1), *(prose(i, 1) for i in range(3)), prose(2, 1)]


def test_equal_text_behind_equal_anchors_has_equal_windows() -> None:
    text = f"\nObservation 2: {prose(9, 300)}\nThought 3:"
    one = windows(prompt(f"{prose(1, 37)}{text} {prose(2, 100)}"), texts)
    two = windows(prompt(f"{prose(3, 111)}{text} {prose(4, 100)}"), texts)
    both = set(said(one)) & set(said(two))
    inside = [window for window in one if window.start >= 37 and window.stop <= 37 + 300]
    assert len(inside) >= 7
    assert set(said(inside)) <= both
    assert [window.stop - window.start for window in one] == [WINDOW] * len(one)


@pytest.mark.parametrize("header", ["<|im_start|>user\n", "<|im_start|>user\n<tool_response>\n", "<|header|>\n\n"])
def test_the_text_of_a_message_has_windows_without_header(header: str) -> None:
    text = prose(9, 200)
    [one, other] = [windows(prompt(f"{before}{text}"), texts) for before in (header, f"{prose(1, 37)}:\n\n")]
    inside = [window.words for window in one if window.words[0] == text.split()[0]]
    assert inside
    assert {window.words for window in one[-3:]} | {*inside} <= {*said(other)}


def test_a_window_knows_what_stands_left_of_it() -> None:
    [first, *_, last] = windows(prompt(prose(1, 200)), texts)
    assert first.left == ()
    assert last.left == tuple(prose(1, 200).split()[last.start - 16 : last.start])


@pytest.mark.parametrize("cut", [70, 130, 200, 333])
def test_only_new_text_is_scanned_with_the_same_windows(cut: int) -> None:
    parts = [prose(1, 150), f"\nThought 1: {prose(2, 60)}\n\n{prose(3, 80)}", f"\nObservation 1: {prose(4, 120)}"]
    layout = prompt(*parts)
    shown: list[int] = []

    def look(ids: Sequence[int]) -> list[str]:
        shown.append(len(ids))
        return texts(ids)

    whole, since = windows(layout, texts), windows(layout, look, cut)
    assert since == [window for window in whole if window.stop > cut]
    assert (shown[0] < len(layout.ids)) == (cut == 333)  # far enough behind the message before


def test_a_long_history_is_not_read_again() -> None:
    layout = prompt(*[prose(i, 100) for i in range(60)])
    shown: list[int] = []
    windows(layout, lambda ids: shown.append(len(ids)) or texts(ids), len(layout.ids) - 50)  # type: ignore[func-returns-value]
    assert sum(shown) < 500


def test_what_is_for_this_prompt_only_has_no_windows() -> None:
    layout = prompt(prose(1, 300), ephemeral=60)
    assert max(window.stop for window in windows(layout, texts)) <= 240
    assert windows(prompt(prose(1, 40)), texts) == []
    assert windows(layout, texts, since=240) == []


def test_sizes_can_be_chosen() -> None:
    found = windows(prompt(prose(1, 600)), texts, size=128, stride=64)
    assert [window.start for window in found] == list(range(0, 600 - 127, 64))
    assert STRIDE == 32
    assert {window.stop - window.start for window in found} == {128}


def test_tools_that_are_no_json_are_one_anchor() -> None:
    assert at_anchors(prompt(f"[namespace {{ {prose(1, 40)} }} {{{{ unfinished")) == ["["]


def test_tokens_are_decoded_once() -> None:
    class Counting:
        calls = 0

        def decode(self, ids: list[int]) -> str:
            self.calls += 1
            return f"t{ids[0]}"

    tokenizer = Counting()
    say = TokenTexts(tokenizer)
    assert say([1, 2, 1]) == ["t1", "t2", "t1"]
    assert say([2, 3]) == ["t2", "t3"]
    assert tokenizer.calls == 3
