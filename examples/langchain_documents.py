"""Retrieved passages that are not computed again, with LangChain: a retrieval chain, and an agent with a retriever as its tool.

    python examples/langchain_documents.py MODEL

Documents are learnt when they are indexed, and shown in the order in which most of them are cached.
`pip install 'langchain-agentcache[middleware]' langchain-classic`.
"""

from __future__ import annotations

import re
import sys
from typing import Any

from langchain.agents import create_agent
from langchain_agentcache import CacheAwareOrder, ChatAgentCache, LearnDocuments
from langchain_classic.chains import create_retrieval_chain
from langchain_classic.chains.combine_documents import create_stuff_documents_chain
from langchain_classic.retrievers import ContextualCompressionRetriever
from langchain_classic.retrievers.document_compressors import DocumentCompressorPipeline
from langchain_core.documents import Document
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.retrievers import BaseRetriever
from langchain_core.tools import create_retriever_tool

LOG = (
    "Fog lay over the bay until noon. The ketch Aurora anchored off the mole and came in with the flood at 12:40, with salt and rope.",
    "The lamp of Averil Head was cleaned, its clockwork oiled and wound. The wind stood in the north at force four, and the sky was clear.",
    "The Aurora took on water and lamp oil, paid ten crowns at the quay and sailed for Sorrel Bay at 07:15 with the ebb.",
    "A gale blew from the west all day. Nothing passed the head. The glass of the lamp held, and the horn sounded until midnight.",
)
PROMPT = ChatPromptTemplate.from_messages(
    [("system", "Texts of the harbour's log:\n\n{context}\n\nAnswer from them."), ("user", "{input}")]
)


class KeywordRetriever(BaseRetriever):
    """The passages that share most words with the question, the best first."""

    found: list[Document]
    top: int = 3

    def _get_relevant_documents(self, query: str, *, run_manager: Any) -> list[Document]:
        asked = _words(query)
        return sorted(self.found, key=lambda one: -len(asked & _words(one.page_content)))[: self.top]


def _words(text: str) -> set[str]:
    return {word for word in re.findall(r"[a-z]+", text.lower()) if len(word) > 3}


def retriever(model: ChatAgentCache) -> KeywordRetriever:
    """Index time: each document is computed once, for all later processes."""
    documents = [Document(page_content=text, id=f"log-{number}") for number, text in enumerate(LOG)]
    return KeywordRetriever(found=LearnDocuments(model, PROMPT).transform_documents(documents))


def retrieval_chain(model: ChatAgentCache, found: BaseRetriever) -> Any:
    """A retrieval chain."""
    order = DocumentCompressorPipeline(transformers=[CacheAwareOrder(model, PROMPT)])
    ordered = ContextualCompressionRetriever(base_compressor=order, base_retriever=found)
    return create_retrieval_chain(ordered, create_stuff_documents_chain(model, PROMPT))


def agent(model: ChatAgentCache, found: BaseRetriever) -> Any:
    """An agent with the retriever as a tool: what it found stays in its history, which only grows."""
    tool = create_retriever_tool(found, "search_log", "Searches the harbour's log.")
    return create_agent(model, [tool], system_prompt="Answer from the log.")


def main(name: str) -> None:
    with ChatAgentCache(model=name, max_tokens=64) as model:
        found = retriever(model)
        chain = retrieval_chain(model, found)
        for question in ("When did the Aurora come in with salt?", "Where did the Aurora sail with her lamp oil?"):
            print(question, chain.invoke({"input": question})["answer"])
        answer = agent(model, found).invoke({"messages": [("user", "Was the lamp cleaned?")]})["messages"][-1]
        print(answer.text, answer.usage_metadata["input_token_details"]["cache_read"], "tokens cached")


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    main(sys.argv[1])
