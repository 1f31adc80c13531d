"""Settings of transformers, HuggingFaceLLM, ChatOllama and the like, in this project's words: what every integration translates alike.

Knows no framework: what one of them means by a name of its own stands in its integration.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping
from typing import Any

from .errors import ConfigError

__all__ = ["DO_SAMPLE", "SAME", "device_of", "did_you_mean"]

# Names with the same meaning here.
SAME = {"max_new_tokens": "max_tokens", "num_predict": "max_tokens", "stop_sequences": "stop", "torch_dtype": "dtype"}
# What transformers' do_sample=True means where these are not given.
DO_SAMPLE = {"temperature": 1.0, "top_k": 50}


def device_of(place: Any) -> str | None:
    """The device that a device_map, or a number, names: "auto" as it is, None for None. ConfigError where it names several."""
    one = place[""] if isinstance(place, Mapping) and set(place) == {""} else place
    if isinstance(one, int) and not isinstance(one, bool):
        return "cpu" if one < 0 else f"cuda:{one}"
    if isinstance(one, (Mapping, bool)) or str(one) in ("balanced", "balanced_low_0", "sequential"):
        raise ConfigError(f"device_map={place!r:.200}: the weights lie on one device; say device='cuda', or device='cpu'")
    return None if one is None else str(one)


def did_you_mean(names: Collection[str], known: Collection[str]) -> str:
    """The end of an error about unknown settings: "; did you mean NAME?" with those of similar spelling, else ""."""
    near = [one for name in names for one in difflib.get_close_matches(name, known, 1, 0.8)]
    return f"; did you mean {', '.join(near)}?" if near else ""
