"""Settings as HuggingFaceLLM and Ollama call them, in this package's words. Knows no engine and no messages.

A name whose meaning is equal is taken over; any other is refused, and the error says what to write instead. Nothing that could
change an answer is ignored.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from llama_index.core.bridge.pydantic import BaseModel

from agentcache import foreign_settings
from agentcache.errors import ConfigError

from .structured import schema_of

_UNSET: tuple[Any, ...] = (None, False, "", [], {}, "{query_str}")  # what stands there by default
SAME = {
    **foreign_settings.SAME,
    "chat_template_kwargs": "template_kwargs",
    "max_completion_tokens": "max_tokens",
    "num_output": "max_tokens",
}
NEEDLESS = ("extra_headers", "reuse_client")  # of HTTP, as DocumentContextExtractor gives to every model, and OpenAILike: no answer changes
LOAD = "load the model yourself, with from_pretrained(...), and give it as model= with its tokenizer="
NO_SERVER = "base_url= and api_key= of an `agentcache serve`; without them the model runs in this process"
PENALTY = "repetition_penalty, which counts the whole text"
SAMPLING = "nothing: temperature, top_p, top_k and min_p choose tokens"
THINKING = 'additional_kwargs={"template_kwargs": {"enable_thinking": ...}}, for chat templates that know it'
TIME = "asyncio.wait_for(llm.achat(...), seconds), which ends the request on the device"
TOKENS = "stop=[...], with the texts of these tokens"
INSTEAD = {
    **dict.fromkeys(("api_base", "api_version", "async_client", "async_http_client", "client", "default_headers"), NO_SERVER),
    **dict.fromkeys(("headers", "http_client", "prompt_key"), NO_SERVER),
    "attn_implementation": "nothing: agentcache brings its own attention",
    **dict.fromkeys(("eos_token_id", "stopping_ids"), TOKENS),
    **dict.fromkeys(("extra_body", "options"), "additional_kwargs, with what is in it"),
    **dict.fromkeys(("frequency_penalty", "no_repeat_ngram_size", "presence_penalty", "repeat_last_n"), PENALTY),
    "keep_alive": "nothing: the model stays loaded until close() or the end of a `with` block",
    "max_length": "max_tokens, the tokens of an answer without its prompt",
    "max_retries": "nothing: a request in this process needs no second one",
    **dict.fromkeys(("mirostat", "mirostat_eta", "mirostat_tau", "tfs_z", "typical_p"), SAMPLING),
    **dict.fromkeys(("n", "num_return_sequences"), "nothing: ask several times"),
    "num_beams": "nothing: answers are not searched with beams",
    "num_ctx": "context_window=, which tells LlamaIndex of a smaller context",
    "num_gpu": "device='cuda' or device='cpu'",
    "num_thread": "torch.set_num_threads(...)",
    "parallel_tool_calls": "allow_parallel_tool_calls",
    "prompt_lookup_num_tokens": "nothing: tokens are drafted without being asked",
    "quantization_config": f"load_in_4bit=True or load_in_8bit=True; for any other, {LOAD}",
    "query_wrapper_prompt": "completion_to_prompt=lambda text: ..., which writes the whole prompt of complete()",
    "reasoning_effort": 'additional_kwargs={"template_kwargs": {"reasoning_effort": ...}}, for chat templates that know it',
    "repeat_penalty": f"{PENALTY} and not its last 64 tokens",
    **dict.fromkeys(("request_timeout", "timeout"), TIME),
    "should_use_structured_outputs": "nothing: objects are held to their schema",
    **dict.fromkeys(("think", "thinking"), THINKING),
    "tokenizer_kwargs": f"tokenizer=, made with them; with it, {LOAD}",
    "tokenizer_name": LOAD,
    "top_logprobs": "logprobs, how many of the likeliest tokens to tell beside each",
    **dict.fromkeys(("cache_dir", "local_files_only", "max_memory", "offload_folder"), LOAD),
}
SAID_BY_FALSE = ("parallel_tool_calls", "think", "thinking")  # not the default: a template may think by itself


def said(given: Mapping[str, Any]) -> dict[str, Any]:
    """The options of a request, or of all, in this package's words."""
    out: dict[str, Any] = {}
    for name, value in given.items():
        if foreign_settings.changes_nothing(name, value):
            continue
        if name in INSTEAD and (value not in _UNSET or (name in SAID_BY_FALSE and value is False)):
            raise ConfigError(f"{foreign_settings.shown(name, value)} is no setting here. Instead of it: {INSTEAD[name]}")
        if name in ("json_mode", "format", "response_format"):
            out = joined(out, _form(name, value), name)
        elif name not in ("do_sample", *INSTEAD, *NEEDLESS):
            out = joined(out, {SAME.get(name, name): value}, name)
    if (sample := given.get("do_sample")) is not None:
        if not isinstance(sample, bool):
            raise ConfigError(f"do_sample={sample!r:.100}: must be True or False")
        out = {**foreign_settings.DO_SAMPLE, **out} if sample else {**out, "temperature": 0.0}
    return out


def _form(name: str, value: Any) -> dict[str, Any]:
    """What asks for JSON: any object, or one that fits a schema."""
    kind = value.get("type") if isinstance(value, Mapping) and name == "response_format" else None
    if kind == "json_schema" and isinstance(wanted := value.get("json_schema"), Mapping) and isinstance(wanted.get("schema"), Mapping):
        return {"schema": wanted["schema"]}
    if kind == "json_object" or (name == "json_mode" and value is True) or (name == "format" and value == "json"):
        return {"schema": True}
    if value in (None, False, "") or kind == "text":
        return {}
    if name == "format" and isinstance(value, Mapping):
        return {"schema": value}
    if isinstance(value, type) and issubclass(value, BaseModel):
        return {"schema": schema_of(value)}
    raise ConfigError(f"{name}={value!r:.200} is not known here. Instead of it: schema=, a JSON schema, or True for any JSON object")


def mapping(name: str, value: Any) -> dict[str, Any]:
    """A dict of options, or none of them."""
    if not isinstance(value, (Mapping, type(None))):
        raise ConfigError(f"{name}={value!r:.200}: must be a dict of options")
    return dict(value or {})


def joined(options: Mapping[str, Any], more: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Both; ConfigError where they say two things of one setting."""
    if twice := sorted(name for name in more if name in options and options[name] != more[name]):
        told = ", ".join(foreign_settings.shown(name, (options[name], more[name])) for name in twice)
        raise ConfigError(f"{where} says again what is said already, and otherwise: {told:.300}; give each setting once")
    return {**options, **more}
