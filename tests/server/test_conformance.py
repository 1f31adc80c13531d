"""Cases of other servers' tests that no test here had yet; docs/notes/conformance.md lists all of them."""

from __future__ import annotations

from typing import Any

import pytest

from tests.serving import ASKED, SYSTEM, Served

INVOICE = {
    "type": "function",
    "name": "get_invoice",
    "description": "Get an invoice.",
    "parameters": {"type": "object", "properties": {"invoice_id": {"type": "string"}}, "required": ["invoice_id"]},
}
SAID = [{"role": "user", "content": "My name is Alice."}, {"role": "assistant", "content": "Hello Alice."}, ASKED[1]]


@pytest.mark.parametrize(
    ("asked", "kind"),
    [
        ({"input": [{"type": "message", **ASKED[1]}]}, "message"),
        ({"input": [{"type": "message", "role": "system", "content": SYSTEM}, {"type": "message", **ASKED[1]}]}, "message"),
        ({"input": [{"type": "message", **one} for one in SAID]}, "message"),
        ({"input": "Get the invoice A-1204.", "instructions": "You are a helpful assistant.", "tools": [INVOICE]}, "function_call"),
    ],
    ids=["basic-response", "system-prompt", "multi-turn", "tool-calling"],
)
@pytest.mark.parametrize("stream", [False, True])
def test_open_responses_cases_are_answered(served: Served, asked: dict[str, Any], kind: str, stream: bool) -> None:
    client = served.openai(strict=True)
    answer = client.responses.create(model="embedded", max_output_tokens=300, stream=stream, **asked)
    if stream:
        events = list(answer)
        assert [event.sequence_number for event in events] == list(range(len(events)))
        for ends in ("added", "done"):
            assert kind in [event.item.type for event in events if event.type == f"response.output_item.{ends}"]
        answer = events[-1].response
    assert kind in [item.type for item in answer.output]
    assert answer.status == "completed" or answer.usage.output_tokens == 300, "so small a model may find no end"


@pytest.mark.parametrize(
    "messages",
    [
        None,
        "string",
        [123],
        [{}],
        [{"role": 123}],
        [{"role": "system", "content": 123}],
        [{"role": "system", "content": "test"}, {}],
        [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "file://test.jpeg"}}]}],
    ],
    ids=repr,
)
def test_messages_that_are_none_are_refused(served: Served, messages: Any) -> None:
    assert served.post("/v1/chat/completions", {"messages": messages}, 400)["error"]["message"]


def test_text_in_parts_is_one_text(served: Served) -> None:
    words = ASKED[1]["content"].split(" ", 1)
    parts = [{"type": "text", "text": f"{words[0]} "}, {"type": "text", "text": words[1]}]
    whole, parted = (
        served.post("/v1/chat/completions", {"messages": [{"role": "user", "content": content}], "max_tokens": 8})
        for content in (ASKED[1]["content"], parts)
    )
    assert parted["choices"] == whole["choices"]


@pytest.mark.parametrize("schema", [123, {"type": 123}, {"type": "hiccup"}])
def test_a_schema_that_is_none_is_refused(served: Served, schema: Any) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    assert served.post("/v1/chat/completions", {"messages": ASKED, "response_format": form}, 400)
