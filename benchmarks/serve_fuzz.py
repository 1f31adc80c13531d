"""`python -m benchmarks.serve_fuzz`: schemathesis draws requests from the server's own OpenAPI schema; none may fail.

Each operation gets sound and unsound requests. Every answer must have a documented status, type and shape, and be no server error.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import schemathesis
import typer

from agentcache.bench import servers
from agentcache.terminal import report_errors

CHECKS = "not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance"
BOUNDS = dict.fromkeys(("max_tokens", "max_completion_tokens", "max_output_tokens"), 2)
FUNCTION = {"name": "tide", "parameters": {"type": "object", "properties": {"port": {"type": "string"}}}}
FORM = {"type": "json_schema", "name": "port", "schema": {"type": "object"}}
SOUND: dict[str, Any] = {  # values that a drawn body seldom has, and without which the engine is not asked
    "model": "embedded",
    "messages": [{"role": "user", "content": "When is high water in Port Averil?"}],
    "tools": [{"type": "function", "function": FUNCTION, **FUNCTION}],
    "tool_choice": "auto",
    "response_format": {"type": "json_schema", "json_schema": FORM},
    "text": {"format": FORM},
    "temperature": 0.5,
    "seed": 1,
    "service_tier": None,
}
OPTIONS = "--no-shrink --continue-on-failure --request-timeout 60 --suppress-health-check all --exclude-path /events".split()


_chance = random.Random(0)


@schemathesis.hook
def before_call(context: schemathesis.HookContext, case: schemathesis.Case, kwargs: dict[str, Any]) -> None:
    """Keep answers short, so that requests are many; and give every other one sound values, so that it reaches the engine."""
    if not isinstance(case.body, dict) or not case.operation.body:
        return
    known = str(case.operation.body[0].definition["schema"])
    case.body |= {name: value for name, value in BOUNDS.items() if name in known and isinstance(case.body.get(name, value), int)}
    if _chance.random() < 0.5:
        case.body |= {name: value for name, value in SOUND.items() if name in known and _chance.random() < 0.9}


@dataclass(frozen=True)
class Fuzzed:
    """What schemathesis found."""

    # requests that were sent, those of them that were answered with success, those with a failure
    requests: int
    accepted: int
    failed: int
    output: str  # its report in words


def fuzz(url: str, examples: int, seed: int, phases: str = "examples,coverage,fuzzing") -> Fuzzed:
    """Send at most so many drawn requests to each operation, and those of the other phases."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        command = [sys.executable, "-m", "schemathesis.cli", "--no-color", "run", f"{url}/openapi.json", *OPTIONS]
        command += ["--phases", phases, "--checks", CHECKS, "--max-examples", str(examples), "--seed", str(seed)]
        command += ["--generation-database", "none", "--report-json-path", str(report)]
        environment = {**os.environ, "SCHEMATHESIS_HOOKS": "benchmarks.serve_fuzz", "PYTHONPATH": str(Path(__file__).parents[1])}
        done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=folder)
        if done.returncode not in (0, 1):
            raise RuntimeError(done.stdout + done.stderr)
        said = json.loads(report.read_text(encoding="utf-8"))
    accepted = sum(phase["accepted"] for operation in said["valid_rates"].values() for phase in operation.values())
    cases = said["test_cases"]
    return Fuzzed(cases["generated"], accepted, cases["with_failures"] + cases["errored"] + len(said["errors"]), done.stdout)


def main(
    examples: Annotated[int, typer.Option(help="Requests drawn for each operation, beside those that cover its schema.")] = 40,
    seed: Annotated[int, typer.Option(help="Of what is drawn.")] = 0,
) -> None:
    """Send the requests to a server of the embedded model; exit 1 if one fails."""
    with report_errors(), tempfile.TemporaryDirectory() as folder, servers.agentcache("embedded", folder) as served:
        found = fuzz(served.url, examples, seed)
    print(found.output)
    line = {"benchmark": "serve_fuzz", "seed": seed, "requests": found.requests, "accepted": found.accepted, "failed": found.failed}
    print(json.dumps(line))
    raise typer.Exit(bool(found.failed))


if __name__ == "__main__":
    typer.run(main)
