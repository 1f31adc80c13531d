"""What must be equal for KV to be valid, as a digest per layer, cumulative: layer l stands for all weights below and in it.

Tokenizer and chat template decide the ids, not the KV; the output head decides logits, not the KV: none of them is in it.
"""

from __future__ import annotations

import inspect
import json
from typing import Any

import torch
import transformers
from blake3 import blake3

_IRRELEVANT = frozenset(
    "_name_or_path transformers_version torch_dtype dtype use_cache output_attentions output_hidden_states return_dict architectures "
    "attn_implementation _attn_implementation eos_token_id bos_token_id pad_token_id task_specific_params id2label label2id "
    "problem_type is_encoder_decoder tie_word_embeddings".split()
)


def _relevant(config: Any) -> str:
    kept = {key: value for key, value in config.to_dict().items() if key not in _IRRELEVANT}
    return json.dumps(kept, sort_keys=True, default=str)


def _code_of(model: torch.nn.Module) -> str:
    """Digest of the modelling code, so that a patched or remote class does not share KV with another version."""
    try:
        return blake3(inspect.getsource(inspect.getmodule(type(model)) or type(model)).encode()).hexdigest(16)
    except (OSError, TypeError):
        return type(model).__qualname__


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    flat = tensor.detach().to("cpu").contiguous().reshape(-1).view(torch.uint8)
    return memoryview(flat.numpy())


def _absorb(digest: Any, tensors: list[tuple[str, torch.Tensor]]) -> None:
    for name, tensor in tensors:
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(_bytes_of(tensor))


def base(model: Any, kernel: str, regime_free: str = "") -> bytes:
    """Digest of everything but weights: config, code, versions, kernel, device class, type, quantisation, adapters and their scaling."""
    parts = [
        type(model).__qualname__,
        _relevant(model.config),
        _code_of(model),
        transformers.__version__,
        torch.__version__,
        kernel,
        next(model.parameters()).device.type,
        str(model.dtype),
        str(getattr(model.config, "quantization_config", None)),
        repr(getattr(model, "active_adapters", None) if hasattr(model, "peft_config") else None),
        repr(sorted((n, str(m.scaling)) for n, m in model.named_modules() if isinstance(getattr(m, "scaling", None), dict))),
        regime_free,
    ]
    return blake3("\0".join(parts).encode()).digest()


def layers(model: Any, kernel: str) -> tuple[str, ...]:
    """Cumulative digests, one per decoder layer, over all weights and buffers that decide keys and values up to that layer."""
    decoder = model.get_decoder()
    running = blake3(base(model, kernel), max_threads=blake3.AUTO)
    inside = {id(t) for layer in decoder.layers for t in (*layer.parameters(), *layer.buffers())}
    norm = {id(t) for t in decoder.norm.parameters()} if hasattr(decoder, "norm") else set()
    named = [*decoder.named_parameters(), *decoder.named_buffers()]
    _absorb(running, [(n, t) for n, t in named if id(t) not in inside and id(t) not in norm])
    digests = []
    for layer in decoder.layers:
        _absorb(running, [*layer.named_parameters(), *layer.named_buffers()])
        digests.append(running.hexdigest(16))
    return tuple(digests)


class Fingerprint:
    """A model's layer digests: hashed once, checked cheaply before each request, hashed again when weights changed.

    In-place edits of parameters and replaced tensors are noticed; edits through `.data` of the same storage are not: call `invalidate`.
    """

    def __init__(self, model: Any, kernel: str) -> None:
        self._model = model
        self._kernel = kernel
        self._seen: tuple[Any, ...] = ()
        self._layers: tuple[str, ...] = ()

    def _state(self) -> tuple[Any, ...]:
        adapters = getattr(self._model, "active_adapters", None) if hasattr(self._model, "peft_config") else None
        return (repr(adapters), *((t.data_ptr(), t._version) for t in self._model.parameters()))

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
