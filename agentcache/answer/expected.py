"""The form that is expected of one completion, and the parser that reads it. Knows nothing of how its tokens come about.

A call's id is made from the prompt, the turn that the caller names, and the call's place in the answer: the same in every process, and
different at each turn.
"""

from __future__ import annotations

import functools
import hashlib
import json
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..errors import AgentCacheError, ConfigError
from ..types import Constraint, Layout, Sampling, Tool, ToolCall
from .call_forms import PROBE_ARGUMENTS, PROBE_TOOL, CallForm
from .grammar import Grammars
from .parser import AnswerParser
from .response_template import ResponseTemplate, template_for, template_of

if TYPE_CHECKING:
    from .guide import Guide

ID_CHARS = 9  # what the strictest templates ask for: nine letters and digits
_DIGITS = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"


@dataclass(frozen=True, slots=True)
class Expected:
    """Form of a completion."""

    template: ResponseTemplate
    begun: str  # what of the answer the prompt begins
    # tools and their names, as they were rendered
    tools: Sequence[Mapping[str, Any]]
    names: frozenset[str]
    formed: bool = False  # whether all of the completion has a prescribed form
    notes: tuple[str, ...] = ()  # what the caller is to know

    def parser(self, prompt: Sequence[int], turn: str) -> AnswerParser:
        """Return a new parser; ids of calls are those of this prompt and turn."""
        identify = functools.partial(call_id, prompt, turn)
        return AnswerParser(self.template, self.begun, tools=self.tools, names=self.names, identify=identify)


def tool_name(tool: Tool | Mapping[str, Any]) -> str:
    """The function's name, from any shape of a tool that was rendered."""
    return tool.name if isinstance(tool, Tool) else str(tool.get("function", tool).get("name", ""))


def asks_for_thought(template_kwargs: Mapping[str, Any] | None) -> bool:
    """Whether a request has its chat template ask for a thought, by one of the names that templates know."""
    return any(bool((template_kwargs or {}).get(name)) for name in ("enable_thinking", "thinking"))


def expect(
    layout: Layout,
    tools: Iterable[Tool | Mapping[str, Any]],
    constraint: Constraint | None,
    grammars: Grammars,
    sampling: Sampling,
    *,
    namespace: str = "default",
    thinks: bool = False,
    redact: bool = False,
) -> tuple[Expected, Guide | None]:
    """Find out what the completion of a prompt may be. Raises before anything is computed if nothing could satisfy the constraint.

    thinks: a thought may come before an answer of prescribed form, too. redact: notes name no tool and show no schema.
    """
    listed, guide, forced, notes = list(tools), None, bool(sampling.forced), list[str]()
    if constraint is None and grammars.strict and listed and not forced:
        try:
            constraint = Constraint()
            guide = grammars.guide(constraint, listed, layout.text, namespace)
        except AgentCacheError as error:  # nobody asked for it: the request goes on without
            constraint = None
            notes.append(f"calls are not held to their schemas: {'(redacted)' if redact else error}")
    elif constraint is not None:
        if not isinstance(constraint, Constraint):
            raise ConfigError(f"constraint={constraint!r:.200}: must be a Constraint, such as Constraint('any')")
        bounded = (constraint.structured or constraint.calls) and not forced  # words, and calls among them, may end anywhere
        room = sampling.max_tokens if bounded else None
        guide = grammars.guide(constraint, listed, layout.text, namespace, max_tokens=room, thinks=thinks)
    held = constraint is not None and not forced
    template, begun = _template(layout.text, grammars, notes, held=held)
    if constraint is not None and (constraint.tool_choice == "none" or (constraint.structured and not listed)):
        template = template.without_calls()
    if constraint is not None and forced:
        notes.append("forced tokens: the constraint was not applied")
    elif held and listed and not grammars.form.known:
        notes.append("calls are held to Hermes' form: how this chat template writes them is not known")
    shown = [{"name": tool.name, "parameters": tool.parameters} if isinstance(tool, Tool) else dict(tool) for tool in listed]
    formed = held and constraint is not None and (constraint.structured or constraint.calls)
    return Expected(template, begun, shown, frozenset(map(tool_name, listed)), formed, tuple(notes)), None if forced else guide


def _template(prompt: str, grammars: Grammars, notes: list[str], *, held: bool) -> tuple[ResponseTemplate, str]:
    """The template that takes the answer apart, the tokenizer's own where it has one, and what the prompt has begun of the answer.

    held: the answer is held to a constraint, and so written in a form that is known; only a template that reads this form back is asked.
    """
    try:
        own = template_of(grammars.tokenizer)
    except ValueError as error:
        notes.append(f"the tokenizer's response template is broken, ours reads the answer: {error}")
        own = None
    begun = own.begun(prompt) if own else None
    if own is not None and begun is not None and not (held and not reads(own, begun, grammars.form)):
        return own, begun
    form = grammars.form
    thought = form.thought[0].rstrip()
    return template_for(None if held and not form.known else form), thought if prompt.rstrip().endswith(thought) else ""


@functools.lru_cache(maxsize=64)
def reads(template: ResponseTemplate, begun: str, form: CallForm) -> bool:
    """Whether this template reads the calls that a constraint makes a model write in this form, after a prompt that began so."""
    if form.argument:
        return template.typed
    call = f"{form.before}{PROBE_TOOL}{form.between}{json.dumps(PROBE_ARGUMENTS)}{form.after}"
    more = f"{form.joint}{call}" if form.joint is not None else ""
    parser = AnswerParser(template, begun, names=(PROBE_TOOL,))
    parser.push(f"zthought{form.thought[1]}\n\n" if parser.thinks else "")
    parser.push(f"{form.trigger}{form.open}{call}{more}{form.close}")
    parser.finish()
    return parser.message.tool_calls == (ToolCall(PROBE_TOOL, PROBE_ARGUMENTS),) * (2 if more else 1) and not parser.message.content


def call_id(prompt: Sequence[int], turn: str, index: int) -> str:
    """The id of call number `index` of an answer. Equal prompts of different turns, as trimming makes them, give different ids."""
    said = array("I", prompt).tobytes() + index.to_bytes(4, "big")
    key = hashlib.blake2b(turn.encode("utf-8", "surrogatepass"), digest_size=32).digest()
    number = int.from_bytes(hashlib.blake2b(said, key=key, digest_size=8).digest(), "big")
    return "".join(_DIGITS[number // len(_DIGITS) ** place % len(_DIGITS)] for place in range(ID_CHARS))
