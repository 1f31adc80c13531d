"""Experts as transformers' modules call them: registered beside theirs, which go on serving every call that is not a packed forward.

Each expert sees the tokens that chose it, and no padding rows of the forward. A token adds up its experts in the order in which it chose
them: its bits do not depend on the tokens beside it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, ExpertsInterface

from .attention import Batch
from .attention_interface import running

EXPERTS = "agentcache"
_STOCK = ("eager", "grouped_mm", "batched_mm")  # implementations that ours can stand beside


def adopt(model: Any, config: Any) -> str | None:
    """Make a model's modules call our experts; returns the implementation that they called before, None if they still do."""
    before: str = config._experts_implementation
    if before not in _STOCK:
        return None
    model.set_experts_implementation(f"{EXPERTS}_{before}")
    return before


def _register(before: str) -> None:
    def experts(module: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor) -> torch.Tensor:
        batch: Batch | None = getattr(running, "batch", None)
        for part in batch.parts if batch is not None else ():
            if part.sequence.routes is not None:
                part.sequence.routes.record(module, part.start, top_k_index[part.offset : part.offset + part.count])
        if batch is None or hidden_states.device.type != "cpu":
            stock = ALL_EXPERTS_FUNCTIONS.get_interface(before, type(module).forward.__wrapped__)
            return stock(module, hidden_states, top_k_index, top_k_weights)  # type: ignore[no-any-return]
        return _computed(batch, module, hidden_states, top_k_index, top_k_weights)

    ExpertsInterface.register(f"{EXPERTS}_{before}", experts)


def _computed(batch: Batch, module: Any, x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """The experts' sum for each row [rows, hidden]: of those that each has chosen [rows, experts], by its weights [rows, experts]."""
    real, count = sum(part.count for part in batch.parts), chosen.shape[1]
    names = ("gate_up_proj" if module.has_gate else "up_proj", "down_proj")
    for name in names if batch.token is not None else ():
        batch.token.glance(getattr(module, name), True)
    flat = chosen[:real].flatten()
    order = flat.argsort(stable=True)
    found = x.new_zeros(real * count, x.shape[1])
    stop = 0
    for expert, rows in enumerate(flat.bincount(minlength=module.num_experts).tolist()[: module.num_experts]):
        start, stop = stop, stop + rows
        if rows:
            at = order[start:stop]
            h = _product(module, names[0], expert, x[at // count])
            h = module._apply_gate(h) if module.has_gate else module.act_fn(h)
            found[at] = _product(module, names[1], expert, h)
    if getattr(module, "has_post_expert_norm", False):  # before transformers 5.20 none had one
        found = module.post_expert_norm(found)
    each = (found.view(real, count, -1) * weights[:real, :, None]).unbind(1)
    total = each[0]
    for one in each[1:]:
        total = total + one
    return functional.pad(total.to(x.dtype), (0, 0, 0, len(x) - real))


def _product(module: Any, name: str, expert: int, x: torch.Tensor) -> torch.Tensor:
    weight = getattr(module, name)[expert]
    bias = getattr(module, f"{name}_bias")[expert] if module.has_bias else None
    return functional.linear(x, weight.t() if module.is_transposed else weight, bias)  # by the mode of the forward


for _before in _STOCK:
    _register(_before)
