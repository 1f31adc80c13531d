"""What LangChain's model profile asks about a model: read off its files, or off a running engine. Loads no weights and renders no prompt.

What a chat template does with tools and late system messages is asked of `agentcache lint`, which tries it out.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from langchain_core.language_models import ModelProfile

from agentcache import Engine, embedded
from agentcache.errors import AgentCacheError, ModelLoadError
from agentcache.lint.templates import Bare, probe
from agentcache.model.response import THOUGHTS
from agentcache.model.tool_calls import THINK


def profile_of(model: str, engine: Engine | None, context: int | None, chat_template: str | None, revision: str | None) -> ModelProfile:
    """The profile; what cannot be known without downloading something is left out, not guessed."""
    files = _Files(model, revision)
    known_context, tokens = _of_engine(engine) if engine is not None else (_context(files.json("config.json")), files.tokenizer())
    limit = min(context, known_context) if context and known_context else context or known_context
    known: dict[str, Any] = {
        "name": model,
        "open_weights": True,
        **dict.fromkeys(("text_inputs", "text_outputs", "temperature"), True),
        **dict.fromkeys(("image_inputs", "audio_inputs", "pdf_inputs", "video_inputs", "mid_conversation_tools"), False),
        **dict.fromkeys(("tool_calling", "tool_choice", "tool_call_streaming", "structured_output"), True),
    }
    if limit:
        known |= {"max_input_tokens": int(limit), "max_output_tokens": int(limit)}
    template = chat_template or tokens.get("chat_template")
    if isinstance(template, str):
        response = tokens.get("response_template")
        fields = response.get("fields", {}) if isinstance(response, Mapping) else {}
        known |= {"reasoning_output": THINK in template or bool(THOUGHTS & set(fields)), **_tried(template)}
    return cast("ModelProfile", known)


@functools.lru_cache(maxsize=16)
def _tried(template: str) -> dict[str, bool]:
    try:
        answers = {each.name: each.answer for each in probe(Bare(template))}
    except AgentCacheError:  # a template that refuses whatever it is asked
        return {}
    return {
        "tool_calling": answers.get("tools stand") != "absent",
        "mid_conversation_system_messages": answers.get("later system message") == "in place",
    }


def _context(config: Mapping[str, Any]) -> int | None:
    """The longest sequence of a config.json; models that read pictures as well say it under "text_config"."""
    inner = config.get("text_config")
    found = config.get("max_position_embeddings") or (inner.get("max_position_embeddings") if isinstance(inner, Mapping) else None)
    return found if isinstance(found, int) else None


def _of_engine(engine: Engine) -> tuple[int | None, dict[str, Any]]:
    said = {name: getattr(engine.tokenizer, name, None) for name in ("chat_template", "response_template")}
    if isinstance(many := said["chat_template"], dict):  # several, by name
        said["chat_template"] = many.get("tool_use") or many.get("default")
    said_so = getattr(engine.model.config, "max_position_embeddings", None)  # without it the engine sets no limit, which is none to tell
    return engine.model.context_tokens if said_so else None, said


class _Files:
    """The files of a model, as far as they are on this machine; nothing is downloaded."""

    def __init__(self, model: str, revision: str | None) -> None:
        self._model = model
        self._revision = revision

    def tokenizer(self) -> dict[str, Any]:
        """tokenizer_config.json, with the chat template that stands in a file of its own."""
        config = self.json("tokenizer_config.json")
        path = self._path("chat_template.jinja")
        if path is not None:
            config["chat_template"] = path.read_text(encoding="utf-8")
        elif isinstance(many := config.get("chat_template"), list):  # several, by name
            named = {each.get("name"): each.get("template") for each in many if isinstance(each, Mapping)}
            config["chat_template"] = named.get("tool_use") or named.get("default")
        return config

    def json(self, name: str) -> dict[str, Any]:
        """What a JSON file says; nothing if it is not there, or broken."""
        path = self._path(name)
        try:
            return dict(json.loads(path.read_text(encoding="utf-8"))) if path is not None else {}
        except (OSError, ValueError):
            return {}

    def _path(self, name: str) -> Path | None:
        if not self._model:
            return None
        path = (self._embedded() if self._model == embedded.NAME else Path(self._model).expanduser()) / name
        if path.is_file():
            return path
        from huggingface_hub import try_to_load_from_cache

        try:
            found = try_to_load_from_cache(self._model, name, revision=self._revision)
        except ValueError:  # not a name that the Hub could have
            return None
        return Path(found) if isinstance(found, str) else None

    @staticmethod
    def _embedded() -> Path:
        try:
            return embedded.folder()
        except ModelLoadError:  # said where it is loaded
            return Path()
