"""Recorded agent episodes as prompts and answers, one per model call. Reads files; knows a tokenizer at most.

Kinds, told apart by their keys:

    chat         {"system", "tools" | "tools_ref" [+ "tool_names"], "messages", ["tools_events"]}   history only grows
    text         {"prompts", "completions"}                                                         raw text, no chat template
    chat_steps   {"tools", "steps": [{"messages", "completion"}]}                                   history may be edited
    requests     {"conversation_id", "messages", "tools", "response"}      one a line, as `agentcache.Recorder` writes them
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .errors import ConfigError
from .layout import Renderer

Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Call:
    """One model call: the prompt (messages, or raw text) with its tools, and the recorded answer (a message, or raw text)."""

    prompt: list[Json] | str
    tools: tuple[Json, ...]
    answer: Json | str


@dataclass(frozen=True, slots=True)
class Episode:
    """One recorded run of an agent. kind: chat, text, chat_steps or requests."""

    id: str
    kind: str
    calls: tuple[Call, ...]


class Answers:
    """Recorded answers as the tokenizer's model would have generated them. Has a memory of its own: it makes no other layout faster."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer, self._renderer = tokenizer, Renderer(tokenizer)

    def ids(self, call: Call) -> list[int]:
        """Ids of the template's text for the answer, up to and with its end token; ConfigError if it rewrites the prompt."""
        if isinstance(call.answer, str):
            return list(self.tokenizer(call.answer, add_special_tokens=False)["input_ids"])
        assert not isinstance(call.prompt, str)
        before = self._renderer.render(call.prompt, call.tools).text
        whole = self._renderer.render([*call.prompt, call.answer], call.tools, generation=False).text
        if not whole.startswith(before):
            raise ConfigError("this chat template writes an answered prompt otherwise than an open one: its answers cannot be forced")
        text, end = whole[len(before) :], self.tokenizer.eos_token
        cut = text.rfind(end) if end else -1
        return list(self.tokenizer(text if cut < 0 else text[: cut + len(end)], add_special_tokens=False)["input_ids"])


def read(path: Path, tools_dir: Path | None = None, *, episodes: int | None = None, calls: int | None = None) -> Iterator[Episode]:
    """The episodes of a trace file, at most so many, each cut after its first `calls` calls.

    Recorded requests are one episode per conversation, after the others; those without an answer are left out. tools_dir: where
    `tools_ref` catalogs lie; by default `tools` beside the trace's own folder.
    """
    if not path.is_file():
        raise ConfigError(f"workload {str(path)!r} is not a file: give a .jsonl trace, such as agentcache.Recorder writes")
    folder = tools_dir if tools_dir is not None else path.resolve().parent.parent / "tools"
    recorded: dict[str, list[Call]] = {}
    with path.open("rb") as lines:
        done = 0
        for number, line in enumerate(lines, 1):
            if episodes is not None and done >= episodes:
                break
            if not line.strip():
                continue
            try:
                raw = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise ConfigError(f"workload {str(path)!r}, line {number}: not JSON ({error})") from error
            where = f"workload {str(path)!r}, line {number}"
            if isinstance(raw, Mapping) and "conversation_id" in raw:
                _record(raw, recorded, where, episodes)
                continue
            yield episode(raw, folder, where=where, calls=calls)
            done += 1
    for name, found in list(recorded.items())[: None if episodes is None else max(0, episodes - done)]:
        yield Episode(name, "requests", tuple(found[:calls]))


def _record(raw: Mapping[str, Any], recorded: dict[str, list[Call]], where: str, most: int | None) -> None:
    """Add a recorded request to its conversation's. One without an id belongs to those that begin with the same words of a user."""
    if raw.get("response") is None:
        return
    try:
        prompt = raw["prompt"] if "prompt" in raw else list(raw["messages"])
        choice = raw["response"]["choices"][0]
        answer = choice["text"] if "text" in choice else choice["message"]
    except (KeyError, IndexError, TypeError) as error:
        raise ConfigError(f"{where}: a recorded request without {error.args[0]!r}") from error
    users = (message for message in prompt if isinstance(message, dict) and message.get("role") == "user")
    name = str(raw["conversation_id"] or json.dumps(next(users, None) if "messages" in raw else prompt))
    if name in recorded or most is None or len(recorded) < most:
        recorded.setdefault(name, []).append(Call(prompt, tuple(raw.get("tools") or ()), answer))


def episode(raw: Any, tools_dir: Path, *, where: str = "episode", calls: int | None = None) -> Episode:
    """One episode of any of the three kinds."""
    if not isinstance(raw, Mapping):
        raise ConfigError(f"{where}: {type(raw).__name__} instead of an object")
    readers = {"prompts": ("text", _text), "steps": ("chat_steps", _chat_steps), "messages": ("chat", _chat)}
    for key, (kind, reader) in readers.items():
        if key in raw:
            try:
                found = tuple(reader(raw, tools_dir))
            except KeyError as error:
                raise ConfigError(f"{where}: a {kind} episode without {error.args[0]!r}") from error
            except ConfigError:
                raise
            except (TypeError, ValueError) as error:
                raise ConfigError(f"{where}: not a {kind} episode ({error})") from error
            return Episode(str(raw.get("id", where)), kind, found[:calls])
    raise ConfigError(f"{where}: has none of {sorted(readers)!r}, so its kind is unknown; keys are {sorted(raw)!r}")


def _text(raw: Mapping[str, Any], tools_dir: Path) -> Iterator[Call]:
    for prompt, completion in zip(raw["prompts"], raw["completions"], strict=True):
        yield Call(prompt, (), completion)


def _chat_steps(raw: Mapping[str, Any], tools_dir: Path) -> Iterator[Call]:
    tools = tuple(raw["tools"] or ())
    for step in raw["steps"]:
        yield Call(list(step["messages"]), tools, step["completion"])


def _chat(raw: Mapping[str, Any], tools_dir: Path) -> Iterator[Call]:
    messages: list[Json] = raw["messages"]
    leading: list[Json] = [{"role": "system", "content": raw["system"]}] if raw.get("system") else []
    greeted = bool(raw.get("first_assistant_is_fixed_greeting"))
    known = catalog(tools_dir, raw["tools_ref"]) if "tools_ref" in raw else {}
    first = raw["tools"] or () if "tools" in raw else _named(known, raw.get("tool_names", known))
    for at, message in enumerate(messages):
        if message["role"] == "assistant" and not (greeted and at == 0):
            added = [t for event in raw.get("tools_events", ()) if event["before_message"] <= at for t in event["add_tools"]]
            yield Call(leading + messages[:at], (*first, *_named(known, added)), message)


def _named(known: Mapping[str, Json], listed: Any) -> list[Json]:
    """Schemas by name; whole schemas pass through."""
    unknown = [item for item in listed if isinstance(item, str) and item not in known]
    if unknown:
        raise ConfigError(f"tools {unknown!r} are not in the catalog of this trace")
    return [known[item] if isinstance(item, str) else item for item in listed]


def catalog(tools_dir: Path, name: str) -> dict[str, Json]:
    """The tools of a catalog by their names; ConfigError if it is not there."""
    path = tools_dir / f"{name}.jsonl"
    if not path.is_file():
        raise ConfigError(f"tools_ref {name!r}: no file {str(path)!r}; name the folder of the catalogs with --tools-dir")
    schemas = [json.loads(line) for line in path.read_bytes().splitlines() if line.strip()]
    return {schema["function"]["name"]: schema for schema in schemas}


def texts(episodes: list[Episode], most_chars: int = 400_000) -> list[str]:
    """Texts of these episodes to train a tokenizer on: the last prompt of each, up to so many characters in all."""
    found, left = [], most_chars
    for one in episodes:
        if left <= 0 or not one.calls:
            break
        last = one.calls[-1]
        parts = [last.prompt] if isinstance(last.prompt, str) else [str(message.get("content") or "") for message in last.prompt]
        said = "\n".join([*parts, *(json.dumps(tool) for tool in last.tools)])[:left]
        found.append(said)
        left -= len(said)
    return found
