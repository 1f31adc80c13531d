"""Users' own modules count by their code and by what they hold: in place too, and in every process alike."""

from __future__ import annotations

import sys
import threading
import types
from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction
from typing import Any

import pytest
import torch
from torch.nn import functional

from agentcache.model.attention_interface import rotary_hook
from agentcache.model.fingerprint import Fingerprint
from agentcache.types import Reason
from tests import models
from tests.changes import FAMILIES, adapted
from tests.engines import chat, decode, engine

SHORT = chat("The wind turns to the north. What did the keeper write down?")
SOURCE = """
import types
from abc import ABC
from decimal import Decimal
from fractions import Fraction

import numpy as np
import torch
from torch import nn

SCALE = 1.0
TABLE = {"x": 1.0}

def inner(x): return x
def outer(x): return inner(x)

class Box(ABC):
    v = 1.0
    def __init__(self): self.w = 1.0

class Gate(nn.Module):
    factor = 1.0

    def __init__(self, inner):
        super().__init__()
        self.inner, self.box, self.array, self.names = inner, Box(), np.ones(1), {"a"}
        self.space, self.fraction, self.decimal = types.SimpleNamespace(scale=1.0), Fraction(1), Decimal(1)
        self.vectors, self.steps, self.parts = {"a": torch.zeros(64)}, [torch.zeros(64)], [nn.Linear(64, 64, bias=False)]
        with torch.no_grad():
            self.parts[0].weight.copy_(torch.eye(64))

    def helper(self, x): return x * self.factor * self.box.v * self.box.w * float(self.array[0]) * len(self.names)

    def forward(self, x):
        scale = self.space.scale * float(self.fraction) * float(self.decimal) * SCALE * TABLE["x"] * outer(1.0)
        return self.parts[0](self.helper(self.inner(x))) * scale + self.vectors["a"] + self.steps[0]
"""
EDITED = {
    "a helper": ("return x * self.factor", "return -x * self.factor"),
    "a constant": ("SCALE = 1.0", "SCALE = 8.0"),
    "a table": ('TABLE = {"x": 1.0}', 'TABLE = {"x": 2.0}'),
    "a class attribute": ("factor = 1.0", "factor = 3.0"),
    "a class attribute of an object": ("    v = 1.0", "    v = 3.0"),
    "a function that a function calls": ("def inner(x): return x", "def inner(x): return x * 3"),
}
Change = Callable[[Any, Any], Any]
IN_PLACE: dict[str, Change] = {
    "a helper": lambda space, gate: setattr(space.Gate, "helper", lambda self, x: x * 3),
    "a constant": lambda space, gate: setattr(space, "SCALE", 3.0),
    "a table": lambda space, gate: space.TABLE.update(x=3.0),
    "a class attribute": lambda space, gate: setattr(space.Gate, "factor", 3.0),
    "code of a function": lambda space, gate: setattr(space.inner, "__code__", (lambda x: x * 3).__code__),
    "a class attribute of an object": lambda space, gate: setattr(space.Box, "v", 3.0),
    "an attribute of an object": lambda space, gate: setattr(gate.box, "w", 3.0),
    "an array": lambda space, gate: gate.array.__setitem__(0, 3.0),
    "a set": lambda space, gate: gate.names.add("b"),
    "a namespace replaced": lambda space, gate: setattr(gate, "space", types.SimpleNamespace(scale=3.0)),
    "a namespace": lambda space, gate: setattr(gate.space, "scale", 3.0),
    "a fraction": lambda space, gate: setattr(gate, "fraction", Fraction(3)),
    "a decimal": lambda space, gate: setattr(gate, "decimal", Decimal(3)),
    "a tensor in a dictionary": lambda space, gate: gate.vectors.update(a=torch.ones(64)),
    "a tensor in a dictionary in place": lambda space, gate: gate.vectors["a"].add_(1),
    "a tensor in a list": lambda space, gate: gate.steps.__setitem__(0, torch.ones(64)),
    "a module in a list": lambda space, gate: gate.parts.__setitem__(0, torch.nn.Linear(64, 64, bias=False)),
    "weights of a module in a list": lambda space, gate: gate.parts[0].weight.mul_(3),
    "the class of the module": lambda space, gate: setattr(gate, "__class__", type("Other", (space.Gate,), {"__module__": space.__name__})),
}


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], tuple[Any, Any]]:
    """A model with a module of a user's file in it, and that file."""

    def loaded(source: str) -> tuple[Any, Any]:
        space = types.ModuleType("users_file")
        monkeypatch.setitem(sys.modules, "users_file", space)
        exec(source, vars(space))
        model = models.build("llama")
        model.model.layers[0].mlp = space.Gate(model.model.layers[0].mlp)
        return model, space

    return loaded


@pytest.mark.parametrize("edit", EDITED)
def test_an_edited_file_has_another_digest(edit: str, load: Callable[[str], tuple[Any, Any]]) -> None:
    first = Fingerprint(load(SOURCE)[0], "aten").whole
    assert Fingerprint(load(SOURCE)[0], "aten").whole == first, "pages of an earlier process are never used"
    old, new = EDITED[edit]
    assert SOURCE.count(old) == 1
    assert Fingerprint(load(SOURCE.replace(old, new))[0], "aten").whole != first


@pytest.mark.parametrize("kind", IN_PLACE)
def test_a_custom_module_that_changes_is_not_what_it_was(kind: str, load: Callable[[str], tuple[Any, Any]]) -> None:
    model, space = load(SOURCE)
    with engine(model=model, store=None) as running:
        running.generate(SHORT, sampling=decode(2))
        before = running.generate(SHORT, sampling=decode(2))
        assert before.receipt.computed_tokens == 1
        with torch.no_grad():
            IN_PLACE[kind](space, model.model.layers[0].mlp)
        found = running.generate(SHORT, sampling=decode(2))
        assert not found.receipt.cached_tokens
        assert found.ids == running.generate(SHORT, sampling=decode(2), reuse="off").ids


def test_objects_without_content_are_equal_within_one_process(load: Callable[[str], tuple[Any, Any]]) -> None:
    model, _ = load(SOURCE)
    model.model.layers[0].mlp.lock = threading.Lock()
    known = Fingerprint(model, "aten")
    assert known.whole == known.whole
    assert Fingerprint(model, "aten").whole != known.whole


@pytest.mark.parametrize("family", FAMILIES)
def test_models_of_libraries_are_told_by_content_alone(family: str) -> None:
    assert Fingerprint(models.build(family), "aten").whole == Fingerprint(models.build(family), "aten").whole


def test_adapters_are_told_by_content_alone() -> None:
    found = []
    for _ in range(2):
        with adapted(models.build("llama")) as wrapped:
            found.append(Fingerprint(wrapped.get_base_model(), "aten").whole)
    assert found[0] == found[1]


def test_hooks_made_before_do_not_count_in_patched_forwards() -> None:
    found = []
    for _ in range(2):  # torch numbers the hooks of a process; libraries that move weights put a forward around each module
        model = models.build("llama")
        rotary = model.model.rotary_emb
        rotary.register_forward_hook(rotary_hook)
        rotary.forward = types.MethodType(_forward, rotary)
        found.append(Fingerprint(model, "aten").whole)
    assert found[0] == found[1]


def _forward(module: Any, *args: Any, **kwargs: Any) -> Any:
    return type(module).forward(module, *args, **kwargs)


def test_a_patched_function_of_torch_is_never_labelled_bitwise(monkeypatch: pytest.MonkeyPatch) -> None:
    model, inner = models.build("llama"), functional.silu
    with engine(model=model, store=None) as running:
        assert running.generate(SHORT, sampling=decode(2)).receipt.bitwise
        monkeypatch.setattr(functional, "silu", lambda x, inplace=False: inner(x) * 2)
        found = running.generate(SHORT, sampling=decode(2))
        assert not found.receipt.cached_tokens
        assert not found.receipt.bitwise
        assert Reason.FINGERPRINT in [refusal.reason for refusal in found.receipt.refusals]


def test_the_class_of_a_stock_module_is_looked_at() -> None:
    model = models.build("llama")
    mlp = model.model.layers[0].mlp
    kind = type(mlp)
    with engine(model=model, store=None) as running:
        before = running.generate(SHORT, sampling=decode(2))
        mlp.__class__ = type("Tripled", (kind,), {"forward": lambda self, x: kind.forward(self, x) * 3})
        found = running.generate(SHORT, sampling=decode(2))
        assert (before.receipt.path, found.receipt.path) == ("stepped", "generic")
        assert not found.receipt.cached_tokens
