"""llama.cpp's sequence files, for `python -m benchmarks.store`: the same KV shape written and read by llama-cpp-python. Knows no store.

The model is made here: of the asked KV shape, with next to no other weights, so that filling the sequence takes seconds. Its KV is fp16.
"""

from __future__ import annotations

import ctypes
import importlib
import os
from pathlib import Path
from typing import Any

import numpy as np

from agentcache.kv_spec import KVSpec

WIDTH = 64  # of the hidden states and the vocabulary: only keys and values are wanted
BATCH = 512


def installed() -> bool:
    """Whether llama-cpp-python and gguf are there."""
    return all(importlib.util.find_spec(name) is not None for name in ("llama_cpp", "gguf"))


def write_model(path: Path, spec: KVSpec) -> None:
    """A GGUF file of a model with this KV shape."""
    gguf = importlib.import_module("gguf")
    heads, rng = spec.kv_heads, np.random.default_rng(0)
    made = gguf.GGUFWriter(str(path), "qwen3")
    made.add_context_length(1 << 17)
    made.add_embedding_length(WIDTH)
    made.add_block_count(spec.layers)
    made.add_feed_forward_length(WIDTH)
    made.add_head_count(heads)
    made.add_head_count_kv(heads)
    made.add_key_length(spec.head_dim)
    made.add_value_length(spec.head_dim)
    made.add_layer_norm_rms_eps(1e-6)
    made.add_rope_freq_base(10_000.0)
    made.add_tokenizer_model("no_vocab")
    made.add_vocab_size(WIDTH)
    wide = heads * spec.head_dim
    shapes = {"attn_q": (wide, WIDTH), "attn_k": (wide, WIDTH), "attn_v": (wide, WIDTH), "attn_output": (WIDTH, wide)}
    shapes |= dict.fromkeys(("ffn_gate", "ffn_up", "ffn_down"), (WIDTH, WIDTH))
    norms = {"attn_norm": WIDTH, "ffn_norm": WIDTH, "attn_q_norm": spec.head_dim, "attn_k_norm": spec.head_dim}
    made.add_tensor("token_embd.weight", rng.standard_normal((WIDTH, WIDTH), np.float32))
    made.add_tensor("output_norm.weight", np.ones(WIDTH, np.float32))
    for layer in range(spec.layers):
        for name, shape in shapes.items():
            made.add_tensor(f"blk.{layer}.{name}.weight", rng.standard_normal(shape, np.float32) * 0.05)
        for name, size in norms.items():
            made.add_tensor(f"blk.{layer}.{name}.weight", np.ones(size, np.float32))
    made.write_header_to_file()
    made.write_kv_data_to_file()
    made.write_tensors_to_file()
    made.close()


class Sequence:
    """One sequence of `tokens` tokens in a context of llama.cpp's, and the file it is saved to."""

    def __init__(self, spec: KVSpec, tokens: int, place: Path) -> None:
        self._llama = llama = importlib.import_module("llama_cpp")
        self._said = llama.llama_log_callback(lambda level, text, data: None)  # it talks a lot
        llama.llama_log_set(self._said, ctypes.c_void_p(0))
        self.tokens, self.file = tokens, place / "sequence.bin"
        path = place / "model.gguf"
        write_model(path, spec)
        self._model = llama.llama_model_load_from_file(str(path).encode(), llama.llama_model_default_params())
        assert self._model, "llama.cpp did not take the model"
        options = llama.llama_context_default_params()
        options.n_ctx, options.n_batch = -(-tokens // 256) * 256, BATCH
        self._context = llama.llama_init_from_model(self._model, options)
        assert self._context, "llama.cpp made no context"
        self._fill()
        self._ids = (llama.llama_token * tokens)(*self._known())
        self._before = self._state()

    def _known(self) -> list[int]:
        return [n * 7 % WIDTH for n in range(self.tokens)]

    def _fill(self) -> None:
        """Run the tokens, so that there is something to save."""
        llama, ids = self._llama, self._known()
        for start in range(0, self.tokens, BATCH):
            part = ids[start : start + BATCH]
            held = (llama.llama_token * len(part))(*part)  # the batch only points to it
            failed = llama.llama_decode(self._context, llama.llama_batch_get_one(held, len(part)))
            assert failed == 0, f"llama.cpp could not run tokens {start} to {start + len(part)}: code {failed}"

    def _state(self) -> bytes:
        """The sequence's cells as bytes."""
        size = self._llama.llama_state_seq_get_size(self._context, 0)
        buffer = (ctypes.c_uint8 * size)()
        assert self._llama.llama_state_seq_get_data(self._context, buffer, size, 0) == size
        return bytes(buffer)

    def write(self) -> None:
        """The sequence into its file, synchronised as the others are."""
        assert self._llama.llama_state_seq_save_file(self._context, str(self.file).encode(), 0, self._ids, self.tokens) > 0
        fd = os.open(self.file, os.O_RDONLY)
        os.fsync(fd)
        os.close(fd)

    def load(self) -> None:
        """The file into an empty sequence."""
        llama = self._llama
        llama.llama_memory_clear(llama.llama_get_memory(self._context), False)
        ids, count = (llama.llama_token * self.tokens)(), ctypes.c_size_t(0)
        read = llama.llama_state_seq_load_file(self._context, str(self.file).encode(), 0, ids, self.tokens, ctypes.byref(count))
        assert read > 0 and count.value == self.tokens, f"{count.value} of {self.tokens} tokens came back"

    def check(self) -> None:
        """Whether what was loaded last is what was saved."""
        assert self._state() == self._before, "other numbers came back"

    def close(self) -> None:
        self._llama.llama_free(self._context)
        self._llama.llama_model_free(self._model)


def sequence(spec: KVSpec, tokens: int, place: Path) -> Any:
    """A filled sequence, or None where llama-cpp-python is not installed."""
    return Sequence(spec, tokens, place) if installed() else None
