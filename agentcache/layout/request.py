"""One request in the form that is rendered: messages and tools checked, canonical or as given. Knows nothing of text and tokens."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..errors import ConfigError, TemplateError, shown
from ..namespace_lru import Covering, NamespaceLRU
from ..types import Message, Rendering, Tool, ToolOrder
from .canonical import ABSENT, Canon, Turn, digest_of
from .memory import chain
from .plain import Plain, plain_messages
from .schemas import canonical_tools, check_values, order_tools, plain_tools, said, tool_name
from .template import Template
from .tokenise import Encoder, Neutraliser

TOOL_LISTS = 128  # remembered tool lists; each costs two small renderings and a walk over its schemas to find again


@dataclass(frozen=True, slots=True)
class ToolList:
    """Tools ready to render. `root` names them with the template's arguments, `text` is their part of a prompt."""

    schemas: list[Plain]
    notes: tuple[str, ...]
    text: str
    root: bytes


@dataclass(frozen=True, slots=True)
class Request:
    """Messages and tools to render."""

    turns: list[Turn]
    tools: ToolList
    notes: list[str]  # differences from stock, in words
    keys: list[bytes]  # keys[i] names the history of the first i turns
    kwargs: Mapping[str, Any]

    def until(self, number: int) -> Request:
        """The request as it was before turn `number`."""
        return Request(self.turns[:number], self.tools, self.notes, self.keys[: number + 1], self.kwargs)


class Requests:
    """Builds requests for one template and one tokenizer; what agents send again at each step is worked out once.

    By namespace: the time of a prompt tells nothing about the prompts of others.
    """

    def __init__(self, template: Template, encoder: Encoder) -> None:
        self._template = template
        self._encoder = encoder
        self._clean: Neutraliser | None = None
        self._canon: Canon | None = None
        self._tools: NamespaceLRU[bytes, ToolList] = NamespaceLRU(TOOL_LISTS)

    def forget(self, deletion: Covering) -> None:
        """Forget the messages and tools of namespaces of which something was deleted on purpose."""
        self._tools.forget(deletion)
        if self._canon is not None:
            self._canon.forget(deletion)

    def build(
        self,
        messages: Sequence[Message | Mapping[str, Any]],
        tools: Sequence[Tool | Mapping[str, Any]],
        rendering: Rendering,
        order: ToolOrder,
        sticky: Sequence[str],
        kwargs: Mapping[str, Any],
        namespace: str,
    ) -> Request:
        if rendering == "stock":
            plain = plain_messages(messages)
            listed = self._listed(plain_tools(tools), rendering, "given", (), kwargs, namespace)
            turns = [Turn(index, message, digest_of(message)) for index, message in enumerate(plain)]
            return Request(turns, listed, [], chain(listed.root, turns), kwargs)
        turns, notes, renamed = self.canon().messages(messages, namespace)
        listed = self._listed(plain_tools(tools), rendering, order, sticky, kwargs, namespace)
        notes = [*listed.notes, *(note for note in notes if note != ABSENT or not self._template.report.absent_is_empty)]
        if renamed and self._template.report.renders_call_ids:
            notes.append("tool-call ids replaced by their position")
        return Request(turns, listed, notes, chain(listed.root, turns), kwargs)

    def canon(self) -> Canon:
        if self._canon is None:  # two threads may both build it: the same value twice
            self._canon = Canon(Neutraliser(self._encoder, self._template.result_words), self._neutraliser())
        return self._canon

    def _neutraliser(self) -> Neutraliser:
        if self._clean is None:
            self._clean = Neutraliser(self._encoder)
        return self._clean

    def _listed(
        self, plain: list[Plain], rendering: Rendering, order: ToolOrder, sticky: Sequence[str], kwargs: Mapping[str, Any], namespace: str
    ) -> ToolList:
        key = _digest(said(plain), rendering, order, *map(str, sticky), _options(kwargs))
        if (known := self._tools.get(namespace, key)) is not None:
            return known
        check_values(plain)
        schemas, notes = plain, list[str]()
        if rendering == "canonical" and plain:
            given, notes = canonical_tools(plain, self._neutraliser())
            schemas = order_tools(given, order, sticky)
            if schemas != given:
                notes.append(f"tools reordered: {order}")
        listed = ToolList(schemas, tuple(notes), self._added_text(schemas, kwargs), _root(schemas, kwargs))
        self._tools.put(namespace, key, listed)
        return listed

    def _added_text(self, schemas: list[Plain], kwargs: Mapping[str, Any]) -> str:
        text = self._template.tools_text(schemas, kwargs) if schemas else ""
        if text is None:
            raise TemplateError(
                f"the chat template does not show the tools {[tool_name(tool) for tool in schemas][:8]!r}: it ignores `tools`; pass "
                "chat_template= with one that renders tools, describe them in the system message, or pass no tools"
            )
        return text


def _root(schemas: list[Plain], kwargs: Mapping[str, Any]) -> bytes:
    """The same for the same tools in the same order, however they were given."""
    return _digest(said(schemas), _options(kwargs))


def _options(kwargs: Mapping[str, Any]) -> str:
    try:
        return json.dumps(sorted(kwargs.items()), ensure_ascii=False, default=repr)
    except (TypeError, ValueError, RecursionError, AttributeError) as error:
        raise ConfigError(f"template_kwargs={shown(kwargs)}: give names with values for the chat template ({error})") from error


def _digest(*texts: str) -> bytes:
    whole = json.dumps(texts, ensure_ascii=False)
    return hashlib.blake2b(whole.encode("utf-8", "surrogatepass"), digest_size=16).digest()
