"""Questions to a small log with LlamaIndex: a keyword retriever, a query engine, and an agent that has it as a tool.

    python examples/llamaindex_rag.py MODEL

Passages are shown in the order of the log, not of their score: questions that find the same passages then start with the same prompt, and
only the question itself is computed. Needs `pip install llama-index-llms-agentcache`.
"""

from __future__ import annotations

import asyncio
import re
import sys
from typing import Any

from llama_index.core import QueryBundle
from llama_index.core.agent.workflow import FunctionAgent
from llama_index.core.query_engine import RetrieverQueryEngine
from llama_index.core.retrievers import BaseRetriever
from llama_index.core.schema import NodeWithScore, TextNode
from llama_index.core.tools import QueryEngineTool
from llama_index.llms.agentcache import AgentCacheLLM

LOG = (
    "3 March. Fog until noon. The ketch Aurora lay off the mole and came in with the flood at 12:40.",
    "4 March. Clear, wind north 4. The lamp of Averil Head was cleaned and its clockwork oiled.",
    "5 March. The Aurora took on water and lamp oil and sailed for Sorrel Bay at 07:15.",
    "6 March. Gale from the west. Nothing passed. The glass of the lamp held.",
)


class KeywordRetriever(BaseRetriever):
    """The passages that share most words with the question, in the order of the log."""

    def __init__(self, passages: tuple[str, ...], top: int = 2) -> None:
        super().__init__()
        self._nodes = [TextNode(text=text, id_=f"log-{number}") for number, text in enumerate(passages)]
        self._top = top

    def _retrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        asked = _words(query_bundle.query_str)
        scored = [NodeWithScore(node=node, score=float(len(asked & _words(node.text)))) for node in self._nodes]
        best = sorted(scored, key=lambda one: -(one.score or 0.0))[: self._top]
        return sorted(best, key=lambda one: one.node.node_id)


def _words(text: str) -> set[str]:
    return {word for word in re.findall(r"[a-z]+", text.lower()) if len(word) > 3}


async def main(llm: AgentCacheLLM) -> None:
    engine: Any = RetrieverQueryEngine.from_args(KeywordRetriever(LOG), llm=llm)
    for question in ("When did the Aurora come in?", "Where did the Aurora sail with her lamp oil?"):
        print(f"{question} {await engine.aquery(question)}")
    described = "Answers questions about the lighthouse's log of March."
    tool = QueryEngineTool.from_defaults(engine, name="ask_log", description=described)
    agent = FunctionAgent(tools=[tool], llm=llm, system_prompt="Answer from the log.")
    result = await agent.run("Was the lamp cleaned in March?")
    print(result)
    print("last request:", result.raw["receipt"] if result.raw else "")


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    with AgentCacheLLM(model=sys.argv[1]) as model:
        asyncio.run(main(model))
