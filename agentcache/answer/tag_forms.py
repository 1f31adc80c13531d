"""Rows of the families whose arguments stand each by itself, between tags or commas. Knows no tokens."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

from .call_forms import FIRST, MARKS, NAMED, PROBE_TOOL, PYTHON_CALLS, CallForm, Fields, sectioned, spelled, tagged_call


def _functions(mark: str, gap: str, **more: Any) -> CallForm:
    """Calls between tags of this name, their arguments between <parameter> tags. gap: a line break where values have lines of their own."""
    skip = r"\n?" if gap else ""
    name, end = rf"<{mark}>\s*<function=(?P<name>[^>\n]+)>", rf"</function>\s*</{mark}>"
    argument = rf"<parameter=(?P<key>[^>\n]+)>{skip}(?P<value>.*?){skip}</parameter>"
    return CallForm(
        f"<{mark}>",
        **spelled(f"\n<function=NAME>\nARGUMENTS</function>\n</{mark}>"),
        joint=f"\n<{mark}>",
        argument=("<parameter=", f">{gap}", f"{gap}</parameter>\n"),
        fields={"tool_calls": tagged_call(name, end, argument)},
        **more,
    )


def _delimited(opened: str, closed: str, quote: str, *, fields: Fields | None = None, **more: Any) -> CallForm:
    """Calls whose arguments are an object with bare keys, and with texts between two of these quotes."""
    calls = {
        **NAMED,
        "open_pattern": re.escape(opened) + r"call:(?P<name>[\w.-]+)(?=\{)",
        "close": closed,
        "content_args": {"string_delims": [[quote, quote]], "unquoted_keys": True},
    }
    return CallForm(
        opened,
        **spelled(f"call:NAME{{ARGUMENTS}}{closed}"),
        joint=opened,
        argument=("", ":", ""),
        comma=",",
        quotes=(quote, quote),
        fields={**(fields or {}), "tool_calls": calls},
        **more,
    )


TAGS = _functions("tool_call", "\n")
PYTHON = CallForm(
    "<|tool_call_start|>",
    open="[",
    **spelled("NAME(ARGUMENTS)"),
    joint=", ",
    close="]<|tool_call_end|>",
    argument=("", "=", ""),
    comma=", ",
)
_LISTED = {PYTHON_CALLS: {"open_pattern": FIRST + r"(?=\[\s*[\w.-]+\()", "close_pattern": r"\s*\Z"}}

ROWS: tuple[tuple[str, CallForm], ...] = (
    # Qwen3-Coder, Qwen3.5, Nemotron 3
    (rf"<tool_call>\s*<function={PROBE_TOOL}>\s*<parameter=zarg>\s*zval\s*</parameter>\s*</function>\s*</tool_call>", TAGS),
    # Seed-OSS
    (
        rf"<seed:tool_call>\s*<function={PROBE_TOOL}>\s*<parameter=zarg>zval</parameter>\s*</function>\s*</seed:tool_call>",
        _functions("seed:tool_call", "", thought=("<seed:think>", "</seed:think>")),
    ),
    # GLM from 4.5 on
    (
        rf"<tool_call>{PROBE_TOOL}(?P<between>\s*)<arg_key>zarg</arg_key>\s*<arg_value>zval</arg_value>\s*</tool_call>",
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
        rf'<minimax:tool_call>\s*<invoke name="{PROBE_TOOL}">\s*<parameter name="zarg">zval</parameter>\s*</invoke>\s*</minimax:tool_call>',
        sectioned(
            "<minimax:tool_call>",
            "</minimax:tool_call>",
            tagged_call(r'<invoke name="(?P<name>[^"]+)">', "</invoke>", r'<parameter name="(?P<key>[^"]+)">(?P<value>.*?)</parameter>'),
            open="\n",
            **spelled('<invoke name="NAME">\nARGUMENTS</invoke>\n'),
            joint="",
            argument=('<parameter name="', '">', "</parameter>\n"),
        ),
    ),
    # DeepSeek V3.2 and V4
    (
        rf'(?P<trigger><｜DSML｜(?:function|tool)_calls>)(?P<open>\s*)<｜DSML｜invoke name="{PROBE_TOOL}">\s*<｜DSML｜parameter '
        r'name="zarg" string="true">zval</｜DSML｜parameter>\s*</｜DSML｜invoke>\s*(?P<close></｜DSML｜(?:function|tool)_calls>)',
        CallForm(
            **spelled('<｜DSML｜invoke name="NAME">\nARGUMENTS</｜DSML｜invoke>\n'),
            joint="",
            argument=('<｜DSML｜parameter name="', '" string="{is_text}">', "</｜DSML｜parameter>\n"),
            fields={
                "tool_calls": tagged_call(
                    r'(?:<｜DSML｜(?:function|tool)_calls>\s*)?<｜DSML｜invoke name="(?P<name>[^"]+)">',
                    "</｜DSML｜invoke>",
                    r'<｜DSML｜parameter name="(?P<key>[^"]+)"(?: string="\w+")?>(?P<value>.*?)</｜DSML｜parameter>',
                ),
                MARKS: {"open": ["</｜DSML｜function_calls>", "</｜DSML｜tool_calls>"]},
            },
        ),
    ),
    # Gemma 4
    (
        rf'<\|tool_call>call:{PROBE_TOOL}\{{zarg:<\|"\|>zval<\|"\|>\}}<tool_call\|>',
        _delimited(
            "<|tool_call>",
            "<tool_call|>",
            '<|"|>',
            thought=("<|channel>thought", "<channel|>"),
            fields={"reasoning_content": {"open": "<|channel>thought", "close": "<channel|>"}},
        ),
    ),
    # FunctionGemma
    (
        rf"<start_function_call>call:{PROBE_TOOL}\{{zarg:<escape>zval<escape>\}}<end_function_call>",
        _delimited("<start_function_call>", "<end_function_call>", "<escape>"),
    ),
    # LFM2 and LFM2.5, whose templates show calls as the message has them, or none
    (
        rf"<\|tool_call_start\|>\[{PROBE_TOOL}\(zarg=['\"]zval['\"]\)\]<\|tool_call_end\|>|<\|tool_list_start\|>",
        PYTHON,
    ),
    # MiniCPM 5
    (
        rf'<function name="{PROBE_TOOL}">\s*<param name="zarg">zval</param>\s*</function>',
        CallForm(
            "<function",
            **spelled(' name="NAME">ARGUMENTS</function>'),
            joint="\n<function",
            argument=('<param name="', '">', "</param>"),
            fields={
                "tool_calls": tagged_call(
                    r'<function name="(?P<name>[^"]+)">',
                    "</function>",
                    r'<param name="(?P<key>[^"]+)">(?:<!\[CDATA\[(?P<value>.*?)\]\]>|(?P<value>.*?))</param>',
                )
            },
        ),
    ),
    # Hunyuan 3
    (
        rf"<tool_calls:opensource>\s*<tool_call:opensource>{PROBE_TOOL}<tool_sep:opensource>\s*<arg_key:opensource>zarg</arg_key:opensource>",
        sectioned(
            "<tool_calls:opensource>",
            "</tool_calls:opensource>",
            tagged_call(
                r"<tool_call:opensource>(?P<name>[^<\s]+)<tool_sep:opensource>",
                "</tool_call:opensource>",
                r"<arg_key:opensource>(?P<key>.*?)</arg_key:opensource>\s*<arg_value:opensource>(?P<value>.*?)</arg_value:opensource>",
            ),
            open="\n",
            **spelled("<tool_call:opensource>NAME<tool_sep:opensource>\nARGUMENTS</tool_call:opensource>\n"),
            joint="",
            argument=("<arg_key:opensource>", "</arg_key:opensource>\n<arg_value:opensource>", "</arg_value:opensource>\n"),
            thought=("<think:opensource>", "</think:opensource>"),
        ),
    ),
    # Muse Glimmer: read, but not written, as its text has marks with the name of the reader
    (
        rf'to={PROBE_TOOL}<\|message\|><atem:function_calls>\s*<atem:invoke name="{PROBE_TOOL}">',
        CallForm(
            known=False,
            fields={
                "reasoning_content": {"open_pattern": r"\s*to=self<\|message\|>", "close": "<|eom|>"},
                "content": {"open_pattern": r"\s*to=user<\|message\|>", "close_pattern": r"<\|e[ou][mt]\|>"},
                "tool_calls": tagged_call(
                    r'\s*to=[^<\s]+<\|message\|>\s*<atem:function_calls>\s*<atem:invoke name="(?P<name>[^"]+)">',
                    r"</atem:invoke>\s*</atem:function_calls>",
                    r'<atem:parameter name="(?P<key>[^"]+)">(?P<value>.*?)</atem:parameter>',
                ),
            },
        ),
    ),
)
# The same of the assistant's turn alone, from its first character on.
TURNS: tuple[tuple[str, CallForm], ...] = (
    # ToolACE, and Llama 3.2 and 4 with a template for calls in Python
    (rf"\s*\[{PROBE_TOOL}\(zarg=", replace(PYTHON, trigger="", close="]", fields=_LISTED)),
)
