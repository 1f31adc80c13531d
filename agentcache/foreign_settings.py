"""Settings of transformers, HuggingFaceLLM, ChatOllama and the like, in this project's words: what every integration translates alike.

Knows no framework: what one of them means by a name of its own stands in its integration.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Mapping
from typing import Any

from .errors import ConfigError

__all__ = ["DO_SAMPLE", "NEUTRAL", "SAME", "changes_nothing", "device_of", "did_you_mean", "in_words", "shown"]

# Names with the same meaning here.
SAME = {
    "max_new_tokens": "max_tokens",
    "num_predict": "max_tokens",
    "stop_sequences": "stop",
    "stop_strings": "stop",
    "torch_dtype": "dtype",
}
# Values under which what has no equal here decides nothing.
NEUTRAL: dict[str, Any] = {
    "num_beams": 1,
    "num_return_sequences": 1,
    "no_repeat_ngram_size": 0,
    "encoder_no_repeat_ngram_size": 0,
    "encoder_repetition_penalty": 1.0,
    "typical_p": 1.0,
    "epsilon_cutoff": 0.0,
    "eta_cutoff": 0.0,
    "penalty_alpha": 0.0,
    "guidance_scale": 1.0,
    "min_length": 0,
    "min_new_tokens": 0,
    "renormalize_logits": False,
    "remove_invalid_values": False,
    **dict.fromkeys(("bad_words_ids", "force_words_ids", "constraints", "suppress_tokens", "begin_suppress_tokens", "sequence_bias")),
    **dict.fromkeys(("top_h", "max_time", "exponential_decay_length_penalty", "watermarking_config", "logits_processor", "streamer")),
    **dict.fromkeys(("stopping_criteria", "dola_layers", "forced_bos_token_id", "forced_eos_token_id")),
}
_NEUTRAL = {
    **NEUTRAL,
    **{"n": 1, "presence_penalty": 0, "frequency_penalty": 0, "task": "text-generation", "backend": "default"},
    **dict.fromkeys(("client_kwargs", "async_client_kwargs", "sync_client_kwargs"), {}),
}
_NEEDLESS = {"pad_token_id", "use_cache", "low_cpu_mem_usage", "use_safetensors", "stream_usage", "stream_options"}  # whatever they say
_PRIVATE = re.compile(
    "key$|token$|tokenizer_kwargs|header|client|auth|password|credential|secret|body|options", re.IGNORECASE
)  # names of settings whose texts are in no message
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


def changes_nothing(name: str, value: Any) -> bool:
    """Tell whether an answer is the same with this setting and without."""
    neutral = _NEUTRAL.get(name)
    return name in _NEEDLESS or (neutral is not None and isinstance(value, (int, float, str, Mapping)) and value == neutral)


def shown(name: str, value: Any) -> str:
    """A setting as messages show it: without keys, tokens and headers."""
    return f"{name}=..." if _PRIVATE.search(name) and not isinstance(value, (int, float, type(None))) else f"{name}={value!r:.100}"


def in_words(error: Any) -> str:
    """Name the settings that a ValidationError of pydantic refuses, and why."""
    said = []
    for each in error.errors(include_url=False, include_context=False):
        field, text = ".".join(map(str, each["loc"])), each["msg"].removeprefix("Value error, ")
        said.append(f"{field}={each['input']!r:.200}: {text[:1].lower()}{text[1:]}" if field else text)
    return "; ".join(said)


def did_you_mean(names: Collection[str], known: Collection[str]) -> str:
    """The end of an error about unknown settings: "; did you mean NAME?" with those of similar spelling, else ""."""
    near = [one for name in names for one in difflib.get_close_matches(name, known, 1, 0.8)]
    return f"; did you mean {', '.join(near)}?" if near else ""
