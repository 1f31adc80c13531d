"""llama.cpp, for `agentcache bench latency --llama-cpp`: the measured model's own weights as GGUF, its prefix resident. Knows no engine.

Physics: both read all weights once per token; Q8_0 has 1.06 bytes a weight where bf16 has 2. Which instructions llama.cpp uses is decided
when it is built, so `about` says what this build has.
"""

from __future__ import annotations

import ctypes
import importlib
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch

from ..errors import ConfigError
from ..model.hf import HFModel
from ..model.int8 import wide
from .baselines import Timed, timed
from .environment import Keep

KINDS = ("BF16", "Q8_0")  # of weights; norms and biases are fp32
FAMILIES = {"qwen2": "QWEN2", "qwen3": "QWEN3"}  # whose rotated channels lie in a GGUF file as they do in transformers
BATCH = 512


def about() -> dict[str, str]:
    """The version, and what this build was made for; ConfigError if it is not installed."""
    try:
        llama, _ = importlib.import_module("llama_cpp"), importlib.import_module("gguf")
    except ImportError as error:
        raise ConfigError(f"--llama-cpp: {error}; pip install 'agentcache-llm[llama-cpp]' builds it for this processor") from error
    return {"version": llama.__version__, "system": llama.llama_print_system_info().decode()}


def write(model: HFModel, kind: str, path: Path) -> None:
    """A GGUF file of the model's weights; ConfigError for a family that cannot be written so."""
    gguf: Any = importlib.import_module("gguf")
    config = model.model.config
    if config.model_type not in FAMILIES or model.quantized:
        raise ConfigError(f"--llama-cpp: {config.model_type!r} cannot be written as GGUF here: use one of {', '.join(FAMILIES)}")
    made = gguf.GGUFWriter(path, config.model_type, use_temp_file=True)
    made.add_context_length(config.max_position_embeddings)
    made.add_embedding_length(config.hidden_size)
    made.add_block_count(config.num_hidden_layers)
    made.add_feed_forward_length(config.intermediate_size)
    made.add_head_count(config.num_attention_heads)
    made.add_head_count_kv(config.num_key_value_heads)
    made.add_layer_norm_rms_eps(config.rms_norm_eps)
    made.add_rope_freq_base(config.rope_parameters["rope_theta"])
    if dim := getattr(config, "head_dim", None):
        made.add_key_length(dim)
        made.add_value_length(dim)
    made.add_tokenizer_model("no_vocab")
    made.add_vocab_size(config.vocab_size)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[FAMILIES[config.model_type]], config.num_hidden_layers)
    with model.mixers.given() if model.mixers else nullcontext():
        for name, weight in model.model.named_parameters():
            to = gguf.GGMLQuantizationType[kind if weight.ndim > 1 else "F32"]
            numbers = gguf.quants.quantize(wide(weight).numpy(), to)
            made.add_tensor(names.get_name(name, try_suffixes=(".weight", ".bias")), numbers, raw_dtype=to)
    made.write_header_to_file()
    made.write_kv_data_to_file()
    made.write_tensors_to_file()
    made.close()


@contextmanager
def started(model: HFModel, keep: Keep) -> Iterator[dict[str, LlamaCpp]]:
    """One for each kind of weights, by name, from temporary files; on as many threads as torch has. keep: gets `about`."""
    keep({"llama_cpp": about()})
    with ExitStack() as open:
        folder, made = open.enter_context(TemporaryDirectory()), {}
        for kind in KINDS:
            path = Path(folder) / f"{kind}.gguf"
            write(model, kind, path)
            made[f"llama_{kind.lower()}"] = other = LlamaCpp(path, torch.get_num_threads())
            open.callback(other.close)
        yield made


class LlamaCpp:
    """The model of a GGUF file and one sequence of it. Close it."""

    def __init__(self, path: Path, threads: int) -> None:
        self._llama = llama = importlib.import_module("llama_cpp")
        self._said = llama.llama_log_callback(lambda level, text, data: None)  # it talks a lot
        llama.llama_log_set(self._said, ctypes.c_void_p(0))
        self._threads = threads
        self._context: Any = None
        self._room, self._held = 0, [-1]
        self._model = llama.llama_model_load_from_file(str(path).encode(), llama.llama_model_default_params())
        if not self._model:
            raise ConfigError(f"llama.cpp {llama.__version__} does not read the file that was written for it: try another release")
        self._vocab = llama.llama_vocab_n_tokens(llama.llama_model_get_vocab(self._model))

    def answer(self, ids: Sequence[int], prefix: int, new: int) -> Timed:
        """`new` greedy tokens after ids, of which the first `prefix` are resident before the clock runs."""
        self._hold(list(ids[:prefix]), len(ids) + new)
        stamps: list[float] = []
        drawn: list[int] = []
        given, began = list(ids[prefix:]), time.perf_counter()
        while len(drawn) < new:
            given = [self._next(given)]
            drawn += given
            stamps.append(time.perf_counter())
        return timed(began, stamps, drawn)

    def _hold(self, prefix: list[int], tokens: int) -> None:
        """Have the prefix in the sequence and nothing else, with room for so many tokens."""
        llama = self._llama
        if tokens > self._room:
            self._room, self._held = -(-tokens // 256) * 256, [-1]
            options = llama.llama_context_default_params()
            options.n_ctx, options.n_threads, options.n_threads_batch = self._room, self._threads, self._threads
            self._free()
            self._context = llama.llama_init_from_model(self._model, options)
            assert self._context, "llama.cpp made no context"
        memory = llama.llama_get_memory(self._context)
        if self._held != prefix:
            llama.llama_memory_clear(memory, False)
            self._next(prefix)
            self._held = prefix
        llama.llama_memory_seq_rm(memory, 0, len(prefix), -1)

    def _next(self, ids: list[int]) -> int:
        """Run tokens after those that it has; the likeliest next one."""
        llama = self._llama
        for start in range(0, len(ids), BATCH):
            part = ids[start : start + BATCH]
            held = (llama.llama_token * len(part))(*part)  # the batch only points to it
            failed = llama.llama_decode(self._context, llama.llama_batch_get_one(held, len(part)))
            assert failed == 0, f"llama.cpp could not run {len(part)} tokens: code {failed}"
        logits = llama.llama_get_logits_ith(self._context, -1)
        return int(np.ctypeslib.as_array(logits, (self._vocab,)).argmax())

    def _free(self) -> None:
        if self._context:
            self._llama.llama_free(self._context)

    def close(self) -> None:
        self._free()
        self._llama.llama_model_free(self._model)
