"""Rows of the families whose arguments are a JSON object. Knows no tokens.

Groups of a pattern are literal text of the form that differs from template to template.
"""

from __future__ import annotations

from dataclasses import replace

from .call_forms import CALL, CALL_AFTER_SPACE, MARKS, NAMED, PLAIN, PROBE_TOOL, VALUE, WITH_NAME, CallForm, sectioned, spelled

LISTED = CallForm("[TOOL_CALLS]", open="[", before='{"name": "', after="}", joint=", ", close="]")
_PYTHON_MARK = r"<\|python_(?:tag|start|end)\|>(?:\s*<\|python_end\|>)?\s*(?=\{)"
_PYTHON = {"open_pattern": _PYTHON_MARK, "close_pattern": r"<\|python_end\|>|\Z", **WITH_NAME}
BARE = CallForm("", joint=None, fields={**PLAIN, "tool_calls_python_mark": _PYTHON})

ROWS: tuple[tuple[str, CallForm], ...] = (
    # Apriel
    (
        rf"\[BEGIN FINAL RESPONSE\](?:.|\n)*<tool_calls>\s*\[\s*{CALL}",
        replace(LISTED, trigger="<tool_calls>", close="]</tool_calls>", thought=("Here are my reasoning steps:", "[BEGIN FINAL RESPONSE]")),
    ),
    # Mistral up to its tokenizer v7, Nemotron Nano 2, LFM2, Phi-4-mini, Granite 3, Jamba
    (
        rf"(?P<trigger>\[TOOL_CALLS\]|<TOOLCALL>|<tool_calls>|<\|tool_call_start\|>|<\|tool_call\|>)(?P<open>\s*\[\s*){CALL}[^\]]*"
        r"(?P<close>\](?:</TOOLCALL>|</tool_calls>|<\|tool_call_end\|>|<\|/tool_call\|>)?)",
        LISTED,
    ),
    # Ministral 3, Devstral, Magistral: Mistral from v11
    (
        rf"\[TOOL_CALLS\]{PROBE_TOOL}(?:\[CALL_ID\]\w+)?\[ARGS\]{VALUE}",
        CallForm(
            "[TOOL_CALLS]",
            **spelled("NAME[ARGS]ARGUMENTS"),
            joint="[TOOL_CALLS]",
            thought=("[THINK]", "[/THINK]"),
            fields={"tool_calls": {**NAMED, "open_pattern": r"\[TOOL_CALLS\](?P<name>[\w.-]+)(?:\[CALL_ID\]\w+)?(?:\[ARGS\])?(?=\{)"}},
        ),
    ),
    # gpt-oss: written as the model writes calls, which is not how its template shows them
    (
        rf"to=functions\.{PROBE_TOOL}<\|channel\|>commentary[^<]*(?:<\|constrain\|>)?\w*<\|message\|>{VALUE}",
        CallForm(
            "<|channel|>commentary to=functions.",
            **spelled("NAME <|constrain|>json<|message|>ARGUMENTS"),
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
    # DeepSeek V3 and R1
    (
        rf"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{PROBE_TOOL}\s*```json\s*{VALUE}\s*```\s*<｜tool▁call▁end｜>",
        sectioned(
            "<｜tool▁calls▁begin｜>",
            "<｜tool▁calls▁end｜>",
            {
                **NAMED,
                "open_pattern": r"<｜tool▁call▁begin｜>function<｜tool▁sep｜>(?P<name>[^\s<｜]+)\s*```json",
                "close_pattern": r"```\s*<｜tool▁call▁end｜>",
            },
            **spelled("<｜tool▁call▁begin｜>function<｜tool▁sep｜>NAME\n```json\nARGUMENTS\n```<｜tool▁call▁end｜>"),
            joint="\n",
        ),
    ),
    # DeepSeek V3.1
    (
        rf"<｜tool▁call▁begin｜>{PROBE_TOOL}<｜tool▁sep｜>{VALUE}<｜tool▁call▁end｜>",
        sectioned(
            "<｜tool▁calls▁begin｜>",
            "<｜tool▁calls▁end｜>",
            {**NAMED, "open_pattern": r"<｜tool▁call▁begin｜>(?P<name>[^\s<｜]+)<｜tool▁sep｜>", "close": "<｜tool▁call▁end｜>"},
            **spelled("<｜tool▁call▁begin｜>NAME<｜tool▁sep｜>ARGUMENTS<｜tool▁call▁end｜>"),
            joint="",
        ),
    ),
    # Kimi K2: its template shows a call's id where the model writes functions.NAME:NUMBER
    (
        rf"<\|tool_call_begin\|>[^<]*<\|tool_call_argument_begin\|>{VALUE}<\|tool_call_end\|>",
        sectioned(
            "<|tool_calls_section_begin|>",
            "<|tool_calls_section_end|>",
            {
                **NAMED,
                "open_pattern": r"<\|tool_call_begin\|>\s*(?:functions\.)?(?P<name>[^\s:<]+)(?::\d+)?\s*<\|tool_call_argument_begin\|>",
                "close": "<|tool_call_end|>",
            },
            **spelled("<|tool_call_begin|>functions.NAME:0<|tool_call_argument_begin|>ARGUMENTS<|tool_call_end|>"),
            joint=None,
        ),
    ),
    # Command R7B, Command A
    (
        rf'<\|START_ACTION\|>(?P<open>\s*\[\s*)(?P<before>\{{[^{{}}]*"tool_name"\s*:\s*"){PROBE_TOOL}(?P<between>"\s*,\s*"parameters"\s*:\s*)'
        rf"{VALUE}(?P<after>\s*\}})(?P<close>\s*\]<\|END_ACTION\|>)",
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
    # Apertus
    (
        rf'<\|tools_prefix\|>(?P<open>\s*\[\s*)(?P<before>\{{\s*"){PROBE_TOOL}(?P<between>"\s*:\s*){VALUE}(?P<after>\s*\}})'
        r"(?P<close>\s*\]\s*<\|tools_suffix\|>)",
        CallForm(
            "<|tools_prefix|>",
            joint=", ",
            thought=("<|inner_prefix|>", "<|inner_suffix|>"),
            fields={
                "tool_calls": {
                    **NAMED,
                    "open_pattern": r"(?:<\|tools_prefix\|>\s*\[|(?<=<\|tools_prefix\|>(?:(?!<\|tools_suffix\|>).)*\})\s*,)"
                    r'\s*\{\s*"(?P<name>[^"]+)"\s*:\s*(?=\{)',
                    "close": "}",
                },
                MARKS: {"open_pattern": r"\]\s*<\|tools_suffix\|>"},
            },
        ),
    ),
    # Functionary 3.1, and Llama 3 where its prompt asks for tools of one's own
    (
        rf"<function={PROBE_TOOL}>{VALUE}</function>",
        CallForm(
            "<function=",
            **spelled("NAME>ARGUMENTS</function>"),
            joint="<function=",
            fields={"tool_calls": {**NAMED, "open_pattern": r"<function=(?P<name>[^>\s]+)>(?=\s*\{)", "close": "</function>"}},
        ),
    ),
    # Solar Open
    (
        rf"<\|tool_call:begin\|>[^<]*<\|tool_call:name\|>{PROBE_TOOL}<\|tool_call:args\|>{VALUE}<\|tool_call:end\|>",
        sectioned(
            "<|tool_calls|>",
            "<|calls|>",
            {
                **NAMED,
                "open_pattern": r"<\|tool_call:begin\|>[^<]*<\|tool_call:name\|>(?P<name>[^<]+)<\|tool_call:args\|>",
                "close": "<|tool_call:end|>",
            },
            {"content": {"open": "<|content|>", "close": "<|end|>"}},
            **spelled("<|tool_call:begin|>0<|tool_call:name|>NAME<|tool_call:args|>ARGUMENTS<|tool_call:end|>"),
            joint=None,
            thought=("<|think|>", "<|end|><|begin|>assistant"),
            answer=("<|content|>", ""),
        ),
    ),
)
# The same of the assistant's turn alone, from its first character on.
TURNS: tuple[tuple[str, CallForm], ...] = (
    # Llama 3 and 4
    (rf"\s*(?:<\|python_start\|>[^<]*<\|python_end\|>)?{CALL}(?P<after>\s*\}})", BARE),
    # xLAM
    (rf"\s*(?P<open>\[\s*){CALL}(?P<after>\s*\}})(?P<close>\s*\])", replace(BARE, joint=", ")),
    # InternLM, GigaChat, and others whose calls in JSON stand after a mark
    (rf"\s*(?P<trigger>[<\[][^{{}}]*[>\]]){CALL_AFTER_SPACE}(?P<after>\s*\}})(?P<close>(?:\s*<[^<>]+>(?=\s*<))?)", CallForm(joint=None)),
)
