"""Kernels of a GPU, interpreted on a CPU: what they compute. How they run on a GPU: tests/model/test_cuda.py."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec

import pytest

from tests.checkout import ROOT


@pytest.mark.skipif(find_spec("triton") is None, reason="needs Triton, which PyTorch brings where it is built for GPUs")
def test_kernels_attend_as_gathered_pages_do() -> None:
    command = [sys.executable, "-W", "ignore", "-m", "tests.model.kernels.gpu_pages"]
    done = subprocess.run(command, cwd=ROOT, env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True, check=False)
    assert done.stdout == "alike\n", done.stderr
