"""Describes functions, classes and values in words that are equal in every process where code and content are. Runs no code of theirs.

A function is its code and the globals that the code names, a class its functions and plain attributes, an object what it would be pickled
from, a tensor its bytes. Libraries are told by name: their release stands beside it.
"""

from __future__ import annotations

import functools
import itertools
import os
import sys
import types
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from blake3 import blake3
from torch.utils.weak import WeakIdKeyDictionary

from ..errors import FAULTS

DEPTH = 10  # of values within values
_OURS = {"torch", "transformers", "accelerate", "bitsandbytes", "huggingface_hub", "peft", "numpy", "agentcache"}
_QUANTIZERS = {"torchao", "optimum", "hqq", "compressed_tensors", "gptqmodel", "awq", "auto_round", "aqlm", "eetq", "vptq"}
INSTALLED = frozenset(_OURS | _QUANTIZERS | {"pydantic"} | sys.stdlib_module_names)  # their code is told by their releases
_OPAQUE = frozenset(_OURS - {"numpy"})  # so is what their objects hold
_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size)
_digests: WeakIdKeyDictionary = WeakIdKeyDictionary()  # of tensors outside of modules' own: version and address then, and digest
_numbers = itertools.count()
_process = ""


def _begin_process() -> None:
    """Name this process. A forked child is another one, though it has what its parent had."""
    global _process
    _process = os.urandom(8).hex()  # objects that have no content to compare are known within one process


_begin_process()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_begin_process)


class Names:
    """Numbers for objects that only identity tells apart. Holds each object, so that its id is not given to another one."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[Any, str]] = {}
        self._used: set[int] = set()

    def of(self, thing: Any) -> str:
        """The name of an object, new for one that was not named in this pass or the pass before."""
        self._used.add(id(thing))
        return self._known.setdefault(id(thing), (thing, f"{_process}-{next(_numbers)}"))[1]

    def end(self) -> None:
        """End a pass: objects that it did not name are let go."""
        self._known = {key: known for key, known in self._known.items() if key in self._used}
        self._used = set()


def root(name: str | None) -> str:
    """The top-level package of a module's name."""
    return (name or "").partition(".")[0]


def release(name: str) -> str:
    """The release of the package that a module of this name belongs to, the innermost one that tells it; "" if none does."""
    steps = list(itertools.accumulate(name.split("."), "{}.{}".format))
    return next((told for step in reversed(steps) if (told := getattr(sys.modules.get(step), "__version__", ""))), "")


def foreign_class(kind: type) -> bool:
    """Whether the code of a class is told by no release: it is the user's own."""
    return root(kind.__module__) not in INSTALLED


def describe(thing: Any, names: Names) -> str:
    """A function, class or value in words. names: for objects that only identity tells apart."""
    return _Description(names).of(thing, DEPTH)


class _Description:
    """One description: what it has gone through already is not gone through again."""

    def __init__(self, names: Names) -> None:
        self._names = names
        self._seen: dict[int, Any] = {}

    def of(self, thing: Any, depth: int) -> str:
        if isinstance(thing, _PLAIN):
            return repr(thing)
        if isinstance(thing, torch.Tensor):
            return self._tensor(thing)
        if not depth or isinstance(thing, (types.ModuleType, types.BuiltinFunctionType)):
            return f"{_name(type(thing))} {getattr(thing, '__qualname__', '')}"
        if id(thing) in self._seen:
            return f"again {_name(type(thing))} {list(self._seen).index(id(thing))}"
        self._seen[id(thing)] = thing
        return self._content(thing, depth - 1)

    def _content(self, thing: Any, depth: int) -> str:
        if isinstance(thing, type):
            return self._class(thing, depth)
        if isinstance(thing, (list, tuple, set, frozenset, deque)):
            told = [self.of(item, depth) for item in list(thing)]
            return f"{_name(type(thing))}{sorted(told) if isinstance(thing, (set, frozenset)) else told}"
        if isinstance(thing, Mapping):
            return f"{_name(type(thing))}{[self.of(item, depth) for pair in list(thing.items()) for item in pair]}"
        if isinstance(thing, np.ndarray):
            bytes_ = thing.tolist() if thing.dtype.hasobject else blake3(thing.tobytes()).hexdigest(16)
            return f"array {thing.dtype} {thing.shape} {bytes_}"
        if isinstance(thing, functools.partial):
            return f"partial {[self.of(part, depth) for part in (thing.func, thing.args, thing.keywords)]}"
        if isinstance(thing, types.MethodType):
            return f"method {self.of(thing.__func__, depth)} {self.of(thing.__self__, depth)}"
        if isinstance(thing, types.FunctionType):
            return self._function(thing, depth)
        if isinstance(thing, torch.nn.Module):
            return self._module(thing, depth)
        return self._object(thing, depth)

    def _class(self, kind: type, depth: int) -> str:
        told = [_name(kind)]
        for base in (base for base in kind.__mro__ if foreign_class(base)):
            for name, value in sorted(vars(base).items()):
                value = value.__func__ if isinstance(value, (staticmethod, classmethod)) else value
                value = (value.fget, value.fset) if isinstance(value, property) else value
                if isinstance(value, types.FunctionType) or not (name.startswith("__") or name == "_abc_impl"):
                    told.append(f"{name} {self.of(value, depth) if not isinstance(value, types.MemberDescriptorType) else ''}")
        return " ".join(told)

    def _function(self, function: types.FunctionType, depth: int) -> str:
        source = function.__globals__.get("__name__", "")
        cells = []
        for cell in function.__closure__ or ():
            try:
                cells.append(cell.cell_contents)
            except ValueError:  # not filled yet
                cells.append("empty")
        digest, named = _digested(function.__code__)
        given = (function.__defaults__, function.__kwdefaults__, cells)
        if root(source) not in INSTALLED:
            given = (*given, {name: function.__globals__[name] for name in named if name in function.__globals__})  # type: ignore[assignment]
        return f"{source}.{function.__qualname__} {digest} {self.of(given, depth)}"

    def _module(self, module: torch.nn.Module, depth: int) -> str:
        """One outside of the model's tree, or around which a patch was put: its settings, tensors and children."""
        own = module.__dict__
        plain = {name: value for name, value in own.items() if isinstance(value, _PLAIN)}
        hooks = [list(own[name].values()) for name in ("_forward_hooks", "_forward_pre_hooks")]  # their keys count all hooks of the process
        parts = (plain, own["_parameters"], own["_buffers"], own["_modules"], *hooks)
        return f"{self.of(type(module), depth)} {[self.of(part, depth) for part in parts]}"

    def _object(self, thing: Any, depth: int) -> str:
        kind = type(thing)
        if root(kind.__module__) in _OPAQUE:
            return _name(kind)
        try:
            reduced = thing.__reduce_ex__(2)
        except FAULTS:  # a lock, a generator, an open file: nothing to compare
            return f"{_name(kind)} {self._names.of(thing)}"
        if isinstance(reduced, str):
            return f"{_name(kind)} {reduced}"
        return f"{_name(kind)} {[self.of(list(part) if isinstance(part, Iterator) else part, depth) for part in reduced]}"

    def _tensor(self, tensor: torch.Tensor) -> str:
        about = f"tensor {tensor.dtype} {tuple(tensor.shape)}"
        try:
            state = (0 if tensor.is_inference() else tensor._version, tensor.data_ptr())
            known = _digests.get(tensor)
            if known is None or known[0] != state:
                data = tensor.detach().to("cpu").contiguous().reshape(-1).view(torch.uint8).numpy().data
                known = _digests[tensor] = (state, blake3(data).hexdigest(16))
        except (RuntimeError, TypeError, NotImplementedError):  # of a subclass or layout whose bytes cannot be read so
            return f"{about} {self._names.of(tensor)}"
        return f"{about} {known[1]}"


def _name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


@functools.lru_cache(maxsize=1 << 12)  # code does not change: a function gets another one
def _digested(code: types.CodeType) -> tuple[str, list[str]]:
    """The digest of code, and the names in it."""
    digest = blake3()
    named = sorted(_absorb(digest, code))
    return digest.hexdigest(8), named


def _absorb(digest: Any, code: types.CodeType) -> set[str]:
    """Instructions, names and constants of code; neither its file nor its lines. Returns the names."""
    digest.update(code.co_code + repr((code.co_names, code.co_varnames, code.co_freevars)).encode())
    named = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            named |= _absorb(digest, constant)
        else:
            digest.update(repr(sorted(map(repr, constant)) if isinstance(constant, frozenset) else constant).encode())
    return named
