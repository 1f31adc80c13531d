"""Keys and values in fewer bits, by consent: stored numbers differ a little from computed ones. Knows no files.

    int8    one byte each. Scales: of keys per KV head and channel, over the tokens of the page; of values per KV head and token, over
            its channels, so that no token coarsens the values of others. x = q * scale
    int4    half a byte each. Lowest value and step of each group of 64 neighbours: tokens of one channel for keys, channels of one token
            for values. x = low + q * step. Byte j of a run holds number j below and number ceil(length / 2) + j above

Scales, lows and steps are float32. How far off an element can be: half a step, 1/254 of the largest magnitude under its scale (int8) or
1/30 of its group's range (int4), and the rounding to the page's dtype.
"""

from __future__ import annotations

import torch

from ...errors import StoreError

PRECISIONS = ("int8", "int4")
GROUP = 64
LARGEST = 1e37  # far above any key or value; below it no step overflows float32
Part = tuple[str, str, tuple[int, ...]]  # name, safetensors' dtype, shape


def parts(precision: str, kv_heads: int, widths: tuple[int, int], tokens: int) -> list[Part]:
    """The tensors of one layer with keys and values of these widths, in the order in which they are stored."""
    keys, values = (kv_heads, widths[0], tokens), (kv_heads, tokens, widths[1])
    if precision == "int8":
        scales: list[Part] = [("keys.channel_scale", "F32", (kv_heads, widths[0])), ("values.token_scale", "F32", (kv_heads, tokens))]
        return [*scales, ("keys", "I8", keys), ("values", "I8", values)]
    assert precision == "int4", precision
    found: list[Part] = []
    for name, shape in (("keys", keys), ("values", values)):
        groups = (*shape[:2], -(-shape[2] // GROUP))
        found += [(f"{name}.low", "F32", groups), (f"{name}.step", "F32", groups)]
    return [*found, *((name, "U8", (*shape[:2], -(-shape[2] // 2))) for name, shape in (("keys", keys), ("values", values)))]


def quantize(keys: torch.Tensor, values: torch.Tensor, precision: str) -> dict[str, torch.Tensor]:
    """One layer's keys [kv_heads, width, tokens] and values [kv_heads, tokens, width] as the tensors of `parts`.

    StoreError if anything is NaN, infinite or beyond all reason.
    """
    found: dict[str, torch.Tensor] = {}
    for name, given, scaled in (("keys", keys, "keys.channel_scale"), ("values", values, "values.token_scale")):
        x = given.float()
        if not float(x.abs().amax()) <= LARGEST:  # NaN is not either
            raise StoreError(f"{name} of a layer hold NaN, infinity or more than {LARGEST!r}: they cannot be stored as {precision}")
        if precision == "int8":
            scale = x.abs().amax(2, keepdim=True).div_(127)
            found[name] = _levels(x, scale, -127, 127).to(torch.int8)
            found[scaled] = scale.squeeze(2)
        else:
            found.update(_int4(name, x))
    shapes = parts(precision, keys.shape[0], (keys.shape[1], values.shape[2]), keys.shape[2])
    assert all(found[part].shape == shape for part, _, shape in shapes)
    return {part: found[part].contiguous() for part, _, _ in shapes}


def _levels(x: torch.Tensor, step: torch.Tensor, least: int, most: int) -> torch.Tensor:
    """x in steps, rounded; clamped before it is cast. Where nothing varies, 0."""
    return x.div(torch.where(step > 0, step, torch.ones_like(step))).round_().clamp_(least, most)


def _int4(name: str, x: torch.Tensor) -> dict[str, torch.Tensor]:
    length = x.shape[2]
    grouped = torch.nn.functional.pad(x, (0, -length % GROUP), mode="replicate") if length % GROUP else x
    grouped = grouped.unflatten(2, (-1, GROUP))
    low, high = grouped.aminmax(dim=3, keepdim=True)
    step = (high - low).div_(15)
    q = _levels(grouped - low, step, 0, 15).to(torch.uint8).flatten(2)[:, :, :length]
    half = -(-length // 2)
    packed = q[:, :, :half].clone()
    packed[:, :, : length - half] |= q[:, :, half:] << 4
    return {name: packed, f"{name}.low": low.squeeze(3), f"{name}.step": step.squeeze(3)}


def dequantize(found: dict[str, torch.Tensor], precision: str, keys: torch.Tensor, values: torch.Tensor) -> None:
    """Write what `quantise` made of a layer into `keys` [kv_heads, width, tokens] and `values` [kv_heads, tokens, width]."""
    for name, out, scaled in (("keys", keys, "keys.channel_scale"), ("values", values, "values.token_scale")):
        if precision == "int8":
            torch.mul(found[name], found[scaled].unsqueeze(2), out=out)
        else:
            _from_int4(found[name], found[f"{name}.low"], found[f"{name}.step"], out)


def _from_int4(packed: torch.Tensor, low: torch.Tensor, step: torch.Tensor, out: torch.Tensor) -> None:
    length = out.shape[2]
    half = packed.shape[2]
    q = torch.empty((*out.shape[:2], low.shape[2] * GROUP), dtype=torch.float32)
    q[:, :, :half] = packed & 15
    q[:, :, half:length] = (packed >> 4)[:, :, : length - half]
    q[:, :, length:] = 0
    x = q.unflatten(2, (-1, GROUP)).mul_(step.unsqueeze(3)).add_(low.unsqueeze(3))
    out.copy_(x.flatten(2)[:, :, :length])
