"""Weights and adapters change at any moment of a request: every answer is of one state of them, and nothing else is ever reused."""

from __future__ import annotations

import random
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from agentcache import Engine, StoreOptions
from agentcache.bench import families
from agentcache.errors import ModelError, WeightsChangedError
from agentcache.model import steps
from agentcache.model.fingerprint import Fingerprint
from agentcache.model.kernels import jit, layer
from agentcache.store.disk.disk_tier import DiskTier
from agentcache.types import Reason
from tests import models
from tests.changes import adapted
from tests.engines import chat, decode, engine, long_text

PROMPTS = [chat(long_text(90 + 60 * salt, salt)) for salt in range(3)]
SHORT = chat("The wind turns to the north and the tide is high at three. What did the keeper write down?")  # filled in one forward
Answer = tuple[tuple[int, ...], torch.Tensor]


def answer(running: Engine, prompt: Any, reuse: Any = "exact") -> Answer:
    """Three tokens and the logits of the first."""
    logits: list[torch.Tensor] = []
    done = running.generate(prompt, sampling=decode(3), reuse=reuse, on_logits=lambda row: logits.append(row.clone()))
    return done.ids, logits[0]


class Model:
    """A model with two adapters, and six states that it can be put into; `change` puts it into another one."""

    def __init__(self, wrapped: Any) -> None:
        self.wrapped = wrapped
        self.model = wrapped.get_base_model()
        self.changes = 0
        self.odds = 0.0
        self._sign = 1
        self._adapter = "one"
        self._lock = threading.RLock()
        self._within = threading.local()

    states = [(adapter, sign) for adapter in ("one", "two", "off") for sign in (1, -1)]

    @property
    def state(self) -> tuple[str, int]:
        return self._adapter, self._sign

    def put(self, state: tuple[str, int]) -> None:
        with self._lock:
            adapter, sign = state
            if sign != self._sign:
                with torch.no_grad():
                    self.model.model.layers[1].self_attn.q_proj.base_layer.weight.mul_(-1.0)
            if (adapter == "off") != (self._adapter == "off"):
                tuner = self.wrapped.base_model
                tuner.disable_adapter_layers() if adapter == "off" else tuner.enable_adapter_layers()
            if adapter not in ("off", self._adapter):
                self.wrapped.set_adapter(adapter)
            self._adapter, self._sign = state
            self.changes += 1

    def change(self, chance: random.Random) -> None:
        """Perhaps change, but never while this thread changes already."""
        if chance.random() < self.odds and not getattr(self._within, "busy", False):
            self._within.busy = True
            self.put(chance.choice([state for state in self.states if state != self.state]))
            self._within.busy = False


@contextmanager
def changeable() -> Iterator[Model]:
    with adapted(models.build("llama"), ("one", "two")) as wrapped:
        wrapped.eval()
        yield Model(wrapped)


@contextmanager
def moments(model: Model, chance: random.Random) -> Iterator[Counter[str]]:
    """Let the model change, at its odds, amid forwards, while pages are read, written, matched and admitted, and hits are audited."""
    from agentcache.hit_audit import HitAudit
    from agentcache.lifecycle import Lifecycle
    from agentcache.store.disk import blob_io
    from agentcache.store.store import Store

    seen: Counter[str] = Counter()
    with pytest.MonkeyPatch.context() as patch:

        def around(owner: Any, name: str) -> None:
            inner = getattr(owner, name)

            def called(*args: Any, **kwargs: Any) -> Any:
                seen[name] += 1
                model.change(chance)
                done = inner(*args, **kwargs)
                model.change(chance)
                return done

            patch.setattr(owner, name, called)

        for owner, name in (
            (steps, "mix"), (Lifecycle, "start"), (Lifecycle, "deliver"), (Store, "admit"), (Store, "match"),
            (DiskTier, "_save"), (blob_io, "read_many"), (HitAudit, "step"), (HitAudit, "_count"),
        ):  # fmt: skip
            around(owner, name)
        yield seen


def run(changes: int, folder: Path, seed: int) -> tuple[Counter[str], Counter[str]]:
    """Four threads ask while the model changes; afterwards every state is asked in memory and in a later process."""
    chance, outcome, wrong = random.Random(seed), Counter[str](), list[str]()
    store = StoreOptions(folder, check_one_in=1)
    with changeable() as model:
        with engine(model=model.wrapped, store=None) as alone:
            expected: dict[tuple[int, tuple[str, int]], Answer] = {}
            for state in model.states:
                model.put(state)
                expected |= {(number, state): answer(alone, prompt, "off") for number, prompt in enumerate(PROMPTS)}

        def matches(number: int, got: Answer) -> bool:
            return any(got[0] == expected[number, state][0] and torch.equal(got[1], expected[number, state][1]) for state in model.states)

        def ask(running: Engine, own: random.Random, enough: Callable[[], bool]) -> None:
            while not enough():
                number = own.randrange(len(PROMPTS))
                logits: list[torch.Tensor] = []
                try:
                    done = running.generate(PROMPTS[number], sampling=decode(3), on_logits=logits.append)
                except WeightsChangedError:
                    outcome["by name"] += 1
                    continue
                if done.receipt.path == "stock":  # weights did not rest, and the receipt says so
                    outcome["without reuse"] += 1
                    continue
                outcome["answered"] += 1
                got = done.ids, logits[0]
                if not matches(number, got):
                    wrong.append(f"prompt {number}: an answer of no state")

        seen: Counter[str] = Counter()
        for part in range(1, 3):
            end = changes * part // 2
            with moments(model, chance) as met, engine(model=model.wrapped, store=store, chunk_tokens=64) as running:
                model.odds = 0.01
                threads = [
                    threading.Thread(target=ask, args=(running, random.Random(seed + i), lambda end=end: model.changes >= end))
                    for i in range(4)
                ]
                for thread in threads:
                    thread.start()
                for thread in threads:
                    thread.join()
                model.odds = 0.0
                seen += met
                for process in ("this", "a later"):
                    for state in model.states:
                        model.put(state)
                        for number, prompt in enumerate(PROMPTS):
                            got, (ids, logits) = answer(running, prompt), expected[number, state]
                            if got[0] != ids or not torch.equal(got[1], logits):
                                wrong.append(f"{process} process, state {state}, prompt {number}: {(got[1] - logits).abs().max()}")
                    if process == "this":
                        assert running.flush()
                        running.store.clear()  # what comes now is from disk
        assert not wrong, (len(wrong), wrong[:5])
        return outcome, seen


@pytest.mark.parametrize("changes", [60, pytest.param(2200, marks=[pytest.mark.slow, pytest.mark.timeout(3600)])])
def test_an_answer_is_of_one_state_as_without_reuse(changes: int, tmp_path: Path) -> None:
    outcome, seen = run(changes, tmp_path, seed=changes)
    print(outcome, seen)
    assert outcome["answered"] > 0
    assert all(seen[name] for name in ("mix", "start", "deliver", "admit", "_save", "read_many", "step")), seen


# -- one moment each ---------------------------------------------------------------------------------------------------


@contextmanager
def waiting(running: Engine) -> Iterator[Callable[[], None]]:
    """Requests that are submitted wait until the yielded function is called."""
    gate, inner = threading.Event(), running.scheduler._start_waiting

    def start() -> None:
        if gate.is_set():
            inner()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(running.scheduler, "_start_waiting", start)
        yield gate.set
        gate.set()


def test_a_waiting_request_belongs_to_the_weights_that_compute(tmp_path: Path) -> None:
    with changeable() as model, engine(model=model.wrapped, store=tmp_path) as running:
        with waiting(running) as go:
            stream = running.stream(PROMPTS[0], sampling=decode(3))
            model.put(("two", 1))
            go()
            done = stream.completion
        assert done.ids == answer(running, PROMPTS[0], "off")[0]
        assert any("begun anew" in note for note in done.receipt.notes)
        model.put(("one", 1))
        found = running.generate(PROMPTS[0], sampling=decode(3))
        assert found.receipt.cached_tokens == 0, "pages of one adapter were kept under the name of another"
        assert found.ids == answer(running, PROMPTS[0], "off")[0]


def test_weights_are_looked_at_once_after_each_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    model, found = models.build("llama"), list[int]()
    with engine(model=model) as running:
        running.generate(PROMPTS[0], sampling=decode(1))
        look = running.fingerprint.sampled
        monkeypatch.setattr(running.fingerprint, "sampled", lambda: found.append(running.scheduler.rounds) or look())
        assert running.generate(PROMPTS[0], sampling=decode(1)).receipt.cached_tokens
    assert found == [found[0], found[0] + 1]


def test_an_answer_that_has_begun_ends_by_name() -> None:
    with changeable() as model, engine(model=model.wrapped) as running:
        stream = running.stream(PROMPTS[0], sampling=decode(50))
        next(stream)
        model.put(("one", -1))
        with pytest.raises(WeightsChangedError, match="ask again"):
            for _ in stream:
                pass
        assert answer(running, PROMPTS[0])[0] == answer(running, PROMPTS[0], "off")[0]


def test_an_answer_of_no_pages_ends_by_name_too() -> None:
    """Beyond the window of dynamic NTK, transformers' own cache holds the request."""
    model = models.build("llama", max_position_embeddings=256, rope_parameters={"rope_type": "dynamic", "factor": 8.0, "rope_theta": 1e4})
    with engine(model=model) as running:
        stream = running.stream(PROMPTS[0], sampling=decode(50))
        next(stream)
        assert [refusal.reason for refusal in stream.receipt.refusals] == [Reason.ROPE_REGIME]
        with torch.no_grad():
            model.model.layers[1].self_attn.q_proj.weight.mul_(-1.0)
        with pytest.raises(WeightsChangedError, match="ask again"):
            for _ in stream:
                pass
        with waiting(running) as go:
            stream = running.stream(PROMPTS[1], sampling=decode(3))
            with torch.no_grad():
                model.model.layers[1].self_attn.q_proj.weight.mul_(-1.0)
            go()
            assert stream.completion.ids == answer(running, PROMPTS[1], "off")[0]


def test_switching_an_adapter_hashes_its_own_tensors_once() -> None:
    with changeable() as model, engine(model=model.wrapped) as running:
        known = running.fingerprint
        first = known.whole
        hashed = known.hashed_bytes
        model.put(("two", 1))
        second = known.whole
        assert second != first
        assert known.hashed_bytes == hashed, "both adapters are in the model: their tensors were hashed with it"
        model.put(("one", 1))
        assert (known.whole, known.hashed_bytes) == (first, hashed)


def test_edits_that_torch_does_not_count_end_nothing_but_reuse() -> None:
    model = models.build("llama")
    with engine(model=model) as running:
        first = answer(running, PROMPTS[0])
        model.model.layers[0].mlp.up_proj.weight.data.mul_(1.5)
        found = running.generate(PROMPTS[0], sampling=decode(3))
        assert found.receipt.cached_tokens == 0
        assert found.ids == answer(running, PROMPTS[0], "off")[0]
        model.model.layers[0].mlp.up_proj.weight.data.div_(1.5)
        torch.testing.assert_close(answer(running, PROMPTS[0])[1], first[1])


@contextmanager
def restless(model: Any, running: Engine) -> Iterator[None]:
    """Every forward of an engine meets another change of a weight."""
    inner = running.model.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        with torch.no_grad():
            model.model.norm.weight.mul_(1.0)
        return inner(*args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(running.model, "forward", forward)
        yield


def test_weights_that_never_rest_end_reuse_by_name() -> None:
    model = models.build("llama")
    with engine(model=model) as running:
        expected = answer(running, PROMPTS[0])[0]
        running.store.clear()
        with restless(model, running):
            done = running.generate(PROMPTS[0], sampling=decode(3))
        assert done.ids == expected
        assert [refusal.detail for refusal in done.receipt.refusals if refusal.reason is Reason.FINGERPRINT]
        assert "5 times" in done.receipt.refusals[0].detail
        assert len(running.store) == 0
        assert running.generate(PROMPTS[0], sampling=decode(3)).receipt.path == "stepped", "it stayed refused once they rested"


def test_a_request_without_reuse_goes_on_whatever_moves() -> None:
    model = models.build("llama")
    with engine(model=model) as running:
        expected = answer(running, PROMPTS[0], "off")[0]
        with restless(model, running):
            done = running.generate(PROMPTS[0], sampling=decode(3), reuse="off", on_logits=lambda row: running.fingerprint.invalidate())
        assert done.ids == expected
        assert [note for note in done.receipt.notes if "may be of both" in note] == [done.receipt.notes[-1]]


def test_weights_that_change_during_hashing_end_reuse_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    model = models.build("llama")
    with engine(model=model) as running:
        inner, moves = running.fingerprint._digest, 3

        def digest(tensor: torch.Tensor) -> bytes:
            nonlocal moves
            found = inner(tensor)
            if tensor is model.model.layers[2].input_layernorm.weight and moves:
                moves -= 1
                with torch.no_grad():
                    model.model.layers[0].mlp.up_proj.weight.mul_(-1.0)
            return found

        monkeypatch.setattr(running.fingerprint, "_digest", digest)
        whole = running.fingerprint.whole
        assert not moves
        assert whole == Fingerprint(model, running.model.numerics.kernel).whole, "the digest of weights that were already others"
        moves = 1000
        running.fingerprint.invalidate()
        done = running.generate(PROMPTS[0], sampling=decode(3))
        assert "while they were hashed" in done.receipt.refusals[0].detail
        assert len(done.ids) == 3


def test_what_was_decoded_under_other_weights_is_not_kept() -> None:
    """The setting of a norm changes after the first token, and is as before once the answer is out."""
    model = models.build("llama")
    norm = model.model.layers[0].input_layernorm
    with engine(model=model, store=None) as running:
        before = norm.variance_epsilon

        def change(logits: torch.Tensor) -> None:
            norm.variance_epsilon = 0.5

        first = running.generate(SHORT, sampling=decode(8), on_logits=change)
        norm.variance_epsilon = before
        turn = [*SHORT, first.message, *chat("And then?")]
        second = running.generate(turn, sampling=decode(3))
        assert 0 < second.receipt.cached_tokens <= first.receipt.prompt_tokens
        assert second.ids == running.generate(turn, sampling=decode(3), reuse="off").ids


@contextmanager
def amid(monkeypatch: pytest.MonkeyPatch, first: Callable[[], Any], then: Callable[[], Any], layers: int = 2) -> Iterator[None]:
    """Act once as the first layer of one forward attends, and once some layers later, as another thread could."""
    inner, calls = steps.mix, 0

    def mix(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls in (1, 1 + layers):
            (first if calls == 1 else then)()
        return inner(*args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(steps, "mix", mix)
        yield


@pytest.mark.parametrize("kind", ["adapter off", "adapter scaled", "a hook"])
def test_a_change_undone_within_one_forward_is_noticed(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with changeable() as model, engine(model=model.wrapped, store=None) as running:
        layer, handles = model.model.model.layers[1], list[Any]()
        scaling = layer.self_attn.v_proj.scaling
        first, then = {
            "adapter off": (model.wrapped.base_model.disable_adapter_layers, model.wrapped.base_model.enable_adapter_layers),
            "adapter scaled": (lambda: scaling.update(one=scaling["one"] * 5), lambda: scaling.update(one=scaling["one"] / 5)),
            "a hook": (lambda: handles.append(layer.mlp.register_forward_hook(lambda m, i, out: out * 3)), lambda: handles[0].remove()),
        }[kind]
        running.generate("The wind turns.", sampling=decode(1))
        with amid(monkeypatch, first, then):
            done = running.generate(SHORT, sampling=decode(1))
        assert any("begun anew" in note for note in done.receipt.notes)
        (ids, logits), (expected, wanted) = answer(running, SHORT), answer(running, SHORT, "off")
        assert ids == expected
        assert torch.equal(logits, wanted), "pages of two models were kept"


@pytest.mark.parametrize("kind", [torch.nn.Parameter, torch.Tensor.detach])
@pytest.mark.parametrize(
    ("family", "path"),
    [
        ("qwen3", "0.mlp.down_proj"),
        ("granite", "0.mlp.down_proj"),
        ("granitemoe", "0.block_sparse_moe.experts"),
        ("youtu", "1.self_attn.kv_b_proj"),
    ],
)
def test_a_weight_exchanged_for_part_of_a_forward_is_noticed(
    family: str, path: str, kind: Callable[[torch.Tensor], torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As `torch.func.functional_call` in another thread exchanges all of them."""
    monkeypatch.setattr(layer, "programs", lambda *_: None)
    model = families.build(family)
    held = model.model.layers.get_submodule(path)._parameters
    name, weight = next(iter(held.items()))
    other = kind(weight.detach() * 2)
    with engine(model=model, store=None) as running:
        expected, wanted = answer(running, SHORT, "off")
        with amid(monkeypatch, lambda: held.update({name: other}), lambda: held.update({name: weight}), layers=1):
            done = running.generate(SHORT, sampling=decode(1))
        assert any("begun anew" in note for note in done.receipt.notes)
        ids, logits = answer(running, SHORT)
        assert ids == expected
        assert torch.equal(logits, wanted), "pages of two models were kept"


@pytest.mark.skipif(jit.compiler() is None, reason="layers cannot be compiled here")
def test_compiled_layers_read_the_weights_they_began_with(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever exchanges one amid a forward, and drops it: the state token holds all of them."""
    model = families.build("qwen3")
    held = model.model.layers[0].mlp.down_proj._parameters
    alive, other = weakref.ref(held["weight"]), torch.nn.Parameter(held["weight"].detach() * 2)
    seen, there = list[torch.Tensor](), list[bool]()
    with engine(model=model, store=None) as running:
        assert running.model.stepped
        _, wanted = answer(running, SHORT, "off")
        inner = steps._by_programs

        def by_programs(*args: Any) -> torch.Tensor:
            with amid(monkeypatch, lambda: held.update(weight=other), lambda: there.append(alive() is not None), layers=1):
                seen.append(inner(*args))
            return seen[-1]

        with monkeypatch.context() as patch:
            patch.setattr(steps, "_by_programs", by_programs)
            done = running.generate(SHORT, sampling=decode(1))
        assert there[:1] == [True], "its memory was free while it was read"
        assert any("begun anew" in note for note in done.receipt.notes)
        (_, found), (_, now) = answer(running, SHORT), answer(running, SHORT, "off")
        assert torch.equal(found, now)
        assert not torch.equal(found, wanted)


def test_a_head_exchanged_for_its_product_chooses_no_token(monkeypatch: pytest.MonkeyPatch) -> None:
    model, layers, product, calls = models.build("qwen3"), steps.hidden_states, steps.linear, 0
    held = model.lm_head._parameters
    weight, other = held["weight"], torch.nn.Parameter(-held["weight"])

    def hidden_states(*args: Any, **kwargs: Any) -> torch.Tensor:
        nonlocal calls
        found, calls = layers(*args, **kwargs), calls + 1
        held["weight"] = other if calls == 1 else weight
        return found

    def linear(*args: Any, **kwargs: Any) -> torch.Tensor:
        found = product(*args, **kwargs)
        held["weight"] = weight
        return found

    with engine(model=model, store=None) as running:
        expected = answer(running, SHORT, "off")
        monkeypatch.setattr(steps, "hidden_states", hidden_states)
        monkeypatch.setattr(steps, "linear", linear)
        found = answer(running, SHORT)
    assert found[0] == expected[0]
    assert torch.equal(found[1], expected[1])


def test_a_prompt_of_two_models_is_never_answered() -> None:
    """Hooks come onto two layers while the prompt is filled, one of them computed already; the answer has one token."""
    model, handles, armed = models.build("llama"), [], False
    layers = model.model.layers

    def between(module: Any, args: Any, output: Any) -> None:
        nonlocal armed
        if armed:
            armed = False
            handles.extend(layers[at].mlp.register_forward_hook(lambda module, args, output: output * 3) for at in (0, 2))

    layers[1].register_forward_hook(between)
    with engine(model=model, store=None) as running:
        running.generate("The wind turns.", sampling=decode(1))
        armed, logits = True, []
        got = running.generate(SHORT, sampling=decode(1), on_logits=logits.append)
        assert len(handles) == 2
        assert any("begun anew" in note for note in got.receipt.notes)
        running.generate(SHORT, sampling=decode(1), reuse="off", on_logits=logits.append)
        assert torch.equal(logits[0], logits[1])


def test_an_adapter_that_starts_at_its_own_tokens_is_refused() -> None:
    with adapted(models.build("llama"), alora_invocation_tokens=[7, 8]) as wrapped:
        with pytest.raises(ModelError, match="'one' acts from its invocation tokens on"), engine(model=wrapped):
            pass
        wrapped.base_model.disable_adapter_layers()
        with engine(model=wrapped) as running:
            assert len(running.generate(PROMPTS[0], sampling=decode(3)).ids) == 3
            wrapped.base_model.enable_adapter_layers()
            with pytest.raises(ModelError, match="invocation tokens"):
                running.generate(PROMPTS[0], sampling=decode(3))


@pytest.mark.parametrize("reuse", ["exact", "off"])
def test_another_number_type_asks_for_another_engine(reuse: Any) -> None:
    model = models.build("llama")
    with engine(model=model) as running:
        before = running.generate(PROMPTS[0], sampling=decode(3))
        model.to(torch.bfloat16)
        with pytest.raises(ModelError, match=r"'torch.bfloat16'\], its engine was made for .*'torch.float32'\]: make another engine"):
            running.generate(PROMPTS[0], sampling=decode(3), reuse=reuse)
        model.to(torch.float32)
        assert running.generate(PROMPTS[0], sampling=decode(3), reuse=reuse).ids == before.ids


def test_an_adapter_of_embeddings_promises_no_bits() -> None:
    """PEFT multiplies its rows by no linear layer: how many there are decides their bits, which a proof sees by chance."""
    for target, promised in (("v_proj", True), ("embed_tokens", False)):
        with adapted(models.build("llama"), ("one",), target_modules=[target]) as wrapped, engine(model=wrapped) as running:
            first, again = (running.generate(PROMPTS[0], sampling=decode(3)) for _ in range(2))
            assert running.fingerprint is not None
            assert running.fingerprint.foreign is not promised
            assert (again.ids, again.receipt.bitwise) == (first.ids, promised)
            assert again.receipt.cached_tokens > 0
