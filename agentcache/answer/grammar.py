"""The grammars of one engine: how its model writes calls, and guides for requests with a constraint. Knows nothing of requests' KV."""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from ..errors import PromptError
from ..namespace_lru import Covering
from ..types import Layout, Message, Tool, ToolCall
from .call_forms import PROBE_ARGUMENTS, PROBE_TOOL, CallForm
from .family_forms import form_of

if TYPE_CHECKING:
    from .grammar_compiler import GrammarCompiler
    from .guide import Guide


class Grammars:
    """Guides for the requests of one engine. Safe to use from many threads.

    render: the engine's renderer, asked once how this chat template shows a call. strict: requests with tools are held to the schemas
    where they ask for nothing else.
    """

    def __init__(self, tokenizer: Any, vocab: int, stop_ids: frozenset[int], render: Callable[..., Layout], strict: bool = False) -> None:
        self.strict = strict
        self.tokenizer = tokenizer
        self._vocab, self._stop_ids, self._render = vocab, stop_ids, render
        self._lock = threading.Lock()
        self._form: CallForm | None = None
        self._compiler: GrammarCompiler | None = None

    def forget(self, deletion: Covering) -> None:
        """Forget the grammars, and tools in them, of namespaces of which something was deleted on purpose."""
        if self._compiler is not None:
            self._compiler.forget(deletion)

    @property
    def form(self) -> CallForm:
        """How this model writes calls."""
        if self._form is None:
            tool = Tool(PROBE_TOOL, "", {"type": "object", "properties": {"zarg": {"type": "string"}}})
            call = ToolCall(PROBE_TOOL, PROBE_ARGUMENTS, "call00001")  # as the layout numbers it: there is nothing to report
            asked = [Message("user", "zask"), Message("assistant", "", (call,))]
            try:
                shown = self._render(asked, [tool], namespace="grammar", generation=False).text
                prompt = self._render(asked[:1], [tool], namespace="grammar").text
            except PromptError:  # a template without tools, or without calls
                shown = prompt = ""
            words: Iterable[str] = getattr(self.tokenizer, "get_added_vocab", dict)()  # some templates show no calls whose marks are tokens
            self._form = form_of("\n".join((shown, *words)), shown[turn_start(prompt, shown) :])
        return self._form

    @property
    def guide(self) -> Callable[..., Guide]:
        """`GrammarCompiler.guide`, which is loaded with the first constraint."""
        form = self.form
        with self._lock:
            if self._compiler is None:
                from .grammar_compiler import GrammarCompiler

                self._compiler = GrammarCompiler(self.tokenizer, self._vocab, self._stop_ids, form)
        return self._compiler.guide


def turn_start(prompt: str, shown: str) -> int:
    """Where the assistant's turn starts: the end of what both begin with, outside of a mark."""
    common = len(os.path.commonprefix((prompt, shown)))
    half = re.search(r"[<\[][^<>\[\]\s]*\Z", prompt[:common]) if common < len(prompt) else None
    return half.start() if half else common
