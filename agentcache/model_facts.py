"""Facts about a model without its weights: read off its files, or off a running engine. Downloads nothing and renders no prompt."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import embedded
from .answer.family_forms import rows
from .answer.response_template import THOUGHTS
from .errors import AgentCacheError, ModelLoadError
from .lint.templates import probe, wordless

if TYPE_CHECKING:
    from .engine import Engine


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """Facts that a program may ask before it uses a model. None: unknown without a download."""

    context_tokens: int | None = None  # of prompt and completion together
    reasoning: bool | None = None  # its template, or its response template, has a place for thoughts
    tool_calling: bool | None = None  # its template shows tools
    later_system: bool | None = None  # its template shows a system message in the middle where it stands

    @classmethod
    def of_files(cls, model: str, *, revision: str | None = None, chat_template: str | None = None) -> ModelFacts:
        """Read the facts of a folder, of a Hugging Face id whose files are on this machine, or of "embedded"."""
        files = _Files(model, revision)
        return cls._of(_context(files.json("config.json")), files.tokenizer(), chat_template)

    @classmethod
    def of_engine(cls, engine: Engine, *, chat_template: str | None = None) -> ModelFacts:
        """Read the facts of the model that an engine runs, of a RemoteEngine as its server tells them."""
        if isinstance(told := getattr(engine.model, "facts", None), Mapping):
            return cls(**{each.name: told.get(each.name) for each in fields(cls)})
        said = {name: getattr(engine.tokenizer, name, None) for name in ("chat_template", "response_template")}
        if isinstance(many := said["chat_template"], dict):  # several, by name
            said["chat_template"] = many.get("tool_use") or many.get("default")
        limited = getattr(engine.model.config, "max_position_embeddings", None)  # without it the engine's limit is no fact of the model
        return cls._of(engine.model.context_tokens if (limited or 0) > 0 else None, said, chat_template)

    @classmethod
    def _of(cls, context: int | None, tokenizer: Mapping[str, Any], chat_template: str | None) -> ModelFacts:
        template = chat_template or tokenizer.get("chat_template")
        if not isinstance(template, str):
            return cls(context)
        response = tokenizer.get("response_template")
        fields = response.get("fields", {}) if isinstance(response, Mapping) else {}
        return cls(context, any(form.thought[0] in template for _, form in rows()) or bool(THOUGHTS & set(fields)), *_tried(template))


@functools.lru_cache(maxsize=16)
def _tried(template: str) -> tuple[bool | None, bool | None]:
    """(whether it shows tools, whether it shows a later system message in its place)"""
    try:
        answers = {each.name: each.answer for each in probe(wordless(template))}
    except AgentCacheError:  # a template that refuses whatever it is asked
        return None, None
    return answers.get("tools stand") != "absent", answers.get("later system message") == "in place"


def _context(config: Mapping[str, Any]) -> int | None:
    """The longest sequence of a config.json; models that read pictures as well say it under "text_config"."""
    inner = config.get("text_config")
    said = config if config.get("max_position_embeddings") or not isinstance(inner, Mapping) else inner
    found, rope = said.get("max_position_embeddings"), said.get("rope_parameters") or said.get("rope_scaling")
    if not isinstance(found, int) or found < 1 or not isinstance(rope, Mapping) or not rope.get("factor"):
        return found if isinstance(found, int) and found > 0 else None
    from .model.rope import longest  # loads torch, so only where there is a factor

    return longest(found, rope)


class _Files:
    """The files of a model, as far as they are on this machine."""

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
        return {**self.json("chat_template.json"), **config}  # of a processor, where the tokenizer has none

    def json(self, name: str) -> dict[str, Any]:
        """The object of a JSON file; empty if it is missing, or broken."""
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
