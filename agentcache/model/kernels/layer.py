"""A few rows through Llama-like layers by compiled functions. Knows nothing of pages: attention stays with its caller.

A decoding step is some hundred small operations per layer, and what small models wait for is their calls. Here a layer is two calls:

    enter    the gated product down and its residual (of the layer before), norm, q, k, v, their norms and rotary angles
    middle   the product of what attention gave, its residual, norm, gate and up

The functions are those of layer_code.py and the products of linear_few.py, so the bits are those of the ordinary operations: each
new `Programs` is held against them on its model's first layer, the sums of the norms by themselves, and not used if one bit differs.
"""

from __future__ import annotations

import ctypes
import functools
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from . import layer_code
from .linear_few import ALONE, BINARY, ROWS, kernels
from .norm_rope import bits_of, sums_agree

_Block = Any  # a ctypes array of 64-bit fields
_Step = tuple[int, _Block, int]  # the address of a function, its argument block, threads
_LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj")
_MLP = ("gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True, slots=True)
class Sizes:
    """Of every layer of a model."""

    hidden: int
    inner: int
    heads: int
    kv_heads: int
    dim: int
    normed: bool
    biased: tuple[bool, ...]  # q, k, v, o, gate, up, down

    @staticmethod
    def of(layer: Any) -> Sizes:
        block, mlp = layer.self_attn, layer.mlp
        projections = [getattr(block, name) for name in _LINEARS] + [getattr(mlp, name) for name in _MLP]
        return Sizes(
            block.q_proj.weight.shape[1],
            mlp.gate_proj.weight.shape[0],
            block.q_proj.weight.shape[0] // block.head_dim,
            block.k_proj.weight.shape[0] // block.head_dim,
            block.head_dim,
            hasattr(block, "q_norm"),
            tuple(projection.bias is not None for projection in projections),
        )


def _block(*fields: int) -> _Block:
    return (ctypes.c_int64 * len(fields))(*fields)


def _pointer(tensor: torch.Tensor | None) -> int:
    return tensor.data_ptr() if tensor is not None else 0


def _tensors(layers: Any) -> list[torch.Tensor]:
    return [parameter for layer in layers for parameter in layer.parameters()]


class Programs:
    """One model's layers for `rows` rows, with the buffers between them: for one thread at a time."""

    def __init__(self, layers: Any, rows: int, threads: int, order: Callable[[int], int]) -> None:
        """order: after how many inputs a product with so many adds up what it has."""
        self.sizes = sizes = Sizes.of(layers[0])
        self.rows, self.threads, self._order = rows, threads, order
        weight = layers[0].self_attn.q_proj.weight
        self._element = BINARY[weight.dtype]
        new = functools.partial(torch.zeros, dtype=weight.dtype)
        with torch.inference_mode(False):
            self.x = new(rows, sizes.hidden)
            self.query, self.key, self.value = (new(rows, n, sizes.dim) for n in (sizes.heads, sizes.kv_heads, sizes.kv_heads))
            self.gate = new(rows, sizes.inner)
            self.cos, self.sin = new(rows, sizes.dim), new(rows, sizes.dim)
            self._input = torch.zeros(rows * max(sizes.hidden, sizes.heads * sizes.dim, sizes.inner))
            self._wide = torch.zeros(rows * max((sizes.heads + 2 * sizes.kv_heads) * sizes.dim, 2 * sizes.inner, sizes.hidden))
        self._attended: list[_Block] = []
        self._activated: list[_Block] = []
        self._alive: list[list[_Step]] = []
        self._held = [
            (module._parameters, name, _pointer(tensor))
            for layer in layers
            for module in layer.modules()
            for name, tensor in module._parameters.items()
        ]
        self._enter: list[_Block] = []
        self._middle: list[_Block] = []
        before: list[_Step] = []
        for layer in layers:
            self._enter.append(self._program([*before, *self._queries(layer)]))
            self._middle.append(self._program(self._until_gate(layer)))
            before = self._down(layer)
        self._enter.append(self._program(before))
        found = kernels()
        assert found is not None
        self._run = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(found.compiled("program", layer_code.program))

    def holds(self) -> bool:
        """Whether the weights are where they were."""
        return all(_pointer(owner[name]) == address for owner, name, address in self._held)

    def enter(self, layer: int, activated: torch.Tensor | None = None) -> None:
        """From the activated gate [rows, inner] of the layer before to this one's query, key and value; behind the last layer, to x."""
        if layer:
            assert activated is not None
            self._activated[layer - 1][0] = activated.data_ptr()
        self._run(ctypes.addressof(self._enter[layer]))

    def middle(self, layer: int, attended: torch.Tensor) -> None:
        """From what attention gave [rows, heads, head_dim] to x and the gate."""
        self._attended[layer][0] = attended.data_ptr()
        self._run(ctypes.addressof(self._middle[layer]))

    # what a layer consists of

    def _function(self, kind: Callable[..., str], *sizes: int | bool) -> int:
        found = kernels()
        assert found is not None
        source = functools.partial(kind, found.lanes, self._element, self.rows, *sizes)
        return found.compiled(f"{kind.__name__} {self._element} {self.rows} {sizes}", source)

    def _program(self, steps: list[_Step]) -> _Block:
        program = _block(len(steps), *(field for at, block, threads in steps for field in (at, ctypes.addressof(block), threads)))
        self._alive.append(steps)
        return program

    def _product(self, projection: Any, out: int, total: int) -> _Step:
        found = kernels()
        assert found is not None
        outs, ins = projection.weight.shape
        threads = self.threads if self.rows * outs * ins > ALONE else 1
        block = _block(_pointer(projection.weight), _pointer(self._input), out, total, ins, self._order(ins), outs // found.lanes, 1)
        return found.product(self.rows, self._element), block, threads

    def _norm(self, module: Any) -> _Step:
        block = _block(_pointer(self.x), _pointer(module.weight), bits_of(module.variance_epsilon), _pointer(self._input))
        return self._function(layer_code.norm, self.sizes.hidden), block, 1

    def _queries(self, layer: Any) -> list[_Step]:
        sizes, block = self.sizes, layer.self_attn
        total = (sizes.heads + 2 * sizes.kv_heads) * sizes.dim
        at = _pointer(self._wide)
        steps = [self._norm(layer.input_layernorm)]
        finish = []
        parts = (("q", sizes.heads, self.query), ("k", sizes.kv_heads, self.key), ("v", sizes.kv_heads, self.value))
        for name, count, out in parts:
            projection = getattr(block, f"{name}_proj")
            steps.append(self._product(projection, at, total))
            normed, rotated = sizes.normed and name != "v", name != "v"
            module = getattr(block, f"{name}_norm") if normed else None
            weight, epsilon = (_pointer(module.weight), bits_of(module.variance_epsilon)) if module is not None else (0, 0)
            fields = _block(at, _pointer(projection.bias), weight, epsilon, _pointer(self.cos), _pointer(self.sin), _pointer(out))
            has_bias = projection.bias is not None
            finish.append((self._function(layer_code.heads, total, count, sizes.dim, has_bias, normed, rotated), fields, 1))
            at += 4 * count * sizes.dim
        return steps + finish

    def _residual(self, projection: Any) -> _Step:
        fields = _block(_pointer(self.x), _pointer(self._wide), _pointer(projection.bias))
        return self._function(layer_code.residual, self.sizes.hidden, projection.bias is not None), fields, 1

    def _until_gate(self, layer: Any) -> list[_Step]:
        sizes, out, mlp = self.sizes, layer.self_attn.o_proj, layer.mlp
        self._attended.append(_block(0, _pointer(self._input)))
        wide, total = _pointer(self._wide), 2 * sizes.inner
        fields = _block(wide, _pointer(mlp.gate_proj.bias), _pointer(self.gate))
        return [
            (self._function(layer_code.spread, sizes.heads * sizes.dim), self._attended[-1], 1),
            self._product(out, wide, sizes.hidden),
            self._residual(out),
            self._norm(layer.post_attention_layernorm),
            self._product(mlp.gate_proj, wide, total),
            self._product(mlp.up_proj, wide + 4 * sizes.inner, total),
            (self._function(layer_code.narrow, sizes.inner, total, mlp.gate_proj.bias is not None), fields, 1),
        ]

    def _down(self, layer: Any) -> list[_Step]:
        sizes, mlp = self.sizes, layer.mlp
        wide = _pointer(self._wide)
        self._activated.append(_block(0, wide + 4 * sizes.inner, _pointer(mlp.up_proj.bias), _pointer(self._input)))
        gated = self._function(layer_code.gated, sizes.inner, 2 * sizes.inner, mlp.up_proj.bias is not None)
        return [(gated, self._activated[-1], 1), self._product(mlp.down_proj, wide, sizes.hidden), self._residual(mlp.down_proj)]


def _fit(layers: Any, lanes: int) -> bool:
    """Whether these layers are of one size, which the functions can take."""
    if not len(layers) or any(Sizes.of(layer) != Sizes.of(layers[0]) for layer in layers):
        return False
    sizes, tensors = Sizes.of(layers[0]), _tensors(layers)
    widths = (sizes.hidden, sizes.inner, sizes.heads * sizes.dim, sizes.kv_heads * sizes.dim, sizes.dim)
    alike = all(t.dtype == tensors[0].dtype and t.device.type == "cpu" and t.is_contiguous() for t in tensors)
    if not (alike and tensors[0].dtype in BINARY and all(n % (2 * lanes) == 0 for n in widths)):
        return False
    return all(sums_agree(tensors[0].dtype, n) for n in ({sizes.hidden, sizes.dim} if sizes.normed else {sizes.hidden}))


class _Kept(threading.local):
    def __init__(self) -> None:
        self.of: weakref.WeakKeyDictionary[Any, dict[tuple[int, int], Programs | None]] = weakref.WeakKeyDictionary()


_kept = _Kept()
Check = Callable[[Programs, Any], bool]


def programs(model: Any, rows: int, order: Callable[[int], int | None], agrees: Check) -> Programs | None:
    """This thread's programs for up to 8 rows of a model, if its layers and this machine allow it.

    order: see `Programs`, None if a product cannot be compiled. agrees: compares a new one with the ordinary operations.
    """
    found = kernels() if rows <= ROWS[-1] else None
    if found is None:
        return None
    layers, threads = model.model.layers, torch.get_num_threads()
    count = next(n for n in ROWS if n >= rows)
    known = _kept.of.setdefault(model, {})
    kept = known.get((count, threads))
    if kept is not None and kept.holds():
        return kept
    if kept is None and (count, threads) in known:
        return None
    known[count, threads] = None
    if _fit(layers, found.lanes):
        sizes = Sizes.of(layers[0])
        orders = {ins: order(ins) for ins in (sizes.hidden, sizes.inner, sizes.heads * sizes.dim)}
        if all(orders.values()):
            made = Programs(layers, count, threads, lambda ins: orders[ins] or 0)
            known[count, threads] = made if agrees(made, layers[0]) else None
    return known[count, threads]
