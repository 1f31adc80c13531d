"""Documents of an engine: retrieved passages ordered along what is cached, and texts computed once for later prompts.

learn      new texts --> packs, each the start of a prompt --> tool groups on disk, whose manifests name the texts
arrange    passages of one prompt --> the order in which most of their tokens are cached

Knows neither how: that is loaded for the first caller who has documents.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .document_packs import Arrangement, Document, Learnt, Owner
    from .prompt_schema import Schema
    from .types import Message

PACK_TOKENS = 2048  # of the passages that are learnt as one prompt


class Documents:
    """The part of an engine that knows of documents."""

    def arrange(
        self: Owner, passages: Sequence[str], messages: Sequence[Message | Mapping[str, Any]], tools: Sequence[Any] = (), *,
        namespace: str = "default", adapter: str | None = None, **rendered: Any,
    ) -> Arrangement:  # fmt: skip
        """Order retrieved passages, the best first, so that most of them are cached; as given where no order gains anything.

        messages: the prompt, with PASSAGES in the place of all passages. Computes nothing; `rendered` as of `stream`.
        """
        from .passage_order import arrange

        return arrange(self, passages, messages, tools, namespace, adapter, rendered)

    def learn(
        self: Owner, texts: Mapping[str, str] | Sequence[str] | Schema, *, system: str | None = None, tools: Sequence[Any] = (),
        name: str = "documents", messages: Sequence[Message | Mapping[str, Any]] = (), separator: str = "\n\n",
        namespace: str = "default", pack_tokens: int = PACK_TOKENS, adapter: str | None = None,
        progress: Callable[[int, int], None] | bool = False,
    ) -> Learnt:  # fmt: skip
        """Compute texts once for later prompts, in packs: each is a prompt of `system`, and its texts as the user's message.

        texts: by the caller's name of each, or a list. Those computed before, by any process, are not computed again; another text under a
        known name takes its place. messages: instead of `system`, the prompt with PASSAGES in their place. Packs on disk are evicted last;
        in memory they are pinned only where there is no disk. adapter: the one that will answer. progress: called with tokens written and
        to do, True for a bar. The parts of a schema are learnt under its name, after those that begin every prompt: with tools,
        namespace, adapter and progress only.
        """
        from .document_packs import Prompts, learn

        return learn(self, texts, Prompts(system, messages, tools, separator, namespace, adapter), name, pack_tokens, progress)

    def documents(self: Owner, name: str | None = None, *, namespace: str | None = None) -> tuple[Document, ...]:
        """The texts that are learnt under this model's weights, of this and earlier processes; of one name or namespace."""
        from .document_packs import documents

        return documents(self, name, namespace)

    def unlearn(self: Owner, sources: Sequence[str], *, name: str = "documents", namespace: str = "default") -> int:
        """Release texts by the caller's names; returns how many. A pack is deleted with the last of its texts."""
        from .document_packs import release

        self.check_open()
        gone = frozenset((sources,) if isinstance(sources, str) else sources)
        return release(self, name, namespace, lambda source, digest: source in gone)
