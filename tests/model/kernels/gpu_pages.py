"""Attention over page tables by the kernels of a GPU, against gathered pages: on a GPU, or interpreted by Triton on a CPU. Holds no tests.

`TRITON_INTERPRET=1 python -m tests.model.kernels.gpu_pages`: on the CPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from agentcache.kv import Sequence
from agentcache.kv_spec import KVSpec
from agentcache.model.attention import Attention, Part, attend_gathered

PACKS = {"decode": [(1100, 1), (70, 1), (5, 1)], "prefill": [(1030, 40), (0, 30)], "long": [(1600, 3)]}
# kv heads, heads, width of keys, width of values, and how the layer attends
LAYERS: dict[str, tuple[int, int, int, int, dict[str, Any]]] = {
    "plain": (2, 4, 32, 32, {}),
    "window": (1, 7, 24, 40, {"window": 60}),
    "chunk, capped": (2, 6, 16, 16, {"chunk": 64, "softcap": 5.0}),
    "sinks": (2, 4, 64, 64, {"sinks": True}),
}


def parts_of(spec: KVSpec, lengths: list[tuple[int, int]]) -> Iterator[Part]:
    """Sequences whose first tokens have random keys and values."""
    (heads, width, other), at = spec.layer_widths[1], 0
    for start, count in lengths:
        sequence = Sequence(spec)
        sequence.reserve(start + count)
        if start:
            keys, values = (torch.randn(start, heads, size).to(spec.device, spec.dtype) for size in (width, other))
            sequence.write(1, 0, keys, values)
        yield Part(sequence, start, count, at)
        at += count


def check(dtype: torch.dtype, layer: str, pack: str, device: torch.device) -> None:
    """New keys and values are written where they belong, and rows attend as they do over gathered pages."""
    from agentcache.model.kernels import cuda
    from agentcache.model.kernels.device_table import table_of

    kv_heads, heads, width, other, given = LAYERS[layer]
    sinks = {"sinks": torch.randn(heads).to(device, dtype)} if given.get("sinks") else {}
    attn = Attention(width**-0.5, **{**given, **sinks})
    spec = KVSpec(2, kv_heads, max(width, other), dtype, device, widths=((kv_heads, width, other),) * 2 if width != other else ())
    parts = list(parts_of(spec, PACKS[pack]))
    rows = sum(part.count for part in parts) + 2  # two of padding
    query, key, value = (torch.randn(rows, *shape).to(device, dtype) for shape in ((heads, width), (kv_heads, width), (kv_heads, other)))
    table = table_of(parts, rows, device)
    cuda.write(table, 1, key, value)
    found = cuda.attend(table, 1, query, kv_heads, other, attn)
    assert not found[-2:].any(), "rows of no part are zeros"
    near = 1e-5 if dtype == torch.float32 else 0.02
    for part in parts:
        own = slice(part.offset, part.offset + part.count)
        keys, values = part.sequence.read(1, part.start, part.start + part.count)
        assert torch.equal(keys, key[own])
        assert torch.equal(values, value[own])
        torch.testing.assert_close(found[own], attend_gathered(part, 1, query[own], attn), rtol=near, atol=near)


def main() -> None:
    """Each kind of layer, and the trials by which kernels are chosen."""
    from agentcache.model.kernels import cuda

    cpu = torch.device("cpu")
    assert cuda.norms_agree(torch.float32, cpu)
    assert cuda.attention_agrees(torch.float32, cpu, 32, 48)
    for layer in LAYERS:
        check(torch.float32, layer, "decode", cpu)
    check(torch.float32, "window", "prefill", cpu)
    print("alike")


if __name__ == "__main__":
    main()
