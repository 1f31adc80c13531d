"""Where the rows of a packed forward find their keys and values, as kernels of a GPU read it. Knows no layers and no weights.

One array of integers, copied to the device at once:

    split    [1]               pages of a program, of SPLITS that share a prompt's
    rows     [rows, 2]         first page of the row's part in `pages`, -1 for padding, and its position
    blocks   [blocks, 4]       of one program's rows: first page of their part, first row, how many, position of the first
    pages    [pages, 2, layers]  addresses of keys and values
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ...types import PAGE_TOKENS

Part = Any  # of attention.py

SPLITS = 16  # programs that share a prompt's pages, where rows are few
FEW_ROWS = 256
FEW_PAGES = 2  # of a prompt that one program reads alone


@dataclass(slots=True)
class DeviceTable:
    """The page tables of a pack's parts, on their device.

    layers: of the pages. most: rows of the longest part. splits: programs that share a prompt's pages. cut: the blocks [blocks, 4] of at
    most so many rows.
    """

    split: torch.Tensor
    rows: torch.Tensor
    pages: torch.Tensor
    layers: int
    most: int
    splits: int
    cut: Callable[[int], torch.Tensor]


def table_of(parts: Seq[Part], rows: int, device: torch.device) -> DeviceTable:
    """A table of these parts for a forward of so many rows."""
    share, of_rows, pages, firsts = arrays(parts, rows)
    found = [share, of_rows.ravel(), pages.ravel()]
    split, placed, addresses = torch.from_numpy(np.concatenate(found)).to(device).split([len(one) for one in found])
    cut = functools.cache(lambda each: torch.from_numpy(blocks_of(parts, firsts, each)).to(device))
    return DeviceTable(split, placed, addresses, pages.shape[-1], max(part.count for part in parts), splits_of(parts, rows), cut)


def splits_of(parts: Seq[Part], rows: int) -> int:
    """How many programs share a prompt's pages."""
    return SPLITS if rows <= FEW_ROWS and max(map(_count, parts)) > FEW_PAGES else 1


def arrays(parts: Seq[Part], rows: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, list[int]]:
    """`split`, `rows` and `pages` of a table, and where each part's pages begin."""
    counts = list(map(_count, parts))
    firsts = [0, *np.cumsum(counts)[:-1].tolist()]
    found = np.full((rows, 2), -1)
    for part, first in zip(parts, firsts):
        own = found[part.offset : part.offset + part.count]
        own[:, 0], own[:, 1] = first, np.arange(part.start, part.start + part.count)
    pages = np.stack([page.addresses for part, count in zip(parts, counts) for page in part.sequence.pages[:count]])
    return np.array([-(-max(counts) // SPLITS)]), found, pages, firsts


def blocks_of(parts: Seq[Part], firsts: Seq[int], each: int) -> np.ndarray:
    """The blocks [blocks, 4] of at most so many rows."""
    return np.array(
        [
            (first, part.offset + at, min(each, part.count - at), part.start + at)
            for part, first in zip(parts, firsts)
            for at in range(0, part.count, each)
        ]
    )


def _count(part: Part) -> int:
    """Pages that a part's rows see."""
    return int(part.start + part.count - 1) // PAGE_TOKENS + 1
