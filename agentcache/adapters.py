"""The adapters of one engine, by name. A name is looked up once, when a request comes: its request keeps the adapter found then."""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from .errors import ConfigError
from .model.hf import HFModel
from .store.deletion import Deletion
from .store.store import Store
from .types import Layout, Message, check_name

if TYPE_CHECKING:
    from .model.adapters import Adapter

PROBE = [Message("user", "?")]  # shows what the template writes before an answer


class Adapters:
    """Names of adapters; safe to use from many threads. render: messages into a prompt. store: drops pages of removed adapters."""

    def __init__(self, model: HFModel, tokenizer: Any, render: Callable[..., Layout], store: Store) -> None:
        self._model, self._tokenizer, self._render, self._store = model, tokenizer, render, store
        self._named: dict[str, Adapter] = {}
        self._lock = threading.Lock()

    @property
    def digests(self) -> dict[str, str]:
        """The digest of each, by name."""
        return {name: adapter.digest for name, adapter in list(self._named.items())}

    def add_all(self, sources: Mapping[str, str | os.PathLike[str]]) -> None:
        """Load an adapter under each name."""
        if not isinstance(sources, Mapping):
            raise ConfigError(f"adapters={sources!r:.100}: must be a dict, from names to folders that PEFT saved or Hub ids")
        for name, source in sources.items():
            self.add(name, source, 1.0)

    def add(self, name: str, source: str | os.PathLike[str], scale: float) -> str:
        """Load an adapter under a name, in the place of one that had it; returns its digest."""
        check_name("name", name)
        if not name:
            raise ConfigError("name='': an adapter needs a name, by which requests ask it")
        if not isinstance(scale, (int, float)) or not 0 < scale < math.inf:
            raise ConfigError(f"scale={scale!r}: must be a positive number; adapter=None asks the base")
        from .model.adapters import load
        from .model.loading import layers_of

        model = self._model
        loaded = load(source, model.model, layers_of(model.decoder), model.fingerprint, scale)
        if loaded.invocation:
            self._check_activated(name, loaded)
        if model.weights and not model.stepped:
            raise ConfigError(f"adapter {name!r}: weights={model.weights!r} with an adapter need layers that are stepped; load without")
        with self._lock:
            before = self._named.get(name)
            loaded.name = name
            loaded = model.adapters.setdefault(loaded.digest, loaded)
            self._named[name] = loaded
            self._drop_unnamed(before)
        return loaded.digest

    def remove(self, name: str) -> bool:
        """Forget a name, and the pages of its adapter unless another name stands for it too; False if there is none of that name."""
        check_name("name", name)
        with self._lock:
            gone = self._named.pop(name, None)
            self._drop_unnamed(gone)
        return gone is not None

    def find(self, name: str) -> Adapter:
        """The adapter of that name. ConfigError: there is none."""
        check_name("adapter", name)
        if (found := self._named.get(name)) is None:
            raise ConfigError(f"adapter={name!r}: there is none of that name, only {sorted(self._named)}; call add_adapter first")
        return found

    def acts_from(self, adapter: Adapter, layout: Layout, whole: bool = True) -> int:
        """The position from which an adapter acts on a prompt. whole: an answer follows; else nothing has invoked an Activated LoRA yet.

        Only what the template writes before the answer invokes: text of users may say the same and moves nothing. Of a raw prompt the last
        occurrence counts, as in PEFT. ConfigError: there is none.
        """
        if not adapter.invocation:
            return 0
        if not whole:
            return len(layout.ids)
        kinds = {span.kind for span in layout.spans}
        start = next((span.start for span in layout.spans if span.kind == "generation"), None if kinds - {"text"} else 0)
        ids, wanted = list(layout.ids), list(adapter.invocation)
        for at in range(len(ids) - len(wanted), -1 if start is None else start - 1, -1):
            if start is not None and ids[at : at + len(wanted)] == wanted:
                return at
        said = self._tokenizer.decode(wanted)
        raise ConfigError(f"this prompt does not end in {said!r}, which invokes its Activated LoRA: ask for an answer, or write it there")

    def _check_activated(self, name: str, adapter: Adapter) -> None:
        """ConfigError if the template cannot show the invocation, or the model cannot change to the adapter amid a prompt."""
        spec, said = self._model.spec, self._tokenizer.decode(list(adapter.invocation))
        if spec is not None and spec.recurrent:
            raise ConfigError(f"adapter {name!r}: an Activated LoRA on a model with recurrent layers is not supported")
        layout = self._render(PROBE)
        try:
            self.acts_from(adapter, layout)
        except ConfigError as error:
            shown = self._tokenizer.decode(list(layout.ids)[-16:])
            raise ConfigError(f"adapter {name!r}: the chat template writes no invocation {said!r} before an answer: {shown!r}") from error

    def _drop_unnamed(self, gone: Adapter | None) -> None:
        """Forget an adapter without a name, and have new pages keep the inputs of the others' first layers."""
        if gone is not None and gone not in self._named.values():
            self._model.adapters.pop(gone.digest, None)
            with self._store.deletions.lock:
                self._store.drop_deleted(Deletion(fingerprint=f"+{gone.digest}"))
        firsts = {known.first_layer for known in self._named.values() if not known.invocation} - {0}
        self._model.keep_boundaries(tuple(sorted(firsts)), "adapters")
