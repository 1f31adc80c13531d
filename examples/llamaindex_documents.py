"""Retrieved passages that are not computed again, with LlamaIndex: a query engine, a chat engine with context, and an agent.

    python examples/llamaindex_documents.py MODEL

Passages are learnt when they are indexed, and shown in the order in which most of them are cached.
Needs `pip install llama-index-llms-agentcache`.
"""

from __future__ import annotations

import asyncio
import re
import sys
from typing import Any

from llama_index.core import QueryBundle
from llama_index.core.agent.workflow import FunctionAgent
from llama_index.core.chat_engine import ContextChatEngine
from llama_index.core.ingestion import IngestionPipeline
from llama_index.core.llms import ChatMessage
from llama_index.core.prompts import ChatPromptTemplate
from llama_index.core.query_engine import RetrieverQueryEngine
from llama_index.core.retrievers import BaseRetriever
from llama_index.core.schema import Document, NodeWithScore
from llama_index.core.tools import QueryEngineTool
from llama_index.llms.agentcache import AgentCacheLLM, AppendOnlyMemory, CacheAwareOrder, LearnNodes

LOG = (
    "Fog lay over the bay until noon. The ketch Aurora anchored off the mole and came in with the flood at 12:40, with salt and rope.",
    "The lamp of Averil Head was cleaned, its clockwork oiled and wound. The wind stood in the north at force four, and the sky was clear.",
    "The Aurora took on water and lamp oil, paid ten crowns at the quay and sailed for Sorrel Bay at 07:15 with the ebb.",
    "A gale blew from the west all day. Nothing passed the head. The glass of the lamp held, and the horn sounded until midnight.",
)
CONTEXT = "Texts of the harbour's log:\n\n{context_str}\n\nAnswer from them."


class KeywordRetriever(BaseRetriever):
    """The passages that share most words with the question, the best first."""

    def __init__(self, nodes: Any, top: int = 3) -> None:
        super().__init__()
        self._nodes, self._top = nodes, top

    def _retrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        asked = _words(query_bundle.query_str)
        scored = [NodeWithScore(node=node, score=float(len(asked & _words(node.text)))) for node in self._nodes]
        return sorted(scored, key=lambda one: -(one.score or 0.0))[: self._top]


def _words(text: str) -> set[str]:
    return {word for word in re.findall(r"[a-z]+", text.lower()) if len(word) > 3}


def retriever(llm: AgentCacheLLM) -> KeywordRetriever:
    """Index time: the pipeline's last step computes each node once, for all later processes."""
    documents = [Document(text=text, id_=f"log-{number}") for number, text in enumerate(LOG)]
    return KeywordRetriever(IngestionPipeline(transformations=[LearnNodes(llm=llm)]).run(documents=documents))


def query_engine(llm: AgentCacheLLM, found: KeywordRetriever) -> Any:
    """A query engine."""
    return RetrieverQueryEngine.from_args(found, llm=llm, node_postprocessors=[CacheAwareOrder(llm=llm)])


def chat_engine(llm: AgentCacheLLM, found: KeywordRetriever) -> Any:
    """A chat engine with context: its passages stand in the system prompt, so the order is made for that."""
    prompt = ChatPromptTemplate([ChatMessage(role="system", content=CONTEXT)])
    order = CacheAwareOrder(llm=llm, prompt=prompt)
    memory = AppendOnlyMemory.from_defaults(llm=llm)
    return ContextChatEngine.from_defaults(found, llm=llm, memory=memory, context_template=CONTEXT, node_postprocessors=[order])


def agent(llm: AgentCacheLLM, found: KeywordRetriever) -> FunctionAgent:
    """An agent with the query engine as a tool."""
    described = "Searches the harbour's log."
    tool = QueryEngineTool.from_defaults(query_engine(llm, found), name="search_log", description=described)
    return FunctionAgent(tools=[tool], llm=llm, system_prompt="Answer from the log.")


async def main(llm: AgentCacheLLM) -> None:
    found = retriever(llm)
    engine, chat = query_engine(llm, found), chat_engine(llm, found)
    for question in ("When did the Aurora come in with salt?", "Where did the Aurora sail with her lamp oil?"):
        print(f"{question} {await engine.aquery(question)}")
        print(await chat.achat(question))
    print(await agent(llm, found).run("Was the lamp cleaned?"))
    print("learnt:", [one.source for one in llm.engine.documents()])


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    with AgentCacheLLM(model=sys.argv[1]) as model:
        asyncio.run(main(model))
