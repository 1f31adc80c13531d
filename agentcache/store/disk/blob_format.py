"""Format of a blob, byte by byte: a safetensors file whose header follows from the row it belongs to. Opens no files.

    length (8) | header, JSON | spaces up to a multiple of 4096 | layer 0 | layer 1 | ... | ids | macs      (docs/format-blobs.md)

Nothing in a header is believed: it is parsed into a row, the header that this row must have is built, and both must be the same bytes.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np

from ...errors import BlobError, StoreError
from ...kv import PAGE_TOKENS
from ..keys import Role
from . import quantize
from .schema import Row, widths_of

FORMAT = "1"
ALIGN = 4096  # where data starts: whole pages of memory and of most disks
FRONT_MOST = 65536  # bytes before the data
MAC_BYTES = 32
SEAL_BYTES = 28  # what encrypting adds: 12 bytes of nonce, 16 of tag
DTYPES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}
ITEM_BYTES = {"F32": 4, "F16": 2, "BF16": 2, "U32": 4, "I8": 1, "U8": 1}
PRECISIONS = ("exact", *quantize.PRECISIONS)
MOST = {"place": 1 << 24, "tokens": PAGE_TOKENS, "role": max(Role), "layers": 1 << 16, "kv_heads": 4096, "head_dim": 4096}
MOST_CHANNELS = 1 << 16  # of a layer's keys: 0.1 GB a page in fp32
KIND = ("dtype", "layers", "kv_heads", "head_dim", "checkpoint_layers", "widths")
SAME = ("page_key", "parent", "namespace", "fingerprint", "regime", "place", "tokens", "numerics", "precision", "bytes", *KIND)


@dataclass(frozen=True, slots=True)
class Tensor:
    """One entry of a header. dtype: as safetensors calls it."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]


@dataclass(frozen=True, slots=True)
class Plan:
    """Offsets in the blob of one row."""

    front: bytes  # all bytes before the data
    layers: tuple[int, ...]  # offset of each, and of what follows the last one
    sealed: bool  # layers and ids are encrypted
    ids: int  # offset
    macs: int  # offset
    bytes: int  # offset of the end

    def at(self, layer: int) -> int:
        """Offset of a layer in the file."""
        return self.layers[layer]

    def size(self, layer: int) -> int:
        """Bytes of a layer in the file."""
        return self.layers[layer + 1] - self.layers[layer]


def plan(row: Row, sealed: bool) -> Plan:
    """The blob of this row. StoreError if its header would be too long to be read again."""
    layers, own = [_layer(row, number, sealed) for number in range(row.layers)], row.layers - row.checkpoint_layers
    sizes = [sum(part.bytes for part in layer) for layer in layers]
    tensors = [Tensor(f"{part.name}.{number}", part.dtype, part.shape) for number, layer in enumerate(layers[:own]) for part in layer]
    tensors += [Tensor("checkpoints", "U8", (sum(sizes[own:]),))] if own < row.layers else []
    ids = Tensor("ids", "U8", (4 * row.tokens + SEAL_BYTES,)) if sealed else Tensor("ids", "U32", (row.tokens,))
    macs = Tensor("macs", "U8", (row.layers + 1, MAC_BYTES))
    header: dict[str, Any] = {"__metadata__": {"agentcache": FORMAT, "row": pack(row)}}
    at = 0
    for tensor in (*tensors, ids, macs):
        header[tensor.name] = {"dtype": tensor.dtype, "shape": tensor.shape, "data_offsets": (at, at + tensor.bytes)}
        at += tensor.bytes
    text = _json(header)
    size = -(-(8 + len(text)) // ALIGN) * ALIGN
    if size > FRONT_MOST:
        raise StoreError(f"namespace={row.namespace[:40]!r}...: a header of {size} bytes, {FRONT_MOST} are possible; use shorter names")
    front = (size - 8).to_bytes(8, "little") + text.ljust(size - 8)
    end = size + at
    starts = tuple(accumulate(sizes, initial=size))
    return Plan(front, starts, sealed, end - macs.bytes - ids.bytes, end - macs.bytes, end)


def shape_of(row: Row, layer: int) -> tuple[int, int, int]:
    """Heads, width of keys and width of values of a layer; one of checkpoints takes the room of the largest."""
    if not row.widths:
        return row.kv_heads, row.head_dim, row.head_dim
    return row.widths[layer] if layer < len(row.widths) else max(row.widths, key=lambda shape: shape[0] * (shape[1] + shape[2]))


def _layer(row: Row, layer: int, sealed: bool) -> tuple[Tensor, ...]:
    heads, keys, values = shape_of(row, layer)
    if row.precision == "exact":
        dtype = DTYPES[row.dtype]
        parts = [Tensor("keys", dtype, (heads, keys, row.tokens)), Tensor("values", dtype, (heads, row.tokens, values))]
    else:
        parts = [Tensor(*part) for part in quantize.parts(row.precision, heads, (keys, values), row.tokens)]
    return (Tensor("layer", "U8", (SEAL_BYTES + sum(part.bytes for part in parts),)),) if sealed else tuple(parts)


def parts(row: Row, layer: int) -> tuple[Tensor, ...]:
    """The tensors of a layer, in order, once it is decrypted."""
    return _layer(row, layer, sealed=False)


def stored_bytes(row: Row, layer: int) -> int:
    """Bytes of a layer, in clear."""
    return sum(part.bytes for part in parts(row, layer))


def parse(front: bytes, sealed: bool) -> tuple[Row, Plan]:
    """The row, without ids, that the bytes before the data tell of. BlobError if any of them is not as it must be."""
    try:
        header = json.loads(front[8:])
        row = unpack(header["__metadata__"]["row"])
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise BlobError(f"its header is no header of a page: {type(error).__name__}") from None
    try:
        made = plan(row, sealed)
    except StoreError as error:
        raise BlobError(str(error)) from None
    if made.front != front:
        raise BlobError("its header is not the one that its metadata call for")
    return row, made


def front_bytes(length: bytes, file_bytes: int) -> int:
    """Length of the part before the data, by its first 8 bytes."""
    size = 8 + int.from_bytes(length, "little")
    if len(length) != 8 or size % ALIGN or not ALIGN <= size <= min(FRONT_MOST, file_bytes):
        raise BlobError(f"its header has {size - 8} bytes in a file of {file_bytes}")
    return size


def layer_context(row: Row, layer: int, sealed: bool) -> bytes:
    """Context with which a layer's bytes are authenticated, and encrypted."""
    shape = shape_of(row, layer) if row.widths else (row.kv_heads, row.head_dim)
    what = ["agentcache layer", FORMAT, sealed, row.page_key.hex(), row.fingerprint, row.precision, layer, row.dtype, *shape, row.tokens]
    return _json(what) + b"\n"


def tail_context(row: Row, sealed: bool) -> bytes:
    """Context with which front, ids and the layers' MACs are authenticated, and the ids encrypted."""
    return _json(["agentcache page", FORMAT, sealed, row.page_key.hex()]) + b"\n"


def _json(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode("ascii")


def pack(row: Row) -> str:
    """Metadata of a row, from which the index can be rebuilt. JSON inside JSON: any namespace survives it, and other readers."""
    return _json(
        {
            "page_key": row.page_key.hex(),
            "parent": row.parent.hex(),
            "namespace": row.namespace,
            "fingerprint": row.fingerprint,
            "regime": row.regime,
            "place": row.place,
            "tokens": row.tokens,
            "numerics": sorted(row.numerics),
            "precision": row.precision,
            "role": row.role,
            "dtype": row.dtype,
            "layers": row.layers,
            "kv_heads": row.kv_heads,
            "head_dim": row.head_dim,
            "created": float(row.created),
        }
        | ({"checkpoint_layers": row.checkpoint_layers} if row.checkpoint_layers else {})
        | ({"widths": row.widths} if row.widths else {})
    ).decode("ascii")


def unpack(text: str) -> Row:
    """ValueError, KeyError or TypeError if it is not what `pack` writes."""
    found = json.loads(text)
    for name, most in MOST.items():
        value = found[name]
        if type(value) is not int or not (name in ("place", "role") and value == 0) and not 1 <= value <= most:
            raise ValueError(name)
    own = found.setdefault("checkpoint_layers", 0)
    if type(own) is not int or not 0 <= own < found["layers"]:
        raise ValueError("checkpoint_layers")
    if found["kv_heads"] * found["head_dim"] > MOST_CHANNELS:
        raise ValueError("head_dim")
    found["widths"] = widths_of(found.get("widths", []), found["layers"] - own, found["kv_heads"], found["head_dim"])
    strings = [found[name] for name in ("namespace", "fingerprint", "regime")] + found["numerics"]
    if not all(type(value) is str for value in strings) or found["dtype"] not in DTYPES or found["precision"] not in PRECISIONS:
        raise ValueError("names")
    if type(found["created"]) is not float or not math.isfinite(found["created"]):
        raise ValueError("created")
    found["page_key"], found["parent"] = bytes.fromhex(found["page_key"]), bytes.fromhex(found["parent"])
    if len(found["page_key"]) != 32 or len(found["parent"]) != 32:
        raise ValueError("keys")
    return Row(id=0, ids=np.zeros(0, dtype=np.uint32), **{**found, "numerics": frozenset(found["numerics"])})
