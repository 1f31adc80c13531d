"""Policies: what each namespace may ask of an engine, as rules of a TOML file. Knows no model and no pages.

[[rule]]                         # the first one that fits a request counts; where none does, all is allowed
name = "guests"                  # in receipts and errors; by default its number
namespace = "guest-*"            # patterns, * by default
model = "*"
adapter = ""                     # this one fits the base alone
reuse = ["exact", "off"]         # that may be asked for; others become exact reuse, or none
requests = 4                     # of one namespace at once
pages = 2000                     # that pins of one namespace hold
bytes = 4000000000               # the same
lease_s = 3600                   # the longest time that a pin lasts
groups = ["desk*"]               # names that may be pinned, and so be found by others
"""

from __future__ import annotations

import os
import re
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
from typing import TYPE_CHECKING, Any, get_args

from .errors import ConfigError, PolicyError, shown
from .toml_file import read_toml
from .types import Reason, Refusal, Reuse, check_name

if TYPE_CHECKING:
    from .lifecycle import Lifecycle
    from .receipt import Account
    from .request import Running
    from .store.tool_group import ToolGroup

MODES: tuple[str, ...] = get_args(Reuse)
Release = Callable[..., bool]
_TEXT: tuple[Callable[[Any], bool], str] = (lambda value: isinstance(value, str), "a text")
_WHOLE: tuple[Callable[[Any], bool], str] = (lambda value: type(value) is int and value > 0, "a whole number of at least 1")
KEYS: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    **dict.fromkeys(("name", "namespace", "model", "adapter"), _TEXT),
    "reuse": (lambda value: isinstance(value, list) and all(one in MODES for one in value), f"a list of {', '.join(map(repr, MODES))}"),
    **dict.fromkeys(("requests", "pages", "bytes"), _WHOLE),
    "lease_s": (lambda value: type(value) in (int, float) and value > 0, "a number of seconds above 0"),
    "groups": (lambda value: isinstance(value, list) and all(isinstance(one, str) for one in value), "a list of texts"),
}


@dataclass(frozen=True, slots=True)
class Rule:
    """One rule. None: no bound."""

    name: str = ""
    namespace: str = "*"  # a pattern, as the next two
    model: str = "*"
    adapter: str = "*"  # its name; "" of the base
    reuse: Sequence[str] = MODES  # that requests may ask for
    requests: int | None = None  # at once, of one namespace
    pages: int | None = None  # that its pins may hold
    bytes: int | None = None
    lease_s: float | None = None  # the longest time that a pin lasts
    groups: Sequence[str] = ("*",)  # patterns of names that may be pinned

    @classmethod
    def of(cls, said: Mapping[str, Any], where: Callable[[str], str]) -> Rule:
        """A rule as TOML says it. where: tells the place of a key. ConfigError: a key is unknown, or its value cannot be."""
        for key, value in said.items():
            if key not in KEYS:
                raise ConfigError(f"{where(key)}: {key!r} is no key of a rule, choose from {', '.join(KEYS)}")
            fits, wanted = KEYS[key]
            if not fits(value):
                raise ConfigError(f"{where(key)}: {key}={shown(value)} must be {wanted}")
        return cls(**said)

    def check_pins(self, made: ToolGroup, held: Iterable[ToolGroup]) -> None:
        """PolicyError: with this tool group its namespace pins more than it may."""
        others = [one for one in held if one.namespace == made.namespace and one.name != made.name]
        for what, most, size in (("pages", self.pages, lambda one: one.pages), ("bytes", self.bytes, lambda one: one.kv_bytes)):
            before, own = sum(map(size, others)), size(made)
            if most is not None and before + own > most:
                said = f"{self.name!r}: {made.namespace!r} may pin {most} {what}: {before} are pinned, {made.name!r} has {own}"
                raise PolicyError(f"{said}; {'release a tool group' if own <= most else 'shorten it, or let the rule allow more'}")


class Policy:
    """The rules of one engine, in their order, and what runs under them. Thread safe."""

    def __init__(self, rules: Iterable[Rule]) -> None:
        self.rules = tuple(rules)
        self._model = ""
        self._lock = threading.RLock()
        self._running: set[Running] = set()
        self._ends: dict[tuple[str, str], float] = {}  # of pins, by time.monotonic()

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> Policy:
        """From a file. ConfigError: it cannot be read, or holds what is no rule; file and line are named."""
        plain, text = read_toml(path, f"policy={os.fspath(path)!r}")
        heads = [number for number, line in enumerate(text.split("\n"), 1) if re.match(r"\s*\[\[", line)]
        tables = plain.pop("rule", None)
        if plain or not isinstance(tables, list) or not all(isinstance(one, dict) for one in tables):
            raise ConfigError(f"policy={os.fspath(path)!r}: holds {sorted(plain)!r}; give it [[rule]] tables, and nothing else")

        def where(number: int, key: str) -> str:
            """The line of a key in the table of that number."""
            start = heads[number] if number < len(heads) else 1
            below = enumerate(text.split("\n")[start - 1 :], start)
            line = next((at for at, line in below if re.match(rf"\W*{re.escape(key)}\W*=", line)), start)
            return f"policy={os.fspath(path)!r}, line {line}"

        return cls(Rule.of({"name": f"rule {at + 1}", **said}, partial(where, at)) for at, said in enumerate(tables))

    def attach(self, model: str, lifecycle: Lifecycle) -> None:
        """Hold for this model's requests from now on."""
        self._model, inner = model, lifecycle.on_end

        def ended(running: Running) -> str:
            with self._lock:
                self._running.discard(running)
            return inner(running) if inner is not None else ""

        lifecycle.on_end = ended

    def rule(self, namespace: str, adapter: str | None) -> Rule:
        """The first rule that fits; one that allows all where none does."""
        asked = (namespace, self._model, str(adapter or ""))
        fit = (one for one in self.rules if all(map(fnmatchcase, asked, (one.namespace, one.model, one.adapter))))
        return next(fit, Rule())

    def allow(self, account: Account, adapter: str | None, reuse: Reuse) -> Reuse:
        """The reuse that a request gets; its account has a refusal if that is not what it asked for."""
        rule = self.rule(account.receipt.namespace, adapter)
        if reuse in rule.reuse or reuse == "off":
            return reuse
        allowed: Reuse = "exact" if "exact" in rule.reuse else "off"
        why = f"{rule.name!r} does not allow reuse={reuse!r}: {allowed!r} instead"
        account.record_refusals([Refusal(Reason.POLICY, 0, account.receipt.prompt_tokens, why)])
        return allowed

    def check_requests(self, namespace: str, adapter: str | None) -> None:
        """PolicyError: the namespace runs as many requests as it may, but for those that their callers have left.

        Asked before the prompt is laid out, and as it begins.
        """
        check_name("namespace", namespace)
        rule = self.rule(namespace, adapter)
        with self._lock:
            self._running = {one for one in self._running if not one.events.cancelled}
            count = sum(one.asked.namespace == namespace for one in self._running)
        if rule.requests is not None and count >= rule.requests:
            raise PolicyError(f"{rule.name!r}: {namespace!r} has {rule.requests} requests running: wait for one to end")

    def begin(self, running: Running, adapter: str | None, release: Release) -> None:
        """Count a request that begins, and release pins whose lease is over. PolicyError as of `check_requests`."""
        with self._lock:
            self.check_requests(running.asked.namespace, adapter)
            self._running.add(running)
            over = [key for key, end in self._ends.items() if end < time.monotonic()]
            for key in over:
                del self._ends[key]
        for where, name in over:
            release(name, namespace=where)

    def check_name(self, namespace: str, adapter: str | None, name: str | None) -> None:
        """PolicyError: no tool group of this name may be pinned."""
        rule = self.rule(namespace, adapter)
        if not any(fnmatchcase(name or "", pattern) for pattern in rule.groups):
            raise PolicyError(f"{rule.name!r}: {namespace!r} may pin {list(rule.groups)!r}, not {name!r}: give another name")

    def check_pins(self, adapter: str | None, made: ToolGroup, held: Iterable[ToolGroup]) -> None:
        """Note when the lease of a tool group ends. PolicyError: it is too large."""
        rule = self.rule(made.namespace, adapter)
        rule.check_pins(made, held)
        if rule.lease_s is not None:
            with self._lock:
                self._ends[made.namespace, made.name] = time.monotonic() + rule.lease_s
