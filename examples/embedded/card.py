"""The model card, from the state of a training and the figures of `python -m benchmarks.quality`. Measures nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

# What the model is made for (test split, greedy): what it falls short of is said in the card.
TARGETS = (
    ("unseen tools", 5, "tsa", 0.98, "at least"),
    ("unseen tools", 20, "tsa", 0.95, "at least"),
    ("unseen tools", 50, "tsa", 0.85, "at least"),
    ("unseen tools", 20, "em", 0.90, "at least"),
    ("unseen tools", 5, "fpr", 0.03, "at most"),
    ("unseen tools", 20, "fpr", 0.03, "at most"),
    ("unseen tools", 50, "fpr", 0.03, "at most"),
    ("unseen words", 20, "tsa", 0.85, "at least"),
)
ABOVE = 0.15  # the better of two baselines, BM25 over names and descriptions and the first tool, right tool
ASKED = 1000  # requests in a cell
COLD_MS, TOKENS_PER_S = 1000.0, 150.0  # to the first token of a prompt of 20 tools of which nothing is kept; decoding
EPISODES = {"hermes": 0.90, "langchain": 0.85, "llamaindex": 0.85}
BASELINES = ("BM25", "BM25 with parameters", "first tool")
NAMES = {"tsa": "right tool", "em": "exact call", "fpr": "calls though no tool fits"}

HEAD = """\
---
license: apache-2.0
language: en
library_name: transformers
tags: [tool-calling, react, agents, synthetic]
---

# The embedded model of agentcache

A tiny agent for demos, tests and measurements: it chooses among tools that it has never seen and fills their arguments by copying from
the request. A Qwen3-architecture decoder with {size:,} parameters, own byte-level BPE of {vocab:,} tokens, ChatML turns, `<tools>` block
and `<tool_call>` JSON as Hermes and Qwen models have them, and text ReAct in the prompts of LangChain's and LlamaIndex's agents.

    from agentcache import Engine
    engine = Engine("embedded")

It is an ordinary Hugging Face folder too. English only; it knows nothing about the world, cannot chat, and is no use for real work.
Before a call or a refusal it says in a sentence or two what is wanted and what decides; where a system prompt wants no words ("Do not
explain your calls."), that stands between `<think>` and `</think>`. `strict_calls` in its generation config makes an `Engine` hold its
calls to the schemas of the tools (with the extra `constrain` of agentcache-llm); other software decodes it freely, and gets more wrong
names and types.

`volatile_ahead` in its tokenizer's config names the messages as which an `Engine` hands text for one request only, such as a clock, to the
chat template, which writes it before the last turn, outside any turn: there this model takes it for nothing that is asked about.

## Training

Trained from random weights, into which some look-up heads were put by construction (examples/embedded/initial.py), on text that
`examples/embedded/world` generates, and on nothing else: {tokens:.1f} million tokens, {steps:,} steps, {hours:.1f} hours of 2 CPU
cores, the first 12 of them on older ones (docs/notes/embedded.md says how fast each were). It is one run that was stopped and resumed while
the generator and the order of its stages were still being mended, so it cannot be repeated to the bit. `python
examples/embedded/train.py --out FOLDER --tokens 46.5e6`, then the same with `--head-dim 64 --resume` (its heads began with 32 channels
and became twice as wide there), then at 90.8e6 with `--layers 8 --renew --begin-from` what that left (it began with seven layers),
trains another one like it, on the same texts for a seed.
`examples/embedded/export.py` makes this folder.
Training, validation and test share function words, action verbs and a closed set of paraphrases; pairs of action and thing ("tools"),
nouns and made-up words ("words") and values are disjoint. What can generalise to them is lexical matching and copying, and that is what
the model does.
"""

TAIL = """\
## Limits

Requests that need knowledge, synonyms outside the closed list, arithmetic in the head, nested or array arguments, lists in results,
several calls in one turn, languages other than English, more than 8,192 tokens. It was made for the tools and requests of its own world;
what it gets of those that people wrote is in the figures, where they were asked.
"""


def _share(row: Mapping[str, Any], name: str) -> str:
    if row.get(name) is None:
        return "-"
    low, high = row[f"{name}_ci"]
    return f"{row[name]:.3f} ({low:.2f}-{high:.2f})"


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = ["| " + " | ".join(cells) + " |" for cells in (columns, ["---"] * len(columns), *rows)]
    return "\n".join(lines) + "\n"


def _requests(found: Mapping[str, Any]) -> str:
    figures = ("tsa", "pf1", "em", "fpr", "fnr", "bm25_tsa", "bm25_params_tsa", "first_tsa")
    rows = [[row["split"], str(row["tools"]), str(row["n"]), *(_share(row, name) for name in figures)] for row in found.get("rows", ())]
    shares = [
        [f"{row['split']}, {row['share']}", str(row["tools"]), str(row["n"]), *(_share(row, name) for name in figures)]
        for row in found.get("shares", ())
        if row["tools"] == 20
    ]
    columns = ("split", "tools", "n", "right tool", "argument F1", "exact call", "false positives", "false negatives", *BASELINES)
    return _table(columns, [*rows, *shares]) if rows else ""


def _episodes(found: Mapping[str, Any]) -> str:
    rows = [[row["style"], str(row["tools"]), str(row["n"]), _share(row, "solved")] for row in found.get("episodes", ())]
    return "Dialogues of at least two calls, every step right:\n\n" + _table(("style", "tools", "n", "solved"), rows) if rows else ""


def _files(found: Mapping[str, Any]) -> str:
    names = ("tsa", "pf1", "em", "bm25_tsa", "bm25_params_tsa", "first_tsa")
    rows = [
        [row["file"], str(row["n"]), *(_share(row, name) for name in names), str(row["too_long"])] for row in found.get("selection", ())
    ]
    columns = ("file of cases", "n", "right tool", "argument F1", "exact call", *BASELINES, "too long to ask")
    return "Requests that people wrote for other tools:\n\n" + _table(columns, rows) if rows else ""


def _speed(found: Mapping[str, Any]) -> str:
    said = "A prompt of {tools} tools ({prompt_tokens:.0f} tokens) of which nothing is kept: {ttft_ms:.0f} ms to the first token, then\n"
    said += "{tokens_per_s:.0f} tokens a second, with what else the machine did.\n"
    return "".join(said.format(**row) for row in found.get("speed", ()) if row["tokens_per_s"])


def joined(reports: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Several runs of the benchmark on the same weights as one report: of each cell the one with most requests, of all else the last."""
    drawn = [(report["held"], report.get("seed")) for report in reports]
    if len(set(drawn)) > 1:
        raise ValueError(f"figures of different requests: held, seed = {drawn!r}")
    out: dict[str, Any] = {}
    for report in reports:
        out |= {name: value for name, value in report.items() if value and name not in ("rows", "shares", "episodes")}
    for name, key in (("rows", ("split", "tools")), ("shares", ("split", "tools", "share")), ("episodes", ("style",))):
        best: dict[tuple[Any, ...], Mapping[str, Any]] = {}
        for row in (row for report in reports for row in report.get(name) or ()):
            cell = tuple(row[part] for part in key)
            if cell not in best or row["n"] > best[cell]["n"]:
                best[cell] = row
        out[name] = list(best.values())
    return out


def missed(found: Mapping[str, Any]) -> list[str]:
    """The targets that these figures do not reach, or that were not measured."""
    rows = {(row["split"], row["tools"]): row for row in found.get("rows", ())}
    solved = {row["style"]: row["solved"] for row in found.get("episodes", ())}
    out = []
    for split, tools, name, target, sense in TARGETS:
        got = rows.get((split, tools), {}).get(name)
        if got is None or (got < target if sense == "at least" else got > target):
            out.append(f"{NAMES[name]}, {split}, {tools} tools: {'not measured' if got is None else f'{got:.3f}'}, wanted {sense} {target}")
        bases = [rows.get((split, tools), {}).get(base) for base in ("bm25_tsa", "first_tsa")]
        if name == "tsa" and got is not None and None not in bases and got - max(bases) < ABOVE:
            out.append(f"above the better baseline, {split}, {tools} tools: {got - max(bases):.3f}, wanted at least {ABOVE}")
    if rows and (fewest := min(row["n"] for row in rows.values())) < ASKED:
        out.append(f"requests in a cell: {fewest}, wanted at least {ASKED}: a cell may be off by what its interval says")
    for row in found.get("speed", ()):
        rate = row["tokens_per_s"] or 0.0
        if row["ttft_ms"] > COLD_MS or rate < TOKENS_PER_S:
            wanted = f"{COLD_MS:.0f} ms and {TOKENS_PER_S:.0f}/s"
            out.append(f"first token of {row['tools']} tools cold, decoding: {row['ttft_ms']:.0f} ms, {rate:.0f} tokens/s, wanted {wanted}")
    for style, target in EPISODES.items():
        if solved.get(style) is None or solved[style] < target:
            got = "not measured" if solved.get(style) is None else f"{solved[style]:.3f}"
            out.append(f"dialogues solved, {style}: {got}, wanted at least {target}")
    return out


def card(state: Mapping[str, Any], size: int, found: Mapping[str, Any] | None, vocab: int = 4096) -> str:
    """The whole card. found: the report of `python -m benchmarks.quality`, None if there is none."""
    numbers = {"tokens": state["tokens"] / 1e6, "steps": state["step"], "hours": state["hours"]}
    text = HEAD.format(size=size, vocab=vocab, **numbers) + "\n## Figures\n\n"
    if found is None:
        return text + "None were measured for these weights yet.\n\n" + TAIL
    text += (
        f'`python -m benchmarks.quality`, greedy decoding, split "{found["held"]}", 95 % intervals in brackets. Calls are held to their\n'
    )
    text += "schemas, but for text ReAct, which is decoded freely. BM25 over names and descriptions, the same with those of\n"
    text += "parameters, and the first tool are baselines that choose without a model.\n\n"
    text += "\n".join(part for part in (_requests(found), _episodes(found), _files(found), _speed(found)) if part)
    if short := missed(found):
        text += "\nWhat it falls short of:\n\n" + "".join(f"* {line}\n" for line in short)
    return text + "\n" + TAIL
