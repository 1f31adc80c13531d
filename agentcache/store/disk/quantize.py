"""Keys and values in fewer bits, by consent: stored numbers differ a little from computed ones. Knows no files.

    x = low + q * step        low and step, in float32, of each group of neighbours: tokens of one channel for keys, channels of one token
                              for values, so that no token coarsens the values of others
    int8                      q of a byte, groups of 128
    int4                      q of half a byte, groups of 64; byte j of a run holds number j below and number ceil(length / 2) + j above

How far off an element can be: half a step, 1/510 (int8) or 1/30 (int4) of its group's range, and the rounding to the page's dtype.
"""

from __future__ import annotations

import torch

from ...errors import StoreError

GROUP = {"int8": 128, "int4": 64}
LEVELS = {"int8": 255, "int4": 15}  # the largest q
LARGEST = 1e37  # far above any key or value; below it no step overflows float32
Part = tuple[str, str, tuple[int, ...]]  # name, safetensors' dtype, shape


def parts(precision: str, kv_heads: int, widths: tuple[int, int], tokens: int) -> list[Part]:
    """The tensors of one layer with keys and values of these widths, in the order in which they are stored."""
    scales: list[Part] = []
    numbers: list[Part] = []
    for name, runs, length in (("keys", widths[0], tokens), ("values", tokens, widths[1])):
        groups = (kv_heads, runs, -(-length // GROUP[precision]))
        scales += [(f"{name}.low", "F32", groups), (f"{name}.step", "F32", groups)]
        numbers.append((name, "U8", (kv_heads, runs, length if precision == "int8" else -(-length // 2))))
    return [*scales, *numbers]


def quantize(keys: torch.Tensor, values: torch.Tensor, precision: str) -> dict[str, torch.Tensor]:
    """One layer's keys [kv_heads, width, tokens] and values [kv_heads, tokens, width] as the tensors of `parts`.

    StoreError if anything is NaN, infinite or beyond all reason.
    """
    found: dict[str, torch.Tensor] = {}
    for name, given in (("keys", keys), ("values", values)):
        x, length, group = given.float(), given.shape[2], GROUP[precision]
        if x.numel() and not float(x.abs().amax()) <= LARGEST:  # NaN is not either
            raise StoreError(f"{name} of a layer hold NaN, infinity or more than {LARGEST!r}: they cannot be stored as {precision}")
        grouped = torch.nn.functional.pad(x, (0, -length % group), mode="replicate") if length % group else x
        grouped = grouped.unflatten(2, (-(-length // group), group))
        low, high = grouped.aminmax(dim=3, keepdim=True)
        step = (high - low).div_(LEVELS[precision])
        q = (grouped - low).div_(torch.where(step > 0, step, torch.ones_like(step))).round_()  # where nothing varies, 0
        q = q.clamp_(0, LEVELS[precision]).to(torch.uint8).flatten(2)[:, :, :length]
        found |= {name: q if precision == "int8" else _packed(q), f"{name}.low": low.squeeze(3), f"{name}.step": step.squeeze(3)}
    shapes = parts(precision, keys.shape[0], (keys.shape[1], values.shape[2]), keys.shape[2])
    assert all(found[part].shape == shape for part, _, shape in shapes)
    return {part: found[part].contiguous() for part, _, _ in shapes}


def dequantize(found: dict[str, torch.Tensor], precision: str, keys: torch.Tensor, values: torch.Tensor) -> None:
    """Write what `quantize` made of a layer into `keys` [kv_heads, width, tokens] and `values` [kv_heads, tokens, width]."""
    for name, out in (("keys", keys), ("values", values)):
        low, step, length, group = found[f"{name}.low"], found[f"{name}.step"], out.shape[2], GROUP[precision]
        q = torch.zeros((*out.shape[:2], low.shape[2] * group), dtype=torch.float32)
        if precision == "int8":
            q[:, :, :length] = found[name]
        else:
            half = found[name].shape[2]
            q[:, :, :half] = found[name] & 15
            q[:, :, half:length] = (found[name] >> 4)[:, :, : length - half]
        x = q.unflatten(2, (low.shape[2], group)).mul_(step.unsqueeze(3)).add_(low.unsqueeze(3))
        out.copy_(x.flatten(2)[:, :, :length])


def _packed(q: torch.Tensor) -> torch.Tensor:
    half = -(-q.shape[2] // 2)
    packed = q[:, :, :half].clone()
    packed[:, :, : q.shape[2] - half] |= q[:, :, half:] << 4
    return packed
