"""All coupling to transformers' models: one packed forward through its public extension points, and the stock path. Knows no storage.

A packed forward runs tokens of several sequences along one axis. Families whose layers we know are stepped (steps.py); the others run
transformers' own modules with our attention function, which finds the page tables in the extra keyword `batch`.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from contextlib import suppress
from dataclasses import replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary, ref

import torch
from torch import nn

from ..kv_spec import KVSpec
from ..openmp import use_threads
from . import steps
from .attention import Attention, Batch, Part
from .behaviour import foreign_hooks, refuse_activated
from .family import STEPPED, Layer, Support, examine, first_use, has_experts, obstacle, slots_of, widths_of
from .fingerprint import Fingerprint
from .kernels import jit
from .kernels.dispatch import SINGLE_ROW_OUTS, Int8Linear, RowPureLinear
from .loading import cache_name, decoder_of, first_layers, layers_name, layers_of, one_device, unwrap
from .numerics import Numerics, probe
from .rope import Rotary, changes_by_length, longest, rotary_of, unrotated
from .wrapped_weights import is_quantized

if TYPE_CHECKING:
    from .adapters import Adapter
    from .recurrent import Mixers, RecurrentState

_PLACES = (3, 11)  # positions of one token whose keys show how they are rotated
_open: WeakKeyDictionary[nn.Module, list[ref[HFModel]]] = WeakKeyDictionary()  # by the model they hold, the oldest first


class HFModel:
    """A causal language model of transformers, ready for packed forwards.

    spec: shape of its KV, None if it cannot be paged, and so is fingerprint. rotary: tables of its angles, None where each layer makes its
    own. unrotated: layers whose keys have no position (NoPE), None if keys cannot be re-indexed. numerics: kernels and paddings in use.
    context_tokens: longest sequence. threads: how many compute, and how many were asked for. weights: "int8" if int8.py quantized them.
    adapters: those that were added, by digest.
    """

    def __init__(self, model: Any) -> None:
        asked = torch.get_num_threads()
        self.threads = (use_threads(asked), asked)
        self.model = unwrap(model)
        refuse_activated(self.model.modules())
        self.config = self.model.config.get_text_config()
        self.device = one_device(self.model)
        self.dtype: torch.dtype = self.model.dtype
        self.quantized = is_quantized(self.model)
        self.weights = "int8" if any(type(module) is Int8Linear for module in self.model.modules()) else ""
        tokens = max(0, int(getattr(self.config, "max_position_embeddings", 0) or 0)) or 1 << 20  # XLNet says -1
        self.context_tokens = longest(tokens, getattr(self.config, "rope_parameters", None) or {})
        self.support = Support(getattr(self.config, "model_type", "") or type(self.config).__name__, False)
        self.vocab = int(self.config.vocab_size)
        self.spec: KVSpec | None = None
        self.rotary: Rotary | None = None
        self.fingerprint: Fingerprint | None = None
        self.unrotated: tuple[int, ...] | None = None
        self.adapters: dict[str, Adapter] = {}
        self._boundaries: dict[str, tuple[int, ...]] = {}
        self._plain = True
        self._slots: tuple[int, ...] = ()  # of pages, by call of attention
        self._calls = 0  # of attention by the layers that are there while it has its first layers alone
        self._shape: steps.Shape | None = None
        self._interface: Any = None  # by which transformers' modules attend to pages, once they do
        self.graphs: Any = None  # on a GPU
        self._widths: tuple[int, ...] = ()
        if experts := list(filter(has_experts, self.model.modules())):
            from . import experts as _  # noqa: F401  what it registers is part of fingerprints, in each process
        self.experts = [] if self.quantized else experts
        self.mixers: Mixers | None = None
        self._growing = [m for m in self.model.modules() if getattr(m, "rope_type", "") == "dynamic"]
        self.decoder = decoder_of(self.model)
        self._restore: list[Callable[[], Any]] = [partial(self.model.train, self.model.training)]
        _open.setdefault(self.model, []).append(ref(self))
        self.model.eval()
        try:
            self._prepare()
        except BaseException:
            self.close()
            raise

    @property
    def numerics(self) -> Numerics | None:
        """Kernels and paddings for the threads of the calling thread; None if the model cannot be paged."""
        if (spec := self.spec) is None:
            return None
        dims = (width for _, *both in spec.layer_widths for width in both if width)
        return probe(self.dtype, self.device, self._widths, spec.kv_heads, dims, self._plain)

    @property
    def stepped(self) -> bool:
        """Whether layers run by our own loop. Not while hooks, adapters or patches sit in them."""
        return self._shape is not None and self._shape.holds()

    def regime(self, length: int) -> str | None:
        """The name of the rotary frequencies for a sequence of `length` tokens; None if it has none, or cannot be paged."""
        if not self.support.paged:
            return None
        return self.rotary.regime(length) if self.rotary is not None else ""

    @property
    def bitwise(self) -> bool:
        """Whether equal tokens give equal bits here, whatever the chunking, packing or reuse."""
        known = self.numerics is not None and self.numerics.pure and self.support.row_pure and not self.quantized
        return known and self.fingerprint is not None and not self.fingerprint.foreign

    @property
    def stop_ids(self) -> frozenset[int]:
        """The ids that end a completion, from the generation config."""
        sources = self.model.generation_config, self.config
        ends = next((found for source in sources if (found := getattr(source, "eos_token_id", None)) is not None), None)
        return frozenset([ends] if isinstance(ends, int) else ends or [])

    def strict_calls(self, wanted: bool | None) -> bool:
        """Whether calls are held to their tools' schemas: as wanted, or as the generation config says (an own key, for small models)."""
        return bool(getattr(self.model.generation_config, "strict_calls", False)) if wanted is None else wanted

    def new_state(self) -> RecurrentState | None:
        """The state of recurrent layers before the first token; None if the model has no such layers."""
        packs_pieces = self.support.packs_pieces and not (self.fingerprint and self.fingerprint.foreign)
        if self.spec is None or not self.spec.recurrent:
            return None
        from .recurrent import RecurrentState

        return RecurrentState(self.config, packs_pieces, self.support.alignment)

    def attentions(self) -> list[Attention]:
        """How each layer attends, found by a forward of one token; only for a model that runs transformers' own modules, and is idle."""
        return [layer.attention for layer in self._watched(0) if layer.value.shape[-1]]

    @property
    def layout(self) -> str:
        """How layers lie in a page, in words, and whether pieces are joined; "" where each has keys and values alone, of one shape."""
        assert self.spec is not None
        plain = len(self._slots) == self.spec.layers and not self.spec.widths and not self.spec.recurrent
        pieces = f"joined {self.support.packs_pieces}, unit {self.support.alignment}, compiled {self.mixers.compiled if self.mixers else 0}"
        return "" if plain else f"slots {self._slots}, widths {self.spec.widths}, {pieces}"

    def keep_boundaries(self, layers: tuple[int, ...], owner: str = "segments") -> None:
        """Keep the inputs of these layers, and of those that other owners want, with new pages, if layers are stepped."""
        self._boundaries[owner] = layers
        layers = tuple(sorted(set().union(*self._boundaries.values())))
        if self.spec is not None and self.spec.boundaries != layers and self.stepped:
            self.spec = replace(self.spec, boundaries=layers, hidden=self.config.hidden_size if layers else 0)

    def _prepare(self) -> None:
        config, decoder, name = self.config, self.decoder, self.support.name
        if self.quantized:
            first_use(self.stock, name)  # before weights are hashed
        widths = {p.shape[1] for p in (layers_of(decoder) or decoder).parameters() if p.ndim == 2 and p.is_floating_point()}
        self._widths = tuple(widths.union(*(m.down_proj.shape[1:] for m in self.experts))) or (config.hidden_size,)
        known = name in STEPPED and getattr(self.model, "model", None) is decoder and not self.quantized
        stepped = known and not examine(self.model, decoder)
        if stepped:
            heads = config.num_attention_heads
            dim = getattr(config, "head_dim", None) or config.hidden_size // heads
            self.rotary = Rotary(decoder.rotary_emb, config, self.dtype, self.device)
            self.spec = KVSpec(
                config.num_hidden_layers, getattr(config, "num_key_value_heads", None) or heads, dim, self.dtype, self.device
            )
            self.support, self.unrotated, self._slots = Support(name, True, "", True), (), tuple(range(self.spec.layers))
            self._shape = steps.Shape(self.model) if self.rotary.dims == dim else None
        if not self.stepped and (why := self._refusal(decoder)):
            self.support, self.spec, self.rotary, self.unrotated = replace(self.support, paged=False, why=why), None, None, None
            return self._undo_changes(1)
        assert self.numerics is not None
        self.fingerprint = Fingerprint(self.model, self.numerics.kernel, self.layout)
        by_length = any(changes_by_length(getattr(module, "rope_type", None)) for module in self.model.modules())
        if self.device.type == "cuda" and (stepped or not by_length):  # their modules look at each length
            from .cuda_graphs import Graphs

            self.graphs = Graphs(self.device)

    def _refusal(self, decoder: Any) -> str:
        from .proof import MODEL_FAULTS

        try:
            return self._discover(decoder)
        except MODEL_FAULTS as error:
            return f"its proof failed: {type(error).__name__}: {next(iter(str(error).strip().splitlines()), 'no message')}"

    def _discover(self, decoder: Any) -> str:
        """Find out what the layers keep, and prove that it can be reused. Returns why it cannot, "" if it can."""
        from .indexers import Indexers
        from .latents import Latents
        from .proof import proven
        from .recurrent import layers_with_state

        compiled = (m._compiled_call_impl or hasattr(m.forward, "_torchdynamo_orig_callable") for m in self.model.modules())
        if any(compiled):
            return "it was compiled in place: pass the model before its compile(), or torch.compile of its forward"
        if not layers_name(decoder):
            return f"{type(decoder).__name__!r} of model type {self.support.name!r} has no list of layers"
        self._use_our_attention()
        latents, indexers = Latents(decoder), Indexers(decoder)
        self._restore += [latents.remove, indexers.remove]
        places = [self._watched(place) for place in _PLACES]
        layers = places[0]
        if why := obstacle(layers, self.dtype, bool(layers_with_state(self.config))):
            return why
        self.rotary = rotary_of(decoder, self.config, self.dtype, self.device)
        if self.rotary is None and any(changes_by_length(getattr(module, "rope_type", None)) for module in decoder.modules()):
            return "rotary frequencies change with the length of the prompt, and differ by layer type"
        self._hook()
        self._slots = slots_of(layers)
        owners = [self._slots.index(slot) for slot in sorted(set(self._slots))]  # the calls that bring keys and values of their own
        widths = widths_of([layers[at] for at in owners])
        heads, dim = max(width[0] for width in widths), max(max(width[1:]) for width in widths)
        even = set(widths) == {(heads, dim, dim)}
        recurrent = self.mixers is not None
        self.spec = KVSpec(len(widths), heads, dim, self.dtype, self.device, widths=() if even else widths, recurrent=recurrent)
        self._plain = even and all(layer.attention.plain for layer in layers)
        if not self.spec.recurrent:  # keys after a state cannot stand elsewhere
            self.unrotated = unrotated(self.rotary, _PLACES, [[place[at].page_keys for at in owners] for place in places])
        self.support = Support(self.support.name, True, "", True, bool(self.mixers and self.mixers.complete(self.config)))
        with first_layers(self), indexers.narrowed():
            self._calls = len(self._watched(0))
            verdict, found = proven(self, max((layer.attention.window or layer.attention.chunk for layer in layers), default=0))
        self._calls = 0
        others = (m for name, m in decoder.named_modules() if name.endswith(".experts") and not has_experts(m))
        pure = verdict.pure and latents.pure and not indexers and next(others, None) is None  # each of those sees few rows, by chance alike
        told = (verdict.packs_pieces, verdict.alignment)
        self.support = Support(self.support.name, not verdict.why, verdict.why, pure, *told, "found" if found else "made")
        return verdict.why

    @torch.inference_mode()
    def _watched(self, place: int) -> list[Layer]:
        """Every call of attention that one token at a position makes."""
        at, running = torch.tensor([[place]], device=self.device), self._interface.running
        running.watched, running.config, running.latent = [], self.config, None
        try:
            self.model(input_ids=torch.zeros_like(at), position_ids=at, use_cache=False)
            return running.watched  # type: ignore[no-any-return]
        finally:
            running.watched = None

    def _use_our_attention(self) -> None:
        """Make transformers' modules call our attention; again if the owner has chosen another one since."""
        from . import attention_interface

        self._interface, ours = attention_interface, attention_interface.ATTENTION
        if not (before := self.config._attn_implementation).startswith(f"{ours}_"):
            self.model.set_attn_implementation(f"{ours}_{'eager' if before == 'eager' else 'sdpa'}")
            self._restore.append(lambda: self.model.set_attn_implementation(before))
        if self.experts:
            from .experts import adopt

            if chosen := adopt(self.decoder, self.config):  # the model around it may not offer the choice
                self._restore.append(lambda: self.decoder.set_experts_implementation(chosen))

    def _hook(self) -> None:
        from .recurrent import Mixers, layers_with_state

        if self.rotary is not None:
            self._restore.append(self.decoder.rotary_emb.register_forward_hook(self._interface.rotary_hook).remove)
        if layers_with_state(self.config):
            self.mixers = Mixers(self.decoder, self.device.type == "cpu" and jit.compiler() is not None)
            self._restore.append(self.mixers.remove)

    def _undo_changes(self, but: int = 0) -> None:
        """Undo changes of the owner's model, the last one first, all but the first `but`."""
        while len(self._restore) > but:
            self._restore.pop()()

    def close(self) -> None:
        """Give the owner's model object back as it was; while a later engine holds it, that one will."""
        self.graphs = None
        held = _open[self.model]
        later = [other for known in held[held.index(ref(self)) + 1 :] if (other := known()) is not None]
        held.remove(ref(self))
        if later:
            later[0]._restore[:0], self._restore = self._restore, []
        self._undo_changes()

    @torch.inference_mode()
    def forward(
        self, ids: torch.Tensor, parts: list[Part], regimes: list[str], wanted: Seq[int], layers: int | None = None
    ) -> torch.Tensor:
        """Run packed ids [tokens] of `parts` and return logits [len(wanted), vocab] in fp32 of the wanted rows.

        Writes the keys and values of every token into the parts' pages; the caller advances the sequences. Parts that come in at a layer
        stand after the others, the lowest first; these need stepped layers. So does stopping after the first `layers`, which returns the
        normalised hidden states there, [len(wanted), hidden].
        """
        numerics = self.numerics
        assert numerics is not None
        pure = self.support.row_pure and not self.quantized
        even = numerics.rows if parts[0].sequence.state is None and pure else 1  # padding would be part of a state, and see experts
        rows = -(-len(ids) // even) * even
        positions = torch.cat([torch.arange(p.start, p.start + p.count) for p in parts])
        ids, positions = (nn.functional.pad(t, (0, rows - len(t))) for t in (ids, positions))
        spans = [(regime, p.start, p.start + p.count) for p, regime in zip(parts, regimes, strict=True)]
        tables = self.rotary.rows(spans, rows) if self.rotary is not None else None
        first, later = [p for p in parts if not p.entry], [p for p in parts if p.entry]
        token = self.fingerprint.token if self.fingerprint is not None else None
        batch = Batch(first, rows, numerics, later, token=token)
        adapters = {p.sequence.adapter for p in parts} - {None}
        for adapter in adapters:
            adapter.refresh(self.fingerprint)
        stepped = tables is not None and self.stepped
        if self.graphs and layers is None and not adapters and self.fingerprint and not self.fingerprint.foreign:
            run = self._by_steps if stepped else self._by_modules
            if (known := self.graphs.logits(run, stepped, batch, ids, positions, tables, wanted)) is not None:
                return known
        ids, positions = ids.to(self.device), positions.to(self.device)
        if stepped:
            return self._by_steps(batch, ids, positions, tables, wanted, layers)
        if later or layers is not None:
            raise RuntimeError("the layers of this model are not stepped: nothing can come in or stop between them")
        return self._by_modules(batch, ids, positions, tables, wanted)

    def _by_steps(self, batch: Batch, ids: torch.Tensor, _: Any, tables: Any, wanted: Any, layers: int | None = None) -> torch.Tensor:
        below, rows = sum(p.count for p in batch.parts), batch.numerics.rows
        ids = ids if batch.fixed else ids[: -(-below // rows) * rows]
        hidden = steps.hidden_states(self.model, ids, tables[0], tables[1], batch, wanted, layers)
        return hidden if layers is not None else steps.head(self.model, hidden, batch)

    def _by_modules(self, batch: Batch, ids: torch.Tensor, positions: torch.Tensor, tables: Any, wanted: Any) -> torch.Tensor:
        self._use_our_attention()
        running = self._interface.running
        running.batch, running.tables, running.layers, running.latent = batch, tables, 0, None
        running.config, running.slots = self.config, self._slots
        head, numerics, token = getattr(self.model.get_output_embeddings(), "weight", None), batch.numerics, batch.token
        state: Any = batch.parts[0].sequence.state
        adapted = any(part.sequence.adapter is not None for part in batch.parts)
        try:
            glance, adapt = token.glance if token is not None else None, batch.adapt if adapted else None
            with RowPureLinear(numerics.kernel, numerics.even, head, glance, adapt) as products:
                running.products = products
                if state is not None:
                    state.begin(products, batch.parts)
                logits = self._generic(ids, positions, wanted, state)
        finally:
            running.batch = running.tables = running.products = None
        if self.spec is None or running.layers != (self._calls or len(self._slots)):
            raise RuntimeError(f"{running.layers} of the model's layers called our attention: its attention was exchanged while it ran")
        for adapter, _ in batch.acting:
            adapter.check_applied()
        return logits

    def _padded(self, wanted: Seq[int]) -> torch.Tensor:
        """The rows whose logits are asked for, padded unless the head computes each by itself."""
        assert self.numerics is not None
        alone = self.numerics.kernel == "upcast" and self.vocab >= SINGLE_ROW_OUTS
        short = 0 if alone else -len(wanted) % self.numerics.rows
        return torch.tensor([*wanted, *[wanted[-1]] * short], device=self.device)

    def _generic(self, ids: torch.Tensor, positions: torch.Tensor, wanted: Any, state: Any = None) -> torch.Tensor:
        call: dict[str, Any] = {"input_ids": ids[None], "position_ids": positions[None], "use_cache": state is not None}
        if not len(wanted) and not any(foreign_hooks(self.model)):  # hooks of the whole model may change what its decoder reads
            self.decoder(**call, **{cache_name(self.decoder): state})
            return torch.empty(0, self.vocab, dtype=torch.float32)
        kept = wanted if isinstance(wanted, torch.Tensor) else self._padded(wanted or [0])
        logits = self.model(**call, **{cache_name(self.model): state}, logits_to_keep=kept).logits[0]
        logits = logits if len(logits) == len(kept) else logits[kept]  # models that compute all of them
        return logits[: len(wanted)].float()  # type: ignore[no-any-return]

    _layer_weights = cached_property(lambda self: sum(p.numel() for p in layers_of(self.decoder).parameters()))

    @cached_property
    def _heads(self) -> int:
        """The number of query heads; of key heads, where the config has another number for each layer."""
        with suppress(RuntimeError, AttributeError):
            return int(self.config.num_attention_heads)
        return self.spec.kv_heads if self.spec is not None else 1

    def flops(self, tokens: int) -> float:
        """FLOPs of a prompt: 2 per weight and token for the layers, 4·heads·head_dim per layer and pair of tokens for causal attention."""
        if self.spec is None:
            return 0.0
        pairs = tokens * (tokens + 1)
        return tokens * 2.0 * self._layer_weights + 2.0 * self.spec.layers * self._heads * self.spec.head_dim * pairs

    @torch.inference_mode()
    def stock(self, ids: torch.Tensor, state: Any, adapter: Any = None, start: int = 0) -> tuple[torch.Tensor, Any]:
        """transformers' own forward for one sequence: new ids [tokens] after `state` -> last logits [vocab] in fp32, grown state.

        state: None at first, then what was returned: transformers' cache, or all ids so far where a model's state has no such object.
        adapter: it acts on tokens from position `start` of the sequence on.
        """
        from .stock import run

        return run(self.model, self.config, self._growing, ids.to(self.device), state, adapter, start, self.fingerprint)
