"""The grammars of one engine: how its model writes calls, and guides for requests with a constraint. Knows nothing of requests' KV."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ..namespace_lru import Covering
from ..types import Layout
from .call_forms import CallForm
from .family_forms import form_by

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
            self._form = form_by(self._render, self.tokenizer)
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
