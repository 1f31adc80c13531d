"""Messages on their way to the engine: every block and role, and what is refused by name."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
from cases import call, system, tools, user
from llama_index.core.base.llms.types import (
    CacheControl,
    CachePoint,
    ChatMessage,
    CitableBlock,
    ImageBlock,
    TextBlock,
    ThinkingBlock,
    ToolCallBlock,
)
from llama_index.llms.agentcache.cache_points import seconds_of
from llama_index.llms.agentcache.translate import to_messages

from agentcache.errors import ConfigError, ContextOverflowError, MessageError, ToolSchemaError

Make = Callable[..., Any]


def _point(ttl: str = "5m", type: str = "ephemeral") -> CachePoint:
    return CachePoint(cache_control=CacheControl(type=type, ttl=ttl))


def test_blocks_become_one_message() -> None:
    asked = ToolCallBlock(tool_call_id="a", tool_name="tide", tool_kwargs='{"harbour": "Averil"}')
    blocks = [ThinkingBlock(content="hm"), TextBlock(text="one"), _point(), TextBlock(text="two"), asked]
    (message,) = to_messages([ChatMessage(role="assistant", blocks=blocks)])
    assert (message.content, message.reasoning) == ("one\ntwo", "hm")
    assert [(one.name, one.arguments, one.id) for one in message.tool_calls] == [("tide", {"harbour": "Averil"}, "a")]


def test_roles_and_citable_text() -> None:
    cited = CitableBlock(title="log", source="1", content=[TextBlock(text="wind north")])
    messages = to_messages(
        [
            ChatMessage(role="developer", content="Be brief."),
            ChatMessage(role="user", blocks=[cited]),
            ChatMessage(role="model", content="Yes."),
        ]
    )
    assert [(one.role, one.content) for one in messages] == [("system", "Be brief."), ("user", "wind north"), ("assistant", "Yes.")]


def test_calls_in_openai_shape_of_older_integrations() -> None:
    old = {"tool_calls": [{"id": "x", "function": {"name": "tide", "arguments": '{"harbour": "A"}'}}]}
    (message,) = to_messages([ChatMessage(role="assistant", content="", additional_kwargs=old)])
    assert message.tool_calls[0].arguments == {"harbour": "A"}


def test_late_system_text_goes_to_the_user_side() -> None:
    late = [user("one"), ChatMessage(role="assistant", content="two"), system("Stop now.")]
    assert [(one.role, one.content) for one in to_messages(late)][2:] == [("user", "Stop now.")]
    assert to_messages([user("one"), system("Stop now.")])[0].content == "one\n\nStop now."
    assert to_messages(late, "system")[2].role == "system"
    assert to_messages([system("a"), system("b"), user("c")])[1].role == "system"


@pytest.mark.parametrize(
    ("messages", "why"),
    [
        ([], "empty"),
        ("hello", "complete"),
        ([{"role": "user", "content": "x"}], r"messages\[0\]"),
        ([ChatMessage(role="user", blocks=[ImageBlock(image=b"x")])], "ImageBlock"),
        ([ChatMessage(role="user", blocks=[ToolCallBlock(tool_name="t")])], "ToolCallBlock"),
        ([ChatMessage(role="assistant", blocks=[ToolCallBlock(tool_name="t", tool_kwargs="{")])], "not JSON"),
        ([ChatMessage(role="assistant", blocks=[ToolCallBlock(tool_name="t", tool_kwargs="[1]")])], "not a JSON object"),
        ([ChatMessage(role="tool", content="x", additional_kwargs={"tool_call_id": "a"})], "answers no open call"),
    ],
)
def test_messages_that_cannot_work(llm: Make, messages: Any, why: str) -> None:
    model = llm("never said")
    with pytest.raises((MessageError, ConfigError), match=why):
        model.chat(messages) if not isinstance(messages, str) else to_messages(messages)
    assert not model.receipts


@pytest.mark.parametrize(
    ("options", "error", "why"),
    [
        ({"temprature": 1.0}, ConfigError, "temprature"),
        ({"temperature": -1.0}, ConfigError, "temperature"),
        ({"max_tokens": 0}, ConfigError, "max_tokens"),
        ({"stop": [""]}, ConfigError, "stop"),
        ({"tools": "tide"}, ToolSchemaError, "tide"),
        ({"tools": [42]}, ToolSchemaError, "42"),
        ({"tools": [{"type": "function"}]}, ToolSchemaError, "no function name"),
        ({"tool_choice": "tides", "tools": tools()}, ConfigError, "'tide', 'wind'"),
        ({"tool_choice": "any"}, ConfigError, "no tools are given"),
        ({"schema": {}, "regex": "a+"}, ConfigError, "schema and regex"),
    ],
)
def test_options_that_cannot_work(llm: Make, run: Make, options: dict[str, Any], error: Any, why: str) -> None:
    with pytest.raises(error, match=why):
        llm("never said").chat([user("hello")], **options)
    with pytest.raises(error, match=why):
        run(llm("never said").achat([user("hello")], **options))


def test_a_prompt_too_long_is_refused_before_it_is_computed(llm: Make, run: Make) -> None:
    model = llm("never", "never")
    with pytest.raises(ContextOverflowError):
        model.chat([user("tide " * 20000)])
    with pytest.raises(ContextOverflowError):
        run(model.achat([user("tide " * 20000)]))


# -- order and cache points --------------------------------------------------------------------------------------------


def _asked(first: str, second: str) -> list[ChatMessage]:
    calls = [ToolCallBlock(tool_call_id=one, tool_name="tide", tool_kwargs={"harbour": one}) for one in ("slow", "fast")]
    results = [ChatMessage(role="tool", content=f"result of {one}", additional_kwargs={"tool_call_id": one}) for one in (first, second)]
    return [user("Both tides?"), ChatMessage(role="assistant", blocks=calls), *results]


def test_results_are_rendered_in_the_order_of_their_calls(llm: Make) -> None:
    model = llm("Done.", "Done.")
    model.chat(_asked("slow", "fast"), tools=tools())
    model.chat(_asked("fast", "slow"), tools=tools())  # as they arrive when the second call is done first
    assert model.receipts[1].prompt_tokens == model.receipts[0].prompt_tokens
    assert model.receipts[1].cached_tokens == model.receipts[1].prompt_tokens - 1


def test_a_cache_point_is_pinned_and_never_rendered(llm: Make) -> None:
    model = llm("One.", "Two.", "Three.")
    plain = [system("You keep the light. " * 40), user("hello")]
    pointed = [ChatMessage(role="system", blocks=[*plain[0].blocks, _point()]), user("hello")]
    model.chat(pointed, tools=tools())
    groups = [group for group in model.engine.groups if group.namespace == model.namespace]
    assert len(groups) == 1
    assert groups[0].name.startswith("cache-point-")
    assert groups[0].prefix_tokens > 100
    model.chat(plain, tools=tools())
    assert model.receipts[0].prompt_tokens == model.receipts[1].prompt_tokens
    assert model.receipts[0].cached_tokens >= groups[0].prefix_tokens
    model.chat(pointed, tools=tools())
    assert [group for group in model.engine.groups if group.namespace == model.namespace] == groups, "it only lasts longer"


def test_a_cache_point_ends_after_its_time(llm: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    model = llm("One.", "Two.")
    now = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    pinned = lambda: [group.name for group in model.engine.groups if group.namespace == model.namespace]  # noqa: E731
    model.chat([ChatMessage(role="system", blocks=[TextBlock(text="First. " * 30), _point("5m")]), user("hello")])
    (first,) = pinned()
    now[0] += 301
    model.chat([ChatMessage(role="system", blocks=[TextBlock(text="Second. " * 30), _point("1h")]), user("hello")])
    assert first not in pinned()
    assert len(pinned()) == 1


def test_the_longest_point_holds_and_a_persistent_one_forever() -> None:
    assert [seconds_of(_point(ttl)) for ttl in ("30s", "5m", "1h", "2d")] == [30, 300, 3600, 172800]
    assert seconds_of(_point(type="persistent")) == float("inf")


def test_the_longer_of_two_points_holds_a_request(llm: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    model, asked = llm("One."), []
    monkeypatch.setattr(model.engine, "pin", lambda *given, **options: asked.append(options["ttl_s"]))
    blocks = [TextBlock(text="Be brief. " * 20), _point("1h"), _point("5m")]
    model.chat([ChatMessage(role="system", blocks=blocks), user("hello")])
    assert asked == [3600]


def test_a_point_behind_tools_holds_the_conversation_up_to_it(llm: Make) -> None:
    model = llm("One.", "Two.")
    talk = _asked("slow", "fast")
    talk[-1] = ChatMessage(role="tool", blocks=[*talk[-1].blocks, _point()], additional_kwargs=talk[-1].additional_kwargs)
    model.chat(talk, tools=tools())
    (held,) = [group for group in model.engine.groups if group.namespace == model.namespace]
    assert model.receipts[0].prompt_tokens - 1 <= held.prefix_tokens <= model.receipts[0].prompt_tokens
    model.chat([*talk, ChatMessage(role="assistant", content="One."), user("Sure?")], tools=tools())
    assert model.receipts[1].cached_tokens >= held.prefix_tokens
    assert not model.receipts[1].notes


def test_a_cache_point_of_an_unknown_kind_is_refused(llm: Make) -> None:
    for point in (_point("5 minutes"), _point(type="forever")):
        with pytest.raises(ConfigError, match="ephemeral"):
            llm("never").chat([ChatMessage(role="system", blocks=[TextBlock(text="x"), point]), user("hello")])


def test_an_unpinnable_cache_point_breaks_no_request(run: Make) -> None:
    from cases import tiny
    from llama_index.llms.agentcache import ReplayLLM

    with tiny(memory_bytes=0) as engine:
        model = ReplayLLM(engine=engine, script=["One."], constrain=False)
        raw = model.chat([ChatMessage(role="system", blocks=[TextBlock(text="Be brief. " * 20), _point()]), user("hello")]).raw
        assert "not pinned" in raw["receipt"]["notes"][0]
        model.close()


def test_scripts_end_by_name(llm: Make) -> None:
    with pytest.raises(ConfigError, match="script is over"):
        llm().chat([user("hello")])


def test_call_text_of_the_tests_is_understood(llm: Make) -> None:
    model = llm(call("tide", harbour='A "quoted" name'))
    (found,) = model.get_tool_calls_from_response(model.chat_with_tools(tools(), user_msg="?"))
    assert found.tool_kwargs == {"harbour": 'A "quoted" name'}
