"""Grammars of toy tokenizers in each family's form, and completions under them: spelled, or drawn blindly. Holds no tests."""

from __future__ import annotations

from typing import Any

import torch

from agentcache import Constraint, Tool
from agentcache.answer.grammar import Grammars
from agentcache.layout import Renderer
from tests import models

LLAMA = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.tool_calls %}{% for c in m.tool_calls %}"
    '{{ \'{"name": "\' + c.function.name + \'", "parameters": \' }}{{ c.function.arguments | tojson }}{{ "}" }}{% endfor %}'
    "{% else %}{{ m.content }}{% endif %}<|im_end|>\n{% if loop.first and tools %}{{ tools | tojson }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MISTRAL = (
    "{% for m in messages %}{% if m.tool_calls %}[TOOL_CALLS] [{% for c in m.tool_calls %}{{ (c.function | tojson)[:-1] }}"
    ', "id": "{{ c.id }}"}{% if not loop.last %}, {% endif %}{% endfor %}]<|im_end|>{% elif m.role == "user" %}'
    "{% if tools %}[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}[INST]{{ m.content }}[/INST]"
    "{% else %}{{ m.content }}<|im_end|>{% endif %}{% endfor %}"
)
OTHER = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}{% for c in m.tool_calls or [] %}CALL {{ c.function.name }}{% endfor %}\n"
    "{% endfor %}{% for t in tools or [] %}{{ t.function.name }}{% endfor %}"
)
FAMILIES = {"hermes": None, "llama": LLAMA, "mistral": MISTRAL, "other": OTHER}
CITY = {"type": "object", "properties": {"city": {"type": "string", "maxLength": 6}, "days": {"enum": [1, 2]}}, "required": ["city"]}
TOOLS = [Tool("get_weather", "", CITY), Tool("ping")]


def grammars(family: str = "hermes", thinking: bool = False) -> Grammars:
    tokenizer = models.toy_tokenizer()
    if FAMILIES[family]:
        tokenizer.chat_template = FAMILIES[family]
    if thinking:
        tokenizer.chat_template += "{# <think> #}"
    return grammars_of(tokenizer)


def grammars_of(tokenizer: Any, vocab: int = models.VOCAB) -> Grammars:
    return Grammars(tokenizer, vocab, frozenset({tokenizer.eos_token_id}), Renderer(tokenizer).render)


def spelled(made: Grammars, constraint: Constraint, text: str, tools: Any = TOOLS, prompt: str = "", thinks: bool = False) -> str:
    """ "end" if the text may end there, "more" if it may not yet, else what could be written of it."""
    guide, tokenizer = made.guide(constraint, tools, prompt, thinks=thinks), made.tokenizer
    written = ""
    for token in tokenizer(text, add_special_tokens=False)["input_ids"]:
        masked = guide.mask(torch.zeros(models.VOCAB))
        if masked is None or masked[token] != 0:
            return written
        assert guide.accept(token) == ""
        written += tokenizer.decode([token])
    masked = guide.mask(torch.zeros(models.VOCAB))
    return "end" if guide.over or masked is None or masked[tokenizer.eos_token_id] == 0 else "more"


def drawn_blindly(made: Grammars, constraint: Constraint, seed: int, tools: Any = TOOLS, prompt: str = "", longest: int = 400) -> str:
    """A completion of tokens drawn blindly from those that are allowed; "" if it did not end."""
    guide, ids = made.guide(constraint, tools, prompt), []
    generator = torch.Generator().manual_seed(seed)
    while len(ids) < longest and (masked := guide.mask(torch.zeros(models.VOCAB))) is not None:
        token = int(torch.multinomial(torch.softmax(masked, -1), 1, generator=generator))
        assert guide.accept(token) == ""
        if token == made.tokenizer.eos_token_id:
            return str(made.tokenizer.decode(ids))
        ids.append(token)
        if guide.over:
            return str(made.tokenizer.decode(ids))
    return ""
