"""The Responses API: items in, items out; a streamed response is stored as a whole one is."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from agentcache.server.responses import messages_of
from agentcache.server.stored_responses import StoredResponse, StoredResponses
from tests.serving import SYSTEM, TIDE, Served

openai = pytest.importorskip("openai")

TOOL = {"type": "function", **TIDE["function"]}  # type: ignore[dict-item]
ASKED: dict[str, Any] = {"model": "embedded", "instructions": SYSTEM, "input": "When is high water in Port Averil?", "tools": [TOOL]}
CANCEL = {
    "type": "function",
    "name": "cancel_order",
    "description": "Cancel an order.",
    "parameters": {"type": "object", "properties": {"order_id": {"type": "string"}}, "required": ["order_id"]},
}
OWN = ("id", "created_at", "completed_at")


def plain(response: Any) -> dict[str, Any]:
    """A response without what is its own: ids, times and the receipt."""
    said = copy.deepcopy(response.model_dump())
    for item in said["output"]:
        item.pop("id")
    return {key: value for key, value in said.items() if key not in (*OWN, "x_agentcache", "usage")}


@pytest.mark.parametrize("choice", ["auto", "required", {"type": "function", "name": "tide"}])
def test_a_streamed_response_is_stored_as_a_whole_one(served: Served, choice: Any) -> None:
    api = served.openai(strict=True)
    whole = api.responses.create(**ASKED, tool_choice=choice)
    told = list(api.responses.create(**ASKED, tool_choice=choice, stream=True))
    assert [event.sequence_number for event in told] == list(range(len(told)))
    assert [event.type for event in told[:2]] == ["response.created", "response.in_progress"]
    assert told[-1].type == "response.completed"
    last = told[-1].response
    assert plain(last) == plain(whole)
    for one in (whole, last):
        assert plain(api.responses.retrieve(one.id)) == plain(whole)
        assert [item.content[0].text for item in api.responses.input_items.list(one.id)] == [ASKED["input"]]
    added = [event.item.id for event in told if event.type == "response.output_item.added"]
    assert added == [event.item.id for event in told if event.type == "response.output_item.done"] == [item.id for item in last.output]
    for item in last.output:
        deltas = "".join(event.delta for event in told if event.type.endswith(".delta") and event.item_id == item.id)
        assert deltas == (item.arguments if item.type == "function_call" else item.content[0].text)
    assert {item.type for item in last.output} == ({"message"} if choice == "auto" else {"function_call"})


def test_a_response_goes_on_from_a_stored_one(served: Served) -> None:
    api = served.openai(strict=True)
    first = api.responses.create(**ASKED, tool_choice="required")
    call = first.output[-1]
    given = [{"type": "function_call_output", "call_id": call.call_id, "output": "High water in Port Averil at 11."}]
    then = api.responses.create(**{**ASKED, "input": given}, previous_response_id=first.id)
    alone = [{"role": "user", "content": ASKED["input"]}, call.model_dump(exclude_none=True), *given]
    again = api.responses.create(**{**ASKED, "input": alone})
    assert then.output_text == again.output_text
    assert "11" in then.output_text
    assert then.usage.input_tokens == again.usage.input_tokens
    assert then.usage.input_tokens_details.cached_tokens > first.usage.input_tokens, "it goes on after the call that the model wrote"
    api.responses.delete(then.id)
    with pytest.raises(openai.NotFoundError, match="not stored"):
        api.responses.retrieve(then.id)


def test_an_output_that_comes_again_is_read_once(served: Served) -> None:
    api = served.openai()
    asked = {**ASKED, "tool_choice": "required"}
    first = api.responses.create(**asked)

    def output(call: Any, said: str) -> dict[str, Any]:
        return {"type": "function_call_output", "call_id": call.call_id, "output": said}

    high = output(first.output[-1], "High water in Port Averil at 11.")
    second = api.responses.create(**{**asked, "input": [high]}, previous_response_id=first.id)
    low = output(second.output[-1], "Low water in Port Averil at 5.")
    once, again = (api.responses.create(**{**ASKED, "input": given}, previous_response_id=second.id) for given in ([low], [high, low]))
    assert (again.output_text, again.usage.input_tokens) == (once.output_text, once.usage.input_tokens), "as Semantic Kernel sends them"
    with pytest.raises(openai.BadRequestError, match="answers no open call"):
        api.responses.create(**{**ASKED, "input": [{**high, "output": "High water at 12."}, low]}, previous_response_id=second.id)
    anew = [{**first.output[-1].model_dump(exclude_none=True), "id": None}, high]
    third = api.responses.create(**{**ASKED, "input": anew}, previous_response_id=again.id)
    assert third.usage.input_tokens > again.usage.input_tokens + 20, "a call of the same id has an output of its own"


def test_stored_items_may_be_referred_to(served: Served) -> None:
    api = served.openai(strict=True)
    first = api.responses.create(**ASKED, tool_choice="required")
    call = first.output[-1]
    done = {"type": "function_call_output", "call_id": call.call_id, "output": "High water in Port Averil at 11."}
    question = {"role": "user", "content": ASKED["input"]}
    whole, referred = (
        api.responses.create(**{**ASKED, "input": [question, one, done]})
        for one in (call.model_dump(exclude_none=True), {"type": "item_reference", "id": call.id})
    )
    assert plain(referred) == plain(whole)
    assert [item.type for item in api.responses.input_items.list(referred.id, order="asc")][1] == "function_call"
    with pytest.raises(openai.NotFoundError, match="'fc_none' is not stored here"):
        api.responses.create(**{**ASKED, "input": [{"type": "item_reference", "id": "fc_none"}]})


def test_references_look_at_stored_items_once(served: Served) -> None:
    class Counted(list[dict[str, Any]]):
        looks = 0

        def __iter__(self) -> Any:
            self.looks += 1
            return super().__iter__()

    items = Counted([{"id": "msg_counted", "role": "user", "content": "When is high water?"}])
    with served.client() as http:
        stored = StoredResponse({"created_at": 0.0, "output": []}, items, [])
        served.state.responses.put("default", "resp_counted", stored)
        items.looks = 0
        asked = {"input": [{"type": "item_reference", "id": "msg_counted"}] * 9, "max_output_tokens": 1}
        answer = http.post("/v1/responses", json=asked)
    assert (answer.status_code, items.looks) == (200, 1)


@pytest.mark.parametrize("stream", [False, True])
def test_labels_may_be_nested_deep(served: Served, stream: bool) -> None:
    body = '{"input": "hi", "max_output_tokens": 1, "stream": ' + str(stream).lower() + ', "metadata": ' + '{"a":' * 900 + "1" + "}" * 901
    with served.client() as http:
        answer = http.post("/v1/responses", content=body, headers={"Content-Type": "application/json"})
    assert (answer.status_code, "output_text" in answer.text) == (200, True)


def test_input_items_are_listed_in_pages(served: Served) -> None:
    api = served.openai(strict=True)
    given = [{"role": "user" if number % 2 else "assistant", "content": str(number)} for number in range(5)]
    response = api.responses.create(model="embedded", input=given, max_output_tokens=1)

    def texts(items: Any) -> list[str]:
        return [item.content[0].text for item in items]

    first = api.responses.input_items.list(response.id, limit=2)
    assert (texts(first.data), first.has_more, first.last_id) == (["4", "3"], True, first.data[-1].id)
    assert texts(first) == ["4", "3", "2", "1", "0"], "the client asks for the other pages"
    assert texts(api.responses.input_items.list(response.id, order="asc")) == ["0", "1", "2", "3", "4"]
    with pytest.raises(openai.BadRequestError, match="answered whole"):
        next(iter(api.responses.retrieve(response.id, stream=True)))


def test_a_response_is_stored_only_if_it_may_be(served: Served) -> None:
    api = served.openai(strict=True)
    response = api.responses.create(**ASKED, store=False)
    with pytest.raises(openai.NotFoundError, match="not stored"):
        api.responses.retrieve(response.id)
    with pytest.raises(openai.NotFoundError, match="not stored"):
        api.responses.create(**ASKED, previous_response_id=response.id)


def test_a_stored_response_counts_its_conversation(served: Served) -> None:
    api = served.openai(strict=True)
    first = api.responses.create(model="embedded", input=SYSTEM, max_output_tokens=1)
    then = api.responses.create(model="embedded", input="And then?", max_output_tokens=1, previous_response_id=first.id)
    third = api.responses.create(model="embedded", input="And then?", max_output_tokens=1, previous_response_id=then.id)
    assert served.state.responses.find("default", third.id).chars > len(SYSTEM), "it has it still where the first one is forgotten"


def test_stored_responses_are_bounded_with_their_instructions_and_tools(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agentcache.server.stored_responses.STORED_CHARS", 10_000)
    kept = StoredResponses()
    for number in range(20):
        said = {"output": [], "instructions": "Read the tables. " * 50, "tools": [TOOL], "created_at": number}
        kept.put("default", str(number), StoredResponse(said, [], []))
    assert 5 < len(kept) < 11


def test_a_bound_of_no_tokens_is_named(served: Served) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        served.openai(strict=True).responses.create(**{**ASKED, "max_output_tokens": 0})
    assert refused.value.param == "max_output_tokens"


def test_a_response_out_of_tokens_is_incomplete(served: Served) -> None:
    response = served.openai(strict=True).responses.create(**ASKED, max_output_tokens=3)
    assert (response.status, response.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert response.output[-1].status == "incomplete"
    *_, last = served.openai(strict=True).responses.create(**ASKED, max_output_tokens=3, stream=True)
    assert last.type == "response.incomplete"
    assert plain(last.response) == plain(response)


def test_a_response_goes_on_from_a_cut_call(served: Served) -> None:
    asked = {"model": "embedded", "instructions": "You are a helpful assistant.", "tools": [CANCEL]}
    api = served.openai(strict=True)
    answers = (api.responses.create(**asked, input="Cancel the order 77812.", max_output_tokens=most) for most in range(8, 32))
    cut = next(answer for answer in answers if answer.output[-1].type == "function_call")
    assert cut.output[-1].status == "incomplete"
    given = [{"type": "function_call_output", "call_id": cut.output[-1].call_id, "output": "The arguments are no JSON: call again."}]
    assert api.responses.create(**asked, input=given, previous_response_id=cut.id, max_output_tokens=8).status == "incomplete"


def test_a_response_is_held_to_its_schema(served: Served) -> None:
    schema = {"type": "object", "properties": {"port": {"type": "string"}}, "required": ["port"]}
    form = {"format": {"type": "json_schema", "name": "port", "schema": schema}}
    said = served.openai(strict=True).responses.create(
        model="embedded", input="Which port?", text=form, include=["message.output_text.logprobs"], max_output_tokens=64
    )
    assert said.output_text.startswith('{"port":')
    assert said.output[0].content[0].logprobs


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"input": [{"type": "image_generation_call"}]}, "input[0].type"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "input[0].content"),
        ({"input": [{"role": "user"}]}, None),
        ({"input": [{"role": "assistant"}, {"role": "assistant", "content": None}, {"role": "user", "content": None}]}, None),
        ({"input": [{"type": "function_call_output", "call_id": ["x"], "output": "y"}]}, None),
        ({"background": True}, "background"),
        ({"truncation": "auto"}, "truncation"),
        ({"include": ["file_search_call.results"]}, "include"),
        ({"conversation": "c"}, "conversation"),
        ({"reasoning": {"summary": "detailed"}}, "reasoning.summary"),
        ({"previous_response_id": "resp-none"}, "previous_response_id"),
    ],
    ids=str,
)
def test_what_a_response_cannot_honour_is_refused(served: Served, change: dict[str, Any], param: str | None) -> None:
    with served.client() as http:
        answer = http.post("/v1/responses", json={**ASKED, **change})
    assert answer.status_code in (400, 404)
    assert answer.json()["error"]["param"] == param


def test_a_thought_comes_back_without_a_stored_response(served: Served) -> None:
    system, question = "You are a helpful assistant. No thoughts, only calls.", "Cancel the order 77812."
    asked = {"instructions": system, "input": question, "tools": [CANCEL], "store": False}
    with served.client() as http:
        first = http.post("/v1/responses", json={**asked, "include": ["reasoning.encrypted_content"]}).json()
        thought, call = first["output"]
        result = {"type": "function_call_output", "call_id": call["call_id"], "output": '{"status": "accepted"}'}
        bare = {"type": "reasoning", "id": thought["id"], "summary": [], "encrypted_content": thought["encrypted_content"]}
        given = ([{"role": "user", "content": question}, one, call, result] for one in (thought, bare))
        whole, carried = (http.post("/v1/responses", json={**asked, "input": items}).json() for items in given)
    assert thought["content"][0]["text"]
    assert carried["usage"]["input_tokens"] == whole["usage"]["input_tokens"] > first["usage"]["input_tokens"]
    assert messages_of([{**bare, "encrypted_content": "gAAAA"}])[0]["reasoning_content"] == "", "another server's, which nobody reads"


def test_a_response_takes_what_codex_sends(served: Served) -> None:
    asked = {"reasoning": {"summary": "auto"}, "client_metadata": {"session_id": "a"}, "include": ["reasoning.encrypted_content"]}
    assert served.post("/v1/responses", {**ASKED, **asked, "store": False, "max_output_tokens": 3})


def test_a_text_given_after_its_call_is_its_turn() -> None:
    call = {"type": "function_call", "call_id": "a", "name": "tide", "arguments": "{}"}
    text, result = {"role": "assistant", "content": "I look."}, {"type": "function_call_output", "call_id": "a", "output": "at 9"}
    assert messages_of([call, text, result]) == messages_of([text, call, result]), "Haystack gives calls first"
