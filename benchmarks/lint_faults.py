"""Recorded episodes with the faults that agents have, put in on purpose and labelled. Judges nothing.

A fault rewrites the requests of one episode; its label says of each request which cause lint should name there, or None.
"""

from __future__ import annotations

import base64
import copy
import json
import random
import uuid
from collections.abc import Callable, Sequence
from datetime import datetime, timedelta, timezone
from typing import Any

from agentcache.lint import Cause
from agentcache.traces import Episode

Json = dict[str, Any]
Labels = list[Cause | None]
Fault = Callable[[list[Json], random.Random], Labels]


def requests(episode: Episode) -> list[Json]:
    """The episode's requests as a chat provider gets them; raw prompts stay raw."""
    out = []
    for call in episode.calls:
        body: Json = {"prompt": call.prompt} if isinstance(call.prompt, str) else {"messages": copy.deepcopy(call.prompt)}
        if call.tools:
            body["tools"] = copy.deepcopy(list(call.tools))
        out.append(body)
    return out


def append_only(was: Json, now: Json) -> bool:
    """The plain definition, by comparing values: the oracle."""
    if "prompt" in now:
        return bool(now["prompt"].startswith(was["prompt"]))
    same = json.dumps(was.get("tools")) == json.dumps(now.get("tools"))
    return same and json.dumps(now["messages"][: len(was["messages"])]) == json.dumps(was["messages"])


_START = datetime(2031, 3, 14, 9, 26, 53, tzinfo=timezone.utc)
_FORMS = (
    "The current time is {t:%Y-%m-%d %H:%M:%S} UTC.",
    "Today is {t:%A, %d %B %Y}, {t:%I:%M %p}.",
    "Now: {t:%Y-%m-%dT%H:%M:%S.%f}Z",
    "timestamp={e}",
    "Date: {t:%d/%m/%Y} Time: {t:%H:%M}",
    "({t:%b %d, %Y, %H:%M})",
    "Local time: {t:%a, %d %b %Y %H:%M:%S} +0000",
    "Zeit: {t:%d.%m.%Y %H:%M}",
    '{{"now": "{t:%Y%m%dT%H%M%SZ}"}}',
    "This session began {e} ms ago.",
)
_IDS: tuple[Callable[[random.Random], str], ...] = (
    lambda rng: f"Session: {uuid.UUID(int=rng.getrandbits(128))}",
    lambda rng: f"request_id={rng.getrandbits(64):016x}",
    lambda rng: f"Trace req_{rng.getrandbits(48):012x}a1.",
    lambda rng: f"<object at 0x7f{rng.getrandbits(40):010x}>",
    lambda rng: f"nonce={base64.urlsafe_b64encode(rng.randbytes(15)).decode()}",
    lambda rng: f"Request ID: {rng.randrange(10**6, 10**7)}",
)


def _in_system(bodies: list[Json], rng: random.Random, line: Callable[[int], str], cause: Cause) -> Labels:
    """A line of the system text, or of a raw prompt, that differs at every step."""
    place = rng.choice(("front", "middle", "end"))
    for number, body in enumerate(bodies):
        if "prompt" in body:
            body["prompt"] = f"{line(number)}\n{body['prompt']}"
            continue
        if not body["messages"] or body["messages"][0]["role"] != "system":
            body["messages"].insert(0, {"role": "system", "content": "You are a careful assistant.\nUse the tools."})
        parts = body["messages"][0]["content"].split("\n")
        parts.insert({"front": 0, "middle": len(parts) // 2, "end": len(parts)}[place], line(number))
        body["messages"][0]["content"] = "\n".join(parts)
    return [None, *[cause] * (len(bodies) - 1)]


def clock(bodies: list[Json], rng: random.Random) -> Labels:
    """The time in the system text."""
    form = rng.choice(_FORMS)
    times = [_START + timedelta(seconds=rng.randrange(10**7))]
    for _ in bodies:
        times.append(times[-1] + timedelta(seconds=rng.randrange(61, 90_000)))
    return _in_system(bodies, rng, lambda n: form.format(t=times[n], e=int(times[n].timestamp())), Cause.CLOCK)


def identity(bodies: list[Json], rng: random.Random) -> Labels:
    """A uuid, a hash or an address in the system text."""
    form = rng.choice(_IDS)
    return _in_system(bodies, rng, lambda n: form(rng), Cause.ID)


def counter(bodies: list[Json], rng: random.Random) -> Labels:
    """A number in the system text."""
    form = rng.choice(
        ("Step {n} of 30.", "Remaining calls: {m}", "Turn {n}", "[{n} tool calls so far]", "Tokens used: {n},{m}00 of 90,000")
    )
    return _in_system(bodies, rng, lambda n: form.format(n=n + 1, m=40 - n), Cause.COUNTER)


def state(bodies: list[Json], rng: random.Random) -> Labels:
    """What the agent knows so far, in the system text."""
    words = ("a blue sedan", "the garden is watered", "aisle seats", "no refunds", "two rooms upstairs", "a quiet street", "green tea")
    return _in_system(
        bodies, rng, lambda n: "Known facts: " + "; ".join(rng.sample(words, 2 + n % 4)) + f" and {'x' * (n + 1)}", Cause.STATE
    )


def shuffled_tools(bodies: list[Json], rng: random.Random) -> Labels:
    """The tools in another order at every step."""
    labels: Labels = []
    for number, body in enumerate(bodies):
        tools, before = body.get("tools", []), bodies[number - 1].get("tools", []) if number else []
        rng.shuffle(tools)
        labels.append(Cause.ORDER if number and tools != before else None)
    return labels


def tool_keys(bodies: list[Json], rng: random.Random) -> Labels:
    """One schema with its keys in another order every other step."""
    at = rng.random()
    for number, body in enumerate(bodies):
        if body.get("tools") and number % 2:
            tool = body["tools"][int(at * len(body["tools"]))]
            if "function" in tool:
                tool["function"] = dict(reversed(list(tool["function"].items())))
    return [Cause.ORDER if number and body.get("tools") else None for number, body in enumerate(bodies)]


def tool_set(bodies: list[Json], rng: random.Random) -> Labels:
    """Another selection of the tools at every step."""
    labels: Labels = [None]
    for body in bodies:
        if len(body.get("tools", ())) > 2:
            gone = set(rng.sample(range(len(body["tools"])), rng.choice((1, 2))))
            body["tools"] = [tool for at, tool in enumerate(body["tools"]) if at not in gone]
    for was, now in zip(bodies, bodies[1:]):
        labels.append(Cause.TOOL_SET if was.get("tools") != now.get("tools") else None)
    return labels


def _calls(message: Json) -> list[Json]:
    return message.get("tool_calls") or []


def arguments(bodies: list[Json], rng: random.Random) -> Labels:
    """Arguments of all calls but the newest, parsed and dumped again."""
    dump = rng.choice(
        (
            lambda value: json.dumps(value, indent=2),
            lambda value: json.dumps(value, separators=(",", ":")),
            lambda value: json.dumps(value, separators=(" , ", " : ")),
            lambda value: json.dumps(dict(reversed(list(value.items()))), separators=(", ", " : ")),
        )
    )
    labels: Labels = []
    known: dict[int, list[str]] = {}
    for body in bodies:
        spoken = [at for at, message in enumerate(body.get("messages", ())) if _calls(message)]
        changed = False
        for at in spoken:
            old = known.get(at)
            for call in _calls(body["messages"][at]) if at != spoken[-1] else ():
                call["function"]["arguments"] = dump(json.loads(call["function"]["arguments"] or "{}"))
            known[at] = [call["function"]["arguments"] for call in _calls(body["messages"][at])]
            changed |= old is not None and old != known[at]
        labels.append(Cause.ARGUMENTS if changed else None)
    return labels


def reasoning(bodies: list[Json], rng: random.Random) -> Labels:
    """Reasoning that only the newest assistant message keeps: in a field of its own, or inside the text."""
    inline = rng.random() < 0.5
    labels: Labels = []
    held: list[int] = []
    for body in bodies:
        spoken = [at for at, message in enumerate(body.get("messages", ())) if message["role"] == "assistant"]
        if spoken:
            newest, thought = body["messages"][spoken[-1]], "First look at what is asked, then choose the tool that fits best."
            if inline:
                newest["content"] = f"<think>\n{thought}\n</think>\n\n{newest.get('content') or ''}"
            else:
                newest["reasoning_content"] = thought
        labels.append(Cause.REASONING if held and spoken[-1:] != held else None)
        held = spoken[-1:]
    return labels


def front_summary(bodies: list[Json], rng: random.Random) -> Labels:
    """All but the last messages replaced by a summary that is written anew at each step."""
    keep, role = rng.choice((2, 4)), rng.choice(("user", "system"))
    said = rng.choice(("Summary of the conversation so far: {n} things were done, last {w}.", "What happened ({w}): all {n} fine."))
    labels: Labels = [None]
    for number, body in enumerate(bodies):
        messages = body.get("messages", [])
        lead = 1 if messages and messages[0]["role"] == "system" else 0
        cut = len(messages) - keep
        while cut > lead and messages[cut]["role"] == "tool":
            cut -= 1
        done = cut > lead + 1
        if done:
            gone = messages[lead:cut]
            word = str(gone[-1].get("content") or "a call")[:80]
            messages[lead:cut] = [{"role": role, "content": said.format(n=len(gone), w=word)}]
        if number:
            labels.append(Cause.SUMMARY if done else None)
    return labels


def truncated(bodies: list[Json], rng: random.Random) -> Labels:
    """A window over the newest messages."""
    keep = rng.choice((3, 5))
    labels: Labels = [None]
    for number, body in enumerate(bodies):
        messages = body.get("messages", [])
        lead = 1 if messages and messages[0]["role"] == "system" else 0
        cut = len(messages) - keep
        while lead < cut < len(messages) - 1 and messages[cut]["role"] == "tool":
            cut += 1
        done = cut > lead
        if done:
            del messages[lead:cut]
        if number:
            labels.append(Cause.TRUNCATED if done else None)
    return labels


def cleared(bodies: list[Json], rng: random.Random) -> Labels:
    """Old tool results replaced by a word."""
    labels: Labels = [None]
    told = 0
    for number, body in enumerate(bodies):
        results = [message for message in body.get("messages", ()) if message["role"] == "tool"]
        old = [message for message in results[:-2] if len(message.get("content") or "") > 20]
        for message in old:
            message["content"] = "[cleared]"
        if number:
            labels.append(Cause.EDITED if len(old) > told else None)
        told = len(old)
    return labels


def call_ids(bodies: list[Json], rng: random.Random) -> Labels:
    """Ids of tool calls made anew at each step."""
    labels: Labels = [None]
    for number, body in enumerate(bodies):
        seen = False
        for message in body.get("messages", ()):
            fresh = {call.get("id"): f"call_{rng.getrandbits(64):016x}" for call in _calls(message)}
            for call in _calls(message):
                call["id"] = fresh[call.get("id")]
            seen |= bool(fresh) and message in bodies[number]["messages"]
        if number:
            before = [message for message in bodies[number - 1].get("messages", ()) if _calls(message)]
            labels.append(Cause.ID if before else None)
    return labels


def in_a_message(bodies: list[Json], rng: random.Random) -> Labels:
    """The time in the first user message, written anew at each step."""
    now = _START + timedelta(seconds=rng.randrange(10**7))
    form = rng.choice(_FORMS[:3])
    labels: Labels = []
    for number, body in enumerate(bodies):
        now += timedelta(seconds=rng.randrange(61, 90_000))
        said = next((message for message in body.get("messages", ()) if message["role"] == "user"), None)
        if said is not None:
            said["content"] = f"{said.get('content') or ''}\n\n{form.format(t=now, e=0)}"
        labels.append(Cause.CLOCK if number and said is not None else None)
    return labels


def schema_text(bodies: list[Json], rng: random.Random) -> Labels:
    """What one tool says of itself changes: another unit, another limit."""
    at = rng.random()
    for number, body in enumerate(bodies):
        if body.get("tools"):
            tool = body["tools"][int(at * len(body["tools"]))]
            described = tool.get("function", tool)
            described["description"] = f"{described.get('description') or ''} In degrees {('Celsius', 'Fahrenheit')[number % 2]}."
    return [Cause.TOOL_SET if number and body.get("tools") else None for number, body in enumerate(bodies)]


def for_one_request(bodies: list[Json], rng: random.Random) -> Labels:
    """What was looked up stands before the newest message, and nowhere in the next request."""
    things = ("the gate is open", "a parcel came", "the lamp is out", "two chairs are free", "the tea is cold")
    labels: Labels = []
    for number, body in enumerate(bodies):
        if body.get("messages"):
            said = f"Looked up: {rng.choice(things)}, note {number}."
            body["messages"].insert(len(body["messages"]) - 1, {"role": "user", "content": said})
        labels.append(Cause.EDITED if number and body.get("messages") else None)
    return labels


FAULTS: dict[str, Fault] = {
    "clock": clock,
    "id": identity,
    "counter": counter,
    "state in the system text": state,
    "shuffled tools": shuffled_tools,
    "keys of a schema": tool_keys,
    "selected tools": tool_set,
    "re-serialised arguments": arguments,
    "dropped reasoning": reasoning,
    "front summary": front_summary,
    "window": truncated,
    "cleared results": cleared,
    "call ids made anew": call_ids,
    "clock in a message": in_a_message,
    "text of a schema": schema_text,
    "text for one request": for_one_request,
}


def injected(episode: Episode, name: str, seed: int) -> tuple[list[Json], Labels]:
    """The episode with one fault in it, and the labels; steps that were no clean continuation before have none."""
    bodies = requests(episode)
    clean = [True, *(append_only(was, now) for was, now in zip(bodies, bodies[1:]))]
    labels = FAULTS[name](bodies, random.Random(f"{name} {seed} {episode.id}"))
    for at, (was, now) in enumerate(zip(bodies, bodies[1:]), 1):
        if labels[at] is not None and append_only(was, now):  # a window that is not full yet, for example
            labels[at] = None
    return bodies, [label if fine else _UNSCORED for label, fine in zip(labels, clean)]


_UNSCORED: Any = "unscored"


def scored(labels: Sequence[Any]) -> list[int]:
    """Positions of the labels that count."""
    return [at for at, label in enumerate(labels) if at and label != _UNSCORED]
