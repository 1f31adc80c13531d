"""A constraint's walk over the tokens of one completion: which may come next, and how it ends in time. Knows nothing of requests' KV.

max_tokens bounds every walk but that of words with calls among them, which may be cut anywhere. While many tokens are left, the grammar
alone decides. When few are left, texts and lists end early; from then on a token is allowed only if an ending that fits follows it:

    left > need + room          the grammar alone
    left <= need + room         a text gives way to its end after some tokens; a list and an object take no further part
    left <= need                the ending itself, token by token

need: length of an ending that is known to fit; room: some tokens for each value that is still to be written.
"""

from __future__ import annotations

import re
import sys
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

import numpy as np
import torch

from .vocabulary import DIGITS, TEXT, Bits, Ending, Vocabulary, free

REPEATED = 12  # digits of a number that say nothing new
LIKELY = 8  # next tokens that are looked at where the one that was drawn does not fit

_NUMBER = re.compile(rb"-?[0-9][0-9.eE+-]*$")
_STRUCTURE = re.compile(rb'[",]')


@dataclass(frozen=True, slots=True)
class Compiled:
    """A grammar that guides start from. need: tokens of its shortest ending, more than LONGEST if none was found. growth: by how many one
    token may make an ending longer: as all that it can demand is written in the grammar, as many as the grammar itself has.
    """

    matcher: Any
    vocabulary: Vocabulary
    need: int
    growth: int


class Guide:
    """The constraint of one request on its way: which tokens may come next, of at most `max_tokens` if it is given. One thread at a time.

    calls: all of the completion is calls. thinks: a thought may come before an answer of prescribed form, in half of the tokens.
    shortened: a text or a list ended early, so that the answer fits. cut: there was no room for a value that the model would write, and
    another is none of its answer.
    """

    def __init__(self, compiled: Compiled, vocab: int, max_tokens: int | None, *, calls: bool, thinks: bool) -> None:
        self.shortened = self.cut = False
        self._matcher, self._vocabulary, self._vocab = compiled.matcher.deep_copy(), compiled.vocabulary, vocab
        self._calls = calls
        self._due = -1 if max_tokens is None else max_tokens  # an ending is looked for when no more tokens are left
        self._left = max_tokens = sys.maxsize if max_tokens is None else max_tokens
        self._growth = compiled.growth
        self._thought_ends = max_tokens // 2 if thinks else -1
        self._next: deque[int] = deque()
        self._endings: dict[int, Ending] = {}  # after tokens that may come next
        self._known: Ending | None = None
        self._free = 0  # tokens of the free text that is being written
        self._met = Counter[int]()  # how often the same tokens might come next within a value
        self._number = b""  # the number that is being written
        self._allowed: Bits = np.zeros(0, dtype=bool)
        self._near_the_end: Ending | None = None  # the ending that fits, where the next token may be one after which none does
        self._in_number = False

    @property
    def over(self) -> bool:
        """Whether nothing can follow."""
        return bool(self._matcher.is_stopped())

    @property
    def accepting(self) -> bool:
        """Whether the completion may end here."""
        return bool(self._matcher.is_accepting() or self._matcher.is_stopped())

    def forced(self) -> list[int]:
        """The next tokens, as far as there is one way on, and the model has them."""
        known = self._next or self._matcher.compute_ff_tokens()
        return list(takewhile(lambda token: token < self._vocab, known))

    def mask(self, logits: torch.Tensor) -> torch.Tensor | None:
        """Logits [vocab] with those of other tokens at minus infinity; None if the completion can only end."""
        allowed = self._vocabulary.allowed(self._matcher)
        if not allowed[: self._vocab].any():
            return None
        self._near_the_end = None
        self._bound(allowed, logits)
        self._allowed = allowed
        return self._masked(logits)

    def fits(self, token: int) -> bool:
        """Whether an ending fits after this token, with room for the values that it leaves."""
        if self._near_the_end is None:
            return True
        found = self._after(token, *self._near_the_end)
        if found is None:
            return False
        self._endings[token] = found
        return (self._in_number and bool(self._vocabulary.numeric[token])) or len(found[0]) + found[1] < self._left

    def narrow(self, logits: torch.Tensor, refused: int) -> torch.Tensor | None:
        """The mask without a token that does not fit: of the likeliest others those that do. None if the completion is cut."""
        assert self._near_the_end is not None
        ending = self._near_the_end[0]
        likely = _likeliest(self._allowed, logits, LIKELY)
        roomy = [token for token in likely if self.fits(token)]
        fitting = roomy or list(self._endings) or ending[:1]
        if ending and fitting == ending[:1] and refused not in self._endings:
            formed = ending[0] in self._vocabulary.closing or (self._vocabulary.suffixes and not self._number)
            self.cut = self._in_number or not formed
        if ending:
            self._endings.setdefault(ending[0], (ending[1:], self._near_the_end[1]))
        _only(self._allowed, fitting)
        self.shortened |= refused not in fitting
        return None if self.cut else self._masked(logits)

    def _masked(self, logits: torch.Tensor) -> torch.Tensor:
        return logits.masked_fill(~torch.from_numpy(self._allowed[: self._vocab]).to(logits.device), float("-inf"))

    def accept(self, token: int) -> str:
        """Note the token that was chosen; what went wrong, if something did."""
        if not self._matcher.consume_token(token):
            return str(self._matcher.get_error()).partition("\n")[0] or f"token {token} is not allowed here"  # then: its state, the grammar
        self._left -= 1
        text = self._vocabulary.tokens[token]
        if _STRUCTURE.search(text):
            self._met.clear()
        number = _NUMBER.search(self._number + text)
        self._number = number.group() if number else b""
        self._known = self._endings.get(token)
        self._endings = {}
        if self._next and self._next.popleft() != token:
            self._next.clear()
        return ""

    def _bound(self, allowed: Bits, logits: torch.Tensor) -> None:
        """Take from the allowed tokens those after which no ending fits, and when the end is near those that put it off."""
        in_text = free(allowed)
        self._met[hash(allowed.tobytes())] += 1
        self._free = self._free + 1 if in_text else 0
        if self._next:
            _only(allowed, [self._next[0]])
            self._endings = {self._next[0]: (self._known[0][1:], 0)} if self._known and self._known[0][:1] == [self._next[0]] else {}
            return
        if in_text and self._left <= self._thought_ends and self._leave([self._vocabulary.thought], allowed):
            return
        if not in_text and len(self._number) >= DIGITS:
            self._end_number(allowed)
        if self._left > self._due:
            return
        ending = self._known
        if ending is None or self._left <= len(ending[0]) + ending[1] + TEXT:
            ending = self._vocabulary.ending(self._matcher, self._left) or ending
        if ending is None:
            self._due = self._left // 2
            return
        spare = self._left - len(ending[0]) - ending[1]
        self._due = self._left - max(0, spare - self._growth) // 2
        if spare > (TEXT if in_text else self._growth):
            return
        if in_text and ending[0] and self._free > TEXT and self._leave(self._vocabulary.exits, allowed):
            self.shortened = True
            return
        self._near_the_end, self._in_number = ending, bool(self._number) and self._vocabulary.goes_on_as_number(allowed)
        if spare <= TEXT:
            best = _likeliest(allowed, logits, 1)[0]
            self._go_no_further(allowed, ending[0])
            self.shortened |= not allowed[best]

    def _go_no_further(self, allowed: Bits, ending: list[int]) -> None:
        """Take away what calls, numbers, patterns, lists and objects would go on with."""
        vocabulary = self._vocabulary
        if self._in_number:
            if _repeats(self._number):
                self._end_number(allowed)
            elif (allowed & vocabulary.closers).any():
                allowed &= ~vocabulary.separators
        elif self._calls and not ending and (allowed & vocabulary.closes).any():
            allowed &= vocabulary.closes
        elif self._met[hash(allowed.tobytes())] > TEXT:
            self._progress(allowed)
        elif (allowed & vocabulary.closers).any():
            allowed &= ~vocabulary.separators

    def _end_number(self, allowed: Bits) -> None:
        """No more digits, or only such with which the number may end."""
        if (allowed & ~self._vocabulary.numeric).any():
            allowed &= ~self._vocabulary.numeric
        else:
            self._progress(allowed)

    def _progress(self, allowed: Bits) -> None:
        """Of a part that a pattern repeats: the byte after which something else may follow, and the end is near, if there is one."""
        ways = dict[int, int]()
        for token in self._vocabulary.leading(self._matcher, allowed)[:LIKELY]:
            after = self._matcher.deep_copy()
            if after.consume_token(token) and (found := self._vocabulary.ending(after, self._left - 1, shortest=True)):
                ways[token] = len(found[0])
        if ways:
            _only(allowed, [min(ways, key=ways.__getitem__)])

    def _leave(self, exits: list[list[int]], allowed: Bits) -> bool:
        """End the free text that is being written, if one of these literals does."""
        literal = self._vocabulary.exit(self._matcher, exits)
        if literal:
            _only(allowed, literal[:1])
            self._next = deque(literal)
            after = self._matcher.deep_copy()
            after.consume_tokens(literal)
            rest, room = self._vocabulary.ending(after) or ([], 0)
            self._endings = {literal[0]: (literal[1:] + rest, room)}
        return bool(literal)

    def _after(self, token: int, ending: list[int], room: int) -> Ending | None:
        """An ending that fits after this token: the same or its rest, where that is one, else another."""
        if ending[:1] == [token]:
            return ending[1:], room
        after = self._matcher.deep_copy()
        if not after.consume_token(token):
            return None
        for path in (ending[1:], ending):
            if len(path) < self._left and self._vocabulary.ends(after, path):
                return path, room
        return self._vocabulary.ending(after, self._left - 1)


def _repeats(number: bytes) -> bool:
    """Whether the end of a number says the same few digits again and again."""
    end = number[-REPEATED:]
    return len(end) == REPEATED and any(end[period:] == end[:-period] for period in (1, 2, 3, 4))


def _only(allowed: Bits, tokens: Sequence[int]) -> None:
    allowed[:] = False
    allowed[list(tokens)] = True


def _likeliest(allowed: Bits, logits: torch.Tensor, count: int) -> list[int]:
    """The allowed tokens with the highest logits, best first."""
    ids = np.flatnonzero(allowed[: len(logits)])
    order = logits[torch.from_numpy(ids).to(logits.device)].topk(min(count, len(ids))).indices
    return [int(ids[place]) for place in order.tolist()]
