"""What must be equal for KV to be valid, as a digest per layer, cumulative: layer l stands for all weights below and in it.

Tokenizer and chat template decide the ids, not the KV; the output head decides logits, not the KV: none of them is in it.
"""

from __future__ import annotations

import inspect
import json
import os
from collections.abc import Iterable, Iterator
from typing import Any

import torch
import transformers
from blake3 import blake3

from .rope import BY_LENGTH

REVISION = "1"  # of our own attention and layer code: raise it when their bits change
_IRRELEVANT = frozenset(
    "_name_or_path transformers_version torch_dtype dtype use_cache output_attentions output_hidden_states return_dict architectures "
    "attn_implementation _attn_implementation _attn_implementation_internal eos_token_id bos_token_id pad_token_id task_specific_params "
    "id2label label2id problem_type is_encoder_decoder tie_word_embeddings _experts_implementation_internal".split()
)
_NUMBERS = ("variance_epsilon", "scaling", "_active_adapter", "_disable_adapters", "merged_adapters")  # norms, attention, adapters
_PROCESS = os.urandom(8).hex()  # hooks cannot be compared between processes


def _relevant(config: Any) -> str:
    kept = {key: value for key, value in config.to_dict().items() if key not in _IRRELEVANT}
    return json.dumps(kept, sort_keys=True, default=str)


def _code_of(model: torch.nn.Module) -> str:
    """Digest of the modelling code, so that a patched or remote class does not share KV with another version."""
    try:
        return blake3(inspect.getsource(inspect.getmodule(type(model)) or type(model)).encode()).hexdigest(16)
    except (OSError, TypeError):
        return type(model).__qualname__


def base(model: Any, kernel: str) -> bytes:
    """Digest of everything but the layers: config, code, versions, kernel, device class, type, quantisation."""
    parts = [
        REVISION,
        type(model).__qualname__,
        _relevant(model.config),
        _code_of(model),
        transformers.__version__,
        torch.__version__,
        kernel,
        next(model.parameters()).device.type,
        str(model.dtype),
    ]
    return blake3("\0".join(parts).encode()).digest()


def _tensors(module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """What one module computes with: parameters, buffers, and the scales that bitsandbytes keeps beside them."""
    for name, parameter in module._parameters.items():
        if parameter is None:
            continue
        yield name, parameter
        state = getattr(parameter, "quant_state", None)
        for part in ("absmax", "code", "offset"):
            for owner, level in ((state, ""), (getattr(state, "state2", None), "2")):
                if isinstance(scale := getattr(owner, part, None), torch.Tensor):
                    yield f"{name}.{part}{level}", scale
        scale = getattr(parameter, "SCB", None)
        scale = getattr(getattr(module, "state", None), "SCB", None) if scale is None else scale
        if isinstance(scale, torch.Tensor):
            yield f"{name}.SCB", scale
    by_length = getattr(module, "rope_type", None) in BY_LENGTH  # their inv_freq is whatever the last call needed
    for name, buffer in module._buffers.items():
        if buffer is not None and not (by_length and name == "inv_freq"):
            yield name, buffer


def _traits(module: torch.nn.Module) -> tuple[Any, ...]:
    """What changes a module's results besides tensors: its class, hooks put into it, adapters' scaling and which of them are on."""
    own = module.__dict__
    hooks = [hook for held in (module._forward_hooks, module._forward_pre_hooks) for hook in held.values()]
    foreign = [
        (getattr(h, "__qualname__", ""), id(h), _PROCESS) for h in hooks if not getattr(h, "__module__", "").startswith("agentcache.")
    ]
    numbers = [(name, str(own[name])) for name in _NUMBERS if name in own]
    return (type(module).__qualname__, *foreign, *numbers)


def _absorb(digest: Any, modules: Iterable[tuple[str, torch.nn.Module]], skip: frozenset[int] = frozenset()) -> None:
    for path, module in modules:
        if id(module) in skip:
            continue
        digest.update(f"{path} {_traits(module)}".encode())
        for name, tensor in _tensors(module):
            digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
            digest.update(tensor.detach().to("cpu").contiguous().reshape(-1).view(torch.uint8).numpy().data)


def layers(model: Any, kernel: str) -> tuple[str, ...]:
    """Cumulative digests, one per decoder layer, over all weights and buffers that decide keys and values up to that layer."""
    decoder = model.get_decoder()
    running = blake3(base(model, kernel), max_threads=blake3.AUTO)
    later = [m for layer in decoder.layers for m in layer.modules()] + list(getattr(decoder, "norm", torch.nn.Module()).modules())
    _absorb(running, decoder.named_modules(), frozenset(map(id, later)))
    digests = []
    for layer in decoder.layers:
        _absorb(running, layer.named_modules())
        digests.append(running.hexdigest(16))
    return tuple(digests)


class Fingerprint:
    """A model's layer digests: hashed once, checked cheaply before each request, hashed again when weights changed.

    In-place edits of parameters, replaced tensors, adapters and hooks are noticed; edits through `.data` are not: call `invalidate`.
    """

    def __init__(self, model: Any, kernel: str) -> None:
        self._model = model
        self._kernel = kernel
        self._seen: tuple[Any, ...] = ()
        self._layers: tuple[str, ...] = ()

    def _state(self) -> tuple[Any, ...]:
        """Whatever moves when something of a digest does. Called for every request: a plain walk, a millisecond for 28 layers."""
        config = [value for name, value in vars(self._model.config).items() if name not in _IRRELEVANT]
        found: list[Any] = [repr(config), transformers.__version__]
        left = [self._model.get_decoder()]
        while left:
            module = left.pop()
            own = module.__dict__
            for tensor in own["_parameters"].values():
                if tensor is not None:
                    found += (tensor.data_ptr(), 0 if tensor.is_inference() else tensor._version)
            if own["_buffers"] and own.get("rope_type") not in BY_LENGTH:
                found += [
                    (buffer.data_ptr(), 0 if buffer.is_inference() else buffer._version)
                    for buffer in own["_buffers"].values()
                    if buffer is not None
                ]
            if own["_forward_hooks"] or own["_forward_pre_hooks"] or "scaling" in own or "variance_epsilon" in own:
                found.append(_traits(module))
            left += [child for child in own["_modules"].values() if child is not None]
            found.append(type(module))
        return tuple(found)

    @property
    def layers(self) -> tuple[str, ...]:
        """Cumulative digests of all layers, current as far as can be noticed."""
        state = self._state()
        if state != self._seen or not self._layers:
            self._layers = layers(self._model, self._kernel)
            self._seen = state
        return self._layers

    @property
    def whole(self) -> str:
        """The digest of the last layer: what whole pages need."""
        return self.layers[-1]

    def invalidate(self) -> None:
        """Declare that weights changed in a way that cannot be noticed."""
        self._layers = ()
