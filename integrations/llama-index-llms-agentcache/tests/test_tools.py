"""Tools on their way into a prompt: written alike everywhere, each worked out once, shown in one order, allowed by a mask."""

from __future__ import annotations

import datetime
import enum
import gc
import json
import subprocess
import sys
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import pytest
from cases import tide, tools, user
from llama_index.core.tools import FunctionTool, QueryEngineTool, ToolMetadata
from llama_index.llms.agentcache import canonical, canonical_tool
from llama_index.llms.agentcache.canonical import canonical_repr, canonical_schema
from llama_index.llms.agentcache.tools import Translator, name_of, offer, tool_choice
from unstable import Config, fetch

from agentcache.errors import ConfigError, ToolSchemaError

SHOW = """
import importlib.util, json, sys
sys.path.insert(0, {tests!r})
import unstable
from llama_index.core.tools import FunctionTool
spec = importlib.util.spec_from_file_location("canonical", {canonical!r})  # alone: the package would load torch
canonical = importlib.util.module_from_spec(spec)
spec.loader.exec_module(canonical)
tool = FunctionTool.from_defaults(unstable.fetch)
print(json.dumps([
    [tool.metadata.description, tool.metadata.get_parameters_dict()],
    [canonical.canonical_description(tool)[0], canonical.canonical_parameters(tool, tool.metadata.get_parameters_dict())],
]))
"""


def _in_another_process() -> tuple[str, str]:
    """(the tool as LlamaIndex writes it, as we do), where hashes have another order."""
    script = SHOW.format(tests=str(Path(__file__).parent), canonical=canonical.__file__)
    ran = subprocess.run([sys.executable, "-W", "ignore", "-c", script], stdout=subprocess.PIPE, text=True, check=True)
    stock, ours = json.loads(ran.stdout.splitlines()[-1])
    return json.dumps(stock), json.dumps(ours)


@pytest.mark.filterwarnings("ignore:Default value")
def test_descriptions_are_the_same_in_every_process() -> None:
    tool = FunctionTool.from_defaults(fetch)
    stock = json.dumps([tool.metadata.description, tool.metadata.get_parameters_dict()])
    ours = json.dumps([canonical.canonical_description(tool)[0], canonical.canonical_parameters(tool, tool.metadata.get_parameters_dict())])
    other_stock, other_ours = _in_another_process()
    assert stock != other_stock
    assert ours == other_ours
    assert "{'chart', 'fog', 'log', 'tide', 'wave', 'wind'}" in ours
    assert "Config object>" in ours
    assert "register at 0x40" in ours
    shared = next(at for at, (a, b) in enumerate(zip(stock, other_stock)) if a != b)
    assert shared / len(stock) < 0.2  # what the other process could reuse of the tool; with ours it is all


def test_canonical_repr() -> None:
    assert (
        canonical_repr([{3, 1, 2}, frozenset({"b", "a"}), set(), (1,), {"k": {2, 1}}])
        == "[{1, 2, 3}, frozenset({'a', 'b'}), set(), (1,), {'k': {1, 2}}]"
    )
    assert canonical_repr(Config()).endswith("Config object>")


def test_canonical_schema_sorts_defaults_of_sets_only() -> None:
    schema = {"properties": {"a": {"uniqueItems": True, "default": ["z", "a"]}, "b": {"default": ["z", "a"]}}}
    assert canonical_schema(schema) == {"properties": {"a": {"uniqueItems": True, "default": ["a", "z"]}, "b": {"default": ["z", "a"]}}}


class Lamp(enum.Enum):
    RED = "red"
    GREEN = "green"


DAYS = {datetime.date(2026, 1, day) for day in (1, 2, 3)}
SETS: list[tuple[Any, Any, Any]] = [
    (set[datetime.date], DAYS, ["2026-01-01", "2026-01-02", "2026-01-03"]),
    (set[Lamp], {Lamp.RED, Lamp.GREEN}, ["green", "red"]),
    (frozenset[Path], frozenset({Path("/b"), Path("/a")}), ["/a", "/b"]),
    (set[uuid.UUID], {uuid.UUID(int=2), uuid.UUID(int=1)}, [str(uuid.UUID(int=1)), str(uuid.UUID(int=2))]),
    (dict[datetime.date, list[set[Lamp]]], {datetime.date(2026, 1, 1): [{Lamp.RED, Lamp.GREEN}]}, {"2026-01-01": [["green", "red"]]}),
    (set[frozenset[str]], {frozenset({"b", "a"}), frozenset({"z"})}, [["a", "b"], ["z"]]),
    (tuple[set[int], str], ({3, 1, 2}, "x"), [[1, 2, 3], "x"]),
]


@pytest.mark.parametrize(("kind", "default", "shown"), SETS)
def test_a_default_of_sets_is_pydantics_json(llm: Callable[..., Any], kind: Any, default: Any, shown: Any) -> None:
    def log(day: Any = default) -> str:
        """Read the log."""
        return str(day)

    log.__annotations__["day"] = kind
    tool = FunctionTool.from_defaults(log)
    schema = Translator().schema(tool)
    assert json.loads(json.dumps(schema))["function"]["parameters"]["properties"]["day"]["default"] == shown
    assert llm("Read.").chat([user("Log?")], tools=[tool]).message.content == "Read."


@pytest.mark.filterwarnings("ignore:Default value")
def test_canonical_tool_still_works() -> None:
    made = canonical_tool(FunctionTool.from_defaults(fetch))
    assert " at 0x" not in made.metadata.description.replace("register at 0x40", "")
    assert str(made(words="x")) == "x"
    assert canonical_tool(made) is made
    plain = FunctionTool.from_defaults(tide)
    assert canonical_tool(plain) is plain
    told = FunctionTool.from_defaults(tide, description=f"Reads {Config()!r}.")
    assert canonical_tool(told).metadata.description == "Reads <unstable.Config object>."


def test_schemas_are_worked_out_once_and_forgotten_with_the_tool() -> None:
    translator = Translator()
    tool = FunctionTool.from_defaults(tide)
    first = translator.schema(tool)
    assert translator.schema(tool) is first
    tool.metadata.description = "Something else."
    assert translator.schema(tool)["function"]["description"] == "Something else."
    del tool
    gc.collect()
    assert not translator._known


def test_long_descriptions_are_no_error() -> None:
    assert len(Translator().schema(FunctionTool.from_defaults(tide, description="x" * 5000))["function"]["description"]) == 5000


def test_a_schema_that_cannot_be_made_names_the_tool() -> None:
    tool = FunctionTool.from_defaults(_undefined, name="odd")
    with pytest.raises(ToolSchemaError, match="'odd'"):
        Translator().schema(tool)


def _undefined(size: Literal["s", "l"]) -> str:  # postponed annotations: LlamaIndex does not find the name
    return size


def test_other_tools_than_functions() -> None:
    class Engine:
        """A query engine as far as a tool looks."""

    tool = QueryEngineTool(Engine(), ToolMetadata(name="log", description="Ask the log."))  # type: ignore[arg-type]
    assert name_of(Translator().schema(tool)) == "log"


def test_offer_without_and_with_a_superset() -> None:
    one, two = Translator().schemas(tools())
    three = {"type": "function", "function": {"name": "three", "parameters": {}}}
    assert offer((two,), ()).shown == (two,)
    assert offer((two,), ()).allowed is None
    masked = offer((two,), (one, two))
    assert masked.shown == (one, two)
    assert masked.allowed == ("wind",)
    assert offer((two, one), (one, two)).allowed is None
    assert offer((), (one, two)).allowed == ()
    assert offer((one, one), (one, two)).allowed == ("tide",)  # one tool given twice is not both
    assert [name_of(schema) for schema in offer((three,), (one, two)).shown] == ["tide", "wind", "three"]
    with pytest.raises(ConfigError, match="differs"):
        offer(({**two, "function": {**two["function"], "description": "other"}},), (one, two))


def test_tool_choice_words() -> None:
    offered = offer(Translator().schemas(tools()), ())
    said: list[tuple[Any, bool, str]] = [
        (None, False, "auto"),
        (None, True, "any"),
        ("required", False, "any"),
        ("none", True, "none"),
        ("wind", False, "wind"),
        ({"function": {"name": "wind"}}, False, "wind"),
    ]
    for wanted, required, meant in said:
        assert tool_choice(wanted, required, offered) == meant
    assert tool_choice(None, False, offer((), ())) == "none"
