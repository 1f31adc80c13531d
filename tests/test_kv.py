"""Pages and page tables: what a reader sees below its length never changes, whoever appends, branches or fails beside it."""

from __future__ import annotations

import gc
import random
import weakref

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from agentcache.kv import PAGE_TOKENS, Page, Sequence
from agentcache.kv_spec import KVSpec

SPEC = KVSpec(2, 1, 2, torch.float32)


def kv(tokens: list[int], layer: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values [tokens, 1, 2] that name token, layer and kind."""
    base = torch.tensor(tokens, dtype=torch.float32)[:, None, None].expand(-1, 1, 2)
    return base + layer * 0.25, -base - layer * 0.25


def append(sequence: Sequence, tokens: list[int]) -> None:
    """What a forward does."""
    sequence.reserve(len(tokens))
    for layer in range(SPEC.layers):
        sequence.write(layer, sequence.length, *kv(tokens, layer))
    sequence.advance(len(tokens))


def check(sequence: Sequence, tokens: list[int]) -> None:
    assert sequence.length == len(tokens)
    if not tokens:
        return
    for layer in range(SPEC.layers):
        for seen, written in zip(sequence.read(layer), kv(tokens, layer), strict=True):
            assert torch.equal(seen, written)


def ask(tokens: int) -> Sequence:
    made = Sequence(SPEC)
    append(made, list(range(tokens)))
    return made


@settings(derandomize=True, deadline=None, max_examples=20)
@given(st.integers(0, 2**32))
def test_readers_never_see_a_change_below_their_length(seed: int) -> None:
    chance = random.Random(seed)
    readers: list[tuple[Sequence, list[int]]] = [(Sequence(SPEC), [])]
    fresh = iter(range(10**6))
    for _ in range(25):
        kind = chance.choice(["append", "append", "branch", "branch", "close", "truncate"])
        sequence, tokens = chance.choice(readers)
        if kind == "append" and owns(sequence):
            new = [next(fresh) for _ in range(chance.choice([1, 3, 200, 511, 512, 700]))]
            append(sequence, new)
            tokens.extend(new)
        elif kind == "branch" and tokens:
            length = chance.choice([len(tokens), max(1, len(tokens) - 1), chance.randint(1, len(tokens))])
            other = Sequence(SPEC)
            other.attach(sequence.pages[: -(-length // PAGE_TOKENS)], length)
            readers.append((other, tokens[:length]))
        elif kind == "close":
            sequence.close()
        elif kind == "truncate" and owns(sequence):
            newest = [t for s, t in readers if s is not sequence and shares(s, sequence)]
            low = max((common(tokens, t) for t in newest), default=0)
            sequence.truncate(low)
            del tokens[low:]
            del sequence.pages[-(-low // PAGE_TOKENS) :]
        for reader, oracle in readers:
            check(reader, oracle)


def owns(sequence: Sequence) -> bool:
    """Whether it may append where it ends (a closed one has to be attached anew)."""
    return sequence.length % PAGE_TOKENS == 0 or sequence.pages[-1]._claim is sequence


def shares(a: Sequence, b: Sequence) -> bool:
    return bool({id(p) for p in a.pages} & {id(p) for p in b.pages})


def common(a: list[int], b: list[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def test_one_appends_in_place_and_the_next_branches() -> None:
    first = ask(700)
    first.close()
    one, two = Sequence(SPEC), Sequence(SPEC)
    one.attach(list(first.pages), 700)
    two.attach(list(first.pages), 700)
    assert one.pages[0] is two.pages[0] is first.pages[0]
    assert one.pages[1] is first.pages[1]
    assert one.copied_tokens == 0
    assert two.pages[1] is not first.pages[1]
    assert two.copied_tokens == 700 - 512
    append(one, [1] * 5)
    append(two, [2] * 5)
    check(one, [*range(700), *[1] * 5])
    check(two, [*range(700), *[2] * 5])
    check(first, list(range(700)))


def test_a_claim_needs_the_written_end_for_itself() -> None:
    page = Page(SPEC)
    one, two = object(), object()
    assert not page.claim(3, one)
    assert page.claim(0, one)
    assert not page.claim(0, two)
    page.release(two)
    assert not page.claim(0, two)
    page.release(one)
    assert page.claim(0, two)
    page.filled = PAGE_TOKENS
    page.release(two)
    assert page.sealed
    assert page.claim(PAGE_TOKENS - 1, one) is False


def test_nothing_is_written_below_a_shared_length() -> None:
    first = ask(100)
    first.close()
    other = Sequence(SPEC)
    other.attach(list(first.pages), 60)  # claims nothing: slots from 60 on are written
    assert other.pages[0] is not first.pages[0]
    append(other, [7] * 40)
    check(first, list(range(100)))
    late = Sequence(SPEC, [first.pages[0]], 60)
    with pytest.raises(AssertionError):
        late.advance(5)  # an append that goes round the claim is refused when it is declared


def test_truncating_zeroes_what_a_failed_forward_left_after_the_length() -> None:
    sequence = ask(510)
    sequence.reserve(10)
    for layer in range(SPEC.layers):
        sequence.write(layer, 510, *(t * float("nan") for t in kv([1] * 10, layer)))
    sequence.truncate(sequence.length)
    for page in sequence.pages:
        assert torch.isfinite(page.keys).all()
        assert torch.isfinite(page.values).all()
    check(sequence, list(range(510)))
    append(sequence, [5, 6, 7])
    check(sequence, [*range(510), 5, 6, 7])


def test_a_branch_has_no_states_of_what_it_left_behind() -> None:
    """Computing must not be resumed from what another conversation's tokens were."""
    first = ask(300)
    with torch.inference_mode():  # as a forward does
        first.keep_states(1, 0, torch.ones(300, 4))
    other = Sequence(SPEC)
    other.attach(list(first.pages), 200)
    [own] = other.pages
    assert torch.equal(own.boundaries[1][:200], torch.ones(200, 4))
    assert torch.isnan(own.boundaries[1][200:]).all()
    first.truncate(250)
    assert torch.isfinite(first.pages[0].boundaries[1][:250]).all()
    assert torch.isnan(first.pages[0].boundaries[1][250:]).all()


def test_a_closed_sequence_leaves_no_claim_and_no_reference() -> None:
    first = ask(300)
    shared = first.pages[0]
    first.close()
    second = Sequence(SPEC)
    second.attach([shared], 300)
    append(second, list(range(400)))
    second.reserve(600)  # pages are ready, but the forward never came
    private = weakref.ref(second.pages[1])
    second.close()
    assert all(page._claim is None for page in second.pages)
    del second
    gc.collect()
    assert private() is None, "a shared page keeps the private pages of a dead sequence alive"


def test_bytes() -> None:
    spec = KVSpec(3, 2, 16, torch.bfloat16)
    assert spec.token_bytes == 2 * 3 * 2 * 16 * 2
    page = Page(spec)
    assert spec.page_bytes == sum(t.numel() * t.element_size() for t in (page.keys, page.values))


def test_layers_of_other_widths_lie_side_by_side() -> None:
    spec = KVSpec(3, 2, 24, torch.float32, widths=((2, 24, 8), (1, 8, 16), (2, 16, 24)))
    assert spec.token_bytes == 4 * (2 * 32 + 24 + 2 * 40)
    page = Page(spec)
    assert spec.page_bytes == page.keys.nbytes + page.values.nbytes
    first = Sequence(spec)
    first.reserve(300)
    written = []
    for layer, (heads, keys, values) in enumerate(spec.widths):
        written.append((torch.randn(300, heads, keys), torch.randn(300, heads, values)))
        first.write(layer, 0, *written[layer])
    first.advance(300)
    other = Sequence(spec)
    other.attach(list(first.pages), 200)
    first.truncate(250)
    for layer, (keys, values) in enumerate(written):
        for sequence, kept in ((first, 250), (other, 200)):
            found = sequence.read(layer)
            assert torch.equal(found[0], keys[:kept])
            assert torch.equal(found[1], values[:kept])
            assert not any(t[kept:].any() for t in sequence.read(layer, 0, 300))
        assert all(t.is_contiguous() for t in (other.pages[0].layer_keys[layer], other.pages[0].layer_values[layer]))


def test_layers_of_a_page_below_are_shared_and_never_written() -> None:
    spec = KVSpec(3, 2, 8, torch.float32)
    below, owner = Page(spec), object()
    below.keys.normal_()
    below.values.normal_()
    below.filled = PAGE_TOKENS
    before = below.keys.clone(), below.values.clone()
    over = Page(spec, below=below, shared=2, owner=owner)
    assert over.layer_keys[1].data_ptr() == below.layer_keys[1].data_ptr()
    assert over.bytes == below.bytes // 3
    sequence = Sequence(spec, pages=[over])
    sequence.write(2, 0, *torch.ones(2, 100, 2, 8))
    with pytest.raises(AssertionError):
        sequence.write(1, 0, *torch.ones(2, 100, 2, 8))
    sequence.advance(100)
    over.release(owner)
    other = Sequence(spec)
    other.attach([over], 100)
    assert other.pages[0] is not over, "only its owner goes on in it, others copy"
    assert torch.equal(other.pages[0].layer_keys[0][..., :100], below.layer_keys[0][..., :100])
    sequence.truncate(0)
    assert not over.layer_keys[2].any()
    assert torch.equal(below.keys, before[0])
    assert torch.equal(below.values, before[1])
