"""A router, a caller and a judge on one base: three adapters share all that they do not change, and each answers as if it were alone.

    python examples/adapters.py MODEL ROUTER CALLER JUDGE

MODEL is a Hugging Face id or a folder of a tool-calling chat model, the others are adapters of it that PEFT saved: LoRA, rsLoRA, DoRA or
Activated LoRA. The tool group is warmed once, under the base.
"""

from __future__ import annotations

import sys

from agentcache import Completion, Engine, Message, Sampling, Tool

SYSTEM = "You answer questions about trains. Use the tools; never guess a time."
STATION = {"type": "object", "properties": {"station": {"type": "string"}}, "required": ["station"]}
TOOLS = [Tool("departures", "The next trains from a station.", STATION), Tool("delays", "Late trains at a station.", STATION)]
QUESTION = "When is the next train from Averil?"


def main(model: str, router: str, caller: str, judge: str) -> None:
    with Engine(model, adapters={"router": router, "caller": caller, "judge": judge}) as engine:
        engine.warm(SYSTEM, TOOLS, name="trains")

        def ask(adapter: str, *turns: Message) -> Completion:
            messages = [Message("system", SYSTEM), Message("user", QUESTION), *turns]
            answer = engine.generate(messages, TOOLS, adapter=adapter, sampling=Sampling(max_tokens=24))
            print(f"{adapter}: {answer.text!r}\n    {answer.receipt}")
            return answer

        ask("router", Message("user", "Which tool does that need, and is it needed at all?"))
        called = ask("caller")
        ask("judge", called.message, Message("user", "Was that the right call? Answer yes or no."))


if __name__ == "__main__":
    if len(sys.argv) < 5:
        sys.exit(__doc__)
    main(*sys.argv[1:5])
