"""A tokenizer's ids as grammars need them, and the shortest endings of a completion that were found. Knows nothing of requests."""

from __future__ import annotations

import copy
import json
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from .regex_suffixes import suffixes

Ending = tuple[list[int], int]  # tokens, and the room that its values may take
Bits = npt.NDArray[np.bool_]

TEXT = 8  # tokens that each value still to be written may have when the end is near
DIGITS = 24  # the longest number: as long as the longest double and the longest integer of 64 bits can be
LONGEST = 4096  # tokens of an ending
TURNS = 3  # tries to find one
FEW = 16  # bytes that may come next after a value: its digits, a separator, a closer
KNOWN = 256  # places in patterns whose ways on are remembered

_CLOSERS, _NUMERIC = b'}]",', b"0123456789.-+eE"
_EASY, _LATE = b"n0123456789ft", b"\\[{ \n\t"  # which bytes an ending tries first and last


class Vocabulary:
    """A tokenizer's ids as endings need them. tokens: bytes of each id. encode: ids of a literal text. ends: ids that end a turn.

    thought: text that ends a thought. exits: texts that end other free text.
    """

    def __init__(self, tokens: Sequence[bytes], encode: Any, ends: Sequence[int], *, thought: str, exits: Sequence[str]) -> None:
        self.tokens = tokens
        first = np.array([token[0] if token else -1 for token in tokens])
        self.numeric = np.isin(first, list(_NUMERIC))
        self.separators = first == ord(",")
        self.closers = np.isin(first, list(b"}]"))
        self._after_number = np.isin(first, list(b",}]\n"))
        self.closes = np.isin(np.arange(len(tokens)), list(ends))
        self._single = single = {token[0]: number for number, token in enumerate(tokens) if len(token) == 1}
        late = [byte for byte in _LATE if byte in single]
        order = dict.fromkeys((*_CLOSERS, *_EASY, *(byte for byte in range(256) if byte not in _LATE), *late))
        self.bytes = np.array([single[byte] for byte in order if byte in single], dtype=np.int64)
        self._number = [single[byte] for byte in b"-19" if byte in single]
        self._letter = single.get(ord("x"), 0)
        self.closing = frozenset(single[byte] for byte in _CLOSERS if byte in single)
        self._known: dict[int, list[int]] = {}
        self.encode = encode
        self.thought = list(encode(thought))
        self.exits = [
            [single[ord('"')]] if ord('"') in single else list(encode('"')),
            self.thought,
            *(list(encode(text)) for text in exits if text),
        ]
        self._closings = [text for text in exits if text]
        self.suffixes: list[list[int]] = []  # of a regular expression

    def of_grammar(self, regex: str | None, patterns: Sequence[str]) -> Vocabulary:
        """The same vocabulary for one grammar: it also knows the texts that end a match of its regex, or of patterns within its texts."""
        own = copy.copy(self)
        own._known = {}
        own.suffixes = [self._spelled(text) for text in suffixes(regex)] if regex is not None else []
        found = [text for pattern in patterns for text in suffixes(pattern) if text]
        ends = [json.dumps(text, ensure_ascii=False)[1:] for text in found]
        ends += [text + closing for closing in self._closings for text in found]
        own.exits = [*filter(None, own.suffixes), *self.exits, *map(self._spelled, dict.fromkeys(ends))]
        return own

    def _spelled(self, text: str) -> list[int]:
        """Ids of a text that goes on after other text: some tokenizers put a space before all that they encode."""
        ids, spelled = list(self.encode(text)), text.encode()
        if b"".join(self.tokens[token] for token in ids) == spelled or not all(byte in self._single for byte in spelled):
            return ids
        return [self._single[byte] for byte in spelled]

    def allowed(self, matcher: Any) -> Bits:
        """Which ids may come next."""
        packed = np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8)
        return np.unpackbits(packed, count=len(self.tokens), bitorder="little").astype(bool)

    def starts_number(self, allowed: Bits) -> bool:
        """Whether a number may begin here, and no text."""
        return bool(allowed[self._number].all()) and not allowed[self._letter]

    def goes_on_as_number(self, allowed: Bits) -> bool:
        """Whether what may come next are more digits of a JSON number, or of a pattern that needs them."""
        others = allowed & ~self.numeric
        return bool((allowed & self.numeric).any()) and not free(allowed) and bool((others & self._after_number).any() or not others.any())

    def exit(self, matcher: Any, exits: Sequence[list[int]]) -> list[int]:
        """The first of these literals with which a free text ends here; [] if none does."""
        for literal in exits:
            if matcher.validate_tokens(literal) == len(literal):
                after = matcher.deep_copy()
                after.consume_tokens(literal)
                if after.is_accepting() or after.is_stopped() or not self.allowed(after)[self._letter]:
                    return literal
        return []

    def ending(self, matcher: Any, longest: int = LONGEST, *, shortest: bool = False) -> Ending | None:
        """Tokens with which the completion can end, at most `longest`; None if none are found. shortest: of several tries."""
        for suffix in self.suffixes:
            if len(suffix) <= longest and self.ends(matcher, suffix):
                return suffix, 0
        best: Ending | None = None
        for turn in range(TURNS):
            walk = _Walk(self, matcher, turn)
            if walk.ends(longest) and (best is None or len(walk.path) < len(best[0])):
                best = walk.path, walk.room
            if best and not (shortest and walk.turned):
                break
        return best

    def error(self, matcher: Any) -> str:
        """The parser's own reason for finding no ending: its limits, mostly; "" if there is none."""
        walk = _Walk(self, matcher, 0)
        walk.ends(LONGEST)
        return str(walk.matcher.get_error())

    def ends(self, matcher: Any, path: list[int]) -> bool:
        """Whether exactly these tokens end the completion."""
        if matcher.validate_tokens(path) < len(path):
            return False
        after = matcher.deep_copy()
        after.consume_tokens(path)
        return bool(after.is_accepting() or after.is_stopped())

    def leading(self, walk: Any, allowed: Bits) -> list[int]:
        """The bytes that may come next, those first of which something else may follow."""
        choices = self.bytes[allowed[self.bytes]].tolist() or np.flatnonzero(allowed).tolist()
        if len(choices) <= FEW:
            return choices
        key = hash(allowed.tobytes())
        leading = self._known.get(key)  # from many threads: those who find nothing compute the same
        if leading is None:
            if len(self._known) >= KNOWN:
                self._known.clear()
            leading = self._known[key] = [token for token in choices if hash(self.after(walk, token).tobytes()) != key]
        return leading or choices

    def after(self, matcher: Any, token: int) -> Bits:
        """Which ids may follow this one."""
        walk = matcher.deep_copy()
        walk.consume_token(token)
        return self.allowed(walk)


class _Walk:
    """One try to end a completion. turn: which of several ways on it takes first; the last turn takes no closer for the better way."""

    def __init__(self, vocabulary: Vocabulary, matcher: Any, turn: int) -> None:
        self.path, self.room, self.turned = list[int](), 0, False
        self._vocabulary, self.matcher, self._turn = vocabulary, matcher.deep_copy(), turn
        self._closers = vocabulary.closing if turn < TURNS - 1 else frozenset[int]()
        self._taken = Counter[bytes]()
        self._in_text = False

    def ends(self, longest: int) -> bool:
        """Whether `path` leads to an end within so many tokens."""
        while not (self.matcher.is_accepting() or self.matcher.is_stopped()):
            step = self.matcher.compute_ff_tokens() or self._choice(self._vocabulary.allowed(self.matcher))
            self.path += step
            if len(self.path) > longest or not self.matcher.consume_tokens(step):
                return False
        return True

    def _choice(self, allowed: Bits) -> list[int]:
        """The next tokens. Where nothing closes what is open, every way on gets its turn: one of them leads to an end."""
        in_text, self._in_text = self._in_text, free(allowed)
        self.room += TEXT + 2 if self._in_text and not in_text else DIGITS + 1 if self._vocabulary.starts_number(allowed) else 0
        if self._in_text and (literal := self._vocabulary.exit(self.matcher, self._vocabulary.exits)):
            return literal
        choices = self._vocabulary.leading(self.matcher, allowed)
        if choices[0] in self._closers and len(choices) <= FEW:
            return choices[:1]
        self.turned = True
        self._taken[key := allowed.tobytes()] += 1
        return [choices[(self._taken[key] - 1 + self._turn) % len(choices)]]


def free(allowed: Bits) -> bool:
    """Whether a free text is being written: nearly every token may come next."""
    return 2 * int(np.count_nonzero(allowed)) > len(allowed)
