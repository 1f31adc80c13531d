"""Recorded requests of one harbour agent, and what lint reports of them. Holds no tests."""

from __future__ import annotations

import copy
from typing import Any

from agentcache.lint import Finding, Options, Report, lint

SYSTEM = "You keep the ledger of a small harbour.\nAnswer in one sentence.\nNever promise a berth."


def tool(name: str, **properties: str) -> dict[str, Any]:
    fields = {key: {"type": kind} for key, kind in (properties or {"berth": "string"}).items()}
    described = {"name": name, "description": f"Does {name}.", "parameters": {"type": "object", "properties": fields}}
    return {"type": "function", "function": described}


TOOLS = [tool("find_berth"), tool("list_ships", day="string", size="integer"), tool("close_gate")]


def conversation(steps: int = 3) -> list[dict[str, Any]]:
    """Requests of an agent that calls one tool per step, each going on from the one before."""
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": SYSTEM},
        {"role": "user", "content": "Is there room for the Petrel on Friday?"},
    ]
    out = [{"messages": list(messages), "tools": TOOLS}]
    for step in range(steps):
        call = {
            "id": f"call_{step}",
            "type": "function",
            "function": {"name": "list_ships", "arguments": f'{{"day": "friday", "size": {step}}}'},
        }
        messages += [
            {"role": "assistant", "content": f"Let me look at pier {'abcdefgh'[step]}.", "tool_calls": [call]},
            {
                "role": "tool",
                "tool_call_id": f"call_{step}",
                "content": f"pier {'abcdefgh'[step]}: three boats, one of them with a broken mast",
            },
        ]
        out.append({"messages": list(messages), "tools": TOOLS})
    return [copy.deepcopy(body) for body in out]  # each with messages of its own


def report(bodies: list[dict[str, Any]], **options: Any) -> Report:
    return lint([{"conversation_id": "one", **body} for body in bodies], Options(**options))


def only_finding(bodies: list[dict[str, Any]], **options: Any) -> Finding:
    found = report(bodies, **options).findings
    assert len(found) == 1, [(finding.cause, finding.writer) for finding in found]
    return found[0]


def with_system_line(bodies: list[dict[str, Any]], lines: list[str]) -> list[dict[str, Any]]:
    for body, line in zip(bodies, lines):
        body["messages"][0]["content"] = SYSTEM.replace("\n", f"\n{line}\n", 1)
    return bodies
