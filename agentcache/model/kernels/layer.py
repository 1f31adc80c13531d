"""A few rows through Llama-like layers by compiled functions. Knows nothing of pages: attention stays with its caller.

A decoding step is some hundred small operations per layer, and what small models wait for is their calls. Here a layer is two calls:

    enter    the gated product down and its residual (of the layer before), norm, q, k, v, their norms and rotary angles
    middle   the product of what attention gave, its residual, norm, gate and up

Products are those of linear_few.py, norms and angles those of norm_rope.py; what stands between them rounds as PyTorch's operations do.
So the bits are those of the ordinary operations: each new `Programs` is held against them on its model's first layer, and not used if one
bit differs. Rows of activations are stored numbers [rows, n]; what a product reads is words [rows, words].
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

from . import jit
from .ir import Code, Value
from .linear_compiled import scale_of, takes
from .linear_few import ROWS, product_code, scratch_numbers
from .norm_rope import heads_agree, heads_code, norm_code, norms_agree

_Block = Any  # a ctypes array of 64-bit fields
_Step = tuple[int, _Block, int]  # the address of a function, its argument block, threads
_LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj")
COUNTS = (1, 2, 4, 8)  # of rows: others are the next of them
_MLP = ("gate_proj", "up_proj", "down_proj")


def _each(code: Code, rows: int, n: int) -> Callable[[Callable[[Value, Value, Value], None]], None]:
    """Decorates the body of one loop over rows and vectors: body(row, index in the row, row · n + index)."""

    def write(body: Callable[[Value, Value, Value], None]) -> None:
        @code.loop(rows)
        def _(row: Value) -> None:
            first = row * n
            code.loop(n, code.lanes)(lambda index: body(row, index, first + index))

    return write


def _with_bias(code: Code, value: Value, bias: Value, index: Value, biased: bool) -> Value:
    """Plus a bias, which is added in fp32."""
    return value + code.load_numbers(bias.at(code.stored, index)) if biased else value


def spread(code: Code, rows: int, n: int, pairs: bool) -> None:
    """Writes the words that a product reads. Fields: x [rows, n], out [rows, words]."""
    x, out = code.pointers(2)

    @_each(code, rows, n)
    def _(_row: Value, _index: Value, at: Value) -> None:
        if pairs:
            out.at("i16", at).store(x.at("i16", at).load(f"<{code.lanes} x i16>", 2), 2)
        else:
            out.at("float", at).store(code.load_numbers(x.at(code.stored, at)))


def residual(code: Code, rows: int, n: int, biased: bool) -> None:
    """x += a product. Fields: x [rows, n], wide fp32 [rows, n], bias [n]."""
    x, wide, bias = code.pointers(3)

    @_each(code, rows, n)
    def _(_row: Value, index: Value, at: Value) -> None:
        added = code.rounded(_with_bias(code, wide.at("float", at).load(code.floats), bias, index, biased))
        place = x.at(code.stored, at)
        code.store_numbers(code.load_numbers(place) + added, place)


def narrow(code: Code, rows: int, n: int, total: int, biased: bool) -> None:
    """The first n of a product. Fields: wide fp32 [rows, total], bias [n], out [rows, n]."""
    wide, bias, out = code.pointers(3)

    @_each(code, rows, n)
    def _(row: Value, index: Value, at: Value) -> None:
        value = wide.at("float", row * total + index).load(code.floats)
        code.store_numbers(_with_bias(code, value, bias, index, biased), out.at(code.stored, at))


def gated(code: Code, rows: int, n: int, total: int, biased: bool, pairs: bool) -> None:
    """The input of the product down.

    Fields: activated gate [rows, n], wide fp32 [rows, total] from `up` on, its bias [n], out [rows, words].
    """
    gate, wide, bias, out = code.pointers(4)

    @_each(code, rows, n)
    def _(row: Value, index: Value, at: Value) -> None:
        value = wide.at("float", row * total + index).load(code.floats)
        value = code.load_numbers(gate.at(code.stored, at)) * code.rounded(_with_bias(code, value, bias, index, biased))
        if pairs:
            code.store_numbers(value, out.at("i16", at))
        else:
            out.at("float", at).store(code.rounded(value))


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
    """One model's layers for `rows` rows, with the buffers between them: for one thread at a time."""

    def __init__(self, layers: Any, rows: int, threads: int, pairs: bool, compiler: jit.Compiler) -> None:
        """pairs: products are of pairs of bf16 numbers."""
        self.sizes = sizes = Sizes.of(layers[0])
        self.rows, self.threads, self.pairs, self._compiler = rows, threads, pairs, compiler
        dtype = layers[0].input_layernorm.weight.dtype
        self._element = jit.NUMBERS[dtype]
        new = functools.partial(torch.zeros, dtype=dtype)
        room = functools.partial(torch.zeros, dtype=torch.float32)  # said aloud: the default is another while some thread loads a model
        with torch.inference_mode(False):
            self.x, self._normed = new(rows, sizes.hidden), new(rows, sizes.hidden)
            self.query, self.key, self.value = (new(rows, n, sizes.dim) for n in (sizes.heads, sizes.kv_heads, sizes.kv_heads))
            self.gate = new(rows, sizes.inner)
            self.cos, self.sin = new(rows, sizes.dim), new(rows, sizes.dim)
            self._input = room(rows * max(sizes.hidden, sizes.heads * sizes.dim, sizes.inner))
            self._scratch = room(threads * scratch_numbers(compiler.lanes, min(rows, ROWS[-1])))
            self._wide = room(rows * max((sizes.heads + 2 * sizes.kv_heads) * sizes.dim, 2 * sizes.inner, sizes.hidden))
        self._layers = list(layers)
        self._attended: list[_Block] = []
        self._activated: list[_Block] = []
        self._alive: list[list[_Step]] = []
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
            self._enter.append(self._program([*before, *self._queries(layer)]))
            self._middle.append(self._program(self._until_gate(layer)))
            before = self._down(layer)
        self._enter.append(self._program(before))
        self._run = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(self._compiler.function(program, self._element))

    def holds(self, layers: Any) -> bool:
        """True if these are the layers, in order, with weights where they were and the epsilons that norms had."""
        placed = list(layers) == self._layers and all(jit.address(owner[name]) == address for owner, name, address in self._held)
        return placed and all(norm["variance_epsilon"] == known for norm, known in self._epsilons)

    def enter(self, layer: int, activated: torch.Tensor | None = None) -> None:
        """From the activated gate [rows, inner] of the layer before to this one's query, key and value; after the last layer, to x."""
        if layer:
            assert activated is not None
            self._activated[layer - 1][0] = activated.data_ptr()
        self._run(ctypes.addressof(self._enter[layer]))

    def middle(self, layer: int, attended: torch.Tensor) -> None:
        """From what attention gave [rows, heads, head_dim] to x and the gate."""
        self._attended[layer][0] = attended.data_ptr()
        self._run(ctypes.addressof(self._middle[layer]))

    # what a layer consists of

    def _program(self, steps: list[_Step]) -> _Block:
        self._alive.append(steps)
        return jit.block(len(steps), *(field for at, block, threads in steps for field in (at, ctypes.addressof(block), threads)))

    def _step(self, write: jit.Writer, sizes: jit.Sizes, *fields: torch.Tensor | int | None, threads: int = 1) -> _Step:
        addressed = (field if isinstance(field, int) else jit.address(field) for field in fields)
        return self._compiler.function(write, self._element, *sizes), jit.block(*addressed), threads

    def _product(self, projection: Any, column: int, total: int) -> _Step:
        """Into the columns of `_wide` [rows, total] from `column` on."""
        outs, ins = projection.weight.shape
        tiles, threads = outs // self._compiler.lanes, self.threads if self.rows * outs * ins > jit.ALONE else 1
        count, words, scale = min(self.rows, ROWS[-1]), ins >> int(self.pairs), scale_of(projection.weight)
        fields = (projection.weight, self._input, self._column(column), self._scratch, scale, total, words, tiles, self.rows // count)
        return self._step(product_code, (count, self.pairs, scale is not None), *fields, threads=threads)

    def _column(self, column: int) -> int:
        return jit.address(self._wide) + 4 * column

    def _norm(self, module: Any) -> list[_Step]:
        n = self.sizes.hidden
        fields = (self.x, module.weight, self._normed, self.rows, jit.bits_of(module.variance_epsilon))
        return [self._step(norm_code, (n,), *fields), self._step(spread, (self.rows, n, self.pairs), self._normed, self._input)]

    def _narrow(self, projection: Any, column: int, total: int, out: torch.Tensor) -> _Step:
        n, bias = projection.weight.shape[0], projection.bias
        return self._step(narrow, (self.rows, n, total, bias is not None), self._column(column), bias, out)

    def _heads(self, heads: torch.Tensor, norm: Any) -> _Step:
        weight, epsilon = (None, 0) if norm is None else (norm.weight, jit.bits_of(norm.variance_epsilon))
        sizes = (heads.shape[1], self.sizes.dim, norm is not None)
        return self._step(heads_code, sizes, heads, weight, self.cos, self.sin, heads, self.rows, epsilon)

    def _queries(self, layer: Any) -> list[_Step]:
        block = layer.self_attn
        parts = ((block.q_proj, self.query), (block.k_proj, self.key), (block.v_proj, self.value))
        total, column = sum(projection.weight.shape[0] for projection, _ in parts), 0
        products, finish = [], []
        for projection, out in parts:
            products.append(self._product(projection, column, total))
            finish.append(self._narrow(projection, column, total, out))
            column += projection.weight.shape[0]
        for out, name in ((self.query, "q_norm"), (self.key, "k_norm")):
            finish.append(self._heads(out, getattr(block, name, None)))
        return [*self._norm(layer.input_layernorm), *products, *finish]

    def _residual(self, projection: Any) -> _Step:
        sizes = (self.rows, self.sizes.hidden, projection.bias is not None)
        return self._step(residual, sizes, self.x, self._wide, projection.bias)

    def _until_gate(self, layer: Any) -> list[_Step]:
        sizes, out, mlp = self.sizes, layer.self_attn.o_proj, layer.mlp
        attended = self._step(spread, (self.rows, sizes.heads * sizes.dim, self.pairs), 0, self._input)
        self._attended.append(attended[1])
        return [
            attended,
            self._product(out, 0, sizes.hidden),
            self._residual(out),
            *self._norm(layer.post_attention_layernorm),
            self._product(mlp.gate_proj, 0, 2 * sizes.inner),
            self._product(mlp.up_proj, sizes.inner, 2 * sizes.inner),
            self._narrow(mlp.gate_proj, 0, 2 * sizes.inner, self.gate),
        ]

    def _down(self, layer: Any) -> list[_Step]:
        sizes, mlp = self.sizes, layer.mlp
        biased = mlp.up_proj.bias is not None
        fields = (0, self._column(sizes.inner), mlp.up_proj.bias, self._input)
        activated = self._step(gated, (self.rows, sizes.inner, 2 * sizes.inner, biased, self.pairs), *fields)
        self._activated.append(activated[1])
        return [activated, self._product(mlp.down_proj, 0, sizes.hidden), self._residual(mlp.down_proj)]


def _fit(layers: Any) -> bool:
    """True if these layers are of one size, which the functions can take."""
    if not len(layers) or any(Sizes.of(layer) != Sizes.of(layers[0]) for layer in layers):
        return False
    sizes, dtype, products = Sizes.of(layers[0]), layers[0].input_layernorm.weight.dtype, (("self_attn", _LINEARS), ("mlp", _MLP))
    weights = [[getattr(getattr(layer, part), name).weight for part, names in products for name in names] for layer in layers]
    narrow = {id(weight) for of_layer in weights for weight in of_layer if weight.dtype == torch.int8}
    tensors = [tensor for layer in layers for tensor in layer.parameters() if id(tensor) not in narrow]
    alike = all(t.dtype == dtype and t.device.type == "cpu" and t.is_contiguous() for t in tensors)
    if not (alike and len(narrow) in (0, sum(map(len, weights))) and all(map(takes, weights[0]))):
        return False
    return norms_agree(dtype, sizes.hidden) and heads_agree(dtype, sizes.dim, sizes.normed)


class _Known(threading.local):
    def __init__(self) -> None:
        self.of: weakref.WeakKeyDictionary[Any, dict[tuple[int, int], Programs | None]] = weakref.WeakKeyDictionary()


_known = _Known()
Check = Callable[[Programs, Any], bool]


def programs(model: Any, rows: int, pairs: bool, agrees: Check) -> Programs | None:
    """This thread's programs for up to 8 rows of a model, if its layers and this machine allow it.

    pairs: products are of pairs of bf16 numbers. agrees: compares a new one with the ordinary operations.
    """
    found = jit.compiler() if rows <= COUNTS[-1] else None
    if found is None:
        return None
    layers, threads = model.model.layers, torch.get_num_threads()
    count = next(n for n in COUNTS if n >= rows)
    known = _known.of.setdefault(model, {})
    made = known.get((count, threads))
    if (made is None and (count, threads) in known) or (made is not None and made.holds(layers)):
        return made
    known[count, threads] = None
    if _fit(layers):
        made = Programs(layers, count, threads, pairs, found)
        known[count, threads] = made if agrees(made, layers[0]) else None
    return known[count, threads]
