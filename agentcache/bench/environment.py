"""The machine under a measurement, its versions, and the load by other processes meanwhile. Knows no engine."""

from __future__ import annotations

import os
import platform
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import psutil

Say = Callable[[str], None]  # shows progress
Keep = Callable[[Mapping[str, Any]], None]  # takes one more part of a report


def percentile(values: Sequence[float], share: float) -> float:
    """The value below which `share` (0 to 1) of the values lie, by the nearest rank."""
    ranked = sorted(values)
    return ranked[min(len(ranked) - 1, max(0, -(-int(share * 1000) * len(ranked) // 1000) - 1))]


@dataclass(slots=True)
class Load:
    """One stretch of time. foreign: share of all processors that other processes used during it, 0 to 1; average: the load average."""

    wall_ms: float = 0.0
    foreign: float = 0.0
    average: float = 0.0


@contextmanager
def watch() -> Iterator[Load]:
    """Measure the load of a block: all processors' busy time less this process's own."""
    load, began, busy, own = Load(), time.perf_counter(), _busy_s(), time.process_time()
    yield load
    wall = time.perf_counter() - began
    others = (_busy_s() - busy) - (time.process_time() - own)
    load.wall_ms = wall * 1e3
    load.foreign = min(1.0, max(0.0, others / (wall * (psutil.cpu_count() or 1)))) if wall > 0 else 0.0
    load.average = psutil.getloadavg()[0]


def _busy_s() -> float:
    times = psutil.cpu_times()
    return float(sum(times) - times.idle - getattr(times, "iowait", 0.0) - getattr(times, "guest", 0.0) - getattr(times, "guest_nice", 0.0))


@dataclass(slots=True)
class Samples:
    """Repeated measurements by name: values in the unit the name ends with, and the load beside each."""

    values: dict[str, list[float]] = field(default_factory=dict)
    loads: dict[str, list[Load]] = field(default_factory=dict)

    def add(self, name: str, value: float) -> None:
        self.values.setdefault(name, []).append(value)

    def note(self, method: str, load: Load) -> None:
        self.loads.setdefault(method, []).append(load)

    def median(self, name: str) -> float | None:
        """Median so far; None if it was never measured."""
        return statistics.median(self.values[name]) if self.values.get(name) else None

    @property
    def repeats(self) -> dict[str, int]:
        """The number of values of each median."""
        return {name: len(values) for name, values in self.values.items()}

    def report(self) -> dict[str, Any]:
        """Share of the machine that others took, per method: median and worst; and the load average."""
        return {
            method: {
                "foreign_median": round(statistics.median(each.foreign for each in loads), 3),
                "foreign_worst": round(max(each.foreign for each in loads), 3),
                "load_average": round(statistics.median(each.average for each in loads), 2),
            }
            for method, loads in self.loads.items()
        }


def machine(device: Any = None) -> dict[str, Any]:
    """Processor, cores, memory, and the accelerator that a model lies on, if its torch device is one."""
    accelerator = {}
    if device is not None and device.type == "cuda":
        import torch

        accelerator = {"accelerator": torch.cuda.get_device_name(device)}
    return {
        **accelerator,
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_bytes": psutil.virtual_memory().total,
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
    }


def peak_bytes() -> int | None:
    """The most memory this process had so far, mapped files included; None where the system does not tell."""
    try:
        with open("/proc/self/status", encoding="utf-8") as lines:
            return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM")), None)
    except OSError:
        return None


def _processor() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())
    except OSError:
        return platform.processor() or platform.machine()


def versions(names: Iterable[str] = ("torch", "transformers", "tokenizers", "numpy")) -> dict[str, str]:
    """Installed versions, python's included."""
    found = {"python": platform.python_version()}
    for name in names:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "not installed"
    return found
