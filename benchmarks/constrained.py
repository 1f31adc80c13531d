"""Constrained output on the embedded model: objects and forced calls over 40 schemas, each valid or refused by a typed error.

    python -m benchmarks.constrained                1,000 objects and 1,000 calls, max_tokens=256
    python -m benchmarks.constrained --rounds 1     40 of each

Every schema is asked for equally often, at temperatures from 0 to 1. A result is valid if all of it parses and jsonschema accepts it, and
refused if the engine raises a typed error or says that it was cut.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import jsonschema

from agentcache import Constraint, Engine, Sampling, Tool
from agentcache.errors import AgentCacheError

Schema = dict[str, Any]
TEXT: Schema = {"type": "string"}
WHOLE: Schema = {"type": "integer"}
NUMBER: Schema = {"type": "number"}
YES: Schema = {"type": "boolean"}


def one(*values: Any) -> Schema:
    return {"enum": list(values)}


def many(items: Schema, **limits: int) -> Schema:
    return {"type": "array", "items": items, **limits}


def maybe(schema: Schema) -> Schema:
    return {"anyOf": [schema, {"type": "null"}]}


def of(pattern: str) -> Schema:
    return {"type": "string", "pattern": pattern}


def form(name: str) -> Schema:
    return {"type": "string", "format": name}


def thing(optional: str = "", /, **properties: Schema) -> Schema:
    """An object whose properties are required but for those named in `optional`."""
    return {"type": "object", "properties": properties, "required": [name for name in properties if name not in optional.split()]}


ADDRESS = thing("unit", street=TEXT, number=WHOLE, city=TEXT, unit=TEXT)
TREE = {
    **thing(root={"$ref": "#/$defs/Node"}),
    "$defs": {"Node": thing("children", name=TEXT, children=many({"$ref": "#/$defs/Node"}))},
}
CHAIN = {
    **thing(first={"$ref": "#/$defs/Link"}),
    "$defs": {"Link": thing(value=WHOLE, next=maybe({"$ref": "#/$defs/Link"}))},
}
SHAPES = {"oneOf": [thing(kind={"const": "circle"}, radius=NUMBER), thing(kind={"const": "box"}, width=NUMBER, height=NUMBER)]}

SCHEMAS: dict[str, tuple[Schema, str]] = {
    "payment": (thing(to=TEXT, amount=WHOLE), "Pay Bob 1250 crowns."),
    "weather": (thing("days", city=TEXT, unit=one("celsius", "fahrenheit"), days=WHOLE), "What is the weather in Port Averil?"),
    "search": (thing("limit", query=TEXT, limit={**WHOLE, "minimum": 1, "maximum": 50}), "Search the log for whales, ten results."),
    "email": (thing(to=form("email"), subject=TEXT, body=TEXT), "Write to ada@sea.org that the harbour is closed."),
    "event": (thing(title=TEXT, start=form("date-time"), end=form("date-time"), guests=many(TEXT)), "Meet Ada and Bob at noon."),
    "person": (thing("email", name=TEXT, age=WHOLE, email=TEXT, married=YES), "Ada is 36 and married."),
    "address": (ADDRESS, "The office is in 12 Harbour Street, Averil."),
    "customer": (thing(name=TEXT, home=ADDRESS, work=maybe(ADDRESS), tags=many(TEXT)), "Register Grace of 3 Mill Road, Dunmore."),
    "order": (thing(items=many(thing(sku=TEXT, count=WHOLE, price=NUMBER), minItems=1), paid=YES), "Order two lamps at 4.50 each."),
    "sentiment": (thing(label=one("positive", "negative", "neutral"), score={**NUMBER, "minimum": 0, "maximum": 1}), "I love it."),
    "ticket": (thing(title=TEXT, body=TEXT, priority=one(1, 2, 3), labels=many(TEXT, maxItems=5)), "The lamp flickers at night."),
    "point": (thing(x=NUMBER, y=NUMBER, z=NUMBER), "The buoy is at 1.5, 2.25 and 0."),
    "route": (thing(stops=many(thing(lat=NUMBER, lon=NUMBER), minItems=2, maxItems=4)), "Sail from Averil to Dunmore."),
    "matrix": (thing(rows=many(many(NUMBER, minItems=2, maxItems=2), minItems=2, maxItems=2)), "Turn by ninety degrees."),
    "tree": (TREE, "The fleet has two squadrons with a ship each."),
    "chain": (CHAIN, "One, then two, then three."),
    "shape": (SHAPES, "A circle of radius two."),
    "union": (thing(value={"anyOf": [TEXT, WHOLE, YES, many(WHOLE)]}), "The value is seven."),
    "nullable": (thing(name=TEXT, nick={"type": ["string", "null"]}, born={"type": ["integer", "null"]}), "Ada, born 1815."),
    "code": (thing(code=of(r"^[A-Z]{3}-[0-9]{4}$"), note=TEXT), "Book flight ABC-1234."),
    "colour": (thing(hex=of(r"^#[0-9a-f]{6}$"), name=TEXT), "A deep blue."),
    "loop": (thing(bits=of(r"^(ab)*c$")), "As short as you like."),
    "phone": (thing(number=of(r"^\+[0-9]{2,3}( [0-9]+){1,3}$")), "Call +44 20 7946."),
    "date": (thing(day=form("date"), at=form("time"), id=form("uuid")), "The second of May at four."),
    "host": (thing(host=form("hostname"), ip=form("ipv4"), port={**WHOLE, "minimum": 1, "maximum": 65535}), "Ping the gateway."),
    "bounded": (thing(name={**TEXT, "minLength": 5, "maxLength": 12}, note={**TEXT, "minLength": 20}), "Name the ship."),
    "range": (thing(low={**WHOLE, "minimum": 100, "maximum": 999}, high={**NUMBER, "exclusiveMinimum": 0}), "Between 100 and 250."),
    "steps": (thing(steps={**WHOLE, "multipleOf": 5}, total=NUMBER), "Twenty five steps."),
    "open": ({"type": "object", "properties": {"id": WHOLE}, "required": ["id"], "additionalProperties": TEXT}, "Whatever you know of it."),
    "scores": (thing(scores={"type": "object", "additionalProperties": NUMBER}), "Ada has 3 points, Bob has 4."),
    "free": (thing(data={}), "Anything at all."),
    "any object": ({"type": "object"}, "Say it as JSON."),
    "optional": ({"type": "object", "properties": {"a": TEXT, "b": WHOLE, "c": many(TEXT)}}, "Only what is needed."),
    "wide": (thing(**{f"field_{n}": WHOLE if n % 3 else TEXT for n in range(12)}), "Fill in the form."),
    "deep": (thing(a=thing(b=thing(c=thing(d=thing(e=TEXT))))), "Very deep down: the sea."),
    "pair": (thing(pair={"type": "array", "prefixItems": [TEXT, WHOLE], "items": False, "minItems": 2}), "Ada and 3."),
    "all of": (thing(both={"allOf": [thing(a=TEXT), thing(b=WHOLE)]}), "A is sea and b is 2."),
    "unicode": (thing(**{"größe": WHOLE, "naïve name": TEXT}), "Grösse acht."),
    "constant": (thing(version={"const": 3}, kind={"const": "a \"quoted\" kind"}), "As ever."),
    "plan": (
        thing("why", goal=TEXT, why=TEXT, actions=many(thing("args", tool=one("search", "read", "write"), args=thing(path=TEXT)))),
        "Find the log, read it and write a report.",
    ),
}  # fmt: skip
OTHERS = [Tool("get_tide", "The tide of a harbour.", thing(harbour=TEXT)), Tool("ping", "Whether anybody is there.")]
TEMPERATURES = (0.0, 0.3, 0.6, 0.8, 1.0)
LEADS = ("", "Please. ", "Quickly: ", "Now: ", "Once more: ")
PACK = 8  # requests at a time


def asked(rounds: int) -> Iterator[tuple[str, Schema, str, Sampling]]:
    """Name and schema of what is asked for, the request, how it is drawn."""
    for turn in range(rounds):
        lead = LEADS[turn // len(TEMPERATURES) % len(LEADS)]
        for name, (schema, text) in SCHEMAS.items():
            yield name, schema, lead + text, Sampling(temperature=TEMPERATURES[turn % len(TEMPERATURES)], seed=turn)


def ask(engine: Engine, kind: str, name: str, schema: Schema, text: str, sampling: Sampling) -> str:
    """What came of one request: "valid", "refused" by a typed error or as cut, "invalid"."""
    tool = "act_" + name.replace(" ", "_")
    offered = [Tool(tool, f"The {name} of a request.", schema), *OTHERS] if kind == "call" else []
    constraint = Constraint(tool) if kind == "call" else Constraint(schema=schema)
    try:
        done = engine.generate([{"role": "user", "content": text}], offered, sampling=sampling, constraint=constraint)
    except AgentCacheError as error:
        print(f"{kind} {name!r}: {type(error).__name__}: {error}")
        return "refused"
    if done.cut:
        print(f"{kind} {name!r}: cut: {done.text[-160:]!r} {done.finish_reason} {done.receipt.completion_tokens}")
        return "refused"
    try:
        if kind == "object":
            jsonschema.validate(json.loads(done.message.content), schema)
        else:
            (call,) = done.message.tool_calls
            assert call.name == tool
            jsonschema.validate(call.arguments, schema)
    except (ValueError, AssertionError, jsonschema.ValidationError) as error:
        print(f"{kind} {name!r}: {error}: {done.text!r}")
        return "invalid"
    return "valid"


def measure(rounds: int, max_tokens: int) -> dict[str, dict[str, int]]:
    """Counts of what came, for objects and for calls. Several requests share a forward."""
    counts = {"object": Counter[str](), "call": Counter[str]()}
    with Engine("embedded", store=None) as engine, ThreadPoolExecutor(PACK) as pool:

        def count(kind: str, name: str, schema: Schema, text: str, sampling: Sampling) -> tuple[str, str]:
            return kind, ask(engine, kind, name, schema, text, replace(sampling, max_tokens=max_tokens))

        running = [pool.submit(count, kind, *each) for each in asked(rounds) for kind in counts]
        for done in running:
            kind, came = done.result()
            counts[kind][came] += 1
    return {kind: dict(sorted(each.items())) for kind, each in counts.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=25, help="requests per schema and kind")
    parser.add_argument("--max-tokens", type=int, default=256)
    asked_for = parser.parse_args()
    start = time.monotonic()
    counts = measure(asked_for.rounds, asked_for.max_tokens)
    for kind, each in counts.items():
        print(f"{kind + 's':8}" + ", ".join(f"{number} {came}" for came, number in each.items()))
    total = sum(sum(each.values()) for each in counts.values())
    valid = sum(number for each in counts.values() for came, number in each.items() if came == "valid")
    said = {"schemas": len(SCHEMAS), "requests": total, "max_tokens": asked_for.max_tokens, "valid": valid / total, **counts}
    print(json.dumps({"benchmark": "constrained", **said, "seconds": round(time.monotonic() - start)}))


if __name__ == "__main__":
    main()
