"""An agent loop without a framework: the model asks for tools, Python runs them, each step pays only for its new tokens.

    python examples/agent_loop.py MODEL "What is 17 * 23, and what day is it there?"

MODEL is a Hugging Face id or a folder of a tool-calling chat model.
"""

from __future__ import annotations

import sys

from agentcache import Engine, Message, Sampling, Tool

SYSTEM = "You are a careful assistant. Use the tools; never guess a number."


def multiply(a: float, b: float) -> str:
    return str(a * b)


def weekday(date: str) -> str:
    import datetime

    return datetime.date.fromisoformat(date).strftime("%A")


FUNCTIONS = {"multiply": multiply, "weekday": weekday}
NUMBER, TEXT = {"type": "number"}, {"type": "string"}
TOOLS = [
    Tool("multiply", "Multiply two numbers.", {"type": "object", "properties": {"a": NUMBER, "b": NUMBER}, "required": ["a", "b"]}),
    Tool("weekday", "Day of the week of an ISO date.", {"type": "object", "properties": {"date": TEXT}, "required": ["date"]}),
]


def call(name: str, arguments: dict[str, object]) -> str:
    """What the tool returns, or what went wrong, in words the model can act on."""
    if name not in FUNCTIONS:
        return f"error: there is no tool {name!r}"
    try:
        return FUNCTIONS[name](**arguments)  # type: ignore[operator]
    except (TypeError, ValueError) as error:
        return f"error: {error}"


def main(model: str, question: str, steps: int = 6) -> None:
    with Engine(model) as engine:
        engine.warm(SYSTEM, TOOLS, name="calculator")
        messages = [Message("system", SYSTEM), Message("user", question)]
        for step in range(steps):
            answer = engine.generate(messages, TOOLS, sampling=Sampling(max_tokens=128))
            print(f"step {step}: {answer.receipt}")
            messages.append(answer.message)
            if not answer.message.tool_calls:
                break
            for n, wanted in enumerate(answer.message.tool_calls):
                result = call(wanted.name, dict(wanted.arguments))
                messages.append(Message("tool", result, tool_call_id=wanted.id or f"call{n}", name=wanted.name))
        print(messages[-1].content)


if __name__ == "__main__":
    if len(sys.argv) < 3:
        sys.exit(__doc__)
    main(*sys.argv[1:3])
