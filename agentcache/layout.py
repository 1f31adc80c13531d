"""Messages and tools to token ids and named spans: rendered once, tokenised only where new. Knows nothing of models or stores.

messages, tools
   | canonical, schemas   checked; one form for equal requests
   | template.render      transformers' own renderer, once
   | memory, tokenise     known text keeps its ids; own generated ids stay as the model wrote them
   | spans                where system, tools, turns and the generation prompt stand
Layout
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from .canonical import Plain, Turn, canonical_messages, plain_messages
from .errors import ConfigError, MessageError, TemplateError
from .memory import Generated, Memory, chain, link
from .schemas import canonical_tools, order_tools, plain_tools, tool_name
from .spans import Mark, marks, spans
from .splice import spliced
from .template import Template, TemplateReport
from .tokenise import EMPTY, Encoded, Encoder, Neutraliser, common_chars
from .types import Layout, Message, Rendering, Span, Tool, ToolOrder

__all__ = ["Renderer", "TemplateReport"]

TOOL_LISTS = 128  # remembered tool lists and prefixes; each costs some small renderings to find again

# What a user's text may start with: the prefix ends before any token that depends on it.
_OPENINGS = ("Qz opening", "\n\nQz", "  Qz", "7 Qz", "!Qz", "é", "字", "/Qz", '"Qz', "qz")
_SENTINEL = "Qzsentinel"
_LATER = (
    [{"role": "assistant", "content": "Qzanswer"}, {"role": "user", "content": "qzmore"}],
    [
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"id": "call00001", "type": "function", "function": {"name": "qzname", "arguments": {}}}],
        },
        {"role": "tool", "tool_call_id": "call00001", "name": "qzname", "content": "qzresult"},
    ],
)


@dataclass(frozen=True, slots=True)
class Rendered(Layout):
    """A Layout that knows the history it came from, so that `remember` can name it."""

    encoded: Encoded = field(default=EMPTY, repr=False, compare=False)
    chain: bytes = field(default=b"", repr=False, compare=False)


@dataclass(frozen=True, slots=True)
class _Tools:
    """A tool list ready to render. `root` names it, `text` is what it adds to a prompt."""

    schemas: list[Plain]
    notes: tuple[str, ...]
    text: str
    root: bytes


@dataclass(frozen=True, slots=True)
class _Request:
    """One request in the form that is rendered."""

    turns: list[Turn]
    tools: _Tools
    notes: list[str]
    keys: list[bytes]
    kwargs: Mapping[str, Any]
    generation: bool


class Renderer:
    """Renders requests for one tokenizer. Safe to use from many threads.

    special_tokens: whether a raw string prompt gets the tokenizer's own leading special tokens (BOS) where it would add them.
    """

    def __init__(self, tokenizer: Any, *, chat_template: str | None = None, special_tokens: bool = True) -> None:
        self._encoder = Encoder(tokenizer)
        self._tokenizer = tokenizer
        self._template = Template(tokenizer, chat_template)
        self._special_tokens = special_tokens
        self._memory = Memory()
        self._lock = threading.Lock()
        self._clean: Neutraliser | None = None
        self._leading_ids: list[int] | None = None
        self._tool_texts: OrderedDict[bytes, str] = OrderedDict()
        self._prefixes: OrderedDict[bytes, list[int]] = OrderedDict()

    @property
    def report(self) -> TemplateReport:
        """What the chat template does with text; found by rendering small conversations, once."""
        return self._template.report

    # --- the path of one request -----------------------------------------------------------------------------------------

    def render(
        self,
        messages: Sequence[Message | Mapping[str, Any]] | str,
        tools: Sequence[Tool | Mapping[str, Any]] = (),
        *,
        rendering: Rendering = "canonical",
        tools_order: ToolOrder = "given",
        sticky: Sequence[str] = (),
        namespace: str = "default",
        template_kwargs: Mapping[str, Any] | None = None,
        generation: bool = True,
    ) -> Layout:
        """The prompt of `messages` (or of a raw string) as ids and spans. The returned ids must not be modified."""
        _check_options(rendering, tools_order)
        if isinstance(messages, str):
            return self._render_text(messages, tools, namespace)
        kwargs = template_kwargs or {}
        if rendering == "stock":
            request = self._stock(messages, tools, kwargs, generation)
        else:
            request = self._canonical(messages, tools, tools_order, sticky, kwargs, generation)
        text = self._template.render([turn.data for turn in request.turns], request.tools.schemas, generation, kwargs)
        found = marks(text, request.turns, self._template.shape(bool(request.tools.schemas)), request.tools.text, generation)
        if rendering == "stock":
            encoded, spent = self._encode(namespace, text)
        else:
            encoded, spent = self._encode_own(namespace, text, request, found)
        prefix, extra = self._prefix_tokens(encoded.ids, request, namespace)
        return Rendered(
            ids=encoded.ids,
            spans=spans(encoded, found),
            text=text,
            prefix_tokens=prefix,
            differences=() if rendering == "stock" else (*request.tools.notes, *request.notes, *_splice_notes(encoded)),
            spliced_tokens=sum(splice.last - splice.first for splice in encoded.splices),
            tokenised_chars=spent + extra,
            encoded=encoded,
            chain=b"" if rendering == "stock" else request.keys[-1],
        )

    def remember(self, layout: Layout, generated_ids: Sequence[int], message: Message, *, namespace: str = "default") -> None:
        """Notes that the model answered `layout` with these ids, which the caller got as `message`.

        When the same history comes back with that message unchanged, the ids are used again instead of rendering it anew.
        """
        if not isinstance(layout, Rendered) or not layout.chain or not generated_ids or not self._encoder.fast:
            return  # stock renderings and raw prompts are never spliced
        plain = plain_messages([Message("user", ""), replace(message, tool_call_id=None)])[1:]
        turns, _, _ = canonical_messages(plain, self._neutraliser())
        self._memory.learn(namespace, link(layout.chain, turns[0].data), Generated(layout.encoded, tuple(map(int, generated_ids))))

    def prefix(
        self,
        messages: Sequence[Message | Mapping[str, Any]],
        tools: Sequence[Tool | Mapping[str, Any]] = (),
        *,
        rendering: Rendering = "canonical",
        tools_order: ToolOrder = "given",
        sticky: Sequence[str] = (),
        namespace: str = "default",
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> Layout:
        """The longest token prefix of system and tools that does not depend on any later message."""
        _check_options(rendering, tools_order)
        kwargs = template_kwargs or {}
        given = list(messages) if messages else []
        leading = [m for m in given if (m.role if isinstance(m, Message) else m.get("role")) == "system"]
        # A user message stands behind the system text, as in every request to come; it is cut off again.
        opened = [*leading, Message("user", _SENTINEL)]
        if rendering == "stock":
            request = self._stock(opened, tools, kwargs, True)
        else:
            request = self._canonical(opened, tools, tools_order, sticky, kwargs, True)
        before, found_at = self._prefix_of(request, namespace)
        text = self._template.render([turn.data for turn in request.turns], request.tools.schemas, True, kwargs)
        encoded, spent = self._encode(namespace, text)
        found = marks(text, request.turns, self._template.shape(bool(request.tools.schemas)), request.tools.text, True)
        size = len(before)
        covered = tuple(replace(span, stop=min(span.stop, size)) for span in spans(encoded, found) if span.start < size)
        shown = text[: encoded.ends[size - 1]] if encoded.ends and size else ""
        notes = () if rendering == "stock" else (*request.tools.notes, *request.notes)
        return Layout(before, covered, shown, size, notes, 0, spent + found_at)

    def _stock(
        self,
        messages: Sequence[Message | Mapping[str, Any]],
        tools: Sequence[Tool | Mapping[str, Any]],
        kwargs: Mapping[str, Any],
        generation: bool,
    ) -> _Request:
        turns = [Turn(index, message) for index, message in enumerate(plain_messages(messages))]
        listed = self._listed(plain_tools(tools), [], kwargs)
        return _Request(turns, listed, [], chain(listed.root, turns[:1]), kwargs, generation)

    def _canonical(
        self,
        messages: Sequence[Message | Mapping[str, Any]],
        tools: Sequence[Tool | Mapping[str, Any]],
        order: ToolOrder,
        sticky: Sequence[str],
        kwargs: Mapping[str, Any],
        generation: bool,
    ) -> _Request:
        clean = self._neutraliser()
        turns, notes, renamed = canonical_messages(plain_messages(messages), clean)
        given, changed = canonical_tools(plain_tools(tools), clean) if tools else ([], [])
        ordered = order_tools(given, order, sticky)
        if ordered != given:
            changed.append(f"tools reordered: {order}")
        listed = self._listed(ordered, changed, kwargs)
        if renamed and self.report.renders_call_ids:
            notes.append("tool-call ids replaced by their position")
        return _Request(turns, listed, notes, chain(listed.root, turns), kwargs, generation)

    def _listed(self, schemas: list[Plain], notes: list[str], kwargs: Mapping[str, Any]) -> _Tools:
        """The tool list with what it adds to a prompt; found once per list, by rendering it alone."""
        said = json.dumps([schemas, sorted(kwargs.items())], ensure_ascii=False, default=repr)
        root = hashlib.blake2b(said.encode("utf-8", "surrogatepass"), digest_size=16).digest()
        text = _recall(self._lock, self._tool_texts, root)
        if text is None:
            text = self._template.tools_text(schemas, kwargs) if schemas else ""
            if text is None:
                raise TemplateError(
                    f"the chat template does not show the tools {[tool_name(tool) for tool in schemas][:8]!r}: it ignores `tools`; pass "
                    "chat_template= with one that renders tools, describe them in the system message, or pass no tools"
                )
            _store(self._lock, self._tool_texts, root, text)
        return _Tools(schemas, tuple(notes), text, root)

    def _neutraliser(self) -> Neutraliser:
        if self._clean is None:  # two threads may both build it: the same value twice
            self._clean = Neutraliser(self._encoder)
        return self._clean

    # --- text to ids -----------------------------------------------------------------------------------------------------

    def _encode(self, namespace: str, text: str) -> tuple[Encoded, int]:
        """Exactly the ids of tokenising all of `text`, and how many characters were tokenised for it."""
        known, shared = self._memory.nearest(namespace, text, ())
        encoded, spent = self._encoder.resume(known, shared, text)
        self._keep(namespace, encoded)
        return encoded, spent

    def _encode_own(self, namespace: str, text: str, request: _Request, found: Sequence[Mark]) -> tuple[Encoded, int]:
        """Like `_encode`, with the model's own ids in place of its remembered messages."""
        known, shared = self._memory.nearest(namespace, text, set(request.keys))
        have = {splice.key for splice in known.splices if splice.stop <= shared}
        for number in reversed(range(len(request.turns))):
            key = request.keys[number + 1]
            if key in have:
                break
            generated = self._memory.generated(namespace, key)
            if generated is None or not text.startswith(generated.prompt.text):
                continue
            turn = request.turns[number]
            later = {other.source for other in request.turns[number + 1 :]}
            start = len(generated.prompt.text)
            stops = (mark.char for mark in found if mark.char > start and (mark.message in later or mark.kind in ("generation", "tools")))
            closer = self._template.shape(bool(request.tools.schemas)).closers.get(turn.kind, "")
            base, compared = spliced(
                self._encoder, generated, text, key=key, source=turn.source, turn_stop=min(stops, default=len(text)), closer=closer
            )
            encoded, spent = self._encoder.append(base, text)
            self._keep(namespace, encoded)
            return encoded, spent + compared
        encoded, spent = self._encoder.resume(known, shared, text)
        self._keep(namespace, encoded)
        return encoded, spent

    def _keep(self, namespace: str, encoded: Encoded) -> None:
        if encoded.ends:
            self._memory.keep(namespace, encoded)

    def _render_text(self, text: str, tools: Sequence[Any], namespace: str) -> Layout:
        if tools:
            raise MessageError("a string prompt cannot show tools: write them into the prompt or pass a list of messages")
        if not text:
            raise MessageError("the prompt '' is empty: give at least one character")
        encoded, spent = self._encode(namespace, text)
        ids = [*self._leading(text), *encoded.ids]
        return Layout(ids, (Span("text", 0, len(ids)),), text, tokenised_chars=spent)

    def _leading(self, text: str) -> list[int]:
        """The ids that the tokenizer's own call puts before a text, unless the text already spells them."""
        if not self._special_tokens:
            return []
        if self._leading_ids is None:
            full, bare = list(self._tokenizer("a")["input_ids"]), self._encoder.encode("a")[0]
            self._leading_ids = next((full[:n] for n in range(len(full)) if full[n : n + len(bare)] == bare), [])
        spelled = "".join(self._encoder.control.get(token_id, "") for token_id in self._leading_ids)
        return [] if spelled and text.startswith(spelled) else self._leading_ids

    # --- the stable prefix -----------------------------------------------------------------------------------------------

    def _prefix_tokens(self, ids: list[int], request: _Request, namespace: str) -> tuple[int, int]:
        """(how many of these ids are the stable prefix, characters tokenised to find out)."""
        before, spent = self._prefix_of(request, namespace)
        if ids[: len(before)] == before:
            return len(before), spent
        return _common_ids(ids, before), spent

    def _prefix_of(self, request: _Request, namespace: str) -> tuple[list[int], int]:
        leading = request.turns[:1] if request.turns[0].data["role"] == "system" else []
        key = chain(request.tools.root + namespace.encode(), leading)[-1] + bytes([request.generation])
        found = _recall(self._lock, self._prefixes, key)
        if found is not None:
            return found, 0
        found, spent = self._find_prefix([turn.data for turn in leading], request, namespace)
        _store(self._lock, self._prefixes, key, found)
        return found, spent

    def _find_prefix(self, leading: list[Plain], request: _Request, namespace: str) -> tuple[list[int], int]:
        """The common ids of prompts that start with these messages and these tools and go on in different ways."""
        opened: list[Plain] = [*leading, {"role": "user", "content": _SENTINEL}]
        texts = []
        for later in ([], *_LATER):
            try:
                texts.append(self._template.render([*opened, *later], request.tools.schemas, True, request.kwargs))
            except TemplateError:
                continue  # not every template takes every conversation; one rendering at least is needed
        if not texts:
            return [], 0
        texts += [texts[0].replace(_SENTINEL, opening, 1) for opening in _OPENINGS]
        known, spent = self._encode(namespace, texts[0])
        ids = known.ids
        for text in texts[1:]:
            other, more = self._encoder.resume(known, common_chars(known.text, text), text)
            ids, spent = ids[: _common_ids(ids, other.ids)], spent + more
        return ids, spent


def _common_ids(one: Sequence[int], other: Sequence[int]) -> int:
    return next((n for n, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def _recall(lock: threading.Lock, table: OrderedDict[bytes, Any], key: bytes) -> Any:
    with lock:
        if key in table:
            table.move_to_end(key)
        return table.get(key)


def _store(lock: threading.Lock, table: OrderedDict[bytes, Any], key: bytes, value: Any) -> None:
    with lock:
        table[key] = value
        while len(table) > TOOL_LISTS:
            table.popitem(last=False)


def _check_options(rendering: str, order: str) -> None:
    if rendering not in ("canonical", "stock"):
        raise ConfigError(f"rendering={rendering!r}: must be 'canonical' or 'stock'")
    if order not in ("given", "sorted", "sticky"):
        raise ConfigError(f"tools_order={order!r}: must be 'given', 'sorted' or 'sticky'")


def _splice_notes(encoded: Encoded) -> list[str]:
    sources = [str(splice.source) for splice in encoded.splices if splice.differs]
    return [f"messages {', '.join(sources)}: the model's own ids kept in place of the re-rendered text"] if sources else []
