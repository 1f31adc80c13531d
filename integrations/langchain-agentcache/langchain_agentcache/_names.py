"""What settings are called in other classes, and which of those are something else here. Knows no values' limits and no engines."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from typing import Any

from agentcache import foreign_settings

from ._caller_warnings import tell_once

# Words of ChatOllama, OllamaLLM, ChatHuggingFace, HuggingFacePipeline, ChatOpenAI and transformers with the same meaning here.
SAME = {
    **foreign_settings.SAME,
    "chat_template_kwargs": "template_kwargs",
    "model_name": "model",
    "model_id": "model",
    "repo_id": "model",
    "max_completion_tokens": "max_tokens",
    "max_length": "num_ctx",  # prompt and completion together
    "repeat_penalty": "repetition_penalty",
    "stop_sequence": "stop",
    "timeout_s": "timeout",
    "request_timeout": "timeout",
    "hf_token": "token",
    "huggingfacehub_api_token": "token",
    "use_auth_token": "token",
    "openai_api_base": "base_url",
    "openai_api_key": "api_key",
}
_NESTED = ("model_kwargs", "pipeline_kwargs", "generation_kwargs")
_MIROSTAT = "temperature, top_p, top_k and min_p choose tokens here"
_SERVER = "base_url and api_key are all that a server of agentcache is asked with"
_THINKING = "reasoning= takes True or False; how much is template_kwargs={'reasoning_effort': ...}, where the chat template knows it"
_HEADERS = ("client_kwargs", "async_client_kwargs", "sync_client_kwargs", "default_headers", "extra_headers", "http_client", "endpoint_url")
# What is ignored with one warning: what to do instead.
_INSTEAD = {
    **dict.fromkeys((*_HEADERS, "http_async_client"), _SERVER),
    **dict.fromkeys(("mirostat", "mirostat_eta", "mirostat_tau", "tfs_z", "typical_p"), _MIROSTAT),
    **dict.fromkeys(("presence_penalty", "frequency_penalty", "repeat_last_n", "logit_bias"), "repetition_penalty is what there is"),
    "no_repeat_ngram_size": "repetition_penalty is what there is",
    **dict.fromkeys(("n", "num_return_sequences"), "ask several times"),
    **dict.fromkeys(("functions", "function_call"), "bind_tools(...) shows tools, as create_tool_calling_agent does"),
    **dict.fromkeys(("reasoning_effort", "enable_thinking", "thinking", "think"), _THINKING),
    **dict.fromkeys(("extra_body", "options"), "say what is in it as settings of their own"),
    **dict.fromkeys(("eos_token_id", "stop_token_ids", "stopping_criteria"), "stop=[...] takes the texts of tokens, <|eot_id|> too"),
    **dict.fromkeys(("logprobs", "top_logprobs"), "AgentCacheLLM tells them"),
    **dict.fromkeys(("tools", "tool_choice"), "ChatAgentCache calls tools"),
    **dict.fromkeys(("task", "backend"), "a causal model of transformers answers"),
    "validate_model_on_init": "load() loads the model at once",
    "local_files_only": "HF_HUB_OFFLINE=1 in the environment asks no network",
    "num_beams": "one completion is written, greedily or by sampling",
    "keep_alive": "the model stays loaded until close()",
    "num_thread": "call torch.set_num_threads()",
    "num_gpu": "say device='cuda' or device='cpu'",
    **dict.fromkeys(("prompt_lookup_num_tokens", "max_matching_ngram_size"), "tokens are drafted without being asked"),
    "batch_size": "requests that are there at the same time share a forward",
    "attn_implementation": "agentcache brings its own attention",
    "store": "cache_dir= names the folder, and cache_dir='' writes nothing to disk",
}
_TAKE_OVER = "from_pipeline(...) takes over a pipeline or a HuggingFacePipeline; or say model=... and its settings"
_REFUSED = {
    "quantization_config": "say load_in_4bit=True or load_in_8bit=True, or pass engine=agentcache.Engine(model, tokenizer)",
    "llm": _TAKE_OVER,
    "pipeline": _TAKE_OVER,
    "tokenizer": "comes with the model; for another one pass engine=agentcache.Engine(model, tokenizer)",
}
_UNNAMED = {"cache", "callback_manager"}  # LangChain's own, without a field in every release


def renamed(said: Mapping[str, Any]) -> dict[str, str]:
    """Of what was said in another class's word: our word, and theirs."""
    return {SAME[name]: name for name in _flat(said) if name in SAME}


def beside(said: Mapping[str, Any], found: Mapping[str, Any]) -> dict[str, Any]:
    """What was said, and what was found elsewhere of settings that were not said, under any name."""
    return {**{name: value for name, value in found.items() if name not in renamed(said)}, **said}


def noted(text: str, said: Mapping[str, Any]) -> str:
    """An error's text, with the word that the caller had used."""
    notes = [f" ({theirs} is {ours} here)" for ours, theirs in renamed(said).items() if f"{ours}=" in text]
    if text.startswith("reasoning="):
        notes.append(f"; {_THINKING}")
    return text + "".join(notes)


def own_names(said: Mapping[str, Any], known: Collection[str], by: str, standing: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Settings under the names that they have here; ValueError for what cannot be had.

    by: the class they were given to. standing: what the model is set to, where they are said for one call.
    """
    out: dict[str, Any] = {}
    loading, standing = said.get("model_kwargs"), standing or {}
    if isinstance(loading, Mapping) and (hub := loading.get("cache_dir")) is not None:
        raise ValueError(f"cache_dir={hub!r:.100} in model_kwargs: is the Hugging Face Hub's, set HF_HUB_CACHE; cache_dir= is for prompts")
    for name, value in _flat(said).items():
        ours = SAME.get(name, name)
        if value is None and ours in out:
            continue
        if out.get(ours) is not None and out[ours] != value:
            told = " and ".join(foreign_settings.shown(*each) for each in ((ours, out[ours]), (name, value)))
            raise ValueError(f"{told} are one setting: give it once, as {ours}")
        out[ours] = value
    _sampled(out, standing)
    _placed(out)
    for name, wanted in (("return_full_text", False), ("skip_prompt", True)):
        if out.pop(name, wanted) is not wanted:
            raise ValueError(f"{name}={not wanted!r}: {by} answers with the completion alone; put the prompt before it yourself")
    for name in [name for name in out if name not in known and name not in _UNNAMED]:
        value = out.pop(name)
        if name in _REFUSED and value is not None:
            raise ValueError(f"{name}={value!r:.100}: {_REFUSED[name]}")
        ignored = f"{by} ignores {foreign_settings.shown(name, value)}"
        if name in standing:
            if value is not None and value != standing[name]:
                tell_once(by, name, f"{ignored} of a call: it is a setting of the whole model")
        elif name == "store" or not (value is None or foreign_settings.changes_nothing(name, value)):  # store=None: nothing on disk
            tell_once(by, name, f"{ignored}: it has no such setting{_hint(name, known)}")
    return out


def _flat(said: Mapping[str, Any]) -> dict[str, Any]:
    """Settings that HuggingFacePipeline takes in dicts, beside the others."""
    nested = [value for name in _NESTED if isinstance(value := said.get(name), Mapping)]
    out = {name: value for name, value in said.items() if name not in _NESTED or not isinstance(value, (Mapping, type(None)))}
    for each in nested:
        for name, value in each.items():
            out.setdefault(name, value)
    return out


def _sampled(out: dict[str, Any], standing: Mapping[str, Any]) -> None:
    """transformers' `do_sample` as a temperature: without one of its own, sampling has that of transformers, and its top_k."""
    match out.pop("do_sample", None):
        case True:
            if (said := out.get("temperature")) is not None and not said:
                raise ValueError(f"do_sample=True and temperature={said!r}: 0 is greedy; give a positive one, or do_sample=False")
            out["temperature"] = said or standing.get("temperature") or foreign_settings.DO_SAMPLE["temperature"]
            if out.get("top_k") is None:
                out["top_k"] = foreign_settings.DO_SAMPLE["top_k"] if standing.get("top_k") is None else standing["top_k"]
        case False:
            out["temperature"] = 0.0


def _placed(out: dict[str, Any]) -> None:
    """`device_map` and numbered devices as a device."""
    place = foreign_settings.device_of(out.pop("device_map", None))
    if place == "auto":
        raise ValueError("device_map='auto': the weights lie on one device; say device='cuda', or device='cpu'")
    if place is not None:
        out.setdefault("device", place)
    if type(out.get("device")) is int:
        out["device"] = foreign_settings.device_of(out["device"])


def _hint(name: str, known: Collection[str]) -> str:
    if name in _INSTEAD:
        return f"; {_INSTEAD[name]}"
    return foreign_settings.did_you_mean([name], [each for each in known if not each.startswith("_")])


def template_text(given: Any) -> Any:
    """The chat template that is given as a text or as a file; ValueError for a name that is neither."""
    if isinstance(given, str) and ("{" in given or "\n" in given):
        return given
    if not isinstance(given, (str, os.PathLike)):
        return given  # refused, or None, where settings are checked
    try:
        with open(os.path.expanduser(given), encoding="utf-8") as file:
            return file.read()
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or error
        raise ValueError(f"chat_template={os.fspath(given)!r:.200}: is no Jinja template, and no file that can be read ({why})") from error
