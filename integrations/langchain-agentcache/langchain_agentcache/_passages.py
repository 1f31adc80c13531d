"""Retrieved documents in the order in which they are cached, and documents computed at index time. The engine orders and learns."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

from langchain_core.documents import BaseDocumentTransformer, Document
from langchain_core.prompts import BasePromptTemplate, ChatPromptTemplate, MessagesPlaceholder, PromptTemplate, format_document

from agentcache import PASSAGES, Engine, Message, RemoteEngine
from agentcache.errors import ConfigError

from ._messages import converted
from .chat_models import ChatAgentCache

KEY = "agentcache"  # in a document's metadata: the digest under which it is learnt
PLAIN = PromptTemplate.from_template("{page_content}")


class _Passages(BaseDocumentTransformer):
    """The prompt that documents stand in, as create_stuff_documents_chain takes it."""

    def __init__(
        self,
        model: ChatAgentCache,
        prompt: BasePromptTemplate[Any],
        *,
        document_prompt: BasePromptTemplate[str] = PLAIN,
        document_separator: str = "\n\n",
        document_variable_name: str = "context",
    ) -> None:
        if document_variable_name not in prompt.input_variables:
            raise ConfigError(f"prompt: has no {{{document_variable_name}}}, only {sorted(prompt.input_variables)!r}")
        self._model, self._prompt, self._document = model, prompt, document_prompt
        self._separator, self._variable = document_separator, document_variable_name

    @property
    def engine(self) -> Engine | RemoteEngine:
        """The engine of the model."""
        return self._model._engine()

    def _texts(self, documents: Sequence[Document]) -> list[str]:
        return [format_document(document, self._document) for document in documents]

    def _messages(self) -> list[Message]:
        """The prompt with PASSAGES in their place, and nothing for what else it asks for."""
        histories = {
            one.variable_name
            for one in (self._prompt.messages if isinstance(self._prompt, ChatPromptTemplate) else ())
            if isinstance(one, MessagesPlaceholder)
        }
        given: dict[str, Any] = {name: [] if name in histories else "?" for name in self._prompt.input_variables}
        return converted(self._prompt.format_prompt(**{**given, self._variable: PASSAGES}).to_messages())


class CacheAwareOrder(_Passages):
    """Puts documents into the order in which most of their text is cached: the last step between a retriever and its chain.

    Equal documents become one, no other is dropped. Where the order changes, one more document at the end says how the retriever ranked
    them, unless `ranks` is False.
    """

    def __init__(self, model: ChatAgentCache, prompt: BasePromptTemplate[Any], *, ranks: bool = True, **options: Any) -> None:
        super().__init__(model, prompt, **options)
        self._ranks = ranks

    def transform_documents(self, documents: Sequence[Document], **kwargs: Any) -> list[Document]:
        """The documents in the order in which they are to be shown."""
        if len(documents) < 2:
            return list(documents)
        found = self.engine.arrange(self._texts(documents), self._messages(), namespace=self._model.namespace, adapter=self._model.adapter)
        shown = [documents[number] for number in found.order]
        told = {**shown[0].metadata, KEY: "ranks"}  # a document prompt may ask for any key that all documents have
        return [*shown, Document(page_content=found.ranks, metadata=told)] if self._ranks and found.ranks else shown


class LearnDocuments(_Passages):
    """Computes documents at index time, before they go into a vector store. A changed one takes the place of the old one.

    A document is known by its id, or else by its text, as the prompt shows it.
    """

    def __init__(self, model: ChatAgentCache, prompt: BasePromptTemplate[Any], *, name: str = "documents", **options: Any) -> None:
        super().__init__(model, prompt, **options)
        self._name = name

    def transform_documents(self, documents: Sequence[Document], **kwargs: Any) -> list[Document]:
        """The documents, each with the digest under which it is learnt in its metadata."""
        texts = self._texts(documents)
        sources = [_source(document, text) for document, text in zip(documents, texts, strict=True)]
        learnt = self.engine.learn(
            {source: text for source, text in zip(sources, texts, strict=True) if text.strip()},
            messages=self._messages(),
            name=self._name,
            separator=self._separator,
            namespace=self._model.namespace,
            adapter=self._model.adapter,
        )
        digests = {one.source: one.digest for one in learnt.documents}
        return [
            document.model_copy(update={"metadata": {**document.metadata, KEY: digests.get(source, "")}})
            for document, source in zip(documents, sources, strict=True)
        ]

    def release(self, sources: Sequence[str]) -> int:
        """Release documents that were deleted, by id; returns how many were learnt."""
        return self.engine.unlearn(sources, name=self._name, namespace=self._model.namespace)


def _source(document: Document, shown: str) -> str:
    return document.id or hashlib.blake2b(shown.encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()
