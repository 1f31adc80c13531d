"""Describes the code and settings by which modules compute: forwards, attributes, hooks, mode. Hashes no weights and runs no module."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any

import torch
from blake3 import blake3
from torch.nn.modules import module as torch_module

from ..errors import ModelError
from . import wrapped_weights
from .description import Names, describe, foreign_class, release, root
from .rope import changes_by_length

INTERNAL = frozenset(torch.nn.Module().__dict__)  # attributes of every module: tensors, children and hooks have rules of their own
EVERY_MODULE = ("_global_forward_pre_hooks", "_global_forward_hooks")  # hooks that torch calls for all modules
_OWN = "agentcache."
_OF_TRAINING = "PreTrainedModel.enable_input_require_grads.<locals>.make_inputs_require_grads"  # moves no value
_LIBRARIES = frozenset({"torch", "transformers"})  # underscored attributes of their modules are notes about loading
IRRELEVANT = frozenset(
    "name_or_path warnings_issued generation_config loss_type gradient_checkpointing max_seq_len_cached _caches extra_repr".split()
)


def of_library(module: torch.nn.Module) -> bool:
    """Whether the class of a module is torch's or transformers' own."""
    return root(type(module).__module__) in _LIBRARIES


def forwards(modules: Iterable[torch.nn.Module]) -> dict[type[torch.nn.Module], tuple[Any, Any]]:
    """The classes of these modules with their `forward` and `__call__`."""
    kinds = dict.fromkeys(type(module) for module in modules)
    return {kind: (kind.forward, kind.__call__) for kind in kinds}


def namespaces(kinds: Iterable[type]) -> list[types.ModuleType]:
    """The Python modules whose functions the forwards of these classes call by name, torch's own left out."""
    names = dict.fromkeys(base.__module__ for kind in kinds for base in kind.__mro__ if {"forward", "__call__"} & vars(base).keys())
    return [sys.modules[name] for name in names if root(name) not in ("torch", "builtins") and name in sys.modules]


def foreign_hooks(module: torch.nn.Module) -> Iterator[Callable[..., Any]]:
    """The hooks that others put into one module's forward."""
    for hooks in (module._forward_pre_hooks, module._forward_hooks):
        for hook in list(hooks.values()):
            if not (getattr(hook, "__module__", None) or "").startswith(_OWN) and getattr(hook, "__qualname__", "") != _OF_TRAINING:
                yield hook


def has_our_forward(module: torch.nn.Module) -> bool:
    """Whether a module's forward was replaced by ours (mixer_kernels.py)."""
    return (getattr(module.__dict__.get("forward"), "__module__", None) or "").startswith(_OWN)


def settings(module: torch.nn.Module, written: Collection[str] = ()) -> dict[str, Any]:
    """The attributes of a module by which it may compute: no tensors, no children, no notes about loading, nothing of `written`."""
    own = module.__dict__
    if changes_by_length(own.get("rope_type")):
        return {}  # written by every call
    library = of_library(module)
    return {
        name: value
        for name, value in list(own.items())
        if name not in INTERNAL and name not in IRRELEVANT and name not in written and not (library and name.startswith("_"))
        and not (name == "forward" and has_our_forward(module))
        and not isinstance(value, (torch.Tensor, torch.nn.Module)) and not hasattr(value, "to_dict")
    }  # fmt: skip


class Code:
    """Digests of classes, and descriptions of the namespaces of their forwards, as long as nobody changes either."""

    def __init__(self) -> None:
        self._kinds: dict[type, str] = {}
        self._spaces: dict[str, str] = {}

    def of(self, kind: type[torch.nn.Module], names: Names) -> str:
        """The digest of one class, made at the first request for it."""
        if kind not in self._kinds:
            self._kinds[kind] = _code_of(kind, names, self._spaces)
        return self._kinds[kind]

    def of_libraries(self) -> Code:
        """The same without users' own classes, which are edited in place."""
        kept = Code()
        kept._kinds = {kind: digest for kind, digest in self._kinds.items() if not foreign_class(kind)}
        kept._spaces = self._spaces
        return kept


def traits(module: torch.nn.Module, names: Names, code: Code, written: Collection[str] = ()) -> str:
    """Everything but tensors by which one module computes, in words, and the order of its children. written: attributes left out, which its
    forward writes. code: grows."""
    hooks = [f"{getattr(hook, '__qualname__', '')} {names.of(hook)}" for hook in foreign_hooks(module)]
    wrapped = describe(found, names) if (found := wrapped_weights.settings(module)) else ""
    return f"{code.of(type(module), names)} {hooks} {list(module._modules)} {describe(settings(module, written), names)}{wrapped}"


def _code_of(kind: type[torch.nn.Module], names: Names, spaces: dict[str, str]) -> str:
    """Digest of a class: its forward, what else it is made of, the functions beside those of libraries, the release that it comes from.

    spaces: descriptions of the modules of libraries, by name; grows.
    """
    told = [f"{kind.__module__}.{kind.__qualname__} {release(kind.__module__)}"]
    told.append(describe((kind, kind.forward, kind.__call__), names))
    for space in [space for space in namespaces([kind]) if root(space.__name__) in _LIBRARIES]:
        if space.__name__ not in spaces:
            functions = {name: value for name, value in list(vars(space).items()) if isinstance(value, types.FunctionType)}
            spaces[space.__name__] = describe(functions, names)
        told.append(f"{space.__name__} {spaces[space.__name__]}")
    return blake3("\n".join(told).encode()).hexdigest(16)


def user_classes(modules: Iterable[torch.nn.Module], names: Names, written: Mapping[torch.nn.Module, Collection[str]]) -> str:
    """Modules of users' own classes in words: their code, the globals that it names, and their attributes."""
    own = [module for module in modules if foreign_class(type(module))]
    code = Code()
    return " ".join(f"{code.of(type(module), names)} {describe(settings(module, written.get(module, ())), names)}" for module in own)


def patched_functions() -> dict[str, Any]:
    """Functions in the place of torch's own, which modules of libraries call too."""
    found = vars(torch.nn.functional).items()
    return {name: value for name, value in list(found) if isinstance(value, types.FunctionType) and root(value.__module__) != "torch"}


def global_settings(names: Names) -> str:
    """The process's settings in words: hooks that torch calls for every module, its switches, and patches of its functions."""
    hooks = [hook for name in EVERY_MODULE for hook in getattr(torch_module, name).values()]
    return f"{[names.of(hook) for hook in hooks]} {switches()} {describe(patched_functions(), names)}"


def _precisions() -> tuple[str, ...]:
    """The precisions of fp32 products. torch has two ways to set them, and reading by the old one fails once the new one was used."""
    backends: Any = torch.backends
    if not hasattr(backends, "fp32_precision"):  # before torch 2.9
        return torch.get_float32_matmul_precision(), str(backends.cuda.matmul.allow_tf32)
    owners = (backends, backends.cuda.matmul, backends.mkldnn.matmul)
    return tuple("ieee" if owner.fp32_precision == "none" else owner.fp32_precision for owner in owners)


def switches() -> tuple[Any, ...]:
    """Settings of torch for the whole process that change the numbers of a product."""
    return (
        *_precisions(),
        torch.backends.mkldnn.enabled,
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction,
        torch.are_deterministic_algorithms_enabled(),
    )


def unrepeatable(modules: Iterable[torch.nn.Module]) -> str:
    """Why a second forward would compute other numbers than the first; empty if it would not."""
    for module in modules:
        own, kind = module.__dict__, type(module).__name__
        if own.get("max_norm") is not None:
            return f"{kind}.max_norm={own['max_norm']!r}: each look-up writes to the weights"
        if module.training:
            odds = {name: value for name, value in own.items() if name == "p" or "dropout" in name}
            if on := [name for name, value in odds.items() if isinstance(value, (int, float)) and value > 0]:
                return f"{kind}.{on[0]}={odds[on[0]]!r} in training mode: call model.eval()"
    return ""


def refuse_activated(modules: Iterable[torch.nn.Module]) -> None:
    """ModelError for an active adapter that starts at tokens of its own (PEFT's Activated LoRA): without PEFT's own call it is not on."""
    for module in modules:
        variants = module.__dict__.get("lora_variant") or {}
        for name in () if getattr(module, "disable_adapters", False) else getattr(module, "active_adapters", ()):
            if type(variants.get(name)).__name__.startswith("ALora"):
                raise ModelError(f"adapter {name!r} acts from its invocation tokens on (aLoRA), which is not supported: deactivate it")


def foreign(modules: Iterable[torch.nn.Module]) -> str:
    """Name code that takes part and is not ours, torch's, transformers' or PEFT's LoRA of a product, if any: its rows may be impure."""
    for module in modules:
        forward = type(module).forward if has_our_forward(module) else module.__dict__.get("forward", type(module).forward)
        source = getattr(forward, "__globals__", {}).get("__name__", "")
        lora = source.startswith("peft.tuners.lora") and type(module).__name__ != "Embedding"  # whose product is no linear layer's
        if not lora and root(source) not in ("torch", "transformers", "bitsandbytes", "agentcache"):
            return f"the forward of {type(module).__name__!r}, from {source!r}"
        for hook in (*foreign_hooks(module), *(wrapper for _, wrapper in wrapped_weights.wrappers(module))):
            return f"hook or wrapper {getattr(hook, '__qualname__', type(hook).__qualname__)!r} of {type(module).__name__!r}"
    return "a hook or patch of all modules" if patched_functions() or any(getattr(torch_module, name) for name in EVERY_MODULE) else ""
