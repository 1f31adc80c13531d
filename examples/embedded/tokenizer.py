"""A byte-level BPE tokenizer trained on generated text, and the chat template, saved as a Hugging Face folder.

A word is cut the same way wherever it stands (in a name, behind a space, in quotes), so that comparing and copying words is
comparing and copying ids: spaces belong to runs of little words or stand alone, letters never join with marks or digits.
What JSON schemas and calls repeat around names is one piece each, so that a tool costs half the tokens; anything else falls back.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .packing import samples_of
from .world.dialogues import TOOLS_HEAD, TOOLS_TAIL, bundle

VOCAB = 4096
PAD, START, STOP = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
MARKS = ("<tools>", "</tools>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
LITTLE = """a about all also an and answer are as at be but by can could do does for from has have how if in instead is it its may me more
much must my need no not now of on one only or our please same says should such than that the their them then there they this to too up
use was we what when where which who will with you your"""
_RUN = "|".join(sorted(LITTLE.split(), key=len, reverse=True))
_TYPE = r'"type": "(?:string|integer|number|boolean)"'
SCAFFOLD = (
    r'\{"type": "function", "function": ',
    r'\{"name": "',  # the same before a tool's name in the catalog and in a call: what followed it there can follow it here
    r'", "arguments": \{"?',
    r'", "description": "',
    r'[.!]?", "parameters": \{"(?:type": "object", "properties": \{(?:"|\}, "required": \[\]\}\}\})|properties": \{"?)',
    rf'": \{{{_TYPE}(?:\}}, "|, "(?:enum": \[|description": )"|\}}\}}, "required": \[(?:"|\]\}}\}}\}}))?',
    r'": \{"(?:default": null, ")?title": "',
    rf'", {_TYPE}(?:\}}, "|\}}\}}, "required": \[")?',
    r'[.!]?"\}\}, "required": \["',
    r'\], "type": "object"\}+',
    r"\nAction(?: Input)?: ",
    r": (?:str|int|float|bool)(?: = None)?(?:, |\) -> str(?: - |\n)?)",
    r'> Tool Name: |\nTool Description: |\nTool Args: \{"properties": \{"?',
)
SPLIT = "|".join(
    (
        *SCAFFOLD,
        rf"(?: (?:{_RUN})(?= ))+ ",  # " of the ": little words with the spaces around them
        r"\p{Lu}?[\p{Ll}\p{Lo}\p{M}]+|\p{Lu}+(?!\p{Ll})|\p{L}",  # a word, or a part of a camelCase one
        r"\p{N}{1,2}",
        r" ?[^\s\p{L}\p{N}]+(?: [^\s\p{L}\p{N}]+)*",  # marks, also across single spaces: '": {"'
        r"\n+| +|\s",
    )
)

_HEAD, _TAIL = (text.replace("\n", "\\n") for text in (TOOLS_HEAD, TOOLS_TAIL))
# Appends only: what a conversation renders to is the beginning of what the longer conversation renders to. In training turns alternate,
# what is asked ends a request, and only the answer follows results. So system text after a user's message opens that user's turn, and what
# is said after results ends theirs. What is named "volatile" stands before the turn that it follows, in no turn: there the model least
# takes a clock for a value that is asked about.
TEMPLATE = f"""\
{{%- set told = messages | rejectattr('role', 'equalto', 'tool') | selectattr('name', 'equalto', 'volatile') | list %}}
{{%- set turn = namespace(start=0, at=-1, said=[]) %}}
{{%- for message in messages if told %}}
{{%- if message in told %}}{{%- set turn.at = turn.start %}}
{{%- else %}}
{{%- if message.role == 'user' or message.role == 'tool' and (turn.said | last).role != 'tool' %}}
{{%- set turn.start = turn.said | length %}}
{{%- endif %}}
{{%- set turn.said = turn.said + [message] %}}
{{%- endif %}}
{{%- endfor %}}
{{%- set messages = turn.said if told else messages %}}
{{%- set given = messages[0].content if messages[0].role == 'system' else '' %}}
{{%- if tools %}}
{{{{- '<|im_start|>system\\n' + (given + '\\n\\n' if given else '') + '{_HEAD}' }}}}
{{%- for tool in tools %}}{{{{- '\\n' }}}}{{{{- tool | tojson }}}}{{%- endfor %}}
{{{{- '{_TAIL}<|im_end|>\\n' }}}}
{{%- elif given %}}
{{{{- '<|im_start|>system\\n' + given + '<|im_end|>\\n' }}}}
{{%- endif %}}
{{%- for message in messages %}}
{{%- set before = messages[loop.index0 - 1] %}}
{{%- set behind = messages[loop.index0 + 1] %}}
{{%- if loop.index0 == turn.at %}}{{%- for one in told %}}{{{{- one.content + '<|im_end|>\\n' }}}}{{%- endfor %}}{{%- endif %}}
{{%- if message.role == 'system' and loop.first %}}
{{%- elif message.role == 'assistant' %}}
{{{{- '<|im_start|>assistant\\n' }}}}
{{%- if message.reasoning_content %}}{{{{- '<think>\\n' + message.reasoning_content + '\\n</think>\\n\\n' }}}}{{%- endif %}}
{{{{- message.content or '' }}}}
{{%- for call in message.tool_calls or [] %}}
{{%- if not loop.first or message.content %}}{{{{- '\\n' }}}}{{%- endif %}}
{{{{- '<tool_call>\\n{{"name": "' + call.function.name + '", "arguments": ' }}}}
{{{{- call.function.arguments if call.function.arguments is string else call.function.arguments | tojson }}}}
{{{{- '}}\\n</tool_call>' }}}}
{{%- endfor %}}
{{{{- '<|im_end|>\\n' }}}}
{{%- elif message.role == 'tool' %}}
{{%- if loop.first or before.role != 'tool' %}}{{{{- '<|im_start|>user' }}}}{{%- endif %}}
{{{{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}}}
{{%- if loop.last or behind.role not in ('tool', 'user', 'system') %}}{{{{- '<|im_end|>\\n' }}}}{{%- endif %}}
{{%- elif message.role == 'system' and before.role == 'user' %}}
{{%- else %}}
{{{{- '\\n' if not loop.first and before.role == 'tool' else '<|im_start|>' + message.role + '\\n' }}}}
{{%- if not loop.last and message.role == 'user' and behind.role == 'system' %}}{{{{- behind.content + '\\n\\n' }}}}{{%- endif %}}
{{{{- message.content + '<|im_end|>\\n' }}}}
{{%- endif %}}
{{%- endfor %}}
{{%- if add_generation_prompt %}}{{{{- '<|im_start|>assistant\\n' }}}}{{%- endif %}}
"""


def texts(count: int, seed: str) -> Iterator[str]:
    """Generated text of every style, for counting pairs."""
    for number in range(count):
        style = ("hermes", "hermes", "hermes", "langchain", "llamaindex")[number % 5]
        for sample in samples_of(bundle(f"{seed} {number}", style, 3 + number % 9, 6)):
            yield "".join(piece.text for piece in sample.pieces[:1]) if sample.dialogue == 0 else ""
            yield "".join(piece.text for piece in sample.pieces[1:])


def train(vocab: int = VOCAB, count: int = 3000, seed: str = "tokenizer") -> Any:
    """The tokenizer, as transformers loads it."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(SPLIT), behavior="isolated")
    backend.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    special = [PAD, START, STOP, *MARKS]
    trainer = trainers.BpeTrainer(vocab_size=vocab, special_tokens=special, initial_alphabet=alphabet, show_progress=False)
    backend.train_from_iterator(texts(count, seed), trainer)
    made = PreTrainedTokenizerFast(
        tokenizer_object=_unspecial(backend),
        eos_token=STOP,
        pad_token=PAD,
        additional_special_tokens=[START],
        clean_up_tokenization_spaces=False,
    )
    return _with_template(made)


def _with_template(made: Any) -> Any:
    """The tokenizer with the template as it is now, and its word to `Renderer`: the name of messages with volatile text."""
    made.chat_template = TEMPLATE
    made.init_kwargs["volatile_ahead"] = "volatile"
    return made


def _unspecial(backend: Any) -> Any:
    """The marks stay single tokens but are ordinary text: decoding keeps them, as Qwen's does."""
    from tokenizers import Tokenizer

    state = json.loads(backend.to_str())
    for added in state["added_tokens"]:
        added["special"] = added["content"] not in MARKS
    return Tokenizer.from_str(json.dumps(state))


def load(folder: Path) -> Any:
    """The tokenizer in a folder, trained and saved there first if need be, with the template as it is now."""
    from transformers import AutoTokenizer

    if not (folder / "tokenizer.json").exists():
        folder.mkdir(parents=True, exist_ok=True)
        train().save_pretrained(folder)
    return _with_template(AutoTokenizer.from_pretrained(folder))
