"""Texts that are learnt: their names, their digests, the packs in which they are computed, and what became of them. Knows no forward,
nor where pages lie."""

from __future__ import annotations

import hashlib
import json
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import groupby
from typing import TYPE_CHECKING, Any, Protocol

from .errors import ConfigError, SchemaError
from .layout.canonical import text_of
from .layout.plain import plain_message
from .matching import fingerprint_of
from .prompt_schema import Schema
from .types import PAGE_TOKENS, PASSAGES, Forgotten, Message, Reuse, check_name

if TYPE_CHECKING:
    from .adapters import Adapters
    from .kv_spec import KVSpec
    from .layout import Renderer
    from .model.hf import HFModel
    from .store.store import Store
    from .store.tool_group import ToolGroup
    from .tool_groups import ToolGroups

Progress = Callable[[int, int], None] | bool  # called with what is done and what there is to do; True: a bar


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


def digest(*parts: bytes) -> str:
    """A digest of byte strings, which are told apart."""
    return hashlib.blake2b(b"".join(hashlib.blake2b(part).digest() for part in parts), digest_size=16).hexdigest()


def opening(messages: Sequence[Message | Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The messages up to the place of passages."""
    start: list[dict[str, Any]] = []
    for index, message in enumerate(messages):
        start.append(plain_message(index, message))
        content = text_of(start[-1].get("content"))
        if PASSAGES in content:
            return [*start[:-1], {**start[-1], "content": content[: content.index(PASSAGES) + len(PASSAGES)]}]
    raise ConfigError(f"learn(messages=): no message holds {PASSAGES!r}, the place of the texts")


def listed(name: str, texts: Iterable[str]) -> list[str]:
    """Texts as a list, which is read more than once; ConfigError for what is none."""
    found = list(texts) if isinstance(texts, Iterable) and not isinstance(texts, (str, bytes)) else None
    if found is None or not all(isinstance(text, str) for text in found):
        raise ConfigError(
            f"{name}={texts if found is None else found!r:.200}: must be a list of texts, or, to learn, a mapping of names to them"
        )
    return found


def named(texts: Mapping[str, str] | Sequence[str]) -> dict[str, str]:
    """Texts by name; those of a list are named by their digest."""
    if isinstance(texts, Mapping):
        found = dict(texts)
    else:
        found = {hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).hexdigest(): text for text in listed("texts", texts)}
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


def packs_ahead(budget_bytes: int, spec: KVSpec | None, tokens: int) -> int:
    """Number of packs of so many tokens that may be computed before an earlier one is written: all are pinned in memory."""
    pages = tokens // PAGE_TOKENS + 2  # with what stands before them
    return min(2, budget_bytes // (4 * pages * spec.page_bytes)) if spec else 0


@contextmanager
def in_background(write: Callable[[ToolGroup], None], tell: Callable[[int], None], most: int) -> Iterator[Callable[[ToolGroup], None]]:
    """A function that has a thread write a pack while its caller computes the next ones, at most `most` of them.

    tell: called with the tokens of each pack that is written.
    """
    with ThreadPoolExecutor(1, "agentcache-learn") as thread:
        begun: deque[tuple[Future[None], ToolGroup]] = deque()

        def finish(left: int) -> None:
            while len(begun) > left:
                written, pack = begun.popleft()
                written.result()
                tell(sum(tokens for _, _, tokens in pack.sources))

        def begin(pack: ToolGroup) -> None:
            begun.append((thread.submit(write, pack), pack))
            finish(most)

        yield begin
        finish(0)


def progress_function(progress: Progress, total: int) -> Callable[[int], None]:
    """A function that takes the tokens of one more pack and reports all so far: to the caller's own function, a bar, or to none."""
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


class Owner(Protocol):
    """An engine, as far as documents need one."""

    model: HFModel
    store: Store
    renderer: Renderer
    reuse: Reuse

    def check_open(self) -> None: ...

    def pin(self, *given: Any, **options: Any) -> ToolGroup: ...

    def forget(self, *, namespace: str | None = None, group: str | None = None) -> Forgotten: ...

    @property
    def _groups(self) -> ToolGroups: ...

    @property
    def _adapters(self) -> Adapters: ...


@dataclass(frozen=True, slots=True)
class Prompts:
    """The prompts that begin with learnt texts, as `Engine.learn` takes them."""

    system: str | None
    messages: Sequence[Message | Mapping[str, Any]]
    tools: Sequence[Any]
    separator: str
    namespace: str
    adapter: str | None


def learn(
    engine: Owner, texts: Mapping[str, str] | Sequence[str] | Schema, prompts: Prompts, name: str, pack_tokens: int, progress: Progress
) -> Learnt:
    """See `Engine.learn`."""
    engine.check_open()
    system, messages, namespace = prompts.system, prompts.messages, prompts.namespace
    if isinstance(texts, Schema):
        if system or messages:
            raise SchemaError(f"system={system!r:.80}, messages={messages!r:.80}: a schema's prompts begin with its own parts")
        return _learn_schema(engine, texts, prompts, progress)
    check_name("name", name)
    if type(pack_tokens) is not int or pack_tokens < 1:
        raise ConfigError(f"pack_tokens={pack_tokens!r}: must be a whole number, at least 1")
    if system and messages:
        raise ConfigError(f"system={system!r:.80}: `messages` are given, too; write it into these")
    given, start = named(texts), [Message("system", system)] if system else []
    prompt = opening(messages or [*start, Message("user", PASSAGES)])
    shape = json.dumps(prompt, sort_keys=True, default=repr)
    above = repr((shape, [*prompts.tools], prompts.separator)).encode("utf-8", "surrogatepass")
    scope = scope_of(engine, prompts.adapter)
    above += scope.encode()
    digests = {source: digest(above, text.encode("utf-8", "surrogatepass")) for source, text in given.items()}
    known = {document.digest for document in documents(engine, name, namespace)}
    new = {digest: source for source, digest in digests.items() if digest not in known}.values()  # one of those with the same text
    sizes = {source: len(engine.renderer.ids(given[source], namespace)) for source in new}
    for source, size in sizes.items():
        if size >= engine.model.context_tokens:
            raise ConfigError(f"texts[{source!r:.80}]: {size} tokens leave no room in {engine.model.context_tokens} of context: split it")
    computed, tell = 0, progress_function(progress, sum(sizes.values()))
    most = packs_ahead(engine.store.budget_bytes, engine.model.spec, max([pack_tokens, *sizes.values()]))
    with in_background(engine._groups.leave_to_disk, tell, most) as write:
        for pack in packs(sizes, pack_tokens):
            shown = prompt[-1]["content"].replace(PASSAGES, prompts.separator.join(given[source] for source in pack))
            number = digest(*(digests[source].encode() for source in pack))[:12]
            asked = [*prompt[:-1], {**prompt[-1], "content": shown}]
            sources = [(source, digests[source], sizes[source]) for source in pack]
            group = engine.pin(asked, prompts.tools, name=f"{name}/{number}", namespace=namespace, adapter=prompts.adapter, sources=sources)
            write(group)
            computed += group.computed_tokens
    release(engine, name, namespace, lambda source, known: source in digests and known != digests[source], digests, scope)
    found = {(one.source, one.digest): one for one in documents(engine, name, namespace)}
    return Learnt(tuple(found[one] for one in digests.items() if one in found), computed, sum(map(known.__contains__, digests.values())))


def scope_of(engine: Owner, adapter: str | None) -> str:
    """Return what the pages of an adapter lie under, beside the fingerprint of the weights. ConfigError: there is none of that name."""
    return "" if adapter is None else fingerprint_of("", engine._adapters.find(adapter))


def _learn_schema(engine: Owner, schema: Schema, prompts: Prompts, progress: Progress) -> Learnt:
    """Learn the parts of a schema under its name, and release those that it has no more."""
    known = []
    for before, some in groupby(schema.modules(), lambda module: module.before):
        texts, start = {module.source: module.text for module in some}, [Message(schema.role, f"{before}{PASSAGES}")]
        known.append(learn(engine, texts, replace(prompts, messages=start, separator="\n\n"), schema.name, 1, progress))
    present = {module.source for module in schema.modules()}
    scope = scope_of(engine, prompts.adapter)
    release(engine, schema.name, prompts.namespace, lambda source, digest: source not in present, scope=scope)
    found = tuple(one for each in known for one in each.documents)
    return Learnt(found, sum(each.computed_tokens for each in known), sum(each.known for each in known))


def documents(engine: Owner, name: str | None, namespace: str | None) -> tuple[Document, ...]:
    """See `Engine.documents`."""
    engine.check_open()
    token_bytes = engine.model.spec.token_bytes if engine.model.spec else 0
    return tuple(
        Document(group.documents, source, digest, tokens, tokens * token_bytes, group.name)
        for group in _packs_of(engine, name, namespace)
        for source, digest, tokens in group.sources
    )


def release(
    engine: Owner, name: str, namespace: str, goes: Callable[[str, str], bool], called: Mapping[str, str] | None = None,
    scope: str | None = None,
) -> int:  # fmt: skip
    """Release the texts of which `goes` says so; how many.

    called: digests by source; where a pack has that text under other names only, this one is added. scope: only those of one adapter, or
    of the base.
    """
    released = 0
    with engine._groups.renewing():
        groups = [one for one in _packs_of(engine, name, namespace) if scope is None or one.adapter == scope.removeprefix("+")]
        there, more = {one[:2] for group in groups for one in group.sources}, defaultdict[str, list[str]](list)
        for source, text in (called or {}).items():
            if (source, text) not in there:
                more[text].append(source)
        for group in groups:
            left = tuple(one for one in group.sources if not goes(one[0], one[1]))
            released += len(group.sources) - len(left)
            left += tuple((source, text, tokens) for _, text, tokens in group.sources for source in more.pop(text, ()))
            if not left:
                engine.forget(group=group.name, namespace=namespace)
            elif left != group.sources:
                engine._groups.renew(replace(group, sources=left))
    return released


def _packs_of(engine: Owner, name: str | None, namespace: str | None) -> list[ToolGroup]:
    return [one for one in engine._groups.packs() if namespace in (None, one.namespace) and name in (None, one.documents)]
