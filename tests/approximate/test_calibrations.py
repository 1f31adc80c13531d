"""Calibrations by pair: what answers, and whose pages it takes by consent. Pages of one pair serve no other, and nobody without one."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from agentcache import Engine, Reason
from agentcache.approximate.calibrations import path_of
from agentcache.calibration import Calibration
from agentcache.errors import CalibrationError
from agentcache.types import StoreOptions
from tests.approximate.repeated_text import DOC, FIRST, LAYERS, OTHER, calibration, prompt, tiny_model
from tests.engines import wait_until
from tests.saved_adapters import ACTIVATED, answer, same, save_for, twin

pytestmark = pytest.mark.usefixtures("one_thread")


@contextmanager
def adapted(place: Path, names: Sequence[str] = ("router", "twin", "judge"), **options: Any) -> Iterator[Engine]:
    """An engine with these adapters: a LoRA, one with the same keys and values, another LoRA, one of the upper half, an Activated one."""
    model, tokenizer, _ = tiny_model()
    kinds: dict[str, dict[str, Any]] = {"router": {}, "judge": {}, "upper": {"layers_to_transform": [3, 4, 5]}, "acts": ACTIVATED}
    with Engine(model, tokenizer, **{"store": None, **options}) as running:
        for seed, name in enumerate(names):
            if not (place / name).exists():
                if name == "twin":
                    twin(place / "router", place / name)
                else:
                    save_for(copy.deepcopy(model), place / name, seed, **kinds[name])
            running.add_adapter(name, place / name)
        yield running


def pair(running: Engine, adapter: str | None, lender: str | None, **given: Any) -> Calibration:
    """A calibration of an adapter, or the base, that takes pages of another."""
    weights = tiny_model()[2]
    answers, lends = (weights if name is None else f"{weights}+{running.adapters[name]}" for name in (adapter, lender))
    return calibration(fingerprint=answers, source=lends, **given)


def near(running: Engine) -> list[Any]:
    """Pages that were computed after segments."""
    return [entry for entry in running.store.tree.entries() if entry.scope.precision == "approximate"]


@pytest.mark.parametrize("asked", [FIRST, OTHER], ids=["in place", "moved"])
def test_a_conversation_handed_over_takes_the_other_s_pages(asked: Any, tmp_path: Path) -> None:
    with adapted(tmp_path) as running:
        exact, _ = answer(running, asked, "judge", "off")
        answer(running, FIRST, "router")
        _, receipt = answer(running, asked, "judge", pair(running, "judge", "router"))
        [segment] = receipt.segments
        assert segment.adapter == running.adapters["router"]
        assert (segment.shift, segment.halo_tokens) == (0 if asked is FIRST else 21, 8)
        assert receipt.precision == "approximate"
        assert receipt.computed_tokens == receipt.prompt_tokens - segment.whole_tokens < 64
        assert Reason.APPROXIMATE in {refusal.reason for refusal in receipt.refusals}
        _, again = answer(running, asked, "judge", pair(running, "judge", "router"))
        assert (again.computed_tokens, again.attached_parts) == (1, ()), "no one adapter computed all of it"
        found, after = answer(running, asked, "judge")
        assert same(found, exact)
        assert after.cached_tokens == segment.start + segment.halo_tokens, "exact requests take none of it"


def test_pages_with_the_same_contents_give_the_same_bits(tmp_path: Path) -> None:
    with adapted(tmp_path) as running:
        expected, _ = answer(running, FIRST, "router", "off")
        answer(running, FIRST, "twin")
        found, receipt = answer(running, FIRST, "router", pair(running, "router", "twin"))
        assert receipt.segment_tokens > 1500
        assert same(found, expected)


def test_one_pair_goes_on_from_no_page_of_another(tmp_path: Path) -> None:
    with adapted(tmp_path) as running:
        for lender in ("router", None):
            answer(running, FIRST, lender)
            _, receipt = answer(running, FIRST, "judge", pair(running, "judge", lender))
            [segment] = receipt.segments
            assert segment.adapter == running.adapters.get(lender or "", "")


def test_the_base_takes_pages_of_an_adapter(tmp_path: Path) -> None:
    with adapted(tmp_path) as running:
        answer(running, FIRST, "router")
        _, receipt = answer(running, FIRST, None, pair(running, None, "router"))
        assert [segment.adapter for segment in receipt.segments] == [running.adapters["router"]]


def test_layers_that_are_alike_come_before_a_short_repeat(tmp_path: Path) -> None:
    with adapted(tmp_path, ("router", "upper")) as running:
        expected, _ = answer(running, FIRST, "upper", "off")
        answer(running, ". ".join(DOC.split(". ")[:8]), "router")
        answer(running, FIRST, None)
        found, receipt = answer(running, FIRST, "upper", pair(running, "upper", "router", min_tokens=20))
        assert (receipt.precision, receipt.shared_layers, receipt.segments) == ("exact", 3, ())
        assert same(found, expected)
        running.store.clear()
        for name in (None, "router"):
            answer(running, FIRST, name)
        _, receipt = answer(running, FIRST, "upper", pair(running, "upper", "router"))
        assert (receipt.shared_layers, len(receipt.segments)) == (0, 1), "whole tokens spare more than the layers below"


def test_an_activated_lora_takes_pages_before_it_acts(tmp_path: Path) -> None:
    with adapted(tmp_path, ("router", "acts")) as running:
        answer(running, FIRST, "router")
        known = pair(running, "acts", "router")
        _, receipt = answer(running, FIRST, "acts", known)
        [segment] = receipt.segments
        start = receipt.prompt_tokens - len(ACTIVATED["alora_invocation_tokens"])
        assert segment.stop <= start
        assert sum(len(entry.ids) for entry in near(running)) == start, "none is kept from where it acts"
        mine, _ = answer(running, FIRST, None, replace(known, fingerprint=tiny_model()[2]))
        assert not same(mine, answer(running, FIRST, "acts", known)[0])


def test_an_adapter_without_a_calibration_is_refused_by_name(tmp_path: Path) -> None:
    weights = tiny_model()[2]
    options = {"store": StoreOptions(tmp_path / "store"), "reuse": "approximate", "calibration": calibration(fingerprint=weights)}
    with adapted(tmp_path, **options) as running:
        said = r"adapter 'judge' of model .* has no calibration; run `agentcache calibrate .* --adapter PATH --from PATH --store"
        with pytest.raises(CalibrationError, match=said):
            answer(running, FIRST, "judge", "approximate")
        found, receipt = answer(running, FIRST, "judge", None)
        assert same(found, answer(running, FIRST, "judge", "off")[0])
        assert "adapter 'judge' of model" in " ".join(receipt.notes), "its engine's consent is about the base"
        with pytest.raises(CalibrationError, match=rf"'{weights[:12]}\+.*' is not of this adapter \('{weights[:12]}\+"):
            answer(running, FIRST, "judge", pair(running, "router", "judge"))


def test_calibrations_of_a_folder_are_found_by_pair(tmp_path: Path) -> None:
    with adapted(tmp_path, store=StoreOptions(tmp_path / "store", refuse_slow=False)) as running:
        for lender in ("router", None):
            known = pair(running, "judge", lender)
            known.save(path_of(tmp_path / "store", known.fingerprint, known.source))
        own = replace(known, source="", steps=((16, LAYERS),))
        own.save(path_of(tmp_path / "store", own.fingerprint))
        answer(running, FIRST, "router")
        for lender, asked in (("router", FIRST), ("judge", OTHER)):
            _, receipt = answer(running, asked, "judge", "approximate")
            [segment] = receipt.segments
            halo = 16 if lender == "judge" else 8
            assert (segment.adapter, segment.halo_tokens) == (running.adapters[lender], halo), "of whose pages most can be taken"
            answer(running, FIRST, "judge")
        with pytest.raises(CalibrationError, match="adapter 'router' of model"):
            answer(running, FIRST, "router", "approximate")


def test_pages_over_other_weights_are_refused() -> None:
    with pytest.raises(CalibrationError, match=r"source='y\+judge': must be a fingerprint over the same weights"):
        calibration(source="y+judge")


@pytest.mark.parametrize(("lender", "drifts"), [("router", True), ("twin", False)])
def test_drift_is_watched_under_the_adapter(lender: str, drifts: bool, tmp_path: Path) -> None:
    with adapted(tmp_path) as running:
        adapter = "judge" if drifts else "router"
        monitor = running.approximate.monitor
        for number in range(3):
            asked = prompt(f"Number {number}.", "And?")
            answer(running, asked, lender)
            answer(running, asked, adapter, pair(running, adapter, lender, kl=1e-3, watch_one_in=1))
            assert wait_until(lambda: not monitor.pending, seconds=60)
        assert monitor.checked == 3
        assert bool(running.approximate.off) == drifts
