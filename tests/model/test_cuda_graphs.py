"""When a forward may be replayed: sizes, weights, hooks, adapters, operations that wait. On a CPU; replays themselves: test_cuda.py."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from agentcache import Engine
from agentcache.bench import families
from agentcache.kv import Sequence
from agentcache.model import cuda_graphs
from agentcache.model.attention import Part
from agentcache.model.cuda_graphs import Graphs
from agentcache.model.hf import HFModel
from agentcache.runner import Work
from tests import models
from tests.engines import chat, decode, engine

pytestmark = pytest.mark.usefixtures("one_thread")


class Replayed:
    """In the place of a graph: says how often it was replayed."""

    def __init__(self) -> None:
        self.made = self.times = 0

    def run(self, parts: Any, given: Any, tables: Any, wanted: list[int]) -> torch.Tensor:
        self.times += 1
        return torch.zeros(len(wanted), models.VOCAB)


@pytest.fixture
def replayed(monkeypatch: pytest.MonkeyPatch) -> Replayed:
    replayed = Replayed()

    def made(*args: Any) -> Replayed:
        replayed.made += 1
        return replayed

    monkeypatch.setattr(Graphs, "_made", made)
    return replayed


@pytest.fixture(params=["qwen3", "smollm3"], ids=["stepped", "modules"])
def running(request: pytest.FixtureRequest) -> Iterator[Engine]:
    """An engine as on a GPU, whose weights are known."""
    with engine(model=models.build(request.param)) as made:
        made.generate(chat("one"), sampling=decode(2))
        made.model.graphs = Graphs(made.model.device)
        yield made


def steps(running: Engine, count: int, rows: int = 1) -> None:
    """Forwards of a sequence of its own."""
    sequence = Sequence(running.model.spec)
    for _ in range(count):
        [outcome] = running.scheduler.runner.run([Work(sequence, [5] * rows)])
        assert outcome.error is None


def test_a_size_is_replayed_when_it_is_asked_for_again(running: Engine, replayed: Replayed) -> None:
    steps(running, 3)
    assert (replayed.made, replayed.times) == (1, 2)
    steps(running, 2, rows=70)  # another size
    assert (replayed.made, replayed.times) == (2, 3)
    steps(running, 1, rows=90)  # in the same step of sizes
    assert (replayed.made, replayed.times) == (2, 4)
    steps(running, 3, rows=cuda_graphs.ROWS[-1] + 1)  # too many
    assert (replayed.made, replayed.times) == (2, 4)


def other_weights(model: Any) -> None:
    layer = model.model.layers[0].mlp.down_proj
    layer.weight = torch.nn.Parameter(layer.weight * -3)


def other_memory(model: Any) -> None:
    weight = model.model.layers[0].mlp.down_proj.weight
    weight.data = weight.data.clone()


def another_module(model: Any) -> None:
    layer = model.model.layers[0]
    layer.mlp = copy.deepcopy(layer.mlp)


def a_hook(model: Any) -> None:
    model.model.layers[0].mlp.register_forward_hook(lambda *_: None)


@pytest.mark.parametrize("change", [other_weights, other_memory, another_module, a_hook])
def test_nothing_is_replayed_after_a_change(running: Engine, replayed: Replayed, change: Callable[[Any], None]) -> None:
    steps(running, 3)
    change(running.model.model)
    steps(running, 1)
    assert replayed.times == 2


def test_a_parameter_may_go(replayed: Replayed) -> None:
    with engine(model=models.build("qwen2")) as made:
        made.generate(chat("one"), sampling=decode(2))
        made.model.graphs = Graphs(made.model.device)
        steps(made, 3)
        made.model.model.model.layers[0].self_attn.q_proj.bias = None
        steps(made, 3)
    assert replayed.times == 2


def test_an_adapter_is_never_replayed(running: Engine, replayed: Replayed) -> None:
    assert running.model.spec is not None
    sequence = Sequence(running.model.spec)
    part = Part(sequence, 0, 1)
    batch = cuda_graphs.Batch([part], 1, running.model.numerics, token=running.model.fingerprint.token)  # type: ignore[arg-type,union-attr]
    batch.acting = [(object(), slice(0, 1))]
    assert Graphs(running.model.device)._size(batch, [0]) is None


@pytest.mark.parametrize(
    "operation",
    [
        lambda x: int(x.sum()),
        lambda x: bool(x.sum()),
        lambda x: x[x > 0],
        lambda x: x.index_put((x > 0,), x[0]),
        lambda x: x.nonzero(),
        lambda x: torch.where(x > 0),
        lambda x: x.repeat_interleave(x.long()),
        lambda x: x.to("meta"),
        lambda x: x.sum().to("meta"),
    ],
    ids=["value", "truth", "mask", "masked write", "nonzero", "where", "repeat", "device", "number"],
)
def test_an_operation_that_waits_is_noticed(operation: Callable[[torch.Tensor], Any]) -> None:
    with torch.inference_mode(), cuda_graphs._Waits(), pytest.raises(RuntimeError, match="waits for the device"):
        operation(torch.ones(4))


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "gemma4_text", "phi3", "gpt2", "youtu", "llama4_text", "bitnet"])
def test_dense_families_wait_for_nothing(family: str) -> None:
    model = HFModel(families.build(family))
    assert model.spec is not None
    sequence, regime = Sequence(model.spec), model.regime(70) or ""
    sequence.reserve(70)
    model.forward(torch.arange(64), [Part(sequence, 0, 64)], [regime], [63])
    sequence.advance(64)
    token = torch.tensor([5]), [Part(sequence, 64, 1)], [regime], [0]
    model.forward(*token)  # a machine with compiled layers tries them with the first one
    with cuda_graphs._Waits():
        logits = model.forward(*token)
    assert logits.isfinite().all()
