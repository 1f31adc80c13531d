"""Models with recurrent layers: whatever came before, an exact request has the bits of one that computes everything."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from agentcache import Sampling, drafts
from agentcache.model.attention import Part
from tests.asking import SYSTEM, Asking, by_pieces, user

WORDS = "the wind at sea turns to north and a ship keeps its log by night".split()


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module", params=[nullcontext, by_pieces], ids=["anywhere", "by pieces"])
def hybrids(request: pytest.FixtureRequest) -> Iterator[dict[str, Asking]]:
    with request.param():
        made = {family: Asking(family, None) for family in ("qwen3_5_text", "lfm2")}
    yield made
    for one in made.values():
        one.engine.close()


def assistant(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def text(words: int, seed: int = 0) -> str:
    return " ".join(WORDS[(seed + at * at) % len(WORDS)] for at in range(words))


def same(one: Asking, messages: Any, mixed: bool = False, **options: Any) -> int:
    """Check an exact request against one without reuse; how many of its tokens were cached. mixed: its receipt may say that keys and
    checkpoints of a page come from other pieces: no bits are promised then."""
    said, logits = one(messages, **options)
    off, expected = one(messages, **options, reuse="off")
    if mixed and not said.receipt.bitwise:
        assert any("pieces" in refusal.detail for refusal in said.receipt.refusals)
        assert torch.allclose(logits, expected, atol=1e-4)
        assert said.ids == off.ids
    else:
        assert said.receipt.bitwise
        assert torch.equal(logits, expected)
    return said.receipt.cached_tokens


def test_a_turn_may_end_anywhere_around_a_checkpoint(hybrids: dict[str, Asking]) -> None:
    for words in range(30, 94, 6):  # sometimes the request for an answer begins before a multiple of 64, and ends after it
        asked, apart = [SYSTEM, user("w " * words)], {"namespace": f"{words}", "tools": (), "tokens": 2}
        same(hybrids["qwen3_5_text"], asked, **apart)
        assert same(hybrids["qwen3_5_text"], [*asked, assistant(text(60)), user(text(9))], **apart) >= 64


def test_turns_that_share_all_but_their_last_words(hybrids: dict[str, Asking]) -> None:
    apart = {"tools": (), "tokens": 2, "namespace": "words"}
    for words in range(40, 58, 3):
        for more in ("", "w", "w and " * 20):
            same(hybrids["qwen3_5_text"], [SYSTEM, user("w " * words + more)], **apart)


def test_a_text_that_goes_on(hybrids: dict[str, Asking]) -> None:
    apart = {"tools": (), "tokens": 2, "namespace": "texts"}
    cached = [same(hybrids["qwen3_5_text"], text(words), **apart) for words in (90, 150, 151, 230)]
    assert cached[0] == 0
    assert min(cached[1:]) >= 128


def test_a_pinned_conversation_and_what_goes_on_from_it(hybrids: dict[str, Asking]) -> None:
    for family, words in (("lfm2", 55), ("lfm2", 61), ("qwen3_5_text", 48), ("qwen3_5_text", 52)):
        one, turns = hybrids[family], [SYSTEM, user(text(words)), assistant(text(words))]
        group = one.engine.pin(turns, namespace=f"pin {words}")
        asked = [*turns, user(text(40))]
        assert same(one, asked, tools=(), tokens=2, namespace=group.namespace) >= group.prefix_tokens - 64


@pytest.mark.parametrize("family", ["qwen3_5_text", "lfm2"])
def test_a_prompt_filled_beside_one_that_decodes(family: str, hybrids: dict[str, Asking], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agentcache.scheduler.STEP", 0.0)  # so that time does not matter: the smallest pieces
    one, asked = hybrids[family], [SYSTEM, user(text(90)), assistant(text(30)), user(text(9))]
    engine, expected = one.engine, one(asked, tools=(), reuse="off")[1]
    with engine.stream([user("x")], sampling=Sampling(max_tokens=400, ignore_eos=True, draft_tokens=0)) as decoding:
        next(decoding)
        before = engine.scheduler.rounds
        with mock.patch.object(engine.model, "forward", wraps=engine.model.forward) as forwards:
            said, logits = one(asked, tools=(), namespace="beside")
        shared = [len(call.args[0]) for call in forwards.call_args_list if len(call.args[1]) > 1]
        anywhere = engine.model.support.alignment == 1
        assert max(shared) == (4 if anywhere else 1) + 1
        assert (engine.scheduler.rounds - before > said.receipt.prompt_tokens // 16) == anywhere
        assert torch.equal(logits, expected)
        again, logits = one(asked, tools=(), namespace="beside")
        assert torch.equal(logits, expected)
        assert again.receipt.cached_tokens > 64


@pytest.mark.parametrize("family", ["qwen3_5_text", "lfm2"])
def test_next_tokens_of_several_share_forwards_and_keep_their_bits(family: str, hybrids: dict[str, Asking]) -> None:
    engine, asked = hybrids[family].engine, [[SYSTEM, user(text(20 + 9 * at))] for at in range(3)]
    expected = [hybrids[family](each, tools=(), tokens=30, reuse="off")[1] for each in asked]
    sampling, found = Sampling(max_tokens=30, temperature=0.0, ignore_eos=True), [list[torch.Tensor]() for _ in asked]
    with mock.patch.object(engine.model, "forward", wraps=engine.model.forward) as forwards:
        takes = [lambda logits, own=own: own.append(logits.clone()) for own in found]
        streams = [engine.stream(each, sampling=sampling, on_logits=take) for each, take in zip(asked, takes, strict=True)]
        for stream in streams:
            assert stream.completion.receipt.bitwise
    packs = [len(call.args[1]) for call in forwards.call_args_list]
    assert max(packs) == 3
    assert sum(packs) >= len(packs) + 40
    for own, logits in zip(found, expected, strict=True):
        assert torch.equal(torch.stack(own), logits)


@pytest.fixture(scope="module")
def zamba2() -> Iterator[Asking]:
    """A model whose states depend on where pieces end."""
    made = Asking("zamba2", None)
    assert made.engine.model.support.alignment > 1
    yield made
    made.engine.close()


@pytest.mark.parametrize("reuse", ["exact", "off"])
@pytest.mark.parametrize("family", ["lfm2", "zamba2"])
def test_members_of_a_pack_that_fails_go_on_alone(
    family: str, reuse: Any, hybrids: dict[str, Asking], zamba2: Asking, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, sampling = {**hybrids, "zamba2": zamba2}[family], Sampling(max_tokens=60, temperature=0.0, ignore_eos=True)
    forward, asked, packs = one.engine.model.forward, [[SYSTEM, user(text(60)), user(word)] for word in "ab"], []
    expected = [one(each, tools=(), tokens=60, reuse="off") for each in asked]

    def fail(ids: torch.Tensor, parts: list[Part], *some: Any) -> torch.Tensor:
        done = forward(ids, parts, *some)
        if len(parts) > 1:
            packs.append(parts)
            raise RuntimeError("not enough memory")
        return done

    monkeypatch.setattr(one.engine.model, "forward", fail)
    found = [list[torch.Tensor](), list[torch.Tensor]()]
    takes = [lambda logits, own=own: own.append(logits.clone()) for own in found]
    given = zip(asked, takes, strict=True)
    streams = [one.engine.stream(each, sampling=sampling, on_logits=take, namespace="alone", reuse=reuse) for each, take in given]
    for stream, own, (said, logits) in zip(streams, found, expected, strict=True):
        completion = stream.completion
        assert completion.ids == said.ids
        assert torch.equal(torch.stack(own), logits)
        assert "ran alone after a pack of 2 did not fit in memory" in completion.receipt.notes
        assert completion.receipt.bitwise
    assert len(packs) == 1


def test_a_short_prompt_whose_pack_failed_runs_again_without_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its first tokens would run beside drafts, and a state from before the first token cannot be gone back to."""
    template = "{% for m in messages %}{{ m.content }}\n{% endfor %}{% if add_generation_prompt %}>{% endif %}"
    one, packs, found = Asking("lfm2", None, chat_template=template), list[Any](), [list[torch.Tensor](), list[torch.Tensor]()]
    forward, asked, sampling = one.engine.model.forward, [[user(word)] for word in "ab"], Sampling(max_tokens=9, ignore_eos=True)
    expected = [one(each, tools=(), tokens=9, reuse="off")[1] for each in asked]

    def fail(ids: torch.Tensor, parts: list[Part], *some: Any) -> torch.Tensor:
        done = forward(ids, parts, *some)
        if len(parts) > 1 and not packs:
            packs.append(parts)
            raise RuntimeError("not enough memory")
        return done

    monkeypatch.setattr(one.engine.model, "forward", fail)
    monkeypatch.setattr(drafts, "repeated", lambda ids: [1])
    takes = [lambda logits, own=own: own.append(logits.clone()) for own in found]
    streams = [one.engine.stream(each, sampling=sampling, on_logits=take, reuse="off") for each, take in zip(asked, takes, strict=True)]
    for stream, own, logits in zip(streams, found, expected, strict=True):
        assert stream.completion.receipt.bitwise
        assert torch.equal(torch.stack(own), logits)
    assert packs
    one.engine.close()


def test_a_group_as_long_as_its_checkpoint(hybrids: dict[str, Asking]) -> None:
    one, aligned = hybrids["lfm2"], []
    for words in range(10, 60):
        system = {"role": "system", "content": text(words)}
        size = len(one.engine.renderer.opening([system]).ids)
        if size % 64 == 0:
            group = one.engine.warm(system["content"], namespace="aligned")
            aligned.append(same(one, [system, user(text(40))], tools=(), namespace="aligned") - group.prefix_tokens)
            assert group.prefix_tokens == size
    assert aligned
    assert not any(aligned)


TURNS = st.lists(st.integers(1, 150), min_size=1, max_size=3)
STEP = st.tuples(st.sampled_from(["ask", "branch", "evict", "thin", "pin", "forget"]), st.integers(0, 3), st.integers(1, 150))


@settings(max_examples=10, derandomize=True, deadline=None)
@given(family=st.sampled_from(["qwen3_5_text", "lfm2"]), turns=TURNS, steps=st.lists(STEP, min_size=2, max_size=5))
def test_conversations_that_branch_and_lose_checkpoints(
    hybrids: dict[str, Asking], family: str, turns: list[int], steps: list[tuple[str, int, int]]
) -> None:
    one, tree = hybrids[family], hybrids[family].engine.store.tree
    one.engine.forget(older_than=0)
    talk = [SYSTEM, *(turn for words in turns for turn in (user(text(words)), assistant(text(words, 3))))]
    for what, at, words in steps:
        if what == "evict":
            tree.eviction.drop_oldest(tree.eviction)
        elif what == "thin":
            for entry in tree.entries()[at::2]:
                assert entry.page is not None
                entry.page.checkpoints = {}
                tree.eviction.replace(entry, entry.page)
        elif what == "forget":
            one.engine.forget(older_than=0)
        elif what == "pin":
            one.engine.pin(talk, name=f"{at}")
        asked = [*(talk[: 1 + 2 * at] if what == "branch" else talk), user(text(words, at))]
        same(one, asked, mixed=True, tools=(), tokens=2)
        talk = [*asked, assistant(text(words, 5))]
