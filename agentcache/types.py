"""The values that cross borders: pure, frozen, without torch. Knows nothing of models, stores or templates.

Counts end in `_tokens`, sizes in `_bytes`, times in `_ms`. Intervals are half open: [start, stop).
"""

from __future__ import annotations

import datetime
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Literal, get_args

from .errors import ConfigError, shown

Role = Literal["system", "user", "assistant", "tool"]
ToolOrder = Literal["given", "sorted", "sticky"]
Rendering = Literal["canonical", "stock"]
Reuse = Literal["exact", "lossy", "approximate", "off"]
Precision = Literal["exact", "int8", "int4"]
Grade = Literal["exact", "int8", "int4", "approximate"]  # how near kept keys and values are to computed ones
LayoutMode = Literal["enforce", "warn", "off"]
FinishReason = Literal["stop", "length", "tool_calls", "cancelled"]


def check_reuse(reuse: Reuse) -> Reuse:
    """The value, if it is one of them; else ConfigError."""
    if reuse not in get_args(Reuse):
        raise ConfigError(f"reuse={reuse!r}: must be one of {', '.join(map(repr, get_args(Reuse)))}")
    return reuse


def check_name(setting: str, value: object) -> None:
    """Refuse what cannot name a namespace or a tool group: ConfigError."""
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
    """A named run [start, stop) of prompt tokens. `message` is the index of the message it shows, if one."""

    kind: SpanKind
    start: int
    stop: int
    message: int | None = None


@dataclass(frozen=True, slots=True)
class Move:
    """Volatile text that was declared, and what became of it.

    message: where it stood, characters [start, stop) of that message's text; None: the request brought it along. by: how it was declared
    ("marker", "cache_control", "rule", "volatile"). to: "tail", behind everything and for this request only; "turn", behind the last user
    message; "stays". role: as whose text it is rendered now. why: of text that stays.
    """

    message: int | None
    start: int
    stop: int
    by: str
    to: Literal["tail", "turn", "stays"]
    role: Role
    why: str = ""


@dataclass(frozen=True, slots=True)
class Missed:
    """Why a prompt did not go on from the one before it in its conversation, as `agentcache lint` says of a log. Holds no text of them.

    cause: such as "clock", "changed tool set", "edited history". writer: who wrote the first differing token, such as "system" or a tool's
    name. token, char: where that is. cost_tokens: what stood in the earlier prompt and had to be computed again. fix: what to do.
    """

    cause: str
    writer: str
    token: int
    char: int
    cost_tokens: int
    fix: str


@dataclass(frozen=True, slots=True)
class LayoutOptions:
    """What becomes of text that is declared volatile. Undeclared text never moves.

    mode: "enforce" moves it to the tail, "warn" leaves it and says so in the receipt, "off" leaves it. rules: a layout.toml whose patterns
    declare text of the system prompt. allow_demote: where the template has no system text at the tail, a user message may say it. keep: put
    it behind the last user message, where it stays while that is answered, instead of behind everything. ahead: open the last user message
    with it instead of ending it, for models that take what ends a request for a part of it; a name: show it as messages of that name, which
    the template writes before the last turn; None: what `volatile_ahead` in the tokenizer's config says. repairs: names of changes to the
    chat template, see docs/layout.md. date: the day, as 2026-11-21, that a template which prints the date is told; None for the clock's.
    """

    mode: LayoutMode = "enforce"
    rules: str | os.PathLike[str] | None = None
    allow_demote: bool = False
    keep: bool = False
    ahead: bool | str | None = None
    repairs: tuple[str, ...] = ()
    date: str | None = None

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
    """One rendered prompt: token ids and named spans that cover [0, len(ids)) in order, without gaps.

    prefix_tokens: length of the stable part (system and tools), the natural end of a tool group.
    differences: in words, each way in which the ids differ from the tokenizer's own `apply_chat_template`; empty = stock.
    spliced_tokens: how many ids are the model's own generated ids put back verbatim.
    tokenised_chars: how many characters went through the tokenizer for this prompt (the rest was remembered).
    moves: what became of text that was declared volatile.
    ephemeral_tokens: how many of the last ids stand behind the start of text that is for this prompt only: no later prompt shares them.
    """

    ids: Sequence[int]
    spans: tuple[Span, ...]
    text: str
    prefix_tokens: int = 0
    differences: tuple[str, ...] = ()
    spliced_tokens: int = 0
    tokenised_chars: int = 0
    moves: tuple[Move, ...] = ()
    ephemeral_tokens: int = 0


class Reason(str, Enum):
    """Why something was not reused, or not reused as well as it could be."""

    REUSE_OFF = "REUSE_OFF"  # the caller asked for no reuse
    COLD = "COLD"  # nothing of this prompt was known
    DIVERGED = "DIVERGED"  # known up to here, other tokens from here on
    LAST_TOKEN = "LAST_TOKEN"  # the last prompt token is always computed: its logits are needed
    EVICTED = "EVICTED"  # was kept, then dropped for the byte budget
    DELETED = "DELETED"  # was kept, then deleted on purpose: `Engine.forget`, `agentcache prune`
    FINGERPRINT = "FINGERPRINT"  # kept under other weights, config or versions
    NUMERICS = "NUMERICS"  # exact, but computed by kernels that round differently: not bitwise
    LAYER_KIND = "LAYER_KIND"  # the model has layers whose state cannot be paged
    ROPE_REGIME = "ROPE_REGIME"  # rotary frequencies change with the length of this prompt
    NOT_ROW_PURE = "NOT_ROW_PURE"  # kernels here depend on the batch: tokens are promised, bits are not
    APPROXIMATE = "APPROXIMATE"  # not lent to an exact request
    BAD_BLOB = "BAD_BLOB"  # failed verification
    SLOW_DISK = "SLOW_DISK"  # reading it would take longer than computing it
    LOSSY = "LOSSY"  # stored with fewer bits than computed: not lent to an exact request
    NON_FINITE = "NON_FINITE"  # a computation produced NaN or infinity and was not kept
    PROBE = "PROBE"  # a segment's recomputed head differs too much from its stored one
    UNSURE = "UNSURE"  # a choice behind moved text was closer than the calibrated margin: made again behind everything computed
    DRIFT = "DRIFT"  # segment reuse is switched off: sampled answers drifted beyond the calibrated bound

    __str__ = str.__str__


OF_BITS = (Reason.APPROXIMATE, Reason.LOSSY, Reason.NUMERICS, Reason.NOT_ROW_PURE)  # refusals that say how near a prompt is to exact


@dataclass(frozen=True, slots=True)
class Segment:
    """Prompt tokens [start, stop) whose KV was taken from `shift` positions before, where they stood behind other text.

    whole_tokens: needed no computing. resumed_tokens: taken below some layer, computed above. halo_tokens: computed again.
    precision: in how many bits they were stored.
    """

    start: int
    stop: int
    shift: int
    whole_tokens: int
    resumed_tokens: int
    halo_tokens: int
    precision: Precision = "exact"


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
    """How the next token is chosen, and when to stop. temperature 0 is greedy.

    `forced` are completion ids (or text, tokenised without special tokens) that are decoded instead of sampled ones, then
    sampling goes on: replays of recorded episodes use it. With `ignore_eos` only max_tokens and `stop` end a completion.
    logprobs: the completion says how likely each of its tokens was, beside so many of the likeliest; None for no such account.
    context_tokens: the most that prompt and completion may have together, where that is less than the model's context.
    """

    max_tokens: int = 256
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    forced: tuple[int, ...] | str = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    context_tokens: int | None = None

    def __post_init__(self) -> None:
        def refuse(name: str, rule: str) -> None:
            raise ConfigError(f"{name}={getattr(self, name)!r}: must be {rule}")

        if not _whole(self.max_tokens) or self.max_tokens < 1:
            refuse("max_tokens", "an integer of at least 1")
        if not _finite(self.temperature) or self.temperature < 0.0:
            refuse("temperature", "0 (greedy) or a finite positive number")
        if not _finite(self.top_p) or not 0.0 < self.top_p <= 1.0:
            refuse("top_p", "in (0, 1]")
        if not _whole(self.top_k) or self.top_k < 0:
            refuse("top_k", "0 (off) or a positive integer")
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
        if self.logprobs is not None and not (_whole(self.logprobs) and self.logprobs >= 0):
            refuse("logprobs", "None or how many of the likeliest tokens to tell, 0 for the chosen one alone")
        if self.context_tokens is not None and not (_whole(self.context_tokens) and self.context_tokens > 0):
            refuse("context_tokens", "None or an integer of at least 1")


@dataclass(frozen=True, slots=True)
class Logprob:
    """How likely a token was, in nats, by the model's own distribution: before temperature, penalties and constraints.

    top: the likeliest ids with theirs, best first.
    """

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Constraint:
    """What a completion may be, enforced token by token. Without one decoding is free.

    tool_choice: "auto" (text or calls), "none", "any" (calls only), or the name of one tool, called once. Whatever is called is one of the
    tools, with arguments valid against its schema. allowed: the tools that may be called; the others stay in the prompt, which does not
    change. parallel: whether more than one call may be made. schema: the text is JSON that it allows, True for any object; regex and
    grammar (Lark, as llguidance reads it) alike. With tools and "auto" a completion is either that text or calls. Objects that name
    their properties get no others unless `additionalProperties` says so.
    """

    tool_choice: str = "auto"
    allowed: tuple[str, ...] | None = None
    parallel: bool = True
    schema: Mapping[str, Any] | bool | None = None
    regex: str | None = None
    grammar: str | None = None

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
        """Whether the text, if there is one, has a prescribed form."""
        return self.schema is not None or self.regex is not None or self.grammar is not None

    @property
    def calls(self) -> bool:
        """Whether a completion must be a call."""
        return self.tool_choice not in ("auto", "none")


@dataclass(frozen=True, slots=True)
class Forgotten:
    """What `forget` deleted. pages, bytes: on disk; memory_pages, memory_bytes: in this engine's memory. groups: names of tool groups.

    splices: messages whose own ids were kept on disk.
    """

    memory_pages: int = 0
    memory_bytes: int = 0
    pages: int = 0
    bytes: int = 0
    groups: tuple[str, ...] = ()
    splices: int = 0


@dataclass(frozen=True, slots=True)
class StoreOptions:
    """Where and how pages are kept on disk.

    folder: None for AGENTCACHE_DIR, else the user's cache folder. disk_bytes: at most so much; turns go first, tool groups last.
    write_bytes_per_hour: what is above is not written. precision: "int8" and "int4" save bytes, and serve reuse="lossy" only.
    refuse_slow: what takes longer to read than to compute is computed.
    check_one_in: every so many exact hits from disk are recomputed in idle time and compared; 0 for never.
    encryption_key: 32 bytes; None for AGENTCACHE_KEY, else no encryption.
    """

    folder: str | os.PathLike[str] | None = None
    disk_bytes: int = 20 << 30
    write_bytes_per_hour: int = 64 << 30
    precision: Precision = "exact"
    refuse_slow: bool = True
    check_one_in: int = 64
    encryption_key: bytes | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        if not isinstance(self.refuse_slow, bool):
            raise ConfigError(f"refuse_slow={self.refuse_slow!r}: must be True or False")
        for name in ("disk_bytes", "write_bytes_per_hour", "check_one_in"):
            value = getattr(self, name)
            if not _whole(value) or value < 0:
                raise ConfigError(f"{name}={value!r}: must be a whole number of at least 0")
        if self.precision not in ("exact", "int8", "int4"):
            raise ConfigError(f"precision={self.precision!r}: must be 'exact', 'int8' or 'int4'")
        if self.encryption_key is not None and (not isinstance(self.encryption_key, bytes) or len(self.encryption_key) != 32):
            raise ConfigError("encryption_key: must be 32 bytes")
