"""LlamaIndex's agents on the embedded model, run after run: does each of them end, and in what?

    python -m benchmarks.agents_llamaindex --runs 300

A run is one question, or a conversation of two, with values of its own. It ends in an answer of the kind's form, in a typed error, or in a
loop: LIMIT steps where two or three would do. "solved" needs the right call and an answer that says what it found; "misread" is an answer
that does not, though the model was shown it; "not shown" would be a fault of the prompt. A workflow's questions that need a handoff are
counted apart. Ends with one JSON line, and 1 if one looped.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import time
import warnings
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any

from llama_index.core.agent.workflow import AgentWorkflow, FunctionAgent, ReActAgent
from llama_index.core.instrumentation import get_dispatcher
from llama_index.core.instrumentation.event_handlers import BaseEventHandler
from llama_index.core.instrumentation.events import BaseEvent
from llama_index.core.prompts import PromptTemplate
from llama_index.core.workflow import Context, WorkflowRuntimeError
from pydantic import BaseModel, Field

from agentcache.errors import AgentCacheError

from .integrations import integration

OURS = integration("llamaindex")
AgentCacheLLM, AppendOnlyMemory, SharedAgentWorkflow = OURS.AgentCacheLLM, OURS.AppendOnlyMemory, OURS.SharedAgentWorkflow
ReceiptEvent, StableReActAgent, answer_at_tail = OURS.ReceiptEvent, OURS.StableReActAgent, OURS.answer_at_tail

LIMIT = 12  # steps of a run
SYSTEM = "You are a helpful assistant."
NOTES = {
    "AgentWorkflow": "the embedded model was not trained on handoffs: it says that it has no tool for that. With the handoff tool in its "
    "prompt it also leaves the amount out of its answers, under stock transformers on the same ids too. Each run has a Context of its own, "
    "so the memory that LlamaIndex loses between runs with pydantic 2.14 is not at stake",
    "SharedAgentWorkflow": "the model wants the other agent's tool, which the mask forbids, and calls its own instead of handing off",
    "output_cls": "LlamaIndex writes the conversation as XML into one user turn, which the embedded model was not trained to read; "
    "answer_at_tail asks for the same at the end of the conversation",
}


class Invoice(BaseModel):
    """An invoice."""

    status: str = Field(max_length=20)
    amount: int = Field(ge=0, le=99999)


Call = tuple[str, str]  # a tool and its argument


class Desk:
    """Tools that remember what they were asked."""

    def __init__(self) -> None:
        self.asked: list[Call] = []

    def get_invoice(self, invoice_id: str) -> str:
        """Get an invoice."""
        self.asked.append(("get_invoice", invoice_id))
        return '{"status": "open", "amount": 240}'

    def cancel_order(self, order_id: str) -> str:
        """Cancel an order."""
        self.asked.append(("cancel_order", order_id))
        return '{"status": "accepted"}'


class Shown(BaseEventHandler):
    """The last prompt that a model was given."""

    text: str = ""

    def handle(self, event: BaseEvent, **kwargs: Any) -> None:
        if isinstance(event, ReceiptEvent):
            self.text = str(event.prompt)


shown = Shown()
Run = Callable[[Any, random.Random], Awaitable[str]]


def question(rng: random.Random) -> tuple[str, Call, str]:
    """(question, the call that it needs, a word of the answer)."""
    number = str(rng.randrange(100, 99999))
    invoice = f"Get the invoice A-{number}.", ("get_invoice", f"A-{number}"), "240"
    return rng.choice((invoice, (f"Cancel the order {number}.", ("cancel_order", number), "accepted")))


def judged(desk: Desk, wanted: list[Call], answer: Any, word: str) -> str:
    text = str(answer).strip()
    if desk.asked != wanted:
        return "no call" if not desk.asked else "another call"
    if word in text or not text:
        return "solved" if text else "no answer"
    return "misread" if word in shown.text else "not shown"


def alone(kind: Any, **options: Any) -> Run:
    async def run(llm: Any, rng: random.Random) -> str:
        desk, (text, call, word) = Desk(), question(rng)
        agent = kind(tools=[desk.get_invoice, desk.cancel_order], llm=llm, system_prompt=SYSTEM, **options)
        return judged(desk, [call], await agent.run(text, max_iterations=LIMIT), word)

    return run


def conversation(kind: Any) -> Run:
    """Two runs over one Context."""

    async def run(llm: Any, rng: random.Random) -> str:
        desk, asked = Desk(), [question(rng), question(rng)]
        agent = kind(tools=[desk.get_invoice, desk.cancel_order], llm=llm, system_prompt=SYSTEM)
        context, memory = Context(agent), AppendOnlyMemory.from_defaults(llm=llm)
        for text, _, _ in asked:
            answer = await agent.run(text, ctx=context, memory=memory, max_iterations=LIMIT)
        return judged(desk, [call for _, call, _ in asked], answer, asked[-1][2])

    return run


def workflow(kind: Any) -> Run:
    """Two agents, each with a tool."""

    async def run(llm: Any, rng: random.Random) -> str:
        desk, (text, call, word) = Desk(), question(rng)
        shared: dict[str, Any] = {"llm": llm, "system_prompt": SYSTEM}
        books = FunctionAgent(name="books", description="Knows invoices.", tools=[desk.get_invoice], can_handoff_to=["desk"], **shared)
        orders = FunctionAgent(name="desk", description="Cancels orders.", tools=[desk.cancel_order], can_handoff_to=["books"], **shared)
        answer = await kind([books, orders], root_agent="books").run(text, max_iterations=LIMIT)
        return f"{'own tool' if 'invoice' in text else 'handoff'}: {judged(desk, [call], answer, word)}"

    return run


def formed(at_tail: bool) -> Run:
    """An agent that ends with an object."""

    async def run(llm: Any, rng: random.Random) -> str:
        desk, number = Desk(), rng.randrange(100, 99999)
        agent = FunctionAgent(tools=[desk.get_invoice, desk.cancel_order], llm=llm, system_prompt=SYSTEM)
        agent = answer_at_tail(agent, Invoice) if at_tail else agent.model_copy(update={"output_cls": Invoice})
        output: Any = await agent.run(f"Get the invoice A-{number}.", max_iterations=LIMIT)
        if output.structured_response is None:
            return "no object"
        made = Invoice.model_validate(output.structured_response)
        return judged(desk, [("get_invoice", f"A-{number}")], made.amount, "240")

    return run


async def predicted(llm: Any, rng: random.Random) -> str:
    """An object without an agent."""
    prompt = PromptTemplate("The invoice A-{number} is open, and its amount is {amount}. Write it down.")
    amount = rng.randrange(10, 999)
    made = await llm.astructured_predict(Invoice, prompt, number=rng.randrange(100, 99999), amount=amount)
    return "solved" if made.amount == amount else "another object"


KINDS: dict[str, Run] = {
    "FunctionAgent": alone(FunctionAgent),
    "FunctionAgent, not streaming": alone(FunctionAgent, streaming=False),
    "FunctionAgent, two runs": conversation(FunctionAgent),
    "ReActAgent": alone(ReActAgent),
    "StableReActAgent": alone(StableReActAgent),
    "StableReActAgent, two runs": conversation(StableReActAgent),
    "AgentWorkflow": workflow(AgentWorkflow),
    "SharedAgentWorkflow": workflow(SharedAgentWorkflow),
    "answer_at_tail": formed(True),
    "output_cls": formed(False),
    "structured_predict": predicted,
}


def outcome(llm: Any, name: str, number: int) -> str:
    """How one run ended."""
    try:
        return asyncio.run(_awaited(KINDS[name](llm, random.Random(f"{name} {number}"))))
    except WorkflowRuntimeError as error:
        if "Max iterations" not in str(error):
            raise
        return "loop"
    except AgentCacheError as error:
        return type(error).__name__


async def _awaited(run: Awaitable[str]) -> str:
    return await run


def main() -> int:
    """Run each kind and print what came of it; 1 if one looped."""
    given = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    given.add_argument("--runs", type=int, default=300, help="of each kind")
    given.add_argument("--kinds", default="", help="some of them, with semicolons")
    given.add_argument("--max-tokens", type=int, default=256)
    said = given.parse_args()
    wanted = [name.strip() for name in said.kinds.split(";") if name.strip()] or list(KINDS)
    if unknown := [name for name in wanted if name not in KINDS]:
        given.error(f"--kinds: {unknown[0]!r} is none of {sorted(KINDS)!r}")
    found: dict[str, dict[str, int]] = {}
    get_dispatcher().add_event_handler(shown)
    warnings.simplefilter("ignore")  # LlamaIndex makes a warning of an object that is none; here it is counted
    with AgentCacheLLM(model="embedded", max_tokens=said.max_tokens, store=None) as llm:
        for name in wanted:
            began = time.perf_counter()
            found[name] = dict(Counter(outcome(llm, name, number) for number in range(said.runs)))
            print(f"{name:30} {found[name]}  {time.perf_counter() - began:.0f} s", file=sys.stderr)
    loops = sum(each.get("loop", 0) for each in found.values())
    notes = {name: note for name, note in NOTES.items() if name in found}
    for name, note in notes.items():
        print(f"{name}: {note}.", file=sys.stderr)
    print(
        json.dumps({"bench": "agents_llamaindex", "model": "embedded", "runs": said.runs, "loops": loops, "kinds": found, "notes": notes})
    )
    return int(loops > 0)


if __name__ == "__main__":
    sys.exit(main())
