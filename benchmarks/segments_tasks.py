"""Made-up requests whose text has moved: what is asked is always the request as it is, so that what is right stays right. Knows no model.

    before   the prompt that was answered earlier, and is kept: one tool fewer, another date, another agent, an older conversation ...
    asked    the request of the generated world (examples/embedded/cases.py), with its own right answer

shifts.py changes what is asked instead, as recorded episodes need it; here a changed system prompt could change what is right.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from agentcache.approximate.calibrate.shifts import DATES, PERTURBED, REVIEWER, changed, perturbed, system
from agentcache.bench.quality_cases import Case, Episode
from agentcache.errors import ConfigError
from agentcache.traces import Json
from examples.embedded.cases import episodes, selections

TOOLS = ("added tool", "removed tool", "changed tool", "moved tool")
FAMILIES = (*TOOLS, "dated system", "second agent", "trimmed history", "edited history", *PERTURBED)
EPISODES = ("dated system", "second agent", "added tool", "moved tool")
OLDER = 4  # earlier exchanges of a history; half of them are cut off
ELIDED = "(old result left out)"


@dataclass(frozen=True, slots=True)
class Prompt:
    """Messages, or one text, and tools."""

    messages: Any
    tools: tuple[Json, ...]


@dataclass(frozen=True, slots=True)
class Task:
    """One request behind one kind of shift. case: what is right, and whether that depends on text before the tool or the request."""

    number: int
    family: str
    before: Prompt
    asked: Prompt
    case: Case


def chosen(families: Sequence[str], known: Sequence[str] = FAMILIES) -> tuple[str, ...]:
    """Those of the families that such requests can be shifted by; ConfigError if none of them is."""
    found = tuple(name for name in known if name in families)
    if not found:
        raise ConfigError(f"families={list(families)!r}: made-up requests have {', '.join(map(repr, known))}")
    return found


def tasks(count: int, tools: int, families: Sequence[str] = FAMILIES, seed: str = "segments", split: str = "unseen tools") -> list[Task]:
    """`count` different requests on catalogs of `tools` tools, the families in turn; always the same ones for a seed."""
    cases = selections(split, tools, count, seed) if count else []
    by_catalog: dict[int, list[Case]] = {}
    for case in cases:
        by_catalog.setdefault(case.catalog, []).append(case)
    found = []
    for number, case in enumerate(cases):
        others = [other for other in by_catalog[case.catalog] if other is not case] or [case]
        found.append(_task(number, families[number % len(families)], case, others, random.Random(f"{seed} {number}")))
    return found


def _strange(tools: Sequence[Json], rng: random.Random) -> Json:
    """A tool that no catalog has, made from one."""
    tool = rng.choice(tools)
    return {**changed(tool), "function": {**changed(tool)["function"], "name": f"other_{tool['function']['name']}"}}


def _task(number: int, family: str, case: Case, others: Sequence[Case], rng: random.Random) -> Task:
    asked = Prompt([dict(message) for message in case.prompt if not isinstance(message, str)], tuple(dict(tool) for tool in case.tools))
    if family in ("trimmed history", "edited history"):
        older = [_exchange(other, number * OLDER + at) for at, other in enumerate((list(others) * OLDER)[:OLDER])]
        head, last = asked.messages[:-1], asked.messages[-1:]
        kept = older if family == "edited history" else older[OLDER // 2 :]
        said = [message for turns in kept for message in turns]
        if family == "edited history":
            elided = next((at for at, message in enumerate(said) if message["role"] == "tool"), 1)
            said[elided] = {**said[elided], "content": ELIDED}
        before = replace(asked, messages=[*head, *(message for turns in older for message in turns), *last])
        return Task(number, family, before, replace(asked, messages=[*head, *said, *last]), case)
    return Task(number, family, _before(asked, family, rng), asked, case)


def _exchange(case: Case, at: int) -> list[Json]:
    """A request of before, its call, a result, and a word on it."""
    asked = dict(case.prompt[-1]) if not isinstance(case.prompt, str) else {"role": "user", "content": case.query}
    if case.right is None:
        return [asked, {"role": "assistant", "content": f"Nothing was done, case {at}."}]
    call = {"type": "function", "function": {"name": case.right.name, "arguments": dict(case.right.arguments)}}
    told = ", ".join(f'"{name}": "{value}"' for name, value in case.right.arguments.items())
    return [
        asked,
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": f'{{"done": true, "record": {1000 + at * 7}, {told}}}'},
        {"role": "assistant", "content": f"Done, record {1000 + at * 7}."},
    ]


def _before(asked: Prompt, family: str, rng: random.Random) -> Prompt:
    """What a prompt was before it became this one."""
    tools, at = asked.tools, len(asked.tools) // 2
    if family == "added tool":
        return replace(asked, tools=(*tools[:at], *tools[at + 1 :]))
    if family == "removed tool":
        return replace(asked, tools=(*tools[:at], _strange(tools, rng), *tools[at:]))
    if family == "changed tool":
        return replace(asked, tools=(*tools[:at], changed(tools[at]), *tools[at + 1 :]))
    if family == "moved tool":
        return replace(asked, tools=(tools[at], *tools[:at], *tools[at + 1 :]))
    if isinstance(asked.messages, str):
        other = f"{DATES[0]}{asked.messages}" if family == "dated system" else perturbed(asked.messages, 1.0, rng)
        return replace(asked, messages=other)
    if family == "dated system":
        return replace(asked, messages=system(asked.messages, DATES[0]))
    if family == "second agent":
        return replace(asked, messages=system(asked.messages, REVIEWER, instead=True))
    return replace(asked, messages=perturbed(asked.messages, PERTURBED[family], rng))


@dataclass(frozen=True, slots=True)
class Run:
    """A dialogue of several steps behind one kind of shift; before: its first prompt as another session had it."""

    number: int
    family: str
    before: Prompt
    steps: tuple[Prompt, ...]
    episode: Episode


def runs(count: int, tools: int, style: str = "hermes", seed: str = "segments", families: Sequence[str] = EPISODES) -> Iterator[Run]:
    """`count` dialogues, the families in turn."""
    for number, episode in enumerate(episodes(style, count, tools, seed=seed) if count else ()):
        prompts = tuple(
            Prompt(step.prompt if isinstance(step.prompt, str) else [dict(m) for m in step.prompt], tuple(dict(t) for t in step.tools))
            for step in episode.steps
        )
        family = families[number % len(families)] if prompts[0].tools else "dated system"
        yield Run(number, family, _before(prompts[0], family, random.Random(f"{seed} {number}")), prompts, episode)
