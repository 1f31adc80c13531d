"""Nodes in the order in which they are cached, learnt at index time: the recipes of examples/llamaindex_documents.py, embedded model."""

from __future__ import annotations

import asyncio
import importlib.util
import inspect
import pickle
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from llama_index.core.extractors import DocumentContextExtractor
from llama_index.core.ingestion import IngestionPipeline
from llama_index.core.instrumentation import get_dispatcher
from llama_index.core.instrumentation.event_handlers import BaseEventHandler
from llama_index.core.schema import Document, NodeRelationship, NodeWithScore, QueryBundle, RelatedNodeInfo, TextNode
from llama_index.core.storage.docstore import SimpleDocumentStore
from llama_index.llms.agentcache import AgentCacheLLM, CacheAwareOrder, LearnNodes, ReceiptEvent

from agentcache.errors import ConfigError

pytest.importorskip("llguidance", reason="the embedded model's calls are held to their schemas")
PATH = Path(__file__).parents[3] / "examples" / "llamaindex_documents.py"
spec = importlib.util.spec_from_file_location("llamaindex_documents", PATH)
assert spec is not None
assert spec.loader is not None
recipes = importlib.util.module_from_spec(spec)
spec.loader.exec_module(recipes)
QUESTIONS = ("When did the Aurora come in with salt and rope?", "Where did the Aurora sail with her lamp oil from the quay?")


@pytest.fixture
def llm(request: pytest.FixtureRequest) -> Iterator[AgentCacheLLM]:
    with AgentCacheLLM(model="embedded", max_tokens=8, namespace=request.node.name) as made:
        yield made


class Receipts(BaseEventHandler):
    """The receipts of all requests while it listens."""

    seen: list[dict[str, Any]] = []

    def handle(self, event: Any, **kwargs: Any) -> None:
        if isinstance(event, ReceiptEvent):
            self.seen.append(event.receipt)


@pytest.fixture
def receipts() -> Iterator[list[dict[str, Any]]]:
    heard, handlers = Receipts(seen=[]), get_dispatcher().event_handlers
    handlers.append(heard)
    yield heard.seen
    handlers.remove(heard)


def share(receipt: dict[str, Any]) -> float:
    """Cached tokens of a request, as a share of its prompt."""
    usage = receipt["usage"]
    return float(usage["prompt_tokens_details"]["cached_tokens"] / usage["prompt_tokens"])


def test_each_recipe_is_short() -> None:
    for recipe in (recipes.retriever, recipes.query_engine, recipes.chat_engine, recipes.agent):
        assert len(inspect.getsource(recipe).splitlines()) <= 15


def test_a_query_engine_finds_learnt_passages(llm: AgentCacheLLM, receipts: list[dict[str, Any]]) -> None:
    engine = recipes.query_engine(llm, recipes.retriever(llm))
    answers = [engine.query(question) for question in QUESTIONS]
    assert [share(receipt) > 0.5 for receipt in receipts] == [True, True], list(map(share, receipts))
    assert any("Best passages first" in node.node.get_content() for answer in answers for node in answer.source_nodes)
    assert all("agentcache" not in node.node.get_content("llm") for answer in answers for node in answer.source_nodes)


def test_a_chat_engine_finds_passages_in_its_system_prompt(llm: AgentCacheLLM, receipts: list[dict[str, Any]]) -> None:
    engine = recipes.chat_engine(llm, recipes.KeywordRetriever(recipes.retriever(llm)._nodes))
    for question in QUESTIONS:
        engine.chat(question)
    assert share(receipts[-1]) > 0.4, list(map(share, receipts))


def test_an_extractor_reads_the_document_once(llm: AgentCacheLLM, receipts: list[dict[str, Any]]) -> None:
    """LlamaIndex's extractor says headers of HTTP to every model, and logs what fails: nodes came back without a context."""
    store = SimpleDocumentStore()
    store.add_documents([Document(text=" ".join(recipes.LOG), id_="log")])
    said = DocumentContextExtractor(docstore=store, llm=llm, max_output_tokens=4, show_progress=False, num_workers=1)
    of = {NodeRelationship.SOURCE: RelatedNodeInfo(node_id="log")}
    contexts = asyncio.run(said.aextract([TextNode(text=text, relationships=of) for text in recipes.LOG[:2]]))
    assert [list(one) for one in contexts] == [["context"], ["context"]]
    assert share(receipts[-1]) > 0.5, list(map(share, receipts))


def test_an_agent_asks_the_query_engine(llm: AgentCacheLLM, receipts: list[dict[str, Any]]) -> None:
    found = recipes.retriever(llm)
    recipes.query_engine(llm, found).query(QUESTIONS[0])
    llm.max_tokens = 60
    receipts.clear()
    asyncio.run(_asked(llm, found))
    assert max(map(share, receipts)) > 0.6, list(map(share, receipts))


async def _asked(llm: AgentCacheLLM, found: Any) -> Any:
    return await recipes.agent(llm, found).run("Search the log for salt and rope.", max_iterations=3, early_stopping_method="generate")


def test_order_stays_where_nothing_is_cached(llm: AgentCacheLLM) -> None:
    nodes = [NodeWithScore(node=TextNode(text=text), score=1.0) for text in (*recipes.LOG, recipes.LOG[1])]
    shown = CacheAwareOrder(llm=llm).postprocess_nodes(nodes, QueryBundle("What?"))
    assert shown == nodes[:4]


async def _learnt_on(llm: AgentCacheLLM) -> list[int]:
    asked: list[int] = []

    class Noting(LearnNodes):
        def __call__(self, nodes: Any, **kwargs: Any) -> Any:
            asked.append(threading.get_ident())
            return super().__call__(nodes, **kwargs)

    nodes = await IngestionPipeline(transformations=[Noting(llm=llm)]).arun(nodes=[TextNode(text=recipes.LOG[0])])
    assert all(node.metadata["agentcache"] for node in nodes)
    return asked


def test_learning_holds_up_no_event_loop(llm: AgentCacheLLM) -> None:
    [thread] = asyncio.run(_learnt_on(llm))
    assert thread != threading.get_ident()


def test_a_changed_node_is_learnt_anew(llm: AgentCacheLLM) -> None:
    learn = LearnNodes(llm=llm)
    nodes = [TextNode(text=text, id_=str(number)) for number, text in enumerate(recipes.LOG)]
    learn(nodes)
    digests = [node.metadata["agentcache"] for node in nodes]
    assert digests == [one.digest for one in llm.engine.documents(namespace=llm.namespace)]
    learn([TextNode(text="The log ends here, on a calm day in May.", id_="0"), *nodes[1:]])
    again = {one.source: one.digest for one in llm.engine.documents(namespace=llm.namespace)}
    assert again["0"] != digests[0]
    assert [again[str(number)] for number in (1, 2, 3)] == digests[1:]
    assert learn.release(["1", "2"]) == 2
    assert {one.source for one in llm.engine.documents(namespace=llm.namespace)} == {"0", "3"}


def test_a_model_that_no_worker_can_have_is_named(llm: AgentCacheLLM) -> None:
    with AgentCacheLLM(engine=llm.engine) as own, pytest.raises(ConfigError, match="engine="):
        pickle.dumps(LearnNodes(llm=own))
