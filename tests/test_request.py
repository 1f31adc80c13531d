"""What was asked stays as it was asked; the state on the device is another object, and one module writes the account of both."""

from __future__ import annotations

import ast
import dataclasses
from pathlib import Path
from typing import Any

import pytest

import agentcache
from agentcache.kv import Sequence
from agentcache.receipt import Receipt
from agentcache.runner import Runner
from tests.engines import chat, decode, engine, long_text

FIELDS = {field.name for field in dataclasses.fields(Receipt)}


def written(source: str) -> list[str]:
    """Receipt fields that a module assigns or changes in place, as its source spells them."""
    found = []
    for node in ast.walk(ast.parse(source)):
        targets: list[ast.expr] = []
        if isinstance(node, ast.Assign):
            targets = [part for target in node.targets for part in (target.elts if isinstance(target, ast.Tuple) else [target])]
        elif isinstance(node, (ast.AugAssign, ast.AnnAssign)):
            targets = [node.target]
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in ("append", "extend", "clear"):
            targets = [node.func.value]
        for target in targets:
            if isinstance(target, ast.Attribute) and target.attr in FIELDS and ast.unparse(target.value).endswith("receipt"):
                found.append(ast.unparse(target))
    return found


@pytest.mark.usefixtures("no_garbage")
def test_only_the_account_writes_a_receipt() -> None:
    package = Path(agentcache.__file__).parent
    sources = {path.relative_to(package): path.read_text(encoding="utf-8") for path in package.rglob("*.py")}
    account = sources.pop(Path("receipt.py"))
    assert {str(path): found for path, source in sources.items() if (found := written(source))} == {}
    assert len(written(account)) > 40, "else this test sees nothing"


def test_a_request_in_flight_leaves_what_was_asked_alone() -> None:
    with engine() as running:
        stream = running.stream(chat("one"), sampling=decode(4), turn="first")
        asked = stream._request.asked
        prompt = list(asked.layout.ids)
        assert len(stream.completion.ids) == 4
        assert list(asked.layout.ids) == prompt
        assert stream._request.ids.all == [*prompt, *stream.completion.ids]
        with pytest.raises(dataclasses.FrozenInstanceError):
            asked.turn = "second"  # type: ignore[misc]


def test_the_pieces_of_a_forward_are_computed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    cut, ran = [0], [0]
    pieces, run = Sequence.pieces, Runner.run

    def counted_pieces(self: Sequence, tokens: int) -> Any:
        cut[0] += 1
        return pieces(self, tokens)

    def counted_run(self: Runner, work: list[Any]) -> Any:
        ran[0] += len(work)
        return run(self, work)

    monkeypatch.setattr(Sequence, "pieces", counted_pieces)
    monkeypatch.setattr(Runner, "run", counted_run)
    with engine(chunk_tokens=64) as running:
        running.generate(chat(long_text(60)), sampling=decode(5))
        assert ran[0] > 6
        assert cut == ran
