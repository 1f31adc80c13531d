"""One request: `Asked`, fixed before the device sees it, and `Running`, the state of it on the device. Computes nothing."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal, TypedDict

import numpy as np
import torch

from .answer.expected import Expected
from .answer.parser import AnswerParser
from .errors import AgentCacheError, ConfigError, ContextOverflowError, MessageError
from .events import Events
from .kv import Sequence
from .model.loading import known_ids
from .model.sampling import Sampler, TextStream
from .plan import Plan
from .receipt import Account, Receipt
from .runner import StockSequence, Work
from .store.deletion_log import Moment
from .store.entry import Entry, Match
from .store.keys import Ids, Scope, as_ids
from .types import FinishReason, Grade, Layout, Logprob, Reuse, Sampling

if TYPE_CHECKING:  # of a request with a constraint, an adapter or repeated text, or over a store on disk
    from .answer.guide import Guide
    from .attached_ranges import AttachedRanges
    from .model.adapters import Adapter
    from .model.hf import HFModel
    from .store.page_prefetch import PagePrefetch

Ended = AgentCacheError | FinishReason | None  # the error or the reason with which a request ends; None: it goes on

RENEWALS = 5  # a request begins anew so often because weights changed


class Callbacks(TypedDict, total=False):
    """Functions of the caller that a request calls while it runs, and what is to be found out about it."""

    on_progress: Callable[[int, int], None] | None
    on_logits: Callable[[torch.Tensor], None] | None
    diagnose: Literal["", "routes"]


def check_callbacks(callbacks: Callbacks) -> Callbacks:
    """The callbacks; TypeError, as of any call, for what is none: it names the place of a misplaced setting."""
    for name, value in callbacks.items():
        if name not in Callbacks.__annotations__:
            way = f"pass sampling=Sampling({name}={value!r:.50})"
            if name not in Sampling.__dataclass_fields__:
                from .foreign_settings import did_you_mean

                way = f"docs/configure.md has all{did_you_mean([name], [*Sampling.__dataclass_fields__, *Callbacks.__annotations__])}"
            raise TypeError(f"{name}={value!r:.200}: a request has no such option; {way}")
    return callbacks


@dataclass(frozen=True, slots=True, eq=False)
class Asked:
    """The request as the caller made it."""

    layout: Layout
    namespace: str
    sampling: Sampling
    # ids that end a completion
    stop_ids: frozenset[int]
    # arrival, by the store's clock: tokens deleted since are not cached
    received: Moment
    # form of the completion; None: there is none
    expected: Expected | None = None
    reuse: Reuse = "exact"
    # the caller's name for this turn of the conversation
    turn: str = ""
    # fill the prompt, pin its pages and end
    fill_only: bool = False
    # None: the base; it acts on tokens from position acts_from on
    adapter: Adapter | None = None
    acts_from: int = 0
    on_progress: Callable[[int, int], None] | None = None
    on_logits: Callable[[torch.Tensor], None] | None = None
    diagnose: Literal["", "routes"] = ""

    def __post_init__(self) -> None:
        if not isinstance(self.turn, str):
            raise ConfigError(f"turn={self.turn!r:.200}: must be a text that names this turn of its conversation")
        if self.diagnose not in ("", "routes"):
            raise ConfigError(f"diagnose={self.diagnose!r:.200}: can be 'routes', those of a mixture of experts")

    @property
    def prompt_tokens(self) -> int:
        """Length of the prompt."""
        return len(self.layout.ids)


class TokenIds:
    """The ids of one sequence, the prompt's and then the completion's: a list for samplers, an array for the store."""

    def __init__(self, prompt: Seq[int]) -> None:
        self.all = list(prompt)
        self._array = as_ids(())

    def __len__(self) -> int:
        return len(self.all)

    def append(self, token: int) -> None:
        """Add the token that was decoded."""
        self.all.append(token)

    def array(self, count: int | None = None) -> Ids:
        """Return the first `count` ids (by default all) as an array. Each is converted once: a list of 37k ids takes a millisecond."""
        count = len(self.all) if count is None else count
        if (known := len(self._array)) < count:
            self._array = np.concatenate([self._array, as_ids(self.all[known:])])
        return self._array[:count]


@dataclass(slots=True)
class Decoding:
    """The state of one completion: how its next token is chosen, and the text so far."""

    sampler: Sampler
    text: TextStream
    # the constraint, as far as the completion has followed it
    guide: Guide | None = None
    # ids that are decoded instead of sampled ones
    forced: deque[int] = field(default_factory=deque)
    # one for each token, where the sampling asks for them
    logprobs: list[Logprob] = field(default_factory=list)
    splice_key: bytes = b""  # the name under which later processes find its ids


@dataclass(slots=True)
class Provenance:
    """Origin of a sequence's keys and values."""

    # digest of the weights
    fingerprint: str
    # when the oldest page was made that the sequence is attached to, by time.time()
    made: float
    # digests of all kernels that had a part in it
    numerics: set[str] = field(default_factory=set)
    # whether the weights were those of the fingerprint at the last check
    weights_hold: bool = True
    # whether a check found them so, and no forward ran since
    weights_checked: bool = False

    def attach(self, entries: Iterable[Entry]) -> None:
        """Add attached pages: a deletion of one of them deletes everything computed after it."""
        self.made = min([self.made, *(entry.made for entry in entries)])


@dataclass(slots=True, eq=False)
class Running:
    """The state of one request on the device. Its one thread owns everything but the events."""

    asked: Asked
    account: Account
    ids: TokenIds
    decoding: Decoding
    provenance: Provenance
    events: Events = field(default_factory=Events)
    # repeated text from other positions, where the caller consents to it
    ranges: AttachedRanges | None = None
    # -- waiting
    # the prompt's pages on their way from disk; prefetch_asked: whether the store was asked for one
    prefetch: PagePrefetch | None = None
    prefetch_asked: bool = False
    # the store's number of changes when the prompt's cached tokens were last counted, and their count
    peeked: tuple[int, int] = (-1, 0)
    # rounds in a row in which others were filled instead
    skipped: int = 0
    # how often the request began anew because weights changed
    renewals: int = 0
    # -- on the device
    scope: Scope | None = None
    sequence: Sequence | StockSequence | None = None
    plan: Plan | None = None
    # prefixes that the sequence took layers from; suspects: those whose continuation was not finite, computed now without reuse
    attached: tuple[Match, ...] = ()
    suspects: tuple[Match, ...] = ()
    # tokens of this sequence that the store has admitted or served
    admitted_tokens: int = 0
    # whether every prompt token is computed and the first choice made
    filled: bool = False
    # pages pinned, of a prompt that is only filled
    pinned_pages: int = 0

    @property
    def receipt(self) -> Receipt:
        """The account so far, to read."""
        return self.account.receipt

    @property
    def weights_unstable(self) -> bool:
        """True if weights changed so often that the request is answered without reuse."""
        return self.renewals > RENEWALS

    @property
    def covered_tokens(self) -> int:
        """Number of tokens whose pages its scope holds: those before an Activated LoRA acts are the base's, later ones are not kept."""
        adapter = self.asked.adapter
        return self.asked.acts_from if adapter is not None and adapter.invocation else len(self.ids)

    @property
    def covered_ids(self) -> Ids:
        """The ids to look up: of covered tokens, and one more, since a lookup leaves out the last."""
        return self.ids.array(min(len(self.ids), self.covered_tokens + 1))

    @property
    def completion_tokens(self) -> int:
        """Number of decoded tokens."""
        return len(self.ids) - self.asked.prompt_tokens

    @property
    def bound(self) -> str:
        """Name the largest length of the completion, and the way out."""
        most, context = self.asked.sampling.max_tokens, self.asked.sampling.context_tokens
        if self.asked.prompt_tokens + most == context:
            return f"the context of {context} tokens: shorten the prompt"
        return f"max_tokens={most}: raise it"

    @property
    def cut_by(self) -> str:
        """Name what ended the completion, if not the model; "" if the model did."""
        if self.receipt.finish_reason == "length":
            return f"at {self.bound}"
        return "at a stop string" if self.decoding.text.stopped else ""

    def parser(self) -> AnswerParser:
        """Return a new parser of the completion."""
        assert self.asked.expected is not None
        return self.asked.expected.parser(self.asked.layout.ids, self.asked.turn)

    @property
    def remaining(self) -> int:
        """Tokens still to be run before the next one can be chosen."""
        return len(self.ids) - (self.sequence.length + self.sequence.ahead_tokens if self.sequence else 0)

    @property
    def grade(self) -> Grade:
        """Grade of the sequence: how near its keys and values are to computed ones."""
        if self.ranges is not None and self.ranges.scope is not None:
            return self.ranges.scope.precision
        return self.scope.precision if self.scope else "exact"

    @property
    def numerics(self) -> frozenset[str]:
        """Digests of all kernels that had a part in the sequence, those of attached segments included."""
        return frozenset(self.provenance.numerics) | (self.ranges.numerics if self.ranges else frozenset())

    @property
    def received(self) -> Moment:
        """When the request came, or when the oldest page was made that it is attached to."""
        return self.asked.received._replace(made=self.provenance.made)

    def work(self, count: int, drafts: Seq[int] = ()) -> Work:
        """Return the next `count` tokens to run, at most those that remain; with logits only after the last one, and drafts after it."""
        assert self.sequence is not None
        pieces = self.sequence.pieces(min(count, self.remaining) + len(drafts))
        known = [*self.ids.all, *drafts] if drafts else self.ids.all
        ids = [token for piece in pieces for token in known[piece.start : piece.start + piece.count]]
        regime, weights = (self.scope.regime, self.scope.weights) if self.scope else ("", getattr(self.sequence, "fingerprint", ""))
        weights = "" if self.asked.reuse == "off" else weights  # it keeps nothing, and goes on under whatever weights there are
        wanted = len(ids) == self.remaining + len(drafts) and not self.asked.fill_only
        return Work(self.sequence, ids, regime, wanted, weights, pieces, len(drafts))


def fit_sampling(sampling: Sampling | None, layout: Layout, model: HFModel) -> Sampling:
    """Settings with the context's length, and max_tokens of the room that a prompt leaves in it. ContextOverflowError: it leaves none.
    MessageError: the prompt is empty. ConfigError: these are no settings, or ids of another model's tokenizer."""
    sampling = Sampling() if sampling is None else sampling
    if not isinstance(sampling, Sampling):
        raise ConfigError(f"sampling={sampling!r:.200}: must be a Sampling, such as Sampling(max_tokens=64)")
    prompt_tokens, context_tokens, asked = len(layout.ids), model.context_tokens, sampling.context_tokens
    if not layout.ids:
        raise MessageError(f"the prompt {layout.text!r:.100} has no tokens: the tokenizer leaves out all of it")
    if (largest := max(layout.ids)) >= (known := known_ids(model.model, model.vocab)):  # of now: embeddings may have been resized
        raise ConfigError(f"the prompt has id {largest!r}, the model has {known!r} ids: pass the tokenizer that belongs to it")
    context = context_tokens if asked is None else min(asked, context_tokens)
    if prompt_tokens + 1 > context:
        raise ContextOverflowError(prompt_tokens, context, 1, f"context_tokens={asked!r}" if context == asked else "")
    return replace(sampling, max_tokens=min(sampling.max_tokens, context - prompt_tokens), context_tokens=context)
