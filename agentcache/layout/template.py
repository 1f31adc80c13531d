"""A chat template: rendered by transformers' own renderer, and probed for its treatment of text. Knows nothing of tokens.

Nothing about a template is assumed from its family or name: small conversations of made-up words are rendered and compared.
"""

from __future__ import annotations

import hashlib
import re
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from functools import partial
from typing import Any

from ..errors import ConfigError, PromptError, TemplateError, shown
from .plain import Plain
from .rendering import EndlessError, bounded
from .tokenise import common_length

SYSTEM, FIRST, ANSWER, SECOND = "Zsysqa words.", "Zuserqb words?", "Zansqc words.", "Zuserqd words?"
RESULTS = ("Zresqe", "Zresqf")
TOOL: Plain = {
    "type": "function",
    "function": {
        "name": "zprobe_fn",
        "description": "Zdescqg",
        "parameters": {"type": "object", "properties": {"zarg": {"type": "string"}}},
    },
}
_TAG = re.compile(r"</?[A-Za-z_][\w-]*>|\[/?[A-Z_]+\]")
_IDS = ("call00001", "call00002", "zother001", "zother002")
_FAULTS = (TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError, MemoryError)  # of code in a template
MOST_CHARS = 64_000_000  # that one may have: more than a context of ten million tokens
SENTINEL = "Qzsentinel"
# What a user's text may start with: a stable prefix ends before any token that depends on it.
_OPENINGS = ("Qz opening", "\n\nQz", "  Qz", "7 Qz", "!Qz", "é", "字", "/Qz", '"Qz', "qz")


@dataclass(frozen=True, slots=True)
class Shape:
    """The literal text that a template puts around messages: `headers[before, kind]`, `closers[kind]`, the generation prompt."""

    headers: Mapping[tuple[str, str], str] = field(default_factory=dict)
    closers: Mapping[str, str] = field(default_factory=dict)
    generation: str = ""


class Template:
    """Renders messages to text, or raises TemplateError."""

    def __init__(self, tokenizer: Any, chat_template: str | None, repairs: Sequence[str] = (), date: str | None = None) -> None:
        self._tokenizer = tokenizer
        self._named = named = getattr(tokenizer, "chat_template", None)
        self._given = named.get(chat_template, chat_template) if isinstance(named, dict) else chat_template
        if self._given is not None and (not isinstance(self._given, str) or "{" not in self._given):
            raise ConfigError(f"chat_template={shown(chat_template)}: shows no messages; give the text of a Jinja template, not its file")
        self._repairs, self._date = tuple(repairs), date
        self._dated = {"date_string": datetime.fromisoformat(date).strftime("%d %b %Y")} if date else {}  # where a template asks for no day
        self._sources: dict[str, str] = {}
        self._lock = threading.Lock()
        self._shapes: dict[bool, Shape] = {}
        self._parts: dict[bool, bool] = {}

    @property
    def identity(self) -> bytes:
        """Digest of the template's text."""
        source = self._given or getattr(self._tokenizer, "chat_template", None)
        return hashlib.blake2b(repr((source, self._repairs, self._date)).encode(), digest_size=16).digest()

    def render(
        self,
        messages: Sequence[Plain],
        tools: Sequence[Plain],
        generation: bool = True,
        kwargs: Mapping[str, Any] | None = None,
        as_given: bool = False,
    ) -> str:
        """The prompt; texts as parts where the template shows no others, unless they are to stay as given."""
        import jinja2  # transformers needs it for any chat template; imported here so that a raw prompt does not

        source = self.source(bool(tools))
        render = partial(
            self._tokenizer.apply_chat_template,
            list(messages) if as_given or not self.takes_parts(bool(tools)) else list(map(_in_parts, messages)),
            tools=list(tools) or None,
            chat_template=source,
            add_generation_prompt=generation,
            tokenize=False,
            **{**self._dated, **(kwargs or {})},
        )
        try:
            text = str(bounded(render))
        except (jinja2.TemplateError, *_FAULTS) as error:
            if isinstance(error, TemplateError):
                raise
            raise TemplateError(
                f"the chat template refused these messages: {str(error) or type(error).__name__} ({type(error).__name__}); "
                "change the messages to what the template expects or pass another chat_template="
            ) from error
        if len(text) > MOST_CHARS:
            raise TemplateError(
                f"the chat template made {len(text)!r} characters of {len(messages)!r} messages, more than {MOST_CHARS!r}: pass another "
                "chat_template="
            )
        return text

    def takes_parts(self, tools: bool) -> bool:
        """Tell whether it drops a content that is a text, and shows one of parts, as templates of models that also see."""
        if tools not in self._parts:  # two threads may both find out: the same value twice
            text, given = {"role": "user", "content": FIRST}, (TOOL,) if tools else ()
            shown = "text" not in self.source(tools) or FIRST in (self.attempt([text], given, as_given=True) or "")
            self._parts[tools] = not shown and FIRST in (self.attempt([_in_parts(text)], given, as_given=True) or "")
        return self._parts[tools]

    def source(self, tools: bool) -> str:
        """The template's text, repaired; a tokenizer may have one for tools and one without."""
        source = self._original(tools)
        if not self._repairs and self._date is None:
            return source
        if source not in self._sources:
            from .repairs import repaired

            self._sources[source] = repaired(source, self._repairs, self._date)
        return self._sources[source]

    def _original(self, tools: bool) -> str:
        if self._given is not None:
            return self._given
        named = getattr(self._tokenizer, "chat_template", None)
        if self._named not in (None, named):
            raise ConfigError("tokenizer.chat_template is not the one that its engine was made with: make another engine")
        self._named = named
        try:
            source = self._tokenizer.get_chat_template(None, [TOOL] if tools else None)
        except (ValueError, AttributeError) as error:
            raise TemplateError(
                f"the tokenizer {getattr(self._tokenizer, 'name_or_path', '')!r} has no chat template"
                f"{f' called default, but {list(named)!r}' if named else ''}: pass chat_template=..., "
                "or give the whole prompt as a string instead of messages"
            ) from error
        return str(source)

    def shape(self, tools: bool) -> Shape:
        with self._lock:
            if tools not in self._shapes:
                self._shapes[tools] = bounded(partial(self._probe_shape, tools))  # one thread for all: it costs more than a rendering
            return self._shapes[tools]

    @property
    def result_words(self) -> frozenset[str]:
        """The tags that mark text as a tool's result, as <tool_response>: they need not be control tokens."""
        shape = self.shape(True)
        around = [text for (_, kind), text in shape.headers.items() if kind == "tool"] + [shape.closers.get("tool", "")]
        return frozenset(word for text in around for word in _TAG.findall(text))

    def tools_text(self, tools: Sequence[Plain], kwargs: Mapping[str, Any] | None) -> str | None:
        """The text that these tools add to a prompt ("" if it cannot be told apart), or None if the template ignores tools."""
        user = {"role": "user", "content": FIRST}
        names = [str(tool.get("function", tool)["name"]) for tool in tools]
        for messages in ([{"role": "system", "content": SYSTEM}, user], [user]):
            shown = self.attempt(messages, tools, kwargs=kwargs)
            if shown is None:
                continue
            if not all(name in shown for name in names):
                return None
            return _inserted(shown, self.attempt(messages, (), kwargs=kwargs) or "", names[0])
        return ""

    def openings(self, leading: Sequence[Plain], tools: Sequence[Plain], kwargs: Mapping[str, Any]) -> list[str]:
        """Prompts that start with these messages and tools and go on in different ways; none if the template refuses them all."""
        user: Plain = {"role": "user", "content": SENTINEL}
        more: list[Plain] = [{"role": "assistant", "content": "Qzanswer"}, {"role": "user", "content": "qzmore"}]
        tried = ([user], [user, *more], [user, *tool_step(1, 0)])
        found = bounded(lambda: [self.attempt([*leading, *later], tools, kwargs=kwargs) for later in tried])
        shown = [text for text in found if text is not None]
        return shown + [shown[0].replace(SENTINEL, opening, 1) for opening in _OPENINGS if shown and SENTINEL in shown[0]]

    def attempt(self, messages: Sequence[Plain], tools: Sequence[Plain] = (), generation: bool = True, **options: Any) -> str | None:
        """A rendering, other options as of `render`; None if the template refuses these messages."""
        try:
            return self.render(messages, tools, generation, **options)
        except EndlessError:
            raise
        except PromptError:
            return None

    def _probe_shape(self, tools: bool) -> Shape:
        """The longest probe conversation that this template accepts, cut into headers and closers at each message boundary."""
        given: Sequence[Plain] = (TOOL,) if tools else ()
        first = {"role": "user", "content": FIRST}
        start = [{"role": "system", "content": SYSTEM}, first]
        chat = [{"role": "assistant", "content": ANSWER}, {"role": "user", "content": SECOND}]
        calls = [[*tool_step(count, 0), *tool_step(1, 1)] for count in (2, 1)]
        candidates = [(given, [*start, *step, *chat]) for step in calls]
        candidates += [(given, [*start, *chat]), (given, [first, *calls[1], *chat]), (given, [first, *chat])]
        candidates += [((), [first, *step, *chat]) for step in calls]  # where tools stand before the last user message, they hide the rest
        headers: dict[tuple[str, str], str] = {}
        closers: dict[str, str] = {}
        seen: list[tuple[list[Plain], str, list[str | None]]] = []
        generation, shown = "", dict[tuple[int | bool, ...], str | None]()

        def attempt(messages: Sequence[Plain], listed: Sequence[Plain], generation: bool) -> str | None:
            key = (*map(id, messages), bool(listed), generation)  # candidates share messages
            if key not in shown:
                shown[key] = self.attempt(messages, listed, generation)
            return shown[key]

        for listed, conversation in candidates:
            joint = attempt(conversation, listed, True)
            if joint is None:
                continue
            bare = attempt(conversation, listed, False)
            if bare is not None and joint.startswith(bare):
                generation = generation or joint[len(bare) :]
            parts = [attempt(conversation[: count + 1], listed, False) for count in range(len(conversation))]
            seen.append((conversation, joint, parts))
            _learn(conversation, joint, parts, headers, closers)
        start_of_any = _shared_start(headers)
        for conversation, joint, parts in seen if start_of_any else ():
            _learn(conversation, joint, parts, headers, closers, start_of_any)
        opener = headers.get(("user", "assistant"), generation)
        for before, kind in list(headers):  # an assistant turn starts alike, whether it calls a tool or not
            text = headers[before, kind]
            if kind == "call":  # ends somewhere in the markup of the call: keep what all assistant turns share
                headers[before, kind] = text = text[: common_length(text, opener)]
            if kind in ("call", "assistant"):
                headers.setdefault((before, "assistant" if kind == "call" else "call"), text)
        return Shape(headers, closers, generation)


def _in_parts(message: Plain) -> Plain:
    text = message.get("content")
    return {**message, "content": [{"type": "text", "text": text}]} if isinstance(text, str) else message


def tool_step(calls: int, number: int, foreign: bool = False) -> list[Plain]:
    """An assistant message with `calls` calls, and their results."""
    ids = _IDS[2:] if foreign else _IDS[:2]
    wanted = [
        {"id": ids[(number + n) % 2], "type": "function", "function": {"name": "zprobe_fn", "arguments": {"zarg": f"zval{n}"}}}
        for n in range(calls)
    ]
    results = [{"role": "tool", "tool_call_id": call["id"], "name": "zprobe_fn", "content": RESULTS[n]} for n, call in enumerate(wanted)]
    return [{"role": "assistant", "content": "", "tool_calls": wanted}, *results]


def _inserted(shown: str, plain: str, name: str) -> str:
    """The piece of `shown` that holds `name` and that `plain`, rendered without tools, does not have."""
    head = common_length(shown, plain)
    tail = common_length(shown[head:][::-1], plain[head:][::-1])
    piece = shown[head : len(shown) - tail]
    for word in (SYSTEM, FIRST):
        if word not in piece:
            continue
        before, _, after = piece.partition(word)
        if name in before:
            piece = before
        else:
            _, _, rest = plain.partition(word)
            piece = after[common_length(after, rest) :]
    return piece if name in piece else ""


def _shared_start(headers: Mapping[tuple[str, str], str]) -> str:
    """The common start of user and assistant turns, as "<|im_start|>"; "" if not known."""
    users = [text for (_, kind), text in headers.items() if kind == "user"]
    others = [text for (before, kind), text in headers.items() if before == "user" and kind in ("assistant", "call")]
    start = users[0][: common_length(users[0], others[0])] if users and others else ""
    return start if len(start.strip()) > 1 else ""


def _learn(
    conversation: Sequence[Plain],
    joint: str,
    parts: Sequence[str | None],
    headers: dict[tuple[str, str], str],
    closers: dict[str, str],
    opener: str = "",
) -> None:
    """Adds the text between neighbouring messages, split where the rendering of the first ones alone ends.

    Some templates render a last message differently; there the split is at `opener`, with which all turns start, if it is known.
    """
    before, end, cursor = "start", 0, 0
    for index, message in enumerate(conversation):
        kind = "call" if message.get("tool_calls") else str(message["role"])
        word = "zprobe_fn" if kind == "call" else str(message["content"])
        at = joint.find(word, cursor)
        if at < 0:
            return
        if kind == "system" and 0 <= joint.find(FIRST) < at:
            continue  # glued to a later message
        part = parts[index - 1] if index else None
        boundary = -1 if part is None else common_length(joint, part)
        if opener and not end <= boundary <= at:
            boundary = joint.find(opener, end, at)
        if end <= boundary <= at and joint[boundary:at].strip():
            headers.setdefault((before, kind), joint[boundary:at])
            if before != "call":
                closers.setdefault(before, joint[end:boundary])
        last = joint.rfind("zval", cursor, joint.find("Zresqe", cursor)) if kind == "call" else -1
        end = cursor = last + len("zval0") if last >= 0 else at + len(word)
        before = kind
