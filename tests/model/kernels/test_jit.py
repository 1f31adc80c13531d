"""The compiler: too old is none; what it compiles is compiled once."""

from __future__ import annotations

import gc
import time
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest

from agentcache.model.kernels import jit
from agentcache.model.kernels.ir import Code

pytestmark = pytest.mark.skipif(jit.compiler() is None, reason="needs llvmlite and PyTorch's OpenMP runtime")


def test_a_compiler_that_is_too_old_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    assert jit.compiler.__wrapped__() is not None
    monkeypatch.setattr(jit, "OLDEST_LLVM", (999,))
    assert jit.compiler.__wrapped__() is None


def test_a_compiler_is_never_collected() -> None:
    """Threads that ask at once make several: the code of one that nobody held was freed, and that ended the process."""
    made = weakref.ref(jit.compiler.__wrapped__())
    gc.collect()
    assert made() is not None


def test_a_kernel_is_compiled_once_whoever_asks_first() -> None:
    found, written = jit.compiler(), []
    assert found is not None

    def nothing(_: Code) -> None:
        written.append(1)
        time.sleep(0.05)

    with ThreadPoolExecutor(20) as pool:
        addresses = list(pool.map(lambda _: found.function(nothing, "bfloat"), range(20)))
    assert len(written) == 1
    assert len(set(addresses)) == 1
