"""Rows through Llama-like layers by compiled functions. Knows nothing of pages: attention stays with its caller.

A layer is some forty small operations, and what few rows wait for is their calls. Here a layer is two calls:

    enter    the gated product down and its residual (of the layer before), norm, q, k, v, their norms and rotary angles
    middle   the product of what attention gave, its residual, norm, gate and up

Products are those of linear_few.py or linear_many.py, norms and angles those of norm_rope.py; what stands between them rounds as PyTorch's
operations do. So the bits are those of the ordinary operations: each new `Programs` is held against them on its model's first layer, and
not used if one bit differs. Rows of activations are stored numbers [rows, n]; what a product reads is words, by row or packed.
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

from . import jit, linear_few, linear_many
from .ir import Code, Value
from .linear_compiled import FEW_ROWS, fits, scale_of, takes
from .norm_rope import heads_agree, heads_code, norm_code, norms_agree

_Block = Any  # a ctypes array of 64-bit fields
_Step = tuple[int, _Block, int]  # the address of a function, its argument block, threads
_LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj")
_MLP = ("gate_proj", "up_proj", "down_proj")
MOST_ROWS = 252  # more wait for products, not for calls; of whole passes
TRIED = 19  # rows that new programs are held against the ordinary operations with, at most


def spread(code: Code, n: int, pairs: bool) -> None:
    """Writes the words that a product of few rows reads. Fields: x [rows, n], out [rows, words], rows."""
    (x, out), (rows,) = code.pointers(2), code.fields(1)

    @code.loop(rows * n, code.lanes)
    def _(at: Value) -> None:
        if pairs:
            out.at("i16", at).store(x.at("i16", at).load(f"<{code.lanes} x i16>", 2), 2)
        else:
            out.at("float", at).store(code.load_numbers(x.at(code.stored, at)))


def combine(code: Code, n: int, multiplies: bool) -> None:
    """x += y, or x *= y. Fields: x, y [rows, n], rows."""
    (x, y), (rows,) = code.pointers(2), code.fields(1)

    @code.shared(rows)
    def _(row: Value) -> None:
        @code.loop(n, code.lanes)
        def _(index: Value) -> None:
            place, other = (of.at(code.stored, row * n + index) for of in (x, y))
            one, two = code.load_numbers(place), code.load_numbers(other)
            code.store_numbers(one * two if multiplies else one + two, place)


def program(code: Code) -> None:
    """Runs functions one after another. Fields: how many, then for each its address, its argument block, and on how many threads."""
    (count,) = code.fields(1)

    @code.loop(count * 3, 3)
    def _(index: Value) -> None:
        function, block, threads = (code.args.at("i64", index + (1 + number)).load("i64", 8) for number in range(3))
        function, block, threads = function.to("ptr", "inttoptr"), block.to("ptr", "inttoptr"), threads.to("i32", "trunc")
        code.either(
            threads.equals(1),
            lambda: code.say(f"call void {function.name}(ptr {block.name})"),
            lambda: code.call("void", "GOMP_parallel", function, block, threads, code.constant("i32", 0)),
        )


@dataclass(frozen=True, slots=True)
class Sizes:
    """Sizes of every layer of a model."""

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


class Programs:
    """One model's layers for some rows, with the buffers between them: for one thread at a time."""

    def __init__(self, layers: Any, together: int, most: int, threads: int, pairs: bool, compiler: jit.Compiler) -> None:
        """together: rows of a pass over a weight. most: rows that there is room for. pairs: products are of pairs of bf16 numbers."""
        self.sizes = sizes = Sizes.of(layers[0])
        self._together, self._many, self._pairs = together, together == linear_many.ROWS, pairs
        self._threads, self._compiler = threads, compiler
        dtype = layers[0].input_layernorm.weight.dtype
        self._element = jit.NUMBERS[dtype]
        new = functools.partial(torch.zeros, dtype=dtype)
        room = functools.partial(torch.zeros, dtype=torch.float32)  # said aloud: the default is another while some thread loads a model
        self._own = linear_many.scratch_bytes(compiler.lanes, most // together)
        own = self._own // 4 if self._many else linear_few.scratch_numbers(compiler.lanes, together)
        with torch.inference_mode(False):
            self.x, self._normed, self._mixed = (new(most, sizes.hidden) for _ in range(3))
            self.query, self.key, self.value = (new(most, n, sizes.dim) for n in (sizes.heads, sizes.kv_heads, sizes.kv_heads))
            self.gate, self._up = new(most, sizes.inner), new(most, sizes.inner)
            self.cos, self.sin = new(most, sizes.dim), new(most, sizes.dim)
            self._input = room(most * max(sizes.hidden, sizes.heads * sizes.dim, sizes.inner))
            self._scratch = room(threads * own)
        self._layers = list(layers)
        self._attended: list[_Block] = []
        self._activated: list[_Block] = []
        self._alive: list[list[_Step]] = []
        self._counts: list[tuple[_Block, int, str]] = []  # fields that depend on rows
        self._held = [
            (module._parameters, name, jit.address(tensor))
            for layer in layers
            for module in layer.modules()
            for name, tensor in module._parameters.items()
        ]
        norms = [vars(module) for layer in layers for module in layer.modules() if hasattr(module, "variance_epsilon")]
        self._epsilons = [(norm, norm["variance_epsilon"]) for norm in norms]
        self._enter: list[_Block] = []
        self._middle: list[_Block] = []
        before: list[_Step] = []
        for layer in layers:
            self._last = self._program(before)
            self._enter.append(self._program([*before, *self._queries(layer)]))
            self._middle.append(self._program(self._until_gate(layer)))
            before = self._down(layer)
        self._enter.append(self._program(before))
        self._run = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(self._compiler.function(program, self._element))
        self.rows = 0

    def holds(self, layers: Any) -> bool:
        """True if these are the layers, in order, with weights where they were and the epsilons that norms had."""
        placed = list(layers) == self._layers and all(jit.address(owner[name]) == address for owner, name, address in self._held)
        return placed and all(norm["variance_epsilon"] == known for norm, known in self._epsilons)

    def resize(self, rows: int) -> None:
        """Compute so many rows from now on."""
        if rows != self.rows:
            self.rows = rows
            counts = {"rows": rows, "passes": -(-rows // self._together), "end": rows - 1}
            for block, index, name in self._counts:
                block[index] = counts[name]

    def load(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
        """Take the first layer's input [rows, hidden] and the angles of each row [rows, head_dim]."""
        for mine, given in ((self.x, x), (self.cos, cos), (self.sin, sin)):
            mine[: self.rows] = given

    def enter(self, layer: int, activated: torch.Tensor | None = None, queries: bool = True) -> None:
        """From the activated gate [rows, inner] of the layer before to this one's query, key and value; after the last layer, to x.

        queries: False stops at the last layer's input x.
        """
        if layer:
            assert activated is not None
            self._activated[layer - 1][1] = activated.data_ptr()
        self._run(ctypes.addressof(self._enter[layer] if queries else self._last))

    def middle(self, layer: int, attended: torch.Tensor) -> None:
        """From what attention gave [rows, heads, head_dim] to x and the gate."""
        self._attended[layer][0] = attended.data_ptr()
        self._run(ctypes.addressof(self._middle[layer]))

    def trial(self, activate: Callable[[torch.Tensor], torch.Tensor]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """The first layer, on numbers of many sizes: its input, what attention gave and angles; then all that it computes of them."""
        sizes, rows, random = self.sizes, self.rows, torch.Generator().manual_seed(1)
        given = []
        for shape in ((rows, sizes.hidden), (rows, sizes.heads, sizes.dim), (rows, 1, sizes.dim), (rows, 1, sizes.dim)):
            wide, spread = (torch.randn(shape, generator=random, dtype=torch.float32) for _ in range(2))
            given.append((wide * spread.exp()).to(self.x.dtype))
        self.load(given[0], given[2][:, 0], given[3][:, 0])
        self.enter(0)
        found = [part[:rows].clone() for part in (self.query, self.key, self.value)]
        self.middle(0, given[1])
        found += [self.x[:rows].clone(), self.gate[:rows].clone()]
        self.enter(1, activate(self.gate[:rows]))
        return given, [*found, self.x[:rows]]

    # what a layer consists of

    def _program(self, steps: list[_Step]) -> _Block:
        self._alive.append(steps)
        return jit.block(len(steps), *(field for at, block, threads in steps for field in (at, ctypes.addressof(block), threads)))

    def _step(self, write: jit.Writer, sizes: jit.Sizes, *fields: torch.Tensor | int | str | None, threads: int = 0) -> _Step:
        """threads: 0 for as many as many rows deserve."""
        block = jit.block(*(0 if isinstance(field, str) else field if isinstance(field, int) else jit.address(field) for field in fields))
        self._counts += [(block, index, field) for index, field in enumerate(fields) if isinstance(field, str)]
        return self._compiler.function(write, self._element, *sizes), block, threads or (self._threads if self._many else 1)

    def _words(self, x: torch.Tensor | None, n: int) -> _Step:
        """Of rows x [rows, n]: what products read."""
        if self._many:
            return self._step(linear_many.pack_code, (self._pairs, False), x, self._input, n >> int(self._pairs), "passes", "end")
        return self._step(spread, (n, self._pairs), x, self._input, "rows")

    def _product(self, projection: Any, out: torch.Tensor) -> _Step:
        weight, bias, scale = projection.weight, projection.bias, scale_of(projection.weight)
        (outs, ins), kind = weight.shape, (self._pairs, scale is not None, bias is not None)
        words = ins >> int(self._pairs)
        if self._many:
            counts = (outs, words, outs // linear_many.TILES[self._compiler.lanes], self._own, "passes", "end", 1)
            return self._step(linear_many.product_code, (*kind, False), weight, self._input, out, bias, self._scratch, scale, *counts)
        threads = self._threads if self._together * outs * ins > jit.ALONE else 1
        fields = (weight, self._input, out, bias, self._scratch, scale, outs, words, outs // self._compiler.lanes, "passes")
        return self._step(linear_few.product_code, (self._together, *kind), *fields, threads=threads)

    def _norm(self, module: Any) -> list[_Step]:
        n = self.sizes.hidden
        fields = (self.x, module.weight, self._normed, "rows", jit.bits_of(module.variance_epsilon))
        return [self._step(norm_code, (n,), *fields), self._words(self._normed, n)]

    def _heads(self, heads: torch.Tensor, norm: Any) -> _Step:
        weight, epsilon = (None, 0) if norm is None else (norm.weight, jit.bits_of(norm.variance_epsilon))
        sizes = (heads.shape[1], self.sizes.dim, norm is not None)
        return self._step(heads_code, sizes, heads, weight, self.cos, self.sin, heads, "rows", epsilon)

    def _queries(self, layer: Any) -> list[_Step]:
        block = layer.self_attn
        parts = ((block.q_proj, self.query), (block.k_proj, self.key), (block.v_proj, self.value))
        turned = [self._heads(out, getattr(block, name, None)) for out, name in ((self.query, "q_norm"), (self.key, "k_norm"))]
        return [*self._norm(layer.input_layernorm), *(self._product(*part) for part in parts), *turned]

    def _residual(self, projection: Any) -> list[_Step]:
        """x plus a product."""
        added = self._step(combine, (self.sizes.hidden, False), self.x, self._mixed, "rows")
        return [self._product(projection, self._mixed), added]

    def _until_gate(self, layer: Any) -> list[_Step]:
        attended, mlp = self._words(None, self.sizes.heads * self.sizes.dim), layer.mlp
        self._attended.append(attended[1])
        products = (self._product(mlp.gate_proj, self.gate), self._product(mlp.up_proj, self._up))
        return [attended, *self._residual(layer.self_attn.o_proj), *self._norm(layer.post_attention_layernorm), *products]

    def _down(self, layer: Any) -> list[_Step]:
        activated = self._step(combine, (self.sizes.inner, True), self._up, None, "rows")
        self._activated.append(activated[1])
        return [activated, self._words(self._up, self.sizes.inner), *self._residual(layer.mlp.down_proj)]


def _fit(layers: Any, tiled: int) -> bool:
    """True if these layers are of one size, which the functions can take. tiled: lanes, if products are of whole tiles."""
    if not len(layers) or any(Sizes.of(layer) != Sizes.of(layers[0]) for layer in layers):
        return False
    sizes, dtype, products = Sizes.of(layers[0]), layers[0].input_layernorm.weight.dtype, (("self_attn", _LINEARS), ("mlp", _MLP))
    weights = [[getattr(getattr(layer, part), name).weight for part, names in products for name in names] for layer in layers]
    narrow = {id(weight) for of_layer in weights for weight in of_layer if weight.dtype == torch.int8}
    tensors = [tensor for layer in layers for tensor in layer.parameters() if id(tensor) not in narrow]
    alike = all(t.dtype == dtype and t.device.type == "cpu" and t.is_contiguous() for t in tensors)
    if not (alike and len(narrow) in (0, sum(map(len, weights))) and all(map(takes, weights[0]))):
        return False
    if tiled and not all(fits(weight, tiled, 1) for weight in weights[0]):
        return False
    return norms_agree(dtype, sizes.hidden) and heads_agree(dtype, sizes.dim, sizes.normed)


class _Known(threading.local):
    def __init__(self) -> None:
        self.of: weakref.WeakKeyDictionary[Any, dict[tuple[int, int], Programs | None]] = weakref.WeakKeyDictionary()


_known = _Known()
Check = Callable[[Programs, Any], bool]


def programs(model: Any, rows: int, pairs: bool, agrees: Check) -> Programs | None:
    """This thread's programs for so many rows of a model, if its layers and this machine allow it.

    pairs: products are of pairs of bf16 numbers. agrees: compares new ones with the ordinary operations.
    """
    found = jit.compiler() if 0 < rows <= MOST_ROWS else None
    if found is None:
        return None
    layers, threads = model.model.layers, torch.get_num_threads()
    few = next((n for n in linear_few.ROWS if n >= rows), linear_few.ROWS[-1])
    together, most = (few, -(-FEW_ROWS // few) * few) if rows <= FEW_ROWS else (linear_many.ROWS, MOST_ROWS)
    known = _known.of.setdefault(model, {})
    made = known.get((together, threads))
    if (made is None and (together, threads) not in known) or (made is not None and not made.holds(layers)):
        known[together, threads] = made = None
        if _fit(layers, found.lanes if together == linear_many.ROWS else 0):
            made = Programs(layers, together, most, threads, pairs, found)
            made.resize(min(rows, TRIED))
            known[together, threads] = made = made if agrees(made, layers[0]) else None
    if made is not None:
        made.resize(rows)
    return made
