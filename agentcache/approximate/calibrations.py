"""The calibrations that an engine uses: the one it was given, else those of its folder. Searches for none.

One is about a pair: what answers, the base or an adapter, and whose pages it takes, its own or another's over the same weights.
"""

from __future__ import annotations

import os
import shlex
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from ..calibration import Calibration
from ..errors import CalibrationError, ReuseWarning
from ..matching import fingerprint_of

if TYPE_CHECKING:
    from ..model.adapters import Adapter


def path_of(folder: str | os.PathLike[str], fingerprint: str, source: str = "") -> Path:
    """Path of a calibration in a store's folder."""
    other = f"-from-{source.partition('+')[2] or 'base'}" if source else ""
    return Path(folder) / "calibrations" / f"{fingerprint}{other}.json"


def answering(weights: str, adapter: Adapter | None) -> str:
    """Fingerprint of the base, or of the adapter that answers: of an Activated LoRA too, though its prompt's pages are the base's."""
    return weights if adapter is None else f"{weights}+{adapter.digest}"


def lenders(weights: str, adapter: Adapter | None, adapters: Mapping[str, Adapter]) -> Sequence[str]:
    """Fingerprints of the other pages over the same weights, from which requests of an adapter may take segments."""
    kept = dict.fromkeys(fingerprint_of(weights, other) for other in (None, *adapters.values()))
    return [known for known in kept if known != fingerprint_of(weights, adapter)]


Given = Calibration | str | os.PathLike[str] | None


def find(given: Given, folder: str | os.PathLike[str] | None, fingerprint: str, model: str, dtype: str, adapter: str = "") -> Calibration:
    """The calibration to use: the one given, else the one in the store's folder. CalibrationError says how to make it.

    dtype: of the loaded weights, which is part of their fingerprint: in another one, the findings would be of other weights. adapter:
    the name of what answers.
    """
    there = "--out CALIBRATION" if folder is None else f"--store {shlex.quote(os.fspath(folder))}"
    pair, whose, passed = "", f"model {model!r}", "calibration="
    if adapter:
        pair, whose, passed = " --adapter PATH --from PATH", f"adapter {adapter!r} of model {model!r}", "reuse="
    then = f"and pass {passed}CALIBRATION" if folder is None else f"or pass {passed}"
    command = f"run `agentcache calibrate --model {model} --dtype {dtype}{pair} {there} --workload FILE` first, {then}"
    if given is None:
        known = None if folder is None else path_of(folder, fingerprint)
        if known is None or not known.is_file():
            raise CalibrationError(f"reuse='approximate': {whose} has no calibration; {command}")
        given = known
    found = given if isinstance(given, Calibration) else Calibration.load(given)
    if found.fingerprint != fingerprint:
        theirs = f"with fingerprint {_short(found.fingerprint)!r} is not of this {whose.partition(' ')[0]} ({_short(fingerprint)!r})"
        raise CalibrationError(f"calibration of {found.model!r} {theirs}: {command}")
    return found


def _short(fingerprint: str) -> str:
    weights, plus, adapter = fingerprint.partition("+")
    return weights[:12] + plus + adapter[:12]


@dataclass(slots=True)
class Calibrations:
    """An engine's own calibrations: the one it was given, which is about the base, and those of its folder. Each is read once."""

    given: Given
    folder: str | os.PathLike[str] | None
    model: str
    dtype: str
    _known: dict[tuple[str, str], Calibration] = field(default_factory=dict)

    def of(
        self, weights: str, given: Calibration | None = None, adapter: Adapter | None = None, adapters: Mapping[str, Adapter] | None = None
    ) -> Sequence[Calibration]:
        """Those for what answers over these weights, of its own pages first; or one request's own, which says nothing of the next.

        adapters: whose pages may be taken. Errors as of `find`.
        """
        fingerprint, name = answering(weights, adapter), adapter.name if adapter else ""
        if given is not None:
            return [find(given, self.folder, fingerprint, self.model, self.dtype, name)]
        sources = ["", *lenders(weights, adapter, adapters or {})]
        for source in sources:
            if (fingerprint, source) not in self._known and (place := self._place(fingerprint, source)) is not None:
                found = find(place, self.folder, fingerprint, self.model, self.dtype, name)
                self._known[fingerprint, source] = found
                if doubt := found.doubt:
                    warnings.warn(doubt, ReuseWarning, stacklevel=2)
        known = [self._known[fingerprint, source] for source in sources if (fingerprint, source) in self._known]
        return known or [find(None, self.folder, fingerprint, self.model, self.dtype, name)]

    def _place(self, fingerprint: str, source: str) -> Given:
        """The place of a pair's calibration; None if there is none."""
        if self.given is not None and not source and "+" not in fingerprint:
            return self.given
        if self.folder is None or not (there := path_of(self.folder, fingerprint, source)).is_file():
            return None
        return there
