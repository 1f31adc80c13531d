"""lint with a tokenizer: faults of templates are seen and told from faults of the application; and templates probed by themselves."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from agentcache.cli import app as cli
from agentcache.lint import Cause, Options, Report, lint
from agentcache.lint.templated import Loaded, Templated
from agentcache.lint.templates import Probe, probe, template_of, wordless
from tests import chat_templates as templates
from tests.lint.requests import conversation, with_system_line
from tests.models import toy_tokenizer

TOKENIZER = toy_tokenizer()


def linted(bodies: list[dict[str, Any]], template: str = templates.CHATML) -> Report:
    return lint([{"conversation_id": "a", **body} for body in bodies], Options(tokenizer=Loaded(TOKENIZER, template)))


def asked(steps: int = 2) -> list[dict[str, Any]]:
    """A run, its answer and a new question."""
    bodies = conversation(steps)
    more = [{"role": "assistant", "content": "Yes, at pier b."}, {"role": "user", "content": "And on Sunday?"}]
    return [*bodies, {"messages": [*bodies[-1]["messages"], *more], "tools": bodies[-1]["tools"]}]


def test_the_embedded_model_is_known_by_its_name() -> None:
    assert {one.name for one in probe(template_of("embedded"))}


def test_a_template_that_renders_nothing_is_probed() -> None:
    found = {one.name: one.answer for one in probe(wordless("{% if false %}{{ messages }}{% endif %}"))}
    assert found["kept when tools are switched off"] == "refused"


def test_a_template_that_keeps_the_prefix_is_clean() -> None:
    found = linted(asked())
    assert found.findings == []
    assert found.problems == []
    assert found.unit == "tokens"


def test_positions_are_those_of_the_rendered_ids() -> None:
    bodies = with_system_line(conversation(1), ["It is 09:26:53.", "It is 09:27:10."])
    (finding,) = linted(bodies).findings
    texts = [
        TOKENIZER.apply_chat_template(
            _parsed(body["messages"]), tools=body["tools"], chat_template=templates.CHATML, tokenize=False, add_generation_prompt=True
        )
        for body in bodies
    ]
    one, two = (TOKENIZER(text, add_special_tokens=False)["input_ids"] for text in texts)
    assert finding.token == next(at for at, (was, now) in enumerate(zip(one, two)) if was != now)
    assert (finding.cause, finding.writer) == (Cause.CLOCK, "system")
    assert texts[1][finding.char :].startswith(finding.context.now)
    assert finding.cost_tokens > 0


def _parsed(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    out = json.loads(json.dumps(messages))
    for message in out:
        for call in message.get("tool_calls", ()):
            call["function"]["arguments"] = json.loads(call["function"]["arguments"])
    return out


def test_tools_that_a_template_moves() -> None:
    (finding,) = linted(asked(), templates.LAST_USER).findings[-1:]
    assert (finding.cause, finding.writer) == (Cause.TOOLS_MOVED, "template")
    assert finding.cost_tokens > 0


def test_reasoning_that_a_template_takes_out() -> None:
    bodies = asked(1)
    for body in bodies[1:]:
        body["messages"][2]["reasoning_content"] = "First the piers, then the tides, since the mast is high."
    found = linted(bodies, templates.REASONING).findings
    assert [(finding.cause, finding.writer) for finding in found] == [(Cause.REASONING, "template")]


def test_what_a_template_does_not_show_is_no_finding() -> None:
    bodies = conversation(2)[1:]
    bodies[1]["messages"][2]["tool_calls"][0]["id"] = bodies[1]["messages"][3]["tool_call_id"] = "call_other"
    assert linted(bodies).findings == []


def test_white_space_of_arguments_does_not_reach_the_ids() -> None:
    bodies = conversation(2)[1:]
    bodies[1]["messages"][2]["tool_calls"][0]["function"]["arguments"] = '{"day":"friday","size":0}'
    assert linted(bodies).findings == []
    bodies[1]["messages"][2]["tool_calls"][0]["function"]["arguments"] = '{"size":0,"day":"friday"}'
    assert [finding.cause for finding in linted(bodies).findings] == [Cause.ARGUMENTS]


def test_what_a_template_refuses_is_compared_in_characters() -> None:
    bodies = with_system_line(conversation(1), ["It is 09:26:53.", "It is 09:27:10."])
    for body in bodies:
        body["messages"].append({"role": "tool", "tool_call_id": "nobody", "content": "lost"})
    found = linted(bodies)
    assert len(found.problems) == 2
    assert "nobody" in found.problems[0].message
    assert found.findings[0].cause is Cause.CLOCK


def test_ids_do_not_depend_on_what_was_tokenised_before() -> None:
    bodies = with_system_line(conversation(3), [f"It is 09:2{number}:53." for number in range(4)])
    made: list[Any] = []
    lint([{"conversation_id": "a", **body} for body in bodies], Options(tokenizer=Loaded(TOKENIZER, templates.CHATML)))
    from agentcache.lint.provider_formats import ProviderFormats

    templated, known = Templated(Loaded(TOKENIZER, templates.CHATML)), None
    for number, body in enumerate(bodies):
        (request,) = ProviderFormats().requests(body, 1, number, lambda said: None)
        known = templated.prompt(request, known)
        made.append(known)
        assert list(known.encoded.ids) == TOKENIZER(known.encoded.text, add_special_tokens=False)["input_ids"]
        assert sum(len(part) for part in known.parts) == len(known.encoded.ids)


def test_ids_that_a_template_refuses_are_numbered() -> None:
    bodies = asked()
    found = linted(bodies[:1], templates.LAST_USER)
    assert found.problems == []
    assert "call_0" not in json.dumps(linted(bodies, templates.LAST_USER).as_dict())


# Templates by themselves


def answers(template: str) -> dict[str, Probe]:
    return {one.name: one for one in probe(wordless(template))}


def test_a_good_template_has_no_bad_answer() -> None:
    found = answers(templates.CHATML)
    assert [one.name for one in found.values() if one.good is False] == []
    assert found["tools stand"].answer in ("after system", "before system")
    assert found["prints a date"].answer == "no"


def test_bad_templates_are_told() -> None:
    assert answers(templates.LAST_USER)["tools stand"].answer == "last user"
    assert answers(templates.LAST_USER)["prefix kept at the next user turn"].good is False
    assert answers(templates.REASONING)["prefix kept with reasoning returned"].good is False
    assert "at character" in str(answers(templates.DATED)["prints a date"].answer)
    assert answers(templates.DROPS_SYSTEM)["system message"].answer == "dropped"
    assert answers(templates.NO_TOOLS)["tools stand"].answer == "absent"


@pytest.mark.parametrize("form", ["file", "folder"])
def test_the_command_takes_a_file_or_a_folder(tmp_path: Path, form: str) -> None:
    if form == "file":
        path = tmp_path / "bad.jinja"
        path.write_text(templates.LAST_USER, encoding="utf-8")
    else:
        tokenizer, path = toy_tokenizer(), tmp_path / "tokenizer"
        tokenizer.chat_template = templates.LAST_USER
        tokenizer.save_pretrained(path)
    done = CliRunner().invoke(cli.app, ["lint", "--template", str(path), "--json"])
    assert done.exit_code == 1
    found = {one["probe"]: one["answer"] for one in json.loads(done.output)["probes"]}
    assert found["tools stand"] == "last user"
    done = CliRunner().invoke(cli.app, ["lint", "--template", str(path)], env={"COLUMNS": "140"})
    assert "last user" in done.output


def test_a_tokenizer_without_a_template_is_refused(tmp_path: Path) -> None:
    tokenizer = toy_tokenizer()
    tokenizer.chat_template = None
    tokenizer.save_pretrained(tmp_path)
    done = CliRunner().invoke(cli.app, ["lint", "--template", str(tmp_path)])
    assert done.exit_code == 1
    assert "no chat template" in done.output
    with pytest.raises(ValueError, match="no chat template"):
        template_of(str(tmp_path))


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("bad.jinja", b"{% for m in messages %}\n{% if %}{% endif %}{% endfor %}", "Expected an expression"),
        ("bad.jinja", b"a\n{{ messages | nothing_of_the_kind }}", "nothing_of_the_kind"),
        ("bad.jinja", "{# \u00fcber #}".encode("latin-1"), "UTF-8"),
        ("missing.jinja", None, "missing.jinja"),
    ],
    ids=["syntax", "filter", "encoding", "missing"],
)
@pytest.mark.parametrize("option", ["--template", "--chat-template"])
def test_a_file_without_template_is_one_line(tmp_path: Path, name: str, content: bytes | None, said: str, option: str) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    (tmp_path / "log.jsonl").write_text(json.dumps(conversation(0)[0]))
    toy_tokenizer().save_pretrained(tmp_path / "tokenizer")
    more = [] if option == "--template" else [str(tmp_path / "log.jsonl"), "--tokenizer", str(tmp_path / "tokenizer")]
    done = CliRunner().invoke(cli.app, ["lint", option, str(tmp_path / name), *more])
    assert isinstance(done.exception, SystemExit), done.exception
    assert done.exit_code == 1
    assert done.output.startswith("agentcache: ")
    assert done.output.count("\n") == 1
    assert said in done.output


def test_a_tokenizer_whose_own_template_is_none(tmp_path: Path) -> None:
    tokenizer = toy_tokenizer()
    tokenizer.chat_template = "{% if %}"
    tokenizer.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="is not Jinja.*line 1"):
        template_of(str(tmp_path))
