"""The effect of a chat template on reuse: small conversations rendered, as `layout/template.py` does, with more questions. No model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ..answer.family_forms import form_by
from ..errors import ConfigError
from ..layout import Renderer
from ..layout.plain import Plain
from ..layout.repairs import applicable
from ..layout.template import ANSWER, FIRST, SECOND, SYSTEM, TOOL, Template, tool_step
from ..layout.template_report import report_of
from ..layout.tokenise import common_length
from .templated import checked, load, read_template

_SYSTEM: Plain = {"role": "system", "content": SYSTEM}
_USER: Plain = {"role": "user", "content": FIRST}
_NEXT: Plain = {"role": "user", "content": SECOND}
_ANSWER: Plain = {"role": "assistant", "content": ANSWER}
_THOUGHT = "Zthoughtqh."
_CLOCK = "{%- macro strftime_now(form) -%}DAY{%- endmacro -%}"


@dataclass(frozen=True, slots=True)
class Probe:
    """One question, its answer, and what the answer costs; good: None where it costs nothing either way."""

    name: str
    answer: str | bool | float | None
    good: bool | None
    says: str


def wordless(template: str) -> Any:
    """A tokenizer that has nothing but this chat template: all that rendering needs of one."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({"<unk>": 0}, "<unk>"))
    special = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}
    return PreTrainedTokenizerFast(tokenizer_object=words, chat_template=template, **special)


def template_of(name: str) -> Any:
    """A tokenizer with a chat template: the one of a folder or an id, or a wordless one for the template of a file."""
    path = Path(name)
    if path.is_file() and path.name != "tokenizer_config.json":
        return wordless(read_template(path))
    tokenizer = load(str(path.parent) if path.is_file() else name).tokenizer
    if not getattr(tokenizer, "chat_template", None):
        raise ConfigError(f"template {name!r}: its tokenizer has no chat template; give a .jinja file or another model")
    checked(Template(tokenizer, None).source(True), name)
    return tokenizer


def probe(tokenizer: Any) -> list[Probe]:
    """All questions to the template of a tokenizer, in the order of the table."""
    ask = _Asking(tokenizer)
    known, dated, repairs = ask.report, ask.dated(), applicable(ask.template.source(True))
    at_user, by_step = "the run before is computed again at each new question", "each step is computed again from where it was rewritten"
    return [
        _kept("prefix kept from step to step", known.step_preserving, by_step),
        _kept("prefix kept at the next user turn", known.turn_preserving, at_user),
        _kept("prefix kept with reasoning returned", ask.reasoning(), "reasoning that was shown is taken out at the next question"),
        _kept(
            "generation prompt kept", ask.goes_on([_USER], [_USER, _ANSWER, _NEXT]), "what the model answered is computed again as history"
        ),
        Probe("tools stand", known.tools_at, known.tools_at not in ("last user", "absent"), _TOOLS_AT.get(known.tools_at, "")),
        ask.toggled(),
        Probe("prints a date", dated or "no", dated is None, "everything after it is computed again when it changes" if dated else ""),
        Probe("prints ids of calls", known.renders_call_ids, None, "number them: new ids are new tokens" if known.renders_call_ids else ""),
        _shown("order of tool keys matters", ask.tool_keys(), True, "write schemas with their keys in one order"),
        _shown("order of argument keys matters", ask.argument_keys(), True, "keep the order in which the model wrote them"),
        ask.string_arguments(),
        Probe("parallel calls shown", known.parallel_calls, None, "" if known.parallel_calls else "one call in a message only"),
        _shown(
            "form of calls known",
            form_by(Renderer(tokenizer).render, tokenizer).known,
            False,
            "they stay text, and a constraint writes Hermes' form",
        ),
        _shown("text beside a call shown", ask.beside(), False, "what the model said with its call is dropped"),
        Probe("system message", known.system, None, "" if known.system == "kept" else "say it in the first user message"),
        ask.later_system(),
        Probe("can be repaired", ", ".join(repairs) or "no", None, "LayoutOptions(...), see docs/layout.md" if repairs else ""),
    ]


_TOOLS_AT = {
    "before system": "a change of the system text leaves them in place",
    "after system": "a change of the system text costs them too",
    "first user": "a change of the system text costs them too",
    "last user": "they move with every question: all after the first is computed again",
    "absent": "the template ignores tools",
}


def _shown(name: str, answer: bool | None, costs: bool, cost: str) -> Probe:
    """A fact about the template; `costs`: the answer that has a price."""
    return Probe(name, "refused" if answer is None else answer, None, cost if answer is costs else "")


def _kept(name: str, answer: bool | None, cost: str) -> Probe:
    """A fact that decides whether prefixes are reused."""
    return replace(_shown(name, answer, False, cost), good=answer is not False)


class _Asking:
    """Questions that the layout itself does not ask."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self.template = Template(tokenizer, None)
        self.report = report_of(self.template)
        self._system = [_SYSTEM] if self.report.system == "kept" else []

    def _text(self, messages: Sequence[Plain], tools: Sequence[Plain] = (TOOL,)) -> str | None:
        """The rendering after a system message; None if the template refuses it."""
        return self.template.attempt([*self._system, *messages], tools)

    def goes_on(self, run: Sequence[Plain], more: Sequence[Plain]) -> bool | None:
        """True if the prompt of a run is the start of a later prompt."""
        one, two = self._text(run), self._text(more)
        return None if one is None or two is None else two.startswith(one)

    def reasoning(self) -> bool | None:
        """True if a run with reasoning is unchanged at the next user turn; None if reasoning is never shown."""
        call, result = tool_step(1, 0)
        run = [_USER, {**call, "reasoning_content": _THOUGHT}, result]
        return self.goes_on(run, [*run, _ANSWER, _NEXT]) if _THOUGHT in (self._text(run) or "") else None

    def toggled(self) -> Probe:
        """The share of a prompt with tools that is left when the tools are not sent."""
        messages = [_USER, *tool_step(1, 0)]
        one, two = self._text(messages), self._text(messages, ())
        share = None if not one or two is None else round(common_length(one, two) / len(one), 3)
        cost = "keep the tools and forbid calls instead" if share is not None and share < 0.9 else ""
        return Probe("kept when tools are switched off", "refused" if share is None else share, None, cost)

    def dated(self) -> str | None:
        """The place where the template prints the time, if it does: rendered with two clocks, put before it as a macro."""
        source = self._tokenizer.get_chat_template(None, [TOOL])
        if "strftime_now" not in source:
            return None
        clocks = [Template(self._tokenizer, _CLOCK.replace("DAY", day) + source) for day in ("Zdayone", "Ydaytwo")]
        for start in (self._system, []):
            one, two = (clock.attempt([*start, _USER], (TOOL,)) for clock in clocks)
            if one is not None and two is not None and one != two:
                at, tools = common_length(one, two), one.find("zprobe_fn")
                where = "" if tools < 0 else ", before the tools" if at < tools else ", after the tools"
                return f"at character {at}{where}{'' if start else ', without a system message'}"
        return "it can tell the time, but did not here"

    def tool_keys(self) -> bool | None:
        turned = {"function": dict(reversed(list(TOOL["function"].items()))), "type": "function"}
        return _differ(self._text([_USER]), self._text([_USER], (turned,)))

    def argument_keys(self) -> bool | None:
        one, two = {"zarg": "zval", "zbrg": 1}, {"zbrg": 1, "zarg": "zval"}
        return _differ(*(self._text([_USER, *_step(arguments)]) for arguments in (one, two)))

    def string_arguments(self) -> Probe:
        """The rendering of arguments that are JSON text instead of an object."""
        given, text = (self._text([_USER, *_step(arguments)]) for arguments in ({"zarg": "zval"}, '{"zarg": "zval"}'))
        answer = "refused" if text is None else "same" if text == given else "written differently"
        return Probe("arguments as a string", answer, None, "" if answer == "same" else "send arguments as objects")

    def beside(self) -> bool | None:
        call, result = tool_step(1, 0)
        shown = self._text([_USER, {**call, "content": "Zbesideqi"}, result])
        return None if shown is None else "Zbesideqi" in shown

    def later_system(self) -> Probe:
        """The place of a system message from the middle."""
        shown = self._text([_USER, _ANSWER, {"role": "system", "content": "Zlaterqj words."}, _NEXT])
        name = "later system message"
        if shown is None or "Zlaterqj" not in shown:
            return Probe(name, "refused" if shown is None else "dropped", None, "say it in a user message")
        moved = -1 < shown.find("Zlaterqj") < shown.find("Zuserqb")
        return Probe(name, "put in front", False, "all after it is computed again") if moved else Probe(name, "in place", None, "")


def _differ(one: str | None, two: str | None) -> bool | None:
    return None if one is None or two is None else one != two


def _step(arguments: Mapping[str, Any] | str) -> list[Plain]:
    call, result = tool_step(1, 0)
    call["tool_calls"][0]["function"]["arguments"] = arguments
    return [call, result]
