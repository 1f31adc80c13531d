"""Small chat templates, one per shape that real families have, and tokenizers of several kinds, built in the test process."""

from __future__ import annotations

from functools import cache
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

# Tools in the system turn, results as user turns with tags (ChatML with Hermes calls).
CHATML = """
{%- set ns = namespace(first=true) %}
{%- if tools %}<|im_start|>system
{% if messages[0].role == 'system' %}{{ messages[0].content }}

{% endif %}# Tools
{%- for tool in tools %}
{{ tool | tojson }}
{%- endfor %}<|im_end|>
{% elif messages[0].role == 'system' %}<|im_start|>system
{{ messages[0].content }}<|im_end|>
{% endif %}
{%- for m in messages %}
{%- if m.role == 'system' and loop.first %}
{%- elif m.role in ['system', 'user'] %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}
{%- elif m.role == 'assistant' %}{{ '<|im_start|>assistant\n' + (m.content or '') }}
{%- for call in m.tool_calls or [] %}{{ '\n<tool_call>\n{"name": "' + call.function.name + '", "arguments": ' }}
{{- call.function.arguments | tojson }}{{ '}\n</tool_call>' }}{% endfor %}{{ '<|im_end|>\n' }}
{%- elif m.role == 'tool' %}
{%- if loop.previtem.role != 'tool' %}{{ '<|im_start|>user' }}{% endif %}{{ '\n<tool_response>\n' + m.content + '\n</tool_response>' }}
{%- if loop.last or loop.nextitem.role != 'tool' %}{{ '<|im_end|>\n' }}{% endif %}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""

# Tools inside the first user turn; a date before everything.
FIRST_USER = """{{ bos_token }}
{%- if messages[0].role == 'system' %}{% set system = messages[0].content | trim %}{% set messages = messages[1:] %}
{%- else %}{% set system = '' %}{% endif %}
{{- '<|start|>system<|end|>\n\nToday: ' + (date_string or 'July') + '\n' + ('Environment: tools\n' if tools else '') + system + '<|eot|>' }}
{%- for m in messages %}
{%- if m.role == 'user' and loop.first and tools %}{{ '<|start|>user<|end|>\n\nYou may call:\n' }}
{%- for tool in tools %}{{ tool | tojson(indent=2) }}{{ '\n\n' }}{% endfor %}{{ m.content | trim }}{{ '<|eot|>' }}
{%- elif m.tool_calls %}{{ '<|start|>assistant<|end|>\n\n' }}
{%- for call in m.tool_calls %}{{ {'name': call.function.name, 'parameters': call.function.arguments} | tojson }}{% endfor %}{{ '<|eot|>' }}
{%- elif m.role == 'tool' %}{{ '<|start|>ipython<|end|>\n\n' + (m.content | tojson) + '<|eot|>' }}
{%- else %}{{ '<|start|>' + m.role + '<|end|>\n\n' + m.content | trim + '<|eot|>' }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start|>assistant<|end|>\n\n' }}{% endif %}"""

# Tools before the LAST user turn, call ids rendered (nine characters), strict alternation, system glued to the last user turn.
LAST_USER = """
{%- if messages[0].role == 'system' %}{% set system = messages[0].content %}{% set messages = messages[1:] %}{% endif %}
{%- set users = messages | selectattr('role', 'equalto', 'user') | list %}
{%- set ns = namespace(turn=0) %}
{%- for m in messages %}{% if m.role == 'user' or (m.role == 'assistant' and not m.tool_calls) %}
{%- if (m.role == 'user') != (ns.turn % 2 == 0) %}{{ raise_exception('roles must alternate user/assistant') }}{% endif %}
{%- set ns.turn = ns.turn + 1 %}{% endif %}{% endfor %}
{{- bos_token }}
{%- for m in messages %}
{%- if m.role == 'user' %}
{%- if tools and m == users[-1] %}{{ '[TOOLS] ' + (tools | tojson) + '[/TOOLS]' }}{% endif %}
{{- '[INST] ' }}{% if loop.last and system is defined %}{{ system + '\n\n' }}{% endif %}{{ m.content + '[/INST]' }}
{%- elif m.tool_calls %}{{ '[CALLS] [' }}{% for call in m.tool_calls %}
{%- if call.id | length != 9 %}{{ raise_exception('call ids must have 9 characters') }}{% endif %}
{{- (call.function | tojson)[:-1] + ', "id": "' + call.id + '"}' }}{{ ', ' if not loop.last else '' }}{% endfor %}{{ ']' + eos_token }}
{%- elif m.role == 'assistant' %}{{ ' ' + m.content + eos_token }}
{%- elif m.role == 'tool' %}{{ '[RESULTS] {"content": ' + (m.content | tojson) + ', "call_id": "' + m.tool_call_id + '"}[/RESULTS]' }}
{%- endif %}{% endfor %}"""

# No terminators: each turn ends where the next begins; the system text is dropped.
DROPS_SYSTEM = """[gMASK]
{%- if tools %}{{ '<|system|>\nTools: ' }}{% for tool in tools %}{{ tool.function.name + ' ' + tool.function.description + '\n' }}{% endfor %}{% endif %}
{%- for m in messages %}
{%- if m.role == 'user' %}{{ '<|user|>\n' + m.content }}
{%- elif m.role == 'assistant' %}{{ '<|assistant|>\n' + (m.content or '') }}
{%- for call in m.tool_calls or [] %}{{ '<|call|>' + call.function.name + '\n' }}
{%- for key, value in call.function.arguments.items() %}{{ key + '=' + value | string + '\n' }}{% endfor %}{% endfor %}
{%- elif m.role == 'tool' %}{{ '<|observation|>\n' + m.content }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"""

# Reasoning of earlier turns is dropped when a new user turn comes.
REASONING = """
{%- set ns = namespace(last=-1) %}
{%- for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}
{%- for m in messages %}{{ '<|im_start|>' + ('user' if m.role == 'tool' else m.role) + '\n' }}
{%- if loop.first and tools %}{% for tool in tools %}{{ tool | tojson }}{{ '\n' }}{% endfor %}{% endif %}
{%- if m.reasoning_content and loop.index0 > ns.last %}{{ '<think>\n' + m.reasoning_content + '\n</think>\n\n' }}{% endif %}
{{- m.content or '' }}
{%- for call in m.tool_calls or [] %}{{ '<tool_call>' + call.function | tojson + '</tool_call>' }}{% endfor %}{{ '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""

# Today's date by strftime_now, tools first, a system text is refused when it is not the first.
DATED = """{{ bos_token + '<|start|>system<|end|>' }}
{%- if tools %}{{ tools | tojson + '\n' }}{% endif %}{{ 'Date: ' + strftime_now('%Y-%m-%d') + '\n' }}
{%- for m in messages %}
{%- if m.role == 'system' %}{% if not loop.first %}{{ raise_exception('system must be first') }}{% endif %}{{ m.content + '<|eot|>' }}
{%- else %}{% if loop.first %}{{ '<|eot|>' }}{% endif %}{{ '<|start|>' + m.role + '<|end|>' + (m.content or '') }}
{%- for call in m.tool_calls or [] %}{{ ' to=' + call.function.name + ' ' + call.function.arguments | tojson }}{% endfor %}{{ '<|eot|>' }}
{%- endif %}{% endfor %}
{%- if add_generation_prompt %}{{ '<|start|>assistant<|end|>' }}{% endif %}"""

# Does not know tools at all.
NO_TOOLS = """{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + (m.content or '') + '<|im_end|>\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""

# Shows the parts of a content; of one that is a text, nothing (SmolVLM, LLaVA).
PARTS = """{% for m in messages %}{{ '<|im_start|>' + m.role + (':' if m.content[0].type == 'image' else ': ') }}
{%- for line in m.content %}{% if line.type == 'text' %}{{ line.text }}{% endif %}{% endfor %}{{ '<|im_end|>\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant:' }}{% endif %}"""

TOOL_TEMPLATES = {
    "chatml": CHATML,
    "first_user": FIRST_USER,
    "last_user": LAST_USER,
    "drops_system": DROPS_SYSTEM,
    "reasoning": REASONING,
    "dated": DATED,
}

SPECIAL = (
    "<s> </s> <|im_start|> <|im_end|> <|start|> <|end|> <|eot|> [INST] [/INST] [TOOLS] [/TOOLS] [CALLS] [RESULTS] [/RESULTS] "
    "[gMASK] <|system|> <|user|> <|assistant|> <|observation|>"
).split()
STRIPPING = [AddedToken("<|left|>", lstrip=True, special=True), AddedToken("<|right|>", rstrip=True, special=True)]
PLAIN_ADDED = [AddedToken("<think>", special=False, normalized=False), AddedToken("</think>", special=False, normalized=False)]

CORPUS = [
    'The tool returns a list of open orders, for example {"id": 12345, "total": 17.50}, and the user wants to cancel one.',
    "You are an agent. Call the functions below; answer briefly, in the language of the user: de, fr, pt-BR or 中文 if needed.",
    "def reset(password: str) -> None:\n    if not password:\n        raise ValueError('empty')\n\n\n    return store(password)\n",
    "aaaa aa aaaaaa  abab abba  bbbb\n\n\n\tbaab   aab ab ba b a",
    '{"type": "function", "function": {"name": "search", "description": "Find it", "parameters": {"type": "object"}}}',
    "naïve façade – “quotes” … 12:30, 2024-05-01 été 😀 🎉 weather tomorrow; tokens tokens re-tokenised tokenisation",
]
KINDS = ("byte_bpe", "metaspace_bpe", "bare_bpe", "unigram", "wordpiece")


@cache
def tokenizer(kind: str = "byte_bpe", template: str | None = None, bos: bool = False) -> Any:
    """A tokenizer with the special tokens of all templates above; cached, do not modify. `bos`: its own call adds <s>."""
    built = _trained(kind)
    built.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIAL])
    built.add_special_tokens(STRIPPING)
    built.add_tokens(PLAIN_ADDED)
    if bos:
        built.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", built.token_to_id("<s>"))])
    extra = {"unk_token": "<unk>"} if kind in ("metaspace_bpe", "unigram", "wordpiece") else {}
    fast = PreTrainedTokenizerFast(tokenizer_object=built, bos_token="<s>", eos_token="<|im_end|>", **extra)
    fast.chat_template = template
    return fast


def _trained(kind: str) -> Tokenizer:
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    if kind == "byte_bpe":
        built = Tokenizer(models.BPE())
        built.normalizer = normalizers.NFC()
        built.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        built.decoder = decoders.ByteLevel()
        trainer: Any = trainers.BpeTrainer(vocab_size=600, initial_alphabet=alphabet, show_progress=False)
    elif kind == "metaspace_bpe":
        built = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True))
        built.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
        built.decoder = decoders.Metaspace(prepend_scheme="first", split=False)
        trainer = trainers.BpeTrainer(vocab_size=600, special_tokens=["<unk>"], show_progress=False)
    elif kind == "bare_bpe":  # the older Llama form: a normaliser marks spaces and nothing splits the text
        built = Tokenizer(models.BPE(byte_fallback=True, fuse_unk=True))
        built.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        built.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.Strip(" ", 1, 0)])
        trainer = trainers.BpeTrainer(vocab_size=600, show_progress=False)
    elif kind == "unigram":
        built = Tokenizer(models.Unigram())
        built.normalizer = normalizers.NFKC()
        built.pre_tokenizer = pre_tokenizers.Metaspace()
        built.decoder = decoders.Metaspace()
        trainer = trainers.UnigramTrainer(vocab_size=300, special_tokens=["<unk>"], unk_token="<unk>", show_progress=False)
    else:
        built = Tokenizer(models.WordPiece(unk_token="<unk>"))
        built.normalizer = normalizers.BertNormalizer(lowercase=True)
        built.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
        trainer = trainers.WordPieceTrainer(vocab_size=400, special_tokens=["<unk>"], show_progress=False)
    built.train_from_iterator(CORPUS * 20, trainer)
    return built


def tool(name: str, description: str = "Does it.") -> dict[str, Any]:
    parameters = {"type": "object", "properties": {"query": {"type": "string"}}, "required": ["query"]}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


def call(name: str, arguments: Any, call_id: str = "abcdefghi") -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def episode(steps: int = 2, system: bool = True) -> list[dict[str, Any]]:
    """system, user, `steps` times call and result, answer, user."""
    messages: list[dict[str, Any]] = [{"role": "system", "content": "You book flights, politely."}] if system else []
    messages.append({"role": "user", "content": "Find me a flight to Lisbon"})
    for step in range(steps):
        call_id = f"id{step:07d}"
        messages.append({"role": "assistant", "content": "", "tool_calls": [call("search", {"query": f"flights {step}"}, call_id)]})
        messages.append({"role": "tool", "tool_call_id": call_id, "name": "search", "content": f'{{"flights": [{step}, "TP{step}"]}}'})
    messages.append({"role": "assistant", "content": "There is one at noon."})
    messages.append({"role": "user", "content": "Book it, please."})
    return messages
