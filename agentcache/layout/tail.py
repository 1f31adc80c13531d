"""The place of volatile text: after everything, as the template can show it. Knows neither tokenizers nor declarations.

A form is tried by rendering it and holding it against the prompt without the text: whatever stands before must still stand there,
unchanged, and the text after it. A template that hoists, drops or refuses a form is found out that way, on the conversation at hand.

    system text    a system message at the tail; with allow_demote, else, what user text may be
    user text      the end of the last message, if that is the user's; else a user message of its own; else the last user message

With `ahead` user text opens the user's message instead of ending it, and the template may do the same with system text: what stands before
that message must be unchanged then, and the message is for this prompt only, too. With a name as `ahead` the text is first tried as
messages of that name, which the template may write before the last turn, be it the user's or tool results.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from ..errors import TemplateError
from ..types import LayoutOptions, Message, Move, Role
from .canonical import text_of
from .declared import Declared, Piece
from .plain import field
from .request import Rendered
from .spans import overlaid
from .tokenise import Place, common_length

NO_FORM = "the chat template shows no system text behind the last message; allow_demote=True lets a user message say it"
NO_TAIL = "the chat template shows no text behind the last message without changing what stands before it"


Render = Callable[[Sequence[Any]], Rendered]
Form = tuple[list[Any], tuple[Role, ...]]  # messages that show the text, and as whose text they show each piece


def placed(declared: Declared, options: LayoutOptions, render: Render) -> Rendered:
    """The prompt of these messages with its volatile pieces where they belong, or left where they were if that cannot be."""
    if options.mode == "enforce" and len(declared.brought) < len(declared.pieces):
        found = _shown(declared.stable, declared.pieces, options, render)
        if found is not None:
            return found
        why = NO_TAIL if options.allow_demote else NO_FORM
    else:
        why = f"layout={options.mode!r}"
    inside = [piece for piece in declared.pieces if piece.message is not None]
    found = _shown(declared.whole, declared.brought, options, render) if declared.brought else render(declared.whole)
    if found is None:
        texts = [piece.text for piece in declared.brought]
        raise TemplateError(f"volatile={texts!r:.200}: {NO_TAIL}; write it into a message, or pass another chat_template=")
    if options.mode == "off":
        return found
    stays = tuple(Move(piece.message, piece.start, piece.stop, piece.by, "stays", piece.role, why) for piece in inside)
    return replace(found, moves=(*stays, *found.moves))


def _shown(messages: list[Any], pieces: Sequence[Piece], options: LayoutOptions, render: Render) -> Rendered | None:
    """The prompt of `messages` with the pieces at the tail; None if no form of them is faithful."""
    base = render(messages)
    users = [number for number, message in enumerate(messages) if field(message, "role") == "user"]
    turn = users[-1] + 1 if users else len(messages)
    for at in (turn,) if options.keep else dict.fromkeys((len(messages), turn)):
        fixed = _fixed(base.encoded.places, at > turn, options.ahead)
        for shown, roles in _forms(messages, at, pieces, options):
            try:
                full = render(shown)
            except TemplateError:
                continue
            stop = _end(base.text, full.text, pieces, fixed)
            if common_length(base.text, full.text) >= fixed and stop is not None:
                return _result(base, full, pieces, roles, options, stop)
    return None


def _fixed(places: Sequence[Place], behind: bool, ahead: bool | str | None) -> int:
    """Count the characters of the prompt without the text that the prompt with it must share: up to the end of the message that the text
    follows (`behind`: the last one, else the last user message), or, with `ahead`, up to the start of that one if it is the user's; with
    a name, up to the start of tool results that end the prompt, too.
    """
    shown = [place for place in places if place.start is not None and (behind or place.kind == "user")]
    last = max(shown, key=lambda place: place.stop, default=None)
    if last is None:
        return 0
    if ahead and last.kind == "user" and last.start is not None:
        return last.start
    if isinstance(ahead, str) and last.kind == "tool":
        results = itertools.takewhile(lambda place: place.kind == "tool", reversed(shown))
        return min(place.start for place in results if place.start is not None)
    return last.stop


def _forms(messages: list[Any], at: int, pieces: Sequence[Piece], options: LayoutOptions) -> Iterator[Form]:
    """From the most faithful one on."""
    system = "\n\n".join(piece.text for piece in pieces if piece.role == "system")
    user = "\n\n".join(piece.text for piece in pieces if piece.role == "user")
    own = tuple(piece.role for piece in pieces)
    if isinstance(options.ahead, str):
        named = [Message("system", system, name=options.ahead)] if system else []
        named += [Message("user", user, name=options.ahead)] if user else []
        yield [*messages[:at], *named, *messages[at:]], own
    said = [Message("system", system)] if system else []
    for shown in _as_user(messages, at, user, bool(options.ahead)):
        behind = at + len(shown) - len(messages)
        yield [*shown[:behind], *said, *shown[behind:]], own
    if system and options.allow_demote:
        for shown in _as_user(messages, at, "\n\n".join(piece.text for piece in pieces), bool(options.ahead)):
            yield shown, tuple[Role, ...]("user" for _ in pieces)


def _as_user(messages: list[Any], at: int, text: str, ahead: bool) -> Iterator[list[Any]]:
    if not text:
        yield list(messages)
        return
    last = messages[at - 1]
    if field(last, "role") == "user":
        content = text_of(field(last, "content"))
        joined = "\n\n".join(filter(None, (text, content) if ahead else (content, text)))
        merged = replace(last, content=joined) if isinstance(last, Message) else {**last, "content": joined}
        yield [*messages[: at - 1], merged, *messages[at:]]
    yield [*messages[:at], Message("user", text), *messages[at:]]


def _end(base: str, text: str, pieces: Sequence[Piece], start: int) -> int | None:
    """The end of the last piece, if all stand after `start` and not only in `base`; templates may trim them, and what spells a
    token is changed.
    """
    stop = start
    for piece in pieces:
        words = piece.text.split()
        for word in (words[0], words[-1]):
            at = text.find(word, start)
            if at < 0 or text.count(word, start) <= base.count(word, start):
                return None
            stop = max(stop, at + len(word))
    return stop


def _result(base: Rendered, full: Rendered, pieces: Sequence[Piece], roles: Sequence[Role], options: LayoutOptions, stop: int) -> Rendered:
    shared = common_length(base.ids, full.ids)
    moves = tuple(
        Move(piece.message, piece.start, piece.stop, piece.by, "turn" if options.keep else "tail", role)
        for piece, role in zip(pieces, roles, strict=True)
    )
    last = next((span.start for span in full.spans if span.kind == "generation"), len(full.ids))
    covered = min(last, full.encoded.tokens_before(stop) + 1)
    note = f"volatile text at the {'last user message' if options.keep else 'tail'}: {len(pieces)}"
    spans = tuple(overlaid(full.spans, "volatile", shared, covered))
    made = replace(full, spans=spans, differences=(*full.differences, note), moves=moves)
    if options.keep:
        return made
    # the renderer remembers this prompt without the text that no later prompt will have
    return replace(
        made,
        prefix_tokens=min(base.prefix_tokens, shared),
        ephemeral_tokens=len(full.ids) - shared,
        encoded=base.encoded,
        chain=base.chain,
        request=base.request,
    )
