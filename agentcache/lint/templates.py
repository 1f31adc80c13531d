"""The effect of a chat template on reuse: small conversations rendered, as `layout/template.py` does, with more questions. No model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import ConfigError, PromptError
from ..layout.repairs import applicable
from ..layout.template import Template
from ..layout.tokenise import common_chars
from .templated import checked, load, read_template

Plain = dict[str, Any]

_TOOL: Plain = {
    "type": "function",
    "function": {
        "name": "zprobe_fn",
        "description": "Zdescqg",
        "parameters": {"type": "object", "properties": {"zarg": {"type": "string"}, "zbrg": {"type": "integer"}}},
    },
}
_SYSTEM: Plain = {"role": "system", "content": "Zsysqa words."}
_USER: Plain = {"role": "user", "content": "Zuserqb words?"}
_NEXT: Plain = {"role": "user", "content": "Zuserqd words?"}
_THOUGHT = "Zthoughtqh."
_CLOCK = "{%- macro strftime_now(form) -%}DAY{%- endmacro -%}"


class Bare:
    """A chat template without its tokenizer: all that rendering needs of one."""

    def __init__(self, template: str) -> None:
        self.chat_template = template

    def get_chat_template(self, chat_template: str | None = None, tools: Any = None) -> str:
        """The template's text."""
        return chat_template or self.chat_template

    def apply_chat_template(self, messages: list[Plain], **options: Any) -> str:
        """The text that transformers' own renderer makes."""
        from transformers.utils.chat_template_utils import render_jinja_template

        options.pop("tokenize", None)
        words = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>", **options}
        rendered, _ = render_jinja_template(conversations=[messages], **words)
        return str(rendered[0])


@dataclass(frozen=True, slots=True)
class Probe:
    """One question, its answer, and what the answer costs; good: None where it costs nothing either way."""

    name: str
    answer: str | bool | float | None
    good: bool | None
    says: str


def template_of(name: str) -> Any:
    """A renderer: the template of a file, or the tokenizer of a folder or an id."""
    path = Path(name)
    if path.is_file() and path.name != "tokenizer_config.json":
        return Bare(read_template(path))
    tokenizer = load(str(path.parent) if path.is_file() else name).tokenizer
    if not getattr(tokenizer, "chat_template", None):
        raise ConfigError(f"template {name!r}: its tokenizer has no chat template; give a .jinja file or another model")
    checked(Template(tokenizer, None).source(True), name)
    return tokenizer


def probe(tokenizer: Any) -> list[Probe]:
    """All questions to what `template_of` gave, in the order of the table."""
    ask = _Asking(tokenizer)
    known = ask.template.report
    system = [_SYSTEM] if known.system == "kept" else []
    dated = ask.dated(system)
    repairs = applicable(ask.template.source(True))
    at_user, by_step = "the run before is computed again at each new question", "each step is computed again from where it was rewritten"
    return [
        _kept("prefix kept from step to step", known.step_preserving, by_step),
        _kept("prefix kept at the next user turn", known.turn_preserving, at_user),
        _kept("prefix kept with reasoning returned", ask.reasoning(system), "reasoning that was shown is taken out at the next question"),
        _kept("generation prompt kept", ask.generation(system), "what the model answered is computed again as history"),
        Probe("tools stand", known.tools_at, known.tools_at not in ("last user", "absent"), _TOOLS_AT.get(known.tools_at, "")),
        _share("kept when tools are switched off", ask.toggled(system)),
        Probe("prints a date", dated or "no", dated is None, "everything behind it is computed again when it changes" if dated else ""),
        Probe("prints ids of calls", known.renders_call_ids, None, "number them: new ids are new tokens" if known.renders_call_ids else ""),
        _same("order of tool keys matters", ask.tool_keys(system), "write schemas with their keys in one order"),
        _same("order of argument keys matters", ask.argument_keys(system), "keep the order in which the model wrote them"),
        Probe("arguments as a string", *ask.string_arguments(system)),
        Probe("parallel calls shown", known.parallel_calls, None, "" if known.parallel_calls else "one call in a message only"),
        _same_lost("text beside a call shown", ask.beside(system), "what the model said with its call is dropped"),
        Probe("system message", known.system, None, "" if known.system == "kept" else "say it in the first user message"),
        Probe("later system message", *ask.later_system(system)),
        Probe("can be repaired", ", ".join(repairs) or "no", None, "LayoutOptions(...), see docs/layout.md" if repairs else ""),
    ]


_TOOLS_AT = {
    "before system": "a change of the system text leaves them in place",
    "after system": "a change of the system text costs them too",
    "first user": "a change of the system text costs them too",
    "last user": "they move with every question: all behind the first is computed again",
    "absent": "the template ignores tools",
}


def _kept(name: str, answer: bool | None, cost: str) -> Probe:
    return Probe(name, "refused" if answer is None else answer, answer is not False, cost if answer is False else "")


def _same(name: str, answer: bool | None, cost: str) -> Probe:
    return Probe(name, "refused" if answer is None else answer, None, cost if answer else "")


def _same_lost(name: str, answer: bool | None, cost: str) -> Probe:
    return Probe(name, "refused" if answer is None else answer, None, cost if answer is False else "")


def _share(name: str, share: float | None) -> Probe:
    cost = "keep the tools and forbid calls instead" if share is not None and share < 0.9 else ""
    return Probe(name, "refused" if share is None else share, None, cost)


class _Asking:
    """Questions that the layout itself does not ask."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self.template = Template(tokenizer, None)

    def _shown(self, messages: Sequence[Plain], tools: Sequence[Plain] = (_TOOL,), generation: bool = True) -> str | None:
        try:
            return self.template.render(list(messages), tools, generation)
        except PromptError:
            return None

    def reasoning(self, system: list[Plain]) -> bool | None:
        """True if a run with reasoning is unchanged at the next user turn; None if reasoning is never shown."""
        call, result = _step({"zarg": "zval"})
        run = [*system, _USER, {**call, "reasoning_content": _THOUGHT}, result]
        one = self._shown(run)
        two = self._shown([*run, {"role": "assistant", "content": "Zansqc words."}, _NEXT])
        if one is None or two is None or _THOUGHT not in one:
            return None
        return two.startswith(one)

    def generation(self, system: list[Plain]) -> bool | None:
        """True if the prompt that an answer followed is still the start of the prompt with that answer in it."""
        one, two = self._shown([*system, _USER]), self._shown([*system, _USER, {"role": "assistant", "content": "Zansqc words."}, _NEXT])
        return None if one is None or two is None else two.startswith(one)

    def toggled(self, system: list[Plain]) -> float | None:
        """The share of a prompt with tools that is left when the tools are not sent."""
        messages = [*system, _USER, *_step({"zarg": "zval"})]
        one, two = self._shown(messages), self._shown(messages, ())
        return None if one is None or two is None else round(common_chars(one, two) / len(one), 3)

    def dated(self, system: list[Plain]) -> str | None:
        """The place where the template prints the time, if it does: rendered with two clocks, put before it as a macro."""
        source = self._tokenizer.get_chat_template(None, [_TOOL])
        if "strftime_now" not in source:
            return None
        clocks = [Template(self._tokenizer, _CLOCK.replace("DAY", day) + source) for day in ("Zdayone", "Ydaytwo")]
        for start in (system, []):
            try:
                one, two = (clock.render([*start, _USER], (_TOOL,), True) for clock in clocks)
            except PromptError:
                continue
            if one != two:
                at, tools = common_chars(one, two), one.find("zprobe_fn")
                where = "" if tools < 0 else ", before the tools" if at < tools else ", behind the tools"
                return f"at character {at}{where}{'' if start else ', without a system message'}"
        return "it can tell the time, but did not here"

    def tool_keys(self, system: list[Plain]) -> bool | None:
        """True if the order of a schema's keys shows."""
        turned = {"function": dict(reversed(list(_TOOL["function"].items()))), "type": "function"}
        return _differ(self._shown([*system, _USER]), self._shown([*system, _USER], (turned,)))

    def argument_keys(self, system: list[Plain]) -> bool | None:
        """True if the order of a call's arguments shows."""
        one, two = {"zarg": "zval", "zbrg": 1}, {"zbrg": 1, "zarg": "zval"}
        return _differ(*(self._shown([*system, _USER, *_step(arguments)]) for arguments in (one, two)))

    def string_arguments(self, system: list[Plain]) -> tuple[str, bool | None, str]:
        """The rendering of arguments that are JSON text instead of an object."""
        given = self._shown([*system, _USER, *_step({"zarg": "zval"})])
        text = self._shown([*system, _USER, *_step('{"zarg": "zval"}')])
        if text is None:
            return "refused", None, "send arguments as objects"
        return ("same", None, "") if text == given else ("written differently", None, "send arguments as objects")

    def beside(self, system: list[Plain]) -> bool | None:
        """True if text next to a call is shown."""
        call, result = _step({"zarg": "zval"})
        shown = self._shown([*system, _USER, {**call, "content": "Zbesideqi"}, result])
        return None if shown is None else "Zbesideqi" in shown

    def later_system(self, system: list[Plain]) -> tuple[str, bool | None, str]:
        """The place of a system message from the middle."""
        later = {"role": "system", "content": "Zlaterqj words."}
        shown = self._shown([*system, _USER, {"role": "assistant", "content": "Zansqc words."}, later, _NEXT])
        if shown is None:
            return "refused", None, "say it in a user message"
        if "Zlaterqj" not in shown:
            return "dropped", None, "say it in a user message"
        moved = shown.index("Zlaterqj") < shown.index("Zuserqb") if "Zuserqb" in shown else False
        return ("put in front", False, "all behind it is computed again") if moved else ("in place", None, "")


def _differ(one: str | None, two: str | None) -> bool | None:
    return None if one is None or two is None else one != two


def _step(arguments: Mapping[str, Any] | str) -> list[Plain]:
    """A call and its result."""
    call = {"id": "call00001", "type": "function", "function": {"name": "zprobe_fn", "arguments": arguments}}
    return [
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call00001", "name": "zprobe_fn", "content": "Zresqe"},
    ]
