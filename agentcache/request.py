"""One request on its way through the device, and the events its caller receives. Knows nothing of models and stores."""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

import torch

from .calibration import Calibration
from .errors import AgentCacheError
from .kv import Sequence
from .layout.windows import Window
from .model.grammar import Guide
from .model.response import ResponseStream
from .model.sampling import Sampler, TextStream
from .plan import Plan
from .receipt import Receipt
from .runner import Source, StockSequence, Work
from .store.deletion import Moment
from .store.entry import Entry, Match
from .store.keys import Ids, Scope, as_ids
from .store.page_prefetch import PagePrefetch
from .store.segment_prefetch import SegmentPrefetch
from .types import Logprob, Sampling


@dataclass(frozen=True, slots=True)
class Chunk:
    """Text that has become certain, and the ids decoded since the last chunk."""

    text: str
    ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Progress:
    """How many of the prompt's tokens are filled."""

    done: int
    total: int


class Done:
    """Marks the end of a request's events."""


Event = Chunk | Progress | Done | AgentCacheError


class Events:
    """The events of one request, in order: put by the device's thread, taken by its caller, who may ask to be woken instead of waiting."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._wake: Callable[[], None] | None = None

    def put(self, event: Event) -> None:
        """Add an event, and wake who listens."""
        self._queue.put(event)
        if (wake := self._wake) is not None:
            wake()

    def get(self) -> Event:
        """The next event; waits for it."""
        return self._queue.get()

    def take(self) -> Event | None:
        """The next event, None if there is none yet."""
        try:
            return self._queue.get_nowait()
        except queue.Empty:
            return None

    def listen(self, wake: Callable[[], None] | None) -> None:
        """Call `wake`, in the device's thread, behind each event that comes. It must return at once and raise nothing."""
        self._wake = wake


@dataclass(slots=True, eq=False)
class Request:
    """One request on its way. `ids` grow as tokens are decoded; `events` carry progress and chunks, then Done or the error.

    prefix_tokens: length of the stable part. lossy: pages stored with fewer bits may serve it, too. fetch: its pages' way from disk.
    calibration: segments may serve it, repaired like this; `sources` are theirs, `windows` what it
    says, `bring` the way of such pages from disk, `note` what will be
    found by others. near, near_kept: among whose pages what is behind them is
    kept, and how much is. fill_only: fill the prompt, pin its pages (`pinned` of them) and end. kept: tokens of this sequence that the
    store has or had.
    turn: the caller's name for this turn of the conversation. guide: what its completion is held to. formed: all of it has a prescribed
    form. tools: names that may be called, None if no text is a call. opened: the prompt begins a thought.
    reading: makes the reader of its answer that the tokenizer's response template asks for, None if our own parsers read it.
    received: when, or when the oldest page that it is attached to was made: what was deleted since is not kept.
    attached: the prefix it started from. suspects: the one with which it was not finite: it is computed without reuse now.
    numerics: digests of all kernels that had a part in it. skipped: rounds in a row in which others were filled instead.
    renewals: how often it began anew because weights changed. stands: weights are those of its
    fingerprint, as far as anybody has looked.
    logprobs: of its completion's tokens, where its sampling asks for them.
    """

    ids: list[int]
    namespace: str
    fingerprint: str
    sampling: Sampling
    sampler: Sampler
    text: TextStream
    stop_ids: frozenset[int]
    receipt: Receipt
    received: Moment = Moment(0, 0.0)
    prefix_tokens: int = 0
    reuse: bool = True
    lossy: bool = False
    calibration: Calibration | None = None
    fill_only: bool = False
    turn: str = ""
    guide: Guide | None = None
    formed: bool = False
    tools: frozenset[str] | None = frozenset()
    opened: bool = False
    reading: Callable[[], ResponseStream] | None = None
    forced: deque[int] = field(default_factory=deque)
    on_progress: Callable[[int, int], None] | None = None
    on_logits: Callable[[torch.Tensor], None] | None = None
    events: Events = field(default_factory=Events)
    cancelled: threading.Event = field(default_factory=threading.Event)
    called: float = field(default_factory=time.perf_counter)
    # while it runs
    sequence: Sequence | StockSequence | None = None
    scope: Scope | None = None
    looked: bool = False
    fetch: PagePrefetch | None = None
    plan: Plan | None = None
    prompt: int = 0
    peeked: tuple[int, int] = (-1, 0)
    kept: int = 0
    near: Scope | None = None
    near_kept: int = 0
    sources: list[Source] = field(default_factory=list)
    windows: Seq[Window] = ()
    bring: SegmentPrefetch | None = None
    note: Seq[Window] = ()
    pinned: int = 0
    attached: Match | None = None
    suspects: Match | None = None
    numerics: set[str] = field(default_factory=set)
    logprobs: list[Logprob] = field(default_factory=list)
    skipped: int = 0
    renewals: int = 0
    stands: bool = True
    started: float = 0.0
    first: float = 0.0
    _array: Ids | None = None

    @property
    def remaining(self) -> int:
        """Tokens still to be run before the next one can be chosen."""
        return len(self.ids) - (self.sequence.length + self.sequence.ahead_tokens if self.sequence else 0)

    @property
    def filling(self) -> bool:
        """Whether more than the token chosen last is to be run."""
        return self.first == 0.0 or self.remaining > 1

    def stands_on(self, entries: Iterable[Entry]) -> None:
        """It is attached to these: when one of them has to go, so has what is computed after it."""
        made = min((entry.made for entry in entries), default=self.received.made)
        self.received = self.received._replace(made=min(made, self.received.made))

    def array(self, count: int | None = None) -> Ids:
        """The first `count` ids (by default all) as the store wants them. Converted once: a list of 37k ids takes a millisecond."""
        count = len(self.ids) if count is None else count
        if self._array is None or len(self._array) < count:
            self._array = as_ids(self.ids)
        return self._array[:count]

    def work(self, count: int) -> Work:
        """The next `count` tokens to run, at most what remains; logits only behind the last one."""
        assert self.sequence is not None
        pieces = self.sequence.pieces(min(count, self.remaining))
        ids = [token for piece in pieces for token in self.ids[piece.start : piece.start + piece.count]]
        regime, weights = (self.scope.regime, self.scope.fingerprint) if self.scope else ("", "")
        return Work(self.sequence, ids, regime, len(ids) == self.remaining and not self.fill_only, weights)
