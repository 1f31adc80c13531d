"""Constraints through the engine: a model with random weights makes valid calls, alone and in packs, and nobody else notices."""

from __future__ import annotations

import json
import re
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from agentcache import Constraint, Engine, Message, Sampling, Tool, ToolCall
from agentcache.bench import families
from agentcache.errors import CancelledError, ConfigError, GenerationError
from tests import models
from tests.answer.grammars import FAMILIES
from tests.engines import MB, Spy, chat, engine, wait_until

pytest.importorskip("llguidance")

CITY = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 12}, "unit": {"enum": ["C", "F"]}},
    "required": ["city", "unit"],
}
TOOLS = [Tool("get_weather", "Weather of a city.", CITY), Tool("ping", "Is somebody there?")]
ASKED = chat("Which ships passed?")
SHIP = {
    "type": "object",
    "properties": {"ship": {"type": "string", "maxLength": 9}, "seen": {"type": "boolean"}},
    "required": ["ship", "seen"],
}


def hot(seed: int, max_tokens: int = 300) -> Sampling:
    return Sampling(max_tokens=max_tokens, temperature=1.5, seed=seed)


def check(call: ToolCall) -> None:
    assert call.name in ("get_weather", "ping")
    if call.name == "ping":
        assert call.arguments == {}
    else:
        assert call.arguments.keys() == {"city", "unit"}
        assert isinstance(call.arguments["city"], str)
        assert call.arguments["unit"] in ("C", "F")
    assert call.id
    assert re.fullmatch(r"[0-9A-Za-z]{9}", call.id)


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_random_weights_make_valid_calls(family: str) -> None:
    with engine(chat_template=FAMILIES[family]) as running:
        for seed in range(4):
            stream = running.stream(ASKED, TOOLS, sampling=hot(seed), constraint=Constraint("any", parallel=False))
            told = list(stream.deltas())
            done = stream.completion
            assert done.finish_reason == "tool_calls"
            assert len(done.message.tool_calls) == 1
            assert done.message.content == ""
            check(done.message.tool_calls[0])
            assert [d.kind for d in told][0] == "call"
            assert (told[0].text, told[0].id) == (done.message.tool_calls[0].name, done.message.tool_calls[0].id)
            assert json.loads("".join(d.text for d in told if d.kind == "arguments")) == done.message.tool_calls[0].arguments
        named = running.generate(ASKED, TOOLS, sampling=hot(9), constraint=Constraint("get_weather"))
        assert [call.name for call in named.message.tool_calls] == ["get_weather"]
        again = [*ASKED, named.message, Message("tool", "fog", tool_call_id=named.message.tool_calls[0].id)]
        after = running.generate(again, TOOLS, sampling=hot(1), constraint=Constraint("ping"))
        assert after.message.tool_calls[0].name == "ping"
        assert after.message.tool_calls[0].id != named.message.tool_calls[0].id
        assert after.receipt.cached_tokens > 0
        assert any("Hermes' form" in note for note in after.receipt.notes) == (family == "other")


def test_call_ids_tell_turns_with_one_prompt_apart() -> None:
    with engine() as running:
        options = {"sampling": hot(1), "constraint": Constraint("ping")}
        ids = {}
        for turn in ("", "1", "2", "1"):
            stream = running.stream(ASKED, TOOLS, turn=turn, **options)
            told = [delta.id for delta in stream.deltas() if delta.kind == "call"]
            assert told == [call.id for call in stream.completion.message.tool_calls]
            assert ids.setdefault(turn, told) == told, "the same for the same turn"
        assert len({told[0] for told in ids.values()}) == 3
        with pytest.raises(ConfigError, match="turn=7"):
            running.stream(ASKED, TOOLS, turn=7, **options)


def test_free_text_with_calls_in_it() -> None:
    """A model that wants to begin calls all the time finishes each as a valid one."""
    tokenizer = models.toy_tokenizer()
    tokenizer.add_tokens(["<tool_call>"])
    with Engine(models.build("qwen3", vocab_size=models.VOCAB + 1), tokenizer, memory_bytes=64 * MB) as running:
        inner = running.model.forward

        def eager(*args: object) -> torch.Tensor:
            logits = inner(*args).clone()  # type: ignore[arg-type]
            logits[:, tokenizer.convert_tokens_to_ids("<tool_call>")] += 60.0
            return logits

        running.model.forward = eager  # type: ignore[method-assign]
        seen = 0
        for seed in range(3):
            done = running.generate(ASKED, TOOLS, sampling=hot(seed, 150), constraint=Constraint())
            seen += len(done.message.tool_calls)
            for call in done.message.tool_calls:
                check(call)
            free = running.generate(ASKED, TOOLS, sampling=hot(seed, 40))
            assert not free.message.tool_calls, "the constraint did it"
        assert seen


def test_none_is_never_a_call_and_the_prompt_stays() -> None:
    with engine() as running:
        free = running.generate(ASKED, TOOLS, sampling=hot(0, 40))
        none = running.generate(ASKED, TOOLS, sampling=hot(0, 40), constraint=Constraint("none"))
        some = running.generate(ASKED, TOOLS, sampling=hot(0, 200), constraint=Constraint("any", allowed=("ping",), parallel=False))
        assert none.message.tool_calls == ()
        assert [call.name for call in some.message.tool_calls] == ["ping"]
        assert free.receipt.prompt_tokens == none.receipt.prompt_tokens == some.receipt.prompt_tokens
        assert some.receipt.computed_tokens == none.receipt.computed_tokens == 1, "forbidden tools stay in the prompt"


def test_json_regex_and_grammar() -> None:
    with engine() as running:
        for seed in range(3):
            done = running.generate(ASKED, sampling=hot(seed), constraint=Constraint(schema=SHIP))
            made = json.loads(done.message.content)
            assert made.keys() == {"ship", "seen"}
            assert isinstance(made["seen"], bool)
            assert done.finish_reason == "stop"
            assert done.message.tool_calls == ()
        name = {"type": "object", "properties": {"name": {"enum": ["Ada"]}, "parameters": {"type": "object", "properties": {}}}}
        call = running.generate(ASKED, sampling=hot(0), constraint=Constraint(schema={**name, "required": ["name", "parameters"]}))
        assert json.loads(call.message.content) == {"name": "Ada", "parameters": {}}, "JSON that looks like a call is no call"
        assert re.fullmatch(r"[ab]{3}-\d", running.generate(ASKED, sampling=hot(3), constraint=Constraint(regex=r"[ab]{3}-[0-9]")).text)
        lark = 'start: "tide" ("s" | " turns")'
        assert running.generate("Say:", sampling=hot(1), constraint=Constraint(grammar=lark)).text in ("tides", "tide turns")


def test_length_is_told_and_leaves_no_half_call() -> None:
    with engine() as running:
        whole = running.generate(ASKED, TOOLS, sampling=hot(2), constraint=Constraint("get_weather"))
        size = next(n for n in range(len(whole.ids)) if "\n</tool" in running.tokenizer.decode(whole.ids[:n]))
        ends = set()
        for count in (1, 5, size // 2, size - 12, size - 4):
            stream = running.stream(ASKED, TOOLS, sampling=Sampling(count, forced=whole.ids[:count]))
            told = list(stream.deltas())
            done = stream.completion
            assert done.finish_reason == "length"
            assert done.message.tool_calls == ()
            assert done.message.content == done.text.strip(), "nothing is lost"
            ends.add(told[-1].kind)
            if count <= 5:
                with pytest.raises(ConfigError, match=rf"max_tokens={count}: the shortest answer .* has \d+ tokens: raise it$"):
                    running.stream(ASKED, TOOLS, sampling=hot(2, count), constraint=Constraint("get_weather"))
        assert ends == {"text", "cut"}


def test_a_shortened_answer_is_told() -> None:
    long = {"type": "object", "properties": {"ship": {"type": "string"}, "seen": {"type": "boolean"}}, "required": ["ship", "seen"]}
    with engine() as running:
        tries = ((seed, running.generate(ASKED, sampling=hot(seed, 30), constraint=Constraint(schema=long))) for seed in range(20))
        seed, done = next((seed, done) for seed, done in tries if done.shortened)
        assert json.loads(done.text).keys() == {"ship", "seen"}
        assert (done.finish_reason, done.cut) == ("stop", False)
        assert any("ended early, to fit into max_tokens=30: raise it" in note for note in done.receipt.notes)
        context = done.receipt.prompt_tokens + 30
        running.model.context_tokens = context
        full = running.generate(ASKED, sampling=hot(seed, 900), constraint=Constraint(schema=long))
        assert any(f"to fit into the context of {context} tokens: shorten the prompt" in note for note in full.receipt.notes)
        whole = running.generate(ASKED, sampling=hot(0), constraint=Constraint(schema=SHIP))
        assert (whole.shortened, whole.receipt.notes) == (False, [])


def test_a_cut_answer_has_times_and_did_not_fit() -> None:
    one = Constraint(grammar='start: "x"')
    with engine() as running:
        rows: list[torch.Tensor] = []
        tries = [running.generate(ASKED, TOOLS, sampling=hot(seed, 6), constraint=one, on_logits=rows.append) for seed in range(20)]
    assert len(rows) == sum(len(done.ids) for done in tries)
    cut = [done for done in tries if done.cut]
    assert [done.ids for done in cut].count(()), "a call has no room"
    for receipt, shortened in ((done.receipt, done.shortened) for done in cut):
        assert (shortened, receipt.notes) == (False, [])
        assert receipt.prefill_ms > 0
        parts = (receipt.layout_ms, receipt.load_ms, receipt.queue_ms, receipt.match_ms, receipt.prefill_ms)
        assert sum(parts) == pytest.approx(receipt.ttft_ms, abs=1.0)


def test_packs_keep_requests_apart() -> None:
    asked = [chat(f"Question {n}?") for n in range(6)]
    kinds = [Constraint("any", parallel=False), None, Constraint(schema=SHIP), Constraint("ping"), None, Constraint("none")]
    with engine(reuse="off") as running:

        def ask(n: int) -> tuple[str, tuple[int, ...]]:
            done = running.generate(
                asked[n], TOOLS if kinds[n] != Constraint(schema=SHIP) else [], sampling=hot(n, 60), constraint=kinds[n]
            )
            return done.text, done.ids

        alone = [ask(n) for n in range(6)]
        spy = Spy(running)
        with ThreadPoolExecutor(6) as pool:
            together = list(pool.map(ask, range(6)))
        assert together == alone
        assert any(len(parts) > 1 for parts in spy.forwards)


def test_a_constraint_does_not_change_what_is_kept() -> None:
    """The same ids give the same keys and values, however they were chosen."""
    with engine() as running:
        made = running.generate(ASKED, TOOLS, sampling=hot(4), constraint=Constraint("ping"), namespace="a")
        spy = Spy(running)
        forced = running.generate(ASKED, TOOLS, sampling=Sampling(max_tokens=len(made.ids), forced=made.ids), namespace="b")
        assert forced.ids == made.ids
        own = list(spy.logits)
        spy.logits.clear()
        running.generate(ASKED, TOOLS, sampling=hot(4), constraint=Constraint("ping"), namespace="c")
        assert len(own) == len(spy.logits)
        assert all(torch.equal(a, b) for a, b in zip(own, spy.logits))


def test_forced_completions_pass_by_but_the_constraint_is_checked() -> None:
    with engine() as running:
        done = running.generate(ASKED, TOOLS, sampling=Sampling(max_tokens=30, forced="Hello there."), constraint=Constraint("any"))
        assert done.text.startswith("Hello there.")
        assert done.receipt.notes == ["forced tokens: the constraint was not applied"]
        with pytest.raises(ConfigError, match="no such tool"):
            running.generate(ASKED, TOOLS, sampling=Sampling(forced="x"), constraint=Constraint("nobody"))


def test_errors_come_before_anything_is_computed() -> None:
    with engine() as running:
        spy = Spy(running)
        for wrong in (Constraint("nobody"), Constraint(regex="["), Constraint(schema={"type": "strung"})):
            with pytest.raises(ConfigError):
                running.stream(ASKED, TOOLS, constraint=wrong)
        assert spy.forwards == []
        assert not running.scheduler.live


def test_ignore_eos_does_not_outlive_the_grammar() -> None:
    with engine() as running:
        done = running.generate(ASKED, TOOLS, sampling=Sampling(max_tokens=80, ignore_eos=True), constraint=Constraint("ping"))
        assert [call.name for call in done.message.tool_calls] == ["ping"]
        assert done.finish_reason == "tool_calls"


def test_stop_strings_still_stop() -> None:
    with engine() as running:
        done = running.generate(ASKED, TOOLS, sampling=Sampling(max_tokens=80, stop=('"arguments"',)), constraint=Constraint("ping"))
        assert done.finish_reason == "stop"
        assert done.message.tool_calls == ()


def test_ids_that_spell_nothing_are_never_drawn() -> None:
    """Models often have more ids than their tokenizer."""
    bigger = models.build("qwen3", vocab_size=models.VOCAB + 50)
    with engine(model=bigger) as running:
        for constraint in (Constraint("none"), Constraint(), Constraint("any")):
            done = running.generate(ASKED, TOOLS, sampling=Sampling(max_tokens=30, temperature=50.0, seed=1), constraint=constraint)
            assert max(done.ids) < models.VOCAB


def test_a_matcher_that_fails_ends_its_own_request(monkeypatch: pytest.MonkeyPatch) -> None:
    with engine() as running:
        monkeypatch.setattr("agentcache.answer.guide.Guide.accept", lambda self, token: "too complex")
        with pytest.raises(GenerationError, match=r"cannot be followed after token \d+: too complex"):
            running.generate(ASKED, TOOLS, constraint=Constraint("ping"))
        monkeypatch.undo()
        assert running.generate(ASKED, TOOLS, sampling=hot(0), constraint=Constraint("ping")).message.tool_calls
        assert wait_until(lambda: not running.scheduler.live)


def test_cancelled_half_way() -> None:
    with engine(memory_bytes=8 * MB) as running:
        with running.stream(ASKED, TOOLS, sampling=hot(0), constraint=Constraint("any")) as stream:
            next(stream)
        with pytest.raises(CancelledError):
            _ = stream.completion
        assert wait_until(lambda: not running.scheduler.live)


def test_greedy_and_penalties() -> None:
    with engine() as running:
        for fields in ({}, {"repetition_penalty": 1.3}, {"temperature": 1.0, "top_k": 1}, {"temperature": 0.7, "top_p": 0.1, "min_p": 0.3}):
            sampling = Sampling(max_tokens=200, seed=0 if fields else None, **fields)
            done = running.generate(ASKED, TOOLS, sampling=sampling, constraint=Constraint("ping"))
            assert [call.name for call in done.message.tool_calls] == ["ping"]


def test_constraints_hold_models_that_cannot_be_paged() -> None:
    with engine(model=families.build("recurrent_gemma")) as running:
        done = running.generate(ASKED, TOOLS, sampling=hot(0), constraint=Constraint("ping"))
        assert done.receipt.path == "stock"
        assert [call.name for call in done.message.tool_calls] == ["ping"]


def test_strict_engines_hold_calls_where_nobody_asks() -> None:
    """As a model's generation config recommends, or as the engine's owner says; a request's own constraint goes before it."""
    tokenizer = models.toy_tokenizer()
    tokenizer.add_tokens(["<tool_call>"])
    model = models.build("qwen3", vocab_size=models.VOCAB + 1)
    with Engine(model, tokenizer, memory_bytes=64 * MB) as running:
        free = [running.generate(ASKED, TOOLS, sampling=hot(seed, 60)).text for seed in range(3)]
        held = [running.generate(ASKED, TOOLS, sampling=hot(seed, 60), constraint=Constraint()).text for seed in range(3)]
        assert free != held
    model.generation_config.strict_calls = True
    with Engine(model, tokenizer, memory_bytes=64 * MB) as running:
        assert [running.generate(ASKED, TOOLS, sampling=hot(seed, 60)).text for seed in range(3)] == held
        assert running.generate(ASKED, TOOLS, sampling=hot(5), constraint=Constraint("ping")).message.tool_calls[0].name == "ping"
        assert running.generate(ASKED, sampling=hot(0, 60)).finish_reason == "length"  # without tools there is nothing to hold
        forced = running.generate(ASKED, TOOLS, sampling=Sampling(forced="<tool_call>anything"))
        assert forced.text.startswith("<tool_call>anything")
        odd = Tool("odd", "A schema that nothing fits.", {"type": "object", "properties": {"a": {"not": {}}}, "required": ["a"]})
        done = running.generate(ASKED, [*TOOLS, odd], sampling=hot(0, 20))
        assert any("not held" in note for note in done.receipt.notes)
    with Engine(model, tokenizer, memory_bytes=64 * MB, strict=False) as running:
        assert [running.generate(ASKED, TOOLS, sampling=hot(seed, 60)).text for seed in range(3)] == free
