"""One request in the form that is rendered: messages and tools checked, canonical or as given. Knows nothing of text and tokens."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from ..errors import ConfigError, TemplateError, shown
from ..namespace_lru import Covering, NamespaceLRU
from ..types import Layout, Message, Rendering, Tool, ToolOrder, check_name
from .canonical import ABSENT, Canon, Turn, digest_of, mapped
from .memory import chain
from .plain import Plain, plain_messages
from .schemas import canonical_tools, check_values, order_tools, plain_tools, said, tool_name
from .template import Template
from .tokenise import EMPTY, Encoded, Encoder, Neutraliser

if TYPE_CHECKING:
    from .template_report import TemplateReport

TAKEN = {"tokenize", "add_generation_prompt", "continue_final_message", "tools", "chat_template", "conversation", "messages"}
TOOL_LISTS = 128  # remembered tool lists; each costs two small renderings and a walk over its schemas to find again


@dataclass(frozen=True, slots=True)
class Options:
    """The way in which a request is rendered. Raises ConfigError for a value that there is not."""

    rendering: Rendering = "canonical"
    tools_order: ToolOrder = "given"
    sticky: Sequence[str] = ()  # the recorded order of tools, for tools_order="sticky"
    namespace: str = "default"
    template_kwargs: Mapping[str, Any] | None = None
    most_tokens: int = 0  # a prompt that takes several times as many is refused before all of it is tokenised; 0: none is

    def __post_init__(self) -> None:
        check_name("namespace", self.namespace)
        if self.rendering not in ("canonical", "stock"):
            raise ConfigError(f"rendering={self.rendering!r}: must be 'canonical' or 'stock'")
        if self.tools_order not in ("given", "sorted", "sticky"):
            raise ConfigError(f"tools_order={self.tools_order!r}: must be 'given', 'sorted' or 'sticky'")

    @property
    def kwargs(self) -> Mapping[str, Any]:
        return self.template_kwargs or {}


@dataclass(frozen=True, slots=True)
class ToolList:
    """Tools ready to render. `text`: their part of a prompt. `root` names them, however they were given; `arguments` the template's."""

    schemas: list[Plain]
    notes: tuple[str, ...]
    text: str
    root: bytes
    arguments: bytes


@dataclass(frozen=True, slots=True)
class Request:
    """Messages and tools to render."""

    turns: list[Turn]
    tools: ToolList
    notes: list[str]  # differences from stock, in words
    keys: list[bytes]  # keys[i] names the history of the first i turns
    options: Options

    def until(self, number: int) -> Request:
        """The request as it was before turn `number`."""
        return replace(self, turns=self.turns[:number], keys=self.keys[: number + 1])


@dataclass(frozen=True, slots=True)
class Rendered(Layout):
    """A Layout that knows the history it came from, so that `remember` can name it: without the text of this prompt only."""

    encoded: Encoded = field(default=EMPTY, repr=False, compare=False)
    chain: bytes = field(default=b"", repr=False, compare=False)
    request: Request | None = field(default=None, repr=False, compare=False)


class Requests:
    """Builds requests for one template and one tokenizer; what agents send again at each step is worked out once.

    By namespace: the time of a prompt tells nothing about the prompts of others.
    """

    def __init__(self, template: Template, encoder: Encoder) -> None:
        self._template = template
        self._encoder = encoder
        self._canon: Canon | None = None
        self._tools: NamespaceLRU[bytes, ToolList] = NamespaceLRU(TOOL_LISTS)

    @cached_property
    def report(self) -> TemplateReport:
        """The report of the chat template: loaded for the first request to whose notes it matters."""
        from .rendering import bounded
        from .template_report import report_of

        return bounded(lambda: report_of(self._template))

    def forget(self, deletion: Covering) -> None:
        """Forget the messages and tools of namespaces of which something was deleted on purpose."""
        self._tools.forget(deletion)
        if self._canon is not None:
            self._canon.forget(deletion)

    def build(
        self, messages: Sequence[Message | Mapping[str, Any]], tools: Sequence[Tool | Mapping[str, Any]], options: Options
    ) -> Request:
        if options.rendering == "stock":
            plain = plain_messages(messages)
            listed = self._listed(plain_tools(tools), options)
            turns = [Turn(index, message, digest_of(mapped(message, str))) for index, message in enumerate(plain)]
            return Request(turns, listed, [], chain(listed.root, turns), options)
        turns, notes, renamed = self.canon().messages(messages, options.namespace)
        listed = self._listed(plain_tools(tools), options)
        notes = [*listed.notes, *(note for note in notes if note != ABSENT or not self.report.absent_is_empty)]
        if renamed and self.report.renders_call_ids:
            notes.append("tool-call ids replaced by their position")
        if self._template.takes_parts(bool(tools)):
            notes.append("each text shown as a part: the template drops others")
        return Request(turns, listed, notes, chain(listed.root, turns), options)

    def canon(self) -> Canon:
        if self._canon is None:  # two threads may both build it: the same value twice
            self._canon = Canon(Neutraliser(self._encoder, self._template.result_words), self._clean)
        return self._canon

    @cached_property
    def _clean(self) -> Neutraliser:
        return Neutraliser(self._encoder)

    def _listed(self, plain: list[Plain], options: Options) -> ToolList:
        order, kwargs = options.tools_order, options.kwargs
        key = _digest(said(plain), options.rendering, order, *map(str, options.sticky), _written(kwargs))
        if (known := self._tools.get(options.namespace, key)) is not None:
            return known if options.rendering == "canonical" else replace(known, schemas=plain)  # as given, were it changed since
        check_values(plain)
        schemas, notes = plain, list[str]()
        if options.rendering == "canonical" and plain:
            given, notes = canonical_tools(plain, self._clean)
            schemas = order_tools(given, order, options.sticky)
            if schemas != given:
                notes.append(f"tools reordered: {order}")
        listed = ToolList(schemas, tuple(notes), self._added_text(schemas, kwargs), _digest(said(schemas)), _digest(_written(kwargs)))
        self._tools.put(options.namespace, key, listed)
        return listed

    def _added_text(self, schemas: list[Plain], kwargs: Mapping[str, Any]) -> str:
        text = self._template.tools_text(schemas, kwargs) if schemas else ""
        if text is None:
            raise TemplateError(
                f"the chat template does not show the tools {[tool_name(tool) for tool in schemas][:8]!r}: it ignores `tools`; pass "
                "chat_template= with one that renders tools, describe them in the system message, or pass no tools"
            )
        return text


def _written(kwargs: Mapping[str, Any]) -> str:
    try:
        if taken := sorted(TAKEN & kwargs.keys()):
            raise ConfigError(f"template_kwargs={shown(kwargs)}: the request itself decides {taken[0]!r}; leave it out")
        return json.dumps(sorted(kwargs.items()), ensure_ascii=False, default=repr)
    except (TypeError, ValueError, RecursionError, AttributeError) as error:
        raise ConfigError(f"template_kwargs={shown(kwargs)}: give names with values for the chat template ({error})") from error


def _digest(*texts: str) -> bytes:
    whole = json.dumps(texts, ensure_ascii=False)
    return hashlib.blake2b(whole.encode("utf-8", "surrogatepass"), digest_size=16).digest()
