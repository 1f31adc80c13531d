"""Format of a blob, byte by byte: a safetensors file whose header follows from the row it belongs to. Opens no files.

    length (8) | header, JSON | spaces up to a multiple of 4096 | layer 0 | layer 1 | ... | ids | macs      (docs/format-blobs.md)

Nothing in a header is believed: it is parsed into a row, the header that this row must have is built, and both must be the same bytes.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, get_args

import numpy as np

from ...errors import BlobError, StoreError
from ...kv import PAGE_TOKENS
from ...types import Precision
from ..keys import Role
from . import blob_files
from .schema import Row, widths_of

FORMAT = "2"
FRONT_MOST = 65536  # bytes before the data
MAC_BYTES = 32
SEAL_BYTES = 28  # what encrypting adds: 12 bytes of nonce, 16 of tag
DTYPES = {"float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16"}
ITEM_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "U32": 4, "I8": 1, "U8": 1}
MOST = {"place": 1 << 24, "tokens": PAGE_TOKENS, "role": max(Role), "checkpoint_bytes": 1 << 31}
PACKED = (  # in the order in which they are written
    "page_key", "parent", "namespace", "fingerprint", "regime", "place", "tokens", "numerics", "precision", "role", "dtype", "widths",
    "checkpoint_bytes", "created",
)  # fmt: skip
SAME = tuple(name for name in (*PACKED, "bytes") if name not in ("role", "created"))  # in a row and its blob: these two may change


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
    sections: tuple[int, ...]  # offset of each layer, of the checkpoints, and of what follows them
    sealed: bool  # sections and ids are encrypted
    ids: int  # offset
    macs: int  # offset
    bytes: int  # offset of the end

    def at(self, section: int) -> int:
        """Offset of a section in the file."""
        return self.sections[section]

    def size(self, section: int) -> int:
        """Bytes of a section in the file."""
        return self.sections[section + 1] - self.sections[section]


def plan(row: Row, sealed: bool) -> Plan:
    """The blob of this row. StoreError if its header would be too long to be read again."""
    sections = [_section(row, number, sealed) for number in range(row.sections)]
    sizes = [sum(part.bytes for part in section) for section in sections]
    tensors = [Tensor(f"{part.name}.{number}", part.dtype, part.shape) for number, section in enumerate(sections) for part in section]
    ids = Tensor("ids", "U8", (4 * row.tokens + SEAL_BYTES,)) if sealed else Tensor("ids", "U32", (row.tokens,))
    macs = Tensor("macs", "U8", (row.sections + 1, MAC_BYTES))
    header: dict[str, Any] = {"__metadata__": {"agentcache": FORMAT, "row": pack(row)}}
    at = 0
    for tensor in (*tensors, ids, macs):
        header[tensor.name] = {"dtype": tensor.dtype, "shape": tensor.shape, "data_offsets": (at, at + tensor.bytes)}
        at += tensor.bytes
    front = blob_files.front_of(header)
    if len(front) > FRONT_MOST:
        raise StoreError(
            f"namespace={row.namespace[:40]!r}...: a header of {len(front)} bytes, {FRONT_MOST} are possible; use shorter names"
        )
    end = len(front) + at
    starts = tuple(accumulate(sizes, initial=len(front)))
    return Plan(front, starts, sealed, end - macs.bytes - ids.bytes, end - macs.bytes, end)


def _section(row: Row, section: int, sealed: bool) -> list[Tensor]:
    found = parts(row, section)
    return [Tensor("sealed", "U8", (SEAL_BYTES + sum(part.bytes for part in found),))] if sealed else found


def parts(row: Row, section: int) -> list[Tensor]:
    """The tensors of a layer, in order, or the checkpoints after the last one; in clear."""
    if section == len(row.widths):
        return [Tensor("checkpoints", "U8", (row.checkpoint_bytes,))]
    heads, keys, values = row.widths[section]
    if row.precision == "exact":
        dtype = DTYPES[row.dtype]
        return [Tensor("keys", dtype, (heads, keys, row.tokens)), Tensor("values", dtype, (heads, row.tokens, values))]
    from . import quantize  # lossy stores only

    return [Tensor(*part) for part in quantize.parts(row.precision, heads, (keys, values), row.tokens)]


def parse(front: bytes, sealed: bool) -> tuple[Row, Plan]:
    """The row, without ids, that the bytes before the data tell of. BlobError if any of them is not as it must be."""
    try:
        header = json.loads(front[8:])
        row = unpack(header["__metadata__"]["row"])
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise BlobError(f"its header is no header of a page: {type(error).__name__}") from None
    entries = len(row.widths) * len(_section(row, 0, sealed)) + bool(row.checkpoint_bytes) + len(("__metadata__", "ids", "macs"))
    if len(header) != entries:  # before the header that belongs to the row is built: that must be no more work than reading this one
        raise BlobError(f"its header has {len(header)} entries, its metadata call for {entries}")
    try:
        made = plan(row, sealed)
    except StoreError as error:
        raise BlobError(str(error)) from None
    if made.front != front:
        raise BlobError("its header is not the one that its metadata call for")
    return row, made


def section_context(row: Row, section: int, sealed: bool) -> bytes:
    """Context with which a section's bytes are authenticated, and encrypted."""
    shape = row.widths[section] if section < len(row.widths) else (row.checkpoint_bytes,)
    about = [sealed, row.page_key.hex(), row.fingerprint, row.precision, section, row.dtype, *shape, row.tokens]
    return _json(["agentcache section", FORMAT, *about]) + b"\n"


def tail_context(row: Row, sealed: bool) -> bytes:
    """Context with which front, ids and the layers' MACs are authenticated, and the ids encrypted."""
    return _json(["agentcache page", FORMAT, sealed, row.page_key.hex()]) + b"\n"


def _json(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode("ascii")


def pack(row: Row) -> str:
    """Metadata of a row, from which the index can be rebuilt. JSON inside JSON: any namespace survives it, and other readers."""
    fields = {name: getattr(row, name) for name in PACKED}
    fields |= {"page_key": row.page_key.hex(), "parent": row.parent.hex(), "numerics": sorted(row.numerics), "created": float(row.created)}
    return _json(fields).decode("ascii")


def unpack(text: str) -> Row:
    """ValueError, KeyError or TypeError if it is not what `pack` writes."""
    found = json.loads(text)
    for name, most in MOST.items():
        value = found[name]
        if type(value) is not int or not (name == "tokens") <= value <= most:
            raise ValueError(name)
    found["widths"] = widths_of(found["widths"])
    strings = [found[name] for name in ("namespace", "fingerprint", "regime")] + found["numerics"]
    if not all(type(value) is str for value in strings) or found["dtype"] not in DTYPES or found["precision"] not in get_args(Precision):
        raise ValueError("names")
    if type(found["created"]) is not float or not math.isfinite(found["created"]):
        raise ValueError("created")
    found["page_key"], found["parent"] = bytes.fromhex(found["page_key"]), bytes.fromhex(found["parent"])
    if len(found["page_key"]) != 32 or len(found["parent"]) != 32:
        raise ValueError("keys")
    return Row(id=0, ids=np.zeros(0, dtype=np.uint32), **{**found, "numerics": frozenset(found["numerics"])})
