"""CUDA graphs: the forward of few rows, launched at once. Knows no requests.

A GPU is done with a decoding step long before Python has launched its hundreds of kernels. A graph is those of one forward, for a number
of rows; which rows and whose they are it reads from tensors of its own: ids, positions, angles, and the table of pages.

What may change under a graph: weights that are written to are read where they lie; one that lies elsewhere, and a model that is another
to its state token, end all graphs; a hook, a patch and an adapter are seen before each replay. A forward that waits for the device amid
its layers (`_Waits`), gathers pages, or keeps or takes in the inputs of a layer has no graph.
"""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ..errors import FAULTS
from ..kv import PAGE_TOKENS
from .attention import Batch, Part
from .kernels.device_table import DeviceTable, arrays, blocks_of, splits_of

log = logging.getLogger("agentcache")

ROWS = (1, 2, 4, 8, 16, 32, 64, 96, 128, 192, 256)
PARTS = 8  # of a pack in which some have several rows
PAGES = 1 << 12  # of all parts of a pack: two million tokens
_ONE = threading.Lock()  # PyTorch captures one graph at a time in a process
_COPIES = (torch.ops.aten._to_copy.default, torch.ops.aten.copy_.default)  # others take a number of another device as a constant
_BY_VALUE = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}

Tables = tuple[torch.Tensor, torch.Tensor] | None  # cos and sin [rows, dims]
# (batch, ids [rows], positions [rows], tables, wanted rows) -> logits [wanted, vocab]
Forward = Callable[[Batch, torch.Tensor, torch.Tensor, Tables, torch.Tensor], torch.Tensor]


class Graphs:
    """The graphs of one model, by size; made when a size is asked for again. Not thread safe: one thread owns the device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._graphs: dict[tuple[Any, ...], Any] = {}  # None: asked for once, False: cannot be made
        self._token: Any = None
        self._pool: Any = None
        self._spoilt = False

    def logits(
        self, forward: Forward, stepped: bool, batch: Batch, ids: torch.Tensor, positions: torch.Tensor, tables: Tables, wanted: Seq[int]
    ) -> torch.Tensor | None:
        """Logits [len(wanted), vocab] in fp32 of packed ids [rows], by a graph; None if none is made for such a forward.

        It writes the parts' keys and values. forward: what is captured; stepped: whether that is our own loop.
        """
        token, size = batch.token, None if self._spoilt else self._size(batch, wanted)
        if size is None or token is None or token.tensors_changed() or token.hooked() or token.relocated():
            return None
        if token is not self._token:
            self._graphs.clear()
            self._token = token
        key = (stepped, *size)
        if key not in self._graphs:
            self._graphs[key] = None  # a size of its own, as of one long tail, is seldom seen again
            return None
        if self._graphs[key] is None:
            self._graphs[key] = self._made(forward, size, batch, tables)
        graph = self._graphs[key]
        return graph.run(batch.parts, (ids, positions), tables, wanted) if graph else None

    def _size(self, batch: Batch, wanted: Seq[int]) -> tuple[int, ...] | None:
        """(rows, wanted rows, rows of the longest part, splits), in steps; None if such a forward has no graph."""
        parts, rows = batch.parts, batch.rows
        if not wanted or not parts or batch.later or batch.acting or rows > ROWS[-1] or parts[0].sequence.state is not None:
            return None
        most = max(part.count for part in parts)
        pages = sum(-(-(part.start + part.count) // PAGE_TOKENS) for part in parts)
        inner = any(part.sequence.spec.boundaries or part.sequence.routes is not None for part in parts)
        if (most > 1 and len(parts) > PARTS) or pages > PAGES or inner:
            return None
        kept = next(step for step in ROWS if step >= len(wanted))
        return next(step for step in ROWS if step >= rows), kept, min(most, 2), splits_of(parts, rows)

    def _made(self, forward: Forward, size: tuple[int, ...], batch: Batch, tables: Tables) -> Any:
        # Nothing else runs on the stream that is captured: what cuBLAS works in there belongs to the pool. Others end its memory of other
        # streams, such as torch.compile's graphs, and a replay would write into what has been given away since.
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle(), torch.cuda.Stream(self._device), torch.cuda.Stream(self._device)
        current = torch.cuda.current_stream(self._device)
        try:
            with _ONE:
                return _Graph(forward, size, batch, tables, self._device, self._pool)
        except FAULTS as error:
            torch.cuda.set_stream(current)  # PyTorch leaves the one of a capture that failed
            self._spoilt = isinstance(error, _CaptureError)
            log.info("no CUDA graph of %d rows: %s: %s", size[0], type(error).__name__, error)
            return False


class _CaptureError(RuntimeError):
    """A capture that failed amid the forward: PyTorch's allocator may take it for unended, so that no other is begun."""


class _Graph:
    """One of them. Its memory: ids, positions, wanted rows, table, angles, logits. pool: of memory, a stream to capture, and one beside."""

    def __init__(
        self, forward: Forward, size: tuple[int, ...], batch: Batch, tables: Tables, device: torch.device, pool: tuple[Any, Any, Any]
    ) -> None:
        self._rows, self._wanted, most, splits = size
        self._each = self._rows  # rows of a block: of the layer that wants the fewest
        layers = batch.parts[0].sequence.spec.layers
        self._angles = None if tables is None else torch.zeros(2, self._rows, *tables[0].shape[1:], dtype=tables[0].dtype, device=device)
        memory, stream, side = pool  # see `_made`
        current = torch.cuda.current_stream(device)

        def run(again: Any = None) -> torch.Tensor:
            own = Batch(batch.parts, self._rows, batch.numerics, fixed=True)
            own.table = DeviceTable(split, rows, pages, layers, most, splits, self._cut if again is None else lambda each: again)
            angles = None if self._angles is None else (self._angles[0], self._angles[1])
            return forward(own, ids, positions, angles, chosen)

        split, ids, positions, chosen, rows, _, pages = self._lay_out(1, layers, device)
        side.wait_stream(current)
        with torch.cuda.stream(side), _Waits():  # kernels are compiled; blocks say how large they have to be
            run()
        blocks = self._rows if most == 1 else -(-self._rows // self._each) + PARTS
        split, ids, positions, chosen, rows, cut, pages = self._lay_out(blocks, layers, device)
        cut = cut.view(-1, 4)
        side.wait_stream(current)
        with torch.cuda.stream(side):
            run(cut)
        current.wait_stream(side)
        self._graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(self._graph, memory, stream, capture_error_mode="thread_local"):
                self._logits = run(cut)
        except FAULTS as error:
            raise _CaptureError(f"{type(error).__name__}: {error}") from error

    def _cut(self, each: int) -> torch.Tensor:
        self._each = min(self._each, each)
        return self._given[:4].view(1, 4) * 0

    def _lay_out(self, blocks: int, layers: int, device: torch.device) -> Seq[torch.Tensor]:
        """Memory for a table of so many blocks, and for what else is given as integers."""
        self._sizes = [1, self._rows, self._rows, self._wanted, 2 * self._rows, 4 * blocks]
        sizes = [*self._sizes, 2 * layers * PAGES]
        self._given = torch.zeros(sum(sizes), dtype=torch.long, device=device)
        given = self._given.split(sizes)
        given[4].fill_(-1)  # nothing is written
        return given

    def run(self, parts: Seq[Part], given: Seq[torch.Tensor], tables: Tables, wanted: Seq[int]) -> torch.Tensor:
        """Logits of the wanted rows of these parts. given: ids and positions [rows]."""
        share, rows, pages, firsts = arrays(parts, self._rows)
        chosen = np.array([*wanted, *[wanted[-1]] * (self._wanted - len(wanted))])
        found = [share, *(one.numpy() for one in given), chosen, rows.ravel(), blocks_of(parts, firsts, self._each).ravel(), pages.ravel()]
        header = np.zeros(sum(self._sizes) + pages.size, dtype=np.int64)
        at = 0
        for one, size in zip(found, [*self._sizes, pages.size]):
            header[at : at + len(one)] = one
            at += size
        self._given[:at].copy_(torch.from_numpy(header))
        for own, angles in zip(() if self._angles is None else self._angles, tables or ()):
            own[: len(angles)].copy_(angles)
        self._graph.replay()
        return self._logits[: len(wanted)].clone()


class _Waits(TorchDispatchMode):
    """Raises at an operation that waits for the device, or reads or makes memory of another one: a graph cannot hold it, and a capture
    that fails at one leaves PyTorch's allocator astray."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace not in ("aten", "prims", "mkldnn") and "4bit" not in func._schema.name:
            raise RuntimeError(f"{func} may wait for the device")  # libraries' own operations do not tell what they do
        if func is torch.ops.aten.is_nonzero.default:
            if not _looks_for_packs():
                raise RuntimeError(f"{func} waits for the device")
            return func(*args, **(kwargs or {}))
        if func._can_decompose():  # without gradients, operations that are made of others come whole
            with self:
                return func.decompose(*args, **(kwargs or {}))
        given = [one for one in (*args, *(kwargs or {}).values()) if isinstance(one, torch.Tensor)]
        index = func.overloadpacket in (torch.ops.aten.index, torch.ops.aten.index_put, torch.ops.aten.index_put_)
        chosen = [one for one in args[1] if one is not None] if index else []
        waits = any(one.dtype in (torch.bool, torch.uint8) for one in chosen) if index else bool(_BY_VALUE & set(func.tags))
        made = func is torch.ops.aten.lift_fresh.default and given[0].device.type == "cuda"
        out = func(*args, **(kwargs or {}))
        places = {one.device.type for one in (*given, *chosen, out) if isinstance(one, torch.Tensor) and (one.ndim or func in _COPIES)}
        if waits or made or len(places) > 1:
            raise RuntimeError(f"{func} waits for the device")
        return out


def _looks_for_packs() -> bool:
    """Whether transformers looks for several sequences in one row, which it leaves out amid a capture."""
    frame: Any = sys._getframe()
    while frame is not None and frame.f_code.co_name != "find_packed_sequence_indices":
        frame = frame.f_back
    return frame is not None
