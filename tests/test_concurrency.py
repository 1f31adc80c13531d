"""Many requests on one device: nobody waits for a long prompt, cancelling frees at once, nothing leaks, nothing hangs."""

from __future__ import annotations

import concurrent.futures.thread
import gc
import random
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from agentcache import Engine
from agentcache.errors import CancelledError, EngineClosedError
from agentcache.events import Events
from agentcache.kv import Page
from agentcache.model import loading
from tests.engines import SYSTEM, Spy, chat, check_store, decode, engine, long_text, wait_until


def idle(running: Engine) -> bool:
    return wait_until(lambda: not running.scheduler.live and not running.scheduler._waiting)


def leave(stream: Any, how: str) -> None:
    """Leave a stream in one of the ways in which streams are left."""
    if how == "close":
        stream.close()
    elif how == "break":
        with stream:
            for _ in stream:
                break
    elif how == "raise":
        with pytest.raises(ZeroDivisionError), stream:
            1 / 0  # noqa: B018
    # "forget": its last reference goes when the caller returns


def test_twenty_threads_half_of_them_cancelled() -> None:
    pages: weakref.WeakSet[Page] = weakref.WeakSet()
    init = Page.__init__

    def counted(self: Page, spec: Any, *rest: Any, **more: Any) -> None:
        init(self, spec, *rest, **more)
        pages.add(self)

    wrong: list[str] = []
    with pytest.MonkeyPatch.context() as patch, engine() as running:
        prompts = [chat(long_text(10 + 9 * i, i), system=SYSTEM + long_text(60)) for i in range(20)]
        expected = [running.generate(p, sampling=decode(6, temperature=1.0, seed=i), reuse="off").ids for i, p in enumerate(prompts)]
        patch.setattr(Page, "__init__", counted)

        def one(number: int) -> None:
            chance = random.Random(number)
            stream = running.stream(prompts[number], sampling=decode(6, temperature=1.0, seed=number))
            if number % 2:
                for _ in range(chance.randint(0, 3)):
                    next(stream)
                leave(stream, ["close", "break", "raise", "forget"][number // 2 % 4])
            elif stream.completion.ids != expected[number]:
                wrong.append(f"request {number} got other tokens")

        threads = [threading.Thread(target=one, args=(number,)) for number in range(20)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
            assert not thread.is_alive()
        assert not wrong
        assert idle(running)
        check_store(running.store)
        held = {id(e.page): e.page for e in running.store.tree.entries()}
        assert wait_until(lambda: all(page._claim is None for page in held.values())), "the last one to leave may still be at it"
        held.clear()
        gc.collect()
        assert len(pages) == len(running.store), "pages live that nobody keeps"
        again = running.generate(prompts[1], sampling=decode(6, temperature=1.0, seed=1))
        assert again.ids == expected[1], "what a cancelled request left behind is right"
        running.store.clear()
        assert running.store.bytes == 0
        assert wait_until(lambda: gc.collect() is not None and not len(pages)), f"{len(pages)} pages leaked"


@pytest.mark.parametrize("how", ["close", "break", "raise", "forget"])
def test_cancelling_frees_the_device_within_one_round(how: str) -> None:
    with engine() as running:
        stream = running.stream(chat("x"), sampling=decode(3000))
        next(stream)
        leave(stream, how)
        rounds = running.scheduler.rounds
        del stream
        assert idle(running)
        assert running.scheduler.rounds <= rounds + 2  # the one that ran, and one already composed


def test_a_request_cancelled_while_it_waits_never_runs() -> None:
    with engine(chunk_tokens=16) as running:
        spy = Spy(running)
        first = running.stream(chat(long_text(60)), sampling=decode(1))
        waiting = running.stream(chat(long_text(80, 1)), sampling=decode(1))
        waiting.close()
        total = first.completion.receipt.prompt_tokens
        assert idle(running)
        assert sum(count for parts in spy.forwards for _, count in parts) == total
        with pytest.raises(CancelledError):
            waiting.completion  # noqa: B018


def test_closing_a_stream_ends_readers_in_other_threads() -> None:
    with engine() as running:
        stream = running.stream(chat("x"), sampling=decode(3000))
        ended: list[str] = []

        def read() -> None:
            try:
                for _ in stream:
                    pass
                ended.append("over")
            except CancelledError:
                ended.append("cancelled")

        reader = threading.Thread(target=read)
        reader.start()
        time.sleep(0.05)
        stream.close()
        reader.join(20)
        assert ended


def test_closing_the_engine_ends_running_and_waiting_streams() -> None:
    with engine(chunk_tokens=16) as running:
        streams = [running.stream(chat(long_text(40 * i, i)), sampling=decode(3000)) for i in range(4)]
        next(streams[0])
        got: list[BaseException] = []

        def read(stream: Any) -> None:
            try:
                stream.completion  # noqa: B018
            except EngineClosedError as error:
                got.append(error)

        readers = [threading.Thread(target=read, args=(stream,)) for stream in streams]
        for reader in readers:
            reader.start()
        running.close()
        for reader in readers:
            reader.join(20)
        assert len(got) == 4
        for use in (lambda: running.generate("x"), lambda: running.stream(chat("x")), lambda: running.warm(SYSTEM)):
            with pytest.raises(EngineClosedError):
                use()
        running.close()
        assert len(running.store) == 0


def test_submitting_while_closing_never_hangs() -> None:
    for _ in range(3):
        with engine("llama", model=None) as running:
            ends: list[str] = []

            def one(running: Engine = running, ends: list[str] = ends) -> None:
                try:
                    while True:
                        running.generate("x", sampling=decode(1))
                except EngineClosedError:
                    ends.append("closed")

            threads = [threading.Thread(target=one) for _ in range(4)]
            for thread in threads:
                thread.start()
            time.sleep(0.05)
            running.close()
            for thread in threads:
                thread.join(20)
            assert ends == ["closed"] * 4


def test_a_long_prompt_does_not_block_one_that_decodes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agentcache.scheduler.STEP", 0.0)  # so that time does not matter: the smallest pieces
    with engine() as running:
        spy = Spy(running)
        decoding = running.stream(chat("x"), sampling=decode(400, draft_tokens=0))
        next(decoding)
        long = running.stream(chat(long_text(100, 1)), sampling=decode(1))
        done = long.completion.receipt
        assert done.prompt_tokens > 300
        filled = [parts for parts in spy.forwards if len(parts) > 1]
        assert len(filled) >= done.computed_tokens // 16
        for parts in filled:
            assert sorted(count for _, count in parts)[0] == 1, "a chunk went without the token of the one that decodes"
            assert max(count for _, count in parts) <= 16
        decoding.close()


def test_requests_that_decode_share_their_forwards() -> None:
    with engine() as running:
        streams = [running.stream(chat(long_text(3, i)), sampling=decode(40)) for i in range(8)]
        for stream in streams:
            next(stream)
        rounds = running.scheduler.rounds
        for stream in streams:
            assert len(stream.completion.ids) == 40
        assert running.scheduler.rounds - rounds <= 45


def test_a_callback_that_fails_ends_its_own_request_only() -> None:
    def fail(done: int, total: int) -> None:
        raise KeyError("mine")

    with engine() as running:
        other = running.stream(chat("x"), sampling=decode(20))
        with pytest.raises(KeyError, match="mine"):
            running.generate(chat("y"), sampling=decode(4000), on_progress=fail)
        assert len(other.completion.ids) == 20
        assert idle(running)
        seen: list[tuple[int, int]] = []
        done = running.generate(chat(long_text(50)), sampling=decode(1), on_progress=lambda *p: seen.append(p)).receipt
        assert seen[-1] == (done.prompt_tokens, done.prompt_tokens)


def test_requests_once_the_main_thread_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other threads go on then, and pools take no work any more."""
    with engine() as running:
        monkeypatch.setattr(concurrent.futures.thread, "_shutdown", True)
        assert len(running.generate(chat("x"), sampling=decode(4)).ids) == 4


def test_an_interrupted_reader_leaves_nothing_running(monkeypatch: pytest.MonkeyPatch) -> None:
    """Notebooks hold the traceback, and so the stream."""

    def interrupt(self: object) -> None:
        raise KeyboardInterrupt

    with engine() as running:
        with monkeypatch.context() as patch:
            patch.setattr(Events, "get", interrupt)
            with pytest.raises(KeyboardInterrupt) as held:
                running.generate(chat("y"), sampling=decode(4000))
        assert wait_until(lambda: running.stats().get("requests") == {"cancelled": 1}, 5)
        assert held.tb


def test_an_idle_engine_holds_no_sequence_alive() -> None:
    with engine() as running:
        running.generate(chat("x"), sampling=decode(2), reuse="off")
        with pytest.MonkeyPatch.context() as patch:
            refs: list[weakref.ref[Page]] = []
            init = Page.__init__

            def counted(self: Page, spec: Any, *rest: Any, **more: Any) -> None:
                init(self, spec, *rest, **more)
                refs.append(weakref.ref(self))

            patch.setattr(Page, "__init__", counted)
            running.generate(chat("y"), sampling=decode(2), reuse="off")
        assert refs
        assert wait_until(lambda: gc.collect() is not None and all(ref() is None for ref in refs))


def test_models_are_loaded_in_turn(model_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers patches its classes while it loads: of two at once one had weights that were never read, and none loaded afterwards."""
    inside, seen, original = list[int](), list[int](), loading._loaded

    def slow(*given: Any) -> Any:
        inside.append(1)
        seen.append(len(inside))
        time.sleep(0.05)
        try:
            return original(*given)
        finally:
            inside.pop()

    monkeypatch.setattr(loading, "_loaded", slow)
    with ThreadPoolExecutor(3) as pool:
        made = list(pool.map(lambda _: loading.load(model_folder), range(3)))
    assert seen == [1, 1, 1]
    assert all(weight.device.type == "cpu" for model, _ in made for weight in model.parameters())
