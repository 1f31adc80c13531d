"""Single tokens as bytes, and as the text that stands for them: several tokens may be one character. Knows no requests."""

from __future__ import annotations

import re
from typing import Any

_PLAIN = [*range(33, 127), *range(161, 173), *range(174, 256)]  # GPT-2's alphabet of bytes: these as they are, the others from 256 on
_BYTES = {chr(byte): byte for byte in _PLAIN} | {chr(256 + n): byte for n, byte in enumerate(sorted({*range(256)} - {*_PLAIN}))}
_FALLBACK = re.compile("<0x([0-9A-F]{2})>")


def token_bytes(tokenizer: Any, token: int) -> bytes:
    """The bytes that a token writes. Tokenizers decode part of a character to U+FFFD; some strip spaces of a lone token."""
    text, written = str(tokenizer.decode([token])), tokenizer.convert_ids_to_tokens(token)
    if not isinstance(written, str):
        return text.encode()
    if fallback := _FALLBACK.fullmatch(written):
        return bytes.fromhex(fallback[1])
    if "\ufffd" in text and _BYTES.keys() >= set(written):
        return bytes(_BYTES[letter] for letter in written)
    spaced = written.replace("▁", "") == text.replace(" ", "")
    return (written.replace("▁", " ") if spaced else text).encode()


def shown(said: bytes) -> str:
    """The text of a token's bytes; those that are no whole characters as OpenAI's API shows them."""
    try:
        return said.decode()
    except UnicodeDecodeError:
        return "".join(f"\\x{byte:02x}" for byte in said)
