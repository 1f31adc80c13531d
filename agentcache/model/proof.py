"""Proof that pages of a model can be reused: fixed ids run whole, in pieces and beside others, and compared. Knows no model by name.

What is compared is what reuse relies on: that keys and values of a token, and the logits after it, do not depend on where the forward that
made them began. And that our attention is the model's own: its stock forward gives the same logits. A `model` is an HFModel, of which this
is a part: hf.py loads it.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from collections.abc import Sequence as Seq
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from blake3 import blake3
from transformers.utils.logging import tqdm  # the bar of loaded weights, and its switch

from ..checkpoints import CHECKPOINT_TOKENS
from ..kv import Sequence
from .attention import Part
from .attention_interface import shadow
from .behaviour import foreign_hooks, has_our_forward, user_classes
from .description import Names
from .kernels.object_cache import Objects

TOKENS = 150  # of the ids, unless a window is longer
MOST_TOKENS = 640
STATE_TOKENS = 101  # of models with states, cut at 64
REVISION = "13"  # of the proof: raise it when it asks for more
FLOPS = 1e11  # of one forward at most: less than a second on two cores
CUTS = (1, 64, 101)  # where a run is cut: after one token, at a multiple of 64, and amid a chunk
TOLERANCE = {torch.float32: 1e-3, torch.float64: 1e-3}  # of logits, relative to the largest
ODD_CUTS = (1, 2, 37, 64, 65, 100)  # of models with states, whose pieces may end anywhere: pieces of one token are steps of decoding
STATE_COSINE = 0.9995  # the same for states that go on: both sides ran the same kernels; a state that loses something stays below
BESIDE = (64, 37)  # tokens of two sequences with states, whose next rows run in one forward
BESIDE_ROWS = 35  # of a piece of the first then
ROUNDINGS = 4  # by which quantised states may differ more than rows beside them change, and runs in pieces more than kernels do
CUT_COSINE = 0.99995  # of 16-bit logits in pieces, against those of the whole: the same kernels, over other numbers of rows
CUT_COSINE_ELSEWHERE = 0.999  # on devices whose libraries may add up parts of a product in 16 bits, as cuBLAS does for few rows
COSINE = 0.9  # least, of logits of 16-bit numbers: their rounding grows from layer to layer, without bound where weights are random
LAYER_TOLERANCE = {torch.float32: 1e-4, torch.float64: 1e-4}  # of one layer's attention; 16-bit numbers: LAYER_COARSE
LAYER_COARSE = 0.06
SHOWN_AFTER_S = 0.5  # of a proof: its progress
SHARE = 0.9  # of positions that must be within it: experts that two rows almost share may be chosen otherwise

MODEL_FAULTS = (RuntimeError, TypeError, ValueError, LookupError, AttributeError, AssertionError)  # of code that nobody has examined


class Verdict(NamedTuple):
    """What a proof says: why pages cannot be reused, "" if they can; whether bits depend neither on the tokens run beside, nor, of a
    sequence with states, on which of its pieces, or whose next tokens, ran in one forward. alignment: pieces end at its multiples; 1: or
    anywhere."""

    why: str
    pure: bool = False
    packs_pieces: bool = False
    alignment: int = CHECKPOINT_TOKENS


def proven(model: Any, window: int) -> tuple[Verdict, bool]:
    """`prove`, or what an earlier load of this user found for the same code, config, versions and kernels; and whether it was found."""
    if (source := _source(model)) is None:
        return prove(model, window), False
    verdicts = Objects(f"proof {REVISION}")
    name = verdicts.name(source)
    if (known := verdicts.find(name)) is not None:
        return Verdict(*json.loads(known)), True
    made = prove(model, window)
    verdicts.keep(name, json.dumps(made).encode())
    return made, False


def _source(model: Any) -> str | None:
    """All that decides the verdict but the weights; None if some of it has no text: patched modules, hooks."""
    if any(foreign_hooks(model.model)) or any("forward" in vars(m) and not has_our_forward(m) for m in model.model.modules()):
        return None
    classes = {name: type(module) for name, module in model.model.named_modules()}
    files = sorted({getattr(sys.modules.get(kind.__module__), "__file__", None) or "" for kind in classes.values()})
    if "" in files:
        return None
    code = [blake3(Path(file).read_bytes()).hexdigest() for file in files]
    numerics = model.numerics.digest if model.numerics is not None else ""
    told = map(str, (model.spec, model.layout, model.dtype, model.device, model.quantized))
    kinds = [model.config.to_json_string(), *told, numerics]
    named = [f"{name} {kind.__qualname__}" for name, kind in classes.items()]  # a file may hold several
    own = user_classes(model.model.modules(), Names(), {})
    return "\n".join([torch.__version__, transformers.__version__, *kinds, *code, *named, own])


@torch.inference_mode()
def prove(model: Any, window: int) -> Verdict:
    """Prove a model, or find out why its pages cannot be reused.

    window: the longest, of keys that a layer sees; ids reach over it if that takes no longer than FLOPS.
    """
    tokens, wanted, recurrent = TOKENS, window + TOKENS // 2, model.spec is not None and model.spec.recurrent
    if recurrent:
        tokens = STATE_TOKENS
    elif TOKENS < wanted <= MOST_TOKENS and model.flops(wanted) <= FLOPS:
        tokens = wanted
    ids = torch.randint(0, model.vocab, (2 * tokens,), generator=torch.Generator().manual_seed(5))
    places = sorted({*(at for at in range(0, tokens, 8)), tokens - 1})
    with tqdm(desc="Proving reuse", total=3 if recurrent else 4, delay=SHOWN_AFTER_S, mininterval=0, leave=False) as bar:
        return _prove(model, ids[:tokens], ids[tokens:], places, bar.update)


def _prove(model: Any, ids: torch.Tensor, other: torch.Tensor, places: list[int], step: Callable[[], Any]) -> Verdict:
    """The same for these ids, and others beside them. step: called after each of up to four parts."""
    bound, tokens = LAYER_TOLERANCE.get(model.dtype, LAYER_COARSE), len(ids)
    expected, errors = shadow(model, ids, places)
    step()
    for slot, off in enumerate(errors):
        if not off <= bound:
            return Verdict(f"attention over pages is not its own: layer {slot} is off by {off:.1g} of its largest number")
    if model.spec is not None and model.spec.recurrent:
        return _prove_state(model, ids, places, expected, step)
    whole, found = _run(model, ids, [tokens], places)
    step()
    if (share := _alike(model, found, expected)) < SHARE:
        return Verdict(f"over pages {1 - share:.0%} of {len(places)} positions have other logits than by its own forward")
    cut, pieces = _run(model, ids, [*(at for at in CUTS if at < tokens), tokens], places)
    step()
    steady = 0.0 if model.quantized else 1 - ROUNDINGS * (1 - float(torch.cosine_similarity(found, expected, dim=-1).min()))
    steady = min(steady, CUT_COSINE if model.device.type == "cpu" else CUT_COSINE_ELSEWHERE)
    if (share := min(_alike(model, pieces, expected), _alike(model, pieces, found, steady))) < SHARE:
        return Verdict(f"cut after {CUTS} tokens, {1 - share:.0%} of {len(places)} positions have other logits")
    beside = _beside(model, ids, other, CUTS[1])
    step()
    pure = all(torch.equal(a, b) for one in (cut, beside) for a, b in _pairs(whole, one)) and torch.equal(found, pieces)
    return Verdict("", pure)


def _prove_state(model: Any, ids: torch.Tensor, places: list[int], expected: torch.Tensor, step: Callable[[], Any]) -> Verdict:
    """The same for layers with a state: cut where checkpoints are made, and started again from copies of the states there."""
    stops, tokens = list(range(CHECKPOINT_TOKENS, len(ids), CHECKPOINT_TOKENS)), len(ids)
    sequence, pieces = _run(model, ids, [*stops, tokens], places, cuts=stops)
    step()
    if model.experts:  # rounding may choose others for a token, which states carry on: pieces are held against our own whole run
        _, whole = _run(model, ids, [tokens], places)
        if (share := _alike(model, whole, expected, coarse=True)) < SHARE:
            return Verdict(f"over pages {1 - share:.0%} of {len(places)} positions have other logits than by its own forward")
        expected = whole
    later, least = sum(at >= stops[0] for at in places), STATE_COSINE
    if model.quantized:  # int8 rounds by all rows of a call: as much as rows beside these change is no loss
        beside, _ = shadow(model, torch.cat([ids, ids.flip(0)]), places)
        least = min(least, 1 - ROUNDINGS * (1 - float(torch.cosine_similarity(beside, expected, dim=-1).min())))
    if (share := _alike(model, pieces[-later:], expected[-later:], least)) < SHARE:
        lost = f"continued after {stops[0]} tokens, {1 - share:.0%} of {later} positions have other logits"
        return Verdict(f"{lost}: its states lose something")
    again, found = _run(model, ids, [*stops, tokens], places, restart=True)
    step()
    pure = torch.equal(found, pieces) and all(torch.equal(a, b) for a, b in _pairs(sequence, again))
    if not pure and _alike(model, found, pieces) < SHARE:
        return Verdict("copies of its states do not continue as the states do")
    known = sequence, pieces
    packs_pieces = pure and _same(model, ids, places, [tokens], stops, known) is not None and _same_beside(model, ids)
    apart = _same(model, ids, places, [*ODD_CUTS, tokens], ODD_CUTS, known, 1) if packs_pieces else None
    seamless = apart is not None and _same(model, ids, places, [tokens], ODD_CUTS, apart, 1) is not None
    return Verdict("", pure, packs_pieces, 1 if seamless else CHECKPOINT_TOKENS)


def _same(
    model: Any,
    ids: torch.Tensor,
    places: list[int],
    ends: list[int],
    cuts: Seq[int],
    known: tuple[Sequence, torch.Tensor],
    alignment: int = CHECKPOINT_TOKENS,
) -> tuple[Sequence, torch.Tensor] | None:
    """Run forwards up to `ends`, of pieces up to `cuts` -> as `_run`; None if keys, values, logits or states have other bits than known."""
    sequence, logits = known
    if sequence.state is None or not sequence.state.packs_pieces:
        return None
    try:
        other, found = _run(model, ids, ends, places, cuts=cuts, alignment=alignment)
    except MODEL_FAULTS:  # a module that cannot be given some of its rows
        return None
    states, others = _states(sequence, cuts), _states(other, sequence.cuts)
    pairs = [*_pairs(sequence, other), *zip(states, others), (found, logits)]
    return (other, found) if len(states) == len(others) and all(torch.equal(a, b) for a, b in pairs) else None


def _same_beside(model: Any, ids: torch.Tensor) -> bool:
    """Tell whether rows of two sequences have the same bits in one forward as in one each: keys, values, logits and states."""
    found, regime = [], model.regime(len(ids)) or ""
    for together in (False, True):
        pair, logits = [_run(model, ids[:length], [length], [], whole=len(ids))[0] for length in BESIDE], []
        for counts in ((1, 1), (BESIDE_ROWS, 1)):
            rows = [(one, one.length, count) for one, count in zip(pair, counts, strict=True)]
            for some in [rows] if together else [[each] for each in rows]:
                ends = list(accumulate(count for _, _, count in some))
                parts = [Part(*each, end - each[2]) for each, end in zip(some, ends, strict=True)]
                tokens = torch.cat([ids[part.start : part.start + part.count] for part in parts])
                for part in parts:
                    part.sequence.reserve(part.count)
                try:
                    logits.append(model.forward(tokens, parts, [regime] * len(parts), [end - 1 for end in ends]))
                except MODEL_FAULTS:
                    return False
                for part in parts:
                    part.sequence.advance(part.count)
        found.append([torch.cat(logits), *(state for one in pair for state in _states(one, ()))])
        found[-1] += [rows for one in pair for layer in range(one.spec.layers) for rows in one.read(layer)]
    return all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def _run(
    model: Any,
    ids: torch.Tensor,
    stops: list[int],
    places: list[int],
    restart: bool = False,
    whole: int | None = None,
    cuts: Seq[int] = (),
    alignment: int = CHECKPOINT_TOKENS,
) -> tuple[Sequence, torch.Tensor]:
    """Run ids up to each stop in a forward of its own; the sequence, and the logits [places, vocab].

    restart: from a copied state after each. whole: length that decides rotary frequencies, by default the last stop. cuts: where pieces
    end and have checkpoints, of a model with states; alignment: of these, 1 where they do not depend on pieces.
    """
    sequence = Sequence(model.spec, state=model.new_state(), cuts=tuple(cuts), marks=frozenset(cuts))
    if sequence.state is not None:
        sequence.state.alignment = alignment
    logits, regime = [], model.regime(stops[-1] if whole is None else whole) or ""
    for start, stop in zip([0, *stops], stops, strict=False):
        sequence.reserve(stop - start)
        rows = [at - start for at in places if start <= at < stop]
        logits.append(model.forward(ids[start:stop], [Part(sequence, start, stop - start)], [regime], rows))
        sequence.advance(stop - start)
        if restart and sequence.state is not None:
            states, sequence.state = sequence.state.copy(), model.new_state()
            assert sequence.state is not None
            sequence.state.restore(states, stop)
    return sequence, torch.cat(logits)


def _beside(model: Any, ids: torch.Tensor, other: torch.Tensor, first: int) -> Sequence:
    """Run ids from `first` on in one forward with a sequence of other ids."""
    sequence, _ = _run(model, ids[:first], [first], [], whole=len(ids))
    neighbour, regime = Sequence(sequence.spec), model.regime(len(ids)) or ""
    sequence.reserve(len(ids) - first)
    neighbour.reserve(len(other))
    parts = [Part(neighbour, 0, len(other)), Part(sequence, first, len(ids) - first, len(other))]
    model.forward(torch.cat([other, ids[first:]]), parts, [regime] * 2, [])
    sequence.advance(len(ids) - first)
    return sequence


def _alike(model: Any, found: torch.Tensor, expected: torch.Tensor, least: float = COSINE, coarse: bool = False) -> float:
    """The share of positions whose logits differ by rounding alone. coarse: by their cosine, as of 16-bit numbers."""
    if coarse or model.quantized or model.dtype not in TOLERANCE:
        return float((torch.cosine_similarity(found, expected, dim=-1) >= least).float().mean())
    bound = TOLERANCE[model.dtype] * expected.abs().max()
    return float(((found - expected).abs().amax(-1) <= bound).float().mean())


def _states(sequence: Sequence, at: Seq[int]) -> list[torch.Tensor]:
    """The states of a sequence of one page: after those of its checkpoints that stand at these positions, and of now."""
    assert sequence.state is not None
    kept = [known.states for slots, known in sorted(sequence.pages[0].checkpoints.items()) if slots in at]
    return [state for states in (*kept, sequence.state.copy()) for state in states if state is not None]


def _pairs(one: Sequence, other: Sequence) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return [pair for layer in range(one.spec.layers) for pair in zip(one.read(layer), other.read(layer), strict=True)]
