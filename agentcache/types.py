"""The values that cross borders: pure, frozen, without torch. Knows nothing of models, stores or templates.

Counts end in `_tokens`, sizes in `_bytes`, times in `_ms`. Intervals are half open: [start, stop).
"""

from __future__ import annotations

import datetime
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from enum import Enum
from typing import Any, Literal, get_args

from .errors import ConfigError, shown

Role = Literal["system", "user", "assistant", "tool"]
ToolOrder = Literal["given", "sorted", "sticky"]
Rendering = Literal["canonical", "stock"]
Reuse = Literal["exact", "lossy", "approximate", "off"]
Precision = Literal["exact", "int8", "int4"]
Grade = Literal["exact", "int8", "int4", "approximate"]  # how near cached keys and values are to computed ones
LayoutMode = Literal["enforce", "warn", "off"]
FinishReason = Literal["stop", "length", "tool_calls", "cancelled"]


def check_reuse(reuse: Reuse) -> Reuse:
    """The value, if it is one of them; else ConfigError."""
    if reuse not in get_args(Reuse):
        raise ConfigError(f"reuse={reuse!r}: must be one of {', '.join(map(repr, get_args(Reuse)))}")
    return reuse


def check_name(setting: str, value: object) -> None:
    """Refuse a value that cannot name a namespace or a tool group: ConfigError."""
    if not isinstance(value, str) or any("\ud800" <= char <= "\udfff" for char in value):
        raise ConfigError(f"{setting}={shown(value)}: must be a string that UTF-8 can write")


PAGE_TOKENS = 512  # one page: the key block of the attention loop, one matrix product; here, so that it is known without torch


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One call of a tool inside an assistant message; `arguments` is the parsed object, never its JSON text."""

    name: str
    arguments: Mapping[str, Any]
    id: str | None = None


@dataclass(frozen=True, slots=True)
class Message:
    """One turn. `tool_calls` only on assistant turns, `tool_call_id` only on tool turns, `name` on these and on user turns."""

    role: Role
    content: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None
    name: str | None = None
    reasoning: str | None = None


@dataclass(frozen=True, slots=True)
class Tool:
    """A function the model may call; `parameters` is a JSON schema of type object."""

    name: str
    description: str = ""
    parameters: Mapping[str, Any] = field(default_factory=lambda: {"type": "object", "properties": {}})


SpanKind = Literal["system", "tools", "turn", "volatile", "generation", "text"]


@dataclass(frozen=True, slots=True)
class Span:
    """A named run [start, stop) of prompt tokens."""

    kind: SpanKind
    start: int
    stop: int
    message: int | None = None  # index of the message that it shows


@dataclass(frozen=True, slots=True)
class Move:
    """Declared volatile text, and its new place."""

    message: int | None  # the message where it stood; None: the request brought it
    start: int  # characters [start, stop) of that message's text
    stop: int
    by: str  # its declaration: "marker", "cache_control", "rule" or "volatile"
    to: Literal["tail", "turn", "stays"]  # "tail": after everything, for this request only; "turn": after the last user message
    role: Role  # the role that says it now
    why: str = ""  # the reason, for text that stays


@dataclass(frozen=True, slots=True)
class Missed:
    """The cause that a prompt did not continue the one before it, in the words of `agentcache lint`. Holds no text of them."""

    cause: str  # such as "clock", "changed tool set", "edited history"
    writer: str  # of the first differing token, such as "system" or a tool's name
    token: int  # place of the first difference, in tokens
    char: int  # the same in characters
    cost_tokens: int  # tokens of the earlier prompt that were computed again
    fix: str  # the way out, in words


@dataclass(frozen=True, slots=True)
class LayoutOptions:
    """Settings for text that is declared volatile, and for the chat template. Undeclared text never moves."""

    mode: LayoutMode = "enforce"  # "enforce" moves volatile text to the tail, "warn" leaves it and the receipt says so, "off" leaves it
    rules: str | os.PathLike[str] | None = None  # a layout.toml whose patterns declare text of the system prompt
    allow_demote: bool = False  # a user message may say it where the template has no system text at the tail
    keep: bool = False  # put it after the last user message, where it stays while that is answered
    # open the last user message with it; a name: as messages of that name, before the last turn; None: as the tokenizer's config says
    ahead: bool | str | None = None
    repairs: tuple[str, ...] = ()  # names of changes to the chat template, see docs/layout.md
    date: str | None = None  # the day, as 2026-11-21, for a template that prints it; None: the clock's

    def __post_init__(self) -> None:
        if isinstance(self.repairs, str):
            raise ConfigError(f"repairs={self.repairs!r}: give a tuple of names")
        try:
            datetime.date.fromisoformat(self.date or "2026-01-01")
        except (TypeError, ValueError) as error:
            raise ConfigError(f"date={self.date!r}: give a day as 2026-11-21") from error
        if self.mode not in ("enforce", "warn", "off"):
            raise ConfigError(f"layout mode={self.mode!r}: must be 'enforce', 'warn' or 'off'")


@dataclass(frozen=True, slots=True)
class Layout:
    """A rendered prompt: token ids, and named spans that cover [0, len(ids)) in order, without gaps."""

    ids: Sequence[int]
    spans: tuple[Span, ...]
    text: str
    prefix_tokens: int = 0  # length of the stable part, system and tools: the natural end of a tool group
    differences: tuple[str, ...] = ()  # each difference from the tokenizer's own `apply_chat_template`, in words; empty: stock
    spliced_tokens: int = 0  # the model's own generated ids, put back verbatim
    tokenised_chars: int = 0  # characters that went through the tokenizer for this prompt; the rest was remembered
    moves: tuple[Move, ...] = ()  # of volatile text
    ephemeral_tokens: int = 0  # the last ids, from the start of text for this prompt only; no later prompt shares them


class Reason(str, Enum):
    """The reason that tokens were not reused, or not as near to exact as they could be. words: the same for people."""

    words: str

    def __new__(cls, value: str, words: str) -> Reason:
        reason = str.__new__(cls, value)
        reason._value_, reason.words = value, words
        return reason

    REUSE_OFF = "REUSE_OFF", "the caller asked for no reuse"
    COLD = "COLD", "nothing of this prompt was known"
    DIVERGED = "DIVERGED", "known up to here, other tokens from here on"
    LAST_TOKEN = "LAST_TOKEN", "the last prompt token is always computed: its logits are needed"
    EVICTED = "EVICTED", "cached once, then dropped for the byte budget"
    DELETED = "DELETED", "cached once, then deleted on purpose: `Engine.forget`, `agentcache prune`"
    FINGERPRINT = "FINGERPRINT", "cached under other weights, config or versions"
    NUMERICS = "NUMERICS", "exact, but computed by kernels that round differently: not bitwise"
    LAYER_KIND = "LAYER_KIND", "the model has layers whose state cannot be paged"
    CHECKPOINT = "CHECKPOINT", "known, but after the last checkpoint of recurrent layers"
    ROPE_REGIME = "ROPE_REGIME", "rotary frequencies change with the length of this prompt"
    NOT_ROW_PURE = "NOT_ROW_PURE", "kernels here depend on the batch: tokens are promised, bits are not"
    APPROXIMATE = "APPROXIMATE", "not lent to an exact request"
    BAD_BLOB = "BAD_BLOB", "failed verification"
    SLOW_DISK = "SLOW_DISK", "reading it would take longer than computing it"
    LOSSY = "LOSSY", "stored with fewer bits than computed: not lent to an exact request"
    NON_FINITE = "NON_FINITE", "a computation produced NaN or infinity and was not kept"
    PROBE = "PROBE", "a segment's recomputed head differs too much from its stored one"
    UNSURE = "UNSURE", "a choice after moved text was closer than the calibrated margin: made again with everything computed"
    ADAPTER = "ADAPTER", "the adapter computes these tokens, or their upper layers, otherwise than what is cached"
    POLICY = "POLICY", "a rule of the policy does not allow this reuse"
    DRIFT = "DRIFT", "segment reuse is switched off: sampled answers drifted beyond the calibrated bound"

    __str__ = str.__str__


OF_BITS = (Reason.APPROXIMATE, Reason.LOSSY, Reason.NUMERICS, Reason.NOT_ROW_PURE)  # refusals that say how near a prompt is to exact


@dataclass(frozen=True, slots=True)
class Segment:
    """Prompt tokens [start, stop) whose KV was taken from `shift` positions before, after other text."""

    start: int
    stop: int
    shift: int
    whole_tokens: int  # attached in all layers
    resumed_tokens: int  # attached below some layer, computed above
    halo_tokens: int  # computed again
    precision: Precision = "exact"  # of the stored pages
    adapter: str = ""  # digest of the one that computed them


@dataclass(frozen=True, slots=True)
class Refusal:
    """Prompt tokens [start, stop) that were not reused, and why."""

    reason: Reason
    start: int
    stop: int
    detail: str = ""


def _whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _finite(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


@dataclass(frozen=True, slots=True)
class Sampling:
    """Settings of decoding, and of its end."""

    max_tokens: int = 256  # of the completion
    temperature: float = 0.0  # 0: greedy
    top_p: float = 1.0  # share of probability that is drawn from; 1: all; 0: the likeliest token
    top_k: int = 0  # tokens that are drawn from; 0, and -1 as in vLLM: all
    min_p: float = 0.0  # tokens below this share of the likeliest are left out
    repetition_penalty: float = 1.0  # 1: none
    seed: int | None = None  # the same seed draws the same completion
    stop: tuple[str, ...] = ()  # texts that end the completion
    forced: tuple[int, ...] | str = ()  # ids, or text without special tokens, decoded before sampling begins: replays use it
    draft_tokens: int = 7  # the most that are guessed from earlier text and computed along with a token; 0: none
    ignore_eos: bool = False  # only max_tokens and stop end the completion
    logprobs: int | None = None  # log-probabilities of the completion's tokens, with so many of the likeliest; None: no account
    context_tokens: int | None = None  # the most that prompt and completion have together, below the model's context

    def __post_init__(self) -> None:
        def refuse(name: str, rule: str) -> None:
            raise ConfigError(f"{name}={getattr(self, name)!r}: must be {rule}")

        if not _whole(self.max_tokens) or self.max_tokens < 1:
            refuse("max_tokens", "an integer of at least 1; a large one ends where the context does")
        if not _finite(self.temperature) or self.temperature < 0.0:
            refuse("temperature", "0 (greedy) or a finite positive number")
        if not _finite(self.top_p) or not 0.0 <= self.top_p <= 1.0:
            refuse("top_p", "in [0, 1]")
        if not _whole(self.top_k) or self.top_k < -1:
            refuse("top_k", "0 or -1 (off) or a positive integer")
        if not _finite(self.min_p) or not 0.0 <= self.min_p < 1.0:
            refuse("min_p", "in [0, 1)")
        if not _finite(self.repetition_penalty) or self.repetition_penalty <= 0.0:
            refuse("repetition_penalty", "positive; 1.0 is off")
        if self.seed is not None and not (_whole(self.seed) and 0 <= self.seed < 1 << 64):
            refuse("seed", "None or an integer in [0, 2**64)")
        if isinstance(self.stop, str) or not all(isinstance(text, str) and text for text in self.stop):
            refuse("stop", "a tuple of non-empty strings")
        if not isinstance(self.forced, str) and not all(_whole(token) for token in self.forced):
            refuse("forced", "a text or token ids")
        if not _whole(self.draft_tokens) or self.draft_tokens < 0:
            refuse("draft_tokens", "0 (none) or a positive integer")
        if self.logprobs is not None and not (_whole(self.logprobs) and self.logprobs >= 0):
            refuse("logprobs", "None or how many of the likeliest tokens to tell, 0 for the chosen one alone")
        if self.context_tokens is not None and not (_whole(self.context_tokens) and self.context_tokens > 0):
            refuse("context_tokens", "None or an integer of at least 1")


@dataclass(frozen=True, slots=True)
class Logprob:
    """The log-probability of a token, in nats, by the model's own distribution: before temperature, penalties and constraints."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()  # the likeliest ids with theirs, best first


@dataclass(frozen=True, slots=True)
class Constraint:
    """The form of a completion, enforced token by token. Without one decoding is free.

    A call names one of the tools, with arguments valid against its schema. With tools and "auto" a completion is either text of the form or
    calls. Objects that name their properties get no others unless `additionalProperties` says so.
    """

    tool_choice: str = "auto"  # "auto" (text or calls), "none", "any" (calls only), or the name of one tool, called once
    allowed: tuple[str, ...] | None = None  # tools that may be called; the others stay in the prompt, which does not change
    parallel: bool = True  # several calls are allowed
    schema: Mapping[str, Any] | bool | None = None  # the text is JSON of this schema; True: any object
    regex: str | None = None  # the text matches it
    grammar: str | None = None  # the text follows it: Lark, as llguidance reads it

    def __post_init__(self) -> None:
        if not isinstance(self.tool_choice, str) or not self.tool_choice:
            raise ConfigError(f"tool_choice={self.tool_choice!r}: must be 'auto', 'none', 'any' or the name of a tool")
        if isinstance(self.allowed, str) or not all(isinstance(name, str) for name in self.allowed or ()):
            raise ConfigError(f"allowed={self.allowed!r}: must be None or a tuple of tool names")
        if self.schema is not None and self.schema is not True and not isinstance(self.schema, Mapping):
            raise ConfigError(f"schema={self.schema!r:.200}: must be a JSON schema, or True for any JSON object")
        for name in ("regex", "grammar"):
            if not isinstance(getattr(self, name), (str, type(None))):
                raise ConfigError(f"{name}={getattr(self, name)!r:.200}: must be a string")
        given = [name for name in ("schema", "regex", "grammar") if getattr(self, name) is not None]
        if len(given) > 1:
            raise ConfigError(f"{' and '.join(given)}: a completion has one form, choose one")
        if given and self.calls:
            raise ConfigError(f"{given[0]} and tool_choice={self.tool_choice!r}: a completion that must be a call has no text of its own")

    @property
    def structured(self) -> bool:
        """True if text has a prescribed form."""
        return self.schema is not None or self.regex is not None or self.grammar is not None

    @property
    def calls(self) -> bool:
        """True if a completion must be a call."""
        return self.tool_choice not in ("auto", "none")


@dataclass(frozen=True, slots=True)
class Probe:
    """Find of a request with this prompt, if it came now."""

    prompt_tokens: int
    # of its stable prefix: system prompt and tools
    prefix_tokens: int
    # attached from memory
    memory_tokens: int
    # read from disk, after those; of recurrent layers at most so many: their checkpoints are found by reading
    disk_tokens: int
    # left to compute
    computed_tokens: int
    # why no more is found
    reason: str
    detail: str

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return asdict(self)


PASSAGES = "{passages}"  # stands in a message for the passages that `Engine.arrange` orders


@dataclass(frozen=True, slots=True)
class Forgotten:
    """Pages and texts that `forget` deleted."""

    memory_pages: int = 0  # in this engine's memory
    memory_bytes: int = 0
    pages: int = 0  # on disk
    bytes: int = 0
    groups: tuple[str, ...] = ()  # names of tool groups
    splices: int = 0  # messages whose own ids were on disk


@dataclass(frozen=True, slots=True)
class StoreOptions:
    """Settings of the store on disk."""

    folder: str | os.PathLike[str] | None = None  # None: AGENTCACHE_DIR, else the user's cache folder
    disk_bytes: int = 20 << 30  # at most; turns go first, tool groups last
    write_bytes_per_hour: int = 64 << 30  # at most; more is not written
    precision: Precision = "exact"  # "int8" and "int4" save bytes, and serve reuse="lossy" only
    turns: Precision = "exact"  # of sessions that are idle, on disk; other bits serve reuse="lossy" only, and "int4" asks for a calibration
    refuse_slow: bool = True  # compute tokens whose pages take longer to read
    overwrite: bool = False  # files of deleted pages, before they are unlinked
    check_one_in: int = 64  # of so many exact hits from disk one is recomputed in idle time and compared; 0: none
    encryption_key: bytes | None = field(default=None, repr=False)  # 32 bytes; None: AGENTCACHE_KEY, else no encryption

    def __post_init__(self) -> None:
        if not isinstance(self.folder, (str, os.PathLike, type(None))) or self.folder == "":  # that would be the current folder
            raise ConfigError(f"store={self.folder!r:.100}: must be a folder, StoreOptions(folder, ...), or None for no disk")
        for name in ("refuse_slow", "overwrite"):
            if not isinstance(value := getattr(self, name), bool):
                raise ConfigError(f"{name}={value!r}: must be True or False")
        for name in ("disk_bytes", "write_bytes_per_hour", "check_one_in"):
            if not _whole(value := getattr(self, name)) or value < 0:
                raise ConfigError(f"{name}={value!r}: must be a whole number of at least 0")
        for name in ("precision", "turns"):
            if getattr(self, name) not in ("exact", "int8", "int4"):
                raise ConfigError(f"{name}={getattr(self, name)!r}: must be 'exact', 'int8' or 'int4'")
        if self.encryption_key is not None and (not isinstance(self.encryption_key, bytes) or len(self.encryption_key) != 32):
            raise ConfigError("encryption_key: must be 32 bytes")
