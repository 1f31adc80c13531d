"""The same dialogues as text ReAct, in the exact prompts that LangChain's and LlamaIndex's agents send. Knows no tokens.

    langchain        create_react_agent / ZeroShotAgent behind a chat model: the whole prompt is one user message
    langchain text   the same behind a completion model: the bare text
    llamaindex       ReActAgent: tools in the system message, steps as messages, actions shown again as Python prints them

The prompts below are those frameworks' interface, quoted so that the model meets in training what it is sent in use
(langchain-classic 1.0.8, agents/mrkl/prompt.py and the prompt in agents/react/agent.py; llama-index-core 0.14.25,
agent/react/templates/system_header_template.md; both MIT). No code of theirs is used.
"""

from __future__ import annotations

import json

from .asking import Turn
from .dialogues import END, Bundle, Piece, Sample, kind_of, start
from .world import World

LANGCHAIN = """Answer the following questions as best you can. You have access to the following tools:

{tools}

Use the following format:

Question: the input question you must answer
Thought: you should always think about what to do
Action: the action to take, should be one of [{names}]
Action Input: the input to the action
Observation: the result of the action
... (this Thought/Action/Action Input/Observation can repeat N times)
Thought: I now know the final answer
Final Answer: the final answer to the original input question

Begin!

Question: """

LLAMAINDEX = """You are designed to help with a variety of tasks, from answering questions to providing summaries to other types of analyses.

## Tools

You have access to a wide variety of tools. You are responsible for using the tools in any sequence you deem appropriate to complete the task at hand.
This may require breaking the task into subtasks and using different tools to complete each subtask.

You have access to the following tools:
{tools}
{context}

## Output Format

Please answer in the same language as the question and use the following format:

```
Thought: The current language of the user is: (user's language). I need to use a tool to help me answer the question.
Action: tool name (one of {names}) if using a tool.
Action Input: the input to the tool, in a JSON format representing the kwargs (e.g. {{"input": "hello world", "num_beams": 5}})
```

Please ALWAYS start with a Thought.

NEVER surround your response with markdown code markers. You may use code markers within your response if you need to.

Please use a valid JSON format for the Action Input. Do NOT do this {{'input': 'hello world', 'num_beams': 5}}. If you include the "Action:" line, then you MUST include the "Action Input:" line too, even if the tool does not need kwargs, in that case you MUST use "Action Input: {{}}".

If this format is used, the tool will respond in the following format:

```
Observation: tool response
```

You should keep repeating the above format till you have enough information to answer the question without using any more tools. At that point, you MUST respond in one of the following two formats:

```
Thought: I can answer without using any more tools. I'll use the user's language to answer
Answer: [your answer here (In the same language as the user's question)]
```

```
Thought: I cannot answer the question with the provided tools.
Answer: [your answer here (In the same language as the user's question)]
```

## Current Conversation

Below is the current conversation consisting of interleaving human and assistant messages.
"""  # noqa: E501
CONTEXT = "\nHere is some context to help you answer the question and plan:\n{context}\n"
KNOWN = {"langchain": "I now know the final answer", "llamaindex": "I can answer without using any more tools."}
UNKNOWN = "I cannot answer the question with the provided tools."


def _names(made: Bundle) -> str:
    return ", ".join(tool.name for tool in made.tools)


def _plain_input(turn: Turn) -> str:
    """LangChain's action input: the bare value where the tool takes one argument, JSON otherwise."""
    tool, args = turn.tool, dict(turn.args)
    assert tool is not None
    if len(tool.params) == 1 and len(args) == 1:
        value = next(iter(args.values()))
        return value if isinstance(value, str) else json.dumps(value)
    return json.dumps(args, ensure_ascii=False)


def _thought(turn: Turn, style: str) -> str:
    if turn.tool is not None:
        return turn.thought
    return f"{turn.thought} {UNKNOWN}" if kind_of(turn) == "refusal" else KNOWN[style]


def langchain_prefix(made: Bundle, with_args: bool = False) -> str:
    """Everything up to the question. Rules stand before LangChain's own text: its agents have no system prompt of their own."""
    lines = []
    for tool in made.tools:
        line = f"{tool.name}{tool.signature()} - {tool.description}"
        lines.append(f"{line}, args: {tool.parameters('titled')['properties']}" if with_args else line)
    head = f"{made.system}\n\n" if made.system else ""
    return head + LANGCHAIN.format(tools="\n".join(lines), names=_names(made))


def langchain(made: Bundle) -> list[Sample]:
    """One sample per step: the scratchpad repeats what was said, behind another line than the model's own turn."""
    chat = made.style == "langchain"
    world = World(repr(made.tools[0]))
    prefix = langchain_prefix(made, with_args=world.chance(0.15))
    opening = start("user") if chat else ""
    closing = f"{END}\n{start('assistant')}" if chat else ""
    out = []
    for number, talk in enumerate(made.dialogues):
        text = f"{talk.turns[0].text}\nThought:"
        for turn in talk.turns[1:]:
            if turn.role == "tool":
                text += f"\nObservation: {turn.text}\nThought: "
                continue
            said, pick = _langchain_step(turn)
            space = " " if not chat and not text.endswith(" ") else ""
            piece = Piece(f"{space}{said}{END}", kind_of(turn), pick + len(space))
            out.append(Sample((Piece(opening + prefix), Piece(text + closing), piece), number))
            text += space + said
    return out


def _langchain_step(turn: Turn) -> tuple[str, int]:
    """What the model says in one step, and how many characters of it decide between tools."""
    thought = _thought(turn, "langchain")
    if turn.tool is None:
        head = f"{thought}\nFinal Answer:"
        return f"{head} {turn.text}", len(head)
    head = f"{thought}\nAction: {turn.tool.name}"
    return f"{head}\nAction Input: {_plain_input(turn)}", len(head)


def llamaindex_system(made: Bundle, signatures: bool = True) -> str:
    """ReActAgent's system message; the rules are its context."""
    blocks = []
    for tool in made.tools:
        described = f"{tool.name}{tool.signature()}\n{tool.description}" if signatures else tool.description
        args = json.dumps(tool.parameters("titled"), ensure_ascii=False)
        blocks.append(f"> Tool Name: {tool.name}\nTool Description: {described}\nTool Args: {args}\n")
    context = CONTEXT.format(context=made.system) if made.system else ""
    return LLAMAINDEX.format(tools="\n".join(blocks), context=context, names=_names(made))


def _llamaindex_step(turn: Turn, again: bool) -> tuple[str, int]:
    """What the model says in one step; `again`: as the framework shows it afterwards, with Python's dict."""
    thought = _thought(turn, "llamaindex")
    if turn.tool is None:
        head = f"Thought: {thought}\nAnswer:"
        return f"{head} {turn.text}", len(head)
    head = f"Thought: {thought}\nAction: {turn.tool.name}"
    args = dict(turn.args)
    return f"{head}\nAction Input: {args if again else json.dumps(args, ensure_ascii=False)}", len(head)


def llamaindex(made: Bundle) -> list[Sample]:
    """One sample per step. A finished turn's steps become one assistant message."""
    world = World(repr(made.tools[0]))
    system = Piece(f"{start('system')}{llamaindex_system(made, world.chance(0.6))}{END}\n")
    out = []
    for number, talk in enumerate(made.dialogues):
        past, steps = "", ""
        reasoning: list[str] = []
        for turn in talk.turns:
            if turn.role == "user":
                joined = "\n".join(reasoning)
                past += f"{start('assistant')}{joined}{END}\n" if reasoning else ""
                past += f"{start('user')}{turn.text}{END}\n"
                steps, reasoning = "", []
            elif turn.role == "tool":
                steps += f"{start('user')}Observation: {turn.text}{END}\n"
                reasoning.append(f"Observation: {turn.text}")
            else:
                said, pick = _llamaindex_step(turn, again=False)
                out.append(Sample((system, Piece(past + steps + start("assistant")), Piece(said + END, kind_of(turn), pick)), number))
                shown = _llamaindex_step(turn, again=True)[0]
                steps += f"{start('assistant')}{shown}{END}\n"
                reasoning.append(shown)
    return out
