"""Notices that a model no longer computes what it did, from tensors, adapters, hooks, code and settings. Hashes nothing.

adapters_changed  the attributes of adapters                                             before each forward
glance, _layer    adapters and hooks around one product, and of one layer                amid each forward of transformers' own modules
tensors_changed   tensors and children as well                                           after each forward
changed           addresses, hooks, all attributes, forwards, namespaces and switches    for each request, and before pages are kept
edited            a sample of every tensor's values, for edits that torch does not count (`.data`, NumPy)    the same
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import chain
from types import MappingProxyType
from typing import Any

import torch
from torch.nn.modules import module as torch_module

from . import behaviour, wrapped_weights
from .description import Names
from .loading import decoder_of, layers_of
from .rope import changes_by_length

SAMPLED = 64  # values of each tensor; all of them change when an adapter is merged
_SCALES = ("absmax", "code", "offset")  # of a bitsandbytes quantisation
_HOLDERS = ("_parameters", "_buffers", "_modules")
_CONTAINERS = (torch.nn.ModuleList, torch.nn.Sequential, torch.nn.ModuleDict)
_LOADING = frozenset({"init_weights", "tie_weights"})  # of the base of all models: exchanged by transformers while it loads any
_version = operator.attrgetter("_version")
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def tensors_of(module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors one module computes with: parameters, buffers, plain attributes, and the scales that bitsandbytes keeps beside them."""
    for name, tensor in _held(module):
        yield from wrapped_weights.parts(name, tensor)


def _held(module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    own = module.__dict__
    for name, parameter in list(own["_parameters"].items()):
        if parameter is None:
            continue
        yield name, parameter
        state = getattr(parameter, "quant_state", None)
        for part in _SCALES:
            for owner, level in ((state, ""), (getattr(state, "state2", None), "2")):
                if isinstance(scale := getattr(owner, part, None), torch.Tensor):
                    yield f"{name}.{part}{level}", scale
        if isinstance(scale := getattr(parameter, "scale", None), torch.Tensor):  # of int8.py
            yield f"{name}.scale", scale
        scale = getattr(parameter, "SCB", None)
        scale = getattr(getattr(module, "state", None), "SCB", None) if scale is None else scale
        if isinstance(scale, torch.Tensor):
            yield f"{name}.SCB", scale
    by_length = changes_by_length(own.get("rope_type"))  # their inv_freq is of the last call
    if not by_length:
        yield from ((name, value) for name, value in list(own.items()) if isinstance(value, torch.Tensor))
    for name, buffer in list(own["_buffers"].items()):
        if buffer is not None and not (by_length and name == "inv_freq"):
            yield name, buffer


class StateToken:
    """What decides a model's numbers, as of the making of this token. Keeps references, so that no address or id is given out twice."""

    def __init__(self, model: Any, written: Mapping[torch.nn.Module, Collection[str]] = MappingProxyType({})) -> None:
        """written: what the model's own forward writes, by module; it is not looked at."""
        self._model = model
        self.modules: list[torch.nn.Module] = list(model.modules())
        self.tensors: list[torch.Tensor] = [
            tensor for module in self.modules for name, tensor in tensors_of(module) if name not in written.get(module, ())
        ]
        self._counted = [tensor for tensor in self.tensors if not tensor.is_inference()]
        self._placed = [tensor for tensor in self.tensors if _has_storage(tensor)]
        self._storages = [tensor.untyped_storage() for tensor in self._placed]
        self._versions = list(map(_version, self._counted))
        self._pointers = list(map(torch.Tensor.data_ptr, self._placed))
        owned = [module.__dict__ for module in self.modules]
        # dynamic NTK exchanges inv_freq in its own calls, longrope up to transformers 5.20; none of their other buffers
        by_length = [_Rest(own["_buffers"], frozenset({"inv_freq"})) for own in owned if changes_by_length(own.get("rope_type"))]
        held = [(own[name], written.get(module, ())) for module, own in zip(self.modules, owned) for name in _HOLDERS if own[name]]
        holders = [one for one, names in held if not one.keys() & names and not any(one is rest._own for rest in by_length)]
        # Tensors of many values cannot be compared, which `_Copies` takes for a change; one of a single value may equal another. Nor does
        # it see the order of a dictionary, in which layers run
        ordered = {id(m._modules) for m in self.modules if isinstance(m, _CONTAINERS) and len(m._modules) > 1}
        exact = [id(holder) in ordered or any(map(_is_number, holder.values())) for holder in holders]
        self._held = _Copies([*by_length, *(holder for holder, by_id in zip(holders, exact) if not by_id)])
        self._exact = [holder for holder, by_id in zip(holders, exact) if by_id]
        self._exact_held = list(chain.from_iterable(holder.values() for holder in self._exact))
        self._ids = list(map(id, self._exact_held))
        self._holders = holders
        self._orders = list(map(list, holders))
        hooks = [own[name] for own in owned for name in ("_forward_hooks", "_forward_pre_hooks")]
        hooks += [getattr(torch_module, name) for name in behaviour.EVERY_MODULE]
        self._unhooked = [each for each in hooks if not each]
        seen = [_Rest(own, frozenset(written[m])) if m in written else own for m, own in zip(self.modules, owned)]
        adapted = [*filter(None, hooks), *(own for module, own in zip(self.modules, seen) if not behaviour.of_library(module))]
        self._wrappers = [(each, vars(each)) for module in self.modules for _, each in wrapped_weights.wrappers(module)]
        self._quick = _Copies([*adapted, *chain.from_iterable(map(_inner, seen)), *(within for _, within in self._wrappers)])
        self._strayed, self._known = False, set(map(id, self.tensors))
        self._near: dict[int, _Near] = {}
        self._attends: _Near | None = None
        self._written = written
        self._layers = []
        for layer in layers_of(decoder_of(model)):
            inside = list(layer.modules())
            self._layers.append(_Near(inside, [m for m in inside if m not in written and not _multiplies_first(m)]))
            self._surround(layer, ())
        self._settings = _Copies([*seen, *filter(None, hooks)])
        self._kinds = list(map(type, self.modules))
        bases = dict.fromkeys(base for kind in self._kinds for base in kind.__mro__ if base is not object)
        told = [_Rest(vars(base), _LOADING) if _LOADING & vars(base).keys() else vars(base) for base in bases]
        self._code = _Copies([*told, *map(vars, behaviour.namespaces(self._kinds)), vars(torch.nn.functional)])
        self._names = Names()
        self._words = behaviour.user_classes(self.modules, self._names, written)
        self._switches = behaviour.switches()
        self._config = self._configured()
        self._sampled = [(tensor, sample) for tensor in self._placed if (sample := _sample(tensor)) is not None]
        self._values = [sample.clone() for _, sample in self._sampled]
        by_type: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
        for _, sample in self._sampled:
            by_type.setdefault((sample.dtype, sample.device), []).append(sample)
        self._joinable = list(by_type.values())
        self._joined = self._read()

    def adapters_changed(self) -> bool:
        """Whether another adapter is on, or scaled or merged otherwise. Costs nothing where there are none."""
        return not self._quick.hold()

    def glance(self, weight: torch.Tensor, own: bool = False) -> None:
        """Look at what may steer the product with this weight, as it is computed: a change may be taken back before the forward ends.

        own: it is a tensor of the model, unless another took its place; others may be made in the forward.
        """
        near = self._near.get(id(weight))
        if near is None and id(weight) not in self._known:
            near, self._strayed = self._attends, self._strayed or own
        if near is not None and not near.holds():
            self._strayed = True

    def glance_layer(self, layer: int) -> None:
        """Look at what may steer this layer, now that it attends; at all of them, where its number counts something else."""
        layers = self._layers[layer : layer + 1] or self._layers
        self._attends = layers[-1]
        if not all(known.holds() for known in layers):
            self._strayed = True

    def _surround(self, module: torch.nn.Module, above: tuple[torch.nn.Module, ...]) -> None:
        within = (*above, module)
        near = None
        for parameter in module._parameters.values():
            if parameter is not None:
                near = self._near[id(parameter)] = near or _Near(within, [m for m in within if m not in self._written])
        for child in filter(None, list(module._modules.values())):
            self._surround(child, within)

    def hooked(self) -> bool:
        """Whether a hook came to a module, or to all of them."""
        return any(self._unhooked)

    def relocated(self) -> bool:
        """Whether a tensor lies elsewhere."""
        return list(map(torch.Tensor.data_ptr, self._placed)) != self._pointers

    def tensors_changed(self) -> bool:
        """Whether a tensor was written to, a tensor, child or adapter is another, or was amid a forward. 0.02 ms for 28 layers."""
        try:
            return self._strayed or not (
                list(map(_version, self._counted)) == self._versions
                and self._held.hold()
                and list(map(id, chain.from_iterable(holder.values() for holder in self._exact))) == self._ids
                and self._quick.hold()
                and all(vars(each) is within for each, within in self._wrappers)  # torch swaps wrappers, and leaves their ids
            )
        except RuntimeError:  # a dictionary grows now
            return True

    def changed(self) -> bool:
        """Whether anything but values changed. 0.2 ms for 28 layers."""
        return (
            self.tensors_changed()
            or self.relocated()
            or self.hooked()
            or list(map(list, self._holders)) != self._orders
            or not self._settings.hold()
            or self.code_changed()
            or list(map(type, self.modules)) != self._kinds
            or self._configured() != self._config
            or behaviour.user_classes(self.modules, self._names, self._written) != self._words
        )

    def code_changed(self) -> bool:
        """Whether a class, a namespace of functions or one of torch's switches is another."""
        return not self._code.hold() or behaviour.switches() != self._switches

    def edited(self) -> bool:
        """Whether a sampled value is another. 0.5 ms for 28 layers."""
        return not all(map(torch.equal, self._read(), self._joined))

    def edited_silently(self) -> bool:
        """Whether a sampled value is another in a tensor whose version says that nobody wrote to it."""
        versions = dict(zip(map(id, self._counted), self._versions))
        return any(
            not torch.equal(sample, value) and versions.get(id(tensor), 0) == (0 if tensor.is_inference() else tensor._version)
            for (tensor, sample), value in zip(self._sampled, self._values)
        )

    def _read(self) -> list[torch.Tensor]:
        """The samples of all tensors, joined by type."""
        with torch.inference_mode(False), torch.no_grad():
            return [torch.cat([one if one.ndim == 1 else one.reshape(-1) for one in samples]) for samples in self._joinable]

    def _configured(self) -> str:
        return repr(list(vars(self._model.config).items()))


class _Copies:
    """Mappings and lists with a copy of each. Values are compared by identity first: one that is the same object costs nothing."""

    def __init__(self, containers: list[Any]) -> None:
        self._containers = containers
        self._copies = [one.copy() if hasattr(one, "copy") else dict(one) for one in containers]

    def hold(self) -> bool:
        """Whether all equal their copies."""
        try:
            return self._containers == self._copies
        except (RuntimeError, ValueError, TypeError):  # values that cannot be compared are not the same ones
            return False


class _Near:
    """Modules around one product or of one layer: where hooks may come, and adapters among some of them."""

    def __init__(self, hooked: Sequence[torch.nn.Module], modules: Sequence[torch.nn.Module]) -> None:
        hooks = [hooks for module in hooked for hooks in (module._forward_hooks, module._forward_pre_hooks)]
        self._unhooked = [each for each in hooks if not each]
        adapted = [module.__dict__ for module in modules if not behaviour.of_library(module)]
        self._adapted = _Copies([*adapted, *(value for own in adapted for value in _inner(own))]) if adapted else None
        self._parameters = _Copies([*filter(None, hooks), *(module._parameters for module in hooked if module._parameters)])

    def holds(self) -> bool:
        """Whether no hook came, and no adapter or parameter is another."""
        return not any(self._unhooked) and self._parameters.hold() and (self._adapted is None or self._adapted.hold())


def _multiplies_first(module: torch.nn.Module) -> bool:
    """Whether what this module computes begins with a product that is glanced at: an adapter around a plain linear does."""
    return type(next((part for part in module.modules() if part._parameters), None)) is torch.nn.Linear


class _Rest(dict[str, Any]):
    """Attributes of a module or class but for some of them, as they are whenever it is compared."""

    def __init__(self, own: Mapping[str, Any], without: frozenset[str]) -> None:
        self._own, self._without = own, without

    def items(self) -> Any:
        """The attributes that count, of now."""
        return [(name, value) for name, value in list(self._own.items()) if name not in self._without]

    def copy(self) -> dict[str, Any]:
        """The attributes that count, as of now."""
        return dict(self.items())

    def __eq__(self, other: object) -> bool:
        return self.copy() == other

    __hash__ = None  # type: ignore[assignment]


def _inner(own: dict[str, Any]) -> Iterator[Any]:
    """The dictionaries and lists among a module's attributes."""
    skipped = behaviour.INTERNAL | behaviour.IRRELEVANT
    return (value for name, value in own.items() if name not in skipped and isinstance(value, (dict, list)))


def _is_number(held: Any) -> bool:
    return isinstance(held, torch.Tensor) and held.numel() < 2


def _has_storage(tensor: torch.Tensor) -> bool:
    try:
        tensor.data_ptr()
        return tensor.untyped_storage().size() > 0
    except (RuntimeError, NotImplementedError):  # of a subclass that keeps its values elsewhere
        return False


def _sample(tensor: torch.Tensor) -> torch.Tensor | None:
    """A strided view of up to SAMPLED values, as integers, so that NaN equals itself; None for a type that has none."""
    integers = _INTEGERS.get(tensor.element_size())
    if integers is None or tensor.layout is not torch.strided:
        return None
    with torch.inference_mode(tensor.is_inference()), torch.no_grad():
        values = tensor.detach()
        if values.is_contiguous():
            flat = values.view(-1).view(integers)
            return flat[:: (len(flat) // SAMPLED) | 1]
        each = max(1, round(SAMPLED ** (1 / max(1, values.ndim))))
        return values[tuple(slice(None, None, -(-size // each) or 1) for size in values.shape)]
