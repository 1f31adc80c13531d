"""Refusal of a prompt far beyond the context, by its start alone. Loaded for long texts only; knows nothing of messages or models.

A start of a text may be tokenised otherwise than within the whole: a word that it cuts takes other tokens, and merges or weights
carry that on to neighbours. It never takes twice the tokens: where it has more than twice what the context holds, the whole has more.
"""

from __future__ import annotations

from ..errors import ContextOverflowError
from .tokenise import Encoder

CUT = 1024  # tokens that a cut word may take more of: WordPiece reads a word of over 100 letters as one unknown token


def check_length(text: str, chars: int, most_tokens: int, encoder: Encoder) -> None:
    """ContextOverflowError: the text takes more than `most_tokens`, with an estimate. chars: of the first start that is tried."""
    while chars < len(text):
        count = len(encoder.encode(text[:chars])[0])
        if count > 2 * most_tokens + CUT:
            estimate = count * len(text) // chars
            raise ContextOverflowError(estimate // (tens := 10 ** (len(str(estimate)) - 2)) * tens, most_tokens, 1)
        chars *= 2
