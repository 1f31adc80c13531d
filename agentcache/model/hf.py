"""All coupling to transformers: loading, one packed forward through its public extension points, and the stock path. Knows no storage.

A packed forward runs tokens of several sequences along one axis. Families whose layers we know are stepped (steps.py); the others run
transformers' own modules with our attention function, which finds the page tables in the extra keyword `batch`.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence as Seq
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface, AutoModelForCausalLM, AutoTokenizer, DynamicCache
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from ..errors import ConfigError, DeviceMapError, ModelError, ModelLoadError
from ..kv import KVSpec
from . import steps
from .attention import Batch, Part
from .family import Support, support
from .numerics import SINGLE_ROW_OUTS, Numerics, RowPureLinear, linear, probe
from .rope import Rotary

ATTENTION = "agentcache"
_running = threading.local()  # the batch of the packed forward in this thread, for the rotary hook


def _paged_attention(
    module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, batch: Batch | None = None, **kw: Any
) -> tuple[torch.Tensor, None]:
    """The attention function given to transformers. Without a batch (the owner's own generate) it is stock sdpa."""
    if batch is None:
        return sdpa_attention_forward(module, query, key, value, mask, **kw)  # type: ignore[return-value]
    scale = kw.get("scaling") or query.shape[-1] ** -0.5
    window = kw.get("sliding_window") or 0
    rows = [t[0].transpose(0, 1).contiguous() for t in (query, key, value)]
    return steps.mix(batch, module.layer_idx, *rows, scale, window)[None], None


AttentionInterface.register(ATTENTION, _paged_attention)
AttentionMaskInterface.register(ATTENTION, sdpa_mask)


def load(
    model: Any, tokenizer: Any = None, *, device: str | None = None, dtype: str | torch.dtype | None = None, bits: int | None = None
) -> tuple[Any, Any]:
    """A loaded model and its tokenizer from a Hugging Face id, a folder, or loaded objects. bits: 4 (NF4) or 8, by bitsandbytes."""
    if not isinstance(model, (str, bytes)) and not hasattr(model, "__fspath__"):
        if tokenizer is None:
            raise ConfigError(f"tokenizer=None with a loaded model {type(model).__name__!r}: pass its tokenizer too")
        if bits or dtype or device:
            raise ConfigError("device, dtype and load_in_*bit apply to a model id or folder: load the model that way yourself")
        return model, tokenizer
    options: dict[str, Any] = {"dtype": dtype or "auto"}
    if bits:
        from transformers import BitsAndBytesConfig

        plan = {4: {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}, 8: {"load_in_8bit": True}}[bits]
        options["quantization_config"] = BitsAndBytesConfig(**plan)
    if device or bits:
        options["device_map"] = {"": device or "cpu"}
    try:
        loaded = AutoModelForCausalLM.from_pretrained(model, **options)
        tokenizer = tokenizer if tokenizer is not None else AutoTokenizer.from_pretrained(model)
    except (OSError, ValueError, ImportError, KeyError, RuntimeError) as error:
        raise ModelLoadError(f"model {model!r} cannot be loaded: {error}. Pass a local folder or a Hugging Face id of a causal model") from error
    return loaded.eval(), tokenizer


def _unwrap(model: Any) -> Any:
    model = getattr(model, "_orig_mod", model)  # torch.compile
    return model.get_base_model() if hasattr(model, "get_base_model") else model  # PEFT


def _check_device(model: Any) -> torch.device:
    devices = {p.device for p in model.parameters()}
    if len(devices) != 1 or next(iter(devices)).type == "meta":
        spread = sorted(str(d) for d in devices)
        raise DeviceMapError(f"weights on {spread!r}: several devices or offloading are not supported; load the model onto one device")
    return devices.pop()


def _steppable(decoder: Any) -> bool:
    """Whether every layer is exactly what steps.py computes: plain linears, no hooks, no adapters."""
    for layer in decoder.layers:
        modules = list(layer.modules())
        if any(m._forward_hooks or m._forward_pre_hooks for m in modules):
            return False
        for module in modules:
            if not list(module.children()) and any(True for _ in module.parameters(recurse=False)):
                if type(module) is not nn.Linear and not hasattr(module, "variance_epsilon"):
                    return False
    return type(decoder.embed_tokens) is nn.Embedding


class HFModel:
    """A causal language model of transformers, ready for packed forwards.

    spec: shape of its KV, None if it cannot be paged. numerics: kernels and paddings in use. context_tokens: longest sequence.
    """

    def __init__(self, model: Any) -> None:
        self.model = _unwrap(model)
        if not hasattr(self.model, "generate") or not hasattr(self.model, "config"):
            raise ModelError(f"{type(model).__name__!r} is not a causal language model of transformers")
        self.config = self.model.config.get_text_config()
        self.device = _check_device(self.model)
        self.dtype: torch.dtype = self.model.dtype
        self.quantized = getattr(self.model, "hf_quantizer", None) is not None or bool(getattr(self.model, "quantization_method", None))
        self.context_tokens = int(getattr(self.config, "max_position_embeddings", 0) or 1 << 20)
        self.support: Support = support(self.config)
        self.vocab = int(self.config.vocab_size)
        self.spec: KVSpec | None = None
        self.numerics: Numerics | None = None
        self.rotary: Rotary | None = None
        self._restore: list[Any] = []
        self.model.eval()
        if self.support.paged:
            self._prepare()

    @property
    def stepped(self) -> bool:
        """Whether layers run by our own loop."""
        return self.support.paged and self.support.family.stepped and self._is_steppable

    @property
    def bitwise(self) -> bool:
        """Whether equal tokens give equal bits here, whatever the chunking, packing or reuse."""
        return bool(self.numerics and self.numerics.pure and self.support.family.batch_free and not self.quantized)

    @property
    def stop_ids(self) -> frozenset[int]:
        """The ids that end a completion, from the generation config."""
        ends = getattr(self.model.generation_config, "eos_token_id", None)
        if ends is None:
            ends = getattr(self.config, "eos_token_id", None)
        return frozenset([ends] if isinstance(ends, int) else ends or [])

    def _prepare(self) -> None:
        config, decoder = self.config, self.model.get_decoder()
        heads = config.num_attention_heads
        dim = getattr(config, "head_dim", None) or config.hidden_size // heads
        self.spec = KVSpec(config.num_hidden_layers, getattr(config, "num_key_value_heads", None) or heads, dim, self.dtype, self.device)
        widths = {p.shape[1] for p in decoder.layers[0].parameters() if p.ndim == 2 and p.is_floating_point()} or {config.hidden_size}
        self.numerics = probe(self.dtype, self.device, tuple(widths), self.spec.kv_heads, dim)
        self.rotary = Rotary(decoder.rotary_emb, config, self.dtype, self.device)
        self._is_steppable = not self.quantized and _steppable(decoder)
        if not self.stepped:
            before = self.config._attn_implementation
            self.model.set_attn_implementation(ATTENTION)
            self._restore.append(lambda: self.model.set_attn_implementation(before))
            hook = decoder.rotary_emb.register_forward_hook(self._rotary_hook)
            self._restore.append(hook.remove)

    def close(self) -> None:
        """Give the owner's model object back as it was."""
        while self._restore:
            self._restore.pop()()

    def _rotary_hook(self, module: Any, args: Any, output: Any) -> Any:
        tables = getattr(_running, "tables", None)
        return output if tables is None else tuple(t[None] for t in tables)

    def rows_for(self, tokens: int) -> int:
        """Rows of a packed forward of so many tokens, padding included."""
        assert self.numerics is not None
        return -(-tokens // self.numerics.rows) * self.numerics.rows

    @torch.inference_mode()
    def forward(self, ids: torch.Tensor, parts: list[Part], regimes: list[str], wanted: Seq[int]) -> torch.Tensor:
        """Run packed ids [tokens] of `parts` and return logits [len(wanted), vocab] in fp32 of the wanted rows.

        Writes the keys and values of every token into the parts' pages; the caller advances the sequences.
        """
        assert self.numerics is not None and self.rotary is not None
        rows = self.rows_for(len(ids))
        positions = torch.cat([torch.arange(p.start, p.start + p.count) for p in parts])
        ids, positions = (nn.functional.pad(t, (0, rows - len(t))).to(self.device) for t in (ids, positions))
        spans = [(regime, p.start, p.start + p.count) for p, regime in zip(parts, regimes, strict=True)]
        tables = self.rotary.rows(spans, rows)
        batch = Batch(parts, rows, self.numerics)
        if self.stepped:
            hidden = steps.hidden_states(self.model, ids, *tables, batch)
            return self._head(hidden, wanted)
        _running.tables = tables
        try:
            with RowPureLinear(self.numerics.kernel):
                return self._generic(ids, positions, batch, wanted)
        finally:
            _running.tables = None

    def _padded(self, wanted: Seq[int]) -> torch.Tensor:
        assert self.numerics is not None
        alone = self.numerics.kernel == "upcast" and self.vocab >= SINGLE_ROW_OUTS
        short = 0 if alone else -len(wanted) % self.numerics.rows
        return torch.tensor([*wanted, *[wanted[-1]] * short], device=self.device)

    def _head(self, hidden: torch.Tensor, wanted: Seq[int]) -> torch.Tensor:
        assert self.numerics is not None
        if not wanted:
            return hidden.new_empty(0, self.vocab, dtype=torch.float32)
        head = self.model.get_output_embeddings()
        logits = linear(self.numerics.kernel, hidden[self._padded(wanted)], head.weight, head.bias)
        return logits[: len(wanted)].float()

    def _generic(self, ids: torch.Tensor, positions: torch.Tensor, batch: Batch, wanted: Seq[int]) -> torch.Tensor:
        call = {"input_ids": ids[None], "position_ids": positions[None], "use_cache": False, "batch": batch}
        if not wanted:
            self.model.get_decoder()(**call)
            return torch.empty(0, self.vocab)
        return self.model(**call, logits_to_keep=self._padded(wanted)).logits[0, : len(wanted)].float()  # type: ignore[no-any-return]

    @torch.inference_mode()
    def stock(self, ids: torch.Tensor, cache: DynamicCache | None) -> tuple[torch.Tensor, DynamicCache]:
        """transformers' own forward for one sequence: new ids [tokens] behind `cache` -> last logits [vocab] in fp32, grown cache."""
        out = self.model(
            input_ids=ids[None].to(self.device), past_key_values=cache or DynamicCache(config=self.config), use_cache=True, logits_to_keep=1
        )
        return out.logits[0, -1].float(), out.past_key_values
