"""What must be equal for KV to be valid, as a digest per layer, cumulative: layer l stands for all weights below and in it.

Weights, code and settings count (behaviour.py). Tokenizer and chat template decide the ids, not the KV; the output head decides logits, not
the KV: none of them is in it.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from typing import Any
from weakref import WeakKeyDictionary

import torch
import transformers
from blake3 import blake3
from torch.utils.weak import WeakIdKeyDictionary

from ..errors import ModelError
from . import behaviour
from .description import Names, describe, root
from .kernels import linear_library
from .loading import decoder_of, layers_of
from .state_token import StateToken, tensors_of

REVISION = "4"  # of our own attention and layer code: raise it when their bits change
TRIES = 5  # of hashing weights that change while they are hashed, and of learning what a forward writes
REHEARSED = (1, 2, 3)  # tokens of the forwards that show it
PAUSE_S = 0.05  # the most that is waited after each
_IRRELEVANT = frozenset(
    "_name_or_path transformers_version torch_dtype dtype use_cache output_attentions output_hidden_states return_dict architectures "
    "attn_implementation _attn_implementation _attn_implementation_internal eos_token_id bos_token_id pad_token_id task_specific_params "
    "id2label label2id problem_type is_encoder_decoder tie_word_embeddings _experts_implementation_internal".split()
)


class Fingerprint:
    """A model's layer digests: hashed once; looked at before each request and before pages are kept; what changed is hashed again.

    Noticed are edits in place, replaced tensors, adapters, hooks, patched code and changed settings at once; edits through `.data` or NumPy
    where they meet a sample of each tensor's values. State inside a hook, and what a module writes in its own forward, is not seen: call
    `invalidate`. Safe to use from many threads.

    last_digest: `whole` at the last look. refusal: why nothing that is computed now can be reused, empty if it can. foreign: code that
    takes part and is not ours, torch's, transformers' or PEFT's, in words.
    """

    def __init__(self, model: Any, kernel: str, layout: str = "") -> None:
        self._model = model
        self._kernels = [kernel, layout] if layout else [kernel]
        self._built = self._device_and_dtype()
        self._lock = threading.RLock()
        self._names = Names()
        self._digests: WeakIdKeyDictionary = WeakIdKeyDictionary()  # of each tensor: its version and address then, and its digest
        self._code = behaviour.Code()
        self._written: WeakKeyDictionary[torch.nn.Module, set[str]] = WeakKeyDictionary()  # by the model's own forward
        self._learned = 0  # attempts since a forward left everything as it was
        self._layers: tuple[str, ...] = ()
        self.token: StateToken | None = None
        self.last_digest = ""
        self.refusal = ""
        self.foreign = ""
        self.hashed_bytes = 0

    @property
    def layers(self) -> tuple[str, ...]:
        """Cumulative digests of all layers, of now; none while weights do not rest. ModelError: an adapter cannot be used."""
        self._look(sampled=False)
        return self._layers

    @property
    def whole(self) -> str:
        """The digest of the last layer: what whole pages need. Empty while weights do not rest."""
        self._look(sampled=False)
        return self.last_digest

    def sampled(self) -> str:
        """`whole`, after a look at a sample of all values, too. 3 ms for 28 layers after a forward."""
        self._look(sampled=True)
        return self.last_digest

    def invalidate(self) -> None:
        """Declare that weights changed in a way that cannot be noticed."""
        with self._lock:
            self._forget()
            self._names = Names()  # hooks may hold another state
            self._written, self._learned = WeakKeyDictionary(), 0
            self.token = None

    def changed_since(self, token: StateToken | None) -> bool:
        """Whether the model is not what it was at this token, after a forward. Looks at everything if `foreign` code takes part."""
        if token is None or self.token is not token:
            return True
        changed = token.changed() if self.foreign else token.tensors_changed()
        self._learned = self._learned if changed else 0
        return changed

    def learn(self, rehearse: Callable[[int], Any]) -> None:
        """Find out what the model's own forward writes, after one that changed it: the next token and digests leave it out.

        rehearse(tokens): run a forward by itself. What changes in each of them and never between them is the forward's own. A tensor that
        is written so refuses reuse, and so does a model that goes on moving.
        """
        with self._lock:
            if not self.foreign or self._learned > TRIES:
                return
            self._learned += 1
            found = [self._rehearsed(rehearse, tokens) for tokens in REHEARSED]
            for module, name in set.intersection(*found):
                self._written.setdefault(module, set()).add(name)
            self.token = None

    def _rehearsed(self, rehearse: Callable[[int], Any], tokens: int) -> set[tuple[torch.nn.Module, str]]:
        """What one forward changes, without what changes when none runs for as long."""
        before, began = self._notes(), time.perf_counter()
        rehearse(tokens)
        after, took = self._notes(), time.perf_counter() - began
        time.sleep(min(took, PAUSE_S))
        later = self._notes()
        return {key for key, note in after.items() if before.get(key) != note and later.get(key) == note}

    def _notes(self) -> dict[tuple[torch.nn.Module, str], Any]:
        """What modules hold beside parameters, in words or as tensors' identities; adapters of PEFT write nothing of that."""
        notes: dict[tuple[torch.nn.Module, str], Any] = {}
        for module in self._model.modules():
            if root(type(module).__module__) != "peft":
                notes |= {(module, name): describe(value, self._names) for name, value in behaviour.settings(module).items()}
                for name, tensor in tensors_of(module):
                    notes[module, name] = (id(tensor), 0 if tensor.is_inference() else tensor._version)
        return notes

    def _refusal(self, token: StateToken) -> str:
        for module, names in self._written.items():
            if found := sorted(names & {name for name, _ in tensors_of(module)}):
                return f"{type(module).__name__}.{found[0]} is a tensor that its own forward writes"
        restless = f"each forward of {type(self._model).__name__!r} changes it: remove that, or call Engine.invalidate() once it is over"
        return behaviour.unrepeatable(token.modules) or (restless if self._learned > TRIES else "")

    def _look(self, sampled: bool) -> None:
        with self._lock:
            token = self.token
            if token is not None and not token.changed() and not (sampled and token.edited()):
                return
            if token is None or token.edited_silently():
                self._forget()
            for _ in range(TRIES):
                token = self._hashed()
                if not token.changed() and not token.edited():
                    self.token = token
                    return
            self.token, self._layers, self.last_digest = None, (), ""
            self.refusal = f"weights of {type(self._model).__name__!r} changed {TRIES} times while they were hashed"

    def _forget(self) -> None:
        self._digests.clear()
        linear_library.forget()

    def _hashed(self) -> StateToken:
        """_hash() on a new thread: one that forked left its OpenMP team in the parent. A pool takes none once the main thread has ended."""
        hashed: Future[StateToken] = Future()

        def run() -> None:
            try:
                hashed.set_result(self._hash())
            except BaseException as error:  # noqa: BLE001
                hashed.set_exception(error)

        hasher = threading.Thread(target=run, name="agentcache-hash")
        hasher.start()
        try:
            return hashed.result()
        finally:
            hasher.join()
            hashed = None  # type: ignore[assignment]  # the traceback of its error leads to it

    def _hash(self) -> StateToken:
        try:
            token = StateToken(self._model, self._written)
        except RuntimeError:  # a dictionary grew: once more
            token = StateToken(self._model, self._written)
        behaviour.refuse_activated(token.modules)
        if (build := self._device_and_dtype()) != self._built:
            raise ModelError(f"the model has become {build!r}, its engine was made for {self._built!r}: make another engine of it")
        if self.token is None or self.token.code_changed():
            self._code = behaviour.Code()
        self._code = self._code.of_libraries()
        model, decoder = self._model, decoder_of(self._model)
        layers = layers_of(decoder)
        running = blake3(self._all_but_layers().encode())
        later = [m for layer in layers for m in layer.modules()] + list(getattr(decoder, "norm", torch.nn.Module()).modules())
        running.update(behaviour.traits(model, self._names, self._code).encode())
        self._absorb(running, decoder.named_modules(), frozenset(map(id, later)))
        digests = []
        for layer in layers:
            self._absorb(running, layer.named_modules())
            digests.append(running.hexdigest(16))
        self._names.end()
        self._layers, self.last_digest = tuple(digests), digests[-1]
        self.foreign = behaviour.foreign(token.modules)
        self._learned = self._learned if self.foreign else 0
        self.refusal = self._refusal(token)
        return token

    def _device_and_dtype(self) -> list[str]:
        """What pages and kernels were made for: devices and numbers of a type."""
        return [next(self._model.parameters()).device.type, str(self._model.dtype)]

    def _all_but_layers(self) -> str:
        """Everything but the layers: config, code, versions, kernel, layout of pages, device class, type, quantisation."""
        kept = {key: value for key, value in self._model.config.to_dict().items() if key not in _IRRELEVANT}
        config = json.dumps(kept, sort_keys=True, default=str)
        parts = [REVISION, type(self._model).__qualname__, config, behaviour.global_settings(self._names)]
        parts += [transformers.__version__, torch.__version__, *self._kernels]
        return "\0".join([*parts, *self._built])

    def _absorb(self, running: Any, modules: Iterable[tuple[str, torch.nn.Module]], skip: frozenset[int] = frozenset()) -> None:
        for path, module in modules:
            if id(module) in skip:
                continue
            written = self._written.get(module, ())
            running.update(f"{path} {behaviour.traits(module, self._names, self._code, written)}".encode())
            for name, tensor in tensors_of(module):
                if name in written:
                    continue
                running.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
                running.update(self._digest(tensor))

    def _digest(self, tensor: torch.Tensor) -> bytes:
        """Digest of a tensor's bytes; remembered as long as the tensor lives and is neither written to nor moved."""
        state = (0 if tensor.is_inference() else tensor._version, tensor.data_ptr())
        known = self._digests.get(tensor)
        if known is None or known[0] != state:
            threads = torch.get_num_threads() if tensor.nbytes >> 20 else 1  # of its own: in a forked child AUTO waits for threads for ever
            digest = blake3(max_threads=threads)
            digest.update(tensor.detach().to("cpu").contiguous().reshape(-1).view(torch.uint8).numpy().data)
            self.hashed_bytes += tensor.nbytes
            known = self._digests[tensor] = (state, digest.digest())
        return known[1]
