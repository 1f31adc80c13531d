"""Buffers that a thread has for itself. Knows nothing of what they are for."""

from __future__ import annotations

import threading

import torch

_scratch = threading.local()


def scratch(name: str, elements: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """A flat buffer of this thread that lives on between calls; grown when too small. Contents are whatever the last user left."""
    held: torch.Tensor | None = getattr(_scratch, name, None)
    if held is None or held.numel() < elements or held.dtype != dtype:
        with torch.inference_mode(False):  # else it could only be used in that mode from now on
            held = torch.empty(elements, dtype=dtype)
        setattr(_scratch, name, held)
    return held[:elements]
