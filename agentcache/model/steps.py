"""Llama-like layers stepped by our own loop: the same operations in the same order as transformers' modules, without their overhead.

Covers pre-norm decoders with separate q, k, v, optional q/k norms per head, rotate-half rotary over the whole head and a gated MLP:
Llama, Mistral, Qwen2, Qwen3. Tested bit-equal to the generic path. Knows nothing of requests or stores.
"""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Seq
from functools import partial
from types import FunctionType
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.modules import module as torch_module

from .attention import Attention, Batch, Part, attend, write
from .behaviour import EVERY_MODULE, foreign_hooks, forwards, namespaces
from .kernels import dispatch
from .kernels.dispatch import Int8Linear, elementwise, linear, linears
from .numerics import Numerics

if TYPE_CHECKING:
    from .kernels.layer import Programs


def rms_norm(module: Any, x: torch.Tensor) -> torch.Tensor:
    """A norm of rows by its module's weight."""
    return dispatch.norm(x, module.weight, module.variance_epsilon)


def _attention(block: Any, layer: int, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, batch: Batch) -> torch.Tensor:
    query, key, value = _projected(batch, block, x, cos, sin)
    out = mix(batch, layer, query, key, value, Attention(block.scaling, window(block)))
    return _products(batch, out.view(x.shape[0], -1), [block.o_proj])[0]


def queries(model: Any, index: int, hidden: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, numerics: Numerics) -> torch.Tensor:
    """Queries [rows, heads, head_dim] of a layer, of what `hidden_states` returns for the layers below it; near, not bit by bit."""
    layer = model.model.layers[index]
    x = hidden / model.model.norm.weight * layer.input_layernorm.weight  # another norm of the same rows
    (query,) = _heads(Batch([], len(x), numerics), x, layer.self_attn, "q")
    return dispatch.heads(query, *_scale(layer.self_attn, "q_norm"), cos[:, None], sin[:, None])


def _products(batch: Batch, x: torch.Tensor, modules: Seq[Any]) -> list[torch.Tensor]:
    """Rows times the weights of linear layers, with what adapters add to them."""
    weights = [module.weight for module in modules]
    for weight in weights if batch.token is not None else ():
        batch.token.glance(weight, True)
    outs = linears(batch.numerics.kernel, x, [(weight, module.bias) for weight, module in zip(weights, modules)], even=batch.numerics.even)
    for adapter, rows in batch.acting:
        adapter.add(rows, weights, x, outs)
    return outs


def _projected(
    batch: Batch, block: Any, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Query, key and value [rows, heads, head_dim] of normalised rows."""
    query, key, value = _heads(batch, x, block, "qkv")
    query = dispatch.heads(query, *_scale(block, "q_norm"), cos, sin)
    return query, dispatch.heads(key, *_scale(block, "k_norm"), cos, sin), value


def _heads(batch: Batch, x: torch.Tensor, block: Any, names: str) -> list[torch.Tensor]:
    """Some of the q, k and v projections of normalised rows, [rows, heads, head_dim] each."""
    parts = _products(batch, x, [getattr(block, f"{name}_proj") for name in names])
    return [part.view(len(x), -1, block.head_dim) for part in parts]


def _scale(block: Any, name: str) -> tuple[torch.Tensor | None, float]:
    """Weight and epsilon of the norm of heads; (None, 0.0) if the model has none."""
    norm = getattr(block, name, None)
    return (None, 0.0) if norm is None else (norm.weight, norm.variance_epsilon)


def window(block: Any) -> int:
    """The sliding window of an attention module, 0 if it sees everything."""
    if hasattr(block, "sliding_window"):
        return block.sliding_window or 0
    return (block.config.sliding_window or 0) if block.config.model_type == "mistral" else 0  # Mistral reads its config at each call


def mix(batch: Batch, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attn: Attention) -> torch.Tensor:
    """Write the new keys and values of every part, then attend. All tensors [rows, heads, head_dim]; padding rows give zeros."""
    _write(batch, layer, key, value)
    return attended(batch, layer, query, value.shape[-1], attn)


def _write(batch: Batch, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
    if batch.parts and (gpu := _of_gpu(batch, key, layer)):
        gpu.write(batch.on(key.device), layer, key, value)
        return
    _by_part(batch)
    for part in batch.parts:
        rows = slice(part.offset, part.offset + part.count)
        write(part, layer, key[rows], value[rows])


def _of_gpu(batch: Batch, x: torch.Tensor, layer: int) -> Any:
    """Kernels that read and write pages where they lie, for queries or keys [rows, heads, width] of a layer; None if they take others."""
    if not x.is_cuda or (gpu := dispatch.of_gpu()) is None:
        return None
    values = batch.parts[0].sequence.pages[0].layer_values[layer]
    return gpu if gpu.takes(x, values.dtype, len(values), values.shape[-1]) else None


def _by_part(batch: Batch) -> None:
    if batch.fixed:
        raise RuntimeError("pages would be gathered, which are others in the next forward")


def attended(batch: Batch, layer: int, query: torch.Tensor, width: int, attn: Attention) -> torch.Tensor:
    """Attend to keys and values that every part has written: query [rows, heads, head_dim] -> [rows, heads, width]."""
    if batch.parts and attn.chosen is None and (gpu := _of_gpu(batch, query, layer)):
        kv_heads = len(batch.parts[0].sequence.pages[0].layer_values[layer])
        return gpu.attend(batch.on(query.device), layer, query, kv_heads, width, attn)  # type: ignore[no-any-return]
    _by_part(batch)
    if len(batch.parts) == 1 and batch.parts[0].count == query.shape[0]:
        return attend(batch, batch.parts[0], layer, query, attn)
    out = query.new_zeros(*query.shape[:2], width)
    for part in batch.parts:
        rows = slice(part.offset, part.offset + part.count)
        out[rows] = attend(batch, part, layer, query[rows], attn)
    return out


def _join(batch: Batch, layer: int, x: torch.Tensor) -> torch.Tensor:
    """The input of a layer with the rows of those who come in there, padded again; what has to be kept of it is kept."""
    if joining := [part for part in batch.later if part.entry == layer]:
        batch.join(joining)
        x = torch.cat([x[: joining[0].offset], *(part.states for part in joining if part.states is not None)])
        x = nn.functional.pad(x, (0, 0, 0, -len(x) % batch.numerics.rows))
    for part in batch.parts:
        if layer in part.sequence.spec.boundaries:
            part.sequence.keep_states(layer, part.start, x[part.offset : part.offset + part.count])
    return x


def hidden_states(
    model: Any, ids: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, batch: Batch, wanted: Any, layers: int | None = None
) -> torch.Tensor:
    """Run all layers (or the first `layers`) over packed ids [rows] -> normalised hidden states of the wanted rows [len(wanted), hidden].

    ids: of the rows that start at the bottom, padded; the others follow after them, layer by layer, as in `batch.later`.
    cos, sin [all rows, head_dim].
    """
    decoder = model.model
    if layers is None and (compiled := _compiled(model, batch)):
        return _by_programs(decoder, ids, cos, sin, batch, wanted, compiled)
    chosen = wanted if isinstance(wanted, torch.Tensor) else torch.tensor(wanted, dtype=torch.long, device=ids.device)
    x = decoder.embed_tokens(ids)
    all_cos, all_sin = cos[:, None], sin[:, None]
    last = len(decoder.layers) - 1
    for index, layer in enumerate(decoder.layers[:layers]):
        if batch.later or any(part.sequence.spec.boundaries for part in batch.parts):
            x = _join(batch, index, x)
            if not len(x):
                continue  # all rows resume further up
        cos, sin = all_cos[: len(x)], all_sin[: len(x)]
        if index == last and 2 * len(wanted) < len(x) and chosen is not wanted:
            return rms_norm(decoder.norm, _top(layer, index, x, cos, sin, batch, chosen))
        x = _attention(layer.self_attn, index, rms_norm(layer.input_layernorm, x), cos, sin, batch).add_(x)
        x = _mlp(layer, x, batch)
    return rms_norm(decoder.norm, x[chosen])


def head(model: Any, hidden: torch.Tensor, batch: Batch) -> torch.Tensor:
    """Logits [rows, vocab] in fp32 of normalised hidden states [rows, hidden]."""
    module = model.get_output_embeddings()
    weight, numerics = module.weight, batch.numerics
    if not len(hidden):
        return hidden.new_empty(0, len(weight), dtype=torch.float32)
    if batch.token is not None:
        batch.token.glance(weight, True)
    return linear(numerics.kernel, hidden, weight, module.bias, head=True, even=numerics.even).float()


def _mlp(layer: Any, x: torch.Tensor, batch: Batch) -> torch.Tensor:
    mlp, h = layer.mlp, rms_norm(layer.post_attention_layernorm, x)
    gate, up = _products(batch, h, [mlp.gate_proj, mlp.up_proj])
    return _products(batch, elementwise(mlp.act_fn, gate).mul_(up), [mlp.down_proj])[0].add_(x)


def _top(layer: Any, index: int, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, batch: Batch, wanted: torch.Tensor) -> torch.Tensor:
    """The last layer -> its output for the wanted rows. Of the others it computes keys and values alone: nothing reads their outputs."""
    block, rows = layer.self_attn, len(wanted)
    h = rms_norm(layer.input_layernorm, x)
    key, value = _heads(batch, h, block, "kv")
    _write(batch, index, dispatch.heads(key, *_scale(block, "k_norm"), cos, sin), value)
    if not rows:
        return x[:0]
    chosen = torch.cat([wanted, wanted[-1:].expand(-rows % batch.numerics.rows)])
    few = Batch([_only(batch, row, at) for at, row in enumerate(wanted.tolist())], len(chosen), batch.numerics, token=batch.token)
    (query,) = _heads(few, h[chosen], block, "q")
    query = dispatch.heads(query, *_scale(block, "q_norm"), cos[chosen], sin[chosen])
    out = attended(few, index, query, value.shape[-1], Attention(block.scaling, window(block)))
    x = _products(few, out.view(len(chosen), -1), [block.o_proj])[0].add_(x[chosen])
    return _mlp(layer, x, few)[:rows]


def _only(batch: Batch, row: int, offset: int) -> Part:
    """One row of a batch as a part of its own, at `offset` of another batch."""
    part = next(part for part in batch.parts if part.offset <= row < part.offset + part.count)
    return Part(part.sequence, part.start + row - part.offset, 1, offset)


def _compiled(model: Any, batch: Batch) -> Programs | None:
    """Compiled layers for these rows, if they are not too many, start at the bottom, and have the bits of the ordinary operations."""
    kernel = batch.numerics.kernel
    pairs = dispatch.compiled(kernel, model.model.layers[0].self_attn.q_proj.weight, model.dtype)
    if batch.later or batch.acting or pairs is None:
        return None
    from .kernels.layer import programs

    return programs(model, sum(part.count for part in batch.parts), pairs, partial(_agrees, batch=batch))


def _by_programs(
    decoder: Any, ids: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, batch: Batch, wanted: Any, compiled: Programs
) -> torch.Tensor:
    """`hidden_states` by compiled layers. Rows need no padding here: each is computed by itself."""
    rows, last, gate = compiled.rows, len(decoder.layers) - 1, None
    chosen = torch.tensor(wanted, dtype=torch.long)
    compiled.load(decoder.embed_tokens(ids[:rows]), cos[:rows], sin[:rows])
    x, query, key, value = (of[:rows] for of in (compiled.x, compiled.query, compiled.key, compiled.value))
    for index, layer in enumerate(decoder.layers):
        top = index == last and 2 * len(wanted) < rows
        compiled.enter(index, gate, not top)  # x: the input of this layer from here on
        for part in batch.parts:
            if index in part.sequence.spec.boundaries:
                part.sequence.keep_states(index, part.start, x[part.offset : part.offset + part.count])
        if top:
            return rms_norm(decoder.norm, _top(layer, index, x, cos[:rows, None], sin[:rows, None], batch, chosen))
        block = layer.self_attn
        out = mix(batch, index, query, key, value, Attention(block.scaling, window(block)))
        compiled.middle(index, out)
        gate = elementwise(layer.mlp.act_fn, compiled.gate[:rows])
    compiled.enter(len(decoder.layers), gate)
    return rms_norm(decoder.norm, x[chosen])


def _agrees(compiled: Programs, layer: Any, batch: Batch) -> bool:
    """Whether a first layer's compiled functions give the bits of the ordinary operations, on numbers of many sizes."""
    block, mlp, kernel = layer.self_attn, layer.mlp, batch.numerics.kernel
    (x, attended, cos, sin), found = compiled.trial(partial(elementwise, mlp.act_fn))
    expected = list(_projected(batch, block, rms_norm(layer.input_layernorm, x), cos, sin))
    x = x + linear(kernel, attended.flatten(1), block.o_proj.weight, block.o_proj.bias)
    gate, up = linears(kernel, rms_norm(layer.post_attention_layernorm, x), [(p.weight, p.bias) for p in (mlp.gate_proj, mlp.up_proj)])
    expected += [x, gate, x + linear(kernel, elementwise(mlp.act_fn, gate) * up, mlp.down_proj.weight, mlp.down_proj.bias)]
    return all(torch.allclose(one, other, rtol=0, atol=0, equal_nan=True) for one, other in zip(found, expected, strict=True))


_LINEARS = {"self_attn": ("q_proj", "k_proj", "v_proj", "o_proj"), "mlp": ("gate_proj", "up_proj", "down_proj")}
_NORMS = ("input_layernorm", "post_attention_layernorm")


class Shape:
    """The modules that `hidden_states` runs, unwrapped. `holds` notices adapters, hooks and patches put in later."""

    def __init__(self, model: Any) -> None:
        self._modules: list[tuple[dict[str, Any], str, Any]] = []
        self._ok = all(self._known(*found) for found in self._walk(model))
        self._kinds = [type(module) for _, _, module in self._modules]
        self._forwards = forwards(module for _, _, module in self._modules if module is not None)
        self._functions: list[tuple[dict[str, Any], list[str], list[Any]]] = []
        for space in map(vars, namespaces(self._forwards)):
            names = [name for name, value in space.items() if isinstance(value, FunctionType)]
            self._functions.append((space, names, [space[name] for name in names]))

    def _walk(self, model: Any) -> Iterator[tuple[Any, str, str]]:
        decoder = model.model
        self._modules += [({"": m}, "", m) for m in (model, decoder)]
        self._modules += [(decoder.layers._modules, name, layer) for name, layer in decoder.layers.named_children()]
        yield model, "lm_head", "linear"
        yield decoder, "embed_tokens", "embedding"
        yield decoder, "norm", "norm"
        yield decoder, "rotary_emb", "part"
        for layer in decoder.layers:
            expected = {*_LINEARS, *_NORMS}
            if set(layer._modules) != expected:
                self._modules.append(({}, "", layer))  # never holds
                continue
            for name in _NORMS:
                yield layer, name, "norm"
            for part, projections in _LINEARS.items():
                yield layer, part, "part"
                block = layer._modules[part]
                for name in projections:
                    yield block, name, "linear"
                for name in set(block._modules) - set(projections):
                    yield block, name, "norm" if name in ("q_norm", "k_norm") else "activation"

    def _known(self, parent: Any, name: str, kind: str) -> bool:
        module = parent._modules.get(name)
        self._modules.append((parent._modules, name, module))
        if kind == "linear":
            return type(module) in (nn.Linear, Int8Linear)
        if kind == "embedding":
            return type(module) is nn.Embedding and module.max_norm is None
        if kind == "norm":
            return hasattr(module, "variance_epsilon") and type(module).forward.__module__.startswith("transformers.")
        if kind == "activation":
            return name == "act_fn" and not list(module.parameters())
        return type(module).forward.__module__.startswith("transformers.models.")

    def holds(self) -> bool:
        """Whether nothing was exchanged, hooked or patched since. Some tens of microseconds."""
        if any(getattr(torch_module, hooks) for hooks in EVERY_MODULE):
            return False
        if any(kind.forward is not called[0] or kind.__call__ is not called[1] for kind, called in self._forwards.items()):
            return False
        if any(list(map(space.get, names)) != known for space, names, known in self._functions):
            return False
        if [type(module) for _, _, module in self._modules] != self._kinds:
            return False
        return self._ok and all(
            held.get(name) is module is not None
            and not ((module._forward_hooks or module._forward_pre_hooks) and any(foreign_hooks(module)))
            and "forward" not in module.__dict__
            for held, name, module in self._modules
        )
