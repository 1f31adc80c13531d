"""One request as the engine takes it, from a call's keyword arguments. Knows nothing of LlamaIndex.

Every keyword is either known or refused by name: an option that is silently ignored is found out much later.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

from agentcache import Engine, Message, Sampling, Stream, foreign_settings
from agentcache.errors import ConfigError, ToolSchemaError

from .names import said as in_our_words
from .tools import Offer

SAMPLING = tuple(one.name for one in fields(Sampling))
REQUEST = ("volatile", "namespace", "reuse", "rendering", "tools_order", "group", "session", "adapter", "template_kwargs")
FORMS = ("schema", "regex", "grammar")
TOOLS = ("tools", "tool_choice", "tool_required", "allow_parallel_tool_calls")


@dataclass(frozen=True, slots=True)
class Ask:
    """What goes to the engine. prompt: messages, or a text to continue. choice: as in a Constraint. form: at most one of FORMS."""

    prompt: Sequence[Message] | str
    offer: Offer = Offer(())
    choice: str = "auto"
    parallel: bool = True
    constrain: bool = True
    sampling: Sampling = field(default_factory=Sampling)
    options: Mapping[str, Any] = field(default_factory=dict)
    form: Mapping[str, Any] = field(default_factory=dict)

    @property
    def calls(self) -> bool:
        """Whether a call in the answer is a call, and not text that looks like one."""
        return bool(self.offer.shown) and self.choice != "none"

    def open(self, engine: Engine) -> tuple[Stream, tuple[str, ...]]:
        """Hand it to the engine, and what is to be noted; raises before anything is computed if it cannot work.

        A schema that cannot be enforced is an error where more than `constrain` asks for it.
        """
        try:
            return self._stream(engine), ()
        except ToolSchemaError as error:
            if not self.constrain or self.choice != "auto" or self.offer.allowed is not None or self.form:
                raise
            why = "(redacted)" if getattr(engine, "redact", False) else error
            return replace(self, constrain=False)._stream(engine), (f"calls are not held to their schemas: {why}",)

    def _stream(self, engine: Engine) -> Stream:
        options = dict(self.options)
        constraint = self._constraint()
        if constraint is not None:
            options["constraint"] = constraint
        return engine.stream(self.prompt, self.offer.shown, sampling=self.sampling, **options)

    def _constraint(self) -> Any:
        """None where decoding is free: nothing is demanded, and calls need not be held to their schemas."""
        masked = self.offer.allowed is not None
        free = self.choice == "auto" and not masked and not (self.constrain and self.offer.shown)
        silent = self.choice == "none" and not self.offer.shown
        if not self.form and (free or silent):
            return None
        from agentcache import Constraint  # only here: decoding freely needs no grammar

        return Constraint(tool_choice=self.choice, allowed=self.offer.allowed, parallel=self.parallel, **self.form)


def split(given: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """(sampling, request options, form) out of a call's keywords; None means "as the model's settings say"."""
    if not isinstance(given, Mapping):
        raise ConfigError(f"additional_kwargs={given!r:.200}: must be a dict of options")
    given = in_our_words(given)
    known = {*SAMPLING, *REQUEST, *FORMS, *TOOLS}
    if unknown := sorted(set(given) - known):
        raise ConfigError(f"unknown options {unknown!r}: known are {sorted(known)!r}{foreign_settings.did_you_mean(unknown, known)}")
    said = {name: value for name, value in given.items() if value is not None}
    if not isinstance(space := said.get("namespace", ""), str):
        raise ConfigError(f"namespace={space!r:.200}: must be a text")
    sampling = {name: said[name] for name in SAMPLING if name in said}
    options = {name: said[name] for name in REQUEST if name in said}
    form = {name: said[name] for name in FORMS if name in said}
    return sampling, options, form


def check_settings(given: Mapping[str, Any]) -> None:
    """Refuse what no request could use among the options of every request."""
    said, _, _ = split(given)
    if tools := sorted(set(given) & set(TOOLS)):
        raise ConfigError(
            f"additional_kwargs={dict(given)!r:.200} has {tools!r}: given to each call, as chat(..., tool_choice='any'); "
            "with_superset(tools) puts tools into every prompt"
        )
    sampling({}, said)


def sampling(defaults: Mapping[str, Any], given: Mapping[str, Any], stop: Any = ()) -> Sampling:
    """A Sampling of the settings, overridden by what the call says. stop: stop strings beside those."""
    values = {**defaults, **given}
    values["stop"] = tuple(dict.fromkeys((*_texts(values.get("stop")), *_texts(stop))))
    if isinstance(values.get("forced"), list):
        values["forced"] = tuple(values["forced"])
    return Sampling(**values)


def _texts(stop: Any) -> tuple[str, ...]:
    """Stop strings; one alone may stand for a list of one."""
    if not isinstance(stop := stop or (), (str, list, tuple)):
        raise ConfigError(f"stop={stop!r:.200}: must be a text or a list of texts")
    return (stop,) if isinstance(stop, str) else tuple(stop)
