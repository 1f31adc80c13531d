"""What finds repeated text: signatures (MinHash + LSH) against the exact index of runs of ids, on recorded prompts and on edited ones.

Physics: what is attached must be equal token for token, so the exact index misses nothing worth attaching, at the price of having all ids
in memory. Signatures are 5 kB per window and survive on disk; they see text only where a window begins as the kept one did, within some
tokens: a window of 64 that begins d tokens beside it shares (64 - d) / (64 + d) of its shingles, 0.8 at d = 7. Times are of the processor,
so that a busy machine does not show in them.
"""

from __future__ import annotations

import random
import re
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from agentcache.approximate.minhash import MOST, LSHIndex, Proposal, Signature, StoredText
from agentcache.approximate.minhash_index import exact
from agentcache.approximate.ngram_index import repeats
from agentcache.approximate.segment_prefetch import longest_run
from agentcache.approximate.windows import TokenTexts, Window, windows
from agentcache.kv import PAGE_TOKENS, Page
from agentcache.kv_spec import KVSpec
from agentcache.layout import Renderer
from agentcache.store.entry import common
from agentcache.store.keys import Ids, Scope, as_ids
from agentcache.store.memory.prefix_tree import PrefixTree
from agentcache.traces import Episode, texts
from agentcache.types import Layout, Span

from .oracle import Oracle

TAUS = (0.6, 0.7, 0.8, 0.9)
SIZES = (32, 64, 128)
LEAST = 32  # shorter runs are not worth attaching
LONG = 64
STEP_TOKENS = 4096  # the step that is timed: so many tokens, of which
NEW_TOKENS = 200  # so many are new
STEP_MS = 15.0  # may be spent on it
PRECISION = 0.7  # is wanted at tau = 0.8
SPEC = KVSpec(1, 1, 1, torch.float32)  # pages that weigh nothing
SCOPE = Scope("find", "none")
Say = Callable[[str], None]
Intervals = list[tuple[int, int]]


@dataclass(slots=True)
class Sums:
    """Totals over prompts. exact: tokens in equal runs of LEAST (long: LONG) tokens, as the exact index finds them; found: by signatures.

    right: proposals behind which stands an equal run of LEAST tokens, within a window's length of the window; strict: inside both windows.
    """

    windows: int = 0
    asked: int = 0
    exact_tokens: int = 0
    exact_long_tokens: int = 0
    found_tokens: int = 0
    found_long_tokens: int = 0
    proposals: int = 0
    right: int = 0
    strict: int = 0
    find_ms: float = 0.0

    def row(self) -> dict[str, Any]:
        """With the shares; None where there was nothing to find or propose."""
        return {
            **{name: getattr(self, name) for name in self.__slots__},
            "recall": _share(self.found_tokens, self.exact_tokens),
            "recall_long": _share(self.found_long_tokens, self.exact_long_tokens),
            "precision": _share(self.right, self.proposals),
            "precision_strict": _share(self.strict, self.proposals),
        }


def _share(part: float, whole: float) -> float | None:
    return part / whole if whole else None


@dataclass(slots=True)
class Costs:
    """Milliseconds over all prompts, and what they were spent on."""

    new_tokens: int = 0
    exact_ms: float = 0.0
    windows_ms: float = 0.0
    sign_ms: float = 0.0

    def row(self) -> dict[str, Any]:
        """Microseconds per new token."""
        spent = {name[:-3]: getattr(self, name) for name in self.__slots__ if name.endswith("_ms")}
        return {"new_tokens": self.new_tokens, **{f"{name}_us_per_token": 1e3 * ms / max(1, self.new_tokens) for name, ms in spent.items()}}


@dataclass(slots=True)
class Finder:
    """Prompts in the order in which they came, in both indexes; each is asked for before it is kept."""

    size: int
    taus: Sequence[float]
    say: TokenTexts
    tree: PrefixTree = field(default_factory=lambda: PrefixTree(1 << 30))
    prompts: list[Ids] = field(default_factory=list)
    seen: Oracle = field(default_factory=Oracle)
    indexes: dict[float, LSHIndex] = field(init=False)
    sums: dict[float, Sums] = field(init=False)
    costs: Costs = field(default_factory=Costs)

    def __post_init__(self) -> None:
        self.indexes = {tau: LSHIndex(tau) for tau in self.taus}
        self.sums = {tau: Sums() for tau in self.taus}

    def take(self, layout: Layout) -> None:
        """Ask for a prompt, then keep it."""
        ids = as_ids(layout.ids)
        since = self.seen.known(list(layout.ids))
        began = time.thread_time()
        runs = [(run.start, run.stop) for run in repeats(self.tree, SCOPE, ids, since, LEAST)]
        looked = time.thread_time()
        asked = windows(layout, self.say, since, size=self.size, stride=self.size // 2)
        cut = time.thread_time()
        signer = next(iter(self.indexes.values())).signer
        signed = [signer.sign(window) for window in asked]
        done = time.thread_time()
        self.costs.new_tokens += len(ids) - since
        self.costs.exact_ms += (looked - began) * 1e3
        self.costs.windows_ms += (cut - looked) * 1e3
        self.costs.sign_ms += (done - cut) * 1e3
        for tau in self.taus:
            self._ask(tau, ids, since, runs, list(zip(asked, signed, strict=True)))
        self._keep(ids, list(zip(asked, signed, strict=True)))

    def _ask(self, tau: float, ids: Ids, since: int, runs: Intervals, signed: Sequence[tuple[Window, Signature]]) -> None:
        sums, index = self.sums[tau], self.indexes[tau]
        sums.windows += len(signed)
        reached: Intervals = []
        for window, signature in signed:
            began = time.thread_time()
            proposals = index.find(SCOPE, signature, exact(ids, window))
            sums.find_ms += (time.thread_time() - began) * 1e3
            sums.asked += bool(proposals)
            for proposal in proposals:
                sums.proposals += 1
                reached += self._judged(sums, ids, since, window, proposal)
        long = [run for run in runs if run[1] - run[0] >= LONG]
        sums.exact_tokens += _count(runs)
        sums.exact_long_tokens += _count(long)
        sums.found_tokens += _both(runs, reached)
        sums.found_long_tokens += _both(long, reached)

    def _judged(self, sums: Sums, ids: Ids, since: int, window: Window, proposal: Proposal) -> Intervals:
        """The equal run behind a proposal, as far as it goes."""
        kept = self.prompts[proposal.text.page]
        start, stop = proposal.text.slot, proposal.text.slot + proposal.text.tokens
        inside = longest_run(kept[start:stop], ids[window.start : window.stop])[2]
        sums.strict += inside >= min(LEAST, self.size)
        low, first = max(0, window.start - self.size), max(0, start - self.size)
        there, here, run = longest_run(kept[first : stop + self.size], ids[low : min(len(ids) - 1, window.stop + self.size)])
        if run < LEAST:
            return []
        sums.right += 1
        here, there = here + low, there + first
        back = common(kept[:there][::-1], ids[since:here][::-1]) if here > since else 0
        return [(max(since, here - back), here + common(kept[there:], ids[here:-1]))]

    def _keep(self, ids: Ids, signed: Sequence[tuple[Window, Signature]]) -> None:
        for window, signature in signed:
            kept = StoredText(signature, exact(ids, window), b"", len(self.prompts), window.start, window.stop - window.start)
            for index in self.indexes.values():
                index.add(SCOPE, kept)
        self.prompts.append(ids)
        self.seen.add(ids.tolist())
        pages = [Page(SPEC) for _ in range(-(-len(ids) // PAGE_TOKENS))]
        began = time.thread_time()
        self.tree.admit(SCOPE, ids, pages, "none")
        self.costs.exact_ms += (time.thread_time() - began) * 1e3


def _count(intervals: Iterable[tuple[int, int]]) -> int:
    return sum(stop - start for start, stop in intervals)


def _both(runs: Intervals, reached: Intervals) -> int:
    """Tokens of disjoint runs that are reached, however often."""
    found = last = 0
    for start, stop in sorted(set(reached)):
        start, last = max(start, last), max(stop, last)
        found += sum(max(0, min(stop, end) - max(start, begin)) for begin, end in runs)
    return found


# -- recorded prompts --------------------------------------------------------------------------------------------------


def traces(
    families: dict[str, list[Episode]],
    tokenizer: Any,
    *,
    sizes: Sequence[int] = SIZES,
    taus: Sequence[float] = TAUS,
    say: Say = lambda _: None,
) -> list[dict[str, Any]]:
    """All calls of all episodes in order, each family for itself: one row per family, size of windows and tau."""
    rows = []
    spoken = TokenTexts(tokenizer)
    for family, episodes in families.items():
        renderer = Renderer(tokenizer)
        layouts = [renderer.render(call.prompt, call.tools) for episode in episodes for call in episode.calls]
        for size in sizes:
            say(f"{family}: {len(layouts)} prompts, windows of {size}")
            finder = Finder(size, taus, spoken)
            for layout in layouts:
                finder.take(layout)
            for tau in taus:
                head = {"family": family, "window": size, "tau": tau, "prompts": len(layouts)}
                rows.append({**head, **finder.sums[tau].row(), **finder.costs.row()})
    return rows


# -- near duplicates ---------------------------------------------------------------------------------------------------


def _digits(text: str, rng: random.Random) -> str:
    return re.sub(r"\d", lambda _: str(rng.randrange(10)), text)


def _words(share: float) -> Callable[[str, random.Random], str]:
    return lambda text, rng: re.sub(r"[A-Za-z]+", lambda match: "quux" if rng.random() < share else match.group(), text)


EDITS: dict[str, Callable[[str, random.Random], str]] = {
    "verbatim": lambda text, rng: text,
    "case": lambda text, rng: text.upper(),
    "space": lambda text, rng: text.replace(" ", "  "),
    "digits": _digits,
    "words 1 %": _words(0.01),
    "words 2 %": _words(0.02),
    "words 5 %": _words(0.05),
    "words 10 %": _words(0.10),
    "words 20 %": _words(0.20),
    "head cut": lambda text, rng: text[rng.randrange(40, 120) :],
}


def duplicates(
    pieces: Sequence[str], tokenizer: Any, *, sizes: Sequence[int] = SIZES, taus: Sequence[float] = TAUS, seed: int = 0
) -> list[dict[str, Any]]:
    """Each piece is kept behind one text and comes again, edited, behind another: one row per edit, size of windows and tau."""
    rows = []
    spoken = TokenTexts(tokenizer)
    for edit, change in EDITS.items():
        for size in sizes:
            rng, renderer, finder = random.Random(seed), Renderer(tokenizer), Finder(size, taus, spoken)
            for piece in pieces:
                finder.take(renderer.render(f"{_lead(rng)}\n\n{piece}"))
            for tau in taus:  # only what comes again counts
                finder.sums[tau] = Sums()
            for piece in pieces:
                finder.take(renderer.render(f"{_lead(rng)}\n\n{change(piece, rng)}\n"))
            for tau in taus:
                rows.append({"edit": edit, "window": size, "tau": tau, "pieces": len(pieces), **finder.sums[tau].row()})
    return rows


def _lead(rng: random.Random) -> str:
    """Some words that no other lead has in this order."""
    return " ".join(
        f"{rng.choice('bcdfgklmnprst')}{rng.choice('aeiou')}{rng.choice('lmnrst')}{rng.randrange(100)}"
        for _ in range(rng.randrange(20, 60))
    )


def pieces_of(families: dict[str, list[Episode]], count: int = 24, chars: int = 1600, seed: int = 0) -> list[str]:
    """Pieces of what the episodes say, each from another place."""
    rng = random.Random(seed)
    said = [text for episodes in families.values() for text in texts(episodes) if len(text) > 2 * chars]
    found = []
    for _ in range(count if said else 0):
        text = rng.choice(said)
        at = rng.randrange(len(text) - chars)
        found.append(text[at : at + chars])
    return found


# -- the cost of a step ------------------------------------------------------------------------------------------------


def step(
    pieces: Sequence[str], tokenizer: Any, *, size: int = 64, tau: float = 0.8, texts_kept: int = 2048, repeats: int = 20, seed: int = 0
) -> dict[str, Any]:
    """One step of an agent: STEP_TOKENS tokens, NEW_TOKENS of them new, against an index of so many texts; medians in ms."""
    rng, renderer, spoken, index = random.Random(seed), Renderer(tokenizer), TokenTexts(tokenizer), LSHIndex(tau)
    while len(index) < texts_kept:
        layout = renderer.render(f"{_lead(rng)}\n\n{_words(0.5)(rng.choice(pieces), rng)}")
        ids = as_ids(layout.ids)
        for window in windows(layout, spoken, size=size, stride=size // 2):
            index.add(SCOPE, StoredText(index.signer.sign(window), exact(ids, window), b"", 0, window.start, size))
    times: list[tuple[float, ...]] = []
    counted = 0
    for _ in range(repeats):
        text = "\n\n".join(f"{_lead(rng)} {_words(0.3)(piece, rng)}" for piece in rng.choices(pieces, k=24))
        ids = as_ids(renderer.render(text).ids[:STEP_TOKENS])
        assert len(ids) == STEP_TOKENS
        layout = Layout(ids.tolist(), (Span("text", 0, STEP_TOKENS),), "")
        began = time.thread_time()
        found = windows(layout, spoken, STEP_TOKENS - NEW_TOKENS, size=size, stride=size // 2)
        cut = time.thread_time()
        signed = [index.signer.sign(window) for window in found]
        done = time.thread_time()
        for window, signature in zip(found, signed, strict=True):
            index.find(SCOPE, signature, exact(ids, window))
        ended = time.thread_time()
        times.append((1e3 * (ended - began), 1e3 * (cut - began), 1e3 * (done - cut), 1e3 * (ended - done)))
        counted += len(found)
    middle = [sorted(column)[repeats // 2] for column in zip(*times, strict=True)]
    said = dict(zip(("step_ms", "windows_ms", "sign_ms", "find_ms"), middle, strict=True))
    head = {"window": size, "tau": tau, "texts": len(index), "prompt_tokens": STEP_TOKENS, "new_tokens": NEW_TOKENS}
    return {**head, "windows": counted / repeats, **said, "worst_ms": max(times)[0], "within_bound": said["step_ms"] <= STEP_MS}


def run(
    families: dict[str, list[Episode]],
    tokenizer: Any,
    *,
    sizes: Sequence[int] = SIZES,
    taus: Sequence[float] = TAUS,
    say: Say = lambda _: None,
) -> dict[str, Any]:
    """All of it: rows of recorded prompts, of near duplicates, the cost of a step, and the verdict on precision at tau = 0.8."""
    rows = traces(families, tokenizer, sizes=sizes, taus=taus, say=say)
    pieces = pieces_of(families)
    say(f"{len(pieces)} near duplicates")
    edited = duplicates(pieces, tokenizer, sizes=sizes, taus=taus) if pieces else []
    say("a step")
    kept = [*((size, 2048) for size in sizes), (64, MOST)]  # the last one: as many texts as are ever kept
    steps = [step(pieces, tokenizer, size=size, texts_kept=texts) for size, texts in kept] if pieces else []
    return {"rows": rows, "duplicates": edited, "steps": steps, "verdicts": verdicts(rows, edited)}


def verdicts(rows: Sequence[dict[str, Any]], edited: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Precision and recall over all families, and over all edits, by size of windows and tau."""
    found = []
    for source, listed in (("traces", rows), ("duplicates", edited)):
        for key in sorted({(row["window"], row["tau"]) for row in listed}):
            own = [row for row in listed if (row["window"], row["tau"]) == key]
            total = {name: sum(row[name] for row in own) for name in Sums.__slots__}
            shares = {name: value for name, value in Sums(**total).row().items() if name.startswith(("recall", "precision", "proposals"))}
            passed = None if shares["precision"] is None else shares["precision"] > PRECISION
            found.append({"source": source, "window": key[0], "tau": key[1], **shares, "precise": passed})
    return found
