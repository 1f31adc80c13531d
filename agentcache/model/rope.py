"""Rotary position tables, per sequence and per regime. Knows nothing of pages or requests.

Most rotary types have one set of frequencies. Two have not: longrope switches sets at its original window, dynamic NTK changes with every
length beyond it. `transformers` picks the set by the largest position of a call, which is wrong for a pack of several sequences and for a
chunk of a long prompt; here the length of the whole sequence decides, and KV of different regimes is never mixed.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Mapping
from typing import Any

import torch

BY_LENGTH = frozenset({"longrope", "dynamic"})
_STRETCHED = frozenset({"linear", "dynamic", "yarn"})  # where `max_position_embeddings` may be that before it was stretched
_STEP = 4096  # positions by which a table grows


def longest(tokens: int, rope: Mapping[str, Any]) -> int:
    """The longest sequence of a model whose config says `tokens`, and these parameters of its rotary angles."""
    kind = rope.get("rope_type", rope.get("type"))
    if kind not in _STRETCHED:
        return tokens
    window = rope.get("original_max_position_embeddings") if kind != "dynamic" else None
    return max(tokens, int((window or tokens) * (rope.get("factor") or 1.0)))


def changes_by_length(kind: object) -> bool:
    """Whether a `rope_type`, or one of those by layer type, changes its frequencies with the length of the prompt."""
    return not BY_LENGTH.isdisjoint(kind.values() if isinstance(kind, dict) else (kind,))


def turn(keys: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Keys [..., head_dim, tokens], as pages hold them, rotated by cos and sin [pairs, tokens] of `Rotary.turns`: a new tensor.

    A pair is a dimension and the one half the rotated width further on; what is not rotated stays.
    """
    wide, pairs = keys.float(), len(cos)
    first, second = wide[..., :pairs, :], wide[..., pairs : 2 * pairs, :]
    turned = torch.cat((first * cos - second * sin, second * cos + first * sin), -2)
    rest = wide[..., 2 * pairs :, :]
    return (torch.cat((turned, rest), -2) if rest.shape[-2] else turned).to(keys.dtype)


class Rotary:
    """cos and sin of a model's own rotary module, as tables over positions.

    regime(length) names the frequencies that a sequence of that length uses; None if no single set can serve it.
    """

    def __init__(self, module: torch.nn.Module, config: Any, dtype: torch.dtype, device: torch.device) -> None:
        parameters = getattr(config, "rope_parameters", None) or {}
        self.kind: str = parameters.get("rope_type", "default")
        window = parameters.get("original_max_position_embeddings") if self.kind != "dynamic" else None
        self.original: int = int(window or config.max_position_embeddings)
        self._like = torch.empty(0, dtype=dtype, device=device)
        self._owners: Any = module
        self._adopt()

    def _adopt(self) -> None:
        """Copy the owner's module, since longrope and dynamic NTK change their frequencies whenever they are called."""
        self._version = self._edits()
        self._module = copy.deepcopy(self._owners)
        if self.kind == "dynamic":  # it may have grown already
            self._module.inv_freq = self._module.original_inv_freq.clone()
            self._module.max_seq_len_cached = self._module.original_max_seq_len
        self._tables: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}

    def _edits(self) -> tuple[Any, ...]:
        """What tables are made from, and by which code: values, not versions, which edits through `.data` leave as they are."""
        frequencies, how = self._owners.inv_freq, (getattr(self._owners, "attention_scaling", 1.0), self._owners.forward)
        if frequencies.device.type == "cpu":
            return frequencies.detach().contiguous().view(torch.uint8).numpy().tobytes(), how  # NumPy has no bf16
        return frequencies.data_ptr(), 0 if frequencies.is_inference() else frequencies._version, how

    @property
    def dims(self) -> int:
        """Leading dimensions of a head that are rotated."""
        return 2 * int(self._module.inv_freq.numel())

    @property
    def by_length(self) -> bool:
        """Whether frequencies depend on the length of the sequence."""
        return self.kind in BY_LENGTH

    def regime(self, length: int) -> str | None:
        """The name of the frequencies for a sequence of `length` tokens, "" where all share them; None beyond dynamic NTK's window."""
        if not self.by_length:
            return ""
        if length <= self.original:
            return "short"
        return "long" if self.kind == "longrope" else None

    def table(self, regime: str, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin [at least length, rotary dims] for positions from 0 on."""
        if not self.by_length and self._edits() != self._version:
            self._adopt()
        held = self._tables.get(regime)
        have = 0 if held is None else held[0].shape[0]
        if held is None or have < (min(length, self.original) if regime == "short" else length):
            stop = -(-length // _STEP) * _STEP
            fresh = self._compute(regime, have, stop if regime != "short" else min(stop, self.original))
            held = fresh if held is None else (torch.cat([held[0], fresh[0]]), torch.cat([held[1], fresh[1]]))
            self._tables[regime] = held
        return held

    def _compute(self, regime: str, start: int, stop: int) -> tuple[torch.Tensor, torch.Tensor]:
        positions = torch.arange(start, stop, device=self._like.device)
        if regime == "long":  # one position after the original window makes the module choose its long set
            positions = torch.cat([positions, positions.new_tensor([max(stop, self.original)])])
        with torch.inference_mode():
            cos, sin = self._module(self._like, positions[None])
        return cos[0, : stop - start].clone(), sin[0, : stop - start].clone()

    def turns(self, regime: str, source: int, target: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin [rotated pairs, count] in fp32 that turn keys of positions from `source` on into those from `target` on.

        The quotient, in fp64, of the numbers that the model itself multiplies by there: its angles and cosines are rounded, and a
        table of ideal angles errs by 2e-2 at 120k tokens. What the table is scaled by (yarn) cancels out.
        """
        cos, sin = self.table(regime, max(source, target) + count)
        pairs = self.dims // 2
        old, new = (torch.complex(cos[at : at + count, :pairs].double(), sin[at : at + count, :pairs].double()) for at in (source, target))
        turn = (new / old).T
        return turn.real.float().contiguous(), turn.imag.float().contiguous()

    def rows(self, spans: list[tuple[str, int, int]], rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin [rows, rotary dims] for packed spans (regime, start, stop), zero-filled after them."""
        parts = []
        for regime, start, stop in spans:
            cos, sin = self.table(regime, stop)
            parts.append((cos[start:stop], sin[start:stop]))
        cos, sin = parts[0] if len(parts) == 1 else (torch.cat([p[0] for p in parts]), torch.cat([p[1] for p in parts]))
        if short := rows - cos.shape[0]:
            cos, sin = (torch.cat([t, t.new_zeros(short, t.shape[1])]) for t in (cos, sin))
        return cos, sin


def rotary_of(decoder: Any, config: Any, dtype: torch.dtype, device: torch.device) -> Rotary | None:
    """Tables of a decoder's rotary angles, if one module makes them for all layers from positions alone."""
    module: Any = getattr(decoder, "rotary_emb", None)
    parameters = getattr(config, "rope_parameters", None) or {}
    if module is None or not hasattr(module, "inv_freq") or any(isinstance(value, dict) for value in parameters.values()):
        return None
    if list(inspect.signature(type(module).forward).parameters) != ["self", "x", "position_ids"]:
        return None
    at = torch.arange(4, device=device)[None]
    made = module(torch.empty(0, dtype=dtype, device=device), at)
    if not isinstance(made, tuple) or [t.shape[:2] for t in made] != [at.shape] * 2:
        return None
    return Rotary(module, config, dtype, device)


def unrotated(rotary: Rotary | None, places: tuple[int, int], keys: list[list[torch.Tensor]]) -> tuple[int, ...] | None:
    """Slots whose keys are the same at both places; None if others are not those of one place turned to the other."""
    if rotary is None:
        return None
    cos, sin = rotary.turns(rotary.regime(places[1] + 1) or "", *places, 1)
    still = []
    for slot, (before, after) in enumerate(zip(*keys, strict=True)):
        if torch.equal(before, after):
            still.append(slot)
        elif 2 * len(cos) > before.shape[-2] or not torch.allclose(turn(before, cos, sin).float(), after.float(), 0.05, 0.02):
            return None
    return tuple(still)
