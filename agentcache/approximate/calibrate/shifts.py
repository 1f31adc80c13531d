"""Prompts that repeat text at other positions, made from recorded episodes the ways applications make them. Knows no model.

edited history      as recorded: a call whose history is not the one before it continued; something in it was cut short (elided results)
inserted message    as recorded: a message came into the middle of the history, or went out again
held-out tool       as recorded: tools that came later in an episode, after the others
added tool          one tool in the middle of the list was not there before
changed tool        one in the middle is described in other words; removed tool, moved tool: alike
dated system        the system prompt begins with another date
second agent        the transcript is handed to an agent with another system prompt
trimmed history     the oldest turns were cut off to save tokens
other preamble      a text agent's prompt after other instructions
handed over         the prompt as it was, asked of another adapter
nothing repeats     a prompt of as many words in another order, without tools: what looking for repeats costs where there are none
documents in another order   retrieved passages that stood in one earlier prompt, in another order (of questions, not of episodes)
other neighbours             half of them stood in each of two earlier prompts, among passages of another question
context N % other   so many of the words of the system prompt (or of the start of a text) are others: left context spoilt by degrees
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ...errors import ConfigError
from ...traces import Call, Episode, Json, read, texts

PERTURBED = {f"context {percent} % other": percent / 100 for percent in (1, 10, 50, 100)}
TOOLS = ("added tool", "changed tool", "removed tool", "moved tool")
RECORDED = ("edited history", "inserted message", "held-out tool")
FAMILIES = (*RECORDED, *TOOLS, "dated system", "second agent", "trimmed history", "other preamble", *PERTURBED)
DOCUMENTS = ("documents in another order", "other neighbours")
NOTHING, HANDED = "nothing repeats", "handed over"
EVERY = (*FAMILIES, NOTHING)
CHARS = 3.5  # about so many to a token
START_CHARS = 2000  # of a text prompt, that count as its context
DATES = ("Today is Monday, 2 March 2026.\n", "Today is Wednesday the 30th of September 2026, week 40.\n")
REVIEWER = "You are the supervisor. Another agent worked on this case; check its work, finish what is open and answer the user.\n\n"
PREAMBLE = "Be brief, and follow the form of the examples to the letter.\n\n"


@dataclass(frozen=True, slots=True)
class Case:
    """A call, and the calls that were answered before it. family: one of FAMILIES or DOCUMENTS."""

    family: str
    before: tuple[Call, ...]
    call: Call


def cases(episodes: Sequence[Episode], count: int, families: Sequence[str] = FAMILIES, most_tokens: int = 0) -> list[Case]:
    """At most `count` cases per family, from as many episodes as it takes. most_tokens: of a prompt, estimated; 0 is any number."""
    found: dict[str, list[Case]] = {family: [] for family in families}
    for number, episode in enumerate(episodes):
        fitting = [call for call in episode.calls if not most_tokens or estimated(call) <= most_tokens]
        for case in _of(replace(episode, calls=tuple(fitting)), random.Random(f"0 {number}")):
            if case.family in found and len(found[case.family]) < count:
                found[case.family].append(case)
        if all(len(some) == count for some in found.values()):
            break
    return [case for some in found.values() for case in some]


def gathered(
    workload: Sequence[Path], families: Sequence[str], count: int, most_tokens: int, tools_dir: Path | None, made: Sequence[Episode],
    asked: Sequence[Case] = (), required: bool = True,
) -> tuple[list[Case], list[str]]:  # fmt: skip
    """Cases of traces and of `made` episodes, beside `asked` ones, and texts to train a tokenizer on where the model brings none.

    tools_dir: folder of the catalogs that traces name. required: ConfigError if there is no case.
    """
    if required and not (workload or made or asked):
        raise ConfigError("give recorded traces with --workload, --questions over two passages each or more, or --made-up N")
    found = [one for path in workload for one in read(path, tools_dir, episodes=max(8, 4 * count))]
    found += made
    shifted = [*(cases(found, count, families, most_tokens) if count else ()), *asked]
    if required and not shifted:
        raise ConfigError(f"families={', '.join(families)!r}: these workloads have no such prompts")
    return shifted, [*texts(found), *(json.dumps(case.call.prompt) for case in asked)]


def named(families: str, known: Sequence[str]) -> tuple[str, ...]:
    """Families by their names, with commas between, or "all" of them; ConfigError for one that there is not."""
    wanted = tuple(known) if families == "all" else tuple(part.strip() for part in families.split(",") if part.strip())
    if unknown := [name for name in wanted if name not in known]:
        raise ConfigError(f"families={families!r}: {unknown[0]!r} is none of {', '.join(map(repr, known))}")
    return wanted


def _of(episode: Episode, rng: random.Random) -> Iterator[Case]:
    calls, seen = episode.calls, set[str]()
    for before, call in reversed(list(zip(calls, calls[1:], strict=False))):  # the longest that fits
        family = _recorded(before, call)
        if family and family not in seen:
            seen.add(family)
            yield Case(family, (before,), call)
    late = [call for call in calls if isinstance(call.prompt, str) or len(call.prompt) >= 2]
    if not late:
        return
    call = late[min(len(late) - 1, rng.randrange(len(late) // 2, len(late)))]
    for family, share in PERTURBED.items():
        yield Case(family, (call,), replace(call, prompt=perturbed(call.prompt, share, rng)))
    yield Case(NOTHING, (call,), replace(call, prompt=_mixed(call, rng), tools=()))
    yield Case(HANDED, (call,), call)
    if isinstance(call.prompt, str):
        yield Case("other preamble", (call,), replace(call, prompt=PREAMBLE + call.prompt))
        return
    if len(call.tools) > 2:
        yield from _tools(call, len(call.tools) // 2)
    one, two = (replace(call, prompt=system(call.prompt, date)) for date in DATES)
    yield Case("dated system", (one,), two)
    yield Case("second agent", (call,), replace(call, prompt=system(call.prompt, REVIEWER, instead=True)))
    if trimmed := _trimmed(call.prompt):
        yield Case("trimmed history", (call,), replace(call, prompt=trimmed))


def estimated(call: Call) -> int:
    """About how many tokens a prompt has."""
    said = call.prompt if isinstance(call.prompt, str) else json.dumps(call.prompt)
    return round((len(said) + len(json.dumps(call.tools))) / CHARS)


def _recorded(before: Call, call: Call) -> str:
    """The change between two calls of an episode: one of RECORDED; empty if the second only goes on, or is another conversation."""
    if not isinstance(before.prompt, list) or not isinstance(call.prompt, list) or before.prompt[:1] != call.prompt[:1]:
        return ""
    if before.tools != call.tools:
        return "held-out tool" if call.prompt[: len(before.prompt)] == before.prompt else ""
    differs = next((at for at, (one, two) in enumerate(zip(before.prompt, call.prompt, strict=False)) if one != two), None)
    if differs is None:
        return ""
    inserted = before.prompt[differs] in call.prompt[differs + 1 :] or call.prompt[differs] in before.prompt[differs + 1 :]
    return "inserted message" if inserted else "edited history"


def _mixed(call: Call, rng: random.Random) -> list[Json] | str:
    """All that a call says, its words in another order."""
    parts = [call.prompt] if isinstance(call.prompt, str) else [str(message.get("content") or "") for message in call.prompt]
    words = " ".join([*parts, *(json.dumps(tool) for tool in call.tools)]).split()
    rng.shuffle(words)
    return " ".join(words) if isinstance(call.prompt, str) else [{"role": "user", "content": " ".join(words)}]


def _tools(call: Call, at: int) -> Iterator[Case]:
    """One tool, the one at this place, was added, removed, described otherwise, or moved to the front."""
    before, one, after = call.tools[:at], call.tools[at], call.tools[at + 1 :]
    without = replace(call, tools=(*before, *after))
    yield Case("added tool", (without,), call)
    yield Case("removed tool", (call,), without)
    yield Case("changed tool", (call,), replace(call, tools=(*before, changed(one), *after)))
    yield Case("moved tool", (call,), replace(call, tools=(one, *before, *after)))


def changed(tool: Json) -> Json:
    """The tool described in other words."""
    said = str(tool["function"].get("description") or "")
    return {**tool, "function": {**tool["function"], "description": f"Note: {said} See the manual."}}


def system(messages: list[Json], text: str, instead: bool = False) -> list[Json]:
    """The messages with this before, or in place of, what the system prompt says."""
    if messages and messages[0]["role"] == "system":
        said = "" if instead else str(messages[0].get("content") or "")
        return [{**messages[0], "content": text + said}, *messages[1:]]
    return [{"role": "system", "content": text}, *messages]


def perturbed(prompt: list[Json] | str, share: float, rng: random.Random) -> list[Json] | str:
    """With that share of the words of its first part replaced by others, at least one; their number stays."""
    if isinstance(prompt, str):
        return _reworded(prompt[:START_CHARS], share, rng) + prompt[START_CHARS:]
    first = str(prompt[0].get("content") or "") if prompt and prompt[0]["role"] == "system" else ""
    if not first:
        return system(prompt, "You are an assistant.\n\n")
    return [{**prompt[0], "content": _reworded(first, share, rng)}, *prompt[1:]]


def _reworded(text: str, share: float, rng: random.Random) -> str:
    words = text.split(" ")
    for at in rng.sample(range(len(words)), max(1, round(share * len(words)))):
        words[at] = words[rng.randrange(len(words))][::-1] or "so"
    return " ".join(words)


def _trimmed(messages: list[Json]) -> list[Json]:
    """Without the first turns after the system prompt, up to the second message of a user; empty if there is none."""
    users = [at for at, message in enumerate(messages) if message["role"] == "user"]
    if len(users) < 2:
        return []
    return [*[message for message in messages[: users[0]] if message["role"] == "system"], *messages[users[1] :]]
