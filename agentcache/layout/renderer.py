"""Messages and tools to token ids and named spans: rendered once, tokenised only where new. Knows nothing of models or stores.

messages, tools
   | declared, tail       declared volatile text, after the stable text
   | canonical, schemas   checked; one form for equal requests
   | template.render      transformers' own renderer, once
   | memory, tokenise     known text keeps its ids; own generated ids stay as the model wrote them
   | spans                where system, tools, turns and the generation prompt stand
Layout
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from itertools import takewhile
from typing import TYPE_CHECKING, Any

from ..errors import ContextOverflowError, MessageError, TemplateError, shown
from ..namespace_lru import Covering, NamespaceLRU
from ..types import Layout, LayoutOptions, Message, Span, Tool
from .memory import Generated, Kept, Memory, chain, link
from .plain import VOLATILE, check_list, field, is_system
from .request import Options, Rendered, Request, Requests
from .spans import Frame
from .template import SENTINEL, Template
from .tokenise import Encoded, Encoder, common_length

if TYPE_CHECKING:
    from .declared import Rule
    from .template_report import TemplateReport

Volatile = str | Message | Mapping[str, Any] | Sequence[str | Message | Mapping[str, Any]]
TEXTS = 4096  # remembered texts that stand in many prompts
SPARSE = 16  # characters in a token, which few texts have
PREFIXES = 128  # remembered stable prefixes; each costs some small renderings to find again


class Renderer:
    """Renders requests for one tokenizer. Safe to use from many threads.

    kept: where the model's own ids of messages outlive this process. tail: what becomes of volatile text.
    """

    def __init__(
        self, tokenizer: Any, *, chat_template: str | None = None, kept: Kept | None = None, tail: LayoutOptions | None = None
    ) -> None:
        self._encoder = Encoder(tokenizer)
        self._tokenizer = tokenizer
        self._tail = tail or LayoutOptions()
        if self._tail.ahead is None:  # the model was trained with its tokenizer, and which place it reads is a matter of training
            self._tail = replace(self._tail, ahead=getattr(tokenizer, "init_kwargs", {}).get("volatile_ahead") or False)
        self._template = Template(tokenizer, chat_template, self._tail.repairs, self._tail.date)
        self._requests = Requests(self._template, self._encoder)
        self._memory = Memory()
        self._kept = kept
        self._rules: Sequence[Rule] = ()
        if self._tail.rules is not None:  # a fault of theirs is told here
            from .declared import read_rules

            self._rules = read_rules(self._tail.rules)
        self._leading_ids: list[int] | None = None
        self._prefixes: NamespaceLRU[bytes, list[int]] = NamespaceLRU(PREFIXES)
        self._texts: NamespaceLRU[str, list[int]] = NamespaceLRU(TEXTS, 1 << 20, len)

    @property
    def report(self) -> TemplateReport:
        """The report of the chat template; found by rendering small conversations, once."""
        return self._requests.report

    # --- the path of one request -----------------------------------------------------------------------------------------

    def render(
        self,
        messages: Sequence[Message | Mapping[str, Any]] | str,
        tools: Sequence[Tool | Mapping[str, Any]] = (),
        *,
        generation: bool = True,
        volatile: Volatile = (),
        **given: Any,
    ) -> Layout:
        """The prompt of `messages`, a raw string or token ids as ids and spans, which must not be modified. given: as of `Options`."""
        options = Options(**given)
        texts: tuple[Message, ...] = ()
        if volatile != ():
            from .declared import brought

            texts = brought(volatile)
        raw = isinstance(messages, str) or (isinstance(messages, list) and {*map(type, messages)} == {int})
        if texts and (options.rendering == "stock" or raw):
            raise MessageError(
                f"volatile={shown(volatile)}: a string prompt and rendering='stock' are shown as given; write it there yourself"
            )
        if raw or isinstance(messages, str):
            return self._render_text(messages, tools, options)

        def render(listed: Sequence[Message | Mapping[str, Any]]) -> Rendered:
            return self._layout(self._requests.build(listed, tools, options), generation)

        if options.rendering == "stock":
            return render(messages)
        check_list(messages)
        if not texts and not self._may_declare(messages):
            return render(messages)
        from .declared import split

        declared = split(messages, texts, self._rules)
        if not declared.pieces:
            return render(declared.whole)
        from .tail import placed

        return placed(declared, self._tail, render)

    def _may_declare(self, messages: Sequence[Message | Mapping[str, Any]]) -> bool:
        """Tell whether volatile text may stand in the leading system messages."""
        said = (field(message, "content") for message in takewhile(is_system, messages))
        return bool(self._rules) or any(not isinstance(text, str) or VOLATILE in text for text in said)

    def _layout(self, request: Request, generation: bool) -> Rendered:
        text, frame = self._shown(request, generation)
        if not text:
            raise TemplateError(f"the chat template made '' of {len(request.turns)!r} messages: pass another chat_template=")
        self._check_length(text, request.options.most_tokens)
        stock, namespace = request.options.rendering == "stock", request.options.namespace
        encoded, spent = self._encode(namespace, text, frame) if stock else self._encode_own(text, request, frame)
        encoded = replace(encoded, places=frame.places)
        self._memory.keep(namespace, encoded)
        prefix, extra = self._prefix_tokens(encoded.ids, request)
        notes: list[str] = []
        if encoded.splices:
            from .splice import splice_notes

            notes = splice_notes(encoded)
        return Rendered(
            ids=encoded.ids,
            spans=frame.spans(encoded),
            text=text,
            prefix_tokens=prefix,
            differences=(*request.notes, *notes),
            spliced_tokens=sum(splice.last - splice.first for splice in encoded.splices),
            tokenised_chars=spent + extra,
            encoded=encoded,
            chain=b"" if stock else request.keys[-1],
            request=request,
        )

    def _shown(self, request: Request, generation: bool) -> tuple[str, Frame]:
        tools = request.tools.schemas
        messages, stock = [turn.data for turn in request.turns], request.options.rendering == "stock"
        text = self._template.render(messages, tools, generation, request.options.kwargs, as_given=stock)
        return text, Frame(request.turns, request.keys[1:], self._template.shape(bool(tools)), request.tools.text, generation)

    def remember(
        self, layout: Layout, generated_ids: Sequence[int], message: Message, *, namespace: str = "default", outlive: bool = True
    ) -> bytes:
        """Notes that the model answered `layout` with these ids, which the caller got as `message`.

        When the same history comes back with that message unchanged, the ids are used again instead of rendering it anew.
        outlive: in later processes, too; returns the name under which they find the ids, empty if they do not.
        """
        if not isinstance(layout, Rendered) or not layout.chain or not generated_ids or not self._encoder.fast:
            return b""  # stock renderings and raw prompts are never spliced
        if message.role != "assistant":
            raise MessageError(f"remember(message={shown(message)}): only an assistant message is generated")
        key = link(layout.chain, self._requests.canon().turn(0, message, namespace))
        generated = Generated(layout.encoded, tuple(map(int, generated_ids)), time.time())
        self._memory.generated.put(namespace, key, generated)
        name = self._name(key, layout.request) if self._kept is not None and layout.request and outlive else b""
        if self._kept is not None and name:
            self._kept.learn(namespace, name, generated.ids)
        return name

    def forget(self, deletion: Covering) -> None:
        """Forget texts and the model's own ids of messages that were deleted on purpose."""
        for part in (self._memory, self._requests, self._prefixes, self._texts):
            part.forget(deletion)

    def _name(self, key: bytes, request: Request) -> bytes:
        """The key of a message beyond this process: other tokenizers and templates have other ids, other arguments other prompts."""
        return hashlib.blake2b(self._encoder.identity + self._template.identity + request.tools.arguments + key, digest_size=16).digest()

    def _recall(self, request: Request, have: Collection[bytes]) -> None:
        """Learn an earlier process's ids of the turns after those that this one knows, in order."""
        unknown, namespace = [], request.options.namespace
        for number in reversed(range(1, len(request.turns))):
            key = request.keys[number + 1]
            if self._kept is None or key in have or self._memory.generated.get(namespace, key) is not None:
                break
            if request.turns[number].data["role"] == "assistant" and not self._memory.absent.get(namespace, self._name(key, request)):
                unknown.append(number)
        for number in reversed(unknown):
            self._recall_turn(request, number)

    def _recall_turn(self, request: Request, number: int) -> None:
        """Learn the ids of turn `number`, after the prompt as it is rendered now; all turns before it were asked for."""
        assert self._kept is not None
        key, namespace = request.keys[number + 1], request.options.namespace
        ids = self._kept.generated(namespace, name := self._name(key, request))
        if not ids or max(ids) >= self._encoder.vocabulary:
            self._memory.absent.put(namespace, name, True)
            return
        before = request.until(number)
        text, frame = self._shown(before, True)
        prompt, _ = self._encode_own(text, before, frame)
        assert prompt.text == text
        self._memory.generated.put(namespace, key, Generated(prompt, ids))

    def prefix(
        self, messages: Sequence[Message | Mapping[str, Any]], tools: Sequence[Tool | Mapping[str, Any]] = (), **given: Any
    ) -> Layout:
        """The longest token prefix of system and tools that does not depend on any later message; options as of `Options`."""
        from .declared import split
        from .opening import cut

        options = Options(**given)
        leading = list(filter(is_system, messages or ()))
        if options.rendering != "stock":
            declared = split(leading, rules=self._rules)
            leading = declared.stable if self._tail.mode == "enforce" else declared.whole
        # A user message stands after the system text, as in every request to come; it is cut off again.
        whole = self._layout(self._requests.build([*leading, Message("user", SENTINEL)], tools, options), True)
        return cut(whole, whole.prefix_tokens)

    def opening(
        self, messages: Sequence[Message | Mapping[str, Any]], tools: Sequence[Tool | Mapping[str, Any]] = (), **options: Any
    ) -> Layout:
        """The longest token prefix of these messages that what follows them leaves as it is; options as of `prefix`."""
        if isinstance(messages, str):
            raise MessageError(f"messages={shown(messages)}: the start of a conversation is a list of messages")
        if messages:
            check_list(messages)
        if all(map(is_system, messages)):
            return self.prefix(messages, tools, **options)
        from .opening import opening

        return opening(messages, lambda listed, asked: self.render(listed, tools, generation=asked, **options))

    def ids(self, text: str, namespace: str, found: Callable[[], list[int]] | None = None) -> list[int]:
        """The ids of a text alone, as a message shows it, or those `found` under its name. Remembered: passages come in many prompts."""
        if (known := self._texts.get(namespace, text)) is None:
            shown = "" if found else self._requests.canon().turn(0, Message("user", text), namespace).data["content"]
            known = found() if found else self._encoder.encode(shown)[0]
            self._texts.put(namespace, text, known)
        return known

    # --- text to ids -----------------------------------------------------------------------------------------------------

    def _encode(self, namespace: str, text: str, frame: Frame | None = None) -> tuple[Encoded, int]:
        """Exactly the ids of tokenising all of `text`, and how many characters were tokenised for it."""
        known, shared = self._memory.nearest(namespace, text, ())
        if frame is not None:
            frame.place(text, known, shared)
        return self._encoder.resume(known, shared, text)

    def _encode_own(self, text: str, request: Request, frame: Frame) -> tuple[Encoded, int]:
        """Like `_encode`, with the model's own ids in place of its remembered messages."""
        namespace = request.options.namespace
        known, shared = self._memory.nearest(namespace, text, set(request.keys))
        frame.place(text, known, shared)
        have = {splice.key for splice in known.splices if splice.stop <= shared}
        self._recall(request, have)
        for number in reversed(range(len(request.turns))):
            if (key := request.keys[number + 1]) in have:
                break
            generated = self._memory.generated.get(namespace, key)
            if generated is None or not text.startswith(generated.prompt.text) or not frame.shows(number + 1):
                continue
            from .splice import spliced

            turn = request.turns[number]
            base, compared = spliced(
                self._encoder,
                generated,
                text,
                key=key,
                source=turn.source,
                turn_stop=frame.turn_stop(number, len(generated.prompt.text)),
                closer=frame.shape.closers.get(turn.kind, ""),
            )
            if base is not None:
                encoded, spent = self._encoder.append(base, text)
                return encoded, spent + compared
        return self._encoder.resume(known, shared, text)

    def _check_length(self, text: str, most_tokens: int) -> None:
        if 0 < SPARSE * most_tokens < len(text):
            from .overlong import check_length

            check_length(text, SPARSE * most_tokens, most_tokens, self._encoder)

    def _render_text(self, text: Any, tools: Sequence[Any], options: Options) -> Layout:
        if tools:
            raise MessageError("a string prompt cannot show tools: write them into the prompt or pass a list of messages")
        if not text:
            raise MessageError("the prompt '' is empty: give at least one character")
        if not isinstance(text, str):
            if odd := [(at, one) for at, one in enumerate(text) if not 0 <= one < 1 << 31]:
                raise MessageError(f"messages[{odd[0][0]}]={shown(odd[0][1])}: is no token id")
            if 0 < options.most_tokens < len(text):
                raise ContextOverflowError(len(text), options.most_tokens, 1)
            return Layout([*text], (Span("text", 0, len(text)),), self._tokenizer.decode(text))
        self._check_length(text, options.most_tokens)
        encoded, spent = self._encode(options.namespace, text)
        self._memory.keep(options.namespace, encoded)
        ids = [*self._leading(text), *encoded.ids]
        return Layout(ids, (Span("text", 0, len(ids)),), text, tokenised_chars=spent)

    def _leading(self, text: str) -> list[int]:
        """The ids that the tokenizer's own call puts before a text, unless the text already spells them."""
        if self._leading_ids is None:
            full, bare = list(self._tokenizer("a")["input_ids"]), self._encoder.encode("a")[0]
            self._leading_ids = next((full[:n] for n in range(len(full)) if full[n : n + len(bare)] == bare), [])
        spelled = "".join(self._encoder.control.get(token_id, "") for token_id in self._leading_ids)
        return [] if spelled and text.startswith(spelled) else self._leading_ids

    # --- the stable prefix -----------------------------------------------------------------------------------------------

    def _prefix_tokens(self, ids: list[int], request: Request) -> tuple[int, int]:
        """(how many of these ids are the stable prefix, characters tokenised to find out)."""
        before, spent = self._prefix_of(request)
        if not spent and ids[: len(before)] != before:  # known since another day, which the template shows
            before, spent = self._prefix_of(request, anew=True)
        return len(before) if ids[: len(before)] == before else common_length(ids, before), spent

    def _prefix_of(self, request: Request, anew: bool = False) -> tuple[list[int], int]:
        leading, namespace = request.turns[:1] if request.turns[0].data["role"] == "system" else [], request.options.namespace
        key = chain(request.tools.root + request.tools.arguments, leading)[-1]
        if not anew and (known := self._prefixes.get(namespace, key)) is not None:
            return known, 0
        texts = self._template.openings([turn.data for turn in leading], request.tools.schemas, request.options.kwargs)
        found, spent = self._common_prefix(texts, namespace)
        self._prefixes.put(namespace, key, found)
        return found, spent

    def _common_prefix(self, texts: Sequence[str], namespace: str) -> tuple[list[int], int]:
        """The ids with which all these texts start, and how many characters were tokenised to find them."""
        if not texts:
            return [], 0
        known, spent = self._encode(namespace, texts[0])
        ids = known.ids
        for text in texts[1:]:
            other, more = self._encoder.resume(known, common_length(known.text, text), text)
            ids, spent = ids[: common_length(ids, other.ids)], spent + more
        return ids, spent
