"""What approximate reuse never lets through: pages of another repair, drift that was found, numbers that are none, a wrong account."""

from __future__ import annotations

import gc
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from agentcache import Engine, Reason
from agentcache.approximate.calibrations import path_of
from agentcache.errors import CalibrationError, NonFiniteLogitsError
from agentcache.kv import Sequence
from agentcache.model.hf import HFModel
from agentcache.request import Running
from agentcache.runner import Outcome, Runner, Work
from agentcache.types import StoreOptions
from tests import models
from tests.approximate.repeated_text import FIRST, GREEDY, LAYERS, OTHER, calibration, engine, prompt, tiny_model
from tests.engines import wait_until
from tests.families import tokens

BOOK = " ".join(f"line {at} of the other book is number {at * 31 % 89}." for at in range(30))


pytestmark = pytest.mark.usefixtures("one_thread")


def grades(running: Engine) -> list[str]:
    return [entry.scope.precision for entry in running.store.tree.entries()]


def checked(running: Engine) -> int:
    """How many requests were computed again, once that is over."""
    deadline = time.monotonic() + 60
    while running.approximate.monitor.pending and time.monotonic() < deadline:
        time.sleep(0.01)
    return running.approximate.monitor.checked


def going_on(answered: str) -> list[dict[str, str]]:
    """The next turn behind OTHER, which repeats a text of its own."""
    return [*OTHER, {"role": "assistant", "content": answered}, {"role": "user", "content": f"And this? {BOOK}"}]


def test_sampling_for_truth_compares_no_more_than_the_exact_prefix(tmp_path: Path) -> None:
    model, tokenizer, fingerprint = tiny_model()
    system = " ".join(f"rule {at} of the harbour is rule {at * 17 % 61}." for at in range(36))
    text = ". ".join(BOOK.split(". ")[:13])
    options = StoreOptions(tmp_path / "store", check_one_in=1)
    told = [{"role": "system", "content": system}, {"role": "user", "content": "Hello."}]
    asked = [told[0], {"role": "user", "content": f"Here it is: {text}"}]
    with Engine(model, tokenizer, store=options) as first:
        first.generate(told, sampling=GREEDY)
        assert first.flush()
    with Engine(model, tokenizer, store=options, reuse="approximate", calibration=calibration(fingerprint=fingerprint)) as running:
        running.generate([{"role": "user", "content": f"Read. {text}"}], sampling=GREEDY)
        receipt = running.generate(asked, sampling=GREEDY).receipt
        assert 512 < receipt.disk_tokens < receipt.cached_tokens < 1024, "prefix and segment would fit into the prefix's pages"
        assert wait_until(lambda: running.scheduler.hit_audit.checked_tokens and not running.scheduler.hit_audit.pending)
        audit = running.scheduler.hit_audit
        assert (audit.checked_tokens, audit.wrong_pages) == (receipt.cached_tokens - receipt.segment_tokens, 0)


def test_an_answered_request_waits_for_no_collection_of_garbage(monkeypatch: pytest.MonkeyPatch) -> None:
    gone: list[int] = []
    monkeypatch.setattr(Running, "__del__", lambda one: gone.append(id(one)), raising=False)
    with engine() as running:
        running.generate(FIRST, sampling=GREEDY)
        submit, asked = running.scheduler.submit, list[int]()
        monkeypatch.setattr(running.scheduler, "submit", lambda one, begin: (asked.append(id(one)), submit(one, begin)))
        gc.collect()
        gc.disable()
        try:
            assert running.generate(OTHER, sampling=GREEDY).receipt.segments
            assert wait_until(lambda: asked[0] in gone, seconds=5)
        finally:
            gc.enable()


# -- who may go on from what ---------------------------------------------------------------------------------------------


def test_what_drifted_is_not_gone_on_from_either() -> None:
    with engine(kl=0.0, watch_one_in=1) as running:
        running.generate(FIRST, sampling=GREEDY)
        asked = [prompt(f"Number {number} {'x ' * number}", "And?") for number in range(3)]
        for turns in asked:
            assert running.generate(turns, sampling=GREEDY).receipt.precision == "approximate"
            checked(running)
        assert running.approximate.off
        assert set(grades(running)) == {"exact"}
        for turns in asked:
            receipt = running.generate(turns, sampling=GREEDY).receipt
            assert (receipt.precision, receipt.bitwise) == ("exact", True)


def test_drift_of_one_repair_is_not_held_against_another() -> None:
    weights = tiny_model()[2]
    loose = calibration(fingerprint=weights, steps=((0, LAYERS),), kl=100.0, watch_one_in=1)
    strict = calibration(fingerprint=weights, share=1.0, kl=1e-9, watch_one_in=1)  # everything is computed again
    with engine() as running:
        running.generate(FIRST, sampling=GREEDY)
        for number, known in enumerate([loose, loose, strict, strict, strict]):
            turns = prompt(f"Number {number} {'x ' * number}", "And?")
            assert running.generate(turns, sampling=GREEDY, reuse=known).receipt.precision == "approximate"
            assert checked(running) == number + 1
        assert not running.approximate.off
        assert running.approximate.monitor.counts()["watch_kl"]["sum"] > 1e-6, "the loose one drifts"


def test_who_runs_while_it_is_switched_off_keeps_nothing_near() -> None:
    with engine() as running:
        running.generate(FIRST, sampling=GREEDY)

        def switch_off(row: torch.Tensor) -> None:
            running.approximate.off = "a test says so"
            running.store.clear(grade="approximate")

        assert running.generate(OTHER, sampling=GREEDY, on_logits=switch_off).receipt.precision == "approximate"
        assert set(grades(running)) == {"exact"}


def test_pages_of_another_repair_are_not_gone_on_from() -> None:
    strict = calibration(fingerprint=tiny_model()[2], steps=((40, LAYERS),), min_tokens=64, probe=1e9)
    with engine(steps=((0, LAYERS),)) as running:
        running.generate(FIRST, sampling=GREEDY)
        assert running.generate(OTHER, sampling=GREEDY).receipt.halo_tokens == 0
        receipt = running.generate(OTHER, sampling=GREEDY, reuse=strict).receipt
        assert receipt.halo_tokens == 40, "with nothing of what was taken without a halo and a probe"
        longer = running.generate(OTHER, sampling=GREEDY, reuse=replace(strict, tail=40)).receipt
        assert longer.computed_tokens > receipt.computed_tokens, "nor with the tail of another"
        bounds = replace(strict, kl=0.5, top1=0.5, watch_one_in=3, margin=1e-9)
        assert running.generate(OTHER, sampling=GREEDY, reuse=bounds).receipt.computed_tokens == 1, "repaired alike"


def test_what_was_looked_through_is_not_looked_through_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    since: list[int] = []
    monkeypatch.setattr("agentcache.approximate.segments.windows", lambda layout, texts, known: since.append(known) or ())
    scanned: list[int] = []
    monkeypatch.setattr("agentcache.kv.Sequence.finite", lambda sequence, start, stop: scanned.append(start) or True)
    waiting: list[int] = []
    model, tokenizer, fingerprint = tiny_model()
    known = calibration(fingerprint=fingerprint)
    with Engine(model, tokenizer, store=str(tmp_path), reuse="approximate", calibration=known) as running:
        life = running.scheduler.lifecycle
        start = life.start
        monkeypatch.setattr(life, "start", lambda request: waiting.append(running.scheduler._uncached(request)) or start(request))
        running.generate(FIRST, sampling=GREEDY)
        running.generate(prompt(BOOK, "Yes?"), sampling=GREEDY)
        near = running.generate(OTHER, sampling=GREEDY)
        scanned.clear()
        receipt = running.generate(going_on(near.text), sampling=GREEDY).receipt
        prefix = receipt.cached_tokens - receipt.segment_tokens
        assert receipt.segments, "else this test shows nothing"
        assert prefix >= near.receipt.prompt_tokens > 512
        assert since[-1] == prefix
        assert min(scanned) == prefix
        assert waiting[-1] == receipt.prompt_tokens - prefix


def test_an_answer_behind_what_was_near_already_is_watched_too() -> None:
    with engine(kl=100.0, watch_one_in=1) as running:
        running.generate(FIRST, sampling=GREEDY)
        running.generate(OTHER, sampling=GREEDY)
        assert checked(running) == 1
        receipt = running.generate(OTHER, sampling=GREEDY).receipt
        assert (receipt.segments, receipt.precision) == ((), "approximate")
        assert checked(running) == 2
        running.generate(FIRST, sampling=GREEDY)
        assert checked(running) == 2, "nothing of it was near"


# -- hidden states -------------------------------------------------------------------------------------------------------


def test_states_are_kept_whoever_else_is_in_the_pack() -> None:
    model = HFModel(models.build("qwen3", num_hidden_layers=LAYERS))
    assert model.spec is not None
    runner, older = Runner(model), Sequence(model.spec)
    model.keep_boundaries((2,))
    later = Sequence(model.spec)
    runner.run([Work(older, tokens(100)), Work(later, tokens(100, seed=3))])
    assert older.pages[0].boundaries == {}
    assert torch.isfinite(later.pages[0].boundaries[2][:100]).all()


# -- numbers that are none -----------------------------------------------------------------------------------------------


def poisoned(running: Engine, times: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """So many of the next logits behind moved text, then of any, are NaN."""
    left, inner = [times], running.scheduler.runner.run

    def run(work: list[Work]) -> list[Outcome]:
        outcomes = inner(work)
        near = any(w.sequence.exact_until < w.sequence.length for w in work)
        for outcome in outcomes:
            if outcome.logits is not None and left[0] and (near or left[0] < times):
                left[0] -= 1
                outcome.logits = torch.full_like(outcome.logits, float("nan"))
        return outcomes

    monkeypatch.setattr(running.scheduler.runner, "run", run)


def test_non_finite_logits_after_a_segment_are_computed_instead(monkeypatch: pytest.MonkeyPatch) -> None:
    with engine("off") as running:
        clean = running.generate(OTHER, sampling=GREEDY)
    with engine() as running:
        running.generate(FIRST, sampling=GREEDY)
        poisoned(running, 1, monkeypatch)
        done = running.generate(OTHER, sampling=GREEDY)
        receipt = done.receipt
        assert done.ids == clean.ids
        assert (receipt.segments, receipt.segment_tokens, receipt.precision, receipt.bitwise) == ((), 0, "exact", True)
        assert receipt.cached_tokens + receipt.computed_tokens == receipt.prompt_tokens
        [why] = [refusal for refusal in receipt.refusals if refusal.reason is Reason.NON_FINITE]
        assert "logits" in why.detail
        assert Reason.APPROXIMATE not in {refusal.reason for refusal in receipt.refusals}
        assert set(grades(running)) == {"exact"}


def test_non_finite_logits_without_segments_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    with engine() as running:
        running.generate(FIRST, sampling=GREEDY)
        poisoned(running, 3, monkeypatch)  # behind the segment, behind the prefix, behind nothing
        with pytest.raises(NonFiniteLogitsError):
            running.generate(OTHER, sampling=GREEDY)
        assert set(grades(running)) == {"exact"}


# -- the account ---------------------------------------------------------------------------------------------------------


def test_failed_probes_make_an_exact_answer_that_says_so() -> None:
    with engine(probe=1e-9) as running:
        running.generate(FIRST, sampling=GREEDY)
        receipt = running.generate(OTHER, sampling=GREEDY).receipt
        assert Reason.PROBE in {refusal.reason for refusal in receipt.refusals}
        assert (receipt.segments, receipt.precision, receipt.bitwise) == ((), "exact", True)
        assert Reason.APPROXIMATE not in {refusal.reason for refusal in receipt.refusals}
        assert set(grades(running)) == {"exact"}
        assert running.generate(OTHER, sampling=GREEDY, reuse="exact").receipt.computed_tokens == 1


def test_the_kernels_of_what_was_taken_are_named() -> None:
    text = f"Read this. {BOOK}"
    with engine() as running:
        running.generate("A " + text, sampling=GREEDY)
        for entry in running.store.tree.entries():
            entry.numerics = frozenset(["other kernels"])
        receipt = running.generate("Quite another. " + text, sampling=GREEDY).receipt
        assert receipt.segments
        assert Reason.NUMERICS in {refusal.reason for refusal in receipt.refusals}
        near = [entry for entry in running.store.tree.entries() if entry.scope.precision == "approximate"]
        assert near
        assert all("other kernels" in entry.numerics for entry in near)
        head = running.generate("Quite another. " + text, sampling=GREEDY, reuse="exact").receipt
        assert head.cached_tokens
        assert head.bitwise, "what was computed before the segment has nothing of them"


def test_an_answer_that_outgrows_its_frequencies_stays_near() -> None:
    rope = {"rope_type": "longrope", "rope_theta": 10000.0, "short_factor": [1.0] * 8, "long_factor": [4.0] * 8}
    rope |= {"original_max_position_embeddings": 512, "factor": 4.0}
    model = models.build("phi3", max_position_embeddings=2048, original_max_position_embeddings=512, rope_parameters=rope)
    with Engine(model, models.toy_tokenizer(), store=None) as running:
        assert running.fingerprint is not None
        assert running.model.spec is not None
        layers = running.model.spec.layers
        known = calibration(fingerprint=running.fingerprint.whole, layers=layers, steps=((8, layers),))
        running.generate("A. " + BOOK[:900], sampling=replace(GREEDY, max_tokens=1))
        asked = "Quite another. " + BOOK[:900]
        room = 512 - len(running.renderer.render(asked).ids)
        assert 0 < room < 400
        done = running.generate(asked, sampling=replace(GREEDY, max_tokens=room + 8), reuse=known)
        assert any("computed again" in note for note in done.receipt.notes), "else this test shows nothing"
        assert done.receipt.segments
        assert (done.receipt.precision, done.receipt.bitwise) == ("approximate", False)
        ids = [*running.renderer.render(asked).ids, *done.ids]
        long = [entry for entry in running.store.tree.entries() if entry.scope.regime.startswith("long")]
        assert long
        assert {entry.scope.precision for entry in long} == {"exact"}, "computed under the new frequencies, behind nothing moved"
        assert len(ids) > 512


def test_changed_weights_need_a_calibration_of_their_own(tmp_path: Path) -> None:
    model, tokenizer = models.build("qwen3", num_hidden_layers=LAYERS), models.toy_tokenizer()
    with Engine(model, tokenizer, store=str(tmp_path)) as running:
        assert running.fingerprint is not None
        first = running.fingerprint.whole
        calibration(fingerprint=first, tau=0.7).save(path_of(tmp_path, first))
        running.generate(FIRST, sampling=GREEDY)
        assert running.generate(OTHER, sampling=GREEDY, reuse="approximate").receipt.halo_tokens == 8
        assert running.approximate.text is not None
        assert running.approximate.text.signatures.tau == 0.7
        with torch.no_grad():
            model.get_input_embeddings().weight.add_(0.01)
        other = running.fingerprint.whole
        assert other != first
        with pytest.raises(CalibrationError, match="has no calibration"):
            running.generate(OTHER, sampling=GREEDY, reuse="approximate")
        calibration(fingerprint=other, steps=((40, LAYERS),), min_tokens=64, tau=0.6).save(path_of(tmp_path, other))
        running.generate(FIRST, sampling=GREEDY)
        assert running.generate(OTHER, sampling=GREEDY, reuse="approximate").receipt.halo_tokens == 40
        own = calibration(fingerprint=other, tau=0.5)
        assert running.generate(OTHER, sampling=GREEDY, reuse=own).receipt.halo_tokens == 8
        assert running.approximate.text.signatures.tau == 0.6, "the engine's own, not that of a request"


# -- exact requests ------------------------------------------------------------------------------------------------------


def test_exact_requests_among_approximate_ones_keep_their_bits() -> None:
    def rows(running: Engine, turns: Any) -> torch.Tensor:
        seen: list[torch.Tensor] = []
        receipt = running.generate(turns, sampling=GREEDY, reuse=running.reuse, on_logits=lambda row: seen.append(row.clone())).receipt
        assert (receipt.segments, receipt.precision) == ((), "exact")
        return torch.stack(seen)

    with engine("off") as running:
        clean = [rows(running, turns) for turns in (FIRST, OTHER)]
    with engine("exact") as running:
        known = calibration(fingerprint=tiny_model()[2])
        assert torch.equal(rows(running, FIRST), clean[0])
        for _ in range(2):
            assert running.generate(OTHER, sampling=GREEDY, reuse=known).receipt.precision == "approximate"
            with running.stream(prompt("One more.", "Why?"), sampling=replace(GREEDY, max_tokens=200), reuse=known) as beside:
                next(iter(beside))
                assert torch.equal(rows(running, FIRST), clean[0])
                assert torch.equal(rows(running, OTHER), clean[1]), "the first time computed, beside what is near"
                assert running.scheduler.live, "they ran together"
            running.store.clear(grade="exact")
            assert torch.equal(rows(running, FIRST), clean[0])


def test_a_stream_closed_within_a_segment_leaves_nothing_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    with engine("off") as running:
        clean = running.generate(OTHER, sampling=GREEDY)
    model, tokenizer, fingerprint = tiny_model()
    known = calibration(fingerprint=fingerprint, share=0.1)
    with Engine(model, tokenizer, store=None, reuse="approximate", calibration=known, chunk_tokens=16) as running:
        running.generate(FIRST, sampling=GREEDY)
        inner, inside, go_on = running.scheduler.runner.run, threading.Event(), threading.Event()

        def run(work: list[Work]) -> list[Outcome]:
            outcomes = inner(work)
            [sequence] = [w.sequence for w in work]
            if isinstance(sequence, Sequence) and sequence.ahead and sequence.exact_until < sequence.length:
                inside.set()
                go_on.wait(20)
            return outcomes

        with monkeypatch.context() as patched:
            patched.setattr(running.scheduler.runner, "run", run)
            for _ in range(3):
                inside.clear()
                go_on.clear()
                stream = running.stream(OTHER, sampling=GREEDY)
                assert inside.wait(20), "some of a segment is taken and some of it still ahead"
                stream.close()
                go_on.set()
        assert running.generate(OTHER, sampling=GREEDY).receipt.segments, "the next one goes on behind it"
        done = running.generate(OTHER, sampling=GREEDY, reuse="exact")
        assert done.ids == clean.ids
        assert not running.scheduler.live
