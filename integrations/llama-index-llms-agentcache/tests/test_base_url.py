"""LlamaIndex's model over a running `agentcache serve`: the model of the server, by one argument."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="the server is the extra `server`")
pytest.importorskip("uvicorn", reason="the server is the extra `server`")
pytest.importorskip("llguidance", reason="the embedded model's calls are held to their schemas")

from llama_index.core.agent.workflow import FunctionAgent
from llama_index.core.schema import NodeWithScore, QueryBundle, TextNode
from llama_index.core.tools import FunctionTool
from llama_index.llms.agentcache import AgentCacheLLM, CacheAwareOrder, LearnNodes, ReplayLLM

from agentcache.errors import ConfigError, EngineClosedError
from tests.saved_adapters import save
from tests.serving import ALICE, adapted, keyed, ready, serving

pytestmark = [pytest.mark.enable_socket, pytest.mark.allow_hosts(["127.0.0.1"])]


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with keyed(tmp_path_factory.mktemp("served")) as one:
        yield one.url


def test_an_agent_moves_to_a_server_by_one_argument(url: str, run: Callable[[Any], Any]) -> None:
    asked: list[str] = []

    def get_invoice(invoice_id: str) -> str:
        """Get an invoice."""
        asked.append(invoice_id)
        return '{"status": "open", "amount": 240}'

    async def answer(llm: AgentCacheLLM) -> str:
        agent = FunctionAgent(tools=[FunctionTool.from_defaults(get_invoice)], llm=llm, system_prompt="You are a helpful assistant.")
        return str(await agent.run("Get the invoice A-1204."))

    with AgentCacheLLM(base_url=url, api_key=ALICE, max_tokens=120) as there, AgentCacheLLM(model="embedded", max_tokens=120) as here:
        remote, local = run(answer(there)), run(answer(here))
        assert there.metadata.context_window == here.metadata.context_window
        assert there.count("High water") == here.count("High water")
        assert there.metadata.model_name == "embedded"
    assert asked == ["A-1204", "A-1204"]
    assert remote == local
    assert "open" in remote


def test_nodes_are_learnt_and_ordered_on_a_server(url: str) -> None:
    texts = [f"{where} opens at {hour}. {where} has a lamp, a crane and a bell." * 3 for hour, where in enumerate(("Quay", "Mole", "Lock"))]
    with AgentCacheLLM(base_url=url, api_key=ALICE) as llm:
        learn = LearnNodes(llm=llm)
        nodes = learn([TextNode(text=text, id_=str(number)) for number, text in enumerate(texts)])
        assert [node.metadata["agentcache"] for node in nodes] == [one.digest for one in llm.engine.documents()]
        found = [NodeWithScore(node=nodes[number]) for number in (2, 0, 1)]
        shown = CacheAwareOrder(llm=llm).postprocess_nodes(found, QueryBundle("When does the quay open?"))
        assert [node.text for node in shown] == [*texts, "Best passages first: 3, 1, 2."]
        assert learn.release(["0", "1", "2", "9"]) == 3


def test_receipts_are_the_servers(url: str) -> None:
    with AgentCacheLLM(base_url=url, api_key=ALICE, max_tokens=8) as llm:
        first, second = (llm.complete("When is high water in Port Averil?").raw["receipt"] for _ in range(2))
    assert second["cached_tokens"] == first["prompt_tokens"] - 1


def test_no_event_loop_waits_for_texts_of_tokens(url: str, run: Callable[[Any], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[threading.Thread] = []
    with AgentCacheLLM(base_url=url, api_key=ALICE, max_tokens=8) as llm:
        assert llm.metadata.context_window
        ask = llm.engine.tokenizer._call
        monkeypatch.setattr(llm.engine.tokenizer, "_call", lambda *given: threads.append(threading.current_thread()) or ask(*given))
        answer = run(llm.acomplete("When?", logprobs=3))
    assert 0 < len(threads) <= len({one.token for each in answer.logprobs for one in each})
    assert threading.main_thread() not in threads


def test_a_script_answers_on_a_server(url: str) -> None:
    with ReplayLLM(base_url=url, api_key=ALICE, script=["High water is at 14:05."]) as llm:
        response = llm.complete("When is high water?")
        assert (response.text, response.raw["finish_reason"]) == ("High water is at 14:05.", "stop")
        assert llm.receipts[0].prompt_tokens > 0


def test_a_written_model_asks_for_its_key(url: str) -> None:
    with AgentCacheLLM(base_url=url, api_key=ALICE, max_tokens=8) as llm:
        data = llm.to_dict()
    assert (data["base_url"], ALICE in str(data)) == (url, False)
    with pytest.raises(ConfigError, match="api_key=..."):
        AgentCacheLLM.from_dict(data)
    with AgentCacheLLM.from_dict(data, api_key=ALICE) as again:
        assert again.complete("When?").text


def test_a_servers_adapter_is_a_model_or_an_adapter(tmp_path: Path) -> None:
    with serving(adapted(save(tmp_path))) as one:
        given = {"base_url": ready(one).url, "max_tokens": 6}
        with AgentCacheLLM(**given) as base, AgentCacheLLM(model="judge", **given) as named:
            first, second, plain = (llm.complete("When?", **own) for llm, own in ((named, {}), (base, {"adapter": "judge"}), (base, {})))
            assert first.text == second.text != plain.text
            with pytest.raises(ConfigError, match="there is none of that name"):
                base.complete("When?", adapter="critic")


def test_settings_of_a_server_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"\['device'\]: the server's engine is made already"):
        AgentCacheLLM(base_url="http://127.0.0.1:9", device="cpu")
    with pytest.raises(ConfigError, match="api_key: is for base_url="):
        AgentCacheLLM(model="embedded", api_key=ALICE)
    with AgentCacheLLM(base_url="http://127.0.0.1:9") as llm, pytest.raises(EngineClosedError, match="no server answers"):
        llm.complete("When?")
