"""LangChain's classes over a running `agentcache serve`: the model of the server, by one argument."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="the server is the extra `server`")
pytest.importorskip("uvicorn", reason="the server is the extra `server`")
pytest.importorskip("llguidance", reason="the embedded model's calls are held to their schemas")

from langchain.agents import create_agent
from langchain_agentcache import AgentCacheLLM, CacheAwareOrder, ChatAgentCache, LearnDocuments
from langchain_agentcache.errors import EngineClosedError, ModelConnectionError, ModelInvalidRequestError
from langchain_core.documents import Document
from langchain_core.messages import AIMessage
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.tools import tool

from agentcache import RemoteEngine
from tests.saved_adapters import save
from tests.serving import ALICE, adapted, keyed, ready, serving

pytestmark = [pytest.mark.enable_socket, pytest.mark.allow_hosts(["127.0.0.1"])]

asked: list[str] = []


@tool
def get_invoice(invoice_id: str) -> dict[str, Any]:
    """Get an invoice."""
    asked.append(invoice_id)
    return {"status": "open", "amount": 240}


@tool
def cancel_order(order_id: str) -> dict[str, Any]:
    """Cancel an order."""
    return {"status": "accepted"}


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with keyed(tmp_path_factory.mktemp("served")) as one:
        yield one.url


def test_an_agent_moves_to_a_server_by_one_argument(url: str) -> None:
    def run(chat: ChatAgentCache) -> list[Any]:
        agent = create_agent(chat, [get_invoice, cancel_order], system_prompt="You are a helpful assistant.")
        return list(agent.invoke({"messages": [("user", "Get the invoice A-1204.")]})["messages"])

    asked.clear()
    with ChatAgentCache(base_url=url, api_key=ALICE, max_tokens=120) as there, ChatAgentCache(model="embedded", max_tokens=120) as here:
        remote, local = run(there), run(here)
    assert asked == ["A-1204", "A-1204"]
    assert [message.text for message in remote] == [message.text for message in local]
    assert [call["args"] for call in remote[1].tool_calls] == [call["args"] for call in local[1].tool_calls]
    steps = [message for message in remote if isinstance(message, AIMessage)]
    assert steps[-1].usage_metadata["input_token_details"]["cache_read"] > 100, "the second step goes on from the first"
    assert steps[-1].response_metadata["agentcache"]["precision"] == "exact"


def test_the_profile_of_a_servers_model_is_asked_by_load(url: str) -> None:
    """SummarizationMiddleware takes a share of its context."""
    told = ChatAgentCache(model="embedded").profile
    with ChatAgentCache(model="embedded", base_url=url, api_key=ALICE) as chat:
        assert "max_input_tokens" not in (chat.profile or {})  # its name there is no file's here
        assert chat.load().profile == told
    with ChatAgentCache(model="embedded", base_url=url, api_key=ALICE, profile={"max_input_tokens": 77}) as chat:
        assert chat.load().profile == {**(told or {}), "max_input_tokens": 77}
    with RemoteEngine(url, ALICE) as engine:
        assert ChatAgentCache(engine=engine).profile == told


def test_documents_are_learnt_and_ordered_on_a_server(url: str) -> None:
    texts = [f"{where} opens at {hour}. {where} has a lamp, a crane and a bell." * 3 for hour, where in enumerate(("Quay", "Mole", "Lock"))]
    documents = [Document(page_content=text, id=str(number)) for number, text in enumerate(texts)]
    prompt = ChatPromptTemplate.from_messages([("system", "Texts:\n\n{context}"), ("user", "{input}")])
    with ChatAgentCache(base_url=url, api_key=ALICE) as chat:
        learn = LearnDocuments(chat, prompt, name="log")
        digests = [document.metadata["agentcache"] for document in learn.transform_documents(documents)]
        assert digests == [one.digest for one in learn.engine.documents("log")]
        shown = CacheAwareOrder(chat, prompt).transform_documents([documents[2], documents[0], documents[1]])
        assert [document.page_content for document in shown] == [*texts, "Best passages first: 3, 1, 2."]
        assert learn.release(["0", "1", "2", "9"]) == 3


async def test_streams_and_groups_are_the_servers(url: str) -> None:
    with ChatAgentCache(base_url=url, api_key=ALICE, max_tokens=16) as chat:
        group = chat.warm("You help at the desk of a harbour.", [get_invoice], name="desk")
        assert group.namespace == "alice"
        told = [chunk async for chunk in chat.astream([("system", "You help at the desk of a harbour."), ("user", "When?")])]
        assert told[-1].usage_metadata["output_tokens"] > 0
        assert "".join(chunk.text for chunk in told)
        assert chat.get_num_tokens("High water") > 0


def test_text_is_continued_by_a_server(url: str) -> None:
    given = {"max_tokens": 8, "logprobs": True}
    with AgentCacheLLM(base_url=url, api_key=ALICE, **given) as there, AgentCacheLLM(model="embedded", **given) as here:
        remote, local = (llm.generate(["The keeper of the"]).generations[0][0] for llm in (there, here))
    assert remote.text == local.text
    assert remote.generation_info["logprobs"] == local.generation_info["logprobs"]


async def test_no_event_loop_waits_for_texts_of_tokens(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[threading.Thread] = []
    with AgentCacheLLM(base_url=url, max_tokens=8, logprobs=True, top_logprobs=3) as llm:
        llm.api_key = ALICE  # which no class checks, or makes a secret of
        ask = llm._engine().tokenizer._call
        monkeypatch.setattr(llm._engine().tokenizer, "_call", lambda *given: threads.append(threading.current_thread()) or ask(*given))
        done = (await llm.agenerate(["When?"])).generations[0][0].generation_info["logprobs"]["content"]
        [chunk async for chunk in llm.astream("When?")]
    assert 0 < len(threads) <= len({one["id"] for each in done for one in (each, *each["top_logprobs"])})
    assert threading.main_thread() not in threads


def test_a_servers_adapter_is_a_model_or_an_adapter(tmp_path: Path) -> None:
    with serving(adapted(save(tmp_path))) as one:
        given = {"base_url": ready(one).url, "max_tokens": 6}
        for kind in (ChatAgentCache, AgentCacheLLM):
            with kind(**given) as base, kind(model="judge", **given) as named, kind(adapter="judge", **given) as asked:
                said = [named.invoke("When?"), asked.invoke("When?"), base.invoke("When?", adapter="judge"), base.invoke("When?")]
            first, second, third, plain = (getattr(each, "content", each) for each in said)
            assert first == second == third != plain
            with kind(adapter="critic", **given) as wrong, pytest.raises(ModelInvalidRequestError, match="there is none of that name"):
                wrong.invoke("When?")


def test_settings_of_a_server_are_refused() -> None:
    with pytest.raises(ModelInvalidRequestError, match="device='cpu': the server's engine is made already"):
        ChatAgentCache(base_url="http://127.0.0.1:9", device="cpu")
    with pytest.raises(ModelInvalidRequestError, match="on a server the API key decides"):
        ChatAgentCache(base_url="http://127.0.0.1:9", namespace="mine").invoke("When?")
    with pytest.raises(EngineClosedError, match="no server answers") as caught:
        ChatAgentCache(base_url="http://127.0.0.1:9").invoke("When?")
    assert isinstance(caught.value, ModelConnectionError)
    assert caught.value.is_retryable, "as ModelRetryMiddleware asks"


def test_a_written_model_names_its_server(url: str) -> None:
    chat = ChatAgentCache(base_url=url, api_key=ALICE)
    config = chat.to_config()
    assert (config["base_url"], ALICE in str(config), ALICE in repr(chat)) == (url, False, False)
    assert ChatAgentCache.from_config(config).base_url == url
