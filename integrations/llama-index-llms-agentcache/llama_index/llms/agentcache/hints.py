"""What a user should change, said once per cause: why a prompt was computed again, and which part of this package keeps it.

The engine's receipt knows cause and cure in words for everybody (`missed`); here stand LlamaIndex's names. Changes no request.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.metadata import version
from typing import Any

from llama_index.core.agent.workflow.prompts import DEFAULT_EARLY_STOPPING_PROMPT
from llama_index.core.memory.types import BaseMemory
from llama_index.core.workflow import JsonSerializer

from agentcache import CallerWarnings, Completion, Message, MissWarnings
from agentcache.errors import ReuseWarning

from . import contexts

SELDOM = ("truncated history",)  # AppendOnlyMemory leaves out turns as well, but not twice in a row: one is not worth a warning
LEAST = 32  # tokens, as in the engine's `missed`
BETWEEN = ("llama_index", "llama_index_instrumentation", "tqdm", "workflows")  # packages between a program's line and a warning about it

_TAIL = "What changes by itself, such as the time or retrieved passages, belongs into the newest user message, or into volatile=[...]"
_BLOCKS = "Keep response.message with its blocks in the memory, and AppendOnlyMemory hands it out as it was"
HINTS = {
    "changed tool set": "llm.with_superset(all_tools) keeps every tool in the prompt; a step's own tools are a mask",
    "order": "Results go into the memory in the order of their calls, and tools into every step in one order: llm.with_superset(all_tools)",
    "truncated history": "AppendOnlyMemory leaves out old turns seldom and many at once; token_limit says when",
    "front summary": "AppendOnlyMemory never rewrites what was said; it leaves out old turns seldom and many at once",
    "edited history": "AppendOnlyMemory hands messages out as they were shown, a workflow's initial_state included",
    "re-serialised arguments": _BLOCKS,
    "dropped reasoning": _BLOCKS,
    **dict.fromkeys(("changed system text", "clock", "id", "counter"), _TAIL),
}
HANDOFF = "SharedAgentWorkflow has one system prompt and one list of tools for all agents"
REACT = "StableReActAgent leaves the steps in the model's own words, and a finished run as the turns that it was"
REWRITTEN = (
    "rewritten conversation",
    "LlamaIndex has rewritten the conversation as XML for output_cls=; answer_at_tail(agent, Class) does not",
)
NO_TOOLS = (
    "tools left out",
    "early_stopping_method='generate' leaves the tools out of the last request; llm.with_superset(tools) keeps them",
)


class Hints:
    """Says each once. Safe to use from many threads."""

    def __init__(self) -> None:
        self._warnings = CallerWarnings(BETWEEN, ReuseWarning)
        self._missed = MissWarnings(SELDOM)
        self._answers = CallerWarnings(BETWEEN)

    def tell(self, raw: dict[str, Any], done: Completion, prompt: Sequence[Message] | str, tools: Sequence[str]) -> None:
        """Put the hint of a response's `raw`, if there is one, beside its cause there, and warn of it the first time.

        An answer in which a text or a list ended early is valid, but the model would have written more, and one that ended in its thought
        says nothing: warn of each.
        """
        if done.cut and not (done.message.content or done.message.tool_calls):
            self._answers.warn("the answer is empty, as max_tokens or a stop string ended its thought: raise it. raw['cut'] tells it")
        if done.shortened:
            self._answers.warn("a text or a list of the answer ended early, to fit into max_tokens: raise it. raw['shortened'] tells it")
        receipt = raw["receipt"]
        missed = receipt.get("missed") or _rewritten(receipt, prompt, tools)
        if missed and (hint := _hint(missed, prompt, tools)):
            missed = {**missed, "hint": hint}
        if missed:
            receipt["missed"] = missed
        if (text := self._missed.text(missed)) and missed:
            self._warnings.warn_once(missed["cause"], f"{text} Said once per cause; raw['receipt']['missed'] tells it of every response.")

    async def look(self) -> None:
        """Say that LlamaIndex has lost a memory between two runs over a Context, where the request that begins the later one shows it."""
        memory = await _forgotten()
        if memory is None:
            return
        self._warnings.warn_once(
            "lost memory",
            f"the {memory} of the run before is lost: LlamaIndex {version('llama-index-core')} with pydantic {version('pydantic')} cannot "
            "save it between two runs over one Context. Give the first run memory=AppendOnlyMemory.from_defaults(llm=llm), which is saved, "
            "or every run its memory=",
        )


def _hint(missed: Mapping[str, Any], prompt: Sequence[Message] | str, tools: Sequence[str]) -> str | None:
    """What LlamaIndex has, or this package, against a cause."""
    cause = missed["cause"]
    if "handoff" in tools and cause in ("changed system text", "changed tool set", "order"):
        return HANDOFF
    if cause == "edited history" and not tools and not isinstance(prompt, str) and "Action Input:" in prompt[0].content:
        return REACT
    if cause == "order" and missed["writer"] == "system":  # neither tools nor results: retrieved passages, mostly
        return _TAIL
    return HINTS.get(cause)


def _rewritten(receipt: Mapping[str, Any], prompt: Sequence[Message] | str, tools: Sequence[str]) -> dict[str, Any] | None:
    """What LlamaIndex does to a conversation so that it is taken for another one: in the words of `missed`."""
    if isinstance(prompt, str) or not prompt or tools or receipt["computed_tokens"] < LEAST:
        return None
    for said, (cause, fix) in (("<current_conversation>", REWRITTEN), (DEFAULT_EARLY_STOPPING_PROMPT.partition("{")[0], NO_TOOLS)):
        if said in prompt[-1].content:
            return {"cause": cause, "writer": "LlamaIndex", "cost_tokens": receipt["computed_tokens"], "fix": fix}
    return None


async def _forgotten() -> str | None:
    """The class of a memory that began anew in a run that is not the first one over its Context; None if nothing was lost.

    A run's first request finds what earlier runs have left: their tool calls, and, where it could be saved, the memory.
    """
    if (store := contexts.state()) is None:
        return None
    missing = object()
    memory = await store.get("memory", default=None)
    later = await store.get("current_tool_calls", default=missing) is not missing and await store.get("num_iterations", default=1) == 0
    if not later or not isinstance(memory, BaseMemory) or any(one.role.value == "assistant" for one in await memory.aget_all()):
        return None
    try:
        JsonSerializer().serialize(memory)
    except ValueError:
        return type(memory).__name__
    return None
