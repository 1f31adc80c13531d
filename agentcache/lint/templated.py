"""A request's prompt as a model's own chat template and tokenizer make it: parts in token ids, and what a template does by itself.

Uses the rendering and the tokenising of `layout`; loads a tokenizer, never a model.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from .. import embedded
from ..errors import ConfigError, TemplateError, ToolSchemaError
from ..layout.canonical import Turn
from ..layout.plain import plain_messages
from ..layout.spans import Frame
from ..layout.template import Template
from ..layout.tokenise import EMPTY, Encoded, Encoder, common_length, in_transformers_form
from ..types import Span
from .render import Prompt
from .retokenise import resumed
from .values import Cause, Change, Request, Said


class Loaded(NamedTuple):
    """A tokenizer with the chat template that is to be used."""

    tokenizer: Any
    template: str | None


def load(name: str, chat_template: Path | None = None) -> Loaded:
    """A tokenizer by id or folder; ConfigError if it cannot be had."""
    from transformers import PreTrainedTokenizerFast  # not AutoTokenizer, which would load torch

    given = read_template(chat_template) if chat_template is not None else None
    if name == embedded.NAME:
        name = str(embedded.folder())
    try:
        return Loaded(PreTrainedTokenizerFast.from_pretrained(name), given)
    except (OSError, ValueError, TypeError) as first:
        try:
            from transformers import AutoTokenizer

            return Loaded(in_transformers_form(AutoTokenizer.from_pretrained(name)), given)
        except (OSError, ValueError, ImportError) as error:
            why = " ".join(str(error).split()).rstrip(".")
            raise ConfigError(f"tokenizer {name!r} cannot be loaded ({why}); give a folder with tokenizer.json or an id") from first


def read_template(path: Path) -> str:
    """The chat template in a file; ConfigError if it cannot be read, TemplateError if it is no template."""
    try:
        return checked(path.read_text(encoding="utf-8-sig"), str(path))
    except UnicodeDecodeError as error:
        raise ConfigError(f"chat template {str(path)!r} is not UTF-8 (at byte {error.start}): save it as UTF-8") from error
    except OSError as error:
        raise ConfigError(f"chat template {str(path)!r} cannot be read ({error.strerror or error}): give a .jinja file") from error


def checked(source: str, name: str) -> str:
    """The template, once transformers' own renderer has compiled it: one that cannot be refuses all messages alike."""
    import jinja2
    from transformers.utils.chat_template_utils import render_jinja_template

    try:
        render_jinja_template(conversations=[], chat_template=source)
    except jinja2.TemplateSyntaxError as error:
        raise TemplateError(f"chat template {name!r} is not Jinja: {error.message} (line {error.lineno}); mend it there") from error
    return source


@dataclass(frozen=True, slots=True)
class Tokens(Prompt):
    """A prompt in ids."""

    unit: int = 1
    encoded: Encoded = field(default=EMPTY, repr=False)  # ids, text, and where tokens end
    spans: tuple[Span, ...] = ()  # one for each part
    generation: int = 0  # ids of the generation prompt

    @property
    def whole(self) -> Sequence[int]:
        return self.encoded.ids

    @property
    def text(self) -> str:
        return self.encoded.text

    @property
    def stable(self) -> int:
        """Ids before the generation prompt."""
        return len(self.encoded.ids) - self.generation

    def span_at(self, token: int) -> Span | None:
        """The span in which a token stands."""
        return next((span for span in self.spans if span.start <= token < span.stop), None)

    def char(self, at: int) -> int:
        """The character at which a token starts."""
        return self.encoded.ends[at - 1] if 0 < at <= len(self.encoded.ends) else 0


def tokens_of(encoded: Encoded, spans: Sequence[Span]) -> Tokens:
    """A prompt that `layout` made; spans beyond its ids are left out."""
    shown = tuple(span for span in spans if span.start < len(encoded.ids) and span.kind != "volatile")
    parts = tuple(tuple(encoded.ids[span.start : span.stop]) for span in shown)
    generation = sum(span.stop - span.start for span in shown if span.kind == "generation")
    return Tokens(parts, encoded=encoded, spans=shown, generation=generation)


class Templated:
    """Renders requests for one tokenizer; only text that the prompt before did not have is tokenised."""

    def __init__(self, loaded: Loaded) -> None:
        self.template = Template(loaded.tokenizer, loaded.template)
        self._encoder = Encoder(loaded.tokenizer)
        self._tools: OrderedDict[tuple[str, ...], tuple[list[dict[str, Any]], str]] = OrderedDict()

    def prompt(self, request: Request, known: Prompt | None) -> Tokens:
        """The prompt in ids. `known`: the prompt of the request before. Raises PromptError if the template refuses the request."""
        before = known.encoded if isinstance(known, Tokens) else EMPTY
        if request.prompt is not None:
            text, frame = request.prompt, None
        else:
            plain = plain_messages([plain_message(said) for said in (*request.system, *request.history)])
            tools, added = self._listed(request)
            try:
                text = self.template.render(plain, tools, True)
            except TemplateError:  # some take ids of one form only
                text = self.template.render(_numbered(plain), tools, True)
            turns = [Turn(at, message) for at, message in enumerate(plain)]
            frame = Frame(turns, [b""] * len(turns), self.template.shape(bool(tools)), added, True)
            frame.place(text)
        encoded = resumed(self._encoder, before, text)
        if frame is None or not encoded.ends:
            return Tokens((tuple(encoded.ids),), encoded=encoded)
        return tokens_of(encoded, frame.spans(encoded))

    def _listed(self, request: Request) -> tuple[list[dict[str, Any]], str]:
        """The tools as the template gets them, and the text that they add."""
        key = tuple(tool.text for tool in request.tools)
        if key not in self._tools:
            tools = [openai_tool(json.loads(tool.text)) for tool in request.tools]
            self._tools[key] = tools, (self.template.tools_text(tools, {}) or "") if tools else ""
            if len(self._tools) > 64:
                self._tools.popitem(last=False)
        return self._tools[key]


def plain_message(said: Said) -> dict[str, Any]:
    """A message as chat templates expect it."""
    out: dict[str, Any] = {"role": said.role, "content": said.content}
    if said.reasoning:
        out["reasoning_content"] = said.reasoning
    if said.calls:
        out["tool_calls"] = [
            {"id": call.id or f"call_{number:04d}", "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for number, call in enumerate(said.calls)
        ]
    if said.call_id is not None:
        out["tool_call_id"] = said.call_id
    if said.name is not None:
        out["name"] = said.name
    return out


def _numbered(plain: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The messages with the ids of calls numbered by position: nine letters and digits."""
    known: dict[Any, str] = {}
    out = []
    for message in plain:
        calls = [{**call, "id": known.setdefault(call.get("id"), f"call{len(known):05d}")} for call in message.get("tool_calls", ())]
        answers = {"tool_call_id": known.get(message["tool_call_id"], "call99999")} if "tool_call_id" in message else {}
        out.append({**message, **({"tool_calls": calls} if calls else {}), **answers})
    return out


def openai_tool(tool: Any) -> dict[str, Any]:
    """A tool as chat templates expect it."""
    function = tool.get("function", tool) if isinstance(tool, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise ToolSchemaError(f"tool {tool!r:.80} is no object with a name: a chat template shows none such; give its schema")
    if "function" in tool:
        return tool  # type: ignore[no-any-return]
    parameters = tool.get("input_schema", tool.get("parameters")) or {"type": "object", "properties": {}}
    return {"type": "function", "function": {"name": tool["name"], "description": tool.get("description") or "", "parameters": parameters}}


def own_fault(was: Tokens, now: Tokens, at: int, messages: tuple[Said, ...]) -> Change:
    """The change where the messages only went on, and the ids did not: the template's or the tokenizer's doing."""
    char = common_length(was.encoded.text, now.encoded.text)
    if char >= was.char(was.stable):
        return _fault(Cause.BOUNDARY, "the same characters are cut into other tokens when more text follows", "tokenizer boundary")
    old_tools, new_tools = _tools_start(was), _tools_start(now)
    if old_tools != new_tools and None not in (old_tools, new_tools) and at <= min(old_tools or 0, new_tools or 0) + 8:
        return _fault(Cause.TOOLS_MOVED, f"the tools stood at token {old_tools}, now they stand at {new_tools}")
    span = was.span_at(at)
    said = messages[span.message] if span is not None and span.message is not None and span.message < len(messages) else None
    old, new = was.encoded.text[max(0, char - 12) : char + 400], now.encoded.text[max(0, char - 12) : char + 400]
    lost = said is not None and bool(said.reasoning) and said.reasoning.strip()[:24] in old and said.reasoning.strip()[:24] not in new
    if lost or ("<think" in old) != ("<think" in new):
        return _fault(Cause.REASONING, "the template shows the reasoning of this message no longer")
    return _fault(Cause.TEMPLATE, "the same messages are rendered differently when more of them follow")


def _fault(cause: Cause, detail: str, writer: str = "template") -> Change:
    return Change(cause, "template", writer, detail)


def _tools_start(prompt: Tokens) -> int | None:
    return next((span.start for span in prompt.spans if span.kind == "tools"), None)
