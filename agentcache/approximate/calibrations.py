"""The calibration that an engine uses: the one it was given, else its folder's. Searches for none."""

from __future__ import annotations

import os
import shlex
import warnings
from dataclasses import dataclass
from pathlib import Path

from ..calibration import Calibration
from ..errors import CalibrationError, ReuseWarning


def place(folder: str | os.PathLike[str], fingerprint: str) -> Path:
    """Path of a model's calibration in a store's folder."""
    return Path(folder) / "calibrations" / f"{fingerprint}.json"


Given = Calibration | str | os.PathLike[str] | None


def find(given: Given, folder: str | os.PathLike[str] | None, fingerprint: str, model: str, dtype: str) -> Calibration:
    """The calibration to use: the one given, else the one in the store's folder. CalibrationError says how to make it.

    dtype: of the loaded weights, which is part of their fingerprint: in another one, the findings would be of other weights.
    """
    there = "--out CALIBRATION" if folder is None else f"--store {shlex.quote(os.fspath(folder))}"
    then = "and pass calibration=CALIBRATION" if folder is None else "or pass calibration="
    command = f"run `agentcache calibrate --model {model} --dtype {dtype} {there} --workload FILE` first, {then}"
    if given is None:
        known = None if folder is None else place(folder, fingerprint)
        if known is None or not known.is_file():
            raise CalibrationError(f"reuse='approximate': model {model!r} has no calibration; {command}")
        given = known
    found = given if isinstance(given, Calibration) else Calibration.load(given)
    if found.fingerprint != fingerprint:
        whose = f"with fingerprint {found.fingerprint[:12]!r} is not of this model ({fingerprint[:12]!r})"
        raise CalibrationError(f"calibration of {found.model!r} {whose}: {command}")
    return found


@dataclass(slots=True)
class Calibrations:
    """An engine's own calibration: the one it was given, else its folder's. Read once for its weights."""

    given: Given
    folder: str | os.PathLike[str] | None
    model: str
    dtype: str
    known: Calibration | None = None

    def of(self, fingerprint: str, given: Calibration | None = None) -> Calibration:
        """The calibration for these weights, or one request's own, which says nothing of the next. Errors as of `find`."""
        if given is not None:
            return find(given, self.folder, fingerprint, self.model, self.dtype)
        if self.known is None or self.known.fingerprint != fingerprint:
            self.known = find(self.given, self.folder, fingerprint, self.model, self.dtype)
            if doubt := self.known.doubt:
                warnings.warn(doubt, ReuseWarning, stacklevel=2)
        return self.known
