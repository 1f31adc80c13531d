"""The demo's questions to the embedded model, and the conversations with real tools. Knows no tables."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from importlib.resources import files
from typing import Any

from ..engine import Engine
from ..receipt import Receipt
from ..types import Message, Sampling, StoreOptions, Tool, ToolCall
from .tools import Desk

MOST_STEPS = 8  # of one question
TYPES = {"str": "string", "int": "integer", "float": "number"}

Shown = Callable[[str], Callable[[int, int], None]]


@dataclass(slots=True)
class Replay:
    """One way through the task: a receipt per step, the ids that all ways must agree in, the dialogue line by line."""

    receipts: list[Receipt] = field(default_factory=list)
    drawn: tuple[int, ...] = ()
    lines: list[str] = field(default_factory=list)

    @property
    def disk_tokens(self) -> int:
        return sum(receipt.disk_tokens for receipt in self.receipts)

    def total(self, name: str) -> float:
        """Sum of one of the receipts' figures over the steps."""
        return float(sum(getattr(receipt, name) for receipt in self.receipts))


@dataclass(frozen=True, slots=True)
class Task:
    """The embedded model decides what to call, Python does it. questions: a conversation each, one or more turns of the user.

    answers: the right ones. A model that says something else is shown as it is.
    """

    system: str
    questions: tuple[tuple[str, ...], ...]
    answers: tuple[tuple[str, ...], ...]
    tools: tuple[Tool, ...]
    name = "desk"

    @property
    def title(self) -> str:
        asked = sum(map(len, self.questions))
        return f"A harbour town's visitors' desk: {len(self.tools)} real tools, {asked} questions, the embedded model decides."

    def spec(self) -> dict[str, Any]:
        """JSON values from which `made` makes the same task in another process."""
        return {"questions": self.questions, "answers": self.answers}

    def build(self, store: StoreOptions) -> Engine:
        """The engine with the embedded model."""
        from transformers.utils import logging

        bars = logging.is_progress_bar_enabled()
        logging.disable_progress_bar()  # ten megabytes are there before a bar is
        try:
            return Engine("embedded", store=store)
        finally:
            if bars:
                logging.enable_progress_bar()

    def play(self, engine: Engine, options: Mapping[str, Any], shown: Shown) -> Replay:
        """Each conversation to its end, with a desk of its own; greedy, so that every way through says the same."""
        done, desk = Replay(), Desk()
        for turns, answers in zip(self.questions, self.answers, strict=True):
            messages = [Message("system", self.system)]
            for turn, answer in zip(turns, answers, strict=True):
                messages.append(Message("user", turn))
                done.lines.append(f"user     {turn}")
                for _ in range(MOST_STEPS):
                    label = shown(f"step {len(done.receipts) + 1}")
                    completion = engine.stream(
                        messages, self.tools, sampling=Sampling(max_tokens=96), on_progress=label, **options
                    ).completion
                    done.receipts.append(completion.receipt)
                    done.drawn += completion.ids
                    messages.append(completion.message)
                    if not completion.message.tool_calls:
                        right = completion.message.content == answer
                        done.lines.append(f"answer   {completion.message.content}" + ("" if right else f"   (right would be: {answer})"))
                        break
                    for call in completion.message.tool_calls:
                        result = run(desk, call)
                        given = ", ".join(f"{name}={value!r}" for name, value in call.arguments.items())
                        done.lines.append(f"  call   {call.name}({given})  ->  {result}")
                        messages.append(Message("tool", result, tool_call_id=call.id, name=call.name))
        return done


def task() -> Task:
    """The task that ships with the package."""
    raw = json.loads(files("agentcache").joinpath("demo", "town.json").read_text("utf-8"))
    tools = tuple(described(getattr(Desk, name)) for name in raw["tools"])
    questions, answers = (tuple(map(tuple, raw[name])) for name in ("questions", "answers"))
    return Task(raw["system"], questions, answers, tools)


def made(spec: Mapping[str, Any]) -> Task:
    """The task that `spec` describes."""
    questions, answers = (tuple(map(tuple, spec[name])) for name in ("questions", "answers"))
    return replace(task(), questions=questions, answers=answers)


def described(method: Callable[..., str]) -> Tool:
    """A method as a tool: its docstring and the types of its parameters."""
    parameters = [one for one in inspect.signature(method).parameters.values() if one.name != "self"]
    properties = {one.name: {"type": TYPES[str(one.annotation)]} for one in parameters}
    schema = {"type": "object", "properties": properties, "required": [one.name for one in parameters]}
    return Tool(method.__name__, inspect.getdoc(method) or "", schema)


def run(desk: Desk, call: ToolCall) -> str:
    """The result of a call. A model may call anything with anything: a wrong call gets an error as its result."""
    known = {name for name, _ in inspect.getmembers(Desk, inspect.isfunction) if not name.startswith("_")}
    if call.name not in known:
        return json.dumps({"error": "no such tool"})
    try:
        return str(getattr(desk, call.name)(**call.arguments))
    except (TypeError, ValueError, ArithmeticError, AttributeError) as error:
        return json.dumps({"error": str(error)[:200]})
