"""AgentCacheLLM: text in, text out; what chat models share with it is tested with them."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

import pytest
import script
from langchain_agentcache import AgentCacheLLM, ChatAgentCache, errors
from langchain_core import exceptions as theirs
from langchain_core.caches import InMemoryCache
from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.outputs import LLMResult
from langchain_core.prompts import PromptTemplate

from agentcache import Engine, Sampling, toy

PROMPT = "The keeper of the lighthouse writes down"


@pytest.fixture
def llm(model_folder: str, request: pytest.FixtureRequest) -> Any:
    """llm(max_tokens=5): a text model in a namespace of this test's own."""

    def make(**options: Any) -> AgentCacheLLM:
        options = {"model": model_folder, "memory_bytes": 64 << 20, "max_tokens": 12, "namespace": request.node.name, **options}
        return AgentCacheLLM(**options)

    return make


class AnswerCounts(BaseCallbackHandler):
    """What callbacks were told."""

    def __init__(self) -> None:
        self.tokens: list[str] = []
        self.ends: list[LLMResult] = []
        self.errors: list[BaseException] = []

    def on_llm_new_token(self, token: str, **kwargs: Any) -> None:
        self.tokens.append(token)

    def on_llm_end(self, response: LLMResult, **kwargs: Any) -> None:
        self.ends.append(response)

    def on_llm_error(self, error: BaseException, **kwargs: Any) -> None:
        self.errors.append(error)


# -- the list of LangChain's standard tests for chat models, as far as it is about text: langchain-tests has none for LLMs ---------------


def test_init_and_params(model_folder: str) -> None:
    made = AgentCacheLLM(model=model_folder, temperature=0, max_tokens=100, timeout=60, stop=[], max_retries=2)
    assert made._llm_type == "agentcache-llm"
    said = made._get_ls_params()
    assert (said["ls_provider"], said["ls_model_type"], said["ls_temperature"], said["ls_max_tokens"]) == ("agentcache", "llm", 0.0, 100)


def test_init_from_env(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AGENTCACHE_DIR", "/somewhere")
    assert AgentCacheLLM(model="x").cache_dir == "/somewhere"


def test_invoke_stream_and_batch_say_the_same(llm: Any) -> None:
    model = llm()
    text = model.invoke(PROMPT)
    pieces = list(model.stream(PROMPT))
    assert isinstance(text, str)
    assert "".join(pieces) == text
    assert len(pieces) > 3
    assert model.batch([PROMPT, "x", PROMPT]) == [text, model.invoke("x"), text]
    assert model.batch([PROMPT] * 3, config={"max_concurrency": 1}) == [text] * 3


async def test_async_says_the_same(llm: Any) -> None:
    model = llm()
    text = model.invoke(PROMPT)
    assert await model.ainvoke(PROMPT) == text
    assert "".join([piece async for piece in model.astream(PROMPT)]) == text
    assert await model.abatch([PROMPT, "x"]) == [text, model.invoke("x")]


def test_stop(llm: Any) -> None:
    text = llm().invoke(PROMPT)
    stop = text[5:8]
    cut = text[: text.index(stop)]
    assert llm().invoke(PROMPT, stop=[stop]) == llm(stop_sequences=stop).invoke(PROMPT) == llm().bind(stop=[stop]).invoke(PROMPT) == cut
    assert llm().bind(stop_sequences=[stop]).invoke(PROMPT) == "".join(llm().stream(PROMPT, stop=[stop])) == cut


def test_usage_and_receipt(llm: Any) -> None:
    model, heard = llm(), AnswerCounts()
    model.invoke(PROMPT)
    result = model.generate([PROMPT, "x"], callbacks=[heard])
    info = result.generations[0][0].generation_info
    used = info["usage_metadata"]
    assert used["input_token_details"]["cache_read"] == used["input_tokens"] - 1
    assert used["output_tokens"] == 12
    assert info["finish_reason"] == "length"
    assert info["agentcache"]["precision"] == "exact"
    assert result.llm_output["token_usage"]["completion_tokens"] == 24
    json.dumps(info)
    assert len(heard.ends) == 2


def test_callbacks_hear_a_stream_and_its_account(llm: Any) -> None:
    heard = AnswerCounts()
    pieces = list(llm().stream(PROMPT, config={"callbacks": [heard]}))
    assert [piece for piece in pieces if piece] == heard.tokens
    (end,) = heard.ends
    assert end.generations[0][0].text == "".join(pieces)
    assert end.generations[0][0].generation_info["usage_metadata"]["output_tokens"] == 12
    quiet, loud = AnswerCounts(), AnswerCounts()
    llm().invoke(PROMPT, config={"callbacks": [quiet]})
    llm(streaming=True).invoke(PROMPT, config={"callbacks": [loud]})
    assert (quiet.tokens, "".join(loud.tokens)) == ([], "".join(pieces))


def test_chains_and_prompts(llm: Any) -> None:
    chain = PromptTemplate.from_template("The keeper of the {place} writes down") | llm()
    assert chain.invoke({"place": "lighthouse"}) == llm().invoke(PROMPT)


def test_cache_of_answers_knows_what_a_call_says(llm: Any) -> None:
    cache = InMemoryCache()
    model = llm(cache=cache)
    long = model.invoke(PROMPT)
    assert model.invoke(PROMPT, max_tokens=3) != long, "a call's own settings are part of the key"
    assert model.invoke(PROMPT) == long
    assert llm(cache=cache, stop=[long[5:8]]).invoke(PROMPT) != long
    keys = {key for _, key in cache._cache}
    assert len(keys) == 3
    model.invoke(PROMPT, namespace="another")
    assert len({key for _, key in cache._cache}) == 4


# -- text, as it is ----------------------------------------------------------------------------------------------------


def test_a_prompt_is_continued_as_it_stands(llm: Any) -> None:
    model = llm()
    with model._engine().stream(PROMPT, sampling=Sampling(max_tokens=12), namespace="raw") as raw:
        expected = raw.completion
    assert model.invoke(PROMPT) == expected.text
    result = model.generate([PROMPT])
    assert result.generations[0][0].generation_info["usage_metadata"]["input_tokens"] == expected.receipt.prompt_tokens


def test_base_models_need_no_chat_template() -> None:
    tokenizer = toy.tokenizer(script.TEXTS, script.VOCAB)
    tokenizer.chat_template = None
    with Engine(toy.model(script.VOCAB, layers=2, hidden=128), tokenizer, store=None, memory_bytes=64 << 20) as engine:
        model = AgentCacheLLM(engine=engine, max_tokens=6)
        assert model.invoke(PROMPT) == "".join(model.stream(PROMPT)) != ""
        assert json.loads(AgentCacheLLM(engine=engine, format={"type": "integer", "minimum": 7, "maximum": 7}).invoke(PROMPT)) == 7
        with pytest.raises(theirs.ModelInvalidRequestError, match="has no chat template"):
            model.invoke(PROMPT, apply_chat_template=True)


def test_the_chat_template_if_it_is_asked_for(llm: Any, model_folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(script.LINES, "Think!", "<think>\nThe tide.\n</think>\n\nAt noon.")
    model = llm(apply_chat_template=True, max_tokens=60)
    result = model.generate(["Think!"]).generations[0][0]
    assert (result.text, result.generation_info["reasoning_content"]) == ("At noon.", "The tide.")
    assert "".join(model.stream("Think!")) == "At noon."
    chat = ChatAgentCache(model=model_folder, memory_bytes=64 << 20)
    assert chat._engine() is model._engine(), "chat and text models share weights and pages"
    with pytest.raises(errors.ModelInvalidRequestError, match="reasoning=True: is for the chat template; say apply_chat_template=True"):
        llm(reasoning=True)


def test_a_thought_stays_in_a_text(monkeypatch: pytest.MonkeyPatch, llm: Any) -> None:
    said = "<think>\nx\n</think>\n  y <tool_call>\n"
    options = {"sampling": Sampling(forced=said, max_tokens=len(said))}
    engine = llm()._engine()
    original = engine.stream
    monkeypatch.setattr(engine, "stream", lambda *asked, **given: original(*asked, **{**given, **options}))
    assert llm().invoke(PROMPT).startswith(said)
    assert "".join(llm().stream(PROMPT)).startswith(said)


def test_a_batch_shares_forwards(llm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model = llm()
    engine = model._engine()
    packs: list[int] = []
    original, wanted = type(engine.scheduler.runner).run, 6

    def run(self: Any, work: list[Any]) -> Any:
        end = time.monotonic() + 20
        while not packs and sum(engine.stats()["queue"].values()) < wanted and time.monotonic() < end:
            time.sleep(0.005)  # callers on a busy machine come one after the other
        packs.append(len(work))
        return original(self, work)

    monkeypatch.setattr(type(engine.scheduler.runner), "run", run)
    prompts = [f"{PROMPT} {n}" for n in range(6)]
    together = model.batch(prompts)
    assert max(packs) == 6
    assert sum(packs) < 6 * (12 + 4)
    wanted = 0
    packs.clear()
    assert [model.invoke(prompt) for prompt in prompts] == together
    assert max(packs) == 1


def test_logprobs_if_asked(llm: Any) -> None:
    result = llm().generate([PROMPT], logprobs=True, top_logprobs=3).generations[0][0]
    content = result.generation_info["logprobs"]["content"]
    assert len(content) == 12
    assert "".join(each["token"] for each in content) == result.text
    for each in content:
        best = each["top_logprobs"]
        assert best[0] == {name: each[name] for name in ("token", "id", "logprob")}, "greedy takes the likeliest"
        assert [other["logprob"] for other in best] == sorted((other["logprob"] for other in best), reverse=True)
        assert each["logprob"] < 0
    assert "logprobs" not in llm().generate([PROMPT]).generations[0][0].generation_info
    heard = AnswerCounts()
    list(llm(logprobs=True, temperature=1.0, seed=3).stream(PROMPT, config={"callbacks": [heard]}))
    assert len(heard.ends[0].generations[0][0].generation_info["logprobs"]["content"]) == 12


def test_logprobs_are_the_model_s_own(llm: Any) -> None:
    """Against what the engine shows of each token's distribution."""
    model = llm(logprobs=True, temperature=0.7, repetition_penalty=1.3, seed=1)
    rows: list[Any] = []
    content = model.generate([PROMPT]).generations[0][0].generation_info["logprobs"]["content"]
    done = model._engine().generate(PROMPT, sampling=model._sampling(None, {}), on_logits=lambda row: rows.append(row.clone()))
    assert [each["id"] for each in content] == list(done.ids)
    expected = [float(row.log_softmax(-1)[token]) for row, token in zip(rows, done.ids)]
    assert [each["logprob"] for each in content] == pytest.approx(expected, abs=1e-6)


# -- forms and limits --------------------------------------------------------------------------------------------------


def test_a_form(llm: Any) -> None:
    shape = {"type": "object", "properties": {"hour": {"type": "integer", "minimum": 0, "maximum": 9}}, "required": ["hour"]}
    assert set(json.loads(llm(format=shape, max_tokens=80).invoke(PROMPT))) == {"hour"}
    assert isinstance(json.loads(llm(max_tokens=80).invoke(PROMPT, format=shape)), dict)


@pytest.mark.parametrize("way", ["invoke", "stream", "ainvoke"])
def test_a_form_that_was_cut_is_no_answer(llm: Any, way: str) -> None:
    model = llm(format={"type": "integer"}, max_tokens=2)
    asks = {"invoke": model.invoke, "stream": lambda x: list(model.stream(x)), "ainvoke": lambda x: asyncio.run(model.ainvoke(x))}
    with pytest.raises(errors.OutputCutError, match="is not whole, it had no room after 2 tokens: raise max_tokens"):
        asks[way](PROMPT)


def test_the_context_holds_prompt_and_completion(llm: Any) -> None:
    prompt = llm().get_num_tokens(PROMPT)
    result = llm(num_ctx=prompt + 5, max_tokens=100).generate([PROMPT]).generations[0][0]
    assert result.generation_info["usage_metadata"]["total_tokens"] == prompt + 5
    assert result.generation_info["finish_reason"] == "length"
    with pytest.raises(theirs.ContextOverflowError, match=f"num_ctx={prompt}, which counts both.*raise num_ctx"):
        llm(num_ctx=prompt).invoke(PROMPT)


def test_time_limits(llm: Any) -> None:
    model = llm(max_tokens=8000, timeout=0.3)
    with pytest.raises(theirs.ModelTimeoutError, match="timeout=0.3"):
        model.batch([PROMPT, "x"])
    with pytest.raises(theirs.ModelTimeoutError):
        list(model.stream(PROMPT))
    with pytest.raises(theirs.ModelTimeoutError):
        asyncio.run(model.ainvoke(PROMPT))


def test_a_prompt_that_cannot_be_leaves_nothing_running(llm: Any) -> None:
    model = llm(max_tokens=8000)
    with pytest.raises(theirs.ModelInvalidRequestError, match="is empty"):
        model.batch([PROMPT, ""])
    assert script.until(lambda: not model._engine().scheduler.live)
    assert isinstance(model.batch([""], return_exceptions=True)[0], theirs.ModelInvalidRequestError)


async def test_leaving_frees_the_device(llm: Any) -> None:
    model = llm(max_tokens=8000)
    for _ in model.stream(PROMPT):
        break
    async for _ in model.astream(PROMPT):
        break
    task = asyncio.create_task(model.abatch([PROMPT, "x"]))
    await asyncio.sleep(0.1)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert await asyncio.to_thread(script.until, lambda: not model._engine().scheduler.live)
