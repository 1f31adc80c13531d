"""Texts that are learnt: their names, their digests, the packs in which they are computed, and what became of them. Also the order of
passages. Knows no engine."""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import groupby
from typing import TYPE_CHECKING, Any

from .errors import ConfigError
from .types import PAGE_TOKENS, PASSAGES, Message

if TYPE_CHECKING:
    from .kv_spec import KVSpec
    from .prompt_schema import Schema
    from .store.tool_group import ToolGroup


@dataclass(frozen=True, slots=True)
class Arrangement:
    """An order of retrieved passages, along what is cached of them."""

    # numbers of the passages as they are to be shown; of equal ones only the first
    order: tuple[int, ...]
    # given, with equal ones
    passages: int
    # of the passages, cached in this order
    cached_tokens: int
    # of the passages, cached in the order in which they came
    given_tokens: int

    @property
    def ranks(self) -> str:
        """The order in which the passages came, as text for the prompt; empty where they are shown in it."""
        if list(self.order) == sorted(self.order):
            return ""
        places = sorted(range(len(self.order)), key=lambda place: self.order[place])
        return f"Best passages first: {', '.join(str(place + 1) for place in places)}."


@dataclass(frozen=True, slots=True)
class Document:
    """A text that `learn` has computed."""

    # name of its documents, and the caller's name of this text
    name: str
    source: str
    # of the text and all that stands before it in a prompt
    digest: str
    tokens: int
    # on disk
    bytes: int
    # the tool group that holds it
    group: str


@dataclass(frozen=True, slots=True)
class Learnt:
    """Outcome of one call of `learn`."""

    documents: tuple[Document, ...]
    # of the prompts that this call computed
    computed_tokens: int = 0
    # texts that were there already
    known: int = 0


def learn_schema(learn: Callable[..., Learnt], release: Callable[..., int], schema: Schema, **given: Any) -> Learnt:
    """Learn the parts of a schema under its name, and release those that it has no more."""
    known = [
        learn(texts, messages=[Message(schema.role, f"{before}{PASSAGES}")], name=schema.name, pack_tokens=1, **given)
        for before, some in groupby(schema.modules(), lambda module: module.before)
        for texts in [{module.source: module.text for module in some}]
    ]
    present = {module.source for module in schema.modules()}
    release(schema.name, given["namespace"], lambda source, digest: source not in present)
    documents = tuple(one for each in known for one in each.documents)
    return Learnt(documents, sum(each.computed_tokens for each in known), sum(each.known for each in known))


def digest(*parts: bytes) -> str:
    """A digest of byte strings, which are told apart."""
    return hashlib.blake2b(b"".join(hashlib.blake2b(part).digest() for part in parts), digest_size=16).hexdigest()


def opening(messages: Sequence[Message | Mapping[str, Any]]) -> list[Message]:
    """The messages up to the place of passages."""
    start: list[Message] = []
    for message in messages:
        start.append(message if isinstance(message, Message) else Message(str(message.get("role")), message.get("content")))  # type: ignore[arg-type]
        content = start[-1].content
        if isinstance(content, str) and PASSAGES in content:
            return [*start[:-1], replace(start[-1], content=content[: content.index(PASSAGES) + len(PASSAGES)])]
    raise ConfigError(f"learn(messages=): no message holds {PASSAGES!r}, the place of the texts")


def named(texts: Mapping[str, str] | Sequence[str]) -> dict[str, str]:
    """Texts by name; those of a list are named by their digest."""
    if isinstance(texts, Mapping):
        found = dict(texts)
    elif isinstance(texts, str) or not all(isinstance(text, str) for text in texts):
        raise ConfigError(f"texts={texts!r:.200}: must be a list of texts, or a mapping of names to texts")
    else:
        found = {hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).hexdigest(): text for text in texts}
    for source, text in found.items():
        if not isinstance(source, str) or not isinstance(text, str) or not text.strip():
            raise ConfigError(f"texts[{source!r:.80}]={text!r:.80}: must be a text that is not empty")
    return found


def packs(sizes: Mapping[str, int], most: int) -> Iterator[list[str]]:
    """Names of texts that are computed as one prompt, in order, of at most so many tokens unless one text alone has more."""
    pack: list[str] = []
    for source, size in sizes.items():
        if pack and sum(sizes[one] for one in pack) + size > most:
            yield pack
            pack = []
        pack.append(source)
    if pack:
        yield pack


def ahead(budget_bytes: int, spec: KVSpec | None, tokens: int) -> int:
    """Number of packs of so many tokens that may be computed before an earlier one is written: all are pinned in memory."""
    pages = tokens // PAGE_TOKENS + 2  # with what stands before them
    return min(2, budget_bytes // (4 * pages * spec.page_bytes)) if spec else 0


@contextmanager
def behind(settle: Callable[[ToolGroup], None], told: Callable[[int], None], most: int) -> Iterator[Callable[[ToolGroup], None]]:
    """A function that settles a pack on a thread while its caller computes the next ones: at most so many.

    told: called with the tokens of each pack that is settled.
    """
    with ThreadPoolExecutor(1, "agentcache-learn") as writing:
        begun: deque[tuple[Future[None], ToolGroup]] = deque()

        def end(left: int) -> None:
            while len(begun) > left:
                written, pack = begun.popleft()
                written.result()
                told(sum(tokens for _, _, tokens in pack.sources))

        def begin(pack: ToolGroup) -> None:
            begun.append((writing.submit(settle, pack), pack))
            end(most)

        yield begin
        end(0)


def teller(progress: Callable[[int, int], None] | bool, total: int) -> Callable[[int], None]:
    """Tells of more tokens that are done: the caller's own function of tokens done and to do, a bar, or nobody."""
    done = 0
    if progress and not callable(progress):
        from tqdm.auto import tqdm  # type: ignore[import-untyped]

        bar = tqdm(total=total, unit=" tokens", desc="learn")

    def tell(tokens: int) -> None:
        nonlocal done
        done += tokens
        if callable(progress):
            progress(done, total)
        elif progress:
            bar.update(tokens)
            if done == total:
                bar.close()

    return tell
