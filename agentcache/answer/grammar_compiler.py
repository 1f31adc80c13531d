"""Completions held to a constraint: of the next tokens, only those that can still become what was asked for. Loaded with the first one.

llguidance (extra `constrain`) reads the grammar that grammar_rules.py writes and says which tokens may come next.
"""

from __future__ import annotations

import json
import re
import threading
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .. import extras
from ..errors import ConfigError, ToolSchemaError
from ..namespace_lru import Covering, NamespaceLRU
from ..types import Constraint, Tool
from .call_forms import CallForm
from .grammar_rules import Thinking, arguments_schema, grammar, unwritable
from .guide import Compiled, Guide
from .vocabulary import LONGEST, Vocabulary

PATTERNS = 8  # that allOf puts on one value
COMPILED = 64  # remembered grammars; making one takes some milliseconds, more with many tools


class GrammarCompiler:
    """Constraints compiled for one tokenizer and form of calls. Safe to use from many threads."""

    def __init__(self, tokenizer: Any, vocab: int, stop_ids: frozenset[int], form: CallForm) -> None:
        self.tokenizer, self.form = tokenizer, form
        self._vocab = vocab
        self._stop_ids = sorted(token for token in stop_ids if 0 <= token < vocab)
        self._lock = threading.Lock()
        self._tokens: tuple[Any, Vocabulary] | None = None
        self._compiled: NamespaceLRU[str, Compiled] = NamespaceLRU(COMPILED)

    def forget(self, deletion: Covering) -> None:
        """Forget the grammars, and tools in them, of namespaces of which something was deleted on purpose."""
        self._compiled.forget(deletion)

    def guide(
        self,
        constraint: Constraint,
        tools: Sequence[Tool | Mapping[str, Any]],
        prompt: str,
        namespace: str = "default",
        *,
        max_tokens: int | None = None,
        thinks: bool = False,
    ) -> Guide:
        """The guide of a new request after this prompt. Only what the same namespace has asked for is found compiled.

        max_tokens: None where any number will do. thinks: a thought was asked for. Raises ConfigError or ToolSchemaError if nothing could
        satisfy the constraint, or nothing of at most `max_tokens`.
        """
        library = extras.library("llguidance", "1.7", "constrain", "constraint=...")
        callable_tools = _callable(constraint, tools)
        formed = constraint.structured or constraint.calls
        thinking = self._thinking(prompt, thinks or not formed)
        key = self._made(constraint, callable_tools, thinking, library)
        found = self._compiled.get(namespace, key)
        if found is None:
            found = self._compile(key, constraint, callable_tools, library)
            self._compiled.put(namespace, key, found)
        if found.need > (LONGEST if max_tokens is None else min(max_tokens, LONGEST)):
            raise ConfigError(
                f"max_tokens={max_tokens!r}: the shortest answer of the prescribed form that was found has {found.need} tokens: raise it"
                if found.need <= LONGEST
                else f"max_tokens={max_tokens!r}: no answer of the prescribed form was found that ends; simplify the schema or the grammar"
            )
        with self._lock:
            return Guide(found, self._vocab, max_tokens, calls=constraint.calls, thinks=formed and thinking != "none")

    def _compile(self, grammar: str, constraint: Constraint, tools: Mapping[str, Mapping[str, Any]], library: Any) -> Compiled:
        self._check_patterns(constraint, tools)
        self._check_arguments(tools)
        tokenizer, vocabulary = self._tokens_of(library)
        patterns = dict.fromkeys(pattern for schema in (constraint.schema, *tools.values()) for pattern in _all_patterns(schema))
        vocabulary = vocabulary.of_grammar(constraint.regex, list(patterns))
        matcher = library.LLMatcher(tokenizer, grammar, log_level=0)
        if matcher.is_error():
            raise self._refused(constraint, tools, matcher.get_error(), library)
        ending = vocabulary.ending(matcher, shortest=True)
        if ending is None and (why := vocabulary.error(matcher)):
            raise self._refused(constraint, tools, why, library)
        return Compiled(matcher, vocabulary, LONGEST + 1 if ending is None else len(ending[0]), len(vocabulary.encode(grammar)))

    def _made(self, constraint: Constraint, tools: Mapping[str, Mapping[str, Any]], thinking: Thinking, library: Any) -> str:
        regex = library.regex_to_lark(constraint.regex, "") if constraint.regex is not None else ""
        try:
            return grammar(constraint, tools, self.form, thinking, regex)
        except (TypeError, ValueError, RecursionError) as error:
            raise ConfigError(f"schema={constraint.schema!r:.200}: is not JSON ({error!s:.200})") from error

    def _thinking(self, prompt: str, may: bool) -> Thinking:
        """may: a thought that the prompt has not begun is allowed."""
        end, (opened, closed) = prompt.rstrip(), self.form.thought
        if end.endswith(opened):
            return "open"
        source = str(getattr(self.tokenizer, "chat_template", "") or "")
        return "may" if may and opened in source and not end.endswith(closed) else "none"

    def _check_patterns(self, constraint: Constraint, tools: Mapping[str, Mapping[str, Any]]) -> None:
        """Refuse a value that must match many patterns at once: compiling doubles its work with each, and nothing can cancel it."""
        wholes = [("schema", constraint.schema), *((f"tool {name!r}", schema) for name, schema in tools.items())]
        for what, schema in wholes:
            place, count = max(_patterns(schema).items(), key=lambda found: found[1], default=("", 0))
            if count > PATTERNS:
                kind = ToolSchemaError if what.startswith("tool") else ConfigError
                raise kind(
                    f"{what}: {place or 'its value'} must match {count} patterns at once, at most {PATTERNS} can be enforced: join them"
                )

    def _check_arguments(self, tools: Mapping[str, Mapping[str, Any]]) -> None:
        """Refuse arguments that a form without JSON cannot write, or could not be read in."""
        if self.form.argument is None:
            return
        for name, schema in tools.items():
            if not schema["properties"] and (ways := [key for key in ("$ref", "allOf", "anyOf", "oneOf") if key in schema]):
                raise ToolSchemaError(
                    f"tool {name!r}: this model's calls name their arguments, and {ways[0]!r} does not: give it properties"
                )
            if wrong := [key for key in schema["properties"] if unwritable(key, self.form)]:
                raise ToolSchemaError(f"tool {name!r}: its argument {wrong[0]!r} cannot be written in this model's calls: rename it")

    def _refused(self, constraint: Constraint, tools: Mapping[str, Mapping[str, Any]], why: str, library: Any) -> Exception:
        for name, schema in tools.items():
            alone = library.LLMatcher.validate_grammar(library.LLMatcher.grammar_from_json_schema(json.dumps(schema)))
            if alone:
                return ToolSchemaError(
                    f"tool {name!r}: its schema cannot be enforced: {_short(alone)}; simplify parameters={schema!r:.200}, leave the tool "
                    "out of Constraint(allowed=...), or ask without a constraint"
                )
        given = {name: getattr(constraint, name) for name in ("schema", "regex", "grammar") if getattr(constraint, name) is not None}
        shown = ", ".join(f"{name}={value!r:.200}" for name, value in given.items()) or "these tools"
        return ConfigError(f"{shown}: cannot be enforced: {_short(why)}; simplify it, or ask without a constraint")

    def _tokens_of(self, library: Any) -> tuple[Any, Vocabulary]:
        with self._lock:
            if self._tokens is None:
                self._tokens = _tokens(library, self.tokenizer, self._vocab, self._stop_ids, self.form)
            return self._tokens


def _callable(constraint: Constraint, tools: Sequence[Tool | Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Schemas of the arguments of the tools that may be called, by name."""
    functions = [
        {"name": tool.name, "parameters": tool.parameters} if isinstance(tool, Tool) else tool.get("function", tool) for tool in tools
    ]
    known: dict[str, Any] = {str(function["name"]): function.get("parameters") for function in functions}
    for name in constraint.allowed or ():
        if name not in known:
            raise ConfigError(f"allowed={constraint.allowed!r}: there is no tool {name!r}, only {sorted(known)!r}")
    choice = constraint.tool_choice
    allowed = list(known) if constraint.allowed is None else list(dict.fromkeys(constraint.allowed))
    if constraint.calls and choice != "any":
        if choice not in known:
            raise ConfigError(f"tool_choice={choice!r}: there is no such tool, only {sorted(known)!r}")
        if choice not in allowed:
            raise ConfigError(f"tool_choice={choice!r}: is not among allowed={constraint.allowed!r}")
        allowed = [choice]
    if constraint.calls and not allowed:
        raise ConfigError(f"tool_choice={choice!r}: there is no tool to call; pass tools, or tool_choice='auto'")
    return {name: arguments_schema(known[name]) for name in known if name in allowed}


@dataclass(frozen=True, slots=True)
class _Tokens:
    """A tokenizer's vocabulary as llguidance takes it: the bytes of each id, and the ids that are never part of a text."""

    backend: Any
    tokens: list[bytes]
    special_token_ids: list[int]
    eos_token_id: int
    bos_token_id: None = None

    def __call__(self, text: str) -> list[int]:
        return list(self.backend.encode(text, add_special_tokens=False).ids)


def _tokens(library: Any, tokenizer: Any, vocab: int, stop_ids: list[int], form: CallForm) -> tuple[Any, Vocabulary]:
    """Special tokens that the form spells are written like any others; no other special token is part of a completion."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise ConfigError(f"constraint=...: needs a fast tokenizer, and {type(tokenizer).__name__} is none")
    base = library.LLTokenizer(backend.to_str(), eos_token=[token for token in stop_ids if token < len(tokenizer)] or [0])
    tokens = [base.decode_bytes([token]) for token in range(base.vocab_size)]
    spelled = "\n".join(form.literals).encode()
    never = [token for token, text in enumerate(tokens) if base.is_special_token(token) and (not text or text not in spelled)]
    ends = stop_ids or [max(vocab, len(tokens))]  # without an end of turn one is made up, which no model can draw
    tokens += [b""] * (max(vocab, ends[-1] + 1) - len(tokens))
    known = _Tokens(backend, tokens, sorted({*never, *ends}), ends[0])
    exits = (form.argument[2] if form.argument else "", form.answer[1], form.quotes[1] if form.quotes else "")
    vocabulary = Vocabulary(tokens, known, ends, thought=form.thought[1], exits=exits)
    return library.LLTokenizer(library.TokenizerWrapper(known), n_vocab=len(tokens), eos_token=ends), vocabulary


def _patterns(schema: Any) -> Counter[str]:
    """How many patterns the value of a schema must match at once, at the top ("") and by the path of its parts."""
    found: Counter[str] = Counter()
    if isinstance(schema, Mapping):
        found[""] = int("pattern" in schema)
        for name in ("allOf", "anyOf", "oneOf"):
            for part in schema[name] if isinstance(schema.get(name), (list, tuple)) else ():
                found = found + _patterns(part) if name == "allOf" else found | _patterns(part)
        properties = schema.get("properties")
        for name, part in (*(properties.items() if isinstance(properties, Mapping) else ()), ("[]", schema.get("items"))):
            found.update({f"{name}.{place}".rstrip("."): count for place, count in _patterns(part).items()})
    return found


def _all_patterns(schema: Any) -> Iterator[str]:
    """Every pattern in a schema, of values and of names."""
    if isinstance(schema, Mapping):
        for key, value in schema.items():
            if key == "pattern" and isinstance(value, str):
                yield value
            elif key == "patternProperties" and isinstance(value, Mapping):
                yield from value
            yield from _all_patterns(value)
    elif isinstance(schema, (list, tuple)):
        for value in schema:
            yield from _all_patterns(value)


def _short(text: str) -> str:
    line = " ".join(re.split(r"\n\s*\d+ \||<state>", text)[0].split())  # without our grammar's lines and the parser's state
    line = re.sub("Enable 'coerce_one_of'.*", "Write anyOf instead", line)
    return line if len(line) <= 300 else line[:300] + " ..."
