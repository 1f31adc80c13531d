"""What the tests' model says, where it matters what it says. Holds no tests.

A request that is not in here is answered by random weights, held to its constraint if it has one.
"""

from __future__ import annotations

import atexit
import functools
import json
import shutil
import sys
import tempfile
import time
import weakref
from collections.abc import Callable, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest

from agentcache import Constraint, Engine, Message, toy

VOCAB = 1024
MADE: weakref.WeakSet[Engine] = weakref.WeakSet()  # the engines that the package loaded
SHORT = 24  # tokens of an answer that nobody reads
TOLD_IN_LOOPS = pytest.mark.xfail(
    sys.version_info < (3, 11), reason="asyncio's tasks take no context there: LangChain tells models of async agents nothing", strict=True
)

TEXTS = (
    files("agentcache.bench").joinpath("museum.json").read_text(encoding="utf-8"),
    '<tool_call>\n{"name": "magic_function", "arguments": {"input": 3}}\n</tool_call> {"setup": "Why?", "punchline": "Because."}',
)


def call(name: str, **arguments: Any) -> str:
    """A call in the form of the tests' chat template."""
    return f'<tool_call>\n{{"name": "{name}", "arguments": {json.dumps(arguments, ensure_ascii=False)}}}\n</tool_call>'


JOKE = json.dumps({"setup": "Why do cats sit on keyboards?", "punchline": "To keep an eye on the mouse."})
LINES: dict[str, str] = {
    "What is the value of magic_function(3)? Use the tool.": call("magic_function", input=3),
    "What is the weather in San Francisco, CA?": call("get_weather", location="San Francisco, CA"),
    "What is the value of magic_function_no_args()? Use the tool.": call("magic_function_no_args"),
    **dict.fromkeys(("Hello", "Hey", "hello", "hi", "how are you", "Well, thanks."), "Aye, and how are you?"),
    "Using the tool, generate a Pirate greeting.": call("greeting_generator", answer_style="Pirate"),
}


def answer(messages: Sequence[Message] | str, tools: Sequence[Any], constraint: Constraint | None) -> str | None:
    """What is said to the last message; None to leave it to the weights."""
    if isinstance(messages, str) or not messages:
        return None
    last = messages[-1]
    if not isinstance(last, Message):
        return None
    if constraint is not None and constraint.calls and "about cats" in last.content:
        return call(constraint.tool_choice, **json.loads(JOKE))
    if constraint is not None and (constraint.structured or (constraint.calls and "customer named" not in last.content)):
        if constraint.schema is True:
            return JOKE
        return LINES.get(last.content) if constraint.tool_choice == "any" else None
    if "customer named" in last.content:
        return call("unicode_customer", customer_name=last.content.split("'")[1], description="A company.")
    if last.role == "user":
        return LINES.get(last.content.partition("\n\n<context>")[0])
    return None


def save(folder: Path, seed: int = 0) -> str:
    """A folder as a user has one: weights, config, tokenizer and chat template of a small random model."""
    model = toy.model(VOCAB, layers=2, hidden=128, seed=seed)
    model.save_pretrained(folder)
    toy.tokenizer(TEXTS, VOCAB).save_pretrained(folder)
    return str(folder)


@functools.cache
def folder(name: str, make: Callable[[Path], str]) -> str:
    """A folder of this process, filled once."""
    path = Path(tempfile.mkdtemp(prefix=f"agentcache-{name}-"))
    atexit.register(shutil.rmtree, path, ignore_errors=True)
    return make(path)


def until(holds: Callable[[], Any], seconds: float = 20.0) -> bool:
    """Wait for what the device's thread does in its own time."""
    end = time.monotonic() + seconds
    while not holds() and time.monotonic() < end:
        time.sleep(0.005)
    return bool(holds())
