"""Whose the engine is: loading, warming, closing, copying and pickling models; what their profile knows of it."""

from __future__ import annotations

import copy
import gc
import multiprocessing
import os
import pickle
import weakref
from typing import Any

import pytest
import script
from harbour import ASKED, SYSTEM, tide
from langchain_agentcache import AgentCacheLLM, ChatAgentCache, errors
from langchain_core import exceptions as theirs
from langchain_core.messages import HumanMessage
from langchain_core.runnables import ConfigurableField

from agentcache import Engine
from agentcache.errors import ConfigError


@pytest.fixture
def own(model_folder: str, request: pytest.FixtureRequest) -> Any:
    """A model whose engine is no other test's."""
    size = (40 << 20) + abs(hash(request.node.name)) % (1 << 20)
    return lambda form=ChatAgentCache, **options: form(model=model_folder, memory_bytes=size, max_tokens=2, cache_dir="", **options)


def test_load_and_close(own: Any) -> None:
    model, known = own(), set(script.MADE)
    assert model.load() is model
    (engine,) = set(script.MADE) - known
    model.close()
    assert engine.closed
    model.close()
    assert set(script.MADE) == known | {engine}, "closing loads nothing"
    assert model.invoke(ASKED).usage_metadata["output_tokens"] == 2, "what is known by name is loaded again"
    model.close()


def test_the_last_one_closes(own: Any) -> None:
    with own() as one, own(AgentCacheLLM) as other:
        engine = one.load()._engine()
        assert other._engine() is engine
        one.close()
        assert not engine.closed, "another model uses it"
        assert other.invoke("x")
    assert engine.closed


@pytest.mark.parametrize("form", [ChatAgentCache, AgentCacheLLM])
def test_closing_a_copy_leaves_the_engine_to_the_model(form: Any, own: Any) -> None:
    with own(form) as model:
        engine = model.load()._engine()
        with model.model_copy(update={"max_tokens": 1}) as copied:
            copied.invoke("x")
        assert not engine.closed
        model.invoke("x", temperature=0.5)
    assert engine.closed, "no call is a user of its own"


def test_weights_stay_loaded_between_models(own: Any) -> None:
    engine = weakref.ref(own().load()._engine())
    gc.collect()  # the model is gone
    with own() as again:
        assert again.load()._engine() is engine()
        assert engine() is not None
    assert again.load()._engine() is not engine()
    again.close()


def test_a_given_engine_stays_its_owner_s(model_folder: str) -> None:
    with Engine(model_folder, store=None, memory_bytes=32 << 20) as engine:
        with ChatAgentCache(engine=engine, max_tokens=1) as model:
            model.invoke(ASKED)
        assert not engine.closed


def test_a_request_on_a_closed_pipeline_engine_says_so() -> None:
    from transformers import pipeline

    from agentcache import toy

    loaded = toy.model(script.VOCAB, layers=2, hidden=128)
    pipe = pipeline("text-generation", model=loaded, tokenizer=toy.tokenizer(script.TEXTS, script.VOCAB))
    model = ChatAgentCache.from_pipeline(pipe, memory_bytes=32 << 20, cache_dir="")
    shared = copy.deepcopy(model)
    shared.load()
    model.close()
    assert shared.invoke("x", max_tokens=1).usage_metadata["output_tokens"] == 1, "its copy uses it"
    shared.close()
    with pytest.raises(errors.EngineClosedError):
        shared.invoke("x")


def test_warming(own: Any) -> None:
    with own(tools_order="sticky", group="lights") as model:
        group = model.warm(SYSTEM.content, [tide])
        assert (group.name, group.namespace) == ("lights", "default")
        used = model.bind_tools([tide]).invoke(ASKED).usage_metadata
        assert used["input_token_details"]["cache_read"] >= group.prefix_tokens - 1
        assert [each.name for each in model._engine().groups] == ["lights"]
        assert model.warm(SYSTEM.content, [tide]).computed_tokens <= 1
        with pytest.raises(errors.ModelInvalidRequestError, match="tools='tide': must be a list"):
            model.warm("x", "tide")  # type: ignore[arg-type]


def test_warming_with_what_the_template_is_told(own: Any) -> None:
    with own(namespace="alice", template_kwargs={"tone": "dry"}) as model:
        group = model.warm("You keep a light. " * 20)
        said = model.invoke([("system", "You keep a light. " * 20), ("user", "x")]).usage_metadata
        assert said["input_token_details"]["cache_read"] >= group.prefix_tokens - 1 > 50


@pytest.mark.parametrize("form", [ChatAgentCache, AgentCacheLLM])
def test_copies_share_the_engine(form: Any, model_folder: str) -> None:
    with Engine(model_folder, store=None, memory_bytes=32 << 20) as engine:
        model = form(engine=engine, max_tokens=2, stop=["x"])
        again = copy.deepcopy(model)
        assert again.engine is engine
        assert again.stop is not model.stop
        assert again.invoke("Which ship?") == model.invoke("Which ship?") or form is ChatAgentCache
        bound = copy.deepcopy(model.bind(stop=["y"]))
        assert bound.bound.engine is engine
        with pytest.raises(ConfigError, match="cannot be pickled: .*make one in each process, by name"):
            pickle.dumps(model)


@pytest.mark.parametrize("form", [ChatAgentCache, AgentCacheLLM])
def test_pickles_load_the_same_model(form: Any, own: Any) -> None:
    model = own(form, namespace="alice", revision="v1", temperature=0.5, seed=3)
    again = pickle.loads(pickle.dumps(model))
    assert again == model
    assert again._identifying_params == model._identifying_params
    assert again._engine_options() == model._engine_options()


def test_the_profile_of_the_embedded_model() -> None:
    profile = ChatAgentCache(model="embedded").profile
    assert (profile["max_input_tokens"], profile["tool_calling"]) == (8192, True)
    assert ChatAgentCache(model="embedded", num_ctx=100).profile["max_input_tokens"] == 100
    assert ChatAgentCache(model="embedded", num_ctx=1 << 20).profile["max_input_tokens"] == 8192, "no setting makes it longer"


def test_the_context_holds_prompt_and_completion(own: Any) -> None:
    """As Ollama counts it."""
    with own() as model:
        prompt = model.get_num_tokens_from_messages(ASKED)
        said = model.model_copy(update={"num_ctx": prompt + 3, "max_tokens": 100}).invoke(ASKED)
        assert said.usage_metadata["total_tokens"] == prompt + 3
        assert said.response_metadata["finish_reason"] == "length"
        short = model.model_copy(update={"num_ctx": prompt})
        with pytest.raises(theirs.ContextOverflowError, match=f"exceeds num_ctx={prompt}, which counts both, by 1: raise num_ctx, shorten"):
            short.invoke(ASKED)
        assert not model._engine().scheduler.live
        assert model.invoke([HumanMessage("x")]).usage_metadata["output_tokens"] == 2


@pytest.mark.skipif(not hasattr(os, "fork"), reason="processes do not fork here")
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_child_loads_by_name_again(own: Any) -> None:
    """gunicorn --preload, ProcessPoolExecutor: what was loaded in the parent computes in the parent alone."""
    with own() as model:
        expected = model.invoke(ASKED).text
        given = ChatAgentCache(engine=model._engine(), max_tokens=1)

        def answers() -> list[Any]:
            try:
                given.invoke(ASKED)
            except errors.EngineClosedError as error:
                return [model.invoke(ASKED).text, str(error)]
            return []

        context = multiprocessing.get_context("fork")
        mine, its = context.Pipe(duplex=False)
        child = context.Process(target=lambda: its.send(answers()))
        child.start()
        try:
            assert mine.poll(30), "the child hangs"
            text, said = mine.recv()
        finally:
            child.kill()
            child.join()
        assert text == expected
        assert "forked child" in said
        assert model.invoke(ASKED).text == expected, "the parent's goes on"


@pytest.mark.parametrize("form", [ChatAgentCache, AgentCacheLLM])
def test_fields_that_are_configured_later(form: Any, own: Any, model_folder: str) -> None:
    """LangChain makes the model anew of all its fields: what was passed together may be passed again."""
    with Engine(model_folder, store=None, memory_bytes=32 << 20) as engine, own(form, token="hf_x", stop="zzz") as by_name:
        for model in (by_name, form(engine=engine, max_tokens=2)):
            later = model.configurable_fields(max_tokens=ConfigurableField(id="most"))
            long = later.with_config(configurable={"most": 9}).invoke("Which ship?")
            assert model.get_num_tokens(str(getattr(long, "content", long))) > 2
            assert later.with_config(configurable={"most": 9}).with_fallbacks([by_name]).invoke("x")
