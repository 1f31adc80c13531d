"""Documents in the order in which they are cached, learnt at index time: the recipes of examples/langchain_documents.py, embedded model."""

from __future__ import annotations

import inspect
import runpy
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from langchain_agentcache import CacheAwareOrder, ChatAgentCache, LearnDocuments
from langchain_core.documents import Document
from langchain_core.messages import AIMessage
from langchain_core.prompts import ChatPromptTemplate, PromptTemplate

from agentcache import errors

pytest.importorskip("llguidance", reason="the embedded model's calls are held to their schemas")
recipes = SimpleNamespace(**runpy.run_path(str(Path(__file__).parents[4] / "examples" / "langchain_documents.py")))
QUESTIONS = ("When did the Aurora come in with salt and rope?", "Where did the Aurora sail with her lamp oil from the quay?")


@pytest.fixture
def model(request: pytest.FixtureRequest) -> Iterator[ChatAgentCache]:
    with ChatAgentCache(model="embedded", max_tokens=60, namespace=request.node.name, cache_dir="") as made:
        yield made


def share(message: AIMessage) -> float:
    """Cached tokens of a request, as a share of its prompt."""
    usage: Any = message.usage_metadata
    return float(usage["input_token_details"]["cache_read"] / usage["input_tokens"])


def test_each_recipe_is_short() -> None:
    for recipe in (recipes.retriever, recipes.retrieval_chain, recipes.agent):
        assert len(inspect.getsource(recipe).splitlines()) <= 15


def test_a_retrieval_chain_finds_learnt_passages(model: ChatAgentCache, monkeypatch: pytest.MonkeyPatch) -> None:
    answers: list[AIMessage] = []
    generate = ChatAgentCache._generate

    def heard(self: ChatAgentCache, *given: Any, **options: Any) -> Any:
        result = generate(self, *given, **options)
        answers.append(result.generations[0].message)
        return result

    monkeypatch.setattr(ChatAgentCache, "_generate", heard)
    chain = recipes.retrieval_chain(model, recipes.retriever(model))
    shown = [chain.invoke({"input": question})["context"] for question in QUESTIONS]
    assert share(answers[0]) > 0.7, "three learnt passages"
    assert share(answers[1]) > 0.3, "one, in another place than it was retrieved"
    assert any(document.page_content.startswith("Best passages first") for documents in shown for document in documents)


def test_an_agent_keeps_what_its_retriever_found(model: ChatAgentCache) -> None:
    said = recipes.agent(model, recipes.retriever(model)).invoke({"messages": [("user", "Search the log for salt and rope.")]})["messages"]
    answers = [message for message in said if isinstance(message, AIMessage)]
    assert len(answers) > 1
    assert share(answers[1]) > 0.3, list(map(share, answers))
    again = recipes.agent(model, recipes.retriever(model)).invoke({"messages": [*said, ("user", "Search it for lamp oil.")]})["messages"]
    assert share([message for message in again if isinstance(message, AIMessage)][len(answers)]) > 0.7


def test_order_stays_where_nothing_is_cached(model: ChatAgentCache) -> None:
    documents = [Document(page_content=text) for text in (*recipes.LOG, recipes.LOG[1])]
    assert CacheAwareOrder(model, recipes.PROMPT).transform_documents(documents) == documents[:4]


def test_a_document_prompt_shapes_what_is_learnt(model: ChatAgentCache) -> None:
    shaped = PromptTemplate.from_template("[{place}] {page_content}")
    documents = [Document(page_content=text, id=str(number), metadata={"place": "mole"}) for number, text in enumerate(recipes.LOG)]
    learn = LearnDocuments(model, recipes.PROMPT, document_prompt=shaped, name="log")
    digests = [document.metadata["agentcache"] for document in learn.transform_documents(documents)]
    engine = learn.engine
    assert digests == [one.digest for one in engine.documents("log", namespace=model.namespace)]
    order = CacheAwareOrder(model, recipes.PROMPT, document_prompt=shaped)
    shown = order.transform_documents([documents[3], documents[1], documents[0]])
    assert [document.id for document in shown] == ["0", "1", "3", None]
    assert shown[-1].metadata == {"place": "mole", "agentcache": "ranks"}
    assert learn.release(["0", "9"]) == 1
    assert {one.source for one in engine.documents("log", namespace=model.namespace)} == {"1", "2", "3"}


def test_equal_contents_that_are_shown_otherwise_are_two_texts(model: ChatAgentCache) -> None:
    shaped = PromptTemplate.from_template("[{place}] {page_content}")
    documents = [Document(page_content=recipes.LOG[0], metadata={"place": place}) for place in ("mole", "quay")]
    learn = LearnDocuments(model, recipes.PROMPT, document_prompt=shaped)
    digests = [document.metadata["agentcache"] for document in learn.transform_documents(documents)]
    assert len({*digests}) == 2
    assert digests == [one.digest for one in learn.engine.documents(namespace=model.namespace)]


def test_a_prompt_without_a_place_for_documents_is_refused(model: ChatAgentCache) -> None:
    with pytest.raises(errors.ConfigError, match="no {context}"):
        CacheAwareOrder(model, ChatPromptTemplate.from_messages([("user", "{input}")]))
