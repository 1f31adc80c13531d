"""Every token is accounted for, with a reason that holds, in plain JSON and without a word of the prompt."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from agentcache import Reason
from agentcache.bench import families
from agentcache.receipt import Receipt
from tests import models
from tests.engines import SYSTEM, TOOLS, chat, decode, engine, long_text, tool

QUALITY = {Reason.NUMERICS, Reason.NOT_ROW_PURE}  # reused all the same: not as well as it could be


def check(receipt: Receipt) -> Reason:
    """Buckets are inclusive, refusals cover what was computed, times add up. The reason of the miss."""
    assert receipt.prompt_tokens == receipt.cached_tokens + receipt.computed_tokens
    assert receipt.computed_tokens > 0
    assert receipt.copied_tokens <= receipt.cached_tokens
    covered = [(r.start, r.stop) for r in receipt.refusals if r.reason not in QUALITY]
    assert covered == [(receipt.cached_tokens, receipt.prompt_tokens)]
    parts = (receipt.layout_ms, receipt.queue_ms, receipt.match_ms, receipt.prefill_ms)
    assert all(part >= 0 for part in (*parts, receipt.decode_ms))
    assert sum(parts) == pytest.approx(receipt.ttft_ms, abs=1.0)
    usage = receipt.usage
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    assert usage["prompt_tokens_details"] == {"cached_tokens": receipt.cached_tokens}
    return next(r.reason for r in receipt.refusals if r.reason not in QUALITY)


def test_reasons() -> None:
    with engine() as running:

        def ask(text: str, **options: Any) -> Receipt:
            return running.generate(chat(text), sampling=decode(3), **options).receipt

        first = ask("one", reuse="off")
        assert check(first) == Reason.REUSE_OFF
        assert len(running.store) == 0
        assert check(ask("one")) == Reason.COLD
        assert check(ask("one")) == Reason.LAST_TOKEN
        assert check(ask("other")) == Reason.DIVERGED
        running.store.clear()
        assert check(ask("one")) == Reason.EVICTED
        assert ask("one").completion_tokens == 3


def test_changed_weights_are_said() -> None:
    with engine(model=models.build("qwen3")) as running:
        before = running.generate(chat("x"), sampling=decode(4))
        with torch.no_grad():
            next(running.model.model.get_decoder().layers[1].parameters()).mul_(1.5)
        after = running.generate(chat("x"), sampling=decode(4))
        assert check(after.receipt) == Reason.FINGERPRINT
        assert after.receipt.cached_tokens == 0
        assert after.ids == running.generate(chat("x"), sampling=decode(4), reuse="off").ids
        with torch.no_grad():
            next(running.model.model.get_decoder().layers[1].parameters()).data.mul_(0.5)  # behind PyTorch's back
        running.invalidate()
        assert check(running.generate(chat("x"), sampling=decode(4)).receipt) == Reason.FINGERPRINT
        assert before.receipt.bitwise


def test_pages_of_other_kernels_taint_later_tokens() -> None:
    with engine() as running:
        assert running.generate(chat("x"), sampling=decode(2)).receipt.bitwise
        for entry in running.store.tree.entries():
            entry.numerics = frozenset(["other kernels"])
        other = running.generate(chat("x"), sampling=decode(2)).receipt
        assert not other.bitwise
        assert check(other) == Reason.LAST_TOKEN
        (said,) = [r for r in other.refusals if r.reason == Reason.NUMERICS]
        assert (said.start, said.stop) == (0, other.cached_tokens)
        turns = [*chat("x"), {"role": "assistant", "content": "long " + long_text(150)}, {"role": "user", "content": "y"}]
        assert not running.generate(turns, sampling=decode(2)).receipt.bitwise
        behind = [entry.numerics for entry in running.store.tree.entries() if entry.parent is not None and entry.parent.page is not None]
        assert behind
        assert all(len(numerics) == 2 for numerics in behind), "computed here from keys that were computed elsewhere"
        assert running.generate(chat("x"), sampling=decode(2), namespace="fresh").receipt.bitwise


def test_bits_are_promised_only_where_threads_agree(threads: Any) -> None:
    with engine() as running:
        threads(2)
        running.generate(chat("x"), sampling=decode(2))
        threads(1)
        other = running.generate(chat("x"), sampling=decode(2)).receipt
        digests = {digest for entry in running.store.tree.entries() for digest in entry.numerics}
        assert other.bitwise == (len(digests) == 1)
        assert (Reason.NUMERICS in {r.reason for r in other.refusals}) == (len(digests) > 1)


def test_the_device_thread_follows_the_process(threads: Any) -> None:
    with engine() as running:
        told: list[int] = []
        inner = running.model.forward
        running.model.forward = lambda *a: told.append(torch.get_num_threads()) or inner(*a)  # type: ignore[method-assign, func-returns-value]
        for count in (2, 1, 2):
            threads(count)
            running.generate(chat("x"), sampling=decode(1), reuse="off")
            assert told[-1] == count


def test_kernels_that_depend_on_the_pack_are_said() -> None:
    with engine(model=families.build("llama4_text")) as running:
        receipt = running.generate(chat("x"), sampling=decode(2)).receipt
        assert not receipt.bitwise
        assert Reason.NOT_ROW_PURE in {r.reason for r in receipt.refusals}
        check(receipt)


def test_the_hook_for_which_no_bits_are_promised_is_named() -> None:
    model = models.build("llama")
    model.model.layers[0].mlp.register_forward_hook(lambda module, args, output: output)
    with engine(model=model) as running:
        refusals = running.generate(chat("x"), sampling=decode(2)).receipt.refusals
        [detail] = [refusal.detail for refusal in refusals if refusal.reason is Reason.NOT_ROW_PURE]
        assert "<lambda>' of 'LlamaMLP' is not probed" in detail


def test_a_sequence_that_outgrows_its_frequencies_is_accounted_once() -> None:
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0, "original_max_position_embeddings": 80}
    model = models.build("llama", max_position_embeddings=80, rope_parameters=rope)
    with engine(model=model) as running:
        running.model.context_tokens = 400
        done = running.generate("The tide. " * 10, sampling=decode(60))
        assert done.receipt.prompt_tokens < 80 < done.receipt.prompt_tokens + 60
        check(done.receipt)
        assert len(done.ids) == 60
        assert any("computed again" in note for note in done.receipt.notes)
        assert not done.receipt.bitwise
        long = running.generate("The tide. " * 40, sampling=decode(2)).receipt
        assert check(long) == Reason.ROPE_REGIME


def test_longrope_crosses_its_window_in_few_rounds() -> None:
    rope = {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": [1.0] * 8,
        "long_factor": [4.0] * 8,
        "original_max_position_embeddings": 128,
        "factor": 4.0,
    }
    model = models.build("phi3", max_position_embeddings=512, original_max_position_embeddings=128, rope_parameters=rope)
    with engine(model=model) as running:
        prompt = "The tide. " * 20
        rounds = running.scheduler.rounds
        done = running.generate(prompt, sampling=decode(70))
        assert done.receipt.prompt_tokens < 128 < done.receipt.prompt_tokens + 69
        assert running.scheduler.rounds - rounds <= 72, "the second fill goes token by token"
        check(done.receipt)
        ids = list(running.renderer.render(prompt).ids)
        behind = 128 - len(ids) + 1  # the first ids chosen behind the window
        running.store.clear()
        fresh = running.generate(prompt, sampling=decode(70, forced=done.ids[: behind + 3]), reuse="off")
        assert fresh.ids == done.ids


def test_json_without_a_word_of_the_prompt() -> None:
    with engine(redact=True) as running:
        running.warm(SYSTEM, TOOLS, name="a")
        secret = "Zanzibar"
        done = running.generate(
            chat(secret, system=SYSTEM + secret), list(reversed(TOOLS)), tools_order="sorted", sampling=decode(4, forced=secret)
        )
        text = json.dumps(done.receipt.as_dict())
        assert json.loads(text) == done.receipt.as_dict(), "plain JSON values"
        assert done.receipt.differences
        for word in (secret, "lighthouse", "get_weather", done.text):
            assert word not in text
            assert word not in str(done.receipt)
        assert done.receipt.as_dict()["redacted"] is True


def test_a_tool_that_cannot_be_enforced_is_not_named_either() -> None:
    odd = tool("zanzibar", "city")
    odd["function"]["parameters"]["properties"]["city"] = {"type": "string", "pattern": "(?=x)zanzibar"}
    for redacted in (False, True):
        with engine(redact=redacted, strict=True) as running:
            told = json.dumps(running.generate(chat("x"), [odd], sampling=decode(2)).receipt.as_dict())
        assert "not held to their schemas" in told
        assert ("zanzibar" in told) is not redacted


def test_what_was_saved_grows_with_what_was_cached() -> None:
    with engine() as running:
        cold = running.generate(chat(long_text(50)), sampling=decode(1)).receipt
        hit = running.generate(chat(long_text(50)), sampling=decode(1)).receipt
        assert (cold.saved_flops, cold.saved_ms) == (0.0, 0.0)
        assert hit.saved_flops > 0
        assert hit.saved_ms > 0
        assert hit.model
