"""Several agents at once on one tool group: its pages are held once, and their steps are computed in the same forwards.

    python examples/many_agents.py MODEL

MODEL is a Hugging Face id or a folder of a chat model.
"""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor

from agentcache import Completion, Engine, Message, Sampling, Tool

SYSTEM = "You answer questions about the stock of a bicycle shop."
TOOLS = [
    Tool(f"count_{part}", f"How many {part} are in stock.", {"type": "object", "properties": {"size": {"type": "string"}}})
    for part in ("tyres", "chains", "saddles", "pedals", "bells")
]
QUESTIONS = ["How many 28 inch tyres?", "Any bells left?", "Do we have saddles?", "Which chains are short?"]


def main(model: str) -> None:
    with Engine(model) as engine:
        group = engine.warm(SYSTEM, TOOLS, name="shop")
        print(f"{group.name}: {group.prefix_tokens} tokens on {group.pages} pages, {group.kv_bytes / 2**20:.1f} MiB")

        def ask(question: str) -> Completion:
            messages = [Message("system", SYSTEM), Message("user", question)]
            return engine.generate(messages, TOOLS, sampling=Sampling(max_tokens=24))

        with ThreadPoolExecutor(len(QUESTIONS)) as agents:
            for question, answer in zip(QUESTIONS, agents.map(ask, QUESTIONS), strict=True):
                print(f"{question} -> {answer.text!r}\n    {answer.receipt}")


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    main(sys.argv[1])
