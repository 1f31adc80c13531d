"""Signatures of windows: near text is found, far text is not, equal places are kept once, and no scope sees another one's."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from agentcache.approximate import minhash
from agentcache.approximate.minhash import LEFT, PERMUTATIONS, PLACES, SHINGLE, LSHIndex, Signer, StoredText, shingles
from agentcache.approximate.minhash_index import MOST_ROWS, MinHashIndex
from agentcache.errors import ConfigError
from agentcache.store.deletion_log import Moment
from agentcache.store.disk.folder import Folder
from agentcache.store.disk.index import Index
from agentcache.store.keys import Ids, Scope, chain
from tests.approximate.windows import WordWindow, words
from tests.processes import program

SCOPE = Scope("default", "weights")
PARENT = b"p" * 32
NOW = Moment(0, time.time())


def changed(said: tuple[str, ...], every: int) -> tuple[str, ...]:
    return tuple("other" if i % every == every - 1 else word for i, word in enumerate(said))


def kept(signer: Signer, said: tuple[str, ...], left: tuple[str, ...] = (), exact: bytes = b"e" * 16, slot: int = 0) -> StoredText:
    return StoredText(signer.sign(WordWindow(0, 64, said, left)), exact, PARENT, 1, slot, 64)


def jaccard(one: tuple[str, ...], two: tuple[str, ...]) -> float:
    a, b = ({said[i : i + SHINGLE] for i in range(len(said) - SHINGLE + 1)} for said in (one, two))
    return len(a & b) / len(a | b)


# -- signatures --------------------------------------------------------------------------------------------------------


def test_similarity_is_estimated() -> None:
    signer = Signer()
    one = words(1)
    for two in (one, changed(one, 40), (*one[4:], *words(2, 4)), (*one[20:], *words(2, 20)), words(3)):
        values = [signer.sign(WordWindow(0, 64, said)).values for said in (one, two)]
        estimate = float(np.mean(values[0] == values[1]))
        assert abs(estimate - jaccard(one, two)) < 0.15
    assert values[0].shape == (PERMUTATIONS,)


def test_minhash_are_the_same_in_every_process() -> None:
    source = (
        "import warnings; warnings.simplefilter('error')\n"
        "from agentcache.approximate.minhash import Signer, shingles\n"
        "from tests.approximate.windows import WordWindow, words\n"
        "print(Signer().sign(WordWindow(0, 64, words(5), words(6))).values.tolist())"
    )
    expected = Signer().sign(WordWindow(0, 64, words(5), words(6))).values.tolist()
    assert program(source)[0].strip() == str(expected)


def test_shingles_are_runs_of_words() -> None:
    said = words(1, 20)
    assert len(shingles(said, SHINGLE)) == len({said[i : i + SHINGLE] for i in range(13)})
    assert set(shingles(said[3:15], SHINGLE)) <= set(shingles(said, SHINGLE))
    assert len(shingles(said[:3], SHINGLE)) == 1
    assert len(shingles((), SHINGLE)) == 0
    one, two = (("a", "b"), ("b", "a"))
    assert set(shingles(one, 1)) == set(shingles(two, 1))
    assert set(shingles(one, 2)).isdisjoint(shingles(two, 2))


def test_what_is_packed_comes_back_and_nothing_else_does() -> None:
    signer = Signer()
    one = kept(signer, words(1), words(2), slot=-7)
    again = StoredText.unpack(one.pack())
    assert again is not None
    assert again.pack() == one.pack()
    assert (again.exact, again.parent, again.page, again.slot, again.tokens) == (b"e" * 16, PARENT, 1, -7, 64)
    assert np.array_equal(again.signature.values, one.signature.values)
    assert np.array_equal(again.signature.left, one.signature.left)
    assert again.signature.left.shape == (LEFT,)
    assert StoredText.unpack(one.pack()[:-1]) is None


# -- the index ---------------------------------------------------------------------------------------------------------


def test_near_text_is_found_and_far_text_is_not() -> None:
    index, one = LSHIndex(0.7), words(1)
    sign = index.signer.sign
    assert index.add(SCOPE, kept(index.signer, one))
    assert index.add(SCOPE, kept(index.signer, words(2)))
    [found] = index.find(SCOPE, sign(WordWindow(0, 64, (*one[3:], *words(9, 3)))), b"")
    assert found.text.signature.digest == sign(WordWindow(0, 64, one)).digest
    assert found.similarity > 0.7
    assert not found.exact
    assert index.find(SCOPE, sign(WordWindow(0, 64, (*one[30:], *words(9, 30)))), b"") == []
    assert index.find(SCOPE, sign(WordWindow(0, 64, words(3))), b"") == []


def test_nothing_below_the_threshold_is_proposed() -> None:
    index, one = LSHIndex(0.9), words(1, 200)
    for count in range(2, 60, 2):
        index.add(SCOPE, kept(index.signer, (*one[count:], *words(count, count)), exact=count.to_bytes(16, "big")))
    found = index.find(SCOPE, index.signer.sign(WordWindow(0, 64, one)), b"")
    assert found
    assert min(proposal.similarity for proposal in found) >= 0.9
    assert [p.similarity for p in found] == sorted((p.similarity for p in found), reverse=True)


def test_equal_ids_come_first_then_the_likest_left_context() -> None:
    index, one, left = LSHIndex(), words(1), words(2, 16)
    for exact, before in ((b"a" * 16, left), (b"b" * 16, words(3, 16)), (b"b" * 16, (*words(3, 3), *left[3:]))):
        assert index.add(SCOPE, kept(index.signer, one, before, exact))
    found = index.find(SCOPE, index.signer.sign(WordWindow(0, 64, one, left)), b"b" * 16)
    assert [(proposal.exact, round(proposal.left, 1) > 0.4) for proposal in found] == [(True, True), (True, False), (False, True)]
    assert found[2].left == 1.0


def test_equal_places_are_kept_once_and_a_text_has_few() -> None:
    index, one = LSHIndex(), words(1)
    assert index.add(SCOPE, kept(index.signer, one))
    assert not index.add(SCOPE, kept(index.signer, one))
    for slot in range(1, 10):
        assert index.add(SCOPE, kept(index.signer, one, slot=slot))
    found = index.find(SCOPE, index.signer.sign(WordWindow(0, 64, one)), b"")
    assert [proposal.text.slot for proposal in found] == [0, 7, 8, 9], "the first is mostly of a learnt text, which stays longest"
    assert (len(found), len(index)) == (PLACES, 1)


def test_the_longest_unused_text_goes() -> None:
    index = LSHIndex(most=3)
    for seed in range(3):
        index.add(SCOPE, kept(index.signer, words(seed)))
    assert index.find(SCOPE, index.signer.sign(WordWindow(0, 64, words(0))), b"")
    index.add(SCOPE, kept(index.signer, words(3)))
    assert len(index) == 3
    found = [index.find(SCOPE, index.signer.sign(WordWindow(0, 64, words(seed))), b"") for seed in range(4)]
    assert [bool(each) for each in found] == [True, False, True, True]


def test_the_bound_is_of_all_scopes_together() -> None:
    index, scopes = LSHIndex(most=3), [Scope(f"user {at}", "weights") for at in range(5)]
    for at, scope in enumerate(scopes):
        assert index.add(scope, kept(index.signer, words(at)))
        index.find(scopes[0], index.signer.sign(WordWindow(0, 64, words(0))), b"")
    assert len(index) == 3
    assert [scope in index for scope in scopes] == [True, False, False, True, True], "an index without texts goes, too"
    assert index.add(scopes[1], kept(index.signer, words(1))), "as if it had never been there"
    index.clear("user 1")
    assert (len(index), scopes[1] in index) == (2, False)
    index.clear()
    assert len(index) == 0


def test_what_is_dropped_is_gone() -> None:
    index, one = LSHIndex(), words(1)
    first, second = kept(index.signer, one), kept(index.signer, one, words(2))
    index.add(SCOPE, first)
    index.add(SCOPE, second)
    index.drop(SCOPE, first)
    index.drop(SCOPE, first)
    assert [proposal.text for proposal in index.find(SCOPE, second.signature, b"")] == [second]
    index.drop(SCOPE, second)
    assert len(index) == 0
    assert index.find(SCOPE, second.signature, b"") == []
    assert index.add(SCOPE, first)


@pytest.mark.parametrize("other", [Scope("other", "weights"), Scope("default", "others"), Scope("default", "weights", "long")])
def test_no_scope_sees_anothers_text(other: Scope) -> None:
    index = LSHIndex()
    one = kept(index.signer, words(1))
    index.add(SCOPE, one)
    assert index.find(other, one.signature, b"") == []
    index.add(other, one)
    index.clear(SCOPE.namespace)
    assert bool(index.find(other, one.signature, b"")) == (other.namespace != SCOPE.namespace)


@pytest.mark.parametrize("tau", [0.0, 1.0, -1.0, 2.0])
def test_a_threshold_that_cannot_be_is_refused(tau: float) -> None:
    with pytest.raises(ConfigError, match=f"tau={tau!r}: must lie between 0 and 1"):
        LSHIndex(tau)


def test_without_the_library_it_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasketch", None)
    with pytest.raises(ConfigError, match=r"pip install 'agentcache-llm\[segments\]'"):
        LSHIndex()
    with pytest.raises(ConfigError, match="needs datasketch"):
        minhash.datasketch()


def test_approximate_reuse_imports_without_the_library() -> None:
    source = "import sys; sys.modules['datasketch'] = None; import agentcache.approximate.segments as made; print(made.Segments.__name__)"
    assert program(source)[0].strip() == "Segments"


# -- in the index of the store -----------------------------------------------------------------------------------------


@pytest.fixture
def index(tmp_path: Path) -> Iterator[Index]:
    with Index(Folder.open(tmp_path / "store")) as opened:
        yield opened


def prompt(count: int = 1400) -> Ids:
    return np.random.default_rng(3).integers(0, 9000, count).astype(np.uint32)


def index_over(index: Index) -> MinHashIndex:
    """The index of windows of a store that has no more than this, and does its writing at once."""
    disk = SimpleNamespace(index=index, folder=index.folder, writer=SimpleNamespace(after=lambda job: job()))
    nothing = lambda *_: None  # noqa: E731
    return MinHashIndex(SimpleNamespace(disk=disk, on_deletion=nothing, on_renewal=nothing, apply_deletions=lambda: NOW))  # type: ignore[arg-type]


def add_now(signed: MinHashIndex, windows: list[WordWindow]) -> int:
    """How many of these windows were new."""
    assert signed.store.disk is not None
    return signed.add_now(signed.store.disk, SCOPE, prompt(), windows, NOW)  # type: ignore[arg-type]


def noted(index: Index, seeds: range = range(4), scope: Scope = SCOPE) -> tuple[MinHashIndex, list[WordWindow]]:
    signed = index_over(index)
    windows = [
        WordWindow(400 * i, 400 * i + 64, words(100 + i), words(200 + i, 16)) for i in (0, 1, 2, 3) if 100 + i in [100 + s for s in seeds]
    ]
    signed.add(scope, prompt(), windows)
    return signed, windows


def test_a_later_process_finds_what_was_noted(index: Index, monkeypatch: pytest.MonkeyPatch) -> None:
    _, windows = noted(index)
    later = index_over(index)
    assert later.find(SCOPE, prompt(), windows[1]) == []
    assert later.refresh(SCOPE) == 4
    with monkeypatch.context() as patch:
        patch.setattr(StoredText, "unpack", lambda packed: pytest.fail("a row was read twice"))
        assert later.refresh(SCOPE) == 0
    keys = [SCOPE.root, *chain(SCOPE.root, prompt())]
    for window, page, slot in zip(windows, (0, 0, 1, 2), (0, 400, 288, 176), strict=True):
        [found] = later.find(SCOPE, prompt(), window)
        assert (found.text.parent, found.text.page, found.text.slot, found.text.tokens) == (keys[page], page, slot, 64)
        assert (found.exact, found.left) == (True, 1.0)


def test_what_left_memory_is_read_again(index: Index) -> None:
    signed, windows = noted(index)
    signed.refresh(SCOPE)
    signed.clear("default")
    assert signed.find(SCOPE, prompt(), windows[1]) == []
    assert signed.refresh(SCOPE) == 4
    assert signed.find(SCOPE, prompt(), windows[1])


def test_what_is_noted_after_a_deletion_hides_no_rows(index: Index) -> None:
    _, windows = noted(index)
    later = index_over(index)
    later.refresh(SCOPE)
    later.clear("default")
    add_now(later, [WordWindow(7, 71, words(7))])
    assert later.refresh(SCOPE) == 4
    assert all(later.find(SCOPE, prompt(), window) for window in windows)


def test_text_that_is_noted_again_is_young(index: Index) -> None:
    noted(index)
    index.database.write(lambda c: c.execute("UPDATE segments SET created = 1.0"))
    noted(index)  # its pages were evicted, and computed again
    assert index.drop_texts("segments", before=time.time() - 60.0) == 0


def test_the_lowest_threshold_of_several_finds_for_all(index: Index, monkeypatch: pytest.MonkeyPatch) -> None:
    signed, windows = noted(index)
    signed.refresh(SCOPE)
    signed.retune(0.6)
    assert signed.refresh(SCOPE) == 4
    monkeypatch.setattr(StoredText, "unpack", lambda packed: pytest.fail("a row was read twice"))
    for tau in (0.9, 0.6):
        signed.retune(tau)
        assert signed.refresh(SCOPE) == 0
        assert signed.find(SCOPE, prompt(), windows[1])


def test_a_window_belongs_to_the_page_with_its_middle(index: Index) -> None:
    signed = index_over(index)
    for start, page, slot in ((470, 0, 470), (490, 1, -22)):
        window = WordWindow(start, start + 64, words(start))
        assert add_now(signed, [window]) == 1
        [found] = signed.find(SCOPE, prompt(), window)
        assert (found.text.page, found.text.slot) == (page, slot)


def test_nothing_is_written_twice(index: Index) -> None:
    signed, windows = noted(index)
    assert add_now(signed, windows) == 0
    noted(index)  # a process that has not read what there is
    assert index.stats()["segments"] == 4


def test_rows_go_by_namespace_age_and_last_use(index: Index, monkeypatch: pytest.MonkeyPatch) -> None:
    signed, windows = noted(index)
    noted(index, scope=Scope("other", "weights"))
    index.drop_texts("segments", "other")
    assert index.stats()["segments"] == 4
    signed.mark_used(SCOPE, [proposal.text for proposal in signed.find(SCOPE, prompt(), windows[0])])
    monkeypatch.setattr("agentcache.approximate.minhash_index.MOST_ROWS", 2)
    add_now(signed, [WordWindow(7, 71, words(7))])
    later = index_over(index)
    later.refresh(SCOPE)
    assert [bool(later.find(SCOPE, prompt(), window)) for window in windows] == [True, False, False, False]
    assert MOST_ROWS > 1000
    assert index.drop_texts("segments", before=time.time() - 60.0) == 0
    assert index.drop_texts("segments", "default") == 2


def test_rows_go_with_the_pages_under_which_they_stand(index: Index) -> None:
    _, windows = noted(index)
    keys = [SCOPE.root, *chain(SCOPE.root, prompt())]
    assert index.drop_segments_under("other", "weights", {keys[0]: []}) == 0
    assert index.drop_segments_under("default", "weights", {keys[0]: [prompt()[:512]], keys[2]: [prompt()[1024:]]}) == 0, "they stay"
    assert index.drop_segments_under("default", "weights", {keys[0]: [], keys[2]: []}) == 3, "two of the first page, one of the third"
    later = index_over(index)
    later.refresh(SCOPE)
    assert [bool(later.find(SCOPE, prompt(), window)) for window in windows] == [False, False, True, False]


def test_old_places_without_pages_are_forgotten(index: Index, monkeypatch: pytest.MonkeyPatch) -> None:
    signed, windows = noted(index)
    places = [signed.find(SCOPE, prompt(), window)[0].text for window in windows]
    signed.drop_missing(SCOPE, places[:1])
    assert index.stats()["segments"] == 4
    assert signed.find(SCOPE, prompt(), windows[0]) == []
    monkeypatch.setattr("agentcache.approximate.minhash_index.YOUNG_S", -1.0)
    signed.drop_missing(SCOPE, places[:2])
    assert index.stats()["segments"] == 2


def test_rows_of_others_and_damaged_ones_are_not_believed(index: Index) -> None:
    _, windows = noted(index)
    other = Scope("other", "weights")
    index.database.write(lambda c: c.execute("UPDATE segments SET namespace = 'other' WHERE id = 1"))
    index.database.write(lambda c: c.execute("UPDATE segments SET packed = substr(packed, 2) WHERE id = 2"))
    index.database.write(lambda c: c.execute("UPDATE segments SET packed = 7 WHERE id = 3"))
    later = index_over(index)
    assert later.refresh(other) == 0
    assert later.refresh(SCOPE) == 1
    assert later.find(SCOPE, prompt(), windows[3])


def test_an_encrypted_store_shows_no_signature(tmp_path: Path) -> None:
    with Index(Folder.open(tmp_path / "sealed", key=b"k" * 32)) as index:
        signed, windows = noted(index)
        values = signed.signatures.signer.sign(windows[0]).values.tobytes()
        digest = signed.signatures.signer.sign(windows[0]).digest
        index.database.empty_log()
        content = index.folder.index.read_bytes()
        assert values[:32] not in content
        assert digest not in content
        later = index_over(index)
        assert later.refresh(SCOPE) == 4
