"""Getting a model from a name, a folder or an object, out of its wrappers and onto one device, or a refusal by name. Runs nothing."""

from __future__ import annotations

import inspect
import json
import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from copy import copy
from difflib import get_close_matches
from importlib.util import find_spec
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, Literal, TypedDict

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, AutoTokenizer, BitsAndBytesConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
from transformers.utils import cached_file, is_accelerate_available

from .. import embedded
from ..errors import ConfigError, DeviceMapError, ModelError, ModelLoadError
from .kernels import linear_compiled
from .wrapped_weights import is_quantized

# To load, of this process's threads: transformers patches its classes meanwhile, and two at once leave weights unread
_TURNS: dict[int, threading.Lock] = {}
# of files that are missing, damaged or of another kind
UNREADABLE = (
    *(OSError, ValueError, ImportError, KeyError, RuntimeError, TypeError, AttributeError, StrictDataclassError),
    *(SafetensorError, UnpicklingError, EOFError),
)


class Loading(TypedDict, total=False):
    """How a model is loaded that is given by its id or folder: device, number type, weights as our int8 or of so many bits by bitsandbytes,
    and what the Hub is asked."""

    device: str | None
    dtype: str | torch.dtype | None
    weights: Literal["int8"] | None
    load_in_4bit: bool
    load_in_8bit: bool
    revision: str | None
    token: str | bool | None
    trust_remote_code: bool


def load(
    model: Any,
    tokenizer: Any = None,
    *,
    device: str | None = None,
    dtype: str | torch.dtype | None = None,
    weights: Literal["int8"] | None = None,
    load_in_4bit: bool = False,
    load_in_8bit: bool = False,
    revision: str | None = None,
    token: str | bool | None = None,
    trust_remote_code: bool = False,
) -> tuple[Any, Any]:
    """A loaded model and its tokenizer from a Hugging Face id, a folder, "embedded", or objects. load_in_4bit is NF4.

    Options as of Loading. trust_remote_code: run the model code that comes with the weights.
    """
    if load_in_4bit and load_in_8bit:
        raise ConfigError("load_in_4bit=True and load_in_8bit=True: choose one")
    bits = 4 if load_in_4bit else 8 if load_in_8bit else None
    if weights is not None:
        from .int8 import check

        check(weights, bits, device)
    if tokenizer is not None and not callable(tokenizer):
        raise ConfigError(f"tokenizer={tokenizer!r:.100}: must be the model's tokenizer, as AutoTokenizer loads it")
    if not isinstance(model, (str, bytes)) and not hasattr(model, "__fspath__"):
        _check_given(model, tokenizer, bits or weights or dtype or device or revision or token or trust_remote_code)
        return model, tokenizer
    if model == embedded.NAME:
        model = embedded.folder()
    model = str(Path(str(model)).expanduser()) if str(model).startswith("~") else model
    _check(model, device, dtype, revision)
    dtype = dtype.removeprefix("torch.") if isinstance(dtype, str) else dtype
    hub = {"revision": revision, "token": token, "trust_remote_code": trust_remote_code}
    hub = {name: value for name, value in hub.items() if value is not None}  # said aloud: transformers asks at the terminal about None
    options: dict[str, Any] = {"dtype": dtype or "auto", **hub}
    if bits or (device and is_accelerate_available()):  # else the weights go by way of the computer's memory
        options["device_map"] = {"": device or "cpu"}
    if missing := [name for name in ("bitsandbytes", "accelerate") if bits and find_spec(name) is None]:
        raise ConfigError(f"load_in_{bits}bit=True: needs {missing[0]}; pip install 'agentcache-llm[bitsandbytes]'")
    try:
        if bits:
            options["quantization_config"] = _quantization(model, dtype, bits, hub)
        with ThreadPoolExecutor(1, "agentcache-compiler") as compiler:
            if device in (None, "cpu") and dtype not in ("float32", torch.float32):
                compiler.submit(linear_compiled.compile_products, weights is not None)
            with _TURNS.setdefault(os.getpid(), threading.Lock()):
                loaded = _loaded(model, options, hub)
        for module in loaded.modules() if bits == 4 else ():
            if getattr(module, "support_avx512bf16_for_cpu", False) and (module.out_features % 32 or module.in_features % 64):
                module.support_avx512bf16_for_cpu = False  # bitsandbytes packs whole blocks only, and fails on other shapes
        tokenizer = tokenizer if tokenizer is not None else _tokenizer(model, hub, loaded)
    except UNREADABLE as error:
        from .unreadable import refusal

        raise refusal(str(model), error) from error
    if weights is not None:
        quantize(loaded)
    return (loaded.to(device) if device and not bits else loaded).eval(), tokenizer


def _check_given(model: Any, tokenizer: Any, loading: Any) -> None:
    """Refuse what is no model, a loaded one without its tokenizer, or with options of loading."""
    if not isinstance(model, torch.nn.Module):
        of = "; of a pipeline pass pipe.model and pipe.tokenizer" if hasattr(model, "model") else ""
        raise ConfigError(f"model={model!r:.100}: must be a Hugging Face id, a folder, or a loaded model with its tokenizer{of}")
    if tokenizer is None:
        raise ConfigError(f"tokenizer=None with a loaded model {type(model).__name__!r}: pass its tokenizer too")
    if loading:
        raise ConfigError(
            "device, dtype, weights, load_in_*bit, revision, token and trust_remote_code apply to a model id or folder: "
            "load the model that way yourself"
        )


def quantize(model: Any) -> None:
    """Make the weights of a causal model's layers and head int8, in place, but for those that latent attention takes apart (latents.py)."""
    from . import int8

    int8.check("int8")
    if is_quantized(model):
        raise ConfigError(f"weights='int8' with {type(model).__name__!r}, whose weights are quantised already: leave it out")
    layers = list(layers_of(decoder_of(model)).modules())
    parted = {module.kv_b_proj for module in layers if hasattr(module, "expand_kv")}
    int8.quantize((*(layer for layer in layers if layer not in parted), model.get_output_embeddings()))


def _loaded(model: Any, options: dict[str, Any], hub: dict[str, Any]) -> Any:
    """The model of a checkpoint: of text, or of images and text where there is no other. Only text is asked of it."""
    options["output_loading_info"] = True
    try:
        made, found = AutoModelForCausalLM.from_pretrained(model, **options)
    except ValueError:
        kind = AutoConfig.from_pretrained(model, **hub).model_type
        if kind in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES or kind not in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES:
            raise
        made, found = AutoModelForImageTextToText.from_pretrained(model, **options)
    parameters = dict(made.named_parameters())
    missing = [name for name in found["missing_keys"] if name in parameters]
    # biases and norms that a checkpoint leaves out have a neutral value; transformers leaves out the magnitudes of a DoRA, which have none
    random = sorted(name for name in missing if parameters[name].ndim > 1 or ".lora_" in name)
    scales = sorted(name for name in found["unexpected_keys"] if ".weight_scale" in name)  # of quantised weights that were read without
    places = {name.rpartition(".weight_scale")[0].partition(".experts.")[0] + "." for name in scales}
    if random or any(name.startswith(tuple(places)) for name in parameters):
        from .unreadable import lost, unscaled

        raise ValueError(lost(random, type(made).__name__) if random else unscaled(scales))
    return with_soft_caps(made)


def with_soft_caps(model: Any) -> Any:
    """The model with an attention that has its soft caps: transformers 5.20, of Python 3.10, gives it sdpa, which leaves them out."""
    if getattr(model.config, "attn_logit_softcapping", None) and model.config._attn_implementation == "sdpa":
        model.set_attn_implementation("eager")
    return model


def _tokenizer(model: Any, hub: dict[str, Any], loaded: Any) -> Any:
    """Its tokenizer, or the base's of an adapter without one; where that has no chat template, with the one in a file for its processor."""
    try:
        found = AutoTokenizer.from_pretrained(model, **hub)
    except (OSError, ValueError):
        if not hasattr(loaded, "peft_config"):
            raise
        model, hub = loaded.config._name_or_path, {name: value for name, value in hub.items() if name != "revision"}
        found = AutoTokenizer.from_pretrained(model, **hub)
    if getattr(found, "chat_template", None) is None:
        asked = {name: value for name, value in hub.items() if name != "trust_remote_code"}
        missing = dict.fromkeys((f"_raise_exceptions_for_{what}" for what in ("missing_entries", "connection_errors", "gated_repo")), False)
        if (path := cached_file(model, "chat_template.json", **asked, **missing)) is not None:
            found.chat_template = json.loads(Path(path).read_text(encoding="utf-8"))["chat_template"]
    return found


def place(device: str) -> torch.device:
    """The device of this name. ConfigError: it cannot be used here."""
    try:
        return torch.empty(0, device=device).device
    except (RuntimeError, AssertionError, TypeError) as error:  # no such device, or not in this build of torch
        said = str(error).strip().partition("\n")[0].rstrip(".")
        raise ConfigError(f"device={device!r}: cannot be used here ({said:.200}); use 'cpu', or 'cuda' where there is one") from error


def _check(model: Any, device: str | None, dtype: str | torch.dtype | None, revision: str | None) -> None:
    """Refuse what would fail later with words about something else."""
    folder = Path(str(model))
    if not folder.is_dir() and (folder.is_absolute() or str(model).startswith(".")):
        from .unreadable import refused

        raise refused(str(model), "is no folder" if folder.exists() else "does not exist")
    if (folder / "adapter_config.json").exists():  # without PEFT transformers passes it over
        from .. import extras

        extras.library("peft", "0.18", "adapters", f"adapter {str(model)!r}")
    if not folder.is_dir() and get_close_matches(str(model), [embedded.NAME], cutoff=0.8):  # a Hub that is not reached takes a minute
        raise ModelLoadError(f"model {str(model)!r} cannot be loaded: there is no such folder; did you mean {embedded.NAME!r}?")
    if revision is not None and folder.is_dir():
        raise ConfigError(f"revision={revision!r} with the folder {str(model)!r}, which holds one revision: name the Hugging Face id")
    if device is not None:
        place(device)
    if isinstance(dtype, str) and dtype != "auto" and not isinstance(getattr(torch, dtype.removeprefix("torch."), None), torch.dtype):
        raise ConfigError(f"dtype={dtype!r}: must be 'auto' or one of torch's, such as 'bfloat16' or 'float32'")


def _quantization(model: Any, dtype: Any, bits: int, hub: dict[str, Any]) -> Any:
    if bits == 8:
        return BitsAndBytesConfig(load_in_8bit=True)
    if dtype in (None, "auto"):
        dtype = getattr(AutoConfig.from_pretrained(model, **hub), "dtype", None)
    return BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=dtype or torch.float32)


def decoder_of(model: Any) -> Any:
    """The module that holds the layers of a causal language model, or of the language model within one that also sees."""
    found = model.get_decoder()
    if layers_name(found):
        return found
    layered = [module for module in model.modules() if isinstance(getattr(module, "layers", None), torch.nn.ModuleList)]
    return next((module for module in layered if hasattr(module, "embed_tokens")), layered[0] if layered else found)


def layers_name(decoder: Any) -> str:
    """The attribute of a decoder that lists its layers (GPT-2 says `h`); "" if it has none."""
    return next((name for name in ("layers", "h") if isinstance(getattr(decoder, name, None), torch.nn.ModuleList)), "")


def layers_of(decoder: Any) -> torch.nn.ModuleList:
    """The layers of a decoder, in order; none if it does not list them."""
    name = layers_name(decoder)
    return getattr(decoder, name) if name else torch.nn.ModuleList()


def cache_name(model: Any) -> str:
    """The keyword by which a module takes its cache: `cache` since transformers 5.24, Mamba's said `cache_params` before."""
    takes = inspect.signature(type(model).forward).parameters
    return next((name for name in ("cache", "cache_params") if name in takes), "past_key_values")


def cache_in(out: Any, name: str) -> Any:
    """The cache in a module's output, whose class may be newer than the module's code; None without one."""
    return getattr(out, "cache" if hasattr(out, "cache") else name, None)


@contextmanager
def first_layers(held: Any) -> Iterator[None]:
    """Give an HFModel the first layers alone for a while: as many as it takes to have one of each kind.

    Its model and decoder are other objects then, which share all else: whoever computes with the owner's meanwhile has all layers.
    """
    model, decoder = whole = held.model, held.decoder
    name, layers, types = layers_name(decoder), layers_of(decoder), getattr(held.config, "layer_types", None) or ()
    kinds = [(types[at : at + 1], *(type(module) for module in layer.modules())) for at, layer in enumerate(layers)]
    path = next(path for path, module in model.named_modules() if module is decoder)
    held.model = held.decoder = _with_child(decoder, name, layers[: max(kinds.index(kind) for kind in kinds) + 1])
    while path:
        path, _, name = path.rpartition(".")
        held.model = _with_child(model.get_submodule(path), name, held.model)
    try:
        yield
    finally:
        held.model, held.decoder = whole


def _with_child(module: Any, name: str, child: torch.nn.Module) -> Any:
    twin = copy(module)
    twin._modules = {**module._modules, name: child}
    if "_hf_hook" in vars(twin):
        vars(twin).pop("forward", None)  # accelerate's, which runs the module that it was made for
    return twin


def known_ids(model: Any, vocab: int) -> int:
    """The number of ids that a model has embeddings of: `vocab`, or those it was resized to."""
    try:
        return int(getattr(model.get_input_embeddings(), "num_embeddings", vocab))
    except NotImplementedError:  # transformers does not know where they are
        return vocab


def unwrap(wrapper: Any) -> Any:
    """The transformers model inside torch.compile's and PEFT's wrappers; ModelError for what is something else."""
    model: Any = wrapper
    if isinstance(model, torch.nn.DataParallel):
        raise ModelError(f"{type(model).__name__!r} spreads batches over devices: pass its `.module`")
    model = getattr(model, "_orig_mod", model)  # torch.compile
    if hasattr(model, "get_base_model") and hasattr(model, "peft_config"):
        if any(getattr(config, "is_prompt_learning", False) for config in model.peft_config.values()):
            raise ModelError(f"{type(model).__name__!r} with a prompt-learning adapter feeds vectors, not tokens: unload it")
        model = model.get_base_model()
        model = getattr(model, "_orig_mod", model)
    if not all(hasattr(model, name) for name in ("generate", "config", "parameters")):
        raise ModelError(f"{type(wrapper).__name__!r} is not a causal language model of transformers: pass a name, a folder or one")
    if getattr(model.config, "is_encoder_decoder", False):
        raise ModelError(f"{type(model).__name__!r} is an encoder-decoder: only decoder-only models can be used")
    for name, weight in model.named_parameters():
        if weight.layout is not torch.strided:
            raise ModelError(f"weight {name!r} has layout {weight.layout}: only dense weights can be used, as `.to_dense()` makes them")
    return model


def one_device(model: Any) -> torch.device:
    """The device that holds all weights; DeviceMapError names the devices if there are several, or weights were offloaded."""
    mapped = {str(place) for place in (getattr(model, "hf_device_map", None) or {}).values()}
    devices = {p.device for p in model.parameters()}
    if len(mapped) > 1 or mapped & {"disk", "meta"} or len(devices) != 1 or next(iter(devices)).type == "meta":
        spread = sorted(mapped if len(mapped) > 1 else {str(d) for d in devices} | mapped)
        raise DeviceMapError(f"weights on {spread!r}: several devices or offloading are not supported; load the model onto one device")
    return devices.pop()
