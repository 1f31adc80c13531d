"""What people do to a loaded model between two requests, by name: edits of tensors, settings, code, hooks, adapters, modes. Holds no tests.

Each change is a context manager over a model: it changes the model, and on leaving brings back what it was.
"""

from __future__ import annotations

import contextlib
import functools
import types
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import nn

Apply = Callable[[Any], AbstractContextManager[None]]


@dataclass(frozen=True, slots=True)
class Change:
    """family: of the model that it is made to. refused: reuse is refused meanwhile, by name, because no forward can be repeated.

    prepare, act: the change in two halves, where the first would hide the second from an engine that has not seen the model between them.
    """

    family: str
    apply: Apply
    refused: bool = False
    prepare: Callable[[Any], AbstractContextManager[Any]] | None = None
    act: Callable[[Any], Any] | None = None


CHANGES: dict[str, Change] = {}


def change(name: str, family: str = "llama", *, refused: bool = False) -> Callable[[Callable[[Any], Iterator[None]]], Any]:
    """Add the decorated generator to CHANGES."""

    def add(function: Callable[[Any], Iterator[None]]) -> Any:
        assert name not in CHANGES, name
        CHANGES[name] = Change(family, contextmanager(function), refused)
        return function

    return add


# -- tensors ---------------------------------------------------------------------------------------------------------

TENSORS: dict[str, Callable[[Any], tuple[nn.Module, str]]] = {
    "embedding": lambda m: (m.model.embed_tokens, "weight"),
    "q": lambda m: (m.model.layers[0].self_attn.q_proj, "weight"),
    "k": lambda m: (m.model.layers[1].self_attn.k_proj, "weight"),
    "v": lambda m: (m.model.layers[0].self_attn.v_proj, "weight"),
    "o": lambda m: (m.model.layers[1].self_attn.o_proj, "weight"),
    "gate": lambda m: (m.model.layers[0].mlp.gate_proj, "weight"),
    "down": lambda m: (m.model.layers[1].mlp.down_proj, "weight"),
    "norm": lambda m: (m.model.layers[2].input_layernorm, "weight"),
    "frequencies": lambda m: (m.model.rotary_emb, "inv_freq"),
}


def _put(owner: nn.Module, name: str, value: torch.Tensor) -> None:
    among = owner._parameters if name in owner._parameters else owner._buffers
    among[name] = nn.Parameter(value, requires_grad=False) if among is owner._parameters else value


def _swap_data(owner: nn.Module, name: str) -> None:
    getattr(owner, name).data = getattr(owner, name).detach() * 1.5


def _through_numpy(owner: nn.Module, name: str) -> None:
    getattr(owner, name).detach().numpy()[...] *= 1.5


def _one_row(owner: nn.Module, name: str) -> None:
    tensor = getattr(owner, name)
    tensor[: max(1, len(tensor) // 2)] = 0.25


EDITS: dict[str, Callable[[nn.Module, str], Any]] = {
    "mul_": lambda o, n: getattr(o, n).mul_(1.5),
    "copy_": lambda o, n: getattr(o, n).copy_(getattr(o, n) * 1.5),
    "half of it": _one_row,
    "a new tensor": lambda o, n: _put(o, n, getattr(o, n).detach() * 1.5),
    "a new tensor at a freed address": lambda o, n: (_put(o, n, torch.zeros(1)), _put(o, n, torch.full_like(_ORIGINAL[-1], 0.125))),
    ".data": lambda o, n: getattr(o, n).data.mul_(1.5),
    ".data = new": _swap_data,
    "NumPy": _through_numpy,
    "set_": lambda o, n: getattr(o, n).set_(getattr(o, n).detach() * 1.5),
}
_ORIGINAL: list[torch.Tensor] = []


def _tensor_change(find: Callable[[Any], tuple[nn.Module, str]], edit: Callable[[nn.Module, str], Any]) -> Apply:
    @contextmanager
    def apply(model: Any) -> Iterator[None]:
        owner, name = find(model)
        tensor = getattr(owner, name)
        values, data = tensor.detach().clone(), tensor.data
        _ORIGINAL.append(values)
        with torch.no_grad():
            edit(owner, name)
        yield
        _ORIGINAL.pop()
        among = owner._parameters if name in owner._parameters else owner._buffers
        among[name] = tensor
        with torch.no_grad():
            tensor.data = data
            tensor.data.copy_(values)

    return apply


for _where, _find in TENSORS.items():
    for _how, _edit in EDITS.items():
        CHANGES[f"{_where}: {_how}"] = Change("qwen3" if _where == "v" else "llama", _tensor_change(_find, _edit))


# -- settings of modules and of the model ------------------------------------------------------------------------------


def _attribute(find: Callable[[Any], Any], name: str, value: Any) -> Apply:
    @contextmanager
    def apply(model: Any) -> Iterator[None]:
        owner = find(model)
        before = getattr(owner, name)
        setattr(owner, name, value)
        yield
        setattr(owner, name, before)

    return apply


_ATTENTION = lambda m: m.model.layers[1].self_attn  # noqa: E731
for _name, _family, _at, _attr, _value in (
    ("softmax scale", "llama", _ATTENTION, "scaling", 0.5),
    ("softmax scale of qwen3", "qwen3", _ATTENTION, "scaling", 0.5),
    ("softmax scale of phi3", "phi3", _ATTENTION, "scaling", 0.5),
    ("epsilon", "llama", lambda m: m.model.layers[0].input_layernorm, "variance_epsilon", 0.5),
    ("epsilon of olmo2", "olmo2", lambda m: m.model.layers[0].post_attention_layernorm, "variance_epsilon", 0.5),
    ("epsilon of a head's norm", "qwen3", lambda m: m.model.layers[0].self_attn.q_norm, "variance_epsilon", 0.5),
    ("window", "mistral_window", lambda m: m.config, "sliding_window", 8),
    ("window of a layer", "qwen3", _ATTENTION, "sliding_window", 8),
    ("residual multiplier", "granite", lambda m: m.model.layers[0], "residual_multiplier", 0.9),
    ("embedding multiplier", "granite", lambda m: m.model, "embedding_multiplier", 3.0),
    ("attention multiplier", "granite", _ATTENTION, "scaling", 0.7),
    ("no rope in a layer", "smollm3", lambda m: m.model.layers[0].self_attn, "use_rope", 0),
    ("rotary scale", "llama", lambda m: m.model.rotary_emb, "attention_scaling", 1.25),
    ("rotary scale of granite", "granite", lambda m: m.model.rotary_emb, "attention_scaling", 1.25),
    ("padding row", "llama", lambda m: m.model.embed_tokens, "padding_idx", 3),
    ("padding row of granite", "granite", lambda m: m.model.embed_tokens, "padding_idx", 3),
    ("causal no more", "llama", _ATTENTION, "is_causal", False),
    ("another activation", "llama", lambda m: m.model.layers[0].mlp, "act_fn", nn.ReLU()),
    ("another activation of phi3", "phi3", lambda m: m.model.layers[0].mlp, "activation_fn", nn.ReLU()),
    ("experts per token", "qwen3_moe", lambda m: m.model.layers[0].mlp.gate, "top_k", 1),
    ("experts' weights as they are", "qwen3_moe", lambda m: m.model.layers[0].mlp.gate, "norm_topk_prob", True),
    ("config: scale of rotary angles", "llama", lambda m: m.config, "rope_parameters", {"rope_type": "default", "rope_theta": 77.0}),
    ("a note about loading", "llama", lambda m: m.model.layers[0], "_is_hf_initialized", False),
):
    CHANGES[_name] = Change(_family, _attribute(_at, _attr, _value))


def _modules(name: str, family: str, find: Callable[[Any], Any], *names: str) -> None:
    """Children exchanged with each other."""

    @change(name, family)
    def swap(model: Any) -> Iterator[None]:
        owner = find(model)
        one, other = names
        owner._modules[one], owner._modules[other] = owner._modules[other], owner._modules[one]
        yield
        owner._modules[one], owner._modules[other] = owner._modules[other], owner._modules[one]


_modules("two layers exchanged", "llama", lambda m: m.model.layers, "0", "1")
_modules("two layers of granite exchanged", "granite", lambda m: m.model.layers, "0", "1")
_modules("two norms exchanged", "llama", lambda m: m.model.layers[0], "input_layernorm", "post_attention_layernorm")
_modules("gate and up exchanged", "llama", lambda m: m.model.layers[0].mlp, "gate_proj", "up_proj")
_modules("two norms of olmo2 exchanged", "olmo2", lambda m: m.model.layers[0], "post_attention_layernorm", "post_feedforward_layernorm")


@change("layers in another order of their dictionary")
def _reordered(model: Any) -> Iterator[None]:
    held = model.model.layers._modules
    before = dict(held)
    held.clear()
    held.update({name: before[name] for name in ("1", "0", "2")})
    yield
    held.clear()
    held.update(before)


class _Doubled(nn.Linear):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input) * 2


class _Raw(nn.Module):
    """A product that no kernel of ours computes."""

    def __init__(self, inner: nn.Linear) -> None:
        super().__init__()
        self.inner = inner
        self.A = nn.Parameter(torch.randn(inner.in_features, inner.out_features, generator=torch.Generator().manual_seed(5)) * 0.1)

    @property
    def weight(self) -> torch.Tensor:
        return self.inner.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) + x @ self.A


def _replaced(name: str, family: str, find: Callable[[Any], Any], child: str, make: Callable[[Any], nn.Module]) -> None:
    @change(name, family)
    def replace(model: Any) -> Iterator[None]:
        owner = find(model)
        before = owner._modules[child]
        owner._modules[child] = make(before)
        yield
        owner._modules[child] = before


def _doubled(linear: nn.Linear) -> nn.Module:
    made = _Doubled(linear.in_features, linear.out_features, bias=linear.bias is not None)
    made.load_state_dict(linear.state_dict())
    return made


_MLP = lambda m: m.model.layers[1].mlp  # noqa: E731
_replaced("a subclass in the place of a linear", "llama", _MLP, "down_proj", _doubled)
_replaced("a subclass in granite", "granite", _MLP, "down_proj", _doubled)
_replaced("a raw product beside a linear", "llama", _MLP, "down_proj", _Raw)
_replaced("a raw product in phi3", "phi3", _MLP, "down_proj", _Raw)
_replaced("a dropped norm", "llama", lambda m: m.model.layers[1], "input_layernorm", lambda norm: nn.Identity())


# -- hooks ---------------------------------------------------------------------------------------------------------------

HOOKED: dict[str, Callable[[Any], nn.Module]] = {
    "embedding": lambda m: m.model.embed_tokens,
    "layer's norm": lambda m: m.model.layers[0].input_layernorm,
    "q": lambda m: m.model.layers[0].self_attn.q_proj,
    "v": lambda m: m.model.layers[1].self_attn.v_proj,
    "mlp": lambda m: m.model.layers[1].mlp,
    "activation": lambda m: m.model.layers[1].mlp.act_fn,
}
for _where, _module in HOOKED.items():
    for _family in ("llama", "granite"):

        @change(f"hook after {_where} of {_family}", _family)
        def _hook(model: Any, find: Callable[[Any], nn.Module] = _module) -> Iterator[None]:
            handle = find(model).register_forward_hook(lambda module, args, output: output * 1.5)
            yield
            handle.remove()

        @change(f"hook before {_where} of {_family}", _family)
        def _pre_hook(model: Any, find: Callable[[Any], nn.Module] = _module) -> Iterator[None]:
            def before(module: Any, args: Any) -> Any:
                return (args[0].flip(-1) if args[0].is_floating_point() else (args[0] + 1) % 600, *args[1:])

            handle = find(model).register_forward_pre_hook(before)
            yield
            handle.remove()


def _global(name: str, family: str) -> None:
    @change(name, family)
    def every(model: Any) -> Iterator[None]:
        def scaled(module: Any, args: Any, output: Any) -> Any:
            return output * 1.5 if isinstance(module, nn.Linear) else output

        handle = nn.modules.module.register_module_forward_hook(scaled)
        yield
        handle.remove()


_global("hook for every module", "llama")
_global("hook for every module of granite", "granite")


@change("hook of the whole model", "granite")
def _whole(model: Any) -> Iterator[None]:
    def before(module: Any, args: Any, kwargs: Any) -> Any:
        return args, {**kwargs, "input_ids": (kwargs["input_ids"] + 1) % 600}

    handle = model.register_forward_pre_hook(before, with_kwargs=True)
    yield
    handle.remove()


# -- code ----------------------------------------------------------------------------------------------------------------


def _instance(name: str, family: str, find: Callable[[Any], nn.Module], how: str) -> None:
    @change(name, family)
    def patch(model: Any) -> Iterator[None]:
        module = find(model)
        inner = module.forward

        def doubled(self: Any, *args: Any, **kwargs: Any) -> Any:
            return inner(*args, **kwargs) * 2

        if how == "method":
            module.forward = types.MethodType(doubled, module)  # type: ignore[method-assign]
        elif how == "partial":
            module.forward = functools.partial(doubled, module)  # type: ignore[method-assign]
        else:
            module.forward = functools.update_wrapper(lambda *a, **k: inner(*a, **k) * 2, inner)  # type: ignore[method-assign]
        yield
        del module.forward  # type: ignore[method-assign]


for _how in ("method", "partial", "wrapped"):
    for _family in ("llama", "granite"):
        _instance(f"forward of an mlp, {_how}, {_family}", _family, lambda m: m.model.layers[1].mlp, _how)
        _instance(f"forward of a norm, {_how}, {_family}", _family, lambda m: m.model.layers[0].input_layernorm, _how)


def _class(name: str, family: str, find: Callable[[Any], nn.Module]) -> None:
    @change(name, family)
    def patch(model: Any) -> Iterator[None]:
        kind = type(find(model))
        before = kind.forward

        def doubled(self: Any, *args: Any, **kwargs: Any) -> Any:
            return before(self, *args, **kwargs) * 2

        kind.forward = doubled
        yield
        kind.forward = before


for _family in ("llama", "qwen3", "granite", "phi3"):
    _class(f"forward of every norm of {_family}", _family, lambda m: m.model.layers[0].input_layernorm)
    _class(f"forward of every mlp of {_family}", _family, lambda m: m.model.layers[0].mlp)


@change("forward of every linear", "granite")
def _linears(model: Any) -> Iterator[None]:
    before = nn.Linear.forward
    nn.Linear.forward = lambda self, input: before(self, input) * 1.25  # type: ignore[method-assign]
    yield
    nn.Linear.forward = before  # type: ignore[method-assign]


def _function(family: str, name: str, patched: Callable[[Any], Any]) -> None:
    @change(f"{name} of {family}", family)
    def patch(model: Any) -> Iterator[None]:
        space = __import__("sys").modules[type(model).__module__]
        before = getattr(space, name)
        setattr(space, name, patched(before))
        yield
        setattr(space, name, before)


for _family in ("llama", "granite", "phi3"):
    _function(_family, "apply_rotary_pos_emb", lambda before: lambda q, k, *args, **kw: tuple(t * 1.5 for t in before(q, k, *args, **kw)))
    _function(_family, "rotate_half", lambda before: lambda x: before(x) * 0.5)


# -- modes, switches, adapters ---------------------------------------------------------------------------------------------


@change("training mode with a dropout", "phi3", refused=True)
def _dropout(model: Any) -> Iterator[None]:
    dropout = model.model.layers[0].resid_mlp_dropout
    dropout.p = 0.5
    model.train()
    yield
    model.eval()
    dropout.p = 0.0


@change("greatest norm of an embedding", refused=True)
def _max_norm(model: Any) -> Iterator[None]:
    embedding = model.model.embed_tokens
    before = embedding.weight.detach().clone()
    embedding.max_norm = 0.5
    yield
    embedding.max_norm = None
    embedding.weight.data.copy_(before)


@change("training mode without a dropout", "granite")
def _training(model: Any) -> Iterator[None]:
    model.train()
    yield
    model.eval()


@change("products of fp32 in bf16")
def _precision(model: Any) -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    yield
    torch.set_float32_matmul_precision(before)


if hasattr(torch.backends, "fp32_precision"):  # since torch 2.9, and then torch does not say it by the older name any more
    for _name, _products, _value in (
        ("of every backend", torch.backends, "tf32"),
        ("of CUDA", torch.backends.cuda.matmul, "tf32"),
        ("of oneDNN", torch.backends.mkldnn.matmul, "bf16"),
    ):
        CHANGES[f"precision of products {_name}"] = Change("llama", _attribute(lambda _, owner=_products: owner, "fp32_precision", _value))


@contextmanager
def adapted(model: Any, names: tuple[str, ...] = ("one",), **options: Any) -> Iterator[Any]:
    """The model with LoRAs of PEFT in it, the first of them active; afterwards without."""
    from peft import LoraConfig, get_peft_model

    wrapped = None
    for seed, name in enumerate(names):
        with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # PEFT reads what transformers deprecates
            torch.manual_seed(seed)
            config = LoraConfig(**{"r": 4, "target_modules": ["q_proj", "v_proj"], "init_lora_weights": False, **options})
            if wrapped is None:
                wrapped = get_peft_model(model, config, adapter_name=name)
            else:
                wrapped.add_adapter(name, config)
    assert wrapped is not None
    try:
        yield wrapped
    finally:
        wrapped.unload()
        with contextlib.suppress(AttributeError):
            del model.peft_config


def _lora(name: str, act: Callable[[Any], Any], **options: Any) -> None:
    @contextmanager
    def prepare(model: Any) -> Iterator[Any]:
        weights = {name: value.clone() for name, value in model.state_dict().items()}
        with adapted(model, ("one", "two"), **options) as wrapped:
            yield wrapped
            if wrapped.base_model.model.model.layers[0].self_attn.q_proj.merged:
                wrapped.unmerge_adapter()
        for name, value in model.state_dict().items():  # merging and unmerging rounds
            value.data.copy_(weights[name])

    @contextmanager
    def apply(model: Any) -> Iterator[None]:
        with prepare(model) as wrapped:
            act(wrapped)
            yield

    for family in ("llama", "granite"):
        halves = {} if act is _nothing else {"prepare": prepare, "act": act}
        CHANGES[f"LoRA {name}, {family}"] = Change(family, apply, **halves)


def _nothing(wrapped: Any) -> None:
    """The wrapping is the change."""


def _deleted(wrapped: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        wrapped.delete_adapter("one")


def _scaled(wrapped: Any) -> None:
    for module in wrapped.modules():
        if isinstance(scaling := getattr(module, "scaling", None), dict):
            scaling.update(one=0.1)


def _in_place(wrapped: Any) -> None:
    for name, parameter in wrapped.named_parameters():
        if "lora_B.one" in name:
            parameter.data.mul_(2.0)


def _exchanged(wrapped: Any) -> None:
    for module in wrapped.modules():
        if "lora_B" in module._modules:
            weight = module.lora_B["one"].weight
            module.lora_B["one"].weight = nn.Parameter(torch.flip(weight.detach(), [0]))
            del weight


_lora("put in", _nothing)
_lora("another one active", lambda wrapped: wrapped.set_adapter("two"))
_lora("both active", lambda wrapped: wrapped.base_model.set_adapter(["one", "two"]))
_lora("disabled", lambda wrapped: wrapped.base_model.disable_adapter_layers())
_lora("scaled", lambda wrapped: [m.scale_layer(3.0) for m in wrapped.modules() if hasattr(m, "scale_layer")])
_lora("scaled by its dictionary", _scaled)
_lora("merged", lambda wrapped: wrapped.merge_adapter())
_lora("deleted", _deleted)
_lora("edited through .data", _in_place)
_lora("its tensors exchanged", _exchanged)
_lora("with DoRA", _nothing, use_dora=True)


@change("weights of another model", "llama")
def _loaded(model: Any) -> Iterator[None]:
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(9)
        model.load_state_dict(type(model)(model.config).state_dict())
    yield
    model.load_state_dict(before)


@change("an older name of transformers' code", "llama")
def _version(model: Any) -> Iterator[None]:
    before, transformers.__version__ = transformers.__version__, "0.0"
    yield
    transformers.__version__ = before


FAMILIES = sorted({change.family for change in CHANGES.values()})
