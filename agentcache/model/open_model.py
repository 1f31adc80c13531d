"""From a name, a folder or objects to a model that is ready for packed forwards. Knows no requests."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from ..errors import ReuseWarning
from ..types import Sampling
from .hf import HFModel
from .loading import Loading, load


def open_model(model: Any, tokenizer: Any, loading: Loading, others: Iterable[str] | None = None) -> tuple[HFModel, Any]:
    """A model ready for packed forwards, and its tokenizer, from what `load` takes. others: options of an engine beside these."""
    for name in loading.keys() - Loading.__annotations__.keys():
        way = "it is a field of Sampling, which a request takes"
        if name not in Sampling.__dataclass_fields__:
            from ..foreign_settings import did_you_mean

            way = f"docs/configure.md has all{did_you_mean([name], [*(others or ()), *Loading.__annotations__])}"
        raise TypeError(f"{name}={loading.get(name)!r:.200}: an engine has no such option; {way}")
    with ThreadPoolExecutor(1, "agentcache-loader") as loader:  # a thread that forked left its OpenMP team in the parent
        opening = loader.submit(_opened, model, tokenizer, loading)
        try:
            opened, tokenizer = opening.result()
        except BaseException:  # an interrupt of the waiting: nobody else gives the model back
            opening.add_done_callback(_close)
            raise
    used, asked = opened.threads
    if used < asked:
        warnings.warn(f"{used} of {asked} threads are used: OMP_THREAD_LIMIT allows no more", ReuseWarning, stacklevel=3)
    return opened, tokenizer


def _close(opening: Future[tuple[HFModel, Any]]) -> None:
    if opening.exception() is None:
        opening.result()[0].close()


def _opened(model: Any, tokenizer: Any, loading: Loading) -> tuple[HFModel, Any]:
    loaded, tokenizer = load(model, tokenizer, **loading)
    return HFModel(loaded), tokenizer
