"""The forms of model families, a row each, and which of them a chat template shows. Knows no tokens.

A row is a pattern of the text in which chat templates of the family show a probe call, and its form. Groups of the pattern are literal
text of the form that differs from template to template.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

from .call_forms import MARKS, NAMED, CallForm, tagged_call

PROBE_TOOL, PROBE_ARGUMENTS = "zprobe_fn", {"zarg": "zval"}
_TOOL, _VALUE = PROBE_TOOL, r'\{\s*"zarg"\s*:\s*"zval"\s*\}'
_CALL = rf'(?P<before>\{{\s*"name"\s*:\s*"){_TOOL}(?P<between>"\s*,\s*"(?:arguments|parameters)"\s*:\s*){_VALUE}'
_CALL_AFTER_SPACE = _CALL.replace("(?P<before>", r"(?P<before>\s*")

HERMES = CallForm()


def _functions(mark: str, gap: str, **more: Any) -> CallForm:
    """Calls between tags of this name, their arguments between <parameter> tags. gap: a line break where values have lines of their own."""
    skip = r"\n?" if gap else ""
    name, end = rf"<{mark}>\s*<function=(?P<name>[^>\n]+)>", rf"</function>\s*</{mark}>"
    argument = rf"<parameter=(?P<key>[^>\n]+)>{skip}(?P<value>.*?){skip}</parameter>"
    return CallForm(
        f"<{mark}>",
        before="\n<function=",
        between=">\n",
        after=f"</function>\n</{mark}>",
        joint=f"\n<{mark}>",
        argument=("<parameter=", f">{gap}", f"{gap}</parameter>\n"),
        fields={"tool_calls": tagged_call(name, end, argument)},
        **more,
    )


TAGS = _functions("tool_call", "\n")

ROWS: tuple[tuple[str, CallForm], ...] = (
    # Qwen3-Coder, Qwen3.5, Nemotron 3
    (rf"<tool_call>\s*<function={_TOOL}>\s*<parameter=zarg>\s*zval\s*</parameter>\s*</function>\s*</tool_call>", TAGS),
    # Qwen 2.5 and 3, Hermes, Granite 4, EXAONE 4 and many more
    (rf"<tool_call>{_CALL_AFTER_SPACE}(?P<after>\s*\}}\s*</tool_call>)", HERMES),
    # Mistral up to its tokenizer v7, Nemotron Nano 2, LFM2, Phi-4-mini, Granite 3, Jamba
    (
        rf"(?P<trigger>\[TOOL_CALLS\]|<TOOLCALL>|<tool_calls>|<\|tool_call_start\|>|<\|tool_call\|>)(?P<open>\s*\[\s*){_CALL}[^\]]*"
        r"(?P<close>\](?:</TOOLCALL>|</tool_calls>|<\|tool_call_end\|>|<\|/tool_call\|>)?)",
        CallForm("[TOOL_CALLS]", after="}", joint=", "),
    ),
    # Ministral 3, Devstral, Magistral: Mistral from v11
    (
        rf"\[TOOL_CALLS\]{_TOOL}(?:\[CALL_ID\]\w+)?\[ARGS\]{_VALUE}",
        CallForm(
            "[TOOL_CALLS]",
            before="",
            between="[ARGS]",
            after="",
            joint="[TOOL_CALLS]",
            thought=("[THINK]", "[/THINK]"),
            fields={"tool_calls": {**NAMED, "open_pattern": r"\[TOOL_CALLS\](?P<name>[\w.-]+)(?:\[CALL_ID\]\w+)?(?:\[ARGS\])?(?=\{)"}},
        ),
    ),
    # Seed-OSS
    (
        rf"<seed:tool_call>\s*<function={_TOOL}>\s*<parameter=zarg>zval</parameter>\s*</function>\s*</seed:tool_call>",
        _functions("seed:tool_call", "", thought=("<seed:think>", "</seed:think>")),
    ),
    # GLM from 4.5 on
    (
        rf"<tool_call>{_TOOL}(?P<between>\s*)<arg_key>zarg</arg_key>\s*<arg_value>zval</arg_value>\s*</tool_call>",
        CallForm(
            before="",
            after="</tool_call>",
            argument=("<arg_key>", "</arg_key>\n<arg_value>", "</arg_value>\n"),
            fields={
                "tool_calls": tagged_call(
                    r"<tool_call>\s*(?P<name>[^\s<{]+)\s*(?=<arg_key>|</tool_call>)",
                    "</tool_call>",
                    r"<arg_key>\s*(?P<key>.*?)\s*</arg_key>\s*<arg_value>(?P<value>.*?)</arg_value>",
                )
            },
        ),
    ),
    # MiniMax M2
    (
        rf'<minimax:tool_call>\s*<invoke name="{_TOOL}">\s*<parameter name="zarg">zval</parameter>\s*</invoke>\s*</minimax:tool_call>',
        CallForm(
            "<minimax:tool_call>",
            open="\n",
            before='<invoke name="',
            between='">\n',
            after="</invoke>\n",
            joint="",
            close="</minimax:tool_call>",
            argument=('<parameter name="', '">', "</parameter>\n"),
            fields={
                "tool_calls": tagged_call(
                    r'(?:<minimax:tool_call>\s*)?<invoke name="(?P<name>[^"]+)">',
                    "</invoke>",
                    r'<parameter name="(?P<key>[^"]+)">(?P<value>.*?)</parameter>',
                ),
                MARKS: {"open": "</minimax:tool_call>"},
            },
        ),
    ),
    # gpt-oss: written as the model writes calls, which is not how its template shows them
    (
        rf"to=functions\.{_TOOL}<\|channel\|>commentary[^<]*(?:<\|constrain\|>)?\w*<\|message\|>{_VALUE}",
        CallForm(
            "<|channel|>commentary to=functions.",
            before="",
            between=" <|constrain|>json<|message|>",
            after="",
            joint=None,
            thought=("<|channel|>analysis<|message|>", "<|end|><|start|>assistant"),
            answer=("<|channel|>final<|message|>", ""),
            fields={
                "reasoning_content": {"open": "<|channel|>analysis<|message|>", "close": "<|end|>", "repeats": True, "join": "\n"},
                "content": {
                    "open_pattern": r"<\|channel\|>(?:final|commentary)(?: ?<\|constrain\|>\w+)?<\|message\|>",
                    "close_pattern": r"<\|(?:end|return)\|>",
                    "repeats": True,
                    "join": "\n",
                },
                "tool_calls": {
                    **NAMED,
                    "open_pattern": r"(?:<\|channel\|>commentary to=functions\.(?P<name>[\w.-]+)|\s*to=functions\.(?P<name>[\w.-]+)"
                    r"<\|channel\|>commentary)[^<{]*(?:<\|constrain\|>)?\w*<\|message\|>",
                    "close": "<|call|>",
                },
            },
        ),
    ),
    # DeepSeek V3.1
    (
        rf"<｜tool▁call▁begin｜>{_TOOL}<｜tool▁sep｜>{_VALUE}<｜tool▁call▁end｜>",
        CallForm(
            "<｜tool▁calls▁begin｜>",
            before="<｜tool▁call▁begin｜>",
            between="<｜tool▁sep｜>",
            after="<｜tool▁call▁end｜>",
            joint="",
            close="<｜tool▁calls▁end｜>",
            fields={
                "tool_calls": {
                    **NAMED,
                    "open_pattern": r"(?:<｜tool▁calls▁begin｜>\s*)?<｜tool▁call▁begin｜>(?P<name>[^\s<｜]+)<｜tool▁sep｜>",
                    "close": "<｜tool▁call▁end｜>",
                },
                MARKS: {"open": "<｜tool▁calls▁end｜>"},
            },
        ),
    ),
    # Kimi K2: its template shows a call's id where the model writes functions.NAME:NUMBER
    (
        rf"<\|tool_call_begin\|>[^<]*<\|tool_call_argument_begin\|>{_VALUE}<\|tool_call_end\|>",
        CallForm(
            "<|tool_calls_section_begin|>",
            before="<|tool_call_begin|>functions.",
            between=":0<|tool_call_argument_begin|>",
            after="<|tool_call_end|>",
            joint=None,
            close="<|tool_calls_section_end|>",
            fields={
                "tool_calls": {
                    **NAMED,
                    "open_pattern": r"(?:<\|tool_calls_section_begin\|>\s*)?<\|tool_call_begin\|>\s*(?:functions\.)?(?P<name>[^\s:<]+)"
                    r"(?::\d+)?\s*<\|tool_call_argument_begin\|>",
                    "close": "<|tool_call_end|>",
                },
                MARKS: {"open": "<|tool_calls_section_end|>"},
            },
        ),
    ),
    # Command R7B, Command A
    (
        rf'<\|START_ACTION\|>(?P<open>\s*\[\s*)(?P<before>\{{[^{{}}]*"tool_name"\s*:\s*"){_TOOL}(?P<between>"\s*,\s*"parameters"\s*:\s*)'
        rf"{_VALUE}(?P<after>\s*\}})(?P<close>\s*\]<\|END_ACTION\|>)",
        CallForm(
            "<|START_ACTION|>",
            joint=None,
            thought=("<|START_THINKING|>", "<|END_THINKING|>"),
            answer=("<|START_RESPONSE|>", "<|END_RESPONSE|>"),
            fields={
                "content": {"open": ["<|START_RESPONSE|>", "<|START_TEXT|>"], "close": ["<|END_RESPONSE|>", "<|END_TEXT|>"]},
                "tool_calls": {
                    "open": "<|START_ACTION|>",
                    "close": "<|END_ACTION|>",
                    "content": "json",
                    "transform_each": True,
                    "transform": {"type": "function", "function": {"name": "{tool_name}", "arguments": "{parameters}"}},
                },
            },
        ),
    ),
    # Gemma 4: read, but not written, as its arguments are neither JSON nor tags
    (
        rf'<\|tool_call>call:{_TOOL}\{{zarg:<\|"\|>zval<\|"\|>\}}<tool_call\|>',
        CallForm(
            known=False,
            fields={
                "reasoning_content": {"open": "<|channel>thought", "close": "<channel|>"},
                "tool_calls": {
                    **NAMED,
                    "open_pattern": r"<\|tool_call>call:(?P<name>[\w.-]+)(?=\{)",
                    "close": "<tool_call|>",
                    "content_args": {"string_delims": [['<|"|>', '<|"|>']], "unquoted_keys": True},
                },
            },
        ),
    ),
    # Llama 3
    (rf"{_CALL}(?P<after>\s*\}})", CallForm("", joint=None)),
)
THOUGHT_MARKS = frozenset(form.thought[0] for _, form in ROWS)


def form_of(shown: str) -> CallForm:
    """The form in which a chat template shows the probe call; Hermes' form, not known, where no row has it."""
    for pattern, form in ROWS:
        if found := re.search(pattern, shown):
            literals: dict[str, Any] = found.groupdict()
            return replace(form, **literals)
    return CallForm(known=False)
