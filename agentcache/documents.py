"""Documents of an engine: retrieved passages ordered along what is cached, and texts computed once for later prompts.

learn      new texts --> packs, each the start of a prompt --> tool groups on disk, whose manifests name the texts
arrange    passages of one prompt --> the order in which most of their tokens are cached

Knows neither how a prompt is computed nor where pages lie.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from .errors import ConfigError, SchemaError
from .layout import Renderer
from .layout.request import Rendered
from .store.keys import Scope, as_ids
from .store.store import Store
from .types import PASSAGES, Forgotten, Message, check_name

if TYPE_CHECKING:
    from .document_packs import Arrangement, Document, Learnt
    from .model.hf import HFModel
    from .prompt_schema import Schema
    from .store.tool_group import ToolGroup
    from .tool_groups import ToolGroups

PACK_TOKENS = 2048  # of the passages that are learnt as one prompt


class Documents:
    """The part of an engine that knows of documents; the engine has the attributes below."""

    model: HFModel
    store: Store
    renderer: Renderer
    check_open: Callable[[], None]
    pin: Callable[..., ToolGroup]
    forget: Callable[..., Forgotten]

    if TYPE_CHECKING:

        @property
        def _groups(self) -> ToolGroups: ...

    def arrange(
        self, passages: Sequence[str], messages: Sequence[Message | Mapping[str, Any]], tools: Sequence[Any] = (), *,
        namespace: str = "default", **rendered: Any,
    ) -> Arrangement:  # fmt: skip
        """Order retrieved passages, the best first, so that most of them are cached; as given where no order gains anything.

        messages: the prompt, with PASSAGES in the place of all passages. Computes nothing; `rendered` as of `stream`.
        """
        from . import document_packs as packs
        from . import passage_order

        self.check_open()
        self.store.heed()
        layout = self.renderer.render(messages, tools, namespace=namespace, **rendered)
        at = layout.text.find(PASSAGES)
        if at < 0 or isinstance(passages, str) or not all(isinstance(text, str) for text in passages):
            raise ConfigError(f"arrange(): passages are a list of texts, and a message holds {PASSAGES!r} in their place")
        first: dict[str, int] = {}
        same = [first.setdefault(text, number) for number, text in enumerate(passages)]
        known, regime = self.model.fingerprint, self.model.regime(len(layout.ids))
        if regime is None or known is None or known.refusal or not isinstance(layout, Rendered):
            return packs.Arrangement(tuple(first.values()), len(passages), 0, 0)
        head = as_ids(layout.ids[: max(0, layout.encoded.tokens_before(at) - 1)])  # its last token may be another before a passage
        ids = [as_ids(self.renderer.ids(text, namespace)) for text in passages]
        return passage_order.arrange(self.store, Scope(namespace, known.whole, regime), head, ids, same)

    def learn(
        self, texts: Mapping[str, str] | Sequence[str] | Schema, *, system: str | None = None, tools: Sequence[Any] = (),
        name: str = "documents", messages: Sequence[Message | Mapping[str, Any]] = (), separator: str = "\n\n",
        namespace: str = "default", pack_tokens: int = PACK_TOKENS, progress: Callable[[int, int], None] | bool = False,
    ) -> Learnt:  # fmt: skip
        """Compute texts once for later prompts, in packs: each is a prompt of `system`, and its texts as the user's message.

        texts: by the caller's name of each, or a list. Those computed before, by any process, are not computed again; another text under a
        known name takes its place. messages: instead of `system`, the prompt with PASSAGES in their place. Packs on disk are evicted last;
        in memory they are pinned only where there is no disk. progress: called with tokens written and to do, True for a bar. The parts
        of a schema are learnt under its name, after those that begin every prompt: with tools, namespace and progress only.
        """
        self.check_open()
        from . import document_packs as packs
        from .prompt_schema import Schema

        if isinstance(texts, Schema):
            if system or messages:
                raise SchemaError(f"system={system!r:.80}, messages={messages!r:.80}: a schema's prompts begin with its own parts")
            return packs.learn_schema(self.learn, self._release, texts, tools=tools, namespace=namespace, progress=progress)
        check_name("name", name)
        if type(pack_tokens) is not int or pack_tokens < 1:
            raise ConfigError(f"pack_tokens={pack_tokens!r}: must be a whole number, at least 1")
        named, start = packs.named(texts), [Message("system", system)] if system else []
        prompt = packs.opening(messages or [*start, Message("user", PASSAGES)])
        above = repr((prompt, [*tools], separator)).encode("utf-8", "surrogatepass")
        digests = {source: packs.digest(above, text.encode("utf-8", "surrogatepass")) for source, text in named.items()}
        held = {one.digest for one in self.documents(name, namespace=namespace)}
        sizes = {source: len(self.renderer.ids(named[source], namespace)) for source in named if digests[source] not in held}
        computed, told = 0, packs.teller(progress, sum(sizes.values()))
        most = packs.ahead(self.store.budget_bytes, self.model.spec, max([pack_tokens, *sizes.values()]))
        with packs.behind(self._groups.settle, told, most) as settle:
            for pack in packs.packs(sizes, pack_tokens):
                shown = prompt[-1].content.replace(PASSAGES, separator.join(named[source] for source in pack))
                digest = packs.digest(*(digests[source].encode() for source in pack))[:12]
                group = self.pin([*prompt[:-1], replace(prompt[-1], content=shown)], tools, name=f"{name}/{digest}", namespace=namespace)
                settle(replace(group, sources=tuple((source, digests[source], sizes[source]) for source in pack)))
                computed += group.computed_tokens
        self._release(name, namespace, lambda source, digest: source in digests and digest != digests[source])
        found = {one.source: one for one in self.documents(name, namespace=namespace)}
        return packs.Learnt(tuple(found[source] for source in digests if source in found), computed, len(digests) - len(sizes))

    def documents(self, name: str | None = None, *, namespace: str | None = None) -> tuple[Document, ...]:
        """The texts that are learnt under this model's weights, of this and earlier processes; of one name or namespace."""
        from .document_packs import Document

        self.check_open()
        token_bytes = self.model.spec.token_bytes if self.model.spec else 0
        return tuple(
            Document(group.documents, source, digest, tokens, tokens * token_bytes, group.name)
            for group in self._packs_of(name, namespace)
            for source, digest, tokens in group.sources
        )

    def unlearn(self, sources: Sequence[str], *, name: str = "documents", namespace: str = "default") -> int:
        """Release texts by the caller's names; returns how many. A pack is deleted with the last of its texts."""
        self.check_open()
        gone = frozenset((sources,) if isinstance(sources, str) else sources)
        return self._release(name, namespace, lambda source, digest: source in gone)

    def _release(self, name: str, namespace: str, goes: Callable[[str, str], bool]) -> int:
        released = 0
        for group in self._packs_of(name, namespace):
            left = tuple(one for one in group.sources if not goes(one[0], one[1]))
            released += len(group.sources) - len(left)
            if not left:
                self.forget(group=group.name, namespace=namespace)
            elif left != group.sources:
                self._groups.renew(replace(group, sources=left))
        return released

    def _packs_of(self, name: str | None, namespace: str | None) -> list[ToolGroup]:
        packs = self._groups.packs()
        return [one for one in packs if namespace in (None, one.namespace) and name in (None, one.documents)]
