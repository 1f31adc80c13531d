"""Segments: moved, repaired and resumed exactly where nothing differs; tainted, guarded and watched where something does."""

from __future__ import annotations

import copy
import functools
import time
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from agentcache import Engine, Reason
from agentcache.approximate.calibrations import find, path_of
from agentcache.approximate.moved_pages import attach
from agentcache.approximate.ngram_index import Run
from agentcache.approximate.segments import ranges
from agentcache.calibration import Calibration
from agentcache.errors import CalibrationError, NonFiniteLogitsError
from agentcache.kv import PAGE_TOKENS, Sequence
from agentcache.model.attention import Part
from agentcache.model.hf import HFModel
from agentcache.plan import Attach, make
from agentcache.runner import Runner, Work
from agentcache.store.admin.prune import prune
from agentcache.store.entry import Entry
from agentcache.store.keys import Scope, as_ids
from agentcache.types import Precision, StoreOptions
from tests import models
from tests.approximate.repeated_text import DOC, FIRST, GREEDY, LAYERS, OTHER, calibration, engine, prompt, tiny_model
from tests.families import DENSE, tokens
from tests.saved_adapters import save_for

SCOPE = Scope("default", "weights")
LENGTH = 1100


pytestmark = pytest.mark.usefixtures("one_thread")


# -- the mechanism, bit for bit where nothing differs ------------------------------------------------------------------


@functools.cache
def whole(family: str, boundaries: tuple[int, ...] = ()) -> tuple[Runner, Sequence, torch.Tensor, list[int]]:
    """A prompt computed at once: the runner, the sequence, its last logits and ids."""
    model = HFModel(models.build(family, num_hidden_layers=LAYERS))
    model.keep_boundaries(boundaries)
    assert model.spec is not None
    runner, sequence, ids = Runner(model), Sequence(model.spec), tokens(LENGTH)
    logits = fill(runner, sequence, ids, 512)
    return runner, sequence, logits, ids


def fill(runner: Runner, sequence: Sequence, ids: list[int], chunk: int) -> torch.Tensor:
    """Compute what is missing of ids, in chunks; the last logits."""
    while (missing := len(ids) - sequence.length - sequence.ahead_tokens) > 0:
        pieces = sequence.pieces(min(chunk, missing))
        some = [token for piece in pieces for token in ids[piece.start : piece.start + piece.count]]
        [outcome] = runner.run([Work(sequence, some)])
        assert outcome.error is None, outcome.error
    assert outcome.logits is not None
    return outcome.logits


Repeat = tuple[Run, frozenset[int]]


def repeat(kept: Sequence, start: int, stop: int, shift: int, boundaries: Iterable[int] = ()) -> Repeat:
    """Prompt tokens [start, stop) that stand `shift` positions before in `kept`, and the layers whose inputs are there."""
    entries = [Entry(b"root", SCOPE, as_ids([]), None, None)]
    for page in kept.pages:
        entries.append(Entry(b"page", SCOPE, as_ids([]), page, entries[-1]))
    first, last = (start - shift) // PAGE_TOKENS, -(-(stop - shift) // PAGE_TOKENS)
    run = Run(start, stop, tuple(entries[1 + first : 1 + last]), (start - shift) % PAGE_TOKENS, tuple(kept.pages[first:last]))
    return run, frozenset(boundaries)


def attached(runner: Runner, kept: Sequence, repeats: list[Repeat], known: Calibration, length: int = LENGTH) -> Sequence:
    """A new sequence with these runs of `kept` placed ahead."""
    plan = make(length, 0, Reason.COLD, "", ranges(repeats, known)[0])
    sequence = Sequence(kept.spec)
    steps = [step for step in plan.steps if isinstance(step, Attach)]
    attach(runner.model, sequence, steps, "")
    return sequence


@pytest.mark.parametrize("family", ["qwen3", "llama", "mistral", "phi3", "smollm3", "granite"])
@pytest.mark.parametrize("chunk", [512, 37, 1])
def test_equal_left_context_gives_the_bits_of_computing(family: str, chunk: int) -> None:
    runner, kept, logits, ids = whole(family)
    sequence = attached(runner, kept, [repeat(kept, 40, 300, 0), repeat(kept, 310, 1060, 0)], calibration())
    assert sequence.ahead_tokens == 260 - 8 + 750 - 8
    assert torch.equal(fill(runner, sequence, ids, chunk), logits)
    for layer in range(LAYERS):
        for one, two in zip(kept.read(layer), sequence.read(layer), strict=True):
            assert torch.equal(one, two)
    assert sequence.exact_until == 48, "nobody can know that it was exact"
    assert sequence.length == LENGTH
    assert not sequence.ahead


@pytest.mark.parametrize("chunk", [512, 37, 1])
def test_resuming_between_layers_gives_the_bits_of_computing(chunk: int) -> None:
    runner, kept, logits, ids = whole("qwen3", (2, 4))
    known = calibration(steps=((8, 2), (20, 4), (50, LAYERS)), min_tokens=60)
    repeats = [repeat(kept, 40, 300, 0, (2, 4)), repeat(kept, 310, 370, 0, (2, 4)), repeat(kept, 600, 1060, 0, (4,))]
    sequence = attached(runner, kept, repeats, known)
    ahead = [(span.start, span.stop, span.entry) for span in sequence.ahead]
    assert ahead[:4] == [(48, 60, 2), (60, 90, 4), (90, 300, None), (318, 330, 2)]
    assert torch.equal(fill(runner, sequence, ids, chunk), logits)
    assert sequence.exact_until == 48
    for layer in range(LAYERS):
        for one, two in zip(kept.read(layer), sequence.read(layer), strict=True):
            assert torch.equal(one, two)
    for page, other in zip(kept.pages, sequence.pages, strict=True):
        for layer in (2, 4):  # computed and resumed tokens keep their states in turn
            computed = torch.isfinite(other.boundaries[layer]).all(1)
            assert torch.equal(page.boundaries[layer][computed], other.boundaries[layer][computed])


def test_a_resumed_token_is_not_computed_below_its_layer() -> None:
    """Otherwise the test above would pass with a runner that ignores where to come in."""
    runner, kept, _, ids = whole("qwen3", (2, 4))
    known = calibration(steps=((8, 4), (50, LAYERS)), min_tokens=60)
    sequence = attached(runner, kept, [repeat(kept, 40, 300, 0, (4,))], known)
    spoilt = [span if span.states is None else replace(span, states=span.states + 0.5) for span in sequence.ahead]
    sequence.ahead[:] = spoilt
    fill(runner, sequence, ids, 512)
    differs = [not torch.equal(kept.read(layer, 48, 90)[1], sequence.read(layer, 48, 90)[1]) for layer in range(LAYERS)]
    assert differs == [False] * 4 + [True] * 2


def test_packed_with_others_a_sequence_with_holes_keeps_its_bits() -> None:
    runner, kept, logits, ids = whole("qwen3", (2, 4))
    known = calibration(steps=((8, 2), (20, 4), (50, LAYERS)), min_tokens=60)
    one = attached(runner, kept, [repeat(kept, 40, 300, 0, (2, 4)), repeat(kept, 600, 1060, 0, (2, 4))], known)
    two, other = Sequence(kept.spec), tokens(200, seed=5)
    alone = fill(runner, Sequence(kept.spec), other, 512)
    missing = LENGTH - one.length - one.ahead_tokens
    pieces = one.pieces(missing)
    some = [token for piece in pieces for token in ids[piece.start : piece.start + piece.count]]
    for start in range(0, missing, 100):
        works = [Work(one, some[start : start + 100])]
        if start < 200:
            works.append(Work(two, other[start : start + 100]))
        outcomes = runner.run(works)
        if start == 100:
            assert torch.equal(outcomes[1].logits, alone)
    assert torch.equal(outcomes[0].logits, logits)


def test_layers_that_are_not_stepped_take_whole_segments_only() -> None:
    runner, kept, _, _ = whole("phi3")
    assert not runner.model.stepped
    runner.model.keep_boundaries((2,))
    assert runner.model.spec is not None
    assert runner.model.spec.boundaries == ()
    with pytest.raises(RuntimeError, match="not stepped"):
        runner.model.forward(torch.tensor([1]), [Part(Sequence(kept.spec), 0, 1)], [""], [], layers=2)
    assert kept.pages[0].boundaries == {}


PLACES = {name: made for name, made in DENSE.items() if "window" not in name}
PLACES["layer 0 without positions"] = ("smollm3", {"no_rope_layers": [0, 1, 1, 1]})


@pytest.mark.parametrize("family", PLACES)
def test_a_moved_segment_equals_computing_in_layer_0(family: str) -> None:
    """Layer 0 sees its own token and position only, so moving is checked against the model itself."""
    kind, overrides = PLACES[family]
    model = HFModel(models.build(kind, **overrides))
    assert model.spec is not None
    runner, ids, layers = Runner(model), tokens(900), model.spec.layers
    kept, there = Sequence(model.spec), Sequence(model.spec)
    fill(runner, kept, ids, 512)
    fill(runner, there, [*tokens(333, seed=3), *ids], 512)
    known = Calibration("x", layers, ((8, layers),), 32, 1.0)
    moved = Sequence(model.spec)
    attach(runner.model, moved, ranges([repeat(kept, 333, 1200, 333)], known)[0], "")
    span = moved.ahead[0]
    assert (span.start, span.stop) == (341, 1200)
    for one, two in zip(there.read(0, 341, 1200), moved.read(0, 341, 1200), strict=True):
        assert float((one - two).abs().max()) <= 2e-6 * float(one.abs().max())
    if layers > 1:
        assert not torch.allclose(there.read(1, 341, 1200)[0], moved.read(1, 341, 1200)[0], atol=1e-3)


# -- through the engine ------------------------------------------------------------------------------------------------


def test_a_repeated_document_is_attached_and_the_account_adds_up() -> None:
    with engine() as running:
        first = running.generate(FIRST, sampling=GREEDY).receipt
        assert (first.segments, first.precision, first.exact_until) == ((), "exact", first.prompt_tokens + 11)
        near = running.generate(OTHER, sampling=GREEDY).receipt
    [segment] = near.segments
    assert segment.whole_tokens > 500
    assert (segment.halo_tokens, segment.resumed_tokens) == (8, 0)
    assert segment.stop - segment.start == segment.whole_tokens + segment.halo_tokens
    assert near.cached_tokens + near.computed_tokens == near.prompt_tokens
    assert near.segment_tokens == segment.whole_tokens
    assert near.cached_tokens > near.segment_tokens, "the exact prefix"
    assert (near.precision, near.bitwise) == ("approximate", False)
    assert near.exact_until == segment.start + 8
    assert {refusal.reason for refusal in near.refusals} == {Reason.APPROXIMATE, Reason.DIVERGED}
    assert near.as_dict()["segments"][0]["shift"] == segment.shift


@pytest.mark.parametrize("tail", [0, 1, 40, 10**6])
def test_the_last_question_is_always_computed(tail: int) -> None:
    """All of the last turn, or its end, and nothing of the turn before."""
    before, asked = (
        [{"role": "system", "content": system}, {"role": "user", "content": DOC}, {"role": "assistant", "content": "Read."},
         {"role": "user", "content": f"And so, by what entry {' and '.join(map(str, range(40)))} say, who was it?"}]
        for system in ("You are one.", "You are quite another, and it is Monday.")
    )  # fmt: skip
    with engine(tail=tail) as running:
        running.generate(before, sampling=GREEDY)
        receipt = running.generate(asked, sampling=GREEDY).receipt
        turn, behind = receipt.spans[-2:]
        assert (turn.kind, behind.kind, behind.stop) == ("turn", "generation", receipt.prompt_tokens)
        assert turn.stop - turn.start > 60, "else 40 are no end of it"
        assert receipt.segments[-1].stop == min(max(turn.start, receipt.prompt_tokens - tail), receipt.prompt_tokens - 1)


def test_of_a_prompt_without_turns_the_end_is_computed() -> None:
    with engine(tail=40) as running:
        running.generate(f"You are one. {DOC} Who was it, and why?", sampling=GREEDY)
        receipt = running.generate(f"You are quite another. {DOC} Who was it, and why?", sampling=GREEDY).receipt
        assert receipt.segments[-1].stop == receipt.prompt_tokens - 40
        short = running.generate("You are another. Who was it, and why?", sampling=GREEDY).receipt
        assert short.segments == ()


def test_approximation_is_contagious_and_never_reaches_an_exact_request() -> None:
    with engine("off") as running:
        clean = running.generate(OTHER, sampling=GREEDY)
    with engine() as running:
        running.generate(FIRST, sampling=GREEDY)
        near = running.generate(OTHER, sampling=GREEDY)
        assert near.ids != clean.ids, "this document changes with its context, else this test shows nothing"
        again = running.generate(OTHER, sampling=GREEDY)
        assert again.receipt.computed_tokens == 1, "whoever consents goes on from it"
        assert again.ids == near.ids
        assert (again.receipt.precision, again.receipt.bitwise, again.receipt.exact_until) == ("approximate", False, 0)
        exact = running.generate(OTHER, sampling=GREEDY, reuse="exact")
        assert exact.ids == clean.ids
        assert exact.receipt.bitwise
        assert exact.receipt.cached_tokens <= near.receipt.exact_until
        after = running.generate(OTHER, sampling=GREEDY)
        assert after.ids == clean.ids, "what is exact goes first where it is as long"
        assert after.receipt.bitwise


def test_segments_never_cross_a_namespace() -> None:
    with engine() as running:
        running.generate(FIRST, sampling=GREEDY, namespace="victim")
        for name in ("default", "victim ", "Victim"):
            receipt = running.generate(OTHER, sampling=GREEDY, namespace=name).receipt
            assert (receipt.cached_tokens, receipt.segments) == (0, ()), name
        assert running.generate(OTHER, sampling=GREEDY, namespace="victim").receipt.segments


def test_a_forgotten_tool_group_is_not_in_pages_with_segments() -> None:
    with engine() as running:
        running.warm(OTHER[0]["content"], name="desk")
        running.generate(FIRST, sampling=GREEDY)
        assert running.generate(OTHER, sampling=GREEDY).receipt.segment_tokens
        assert "approximate" in {entry.scope.precision for entry in running.store.tree.entries()}
        assert running.forget(group="desk").memory_pages > 1
        assert "approximate" not in {entry.scope.precision for entry in running.store.tree.entries()}
        assert running.generate(OTHER, sampling=GREEDY).receipt.segment_tokens


def test_a_probe_that_fails_refuses_the_segment_and_computes() -> None:
    with engine("off") as running:
        clean = running.generate(OTHER, sampling=GREEDY)
    with engine(probe=1e-9) as running:
        running.generate(FIRST, sampling=GREEDY)
        done = running.generate(OTHER, sampling=GREEDY)
        assert done.ids == clean.ids
        receipt = done.receipt
        assert (receipt.segments, receipt.segment_tokens, receipt.halo_tokens) == ((), 0, 0)
        assert receipt.cached_tokens + receipt.computed_tokens == receipt.prompt_tokens
        assert receipt.computed_tokens > 500
        [why] = [refusal for refusal in receipt.refusals if refusal.reason is Reason.PROBE]
        assert "differ by" in why.detail
    with engine(probe=1e9) as running:
        running.generate(FIRST, sampling=GREEDY)
        assert running.generate(OTHER, sampling=GREEDY).receipt.segments


def gaps(logits: list[torch.Tensor]) -> list[float]:
    return [float(first - second) for first, second in (row.topk(2).values for row in logits)]


def test_a_close_first_choice_is_made_with_everything_computed() -> None:
    with engine("off") as running:
        clean = running.generate(OTHER, sampling=GREEDY)
    with engine(margin=1e9) as running:
        running.generate(FIRST, sampling=GREEDY)
        for _ in range(2):  # the second time there are pages near the exact ones, and exact ones
            seen: list[torch.Tensor] = []
            done = running.generate(OTHER, sampling=GREEDY, on_logits=seen.append)
            receipt = done.receipt
            assert done.ids == clean.ids
            assert len(seen) == len(done.ids), "what was not chosen from is not shown"
            assert (receipt.segments, receipt.segment_tokens, receipt.halo_tokens) == ((), 0, 0)
            assert (receipt.precision, receipt.bitwise) == ("exact", True)
            assert receipt.cached_tokens + receipt.computed_tokens == receipt.prompt_tokens
        assert receipt.computed_tokens == 1
        first = running.generate(prompt("You are one more.", "Why?"), sampling=GREEDY).receipt
        [why] = [refusal for refusal in first.refusals if refusal.reason is Reason.UNSURE]
        assert "nats apart" in why.detail
        assert first.computed_tokens > 500
        assert Reason.APPROXIMATE not in {refusal.reason for refusal in first.refusals}


def test_a_close_later_choice_is_made_with_everything_computed() -> None:
    seen: list[torch.Tensor] = []
    with engine() as running:
        running.generate(FIRST, sampling=GREEDY)
        near = running.generate(OTHER, sampling=GREEDY, on_logits=lambda row: seen.append(row.clone()))
    ahead = gaps(seen)
    at = min(range(1, len(ahead)), key=ahead.__getitem__)
    margin = ahead[at] * 1.0001
    at = next(n for n, gap in enumerate(ahead) if gap < margin)
    assert at, "the first one is not the closest, else this test shows nothing"
    forced = replace(GREEDY, forced=near.ids[:at])
    with engine("off") as running:
        right = running.generate(OTHER, sampling=forced)
        clean = running.generate(OTHER, sampling=GREEDY)
    with engine(margin=margin) as running:
        running.generate(FIRST, sampling=GREEDY)
        done = running.generate(OTHER, sampling=GREEDY)
        receipt = done.receipt
        assert done.ids == right.ids
        assert (receipt.segments, receipt.precision, receipt.bitwise) == ((), "approximate", False)
        assert receipt.cached_tokens + receipt.computed_tokens == receipt.prompt_tokens
        assert [refusal.stop - receipt.prompt_tokens for refusal in receipt.refusals if refusal.reason is Reason.UNSURE] == [at]
        again = running.generate(OTHER, sampling=GREEDY, reuse="exact")
        assert (again.ids, again.receipt.bitwise) == (clean.ids, True), "what is kept of it is exact"
        assert again.receipt.cached_tokens > receipt.cached_tokens


def test_the_margin_ignores_sampled_and_forced_choices() -> None:
    for sampling in (replace(GREEDY, temperature=0.8, seed=3), replace(GREEDY, forced=(5,) * 12)):
        with engine(margin=1e9) as running:
            running.generate(FIRST, sampling=GREEDY)
            receipt = running.generate(OTHER, sampling=sampling).receipt
            assert receipt.segments
            assert Reason.UNSURE not in {refusal.reason for refusal in receipt.refusals}


def test_computing_everything_again_is_exact_and_less_comes_nearer() -> None:
    """The share of deviating tokens, from none to all."""
    with engine("off") as running:
        clean = running.generate(OTHER, sampling=GREEDY)
    seen = []
    for share in (0.0, 0.16, 1.0):
        with engine(share=share) as running:
            running.generate(FIRST, sampling=GREEDY)
            done = running.generate(OTHER, sampling=GREEDY)
            seen.append(done.receipt.segment_tokens)
            assert done.receipt.cached_tokens + done.receipt.computed_tokens == done.receipt.prompt_tokens
    assert done.ids == clean.ids
    assert seen[2] == 0
    assert seen[1] == pytest.approx(0.84 * seen[0], abs=2)


def test_without_a_calibration_approximate_reuse_says_what_to_run(tmp_path: Path) -> None:
    model, tokenizer, fingerprint = tiny_model()
    with pytest.raises(CalibrationError, match="agentcache calibrate --model .* --dtype float32 --out CALIBRATION"):
        Engine(model, tokenizer, store=None, reuse="approximate")
    with pytest.raises(CalibrationError, match=f"agentcache calibrate --model .* --dtype float32 --store {tmp_path} "):
        Engine(model, tokenizer, store=StoreOptions(tmp_path), reuse="approximate")
    with Engine(model, tokenizer, store=None) as running, pytest.raises(CalibrationError, match="has no calibration"):
        running.generate(FIRST, reuse="approximate")
    with pytest.raises(CalibrationError, match="is not of this model"):
        Engine(model, tokenizer, store=None, reuse="approximate", calibration=calibration())
    with Engine(model, tokenizer, store=str(tmp_path)):
        pass
    calibration(fingerprint=fingerprint).save(path_of(tmp_path, fingerprint))
    with Engine(model, tokenizer, store=str(tmp_path), reuse="approximate") as running:
        running.generate(FIRST, sampling=GREEDY)
        assert running.generate(OTHER, sampling=GREEDY).receipt.segments


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"steps": ()}, "steps"),
        ({"steps": ((8, 5),)}, "steps"),
        ({"steps": ((8, 4), (4, 6))}, "steps"),
        ({"steps": ((8, 6), (9, 6))}, "steps"),
        ({"steps": ((8, 0), (9, 6))}, "steps"),
        ({"min_tokens": 8}, "min_tokens"),
        ({"kl": float("nan")}, "kl"),
        ({"share": 1.5}, "share"),
        ({"probe": -1.0}, "probe"),
        ({"probe": 0.1, "steps": ((0, 6),)}, "probe=0.1: must be 0 where steps begin at distance 0: without a halo"),
        ({"tau": 0.0}, "tau"),
        ({"tau": 1.0}, "tau"),
        ({"margin": float("inf")}, "margin"),
        ({"watch_one_in": 0}, "watch_one_in"),
        ({"tail": -1}, "tail=-1: must be a whole number of at least 0"),
        ({"tail": 1.5}, "tail"),
        ({"precision": "int2"}, "precision"),
    ],
)
def test_a_calibration_that_cannot_work_is_refused(wrong: dict[str, Any], said: str) -> None:
    with pytest.raises(CalibrationError, match=said):
        calibration(**wrong)


def test_a_calibration_loads_as_saved_or_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "c.json"
    one = calibration(steps=((8, 4), (20, 6)), measured={"kl": [0.1]}, model="m")
    one.save(path)
    assert Calibration.load(path) == one
    good = path.read_text()
    for text in ("", "{}", "[]", '{"format": 1}', good.replace('"format": 1', '"format": 2'), good[:-20], '{"format":1,"steps":3}'):
        path.write_text(text)
        with pytest.raises(CalibrationError, match="calibrate"):
            Calibration.load(path)
    with pytest.raises(CalibrationError, match="calibration 'True' cannot be read"):
        Calibration.load(True)  # type: ignore[arg-type]
    with pytest.raises(CalibrationError, match="no calibration"):
        find(None, tmp_path, "x", "m", "float32")


def test_drift_beyond_the_bound_switches_segment_reuse_off() -> None:
    with engine(kl=0.0, watch_one_in=1) as running:
        running.generate(FIRST, sampling=GREEDY)
        for number in range(4):
            turns = prompt(f"Number {number} {'x ' * number}", "And?")
            receipt = running.generate(turns, sampling=GREEDY).receipt
            assert receipt.segments or running.approximate.monitor.checked >= 3
            deadline = time.monotonic() + 60
            while running.approximate.monitor.pending and time.monotonic() < deadline:
                time.sleep(0.01)
        watch = running.approximate.monitor
        assert watch.checked >= 3
        assert watch.counts()["watch_kl"]["sum"] > 0
        assert running.approximate.off
        receipt = running.generate(prompt("Off now.", "And?"), sampling=GREEDY).receipt
        assert receipt.segments == ()
        assert Reason.DRIFT in {refusal.reason for refusal in receipt.refusals}


def test_drift_within_the_bound_leaves_it_on() -> None:
    with engine(kl=100.0, watch_one_in=1) as running:
        running.generate(FIRST, sampling=GREEDY)
        for number in range(4):
            running.generate(prompt(f"Number {number} {'x ' * number}", "And?"), sampling=GREEDY)
            deadline = time.monotonic() + 60
            while running.approximate.monitor.pending and time.monotonic() < deadline:
                time.sleep(0.01)
        assert running.approximate.monitor.checked >= 3
        assert not running.approximate.off


def test_pages_count_their_boundaries() -> None:
    with engine(steps=((8, 3), (20, LAYERS))) as running:
        spec = running.model.spec
        assert spec is not None
        assert spec.page_bytes == PAGE_TOKENS * (spec.token_bytes + 64 * 4)
        running.generate(FIRST, sampling=GREEDY)
        receipt = running.generate(OTHER, sampling=GREEDY).receipt
        assert receipt.segments[0].resumed_tokens == 12
        assert receipt.segments[0].halo_tokens == 8


def test_another_process_finds_the_text_on_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # a model this small is computed faster than it is read
    monkeypatch.setattr("agentcache.approximate.segment_prefetch.slow_load_ms", lambda *given: "")
    model, tokenizer, fingerprint = tiny_model()
    known = calibration(fingerprint=fingerprint)
    with Engine(model, tokenizer, store=str(tmp_path), reuse="approximate", calibration=known) as first:
        first.generate(FIRST, sampling=GREEDY)
        first.flush()
    with Engine(model, tokenizer, store=str(tmp_path), reuse="approximate", calibration=known) as second:
        assert second.generate(OTHER, sampling=GREEDY, namespace="other").receipt.segments == ()
        receipt = second.generate(OTHER, sampling=GREEDY).receipt
    [segment] = receipt.segments
    assert segment.whole_tokens > 500
    assert receipt.disk_bytes > 0
    with Engine(model, tokenizer, store=str(tmp_path), reuse="approximate", calibration=replace(known, tail=10**6)) as third:
        wanted: list[Any] = []
        monkeypatch.setattr("agentcache.approximate.segments.prefetch", lambda text, asked, wake: wanted.append(asked.windows))
        assert third.generate(prompt("A third one.", "Where?"), sampling=GREEDY).receipt.segments == ()
    assert wanted == [()], "it all stands in what is asked last"


@pytest.mark.parametrize("left", ["process", "memory"])
def test_learnt_texts_are_found_on_disk_at_other_positions(left: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agentcache.approximate.segment_prefetch.slow_load_ms", lambda *given: "")
    model, tokenizer, fingerprint = tiny_model()
    texts = [DOC, DOC.replace("harbour", "lighthouse")]
    asked = [{"role": "user", "content": "\n\n".join(["New.", *reversed(texts), "And?"])}, {"role": "user", "content": "Why?"}]

    def opened() -> Engine:
        return Engine(model, tokenizer, store=str(tmp_path), reuse="approximate", calibration=calibration(fingerprint=fingerprint))

    with opened() as engine:
        engine.learn(texts, pack_tokens=1)
        engine.flush()
        if left == "memory":
            engine.store.clear()
            receipt = engine.generate(asked, sampling=GREEDY).receipt
    if left == "process":
        with opened() as engine:
            receipt = engine.generate(asked, sampling=GREEDY).receipt
    assert len(receipt.segments) == 2
    assert receipt.cached_tokens > 0.9 * receipt.prompt_tokens
    assert receipt.disk_bytes > 0


def test_a_forgotten_text_leaves_others_to_be_found(tmp_path: Path) -> None:
    model, tokenizer, fingerprint = tiny_model()
    with Engine(model, tokenizer, store=str(tmp_path), reuse="approximate", calibration=calibration(fingerprint=fingerprint)) as engine:
        assert engine.store.disk is not None
        counts = []
        for texts in ([f"first {DOC}"[:600]], [f"first {DOC}"[:600], f"second {DOC}"[:600]]):  # each within a page
            engine.learn({f"text {number}": text for number, text in enumerate(texts)}, pack_tokens=1)
            engine.flush()
            counts.append(engine.store.disk.index.stats()["segments"])
        engine.unlearn(["text 1"])
        engine.flush()
        assert 0 < counts[0] <= engine.store.disk.index.stats()["segments"] < counts[1]


def test_texts_learnt_again_under_another_system_prompt_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agentcache.approximate.segment_prefetch.slow_load_ms", lambda *given: "")
    model, tokenizer, fingerprint = tiny_model()
    with Engine(model, tokenizer, store=str(tmp_path), reuse="approximate", calibration=calibration(fingerprint=fingerprint)) as engine:
        for system in ("Today is Monday.", "It is Tuesday, of all days."):
            engine.learn({"doc": DOC}, system=system)
        engine.flush()
        assert len(engine.documents()) == 1
        engine.store.clear()
        assert engine.generate(OTHER, sampling=GREEDY).receipt.segment_tokens > 500


@pytest.mark.parametrize("how", ["age", "adapter"])
def test_deleted_texts_leave_no_signature(how: str, tmp_path: Path) -> None:
    model, tokenizer, fingerprint = tiny_model()
    save_for(copy.deepcopy(model), tmp_path / "judge")
    given = {"store": str(tmp_path / "store"), "adapters": {"judge": tmp_path / "judge"}}
    with Engine(model, tokenizer, **given) as engine:
        engine.learn([DOC], adapter="judge")
    with Engine(model, tokenizer, **given, reuse="approximate", calibration=calibration(fingerprint=fingerprint)) as engine:
        assert engine.store.disk is not None
        learnt = time.time()
        engine.pin([{"role": "user", "content": DOC}], adapter="judge")  # its rows are younger than the pages
        engine.flush()
        index, digest = engine.store.disk.index, engine.adapters["judge"]
        assert index.stats()["segments"] > 9
        if how == "age":
            engine.forget(older_than=time.time() - learnt)
        else:
            prune(engine.store.disk.folder, index, group=digest, force=True)
        assert (index.stats()["rows"], index.stats()["segments"]) == (0, 0)


@pytest.mark.parametrize("stored", ["int8", "int4"])
def test_lossy_pages_serve_where_the_calibration_measured_them(stored: Precision, tmp_path: Path) -> None:
    model, tokenizer, fingerprint = tiny_model()
    known = calibration(fingerprint=fingerprint)
    options = StoreOptions(tmp_path, precision=stored)

    def opened(used: Calibration) -> Engine:
        return Engine(model, tokenizer, store=options, reuse="approximate", calibration=used)

    with opened(known) as first:
        first.generate(FIRST, sampling=GREEDY)
        first.flush()
    with opened(known) as exact:
        receipt = exact.generate(OTHER, sampling=GREEDY).receipt
        assert (receipt.segments, receipt.precision) == ((), "exact"), "not measured, not used"
    with opened(replace(known, precision=stored)) as second:
        done = second.generate(prompt("A third one.", "Where?"), sampling=GREEDY)
        [segment] = done.receipt.segments
        assert (segment.precision, done.receipt.precision, done.receipt.bitwise) == (stored, "approximate", False)
        assert segment.whole_tokens > 500
        assert done.receipt.disk_bytes > 0
        again = second.generate(prompt("A third one.", "Where?"), sampling=GREEDY, reuse="exact").receipt
        assert again.cached_tokens == segment.start + 8, "an exact request takes what was computed before the segment and its halo"
        assert again.bitwise
        grades = {entry.scope.precision for entry in second.store.tree.entries("default")}
        assert grades == {stored, "exact", "approximate"}, "what the exact request computed is kept as exact"


def test_one_requests_own_calibration_says_nothing_of_the_next() -> None:
    with engine() as running:
        running.generate(FIRST, sampling=GREEDY)
        wider = calibration(fingerprint=tiny_model()[2], steps=((40, LAYERS),), min_tokens=64)
        assert running.generate(OTHER, sampling=GREEDY, reuse=wider).receipt.segments[0].halo_tokens == 40
        [segment] = running.generate(prompt("A third one.", "Where?"), sampling=GREEDY).receipt.segments
        assert segment.halo_tokens == 8


def test_states_are_kept_beside_a_request_with_its_own_calibration() -> None:
    with engine(steps=((8, 3), (20, LAYERS))) as running:
        running.generate(FIRST, sampling=GREEDY, reuse=calibration(fingerprint=tiny_model()[2]))
        [segment] = running.generate(OTHER, sampling=GREEDY).receipt.segments
        assert (segment.halo_tokens, segment.resumed_tokens) == (8, 12)


def test_non_finite_numbers_after_a_segment_are_not_cached(monkeypatch: pytest.MonkeyPatch) -> None:
    """The segment's own pages are sound; what was computed behind it is not, and is computed behind everything instead."""
    with engine("off") as running:
        clean = running.generate(OTHER, sampling=GREEDY)
    with engine() as running:
        running.generate(FIRST, sampling=GREEDY)
        kept = len(running.store)
        monkeypatch.setattr("agentcache.kv.Sequence.finite", lambda sequence, start, stop: stop <= sequence.exact_until)
        done = running.generate(OTHER, sampling=GREEDY)
        assert (done.ids, done.receipt.precision, done.receipt.bitwise) == (clean.ids, "exact", True)
        [why] = [refusal for refusal in done.receipt.refusals if refusal.reason is Reason.NON_FINITE]
        assert "keys or values" in why.detail
        grades = [entry.scope.precision for entry in running.store.tree.entries()]
        assert "approximate" not in grades
        assert len(running.store) > kept


def test_nan_after_a_segment_takes_back_its_pages() -> None:
    """Pages that only near requests see were kept while the prompt was filled; what is scrubbed must not stay in the store."""
    poison = 77
    with engine() as running:
        running.generate(FIRST, sampling=GREEDY)
        clean = running.generate(OTHER, sampling=GREEDY).ids
        running.store.clear()
        running.generate(FIRST, sampling=GREEDY)
        weight = running.model.model.get_input_embeddings().weight
        before = weight.data[poison].clone()
        weight.data[poison] = float("nan")
        try:
            with pytest.raises(NonFiniteLogitsError):
                running.generate(OTHER, sampling=replace(GREEDY, max_tokens=6, forced=(50, poison, 51, 52)))
        finally:
            weight.data[poison] = before
        for entry in running.store.tree.entries():
            assert entry.page is not None
            assert entry.page.filled >= len(entry.ids), "a page that was scrubbed"
        assert running.generate(OTHER, sampling=GREEDY).ids == clean
