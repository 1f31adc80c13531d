"""The engine end to end: reuse off, cold, hit, branched and packed give the same ids and bits; a step pays for its new tokens."""

from __future__ import annotations

import gc
import io
import json
import os
import subprocess
import sys
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import redirect_stderr, redirect_stdout
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch

from agentcache import Engine, Message, Reason, Sampling
from agentcache.errors import CalibrationError, ConfigError, GenerationError, StoreError
from agentcache.events import Events
from agentcache.store.disk.database import lock_index
from agentcache.store.disk.folder import Folder
from agentcache.store.disk.writer import Writer
from tests import models
from tests.engines import SYSTEM, TOOLS, Spy, chat, check_store, decode, engine, long_text, tool, wait_until
from tests.processes import Child

TURNS = chat("What is the wind?", "North, four.", "And the tide? " + long_text(30))


def ask(running: Engine, messages: Any, spy: Spy, **options: Any) -> tuple[tuple[int, ...], list[torch.Tensor], Any]:
    """Ids, logits and receipt of one request alone on the device."""
    spy.logits.clear()
    done = running.generate(messages, **{"sampling": decode(), **options})
    return done.ids, list(spy.logits), done.receipt


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("family", ["qwen3", "granite"])
def test_off_cold_hit_and_branched_are_the_same_bits(family: str, dtype: torch.dtype) -> None:
    with engine(family, dtype) as running:
        spy = Spy(running)
        off, off_logits, receipt = ask(running, TURNS, spy, reuse="off")
        assert (receipt.cached_tokens, receipt.refusals[-1].reason) == (0, Reason.REUSE_OFF)
        cold, cold_logits, receipt = ask(running, TURNS, spy)
        assert receipt.cached_tokens == 0
        hit, hit_logits, hit_receipt = ask(running, TURNS, spy)
        assert hit_receipt.computed_tokens == 1
        assert hit_receipt.copied_tokens == hit_receipt.cached_tokens % 512 > 0, "this one branches"
        running.generate([*TURNS, {"role": "assistant", "content": "x"}, {"role": "user", "content": "y"}], sampling=decode())
        branched, branched_logits, _ = ask(running, TURNS, spy)
        assert off == cold == hit == branched
        for other in (cold_logits, hit_logits, branched_logits):
            assert len(other) == len(off_logits) == 8
            assert all(torch.equal(a, b) for a, b in zip(off_logits, other, strict=True))
        assert hit_receipt.bitwise
        check_store(running.store)


def test_packed_with_others_is_the_same_bits() -> None:
    with engine() as running:
        spy = Spy(running)
        prompts = [chat(long_text(20 + 15 * i, salt=i)) for i in range(5)]
        alone = [running.generate(p, sampling=decode(12, temperature=0.9, seed=i), reuse="off").ids for i, p in enumerate(prompts)]
        first = {tuple(row[:4].tolist()) for row in spy.logits}
        spy.logits.clear()
        spy.forwards.clear()
        streams = [running.stream(p, sampling=decode(12, temperature=0.9, seed=i)) for i, p in enumerate(prompts)]
        packed = [stream.completion.ids for stream in streams]
        assert packed == alone
        assert {tuple(row[:4].tolist()) for row in spy.logits} == first
        assert max(len(parts) for parts in spy.forwards) > 1, "nothing was packed: this test shows nothing"
        assert len(spy.forwards) < 5 * 12


def test_chunk_size_does_not_matter() -> None:
    prompt = chat(long_text(150))
    with engine() as whole, engine(chunk_tokens=37) as pieces:
        assert whole.generate(prompt, sampling=decode()).ids == pieces.generate(prompt, sampling=decode()).ids


# -- a step pays for its new tokens ------------------------------------------------------------------------------------


def test_a_message_returned_unchanged_costs_only_the_new_tokens() -> None:
    with engine() as running:
        first = running.generate(TURNS, sampling=decode(20))
        before = first.receipt.prompt_tokens + len(first.ids) - 1  # the last sampled token has no KV yet
        second = running.generate([*TURNS, first.message, {"role": "user", "content": "Go on."}], sampling=decode(20))
        assert second.receipt.spliced_tokens == 20
        assert second.receipt.cached_tokens == before
        assert second.receipt.computed_tokens == second.receipt.prompt_tokens - before
        (refusal,) = second.receipt.refusals
        assert (refusal.reason, refusal.start) == (Reason.DIVERGED, before)


def test_a_reserialised_tool_call_costs_only_new_tokens() -> None:
    spelled = '<tool_call>\n{"name":"get_weather",   "arguments":{"city" : "Port Averil"}}\n</tool_call><|im_end|>'
    with engine() as running:
        first = running.generate(TURNS, TOOLS, sampling=decode(200, forced=spelled, stop=("<|never|>",)))
        tokens = len(running.tokenizer(spelled, add_special_tokens=False)["input_ids"])
        ended = running.generate(TURNS, TOOLS, sampling=decode(tokens, forced=spelled))
        assert first.ids[: len(ended.ids)] == ended.ids
        (call,) = ended.message.tool_calls
        assert (call.name, call.arguments) == ("get_weather", {"city": "Port Averil"})
        function = {"name": call.name, "arguments": json.dumps(dict(call.arguments), indent=2)}
        back = {"role": "assistant", "content": "", "tool_calls": [{"id": "call_7", "type": "function", "function": function}]}
        result = {"role": "tool", "tool_call_id": "call_7", "content": "rain"}
        second = running.generate([*TURNS, back, result], TOOLS, sampling=decode(4))
        assert second.receipt.spliced_tokens == len(ended.ids)
        assert second.receipt.cached_tokens >= ended.receipt.prompt_tokens + len(ended.ids) - 1


def test_an_edit_costs_only_the_tokens_after_it() -> None:
    with engine() as running:
        turns = chat("one " + long_text(40), "two", "three " + long_text(40, 1), "four", "five")
        full = running.generate(turns, sampling=decode()).receipt
        edited = [dict(turn) for turn in turns]
        edited[3]["content"] = "three " + long_text(40, 2)
        receipt = running.generate(edited, sampling=decode()).receipt
        span = next(span for span in full.spans if span.message == 3)
        assert span.start < receipt.cached_tokens < span.stop
        (refusal,) = receipt.refusals
        assert (refusal.reason, refusal.start, refusal.stop) == (Reason.DIVERGED, receipt.cached_tokens, receipt.prompt_tokens)
        again = running.generate(turns, sampling=decode()).receipt
        assert again.computed_tokens == 1, "what lay behind the edit is still there"


def test_what_a_stop_string_cut_off_does_not_come_back() -> None:
    with engine() as running:
        done = running.generate(TURNS, sampling=decode(40, forced="wind north END and more", stop=("END",)))
        assert done.text == "wind north "
        turns = [*TURNS, done.message, {"role": "user", "content": "next"}]
        second = running.generate(turns, sampling=decode(2), reuse="off")
        layout = running.renderer.render(turns)
        assert "END" not in running.tokenizer.decode(layout.ids)
        assert second.receipt.prompt_tokens == len(layout.ids)


# -- tool groups -------------------------------------------------------------------------------------------------------


def page_bytes(running: Engine) -> int:
    assert running.model.spec
    return running.model.spec.page_bytes


def test_a_warm_group_is_pinned_and_survives_pressure() -> None:
    budget, room = 6 * page_bytes_of_qwen3(), 6
    with engine(memory_bytes=budget) as running:
        seen: list[tuple[int, int]] = []
        group = running.warm(SYSTEM + long_text(150), TOOLS, name="agents", on_progress=lambda done, total: seen.append((done, total)))
        assert seen[-1] == (group.prefix_tokens, group.prefix_tokens)
        assert running.groups == (group,)
        assert group.pages == -(-group.prefix_tokens // 512) < room
        for i in range(room):
            running.generate(chat(long_text(5, i), system=long_text(130, i)), sampling=decode(1))
        assert running.store.bytes <= budget
        messages = chat("hello", system=SYSTEM + long_text(150))
        assert running.generate(messages, TOOLS, sampling=decode(1)).receipt.cached_tokens >= group.prefix_tokens
        assert running.release("agents")
        assert not running.release("agents")
        assert running.groups == ()
        for i in range(room):
            running.generate(chat(long_text(5, i), system=long_text(130, 50 + i)), sampling=decode(1))
        receipt = running.generate(messages, TOOLS, sampling=decode(1)).receipt
        assert receipt.cached_tokens < group.prefix_tokens
        assert receipt.refusals[0].reason == Reason.EVICTED


def pins(running: Engine) -> int:
    return sum(entry.pins for entry in running.store.tree.entries())


def test_warming_a_name_again_moves_its_pins() -> None:
    with engine() as running:
        first = running.warm(SYSTEM, TOOLS, name="a")
        assert running.warm(SYSTEM, TOOLS, name="a").computed_tokens == 1
        assert pins(running) == first.pages
        second = running.warm("Another system prompt. " + long_text(140), TOOLS, name="a")
        assert pins(running) == second.pages != first.pages
        running.release("a")
        assert pins(running) == 0


def test_a_group_over_budget_leaves_the_old_one() -> None:
    with engine(memory_bytes=page_bytes_of_qwen3()) as running:
        running.warm(SYSTEM, name="a")
        with pytest.raises(ConfigError, match=r"memory_bytes=\d+ cannot hold this tool group: it needs \d+ bytes"):
            running.warm(long_text(300), name="a")
        assert pins(running) == 1
        assert [g.name for g in running.groups] == ["a"]


def page_bytes_of_qwen3() -> int:
    with engine() as running:
        return page_bytes(running)


def test_a_callback_that_fails_while_warming_leaves_no_pin() -> None:
    def fail(done: int, total: int) -> None:
        raise KeyError("mine")

    with engine() as running:
        with pytest.raises(KeyError, match="mine"):
            running.warm(SYSTEM, TOOLS, name="a", on_progress=fail)
        assert (pins(running), running.groups) == (0, ())


@pytest.mark.parametrize("queued", [False, True])
def test_an_interrupt_while_warming_leaves_no_pin(monkeypatch: pytest.MonkeyPatch, queued: bool) -> None:
    def interrupt(*given: Any) -> None:
        raise KeyboardInterrupt

    with engine() as running:
        if queued:
            monkeypatch.setattr(running.scheduler, "_drop_cancelled", lambda: None)  # it starts before it is noticed
        with monkeypatch.context() as patch:
            if queued:
                patch.setattr(Events, "get", interrupt)
            else:
                patch.setattr("agentcache.tool_groups.chain", interrupt)  # once it is computed and pinned
            with pytest.raises(KeyboardInterrupt):
                running.warm(SYSTEM, TOOLS, name="a")
        assert wait_until(lambda: running.stats().get("requests") == {"filled": 1}), "it has ended"
        assert (pins(running), running.groups) == (0, ())
        assert running.warm(SYSTEM, TOOLS, name="a").pages == pins(running) > 0


def test_sticky_order_keeps_the_group() -> None:
    with engine() as running:
        group = running.warm(SYSTEM, TOOLS, name="a")
        grown = [tool("added", "thing"), *reversed(TOOLS)]
        given = running.generate(chat("hi"), grown, sampling=decode(1)).receipt
        sticky = running.generate(chat("hi"), grown, sampling=decode(1), tools_order="sticky", group="a").receipt
        assert given.cached_tokens < group.prefix_tokens // 2 + 60
        assert sticky.cached_tokens > given.cached_tokens + 40
        assert any("reordered" in text for text in sticky.differences)


class Released(dict[Any, Any]):
    """Tool groups, each of which another thread releases once it was seen to be there."""

    def __contains__(self, key: object) -> bool:
        return self.pop(key, None) is not None


def test_a_group_may_be_released_while_it_is_asked() -> None:
    with engine(store=None) as running:
        running.warm(SYSTEM, TOOLS, name="a")
        groups = running._groups
        groups._held = Released(groups._held)
        done = running.generate(chat("hi"), TOOLS, sampling=decode(1), tools_order="sticky", group="a")
        assert done.receipt.cached_tokens > 0


def test_stream_chunks_are_the_completion() -> None:
    with engine() as running, running.stream(TURNS, sampling=decode(30)) as stream:
        chunks = list(stream)
        assert "".join(chunk.text for chunk in chunks) == stream.completion.text
        assert tuple(i for chunk in chunks for i in chunk.ids) == stream.completion.ids
        assert isinstance(stream.completion.message, Message)


def test_a_collected_engine_ends_threads_and_returns_the_model() -> None:
    model = models.build("qwen3")
    before = model.config._attn_implementation
    running = Engine(model, models.toy_tokenizer())
    running.generate(chat("x"), sampling=decode(1))
    thread = running.scheduler._thread
    del running
    gc.collect()
    assert not thread.is_alive()
    assert model.config._attn_implementation == before


def test_a_process_without_close_keeps_its_pages(tmp_path: Path, model_folder: Path) -> None:
    """Another process finds what it computed."""
    program = (
        "import sys; from agentcache import Engine, Sampling\n"
        "running = Engine(sys.argv[1], store=sys.argv[2])\n"
        "running.generate('tide ' * 700, sampling=Sampling(max_tokens=2))"
    )
    command = [sys.executable, "-c", program, str(model_folder), str(tmp_path / "store")]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    assert "terminate" not in ran.stderr
    with Engine(str(model_folder), store=str(tmp_path / "store")) as running:
        found = running.generate("tide " * 700, sampling=Sampling(max_tokens=2)).receipt
    assert found.disk_tokens == found.prompt_tokens - 1 > 512


class Odd(Exception):
    """Of a kind that nobody catches by name."""


def test_an_exception_of_any_kind_ends_its_own_request() -> None:
    def odd(_: torch.Tensor) -> None:
        raise Odd("from the caller")

    with engine() as running:
        other = running.stream(chat("a long answer"), sampling=decode(60))
        next(other)
        with pytest.raises(GenerationError, match="from the caller"):
            running.generate(chat("x"), sampling=decode(3), on_logits=odd)
        assert len(other.completion.ids) == 60
        assert len(running.generate(chat("y"), sampling=decode(3)).ids) == 3


@pytest.mark.timeout(120)  # what waits for itself waits for ever
def test_a_request_of_on_logits_is_refused_before_it_waits() -> None:
    with engine() as running:
        for ask in (running.generate, running.warm):
            with pytest.raises(ConfigError, match="where the stream is read"):
                running.generate(chat("x"), sampling=decode(1), on_logits=lambda _, ask=ask: ask("y"))
        assert len(running.generate(chat("y"), sampling=decode(3)).ids) == 3


@pytest.mark.parametrize("tokens", [2.5, 0, -1, True, "512"])
def test_chunks_are_whole_numbers(tokens: Any) -> None:
    with pytest.raises(ConfigError, match="chunk_tokens="), engine(chunk_tokens=tokens):
        pass


@pytest.mark.parametrize("name", ["agentcache-writer", "agentcache-device"])
def test_a_thread_that_cannot_start_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    model, start, started = models.build("granite", torch.float32), threading.Thread.start, list[threading.Thread]()
    before = model.config._attn_implementation

    def limited(thread: threading.Thread) -> None:
        if thread.name == name:
            raise RuntimeError("can't start new thread")
        started.append(thread)
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", limited)
    with pytest.raises(RuntimeError, match="new thread"):
        Engine(model, models.toy_tokenizer(), store=tmp_path / "store")
    assert wait_until(lambda: not any(one.is_alive() for one in started if one.name.startswith("agentcache")))
    assert model.config._attn_implementation == before
    os.close(lock_index(Folder.open(tmp_path / "store")))


@pytest.mark.parametrize("place", [(Future, "result"), (Writer, "flush"), (ThreadPoolExecutor, "shutdown"), (threading.Thread, "join")])
def test_an_interrupt_of_opening_or_closing_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: Any) -> None:
    model, waits = models.build("granite", torch.float32), getattr(*place)
    before = model.config._attn_implementation

    def interrupt(*given: Any, **also: Any) -> Any:
        monkeypatch.setattr(*place, waits)
        raise KeyboardInterrupt

    def run() -> None:
        if place[0] is Future:
            monkeypatch.setattr(*place, interrupt)
        with Engine(model, models.toy_tokenizer(), store=tmp_path / "store") as running:
            running.generate(chat(long_text(150)), sampling=decode(2))
            monkeypatch.setattr(*place, interrupt)

    with pytest.raises(KeyboardInterrupt):
        run()
    assert wait_until(lambda: not [one for one in threading.enumerate() if one.name.startswith("agentcache")], 5)
    assert model.config._attn_implementation == before
    os.close(lock_index(Folder.open(tmp_path / "store")))


def test_an_engine_that_could_not_be_made_leaves_nothing_behind(tmp_path: Path) -> None:
    model = models.build("granite", torch.float32)
    before, threads = model.config._attn_implementation, {thread.name for thread in threading.enumerate()}
    with pytest.raises(CalibrationError):
        Engine(model, models.toy_tokenizer(), store=tmp_path / "store", reuse="approximate")
    gc.collect()
    assert wait_until(lambda: {thread.name for thread in threading.enumerate()} <= threads)
    assert model.config._attn_implementation == before
    os.close(lock_index(Folder.open(tmp_path / "store")))
    (tmp_path / "file").touch()
    with pytest.raises(StoreError):
        Engine(model, models.toy_tokenizer(), store=tmp_path / "file")
    assert model.config._attn_implementation == before


def test_memory_is_that_of_the_device_where_the_weights_are(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    monkeypatch.setattr("agentcache.engine.budgets", lambda device, memory: (asked.append(device), (1 << 20, 0))[1])
    with engine():
        assert asked == ["cpu"]


TWO_THREADS = """
import warnings
warnings.simplefilter("always")
import torch
torch.set_num_threads(2)
from agentcache import Engine, Sampling
with Engine("embedded", store=None) as running:
    print(running.generate("What is 3 times 4? " * 60, sampling=Sampling(max_tokens=4)).ids)
"""


def answer_of_a_team(**more: str) -> tuple[str, int]:
    """Ids that a process finds which asks for two threads, and how often it warns."""
    done = subprocess.run([sys.executable, "-c", TWO_THREADS], env={**os.environ, **more}, capture_output=True, text=True, check=True)
    return done.stdout, done.stderr.count("threads are used")


def answer_here(parent: Connection) -> None:
    """The same in a process that has imported an engine, whose environment says nothing of teams."""
    with redirect_stdout(io.StringIO()) as out, redirect_stderr(io.StringIO()) as warned:
        exec(TWO_THREADS, {})
    parent.send((out.getvalue(), warned.getvalue().count("threads are used")))


@pytest.fixture(scope="module")
def whole_team() -> tuple[str, int]:
    return Child(answer_here).end()  # type: ignore[no-any-return]


@pytest.mark.parametrize("given", ["OMP_THREAD_LIMIT=1", "OMP_DYNAMIC=true"])
def test_a_team_smaller_than_pytorch_counts_on(given: str, whole_team: tuple[str, int]) -> None:
    """PyTorch's own bf16 products are wrong there."""
    name, _, value = given.partition("=")
    answer, warned = whole_team
    assert answer_of_a_team(**{name: value}) == (answer, 1 if "LIMIT" in given else 0), "said once, where the engine is made"
    assert not warned
