"""Errors of files that hold no model to load, in words. Imported once loading has failed; reads no weights itself."""

from __future__ import annotations

import json
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from pickle import UnpicklingError

from safetensors import SafetensorError

from .. import embedded
from ..errors import ModelLoadError

DAMAGED = (SafetensorError, UnpicklingError, EOFError)  # a file that was not downloaded whole, or a pointer of Git LFS in its place
MARK = "\nModel type should be one of"  # transformers goes on with the names of all its classes


def refusal(model: str, error: BaseException) -> ModelLoadError:
    """The error that names a model, what is wrong with its files, and the way out."""
    folder = Path(model)
    bare = folder.is_dir() and not any((folder / name).exists() for name in ("config.json", "adapter_config.json"))
    why = "it holds no config.json, as save_pretrained writes it" if bare else said(error)
    return refused(model, why)


def refused(model: str, why: str) -> ModelLoadError:
    """The same, for a reason that is known."""
    way = f"Pass a folder, a Hugging Face id of a causal model, or {embedded.NAME!r}"
    return ModelLoadError(f"model {model!r} cannot be loaded: {why}. {way}")


def said(error: BaseException) -> str:
    """The words of an error of loading, and the file that it is about."""
    if isinstance(error, DAMAGED):
        return "a file of its weights is damaged: download it again"
    if isinstance(error, json.JSONDecodeError):
        return f"a file of JSON beside its weights, which begins {error.doc[:42]!r}, is damaged ({error}): download it again"
    if isinstance(error, KeyError):  # which says the key alone
        return f"KeyError: {error}"
    if isinstance(error, ModuleNotFoundError) and error.name:
        return f"it needs the Python package {error.name.partition('.')[0]!r}, which is not installed: install it"
    text = str(error)
    if "ignore_mismatched_sizes" in text:
        return "shapes of its weights are not those of its config.json: transformers' report above lists them"
    if text.startswith("Error parsing line") and "git-lfs" not in text and find_spec("sentencepiece") is None:  # read as tiktoken's, then
        return f"{text}, which sentencepiece reads: pip install sentencepiece protobuf"
    return text.partition(MARK)[0].strip().rstrip(".")


def unscaled(names: Sequence[str]) -> str:
    """Scales of quantised weights that a model has no place for, in words. names: theirs, in order."""
    some = f"{names[0]!r}" + (f" and {len(names) - 1} more" if names[1:] else "")
    return (
        f"transformers does not read the scales {some} of its quantised weights, which would be wrong numbers without them: "
        "take the checkpoint whose weights are not quantised, or are by compressed-tensors"
    )


def lost(names: Sequence[str], kind: str) -> str:
    """The weights of a class that its files do not hold, in words. names: theirs, in order."""
    some = f"{names[0]!r}" + (f" and {len(names) - 1} more" if names[1:] else "")
    way = "; name its base as the model, and this folder in adapters={NAME: FOLDER}" if ".lora_" in names[0] else ""
    return f"its files hold no {some}: of a {kind!r} that would be random numbers{way}"
