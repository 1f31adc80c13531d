"""`python -m benchmarks.templates FOLDER`: chat templates of real models: are calls read, do an agent's steps go on.

The wheel of trl and the sources of llama-cpp-python, vllm and axolotl hold such templates, as .jinja files.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from agentcache import Constraint, Engine, Message, Sampling, Tool, ToolCall, toy
from agentcache.answer.expected import expect
from agentcache.answer.family_forms import turn_start
from agentcache.answer.grammar import Grammars
from agentcache.bench import report
from agentcache.bench.catalog import training_texts
from agentcache.bench.options import JsonOption
from agentcache.errors import AgentCacheError
from agentcache.layout import Renderer
from agentcache.terminal import report_errors

MARK = re.compile(r"<[|｜][^<>\n'\"{}]{1,40}[|｜]>|<(?:start|end)_of_turn>|\[/?[A-Z_]{3,}\]|</?s>|<[be]os>|<\|?[a-z]+_[a-z]+\|?>")
ENDS = (
    "<end_of_turn> <turn|> <|im_end|> <|eot_id|> <|eot|> </s> <|end|> <｜end▁of▁sentence｜> <|END_OF_TURN_TOKEN|> <|end_of_text|>".split()
)
LOOK = {"type": "object", "properties": {"query": {"type": "string", "maxLength": 8}, "n": {"type": "integer"}}, "required": ["query"]}
TOOLS = [Tool("look_up", "Look it up in the almanac of tides and winds.", LOOK), Tool("ping", "Ping the lighthouse.")]
ASKED = [Message("user", "You help people at sea. What is the tide?")]
CALL = Message("assistant", "", (ToolCall("look_up", {"query": 'tide {7} "é"', "n": 3}, "abcdefgh1"),))
STEPS = 3
TOKENS = 12


@dataclass(frozen=True, slots=True)
class Row:
    """One template."""

    template: str
    tools: bool = False  # it shows tools
    form: str = "-"  # of calls under a constraint: the template's own, or Hermes'
    calls: str = "-"  # a call that it shows: read, not read, not shown, refused
    new_tokens: int | None = None  # that the last step of an agent computes, of
    prompt_tokens: int | None = None
    equal: bool | None = None  # each step has the tokens and the bits of reuse off
    why: str = ""


@cache
def _words() -> Any:
    return toy.tokenizer(training_texts(), 600)


def tokenizer_of(template: str) -> Any:
    """A toy tokenizer with this template, whose marks are special tokens."""
    made = deepcopy(_words())
    made.chat_template = template
    made.add_special_tokens({"additional_special_tokens": sorted(set(MARK.findall(template)))})
    end = next((mark for mark in ENDS if mark in template), "</s>")
    made.add_special_tokens({"bos_token": "<s>", "eos_token": end})
    return made


def read_back(tokenizer: Any) -> tuple[str, str]:
    """(form, calls) of a Row: what the template shows of a call is given to the parser as an answer."""
    renderer = Renderer(tokenizer)
    grammars = Grammars(tokenizer, len(tokenizer), frozenset({tokenizer.eos_token_id}), renderer.render)
    form = "own" if grammars.form.known else "Hermes"
    try:
        layout = renderer.render(ASKED, TOOLS)
        shown = [renderer.render([*ASKED, said], TOOLS, generation=False).text for said in (CALL, Message("assistant", "zqxj"))]
    except AgentCacheError as error:
        return form, f"refused: {error}"[:120]
    called, spoken = (text[turn_start(layout.text, text) :] for text in shown)
    text = called.removesuffix(spoken.split("zqxj")[-1])
    if CALL.tool_calls[0].name not in text:
        return form, "not shown"
    expected, _ = expect(layout, TOOLS, None, grammars, Sampling())
    if expected.begun:  # the prompt begins a thought, which an answer ends
        closed = grammars.form.thought[1]
        text = f"zthought{closed}{text.split(closed.strip())[-1]}"
    parser = expected.parser(layout.ids, "")
    parser.push(text)
    parser.finish()
    said = [(call.name, dict(call.arguments)) for call in parser.message.tool_calls]
    return form, "read" if said == [(call.name, dict(call.arguments)) for call in CALL.tool_calls] else "not read"


def loop(engine: Engine, tools: Sequence[Tool]) -> tuple[int, int, bool]:
    """(new tokens and tokens of the last prompt, equal) of an agent whose calls are held to their schemas, or who only talks."""
    said, equal, receipt = list(ASKED), True, None
    for step in range(STEPS):
        held = Constraint("look_up", parallel=False) if tools else None
        done = engine.generate(said, tools, sampling=Sampling(max_tokens=600, temperature=1.0, seed=step), constraint=held)
        if calls := done.message.tool_calls:
            said += [done.message, Message("tool", f"It ebbs at noon of day {step}.", name=calls[0].name, tool_call_id=calls[0].id)]
        else:
            said += [Message("assistant", done.message.content or "Aye."), Message("user", f"And on day {step}?")]
        logits: dict[str, list[torch.Tensor]] = {"exact": [], "off": []}
        ids = []
        for reuse, told in logits.items():
            sampling = Sampling(max_tokens=TOKENS, temperature=0.0, ignore_eos=True)
            done = engine.generate(said, tools, sampling=sampling, reuse=reuse, on_logits=lambda each, told=told: told.append(each.clone()))
            receipt = receipt if reuse == "off" else done.receipt
            ids.append(done.ids)
        equal = equal and ids[0] == ids[1] and all(map(torch.equal, *logits.values()))
    assert receipt is not None
    return receipt.prompt_tokens - receipt.cached_tokens, receipt.prompt_tokens, equal


def tried(path: Path) -> Row:
    """A template, tried."""
    tokenizer = tokenizer_of(path.read_text("utf-8"))
    with Engine(toy.model(len(tokenizer), layers=2, hidden=128), tokenizer, store=None) as engine:
        tools: Sequence[Tool] = TOOLS
        try:
            try:
                engine.generate(ASKED, tools, sampling=Sampling(max_tokens=1))
            except AgentCacheError:  # most likely it shows no tools
                tools = ()
            form, calls = read_back(tokenizer) if tools else ("-", "-")
            return Row(path.name, bool(tools), form, calls.split(":")[0], *loop(engine, tools), why=calls.partition(": ")[2])
        except AgentCacheError as error:
            return Row(path.name, bool(tools), why=str(error))


def main(folder: Annotated[Path, typer.Argument(help="With .jinja files, at any depth.")], json_file: JsonOption = None) -> None:
    """Try each template once, on a tiny random model; the table names those whose calls are not read, or whose loop is refused."""
    with report_errors(), report.Progress() as say:
        texts: dict[str, Path] = {}
        for path in sorted(folder.rglob("*.jinja")):
            texts.setdefault(path.read_text("utf-8").strip(), path)
        rows = []
        for path in texts.values():
            say(path.name)
            rows.append(tried(path))
        found = {"bench": "templates", "rows": [asdict(row) for row in rows]}
        report.finish(found, [_counts(rows), _table(rows)], json_file)


def _counts(rows: Sequence[Row]) -> Any:
    with_tools = [row for row in rows if row.tools]
    calls = Counter(row.calls for row in with_tools)
    looped = [row for row in rows if row.equal is not None]
    counts = {
        "templates": len(rows),
        "show tools": len(with_tools),
        "calls read": calls["read"],
        "not shown": calls["not shown"],
        "refused": calls["refused"],
        "not read": calls["not read"],
        "form of its own": sum(row.form == "own" for row in with_tools),
        "loops": len(looped),
        "equal bits": sum(bool(row.equal) for row in looped),
    }
    return report.table("chat templates", list(counts), [[str(count) for count in counts.values()]])


def _table(rows: Sequence[Row]) -> Any:
    odd = [row for row in rows if row.equal is not True or (row.tools and row.calls != "read")]
    cells = [[row.template, row.form, row.calls, "-" if row.equal is None else str(row.equal), row.why[:60]] for row in odd]
    return report.table("refused, or their calls not read", ["template", "form", "calls", "equal", "why"], cells)


if __name__ == "__main__":
    typer.run(main)
