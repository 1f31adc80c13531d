"""Writes the corpus and conversations of `agentcache bench rag`: texts about made-up towns that the embedded model can answer from.

    python -m benchmarks.rag_corpus

Each town has eight passages. Seven tell one thing each, no two the same kind; a conversation asks about six. Names and values are
of the test split of examples/embedded/world: the embedded model was not trained on them.
"""

from __future__ import annotations

import gzip
import json
import random
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
FILE = ROOT / "agentcache" / "approximate" / "calibrate" / "towns.json.gz"
TOWNS, PASSAGES, CONVERSATIONS, QUESTIONS = 30, 8, 60, 6


def corpus() -> dict[str, Any]:
    """Passages, and conversations of questions: (question, how an answer begins, the answer, the passage that has it)."""
    sys.path.insert(0, str(ROOT))
    from examples.embedded.world.facts import BORN, RELATIONS, _entity
    from examples.embedded.world.world import Source, World

    world, rng = World("rag", Source("test", "test", "test")), random.Random("rag")
    passages: list[str] = []
    asked: list[list[Any]] = []
    seen: set[str] = set()

    def new(draw: Any) -> str:
        while (one := draw()) in seen or not one.isascii():
            pass
        seen.add(one)
        return str(one)

    for _ in range(TOWNS):
        town = new(world.made_up)
        told: list[Any] = []
        for kind in [*sorted(RELATIONS), "born", ""]:
            if kind == "born":
                about = new(world.full_name)
                value = new(world.place)
                fact = " ".join(one.format(e=about, v=value) for one in rng.sample(BORN[1], 2))
            elif kind:
                about, relation = new(lambda: _entity(world)), RELATIONS[kind]
                while not (value := relation.draw(world)).isascii():
                    pass
                wordings = rng.sample(relation.sentences, len(relation.sentences))
                fact = " ".join(one.format(e=f"the {about}", E=f"The {about}", v=value) for one in wordings)
                told.append((rng.choice(relation.questions).format(e=f"the {about}"), f"The {relation.label} is ", value, len(passages)))
            else:
                fact = f"The town of {town} lies between two hills. A river runs by."
            passages.append(f"{town.capitalize()}: {fact}")
        asked.append(told)
    talks = []
    for number in range(CONVERSATIONS):
        at = number % TOWNS
        talks.append({"passages": [at * PASSAGES, (at + 1) * PASSAGES], "questions": rng.sample(asked[at], QUESTIONS)})
    rng.shuffle(talks)
    return {"passages": passages, "conversations": talks}


def main() -> None:
    written = json.dumps(corpus(), ensure_ascii=False, separators=(",", ":")).encode()
    FILE.write_bytes(gzip.compress(written, 9, mtime=0))
    print(f"{FILE.relative_to(ROOT)}: {FILE.stat().st_size} bytes")


if __name__ == "__main__":
    main()
