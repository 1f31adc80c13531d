"""All of one source: each request after the other, the findings, and their cost. Prints nothing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from ..errors import PromptError
from .conversations import HELD, Conversations
from .diagnose import diagnose
from .hazards import Hazards
from .provider_formats import ProviderFormats
from .render import Prompt, written
from .sources import open_values
from .templated import Loaded, Templated, Tokens
from .values import Cause, Finding, Hazard, Problem, Request, Step

PROBLEMS = 1_000  # kept in full; further ones are counted
APPLICATIONS = 256  # with the first request of the newest conversation, for `across`


@dataclass(frozen=True, slots=True)
class Options:
    """Settings of lint."""

    tools_first: bool | None = None  # None: the provider's known order
    tokenizer: Loaded | None = None
    transcripts: bool = False
    across: bool = False
    redact: bool = False
    price: tuple[float, float] | None = None  # of a million prompt tokens, computed and cached


@dataclass(slots=True)
class Report:
    """The findings in one source."""

    source: str
    unit: str
    findings: list[Finding] = field(default_factory=list)
    hazards: list[tuple[Hazard, int, int]] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    conversations: int = 0
    unread: int = 0  # problems beyond those kept
    price: tuple[float, float] | None = None

    def totals(self) -> dict[str, Any]:
        """Sums over all requests. reused_share is of the prompts that had one before them in their conversation."""
        later = [step for step in self.steps if not step.first]
        tokens, reused, again = (sum(getattr(step, name) for step in later) for name in ("tokens", "reused", "again"))
        across = sum(finding.cost_tokens for finding in self.findings if finding.across)
        out: dict[str, Any] = {
            "requests": len(self.steps),
            "conversations": self.conversations,
            "later_requests": len(later),
            "clean_requests": sum(step.cause is None for step in later),
            "prompt_tokens": sum(step.tokens for step in self.steps),
            "later_tokens": tokens,
            "reused_tokens": reused,
            "again_tokens": again,
            "across_tokens": across,
            "reused_share": round(reused / tokens, 4) if tokens else None,
            "possible_share": round((reused + again) / tokens, 4) if tokens else None,
            "findings": len(self.findings),
            "causes": {str(cause): count for cause, count in Counter(finding.cause for finding in self.findings).most_common()},
            "problems": len(self.problems) + self.unread,
            "token_unit": self.unit,
        }
        if self.price is not None:
            full, cached = self.price
            out["price"] = {
                "as_sent": round(((out["prompt_tokens"] - reused) * full + reused * cached) / 1e6, 6),
                "wasted": round((again + across) * (full - cached) / 1e6, 6),
            }
        return out

    def as_dict(self) -> dict[str, Any]:
        """For programs: findings, hazards, problems and totals."""
        return {
            "source": self.source,
            "findings": [asdict(finding, dict_factory=_plain) for finding in self.findings],
            "hazards": [
                {**asdict(hazard, dict_factory=_plain), "requests": requests, "values": values} for hazard, requests, values in self.hazards
            ],
            "problems": [asdict(problem) for problem in self.problems],
            "totals": self.totals(),
        }


def _plain(fields: list[tuple[str, Any]]) -> dict[str, Any]:
    """Fields of a finding or a hazard: causes as text, under "class"."""
    return {
        "class" if key == "cause" else key: str(value) if key == "cause" else [*map(str, value)] if key == "also" else value
        for key, value in fields
    }


def lint(source: str | Path | Iterable[Any], options: Options | None = None, tell: Callable[[int], None] = lambda done: None) -> Report:
    """Everything about one source: a file, "-", `module:object`, or requests as Python objects. `tell` hears how many are done.

    Memory: the last request of each open conversation, and the findings.
    """
    return _Run(source, options or Options(), tell).report()


class _Run:
    """One pass over a source."""

    def __init__(self, source: str | Path | Iterable[Any], options: Options, tell: Callable[[int], None]) -> None:
        named = str(source) if isinstance(source, (str, Path)) else "requests"
        self._options, self._tell = options, tell
        self._report = Report(named, "tokens" if options.tokenizer else "estimated: 4 characters each", price=options.price)
        self._values = open_values(named, self._note) if isinstance(source, (str, Path)) else enumerate(source, 1)
        self._formats = ProviderFormats(options.transcripts)
        self._templated = Templated(options.tokenizer) if options.tokenizer else None
        self._prompts: dict[str, Prompt] = {}
        held = HELD // 8 if options.tokenizer else HELD  # ids and where they end take several times the room of their characters
        self._conversations = Conversations(held=held, closed=lambda name: self._prompts.pop(name, None))
        self._hazards = Hazards(options.redact)
        self._firsts: dict[tuple[str, ...], tuple[Request, str]] = {}
        self._names: dict[str, str] = {}

    def report(self) -> Report:
        first = self._options.tools_first
        for request in self._formats.read(self._values, self._note):
            try:
                self._step(request if first is None else replace(request, tools_first=first))
            except RecursionError:
                self._note(request.line, f"request {request.number}: nested too deeply to be compared: left out")
            self._tell(len(self._report.steps))
        self._report.hazards = self._hazards.listed()
        return self._report

    def _note(self, line: int, said: str, *values: object) -> None:
        if len(self._report.problems) < PROBLEMS:
            redact = self._options.redact
            shown = tuple("..." if redact else str(value) if isinstance(value, Exception) else f"{value!r:.120}" for value in values)
            self._report.problems.append(Problem(line, said % shown if values else said))
        else:
            self._report.unread += 1

    def _step(self, request: Request) -> None:
        track, before = self._conversations.place(request)
        name = self._name(track.name)
        old = self._prompts.get(track.name)
        prompt = self._prompt(request, old)
        self._hazards.look(request)
        self._prompts[track.name] = prompt
        if before is None or old is None:
            self._report.conversations += track.number == 1
            self._first(request, prompt, name)
            return
        if old.unit != prompt.unit:  # one of them was refused by the template
            old, prompt = written(before), written(request)
        self._hazards.came_back(before, request)
        found = diagnose(before, request, old, prompt, name, redact=self._options.redact)
        if found.finding is not None:
            self._report.findings.append(found.finding)
        elif isinstance(old, Tokens) and isinstance(prompt, Tokens) and found.reused < min(len(old.encoded.ids), len(prompt.encoded.ids)):
            said = "the generation prompt is not kept in the history: what the model answers is computed again as history"
            self._hazards.note(request, Cause.TEMPLATE, "template", said)
        self._add(request, prompt, name, found.reused, found.again, False, found.finding)

    def _first(self, request: Request, prompt: Prompt, name: str) -> None:
        """The first request of a conversation; with `across`, against the first one of the conversation before."""
        self._add(request, prompt, name, 0, 0, True, None)
        if not self._options.across:
            return
        key = tuple(sorted(tool.name for tool in request.tools)) or (request.system[0].content[:200] if request.system else "",)
        known = self._firsts.pop(key, None)
        if known is not None:
            was, now = _stable(known[0]), _stable(request)
            found = diagnose(was, now, written(was), written(now), name, across=True, redact=self._options.redact)
            if found.finding is not None:
                self._report.findings.append(replace(found.finding, detail=f"{found.finding.detail}; compared with {known[1]!r}"))
        self._firsts[key] = request, name
        if len(self._firsts) > APPLICATIONS:
            self._firsts.pop(next(iter(self._firsts)))

    def _prompt(self, request: Request, known: Prompt | None) -> Prompt:
        if self._templated is not None:
            try:
                return self._templated.prompt(request, known)
            except PromptError as error:
                self._note(request.line, f"request {request.number}: compared in characters ({type(error).__name__}), since %s", error)
        return written(request)

    def _add(self, request: Request, prompt: Prompt, name: str, reused: int, again: int, first: bool, found: Finding | None) -> None:
        cause = found.cause if found is not None else None
        self._report.steps.append(Step(request.number, name, prompt.tokens(prompt.size), reused, again, first, cause))

    def _name(self, name: str) -> str:
        if not self._options.redact:
            return name
        return self._names.setdefault(name, f"conversation {len(self._names) + 1}")


def _stable(request: Request) -> Request:
    """The common front of an application's conversations."""
    return replace(request, history=(), prompt=None)
