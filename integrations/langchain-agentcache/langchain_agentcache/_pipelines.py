"""What a transformers pipeline is set to, in our words: of its own, its generation config's, and transformers' defaults. Runs nothing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from agentcache import foreign_settings

from ._names import own_names
from .errors import ModelInvalidRequestError

_TAKEN = ("max_tokens", "num_ctx", "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "stop")
# Values under which what is done to prompts and to completions, and has no equal here, decides nothing.
_PROMPTS: dict[str, Any] = dict.fromkeys(
    ("prefix", "truncation", "handle_long_generation", "tokenizer_encode_kwargs", "documents", "tools")
)
_TEXTS: dict[str, Any] = {"skip_special_tokens": True}


@dataclass(frozen=True, slots=True)
class Pipeline:
    """A local model with its tokenizer, and the settings of the pipeline around it, under the names of ours."""

    name: str
    model: Any
    tokenizer: Any
    settings: Mapping[str, Any]

    @classmethod
    def of(cls, pipeline: Any) -> Pipeline:
        """From a transformers pipeline, or from LangChain's HuggingFacePipeline; ModelInvalidRequestError for what has no equal here."""
        inner = getattr(pipeline, "pipeline", pipeline)
        model, tokenizer = getattr(inner, "model", None), getattr(inner, "tokenizer", None)
        if model is None or not (hasattr(model, "generation_config") and tokenizer is not None and hasattr(inner, "_sanitize_parameters")):
            raise ModelInvalidRequestError(
                f"from_pipeline({type(pipeline).__name__}): needs a text-generation pipeline with model and tokenizer"
            )
        settings = _settings(inner, getattr(pipeline, "pipeline_kwargs", None) or {})
        return cls(str(getattr(model.config, "_name_or_path", "") or type(model).__name__), model, tokenizer, settings)


def _settings(inner: Any, added: Mapping[str, Any]) -> dict[str, Any]:
    prompts, generation, texts = inner._sanitize_parameters(**added)
    said = _effective(inner, {**inner._forward_params, **generation})
    _refuse(said, foreign_settings.NEUTRAL)
    _refuse({**inner._preprocess_params, **prompts}, _PROMPTS)
    _refuse({**inner._postprocess_params, **texts}, _TEXTS)
    _check_ends(inner, said.get("eos_token_id"))
    if not said.get("do_sample"):
        said |= {"do_sample": False, "top_p": None, "top_k": None, "min_p": None}
    if "max_new_tokens" in said:
        said.pop("max_length", None)  # as `generate` does
    wanted = {name: said[name] for name in _FROM if said.get(name) is not None}
    try:
        out = own_names(wanted, _TAKEN, "from_pipeline")
    except ValueError as error:
        raise ModelInvalidRequestError(f"from_pipeline: {error}") from error
    return {**out, "stop": [out["stop"]] if isinstance(out.get("stop"), str) else out["stop"]} if "stop" in out else out


_FROM = ("max_new_tokens", "max_length", "do_sample", "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "stop_strings")


def _effective(inner: Any, said: Mapping[str, Any]) -> dict[str, Any]:
    """What `generate` would be told: the call's settings on those of the pipeline, on those of the model."""
    if hasattr(inner, "_prepare_generate_kwargs"):
        return dict(inner._get_set_generation_params(inner._prepare_generate_kwargs(dict(said))))
    standing = inner.generation_config.to_diff_dict()  # of releases in which the pipeline keeps a whole generation config of its own
    if (config := said.get("generation_config")) is not None:
        standing |= config.to_diff_dict()
    return {**standing, **said}


def _refuse(said: Mapping[str, Any], neutral: Mapping[str, Any]) -> None:
    for name, nothing in neutral.items():
        if (value := said.get(name)) is not None and value != nothing and value != "":
            raise ModelInvalidRequestError(f"from_pipeline: {name}={value!r:.200} of the pipeline has no equal here; make it without")


def _check_ends(inner: Any, asked: Any) -> None:
    """A completion ends at the tokens that the model's generation config names, and at its tokenizer's."""
    ends = _ids(inner.model.generation_config.eos_token_id) | _ids(inner.tokenizer.eos_token_id)
    if more := _ids(asked) - ends:
        raise ModelInvalidRequestError(
            f"from_pipeline: eos_token_id={asked!r} of the pipeline: {sorted(more)!r} end no completion of this model; "
            "name them in model.generation_config.eos_token_id"
        )


def _ids(value: Any) -> set[int]:
    return {value} if isinstance(value, int) else set(value or ())
