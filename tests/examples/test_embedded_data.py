"""The generated world of the embedded model: splits, prompts, answers, packs. Its training is not run here."""

from __future__ import annotations

import functools
import json
import re
from typing import Any, Literal

import numpy as np
import pytest
import torch

from agentcache.bench import quality_cases
from agentcache.layout import Renderer
from agentcache.types import LayoutOptions, Message, ToolCall
from benchmarks.answers import parse
from examples.embedded import cases, stream
from examples.embedded import model as models
from examples.embedded import tokenizer as tokenizers
from examples.embedded.packing import Encoder, pack, samples_of, turnings
from examples.embedded.world.catalogs import FORBIDDEN, NO_TOOL
from examples.embedded.world.dialogues import END, MULTI, SILENT, Bundle, Dialogue, bundle, hermes, messages, spoken
from examples.embedded.world.facts import RELATIONS, facts
from examples.embedded.world.tools import Tool
from examples.embedded.world.words import ACTIONS, MODIFIERS, READING
from examples.embedded.world.world import SPLITS, World, sources, split_of

STYLES = stream.STYLES


@functools.cache
def made(style: str = "hermes", count: int = 60) -> list[Bundle]:
    return [bundle(f"test {number}", style, 2 + number % 12, 6) for number in range(count)]


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return tokenizers.train(vocab=700, count=12)


# Splits


@pytest.mark.parametrize("held", ["validation", "test"])
def test_held_out_bundles_are_made_of_what_training_never_sees(held: str) -> None:
    for split, source in sources(held).items():
        for number in range(8):
            one = bundle(f"{split} {number}", "hermes", 8, 6, source)
            assert one.catalog is not None
            for tool in one.catalog.ordinary:
                assert split_of("tools", f"{tool.action} {tool.thing}") == source.tools
                heads = [word for word in tool.thing.split() if word not in MODIFIERS]
                assert {split_of("words", word) for word in heads} == {source.words}


def test_splits_are_disjoint_and_all_there() -> None:
    drawn = {held: set[str]() for held in SPLITS}
    for held in SPLITS:
        source = sources(held)["unseen tools"] if held != "train" else sources("test")["seen"]
        for number in range(40):
            drawn[held] |= {
                " ".join(tool.meaning)
                for tool in bundle(f"{held} {number}", "hermes", 8, 1, source).tools
                if tool.action not in ("calculate", "search")
            }
    for one in SPLITS:
        for other in SPLITS:
            assert one == other or not drawn[one] & drawn[other]
        assert len(drawn[one]) > 100


def test_values_of_held_out_requests_are_of_their_split() -> None:
    source = sources("test")["held-out requests"]
    strings = 0
    for number in range(20):
        one = bundle(f"values {number}", "hermes", 6, 6, source)
        for turn in (turn for dialogue in one.dialogues for turn in dialogue.turns if turn.tool is not None):
            for param in turn.tool.params:
                if param.kind in ("id", "date", "email", "place") and param.name in turn.args:
                    strings += 1
                    assert split_of("values", str(turn.args[param.name])) == "test"
    assert strings > 30


# Prompts


def test_every_completion_parses_back() -> None:
    calls = 0
    for one in made():
        for sample, dialogue in zip(hermes(one), one.dialogues):
            said = [piece.text for piece in sample.pieces if piece.loss]
            turns = [turn for turn in dialogue.turns if turn.role == "assistant"]
            for text, turn in zip(said, turns):
                message = parse(text.removesuffix(END))
                assert (message.reasoning or "", message.content) == spoken(turn, one.aloud)
                if turn.tool is None:
                    assert not message.tool_calls
                else:
                    calls += 1
                    assert [(call.name, dict(call.arguments)) for call in message.tool_calls] == [(turn.tool.name, dict(turn.args))]
    assert calls > 300


def test_arguments_fit_the_schema() -> None:
    types = {"string": str, "integer": int, "number": (int, float), "boolean": bool}
    for one in made():
        for turn in (turn for dialogue in one.dialogues for turn in dialogue.turns if turn.tool is not None):
            schema = turn.tool.schema()["function"]["parameters"]
            assert set(schema["required"]) <= set(turn.args) <= set(schema["properties"])
            for name, value in turn.args.items():
                wanted = schema["properties"][name]
                assert isinstance(value, types[wanted["type"]])
                assert value in wanted.get("enum", [value])
        names = [tool.name for tool in one.tools]
        assert len(names) == len(set(names))
        assert all(re.fullmatch(r"[A-Za-z0-9_]{1,64}", name) for name in names)


def test_template_appends_only_and_writes_what_is_trained_on(tokenizer: Any) -> None:
    report = Renderer(tokenizer).report
    assert report.step_preserving
    assert report.turn_preserving
    for one in made():
        tools = [tool.schema(one.form) for tool in one.tools]
        for sample, dialogue in zip(hermes(one), one.dialogues):
            shown = tokenizer.apply_chat_template(messages(one, dialogue.turns), tools=tools, tokenize=False)
            text = "".join(piece.text for piece in sample.pieces)
            assert text == shown


@pytest.mark.parametrize("role", ["user", "system"])
def test_volatile_text_stands_before_or_in_the_answered_turn(tokenizer: Any, role: Literal["user", "system"]) -> None:
    clock = Message(role, "It is 10:33.")
    call = Message("assistant", tool_calls=(ToolCall("look", {}, "c"),))
    result = Message("tool", "[]", tool_call_id="c")
    asked = [Message("system", "Be brief."), Message("user", "Look.")]
    for at, talk in (("Look.", asked), ("<tool_response>\n[]\n</tool_response>", [*asked, call, result])):
        shown, plain = (Renderer(tokenizer).render(talk, volatile=told) for told in ([clock, "Rain."], ()))
        turn = f"<|im_start|>user\n{at}<|im_end|>\n<|im_start|>assistant\n"
        order = "It is 10:33.<|im_end|>\nRain.<|im_end|>\n" if role == "system" else "It is 10:33.\n\nRain.<|im_end|>\n"
        assert shown.text == f"{plain.text.removesuffix(turn)}{order}{turn}"
    renderer = Renderer(tokenizer, tail=LayoutOptions(ahead=True))
    first, second = (renderer.render(messages, volatile=clock) for messages in (asked, [*asked, call, result]))
    assert first.text.endswith("<|im_start|>user\nIt is 10:33.\n\nLook.<|im_end|>\n<|im_start|>assistant\n")
    assert second.text.endswith("\n[]\n</tool_response>\nIt is 10:33.<|im_end|>\n<|im_start|>assistant\n")
    assert [move.role for move in (*first.moves, *second.moves)] == [role, role]
    both = renderer.render([*asked, call, result], volatile=[Message("system", "It is 10:33."), "Rain."])
    assert both.text.count("It is 10:33.") == both.text.count("Rain.") == 1


@pytest.mark.parametrize("style", ["langchain", "langchain text"])
def test_langchain_steps_parse_and_go_on(style: str) -> None:
    for one in made(style, 20):
        samples = samples_of(one)
        for before, after in zip(samples, samples[1:]):
            if before.dialogue == after.dialogue:
                said = before.pieces[-1].text.removesuffix(END)
                assert after.pieces[1].text.startswith(before.pieces[1].text.split("<|im_end|>")[0] + said + "\nObservation: ")
        for sample in samples:
            assert len(sample.pieces) == 3
            found = re.search(r"Action: (.*)\nAction Input: (.*)", sample.pieces[2].text.removesuffix(END), re.DOTALL)
            final = "\nFinal Answer: " in sample.pieces[2].text
            assert (found is not None) != final
            assert found is None or found[1] in {tool.name for tool in one.tools}


def test_llamaindex_steps_parse() -> None:
    for one in made("llamaindex", 20):
        for sample in samples_of(one):
            text = sample.pieces[-1].text.removesuffix(END)
            found = re.fullmatch(r"Thought: (.*)\nAction: ([^\n() ]+)\nAction Input: (\{.*\})", text)
            assert (found is not None) != bool(re.fullmatch(r"Thought: (.*)\nAnswer: (.*)", text))
            if found is not None:
                assert found[2] in {tool.name for tool in one.tools}
                assert isinstance(json.loads(found[3]), dict)


# Chance


def test_a_seed_decides_everything(tokenizer: Any) -> None:
    assert bundle("same", "hermes", 9, 6) == bundle("same", "hermes", 9, 6)
    assert bundle("same", "hermes", 9, 6) != bundle("other", "hermes", 9, 6)
    whole = stream.packs(tokenizer, 3)
    packs = [next(whole) for _ in range(3)]
    resumed = next(stream.packs(tokenizer, 3, 2, sum(len(one.ids) for one in packs[:2])))
    assert np.array_equal(resumed.ids, packs[2].ids)


def test_about_half_of_the_dialogues_depend_on_context() -> None:
    flags = [dialogue.context for one in made() for dialogue in one.dialogues]
    assert 0.4 < sum(flags) / len(flags) < 0.7
    kinds = {dialogue.kind for one in made(count=60) for dialogue in one.dialogues}
    assert len(kinds) > 15


# Right answers: read off the texts that the model sees, not off the generator's own bookkeeping


def _final(one: Bundle, dialogue: Dialogue) -> tuple[str, Tool | None, dict[str, Any], str]:
    """The last request, the tool that answers it first, its arguments, and the reply if there is none."""
    last = max(number for number, turn in enumerate(dialogue.turns) if turn.role == "user")
    turn = dialogue.turns[last + 1]
    return dialogue.turns[last].text, turn.tool, dict(turn.args), turn.text


def _resolve(one: Bundle, tool: Tool) -> Tool:
    """Follows "Like X" and "the tool above" to the tool that is meant."""
    names = {other.name: other for other in one.tools}
    if re.match(r"(As (the tool )?above|Same as the previous)", tool.description):
        return _resolve(one, one.tools[one.tools.index(tool) - 1])
    named = re.match(r"(?:Like|Same as|Does what) (\w+)", tool.description)
    return _resolve(one, names[named[1]]) if named else tool


def _might_do(tool: Tool, request: str, thing: str) -> bool:
    """Whether a tool is for what a request asks for, a kind of it, or what it is a kind of. A search finds out whatever there is."""
    named = any(re.search(rf"\b{word}\b", request) for word in ACTIONS.get(tool.action, (*ACTIONS["get"], *ACTIONS["find"])))
    if tool.action not in ACTIONS:
        return named and tool.action == "search"
    return named and (f" {thing}".endswith(f" {tool.thing}") or f" {tool.thing}".endswith(f" {thing}"))


def _check(one: Bundle, dialogue: Dialogue) -> None:
    request, tool, args, reply = _final(one, dialogue)
    for turn in (turn for turn in dialogue.turns if "I need to look up" in turn.thought):
        assert [other for other in one.tools if other.thing == turn.tool.thing and other.action in READING] == [turn.tool]
    same = [other for other in one.tools if tool is not None and other.meaning == tool.meaning]
    if dialogue.kind == "forbidden":
        assert tool is None
        assert reply == FORBIDDEN
    elif dialogue.kind == "decline":
        assert tool is None
        assert reply == NO_TOOL
        thoughts = [turn.thought for turn in dialogue.turns if turn.role == "assistant"]
        asked = re.match(r"I need to \w+ the ([^:.]+)", thoughts[-1])
        assert not asked or not [other for other in one.tools if _might_do(other, request.lower(), asked[1])], request
    elif dialogue.kind in ("like", "above") and reply != FORBIDDEN:
        assert tool is not None
        assert _resolve(one, tool) != tool or len(same) == 1
        assert _resolve(one, tool).action == tool.action
        assert tool.thing in tool.description
    elif dialogue.kind == "deprecated" and reply != FORBIDDEN:
        assert tool is not None
        assert not re.search(r"Deprecated|Old:", tool.description)
        assert not any(re.search(rf"(Replaces|New) {tool.name}\b", other.description) for other in one.tools)
    elif dialogue.kind == "preferred" and reply != FORBIDDEN:
        assert tool is not None
        assert [other for other in same if re.search(rf"\b{other.name}\b", one.system)] == [tool]
    elif dialogue.kind == "service" and reply != FORBIDDEN:
        assert tool is not None
        assert tool.service in tool.name + tool.description
        here = re.findall(r"The user is in (.+?)\.(?:\s|$)", one.system)
        assert len(here) <= 1
        rules = [rf"For the {tool.thing} use (\w+)\.", rf"Everything about the {tool.thing} belongs to (\w+)\."]
        rules += [rf"Users in {place} must use (\w+) for the {tool.thing}\." for place in here]
        assert [name for rule in rules for name in re.findall(rule, one.system)] == [tool.service]
    elif dialogue.kind == "glossary" and tool is not None:
        thought = next(turn.thought for turn in reversed(dialogue.turns) if turn.tool is tool)
        word = thought.removesuffix(".").rpartition(" the ")[2] if " That is to " in thought else tool.thing
        assert word in f"{tool.name.replace('_', ' ')} {tool.description}"
    elif dialogue.kind == "tried first" and tool is not None:
        assert f"Try {tool.name} before " in one.system
    elif dialogue.kind in ("default", "profile", "today") and tool is not None:
        values = [str(value) for value in args.values()]
        assert any(value in one.system and value not in request for value in values)
    elif dialogue.kind == "plain" and reply != FORBIDDEN:
        second = [other for other in same if f"use {other.name}." in one.system or other.description.startswith("For when ")]
        assert [other for other in same if other not in second] == [tool]


def test_in_a_plain_world_comparing_words_is_enough() -> None:
    right, total = 0, 0
    for number in range(30):
        one = bundle(f"plain {number}", "hermes", 6, 6, plain=True)
        assert not one.catalog.rules
        assert len({tool.thing for tool in one.tools}) == len(one.tools)
        for dialogue in one.dialogues:
            asked = ""
            for turn in dialogue.turns:
                asked = turn.text.lower() if turn.role == "user" else asked
                if turn.tool is not None and turn.role == "assistant":
                    total += 1
                    right += [tool.name for tool in one.tools if tool.thing.lower() in asked] == [turn.tool.name]
    assert total > 100
    assert right / total > 0.8


@pytest.mark.parametrize("kind", ["glossary", "decline"])
def test_what_goes_wrong_most_can_be_drawn_more_often(kind: str) -> None:
    shares = []
    for often in ({}, {kind: 3.0}):
        made = [one.kind for number in range(40) for one in bundle(f"often {number}", "hermes", 12, 12, often=often).dialogues]
        shares.append(made.count(kind) / len(made))
    assert shares[1] > 1.5 * shares[0] > 0.03


def test_words_are_made_of_pieces_that_mean_nothing_by_themselves() -> None:
    """Of the words' split as any others, and only where there are pieces: without them a seed says what it said before."""
    pieces = ("delete", "airy", "pudru", "ool", "report")
    made = World("pieces", pieces=pieces)
    words = [made.made_up() for _ in range(400)]
    glued = [word for word in words if any(piece in word for piece in pieces)]
    assert 0.4 < len(glued) / len(words) < 0.75
    assert all(any(piece in word for word in words) for piece in ("airy", "pudru", "ool"))
    assert not any("delete" in word or "report" in word for word in words)
    assert {split_of("words", word) for word in words} == {"train"}
    assert World("pieces").made_up() == World("pieces", pieces=("delete",)).made_up()


def test_right_answers_follow_from_the_prompt() -> None:
    seen: dict[str, int] = {}
    for number in range(150):
        one = bundle(f"right {number}", "hermes", 3 + number % 15, 8)
        for dialogue in one.dialogues:
            seen[dialogue.kind] = seen.get(dialogue.kind, 0) + 1
            _check(one, dialogue)
    wanted = {"forbidden", "decline", "like", "above", "deprecated", "preferred", "service", "default", "profile", "today", "plain"}
    assert wanted <= set(seen)


def test_rules_mean_the_tools_they_speak_of() -> None:
    places = settled = 0
    for number in range(60):
        one = bundle(f"rules {number}", "hermes", 40, 1)
        here = re.findall(r"The user is in .+?\.", one.system)
        assert len(here) <= 1
        places += len(here)
        for thing in one.catalog.settled:
            assert len({tool.action for tool in one.tools if tool.thing == thing}) == 1, thing
            settled += 1
    assert places > 10
    assert settled > 30


def test_answers_from_texts_name_the_thing_and_its_value() -> None:
    catalog = next(one.catalog for one in made(count=60) if {"search", "calculate"} <= {tool.action for tool in one.tools})
    tools = tuple(next(tool for tool in catalog.tools if tool.action == action) for action in ("search", "calculate"))
    said = {relation.said("X") for relation in RELATIONS.values()} | {"The birthplace is X.", "The answer is X."}
    seen = set()
    for _ in range(200):
        turns = facts(catalog, tools)
        for at, turn in enumerate(turns):
            if turn.role == "assistant" and turn.tool is None:
                begins = [one[:-2] for one in said if turn.text.startswith(one[:-2])]
                assert len(begins) == 1, turn.text
                value = turn.text.removeprefix(begins[0]).removesuffix(".")
                assert cases._says(turns[: at + 1]).split() == quality_cases.words(value)
                seen.add(begins[0])
    assert len(seen) == len(said)


def test_look_ups_name_the_thing_and_quote_first_results() -> None:
    looked, searched = 0, 0
    for talk in (talk for one in made(count=200) for talk in one.dialogues):
        called = [turn for turn in talk.turns if turn.tool is not None]
        if talk.kind in ("chain", "condition"):
            first = next(turn for turn in called if turn.thought.startswith("I need to look up"))
            assert first.thought == f"I need to look up the {first.tool.thing} {next(iter(first.args.values()))}."
            looked += 1
        for turn in called[1:]:
            if talk.kind == "facts" and turn.tool.action == "search" and sum(one.role == "user" for one in talk.turns) == 1:
                assert re.match(r"The [a-z ]+ is .+\. I need to search for ", turn.thought), turn.thought
                searched += 1
    assert looked > 20
    assert searched > 3


def test_after_a_failure_the_thought_quotes_what_comes_next() -> None:
    quoted = set()
    for one in made(count=200):
        for talk in one.dialogues:
            for turn in talk.turns:
                if talk.kind == "fallback" and turn.thought.startswith("It failed. "):
                    why = turn.thought.removeprefix("It failed. ").removesuffix(f" I use {turn.tool.name}.")
                    assert (why in one.catalog.rules) != (why == turn.tool.description), turn.thought
                    quoted.add(why in one.catalog.rules)
    assert quoted == {True, False}


def test_of_two_ids_the_thought_names_the_meant() -> None:
    count = 0
    for one in made(count=150):
        for talk in one.dialogues:
            for turn in talk.turns:
                if found := re.match(r"There were (\S+) and (\S+)\. The (\w+) one is (\S+)\. ", turn.thought):
                    meant = found[1] if found[3] in ("first", "former") else found[2]
                    assert found[4] == meant == next(iter(turn.args.values()))
                    count += 1
    assert count > 3


def test_texts_do_not_tell_two_answers_to_one_question() -> None:
    catalog = next(one.catalog for one in made(count=60) if any(tool.action == "search" for tool in one.tools))
    search = next(tool for tool in catalog.tools if tool.action == "search")
    count = 0
    for _ in range(150):
        turns = facts(catalog, (search,))
        told = " ".join(turn.text for turn in turns if turn.role == "tool")
        for question in (turn.text for turn in turns if turn.role == "user"):
            for relation in RELATIONS.values():
                asked = "|".join(re.escape(form).replace(r"\{e\}", "(?:it|the .+)") for form in relation.questions)
                if not re.fullmatch(asked, question):
                    continue
                shapes = "|".join(
                    re.escape(one).replace(r"\{v\}", "([^.]+)").replace(r"\{E\}", "The [^.]+?").replace(r"\{e\}", "the [^.]+?")
                    for one in relation.sentences
                )
                values = {value for match in re.finditer(rf"(?:^|(?<=[.] ))(?:{shapes})", told) for value in match.groups() if value}
                assert len(values) == 1, (question, told)
                count += 1
    assert count > 100


# Tokens and packs


def test_a_word_is_cut_the_same_everywhere(tokenizer: Any) -> None:
    for word in ("weather", "vokari", "gluslam"):
        alone = tokenizer(word)["input_ids"]
        for before, after in (("get_", ""), ("the ", " now"), ('{"name": "', '"}'), ("Get the ", "."), ("(", ": str)")):
            ids = tokenizer(before + word + after)["input_ids"]
            assert any(ids[at : at + len(alone)] == alone for at in range(len(ids))), (before, word)
    text = '<tool_call>\n{"name": "get_x", "arguments": {"a": "Zürich 漢字 🙂"}}\n</tool_call>'
    assert tokenizer.decode(tokenizer(text)["input_ids"], skip_special_tokens=True) == text


@pytest.mark.parametrize("style", STYLES)
def test_pieces_are_tokenised_as_the_whole_text_is(tokenizer: Any, style: str) -> None:
    encoder = Encoder(tokenizer)
    for one in made(style, 4):
        for sample in samples_of(one):
            ids, found = encoder.sample(sample)
            assert ids.tolist() == tokenizer("".join(piece.text for piece in sample.pieces), add_special_tokens=False)["input_ids"]
            said = [piece for piece in sample.pieces if piece.loss]
            for place, piece in zip(found, said, strict=True):
                assert tokenizer.decode(ids[place.first : place.end]) == piece.text
                assert tokenizer.decode(ids[place.first : place.first + place.pick]).startswith(piece.text[: piece.pick])


@pytest.mark.parametrize("style", STYLES)
def test_a_pack_computes_what_its_samples_compute_alone(tokenizer: Any, style: str) -> None:
    encoder, one = Encoder(tokenizer), made(style, 4)[3]
    packed = pack(encoder, one, 1_000_000)
    assert len(packed.ids) < sum(len(encoder.sample(sample)[0]) for sample in samples_of(one))
    model = models.build(len(tokenizer), layers=2, hidden=64, mlp=64).eval()
    with torch.inference_mode():
        model.set_attn_implementation(models.NAME)
        rows = packed.targets()
        together = dict(zip(rows.tolist(), models.logits(model, packed, rows)))
        model.set_attn_implementation("sdpa")
        completions = iter(packed.completions)
        for sample in samples_of(one):
            ids, found = encoder.sample(sample)
            alone = model(input_ids=torch.from_numpy(ids)[None]).logits[0]
            for place in found:
                completion = next(completions)
                assert packed.ids[completion.rows].tolist() == ids[place.first : place.end].tolist()
                ours = torch.stack([together[row] for row in completion.rows.tolist()])
                assert torch.allclose(ours, alone[place.first - 1 : place.end - 1], atol=1e-4)


def test_a_full_pack_leaves_dialogues_out(tokenizer: Any) -> None:
    encoder, one = Encoder(tokenizer), made()[7]
    whole, small = pack(encoder, one, 1_000_000), pack(encoder, one, 150)
    assert len(small.ids) < len(whole.ids)
    assert {completion.dialogue for completion in small.completions} < {completion.dialogue for completion in whole.completions}


def test_a_short_dialogue_ends_with_its_last_tools_name(tokenizer: Any) -> None:
    encoder, one = Encoder(tokenizer), made("hermes", 4)[3]
    whole = pack(encoder, one, 1_000_000)
    everyone = {completion.dialogue for completion in whole.completions}
    cut = pack(encoder, one, 1_000_000, everyone)
    last = {completion.dialogue: completion for completion in cut.completions}
    assert set(last) == everyone
    calls = {completion.dialogue for completion in whole.completions if completion.kind == "call"}
    assert calls
    assert all(last[number].kind == "call" and len(last[number].rows) == last[number].pick for number in calls)
    for number in calls:
        turns = [turn for turn in one.dialogues[number].turns if turn.tool is not None]
        assert tokenizer.decode(cut.ids[last[number].rows]).endswith(turns[-1].tool.name)
    assert [c.kind for c in cut.completions if c.dialogue not in calls] == [c.kind for c in whole.completions if c.dialogue not in calls]
    assert len(cut.ids) < len(whole.ids)


@pytest.mark.parametrize("style", STYLES)
def test_forks_stand_where_rules_and_names_begin(tokenizer: Any, style: str) -> None:
    encoder, seen = Encoder(tokenizer), 0
    for one in made(style, 4):
        packed = pack(encoder, one, 1_000_000)
        for completion in packed.completions:
            rows = completion.rows.tolist()
            words = [tokenizer.decode([token]) for token in packed.ids[completion.rows]]
            forks = [rows.index(row) for row in completion.forks.tolist()]
            assert all(fork < completion.pick for fork in forks)
            if completion.kind == "call":
                begins = next(fork for fork in forks if "".join(words[:fork]).endswith(('"name": "', "Action: ")))
                name = "".join(words[begins:])
                assert any(name.startswith((f'{tool.name}"', f"{tool.name}\n")) for tool in one.tools), name
                assert any("".join(words[:fork]).endswith((".", ". ")) for fork in forks if fork < begins), words
            seen += len(forks)
        assert set(packed.forks()) <= set(packed.choices()) <= set(packed.targets())
    assert seen > 20


def test_a_name_forks_where_it_turns_away_from_others() -> None:
    names = ("letter_tool", "letter_task", "letter", "open_letter", "copy")

    def apart(text: str) -> set[str]:
        return {text[place:] for place in turnings(text, names)}

    assert apart("call letter_task") == {"letter_task", "_task", "ask"}
    assert apart("call letter_tool") == {"letter_tool", "_tool", "ool"}
    assert apart("call letter") == {"letter"}
    assert apart("call open_letter") == {"open_letter"}
    assert apart("call paint") == set()


def test_shared_beginnings_of_names_end_in_a_fork(tokenizer: Any) -> None:
    encoder, seen = Encoder(tokenizer), 0
    for one in made("hermes", 12):
        names = [tool.name for tool in one.tools]
        packed = pack(encoder, one, 1_000_000)
        for completion in (found for found in packed.completions if found.kind == "call"):
            text = tokenizer.decode(packed.ids[completion.rows[: completion.pick]])
            name = text.rsplit('"name": "', 1)[1]
            rivals = [other for other in names if other != name and other.rsplit("_", 1)[0] == name.rsplit("_", 1)[0]]
            last = packed.ids[completion.rows[completion.pick - 1]]
            if rivals and "_" in name and tokenizer.decode([last]) == name.rsplit("_", 1)[1]:
                assert completion.rows[completion.pick - 1] in completion.forks, (name, rivals)
                seen += 1
    assert seen > 3


def test_thoughts_stand_before_calls_and_hide_where_wanted() -> None:
    silent = 0
    for one in made():
        assert one.aloud != any(rule in one.system for rule in SILENT)
        silent += not one.aloud
        for turn in (turn for dialogue in one.dialogues for turn in dialogue.turns if turn.role == "assistant"):
            thought, said = spoken(turn, one.aloud)
            assert said.endswith(turn.text)
            if turn.tool is not None:
                assert turn.thought
            if turn.tool is not None or turn.text in (NO_TOOL, FORBIDDEN):
                assert (thought, said) == (("", f"{turn.thought} {turn.text}".strip()) if one.aloud else (turn.thought, turn.text))
            else:
                assert (thought, said) == ("", turn.text)
    assert silent


def test_thoughts_recall_what_decides_word_for_word() -> None:
    """Behind the thing stands what has to be known: a sentence of the system prompt, of a description, or of the user."""
    seen: set[str] = set()
    for number in range(120):
        one = bundle(f"reasons {number}", "hermes", 3 + number % 15, 8)
        for dialogue in one.dialogues:
            said = [turn.text for turn in dialogue.turns if turn.role == "user"]
            if len(said) > 1 or dialogue.kind in MULTI - {"switch"}:
                continue
            there = [one.system, *said, *(tool.description for tool in one.tools)]
            for turn in (turn for turn in dialogue.turns if turn.thought.startswith("I need to ") and ": " in turn.thought):
                known, again, meant = turn.thought.partition(": ")[2].partition(" That is to ")
                if again:  # in a word of the rule, which is not the one it was asked for with
                    word = meant.removesuffix(".").partition(" the ")[2]
                    assert word in known
                    assert f"the {word}: " not in turn.thought
                    seen.add("said again")
                parts = known.replace(". ", ".\n").split("\n") if known not in "\n".join(there) else [known]
                assert all(any(part in text for text in there) for part in parts), (known, one.system)
                seen.add(dialogue.kind)
    rules = {"like", "above", "deprecated", "profile", "today", "service", "switch", "glossary", "forbidden", "preferred"}
    assert rules | {"said again"} <= seen


def test_what_decides_is_recalled_for_every_call_that_needs_it() -> None:
    for number in range(60):
        one = bundle(f"recalled {number}", "hermes", 3 + number % 15, 8)
        for dialogue in one.dialogues:
            if dialogue.kind in ("like", "above", "deprecated", "service", "glossary", "preferred", "forbidden", "reading only"):
                mine = [turn.thought for turn in dialogue.turns if turn.role == "assistant" and ": " in turn.thought]
                assert mine or any("I need to use" in turn.thought for turn in dialogue.turns), dialogue
