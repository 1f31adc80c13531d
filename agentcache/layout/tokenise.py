"""Text to token ids, paying only for text that is new. Knows nothing of messages, templates or models.

A safe cut is proved, not assumed. To tokenise a text that shares its first `d` characters with a known one:

    known   |----------- kept ------------|==== overlap ====| d        ids and ends known
    new     |                          cut|==== overlap ====| d .....  encoded from `cut` on

The known ids saw the true left context, the new ids see the true right context. Where both agree, token by token at equal
offsets, over a run of at least RUN tokens, the text is joined near the middle of the run: where a pre-token starts, since
pre-tokens are tokenised one by one. BPE joins inside one too: its merges depend on neighbours only (a Unigram model weighs whole
pre-tokens, and breaks ties by the rounding of their sums). Otherwise the whole is tokenised.
"""

from __future__ import annotations

import copy
import hashlib
import re
import tempfile
from array import array
from bisect import bisect_right
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any, NamedTuple

from ..errors import ConfigError, MessageError

BACK = 64  # tokens re-encoded before the divergence: pre-token rules look ahead, added tokens may straddle it
RUN = 32  # of them must agree in one run; the join is in its middle, 16 tokens of context on each side
BREAKERS = ("\u200d", "\u2060", " ", "\\")  # zero-width joiner, word joiner, then visible ones for normalisers that strip those
_OFF = ("add_special_tokens", "return_attention_mask", "return_token_type_ids", "verbose")
_OPTIONS: dict[str, Any] = {**dict.fromkeys(_OFF, False), "return_offsets_mapping": True}


@dataclass(frozen=True, slots=True)
class Splice:
    """Characters [start, stop) of a rendering stand for tokens [first, last), the model's own ids. `key` names the message."""

    key: bytes
    source: int
    start: int
    stop: int
    first: int
    last: int
    differs: bool


class Place(NamedTuple):
    """The place of a message: its header starts at `start` (None: not shown), its content ends at `stop`. `key` names the history."""

    key: bytes
    kind: str
    start: int | None
    stop: int


@dataclass(frozen=True, slots=True)
class Encoded:
    """A text with its ids. `ends[k]` is where token k ends in the text, never decreasing; empty if the tokenizer is slow."""

    text: str
    ids: list[int]
    ends: array[int]
    splices: tuple[Splice, ...] = ()
    places: Sequence[Place] = ()

    def tokens_before(self, char: int) -> int:
        """Count the tokens that end at or before `char`."""
        return bisect_right(self.ends, char)


EMPTY = Encoded("", [], array("i"))


def common_length(one: Sequence[object], other: Sequence[object]) -> int:
    """Length of the common prefix of two texts, or lists of one type, by bisection over slices, which are compared in C."""
    low, high = 0, min(len(one), len(other))
    if one[:high] == other[:high]:
        return high
    step = 64
    while low + step < high and one[low : low + step] == other[low : low + step]:
        low += step
        step *= 2
    high = min(high, low + step)
    while low + 1 < high:  # one[:low] equal, one[:high] not
        middle = (low + high) // 2
        low, high = (middle, high) if one[low:middle] == other[low:middle] else (low, middle)
    return low


def in_transformers_form(tokenizer: Any) -> Any:
    """A tokenizer that renders a chat template: this one, a processor's, or mistral-common's converted. ConfigError: it has no words."""
    if any(base.__name__ == "ProcessorMixin" for base in type(tokenizer).__mro__):
        template, tokenizer = getattr(tokenizer, "chat_template", None), tokenizer.tokenizer
        if template and not getattr(tokenizer, "chat_template", None):
            tokenizer = copy.copy(tokenizer)
            tokenizer.chat_template = template
    if type(tokenizer).__name__ == "MistralCommonBackend":
        return _converted(tokenizer)
    _check_vocabulary(tokenizer)
    return tokenizer


def _converted(tokenizer: Any) -> Any:
    """Transformers' own conversion, which has equal ids. ConfigError: it fails."""
    from transformers import PreTrainedTokenizerFast

    try:
        with tempfile.TemporaryDirectory() as folder:
            tokenizer.save_pretrained(folder, save_format="hf")
            return PreTrainedTokenizerFast.from_pretrained(folder)
    except (OSError, ValueError, TypeError, KeyError) as error:
        advice = "load it by AutoTokenizer.from_pretrained(NAME, mistral_format=False)"
        raise ConfigError(f"tokenizer 'MistralCommonBackend' cannot be converted ({type(error).__name__}: {error}): {advice}") from error


def _check_vocabulary(tokenizer: Any) -> None:
    """ConfigError: all words have the same ids. So it is where transformers finds a model's config and no files of its tokenizer."""
    words = {tuple(tokenizer(word, add_special_tokens=False)["input_ids"]) for word in ("a", "the", "7", "{")}
    if len(words) == 1:
        raise ConfigError(
            f"tokenizer={getattr(tokenizer, 'name_or_path', '')!r} has no vocabulary ({len(tokenizer)} tokens): save the model's own "
            "into that folder, tokenizer.save_pretrained(FOLDER), or pass it as tokenizer="
        )


class Encoder:
    """A tokenizer seen as: text to (ids, ends), without added BOS or EOS."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self.fast = bool(getattr(tokenizer, "is_fast", False))
        self.merges = type(getattr(getattr(tokenizer, "backend_tokenizer", None), "model", None)).__name__ == "BPE"
        decoder = getattr(tokenizer, "added_tokens_decoder", None) or {}
        self.added = {int(token_id): str(token.content) for token_id, token in decoder.items()}
        listed = set(getattr(tokenizer, "all_special_ids", ()))
        special = {i for i, token in decoder.items() if token.special} | (listed & set(self.added))
        # Non-special added tokens of this shape act as control tokens too (Phi's <|user|>); others, as <tool_call>, are plain words
        # of the prompt that people write on purpose.
        self.control = {i: text for i, text in self.added.items() if i in special or (text.startswith("<|") and text.endswith("|>"))}
        for token_id in listed - set(self.control):
            self.control[int(token_id)] = str(tokenizer.convert_ids_to_tokens(int(token_id)))
        self._ints: dict[int, int] = {}  # one object for each id, not one for each token of each prompt in memory

    @cached_property
    def identity(self) -> bytes:
        """Digest of everything that decides ids."""
        backend = getattr(self._tokenizer, "backend_tokenizer", None)
        return hashlib.blake2b(backend.to_str().encode() if backend is not None else b"slow", digest_size=16).digest()

    @cached_property
    def vocabulary(self) -> int:
        """The number of ids, added ones included."""
        return len(self._tokenizer)

    def encode(self, text: str) -> tuple[list[int], array[int]]:
        """All ids of `text`, and where each ends (empty for a slow tokenizer)."""
        ids, ends, _ = self._encode(text)
        return ids, ends

    def _encode(self, text: str) -> tuple[list[int], array[int], Any]:
        """(ids, ends, the tokenizer's own answer)."""
        if not text:
            return [], array("i"), []
        try:
            text.encode()
        except UnicodeEncodeError as error:
            bad = text[error.start : error.end]
            raise MessageError(f"the text holds {bad!r}, a lone surrogate: decode it with errors='replace' first") from error
        if not self.fast:
            return list(self._tokenizer(text, add_special_tokens=False)["input_ids"]), array("i"), []
        out = self._tokenizer(text, **_OPTIONS)
        ids, ends = out["input_ids"], accumulate((stop for _, stop in out["offset_mapping"]), max)
        return [*map(self._ints.setdefault, ids, ids)], array("i", ends), out

    def whole(self, text: str) -> Encoded:
        return Encoded(text, *self.encode(text))

    def resume(self, known: Encoded, shared: int, text: str) -> tuple[Encoded, int]:
        """`text` encoded, and how many characters were tokenised for it. `known.text[:shared] == text[:shared]`.

        Splices that end within the shared part are kept; the text after the last of them is a section of its own.
        """
        splices = tuple(splice for splice in known.splices if splice.stop <= shared)
        floor, first = (splices[-1].stop, splices[-1].last) if splices else (0, 0)
        if known.ends and shared == len(text) == len(known.text):
            return known, 0
        if known.ends:
            joined = self._join(known, first, shared, text)
            if joined is not None:
                ids, ends, spent = joined
                return Encoded(text, ids, ends, splices), spent
        if not splices:
            return self.whole(text), len(text)
        return self.append(Encoded(known.text[:floor], known.ids[:first], known.ends[:first], splices), text)

    def append(self, base: Encoded, text: str) -> tuple[Encoded, int]:
        """`text` = base.text + more, the more encoded as what follows base's last token, which stays as it is."""
        more = text[len(base.text) :]
        last = self.control.get(base.ids[-1]) if base.ids else None
        ids, ends = self.encode((last or "") + more)
        skip = 0
        if last is not None and ids and ids[0] == base.ids[-1]:
            skip = 1
        elif last is not None:  # a tokenizer that does not give a control token back: its text must not enter the prompt twice
            ids, ends = self.encode(more)
            last = None
        shift = len(base.text) - len(last or "")
        ends = array("i", [max(len(base.text), end + shift) for end in ends[skip:]])
        return Encoded(text, base.ids + ids[skip:], base.ends + ends, base.splices), len(more) + len(last or "")

    def _join(self, known: Encoded, first: int, shared: int, text: str) -> tuple[list[int], array[int], int] | None:
        """(ids, ends, characters tokenised) by the proof in the module's docstring, or None where it fails."""
        cut = known.tokens_before(shared) - BACK
        while cut > first and known.ends[cut] == known.ends[cut - 1]:
            cut -= 1  # never between two tokens of one character
        if cut <= first:
            return None
        start = known.ends[cut - 1]
        ids, ends, answer = self._encode(text[start:])
        ends = array("i", [end + start for end in ends])
        if known.text[known.ends[-1] :].strip() or text[ends[-1] if ends else start :].strip():
            return None  # characters without a token: where the others end is not to be believed
        run, old, new = agreement(known.ids, known.ends, cut, ids, ends, shared)
        if run < RUN:
            return None
        words = answer.word_ids()  # the number of each token's pre-token, None for an added token
        middle = new + run // 2
        inside = range(new + run // 4, new + run - run // 4)
        starts = [at for at in inside if words[at] != words[at - 1]]
        if not starts and not self.merges:
            return None
        new_at = min(starts, key=lambda at: abs(at - middle), default=middle)
        old_at = old + new_at - new
        return known.ids[:old_at] + ids[new_at:], known.ends[:old_at] + ends[new_at:], len(text) - start


def agreement(
    known_ids: list[int], known_ends: array[int], cut: int, ids: list[int], ends: array[int], shared: int
) -> tuple[int, int, int]:
    """(length, known index, new index) of the longest run before `shared` in which ids and ends agree."""
    stop_old, stop_new = bisect_right(known_ends, shared), bisect_right(ends, shared)
    best, best_at = 0, (0, 0)
    old, new = cut, 0
    while old < stop_old and new < stop_new:
        run, most = 0, min(stop_old - old, stop_new - new)
        while run < most and known_ids[old + run] == ids[new + run] and known_ends[old + run] == ends[new + run]:
            run += 1
        if run > best:
            best, best_at = run, (old, new)
        if run:
            old, new = old + run, new + run
        elif known_ends[old] < ends[new]:
            old += 1
        elif known_ends[old] > ends[new]:
            new += 1
        else:
            old, new = old + 1, new + 1
    return best, *best_at


class Neutraliser:
    """Breaks text that spells a control token, so that what users, tools and documents write cannot become one.

    words: what else it breaks, though it may be several tokens.
    """

    def __init__(self, encoder: Encoder, words: Collection[str] = ()) -> None:
        ids = {text: token_id for token_id, text in encoder.control.items() if len(text) > 1}
        texts = sorted({*ids, *words}, key=len, reverse=True)
        folds = any(number in encoder.encode(f"a{text.swapcase()}a")[0] for text, number in ids.items())  # a lower-casing normaliser
        flags = re.IGNORECASE if folds else 0
        self._stems = () if folds else tuple({text[:2] for text in texts})
        self._any = re.compile("|".join(map(re.escape, texts)) or "(?!)", flags)
        self._breaker = self._choose(encoder, texts, set(encoder.control))

    def __call__(self, text: str) -> str:
        if self._stems and not any(stem in text for stem in self._stems):
            return text  # the usual case, at memchr's speed
        return self._broken(text, self._breaker)

    def _broken(self, text: str, breaker: str) -> str:
        while (match := self._any.search(text)) is not None:  # breaking one token may lay bare another inside it
            cut = match.start() + 1
            text = text[:cut] + breaker + self._any.sub(lambda found: found[0][0] + breaker + found[0][1:], text[cut:])
        return text

    def _choose(self, encoder: Encoder, texts: Sequence[str], control: set[int]) -> str:
        unknown = getattr(encoder._tokenizer, "unk_token_id", None)  # [UNK] is special and may stand for the breaker itself
        sample = "".join(f"a{text}a" for text in texts)
        for breaker in BREAKERS:
            if any(breaker in text for text in texts):
                continue
            if not (set(encoder.encode(self._broken(sample, breaker))[0]) & control) - {unknown}:
                return breaker
        raise MessageError(
            f"no way found to neutralise the special tokens of this tokenizer ({list(texts)[:8]!r} ...): use rendering='stock'"
        )
