"""Two agents in one program, two clients of one server: the second finds what the first has computed.

agentcache serve MODEL &
python examples/serve_two_agents.py [URL]
"""

from __future__ import annotations

import json
import sys
import urllib.error
import urllib.request
from typing import Any

SYSTEM = "You work at the desk of a harbour. Answer in one sentence. " + "The tide tables hang at the wall, one for each port. " * 30
TIDE = {
    "type": "function",
    "function": {
        "name": "tide",
        "description": "High water in a port",
        "parameters": {"type": "object", "properties": {"port": {"type": "string"}}, "required": ["port"]},
    },
}


def post(url: str, path: str, body: dict[str, Any]) -> dict[str, Any]:
    """What the server answers to this body."""
    asked = urllib.request.Request(f"{url}{path}", json.dumps(body).encode(), {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(asked) as answer:
            said: dict[str, Any] = json.load(answer)
    except urllib.error.HTTPError:  # the server's own refusal
        raise
    except urllib.error.URLError as error:
        sys.exit(f"{url}: {error.reason}. Start a server there first: agentcache serve embedded &")
    return said


def agent(url: str, port: str) -> list[dict[str, Any]]:
    """An agent's two steps: it calls the tool, and answers from the result."""
    asked = {"tools": [TIDE], "max_tokens": 64}
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": SYSTEM},
        {"role": "user", "content": f"When is high water in {port}?"},
    ]
    first = post(url, "/v1/chat/completions", {**asked, "messages": messages, "tool_choice": "required"})
    said = first["choices"][0]["message"]
    results = [{"role": "tool", "tool_call_id": call["id"], "content": f"High water in {port} at 11."} for call in said["tool_calls"]]
    return [first, post(url, "/v1/chat/completions", {**asked, "messages": [*messages, said, *results]})]


def main(url: str = "http://127.0.0.1:8787") -> None:
    for port in ("Port Averil", "Tarn Haven"):
        for step in agent(url, port):
            usage = step["usage"]
            print(f"{port}: {usage['prompt_tokens_details']['cached_tokens']} of {usage['prompt_tokens']} tokens cached")
        print(f"    {step['choices'][0]['message']['content']}")


if __name__ == "__main__":
    main(*sys.argv[1:])
