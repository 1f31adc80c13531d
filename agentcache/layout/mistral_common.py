"""mistral-common's tokenizer in transformers' form, by transformers' own conversion. Loaded for a model that comes with one."""

from __future__ import annotations

import tempfile
from typing import Any

from ..errors import ConfigError


def converted(tokenizer: Any) -> Any:
    """The conversion, which has equal ids. ConfigError: it fails."""
    from transformers import PreTrainedTokenizerFast

    try:
        with tempfile.TemporaryDirectory() as folder:
            tokenizer.save_pretrained(folder, save_format="hf")
            return PreTrainedTokenizerFast.from_pretrained(folder)
    except (OSError, ValueError, TypeError, KeyError) as error:
        advice = "load it by AutoTokenizer.from_pretrained(NAME, mistral_format=False)"
        raise ConfigError(f"tokenizer 'MistralCommonBackend' cannot be converted ({type(error).__name__}: {error}): {advice}") from error
