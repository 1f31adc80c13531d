"""Recorded episodes of a zoo's agent, in each kind of trace. Holds no tests."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def tool(name: str) -> Json:
    parameters = {"type": "object", "properties": {"id": {"type": "string", "description": f"Which one to {name}"}}}
    return {"type": "function", "function": {"name": name, "description": f"{name} something of the zoo", "parameters": parameters}}


Json = dict[str, Any]


def asks(name: str, number: int, arguments: str = '{"id":   "x1"}', content: str | None = None) -> Json:
    call = {"id": f"c{number}", "type": "function", "function": {"name": name, "arguments": arguments}}
    return {"role": "assistant", "content": content, "tool_calls": [call]}


def result(number: int, text: str) -> Json:
    return {"role": "tool", "tool_call_id": f"c{number}", "name": "feed", "content": text}


def user(text: str) -> Json:
    return {"role": "user", "content": text}


def said(text: str) -> Json:
    return {"role": "assistant", "content": text}


PARALLEL = {"role": "assistant", "content": "Both.", "tool_calls": [*asks("feed", 8)["tool_calls"], *asks("wash", 9, "{}")["tool_calls"]]}
CHAT: list[Json] = [
    {
        "id": f"zoo-{number}",
        "system": "You keep a zoo. " + "Feed first, wash later, and write everything down. " * 40,
        "first_assistant_is_fixed_greeting": True,
        "tools_ref": "zoo",
        "tool_names": ["wash", "feed"],
        "tools_events": [{"before_message": 6, "add_tools": ["count"]}],
        "messages": [
            said("Hello."),
            user(f"Is the bear number {number} hungry?"),
            asks("feed", 1, content="Let me see."),
            result(1, '{"eaten": true}'),
            said("It has eaten."),
            user("Then both of them."),
            PARALLEL,
            result(9, "clean"),
            result(8, "full"),
            said("Done."),
        ],
    }
    for number in (1, 2)
]
TEXT: list[Json] = [
    {
        "id": "react-1",
        "stop": ["\n"],
        "prompts": [
            "Answer in steps.\nQuestion: how old is the bear?\nThought 1:",
            "Answer in steps.\nQuestion: how old is the bear?\nThought 1: I look it up.\nAction 1:",
        ],
        "completions": [" I look it up.", " Search[bear]"],
    }
]
STEPS: list[Json] = [
    {
        "id": "edit-1",
        "tools": [tool("feed")],
        "steps": [
            {"messages": [{"role": "system", "content": "A zoo."}, user("Feed it.")], "completion": asks("feed", 1, '{\n "id": "b"}')},
            {"messages": [{"role": "system", "content": "A zoo."}, user("(shortened)"), user("And now?")], "completion": said("Fed.")},
        ],
    }
]


def write_traces(folder: Path) -> Path:
    """traces/{chat,text,steps}.jsonl and tools/zoo.jsonl; returns the folder of the traces."""
    for name, files in {
        "traces": {"chat": CHAT, "text": TEXT, "steps": STEPS},
        "tools": {"zoo": [tool("feed"), tool("wash"), tool("count")]},
    }.items():
        (folder / name).mkdir()
        for kind, lines in files.items():
            (folder / name / f"{kind}.jsonl").write_text("\n".join(map(json.dumps, lines)) + "\n", encoding="utf-8")
    return folder / "traces"
