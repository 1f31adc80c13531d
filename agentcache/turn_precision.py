"""The fewest bits that turns of one model may be stored in: what `agentcache calibrate --turns` found of them. Knows no torch.

A mean hides what breaks an agent: one token of a call. So calls are counted as calls, and of the divergence the far end is looked at.
"""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from .errors import CalibrationError

FORMAT = 1
LEAST_CALLS = 32  # fewer tell little


@dataclass(frozen=True, slots=True)
class TurnsFound:
    """Answers after turns in fewer bits, held against exact ones."""

    answers: int
    calls: int  # tool calls of the exact ones
    changed_calls: int  # answers whose calls are others
    tokens: int
    top1: float  # share of equal first choices
    kl_mean: float  # nats per token
    kl_p99: float  # of each hundred tokens the one that is farthest off
    kl_most: float

    def passes(self, kl: float) -> bool:
        """Tell whether no call changed, of enough of them, and the tail of the divergence is within `kl`."""
        return self.calls >= LEAST_CALLS and not self.changed_calls and self.kl_p99 <= kl


def path_of(folder: str | os.PathLike[str], fingerprint: str) -> Path:
    """Path of a model's findings in a store's folder."""
    return Path(folder) / "calibrations" / f"{fingerprint}-turns.json"


def save(path: Path, fingerprint: str, kl: float, found: Mapping[str, TurnsFound]) -> list[str]:
    """Write what was found by precision, whole or not at all; returns the precisions that passed."""
    passed = [precision for precision, one in found.items() if one.passes(kl)]
    plain = {"format": FORMAT, "fingerprint": fingerprint, "kl": kl, "passed": passed, "found": {k: asdict(v) for k, v in found.items()}}
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    fresh = path.with_name(f"{path.name}.{os.getpid()}.new")
    fresh.write_text(json.dumps(plain, indent=1) + "\n", encoding="utf-8")
    os.replace(fresh, path)
    return passed


def check(precision: str, folder: str | os.PathLike[str], fingerprint: str, model: str) -> None:
    """CalibrationError: turns of this model were not found to keep its calls in so few bits."""
    command = f"run `agentcache calibrate --turns {precision} --model {model} --store {shlex.quote(os.fspath(folder))} --workload FILE`"
    said = f"turns={precision!r}: model {model!r}"
    try:
        found = json.loads(path_of(folder, fingerprint).read_text(encoding="utf-8"))
        known, passed = found["found"].get(precision), found["passed"]
        right = found["format"] == FORMAT and found["fingerprint"] == fingerprint
    except FileNotFoundError:
        raise CalibrationError(f"{said} has no calibration of its turns: {command}, or give turns='int8'") from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CalibrationError(f"{said} has a calibration of its turns that cannot be read ({error}): {command}") from error
    if not right or known is None:
        raise CalibrationError(f"{said} was calibrated otherwise: {command}, or give turns='int8'")
    if precision not in passed:
        changed, calls, tail, kl = known["changed_calls"], known["calls"], known["kl_p99"], found["kl"]
        why = f"{changed} of {calls} tool calls changed, KL of the 99th percentile {tail:.3g} where {kl:g} is allowed"
        raise CalibrationError(f"{said} did not pass ({why}): give turns='int8' or turns='exact'")
