"""Reading ahead: pages of the session that is asked next come from disk while another one decodes, and change no answer."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from agentcache import Completion, StoreOptions, read_ahead, sessions
from agentcache.store.disk.disk_tier import DiskTier
from agentcache.store.store import Store
from tests import models
from tests.asking import user
from tests.engines import SYSTEM, chat, check_store, decode, engine, long_text, wait_until

AGENTS = ("alice", "bob", "carol", "dave")
ROOM = 5  # pages in memory; a session has two or three


class Agents:
    """Conversations of their own, each a session, in an engine whose memory holds fewer of them."""

    def __init__(self, model: Any, folder: Path, room: int = ROOM) -> None:
        page = self._page_bytes(model)
        self.talks: dict[str, list[Any]] = {name: chat(long_text(150, 10 + n), system=f"{name}. {SYSTEM}") for n, name in enumerate(AGENTS)}
        options = StoreOptions(folder / "store", refuse_slow=False)
        self._opened = engine(model=model, store=options, memory_bytes=page * room)
        self.engine = self._opened.__enter__()

    @staticmethod
    def _page_bytes(model: Any) -> int:
        with engine(model=model, store=None) as running:
            assert running.model.spec is not None
            return running.model.spec.page_bytes

    def ask(self, name: str, tokens: int = 4) -> Completion:
        """One turn of an agent, whose pages are on disk afterwards."""
        done = self.engine.session(name).generate(self.talks[name], sampling=decode(tokens))
        self.talks[name] += [done.message, user("And then?")]
        assert self.engine.flush(60.0)
        return done

    def rounds(self, count: int) -> None:
        """All agents in turns."""
        for _ in range(count):
            for name in AGENTS:
                self.ask(name)

    def on_disk_only(self, name: str) -> int:
        """Tokens of an agent's next prompt that would be read."""
        return self.engine.probe(self.talks[name]).disk_tokens

    def push_out(self, name: str) -> None:
        """Fill memory with other prompts, until a page of an agent's session has left it."""
        for salt in range(10):
            if self.on_disk_only(name):
                return
            self.engine.generate(chat(long_text(150, 50 + salt)), namespace="other", sampling=decode(1))
        raise AssertionError(f"pages of {name!r} stay in memory")

    @contextmanager
    def decoding(self, name: str) -> Iterator[None]:
        """An agent decodes meanwhile; its answer is left."""
        with self.engine.session(name).stream(self.talks[name], sampling=decode(900)) as stream:
            next(iter(stream))
            yield

    def decode(self, name: str, rounds: int) -> None:
        """Let an agent decode for some rounds of the device."""
        before = self.engine.scheduler.rounds
        with self.decoding(name):
            assert wait_until(lambda: self.engine.scheduler.rounds > before + rounds)

    def close(self) -> None:
        self._opened.__exit__(None, None, None)


@pytest.fixture(scope="module")
def model() -> Any:
    return models.build("qwen3", num_hidden_layers=2)


@pytest.fixture
def agents(model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Agents]:
    monkeypatch.setattr(sessions, "IDLE_S", -1.0)  # nothing is pinned
    made = Agents(model, tmp_path)
    yield made
    made.close()


@pytest.fixture
def queries(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Record what the disk is asked for."""
    found: list[Any] = []
    prefetch = Store.prefetch

    def counted(self: Store, query: Any, wake: Any) -> Any:
        found.append(query)
        return prefetch(self, query, wake)

    monkeypatch.setattr(Store, "prefetch", counted)
    return found


class HeldRead:
    """Reading of bob's chain, while alice decodes, which is done, and not told, until it goes on."""

    def __init__(self) -> None:
        self.goes_on, self.keys = threading.Event(), list[bytes]()


@pytest.fixture
def reading(agents: Agents, monkeypatch: pytest.MonkeyPatch) -> Iterator[HeldRead]:
    agents.rounds(2)
    agents.push_out("bob")
    made, done, read, tokens = HeldRead(), threading.Event(), DiskTier.read, agents.engine.session("bob").tokens

    def held(disk: DiskTier, found: Any, *rest: Any) -> Any:
        wrong = read(disk, found, *rest)
        if found.tokens == tokens:
            made.keys += [row.page_key for row in found.rows]
            done.set()
            assert made.goes_on.wait(60)
        return wrong

    monkeypatch.setattr(DiskTier, "read", held)
    with agents.decoding("alice"):
        assert done.wait(60)
        yield made


def test_pages_of_the_next_session_come_while_one_decodes(agents: Agents) -> None:
    agents.rounds(2)
    agents.push_out("bob")
    expected = agents.engine.generate(agents.talks["bob"], sampling=decode(4), reuse="off")
    with agents.decoding("alice"):
        assert wait_until(lambda: not agents.on_disk_only("bob"))
        done = agents.engine.session("bob").generate(agents.talks["bob"], sampling=decode(4))
    assert (done.receipt.disk_tokens, done.receipt.resumed) == (0, "extend")
    assert done.receipt.cached_tokens > 512
    assert done.text == expected.text
    check_store(agents.engine.store)


def test_a_request_takes_over_what_is_being_read(agents: Agents, reading: HeldRead) -> None:
    stream = agents.engine.session("bob").stream(agents.talks["bob"], sampling=decode(4))
    reading.goes_on.set()
    receipt = stream.completion.receipt
    assert receipt.disk_tokens
    assert receipt.cached_tokens >= receipt.prompt_tokens - 40
    assert len(reading.keys) == len(set(reading.keys)), "a page was read twice"


def test_a_request_that_diverges_asks_the_disk_itself(agents: Agents, reading: HeldRead) -> None:
    branch = [*agents.talks["bob"][:2], *chat("", long_text(100, 99), "And then?")[2:]]
    agents.engine.generate(branch, sampling=decode(1))
    assert agents.engine.flush(60.0)
    agents.engine.store.clear()
    stream = agents.engine.session("bob").stream(branch, sampling=decode(4))
    reading.goes_on.set()
    receipt = stream.completion.receipt
    assert receipt.resumed == "diverge"
    assert receipt.cached_tokens >= receipt.prompt_tokens - 40


def test_a_request_for_fewer_bits_asks_the_disk_itself(agents: Agents, queries: list[Any], reading: HeldRead) -> None:
    assert agents.engine.store.disk
    agents.engine.store.disk.precision = "int8"  # as where turns of idle sessions are stored so
    stream = agents.engine.session("bob").stream(agents.talks["bob"], sampling=decode(4), reuse="lossy")
    reading.goes_on.set()
    assert stream.completion.receipt.cached_tokens
    assert "int8" in {query.scope.precision for query in queries}


def test_an_order_that_changes_is_not_followed(agents: Agents, queries: list[Any]) -> None:
    agents.rounds(1)
    for order in (AGENTS[::-1], AGENTS, AGENTS[::-1]):
        for name in order:
            agents.ask(name)
    agents.push_out("carol")  # asked after dave, last time
    queries.clear()
    agents.decode("dave", rounds=50)
    assert len(queries) == 1  # its own


def test_nothing_is_read_into_too_small_a_memory(model: Any, tmp_path: Path, queries: list[Any]) -> None:
    agents = Agents(model, tmp_path, room=3)
    agents.rounds(2)
    agents.push_out("bob")
    queries.clear()
    agents.decode("alice", rounds=50)
    assert len(queries) == 1  # its own
    agents.close()


def test_a_session_forgotten_while_it_is_read_stays_forgotten(agents: Agents, reading: HeldRead) -> None:
    agents.engine.forget(session="bob")
    reading.goes_on.set()
    receipt = agents.ask("bob").receipt
    assert receipt.resumed == ""
    assert receipt.cached_tokens < 512


@pytest.mark.parametrize("asked", ["before", "after"])
def test_what_was_read_for_other_weights_is_not_used(agents: Agents, model: Any, reading: HeldRead, asked: str) -> None:
    weight, session, prompt = model.model.layers[0].self_attn.k_proj.weight, agents.engine.session("bob"), agents.talks["bob"]
    try:
        stream = session.stream(prompt, sampling=decode(4)) if asked == "before" else None
        weight.data.mul_(-1.0)
        stream = stream or session.stream(prompt, sampling=decode(4))
        reading.goes_on.set()
        done = stream.completion
        assert (done.receipt.cached_tokens, done.receipt.disk_tokens) == (0, 0)
        assert done.ids == agents.engine.generate(prompt, sampling=decode(4), reuse="off").ids
    finally:
        weight.data.mul_(-1.0)


def test_what_is_remembered_of_an_order_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(read_ahead, "KNOWN", 8)
    ahead = read_ahead.ReadAhead(None, None, None)
    for number in range(40):
        ahead.asked(None, (f"namespace {number // 2}", f"session {number}", "weights"), b"")
        assert sum(len(known) for known in vars(ahead).values() if isinstance(known, dict)) <= 8
