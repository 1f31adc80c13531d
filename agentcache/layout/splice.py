"""The model's own ids put back where a template would write its message anew. Knows nothing of messages' meaning.

text    |---- prompt ----|-- the message as rendered --|terminator\n|---- next turn ...
                         start                      stop
ids     |--- as they were|---- as generated -----------|-- encoded after the last generated id
"""

from __future__ import annotations

from array import array

from .memory import Generated
from .tokenise import BACK, Encoded, Encoder, Splice

_THOUGHT = ("<think>", "</think>")  # begin no turn; templates drop earlier thoughts, the model's own ids keep them


def spliced(
    encoder: Encoder, generated: Generated, text: str, *, key: bytes, source: int, turn_stop: int, closer: str
) -> tuple[Encoded | None, int]:
    """text[:stop] with the generated ids in it, and how many characters were tokenised to compare them with stock ids.

    None if they hold other control tokens than the rendered message: put back, these would be turns that no message stands for.
    `text` starts with the remembered prompt, `turn_stop` is where the next turn starts in it.
    """
    prompt = generated.prompt
    start, first = len(prompt.text), len(prompt.ids)
    stop = _message_stop(encoder, text, start, turn_stop, encoder.control.get(generated.ids[-1]), closer)
    ids = prompt.ids + list(generated.ids)
    stock, own, spent = _compared(encoder, prompt, ids, text[:stop])
    if _controls(encoder, stock, generated.ids[-1]) != _controls(encoder, own, generated.ids[-1]):
        return None, spent
    splice = Splice(key, source, start, stop, first, len(ids), stock != own)
    ends = prompt.ends + array("i", [stop]) * len(generated.ids)
    return Encoded(text[:stop], ids, ends, (*prompt.splices, splice)), spent


def _compared(encoder: Encoder, prompt: Encoded, ids: list[int], text: str) -> tuple[list[int], list[int], int]:
    """(ids of tokenising `text`, `ids` that stand for it, characters that took), of a window that begins in the prompt's last tokens."""
    first = max(len(prompt.ids) - 4 * BACK, prompt.splices[-1].last if prompt.splices else 0)
    char = prompt.ends[first - 1] if first else 0
    window = Encoded(prompt.text[char:], prompt.ids[first:], array("i", [end - char for end in prompt.ends[first:]]))
    stock, spent = encoder.resume(window, len(window.text), text[char:])
    return stock.ids, ids[first:], spent


def _controls(encoder: Encoder, ids: list[int], end: int) -> list[int]:
    """The control tokens in the order in which they stand, but for thoughts and, where the model ended its turn with one, the last id."""
    body = ids[:-1] if end in encoder.control and ids[-1] in encoder.control else ids
    return [token for token in body if encoder.control.get(token, _THOUGHT[0]) not in _THOUGHT]


def _message_stop(encoder: Encoder, text: str, start: int, stop: int, end_text: str | None, closer: str) -> int:
    """The end of the text that the generated ids stand for. `end_text`: the control token they end with, if they do."""
    if end_text is not None:
        at = text.find(end_text, start, stop)  # the first one: no message's content can spell it
        if at >= 0:
            return at + len(end_text)
        if text.startswith(end_text, stop):  # GLM ends an answer with the token that opens the next turn
            return stop + len(end_text)
    elif closer and text.endswith(closer, start, stop):
        return stop - len(closer)
    at, length = max(((text.rfind(word, start, stop), len(word)) for word in encoder.control.values() if word), default=(-1, 0))
    if at < 0:
        return stop
    return at if end_text is None else at + length  # the template ends the turn otherwise than the model did


def splice_notes(encoded: Encoded) -> list[str]:
    """In words, which messages differ from their rendering."""
    sources = ", ".join(str(splice.source) for splice in encoded.splices if splice.differs)
    return [f"messages {sources}: the model's own ids kept in place of the re-rendered text"] if sources else []
