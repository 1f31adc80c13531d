"""LoRA adapters of PEFT, applied beside the products of a model whose weights and modules stay as they are. Knows no requests.

    y = W x + b        LoRA, rsLoRA:  y + U D x        DoRA:  g (y - b) + b + g U D x,  g = magnitude / |W + U D| per output

D [rank, in] and U [out, rank] are fp32, U holds the scaling. Each row is computed by itself: an adapted row has the same bits in any pack.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from blake3 import blake3
from torch import nn
from torch.nn import functional

from .. import extras
from ..errors import ConfigError, ModelError
from .int8 import Int8Linear, wide
from .kernels import linear_compiled
from .kernels.linear_library import product_of_library
from .loading import UNREADABLE
from .numerics import safe_rows
from .wrapped_weights import is_wrapper

if TYPE_CHECKING:
    from .fingerprint import Fingerprint

REVISION = "1"  # of the formula above: raise it when its bits change
RANKS = 64  # ranks are padded with zeros to a multiple that compiled products take
_ROOT = "base_model.model."  # of names in a checkpoint of PEFT
_PARTS = {"lora_A.weight": "down", "lora_B.weight": "up", "lora_B.bias": "bias", "lora_magnitude_vector": "magnitude",
          "lora_magnitude_vector.weight": "magnitude"}  # fmt: skip
_READ = frozenset(  # settings of LoraConfig that are obeyed, or say nothing about the forward of a saved adapter
    "peft_type task_type base_model_name_or_path revision inference_mode auto_mapping peft_version r target_modules exclude_modules "
    "lora_alpha lora_dropout fan_in_fan_out bias use_rslora modules_to_save init_lora_weights layers_to_transform layers_pattern "
    "rank_pattern alpha_pattern use_dora alora_invocation_tokens lora_bias runtime_config eva_config".split()
)
_INITS = (True, False, None, "gaussian", "eva", "orthogonal")  # others change the base's weights when PEFT loads the adapter
Rows = slice | torch.Tensor


@dataclass(slots=True, eq=False)
class LowRank:
    """The adapter of one linear layer, fp32."""

    path: str
    # [rank, in]
    down: torch.Tensor
    # [out, rank], times the scaling
    up: torch.Tensor
    # [out], of the low-rank product
    bias: torch.Tensor | None = None
    # DoRA's norms of outputs [out]
    magnitude: torch.Tensor | None = None

    @property
    def tensors(self) -> list[torch.Tensor]:
        """All tensors that are there."""
        return [tensor for tensor in (self.down, self.up, self.bias, self.magnitude) if tensor is not None]


@dataclass(slots=True, eq=False)
class _Bound:
    """One adapter of a linear layer beside the weight that it acts on now."""

    low: LowRank
    # [out, rank], times DoRA's gain
    up: torch.Tensor
    bias: torch.Tensor | None
    # DoRA's gain [out], and the layer's own bias in fp32
    gain: torch.Tensor | None = None
    own: torch.Tensor | float = 0.0

    def join(self, y: torch.Tensor, delta: torch.Tensor) -> torch.Tensor:
        """The adapted outputs [rows, out] of outputs of the layer, in their type."""
        if self.bias is not None:
            delta = delta + self.bias
        if self.gain is not None:
            delta = (y.float() - self.own) * self.gain + self.own + delta
            return delta.to(y.dtype)
        return (y.float() + delta).to(y.dtype)


class Adapter:
    """An adapter on one model. Its weights are private copies: it never changes, and another one under the same name is another object.

    digest: of weights and settings. first_layer: layers below compute what the base computes. invocation: token ids from which an
    Activated LoRA acts; empty: it acts on all tokens. bytes: of its weights. pure: each row is computed by itself.
    name: the first one that it was added under.
    """

    def __init__(self, model: Any, layers: Any, known: Fingerprint | None, low_ranks: list[LowRank], invocation: Sequence[int]) -> None:
        self.invocation, self.name = tuple(invocation), ""
        self._modules = [(low, _linear(model, low, bool(invocation))) for low in low_ranks]
        if not self._modules:
            raise ConfigError("the adapter holds no LoRA weights: nothing to add")
        self._layers = layers
        places = {id(module): at for at, layer in enumerate(layers) for module in layer.modules()}
        outside = [low.path for low, module in self._modules if id(module) not in places or ".experts." in low.path]
        if outside:
            raise ModelError(f"the adapter targets {outside[0]!r}, which is no linear layer of the decoder: train it on those alone")
        self.first_layer = min(places[id(module)] for _, module in self._modules)
        self.digest = _digest([low for low, _ in self._modules], self.invocation)
        self.bytes = sum(tensor.nbytes for low, _ in self._modules for tensor in low.tensors)
        self._bound: dict[int, _Bound] = {}
        self._state: tuple[Any, ...] = ()
        self._seen: set[int] = set()
        self.refresh(known)

    @property
    def pure(self) -> bool:
        """Whether rows are computed by themselves, for the threads of the calling thread."""
        return all(_multiple(weight) for bound in self._bound.values() for weight in (bound.low.down, bound.up))

    def refresh(self, known: Fingerprint | None) -> None:
        """Bind to the weights of now, before a forward: an edit of the base's changes DoRA's gains. known: sees what torch does not."""
        weights = [module.weight for _, module in self._modules]
        state = (known.last_digest if known else "", *((id(w), 0 if w.is_inference() else w._version, w.data_ptr()) for w in weights))
        self._seen = set()
        if state != self._state:
            with torch.inference_mode():
                self._bound = {id(w): _bind(low, module) for w, (low, module) in zip(weights, self._modules)}
            self._state, self._held = state, weights  # held: no other weight gets their ids

    def add(self, rows: Rows, weights: Sequence[torch.Tensor], x: torch.Tensor, outs: Sequence[torch.Tensor]) -> None:
        """Adapt some rows of the products `outs` [rows, out] of x [rows, in] with these weights, in place."""
        found = [(bound, out) for weight, out in zip(weights, outs) if (bound := self._bound.get(id(weight))) is not None]
        if not found:
            return
        self._seen.update(id(weight) for weight in weights)
        some = x[rows].float()
        if not len(some):
            return
        inner = products(some, [bound.low.down for bound, _ in found])
        for (bound, out), narrow in zip(found, inner):
            (delta,) = products(narrow, [bound.up])
            out[rows] = bound.join(out[rows], delta)

    def low_rank(self, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None] | None:
        """D, U and DoRA's gain for a caller that multiplies by parts of this weight itself (latents.py); None if it is not adapted."""
        if (bound := self._bound.get(id(weight))) is None:
            return None
        self._seen.add(id(weight))
        return bound.low.down, bound.up, bound.gain

    def add_from(self, start: int, weight: torch.Tensor, x: torch.Tensor, y: torch.Tensor) -> None:
        """Adapt one product y [1, rows, out] of x [1, rows, in] from row `start` on, in place."""
        self.add(slice(max(0, start), None), [weight], x.flatten(0, -2), [y.view(-1, y.shape[-1])])

    def check_applied(self) -> None:
        """ModelError if a layer's product was computed without this adapter, in the forward since `refresh`."""
        lost = [bound.low.path for weight, bound in self._bound.items() if weight not in self._seen]
        if lost:
            raise ModelError(f"the adapter targets {lost[0]!r}, whose product its model does not compute as a linear layer")


def load(source: Any, model: Any, layers: Any, known: Fingerprint | None, scale: float) -> Adapter:
    """Read an adapter that PEFT saved, from a folder or the Hub, for a model. ConfigError, ModelError: it cannot be used, and why."""
    source = str(source)
    extras.library("peft", "0.18", "adapters", f"adapter {source!r}")
    from peft import LoraConfig, PeftConfig
    from peft.utils import load_peft_weights
    from peft.utils.other import get_pattern_key

    if any("peft_config" in vars(module) for module in model.modules()):
        raise ConfigError(f"adapter {source!r}: the model holds adapters of PEFT already; load the base model without them")
    try:
        config = PeftConfig.from_pretrained(source)
        weights = load_peft_weights(source, device="cpu")
    except UNREADABLE as error:
        why = str(error) or type(error).__name__
        raise ConfigError(f"adapter {source!r} cannot be loaded: {why}. Pass a folder that PEFT saved, or a Hub id") from error
    if not isinstance(config, LoraConfig):
        raise ConfigError(f"adapter {source!r} is of type {config.peft_type!s}: only LoRA, rsLoRA, DoRA and Activated LoRA are supported")
    _check(source, config, LoraConfig())

    def scaling(path: str, rank: int) -> float:
        alpha = config.alpha_pattern.get(get_pattern_key(config.alpha_pattern.keys(), path), config.lora_alpha)
        return scale * float(alpha) / (math.sqrt(rank) if config.use_rslora else rank)

    low_ranks = [_low_rank(path, parts, scaling) for path, parts in _by_path(source, weights).items()]
    return Adapter(model, layers, known, low_ranks, config.alora_invocation_tokens or ())


def _check(source: Any, config: Any, plain: Any) -> None:
    """Refuse what would be computed otherwise than by the formula above."""
    if config.init_lora_weights not in _INITS:
        raise ConfigError(f"adapter {source!r}: init_lora_weights={config.init_lora_weights!r} changes the base's weights: convert it")
    for name, value in vars(config).items():
        if name not in _READ and value and value != getattr(plain, name, None):
            raise ConfigError(f"adapter {source!r}: {name}={value!r:.100} is not supported; train it without")


def _by_path(source: Any, weights: Mapping[str, torch.Tensor]) -> dict[str, dict[str, torch.Tensor]]:
    """Tensors of a checkpoint by the path of their layer and their part; others refuse it."""
    found: dict[str, dict[str, torch.Tensor]] = {}
    for name, tensor in sorted(weights.items()):
        match = re.fullmatch(r"(.+)\.(lora_(?:A\.weight|B\.weight|B\.bias|magnitude_vector(?:\.weight)?))", name.removeprefix(_ROOT))
        if match is None:
            raise ConfigError(f"adapter {source!r} holds {name!r}, which is no LoRA of a linear layer: train it without")
        found.setdefault(match[1], {})[_PARTS[match[2]]] = tensor.detach().float().clone()
    return found


def _low_rank(path: str, parts: dict[str, torch.Tensor], scaling: Any) -> LowRank:
    if not {"down", "up"} <= parts.keys() or parts["down"].ndim != 2 or parts["up"].ndim != 2:
        raise ConfigError(f"the adapter of {path!r} has no two matrices: it is damaged")
    if not len(parts["down"]):
        raise ConfigError(f"the adapter of {path!r} has rank 0: it adds nothing; train it with a rank of at least 1")
    factor = scaling(path, len(parts["down"]))
    bias = parts.get("bias")
    return LowRank(path, parts["down"], parts["up"] * factor, None if bias is None else bias * factor, parts.get("magnitude"))


def _linear(model: nn.Module, low: LowRank, activated: bool) -> Any:
    """The layer that is adapted; ModelError if it is none that we can."""
    try:
        module: Any = model.get_submodule(low.path)
    except AttributeError as error:
        raise ModelError(f"the adapter targets {low.path!r}, which {type(model).__name__!r} has not: it is of another base") from error
    plain = type(module) is nn.Linear and not is_wrapper(module.weight)
    if type(module) not in (nn.Linear, Int8Linear) or (low.magnitude is not None and not plain):
        raise ModelError(f"the adapter targets {low.path!r}, a {type(module).__name__}, whose products cannot be adapted")
    parted = "expand_kv" in vars(model.get_submodule(low.path.rpartition(".")[0])) and low.path.endswith(".kv_b_proj")
    if parted and (activated or low.bias is not None):
        raise ModelError(f"the adapter targets {low.path!r} of latent attention: there it can neither be Activated LoRA nor have biases")
    shape, own = (len(low.up), low.down.shape[1]), tuple(module.weight.shape)
    if shape != own or low.up.shape[1] != len(low.down):
        raise ModelError(f"the adapter of {low.path!r} has shape {shape}, its layer {own}: it is of another base")
    return module


def _digest(low_ranks: Sequence[LowRank], invocation: Sequence[int]) -> str:
    """Identity of an adapter: what it computes, under whatever name."""
    seen = blake3(json.dumps([REVISION, list(invocation)]).encode())
    for low in low_ranks:
        for name in ("down", "up", "bias", "magnitude"):
            tensor = getattr(low, name)
            if tensor is not None:
                seen.update(f"{low.path} {name} {tuple(tensor.shape)}".encode())
                seen.update(tensor.contiguous().view(-1).view(torch.uint8).numpy().data)
    return seen.hexdigest(12)


def _bind(low: LowRank, module: Any) -> _Bound:
    weight, device = module.weight, module.weight.device
    short = -len(low.down) % RANKS if linear_compiled.takes(torch.empty(RANKS, RANKS)) else 0
    down, up = functional.pad(low.down, (0, 0, 0, short)), functional.pad(low.up, (0, short))
    bias, gain, own = low.bias, None, torch.zeros(())
    if low.magnitude is not None:
        gain = low.magnitude / torch.linalg.norm(wide(weight).cpu() + low.up @ low.down, dim=1)
        up, bias = up * gain[:, None], None if bias is None else bias * gain
        own = own if module.bias is None else module.bias.detach().float()
    ready = LowRank(low.path, down.contiguous().to(device), low.up)
    bias, gain = (None if tensor is None else tensor.to(device) for tensor in (bias, gain))
    return _Bound(ready, up.contiguous().to(device), bias, gain, own.to(device))


def _multiple(weight: torch.Tensor) -> int:
    """The multiple to which rows of x are padded for this weight; 0 if no padding makes them independent of each other."""
    if linear_compiled.takes(weight):
        return 1
    return safe_rows(*weight.shape, torch.get_num_threads()) if weight.device.type == "cpu" else 0


def products(x: torch.Tensor, weights: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """x [rows, in] times each weight [out, in] transposed, fp32."""
    if all(map(linear_compiled.takes, weights)):
        return linear_compiled.chains(x, [(weight, None) for weight in weights])
    if x.device.type != "cpu":
        return [functional.linear(x, weight) for weight in weights]
    done = []
    for weight in weights:
        padded = functional.pad(x, (0, 0, 0, -len(x) % (_multiple(weight) or 8)))
        done.append(product_of_library(padded.contiguous(), weight, None)[: len(x)])
    return done
