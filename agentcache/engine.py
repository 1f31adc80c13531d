"""The conductor: messages in, completion and receipt out. Reading `Engine.stream` top to bottom names every part of a request once.

layout -> match -> plan -> fill -> decode -> keep -> receipt
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from functools import partial
from typing import TYPE_CHECKING, Any

from .answer.expected import asks_for_thought, expect, tool_name
from .answer.grammar import Grammars
from .documents import Documents
from .errors import ConfigError
from .layout import Renderer, Volatile, in_transformers_form
from .matching import fingerprint_of
from .model.loading import Loading
from .model.open_model import open_model
from .model.sampling import Sampler, TextStream, forced_ids
from .process_owned import ProcessOwned, off_store_threads
from .receipt import Account
from .request import Asked, Callbacks, Decoding, Provenance, Running, TokenIds, check_callbacks, fit_sampling
from .runner import Runner
from .scheduler import Scheduler
from .store.memory.eviction import budgets
from .store.store import DEFAULT, Store
from .stream import Completion, Completions, Stream
from .types import (
    Constraint,
    Forgotten,
    LayoutMode,
    LayoutOptions,
    Message,
    Probe,
    Rendering,
    Reuse,
    Sampling,
    StoreOptions,
    Tool,
    ToolOrder,
    check_name,
    check_reuse,
)

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from .adapters import Adapters
    from .answer.guide import Guide
    from .approximate.segments import Segments
    from .calibration import Calibration
    from .session import Session
    from .shared_engines import EngineLease
    from .store.deletion import Deletion
    from .store.tool_group import ToolGroup
    from .tool_groups import ToolGroups

Messages = Seq[Message | Mapping[str, Any]] | str
Tools = Seq[Tool | Mapping[str, Any]]


class Engine(ProcessOwned, Documents):
    """A local chat model whose prompts are computed once. Thread safe. Close it, or use `with`: the model object is then as it was.

    In a forked child requests raise EngineForkedError, and `close` leaves the parent's pins and files alone: make another engine there.

    model: Hugging Face id, folder, or a loaded model (then with its tokenizer). loading: device, dtype, weights ("int8"),
    load_in_4bit, load_in_8bit, revision, token, trust_remote_code, for a model that is loaded here. memory_bytes: budget for
    cached pages, by default a quarter of the memory that is free. chunk_tokens: longest piece of a prompt run at once. reuse: "exact",
    "lossy" to accept pages of fewer bits, "approximate" to accept repeated text from other positions too, or "off" to cache nothing.
    calibration: the file of `agentcache calibrate`, where it is not in the store's folder. store: folder or options of the store on
    disk, None for no disk. layout: the place of text that is declared volatile. strict: calls of requests without a constraint are
    held to the tools' schemas; by default if the model's generation config has `strict_calls`. adapters: LoRAs by name.
    """

    _HOLDS = "weights and threads"

    def __init__(
        self,
        model: Any,
        tokenizer: Any = None,
        *,
        chat_template: str | None = None,
        memory_bytes: int | None = None,
        chunk_tokens: int | None = None,
        reuse: Reuse = "exact",
        calibration: Calibration | str | os.PathLike[str] | None = None,
        store: StoreOptions | str | os.PathLike[str] | None = DEFAULT,
        layout: LayoutOptions | LayoutMode = "enforce",
        redact: bool = False,
        strict: bool | None = None,
        adapters: Mapping[str, str | os.PathLike[str]] | None = None,
        receipts: str | os.PathLike[str] | None = None,
        policy: str | os.PathLike[str] | None = None,
        **loading: Unpack[Loading],
    ) -> None:
        super().__init__()
        if chunk_tokens is not None and (type(chunk_tokens) is not int or chunk_tokens < 1):
            raise ConfigError(f"chunk_tokens={chunk_tokens!r}: must be a whole number, at least 1")
        self.reuse, self.redact = check_reuse(reuse), redact
        if receipts is not None:
            from .receipt_log import ReceiptLog
        log = ReceiptLog(receipts) if receipts is not None else None
        if policy is not None:
            from .policy import Policy
        self._policy = Policy.read(policy) if policy is not None else None
        named = getattr(getattr(model, "config", None), "_name_or_path", "")
        self.name = model if isinstance(model, str) else str(named or type(model).__name__)
        tail = layout if isinstance(layout, LayoutOptions) else LayoutOptions(layout)
        disk = Store.checked(store, memory_bytes)
        self.model, tokenizer = open_model(model, tokenizer, loading, Engine.__init__.__kwdefaults__)
        self.fingerprint = self.model.fingerprint
        try:
            self.tokenizer = in_transformers_form(tokenizer)
            self.store = Store.open(*budgets(str(self.model.device), memory_bytes), None if reuse == "off" else disk)
            self.scheduler = Scheduler(Runner(self.model), self.store, chunk_tokens, log)
            # also when the last reference goes, or the process ends: a thread that computes while Python ends aborts the process
            self._end = weakref.finalize(self, off_store_threads(_end), os.getpid(), self.scheduler)
        except BaseException:
            self.model.close()
            raise
        if self._policy is not None:
            self._policy.attach(self.name, self.scheduler.lifecycle)
        self.renderer = Renderer(self.tokenizer, chat_template=chat_template, kept=self.store if self.store.disk else None, tail=tail)
        self._approximate: Segments | None = None
        self._tool_groups: ToolGroups | None = None
        self._calibration, self._load_lock = calibration, threading.Lock()
        if reuse == "approximate" or calibration is not None:
            self.approximate.calibrate()
        self._completions = Completions(self.renderer, self.store, self.model, self.scheduler)
        self._stop_ids = self.model.stop_ids | {own for own in (getattr(self.tokenizer, "eos_token_id", None),) if own is not None}
        self.grammars = Grammars(self.tokenizer, self.model.vocab, self._stop_ids, self.renderer.render, self.model.strict_calls(strict))
        self._texts = (self.renderer, self.grammars, self._completions)  # the store listens to these, and holds no engine
        self.store.on_deletion(*(part.forget for part in self._texts))
        self._named_adapters: Adapters | None = None
        if adapters:
            self._adapters.add_all(adapters)

    @classmethod
    def shared(cls, model: Any, tokenizer: Any = None, *, lease: EngineLease, **options: Any) -> Engine:
        """This process's engine for a model and these options: made for the first lease that asks, closed when the last is released."""
        from .shared_engines import shared_engine

        return shared_engine(cls, model, tokenizer, lease, options)  # type: ignore[no-any-return]

    # -- asking ----------------------------------------------------------------------------------------------------

    def stream(
        self, messages: Messages, tools: Tools = (), *, sampling: Sampling | None = None, constraint: Constraint | None = None,
        volatile: Volatile = (), turn: str = "", namespace: str = "default", reuse: Reuse | Calibration | None = None,
        rendering: Rendering = "canonical", tools_order: ToolOrder = "given", group: str | None = None,
        session: Session | str | None = None, adapter: str | None = None, template_kwargs: Mapping[str, Any] | None = None,
        **callbacks: Unpack[Callbacks],
    ) -> Stream:  # fmt: skip
        """Answer messages (or continue a raw text prompt), chunk by chunk. Raises before any computation when the input cannot work.

        constraint: what the completion may be; needs the extra `constrain`. volatile: text of this request only, such as the time: it
        stands at the tail, and is taken out of the system prompt. turn: names this turn of its conversation, where a shortened history
        makes one prompt of two turns. reuse: as of the engine; a calibration means "approximate" under it. group: whose recorded tool
        order `tools_order="sticky"` follows. session: the conversation, by name or as of `session()`. adapter: the name of one that was
        added. on_progress(done, total): prompt tokens so far, called in the thread that reads the stream, until the first chunk.
        on_logits: called on the device's thread with each token's logits, [vocab] in fp32; it must return soon and raise nothing.
        """
        self.check_open()
        if self._policy is not None:
            self._policy.check_requests(namespace, adapter)
        called, received = time.perf_counter(), self.store.apply_deletions()
        chosen = None if adapter is None else self._adapters.find(adapter)
        layout = self.renderer.render(messages, tools, volatile=volatile, rendering=rendering, tools_order=tools_order,
            template_kwargs=template_kwargs, namespace=namespace, most_tokens=self.model.context_tokens,
            sticky=() if group is None else self._groups.tools(namespace, group, chosen),
        )  # fmt: skip
        sampling = fit_sampling(sampling, layout, self.model)
        consent = self.reuse if reuse is None else reuse
        accepted: Reuse = check_reuse(consent) if isinstance(consent, str) else "approximate"
        account = Account.open(layout, namespace, self.name, called, self.redact, self.model.weights, chosen.digest if chosen else "")
        if self._policy is not None:
            accepted = self._policy.allow(account, adapter, accepted)
        thinks = asks_for_thought(template_kwargs)
        expected, guide = expect(layout, tools, constraint, self.grammars, sampling, namespace=namespace, thinks=thinks, redact=self.redact)
        for note in expected.notes:
            account.record_note(note)
        asked = Asked(
            layout, namespace, sampling, self._stop_ids, received, expected, accepted, turn,
            adapter=chosen, acts_from=self._adapters.acts_from(chosen, layout) if chosen else 0, **check_callbacks(callbacks),
        )  # fmt: skip
        running = self._running(asked, account, guide)
        finish: Callable[[Running], Completion] = self._completions.finish
        finish = finish if session in (None, "") else self._groups.sessions.follow(running, session, finish)
        if accepted == "approximate":
            running.ranges = self.approximate.begin(running, reuse)
        self.store.forget_late(namespace, received, self._forget_texts)
        begin = partial(self._policy.begin, running, adapter, self.release) if self._policy is not None else None
        self.scheduler.submit(running, begin)
        return Stream(running, finish)

    def generate(self, messages: Messages, tools: Tools = (), **options: Any) -> Completion:
        """The whole answer at once; options as of `stream`."""
        self.scheduler.check_caller()
        return self.stream(messages, tools, **options).completion

    def _running(self, asked: Asked, account: Account, guide: Guide | None = None) -> Running:
        if self._tool_groups is not None:
            self._tool_groups.lapse(asked.prompt_tokens if asked.fill_only else 0)
        text = TextStream(self.tokenizer, asked.sampling.stop, self._stop_ids)
        forced = deque(forced_ids(asked.sampling, self.tokenizer, self.model.vocab))
        decoding = Decoding(Sampler(asked.sampling, self.model.device), text, guide, forced)
        provenance = Provenance(self.fingerprint.sampled() if self.fingerprint else "", asked.received.made)
        return Running(asked, account, TokenIds(asked.layout.ids), decoding, provenance)

    @property
    def approximate(self) -> Segments:
        """Approximate reuse: loaded for the first caller who consents to it."""
        with self._load_lock:
            if self._approximate is None:
                from .approximate.segments import Segments

                self._approximate = Segments(self.scheduler, self.tokenizer, self._calibration, self.name)
            return self._approximate

    @property
    def _adapters(self) -> Adapters:
        """The adapters by name: loaded for the first caller who names one."""
        with self._load_lock:
            if self._named_adapters is None:
                from .adapters import Adapters

                self._named_adapters = Adapters(self.model, self.tokenizer, self.renderer.render, self.store)
            return self._named_adapters

    @property
    def _groups(self) -> ToolGroups:
        """The tool groups that it holds: loaded for the first caller who asks for one."""
        if self._tool_groups is None:
            from .tool_groups import ToolGroups

            with self._load_lock:
                self._tool_groups = self._tool_groups or ToolGroups(self.scheduler, self.name, self.fingerprint)
        return self._tool_groups

    def probe(
        self, messages: Messages, tools: Tools = (), *, volatile: Volatile = (), namespace: str = "default",
        adapter: str | None = None, **rendered: Any,
    ) -> Probe:  # fmt: skip
        """Tell what of a prompt is cached now, per tier, and why no more. Computes and reads nothing; `rendered` as of `stream`."""
        from .prefix_probe import probe

        self.check_open()
        self.store.apply_deletions()
        chosen = None if adapter is None else self._adapters.find(adapter)
        layout = self.renderer.render(messages, tools, volatile=volatile, namespace=namespace, **rendered)
        acts_from = self._adapters.acts_from(chosen, layout) if chosen else 0
        return probe(self.model, self.store, layout, namespace, self.scheduler.ms_per_token, chosen, acts_from)

    def stats(self, namespace: str | None = None) -> dict[str, dict[str, float]]:
        """Counts since the engine was made, by family and label, as `agentcache.counters` says; or those of one namespace's requests."""
        return self.scheduler.stats(namespace)

    def add_adapter(self, name: str, source: str | os.PathLike[str], *, scale: float = 1.0) -> str:
        """Load a LoRA, rsLoRA, DoRA or Activated LoRA that PEFT saved, from a folder or the Hub; requests ask it by adapter=name.

        Returns its digest, by which its pages are known: under the same name again it is another one if its weights or settings are.
        scale: factor of its own scaling. Needs the extra `adapters`. ConfigError, ModelError: it cannot be used here, and why.
        """
        self.check_open()
        return self._adapters.add(name, source, scale)

    def remove_adapter(self, name: str) -> bool:
        """Forget an adapter and free its pages in memory; requests that run end under it. False if there is none of that name."""
        return self._adapters.remove(name)

    @property
    def adapters(self) -> dict[str, str]:
        """The digests of adapters, by name."""
        return self._adapters.digests

    # -- tool groups and sessions -----------------------------------------------------------------------------------

    def session(self, name: str, *, namespace: str = "default", lease_s: float = 86_400.0) -> Session:
        """The session of that name, new or of any earlier process: the page chain of a conversation, kept so long after each answer."""
        from .session import Session

        self.check_open()
        return Session(self, self.stream, self._groups.sessions, name, namespace, lease_s)

    def warm(
        self, system: str | None = None, tools: Tools = (), *, name: str | None = None, namespace: str = "default",
        tools_order: ToolOrder = "given", adapter: str | None = None, on_progress: Callable[[int, int], None] | None = None,
    ) -> ToolGroup:  # fmt: skip
        """Compute the prefix of system prompt and tools, pin it, and name it. Warming a name again moves its pins to the new prefix."""
        messages = [Message("system", system)] if system else []
        return self.pin(messages, tools, name=name, namespace=namespace, tools_order=tools_order, adapter=adapter, on_progress=on_progress)

    def pin(
        self, messages: Seq[Message | Mapping[str, Any]], tools: Tools = (), *, name: str | None = None, namespace: str = "default",
        tools_order: ToolOrder = "given", group: str | None = None, adapter: str | None = None,
        template_kwargs: Mapping[str, Any] | None = None, ttl_s: float | None = None, lease: EngineLease | None = None,
        on_progress: Callable[[int, int], None] | None = None, sources: Seq[tuple[str, str, int]] = (),
    ) -> ToolGroup:  # fmt: skip
        """The same for the start of a conversation: what every continuation of these messages begins with, but for what the
        template writes otherwise once more follows. Options as of `stream`. `release` ends it.

        ttl_s: a timed pin, which ends by itself so many seconds after it was last asked for, or with the `lease` that asked for it; its
        name is `name` and a digest, so that timed pins of one name stand beside each other. sources: texts that `learn` puts there.
        """
        self.check_open()
        check_name("namespace", namespace)
        self._groups.check(name)
        if self._policy is not None:
            self._policy.check_name(namespace, adapter, name)
        shown = {"tools_order": tools_order, "template_kwargs": template_kwargs}
        chosen = None if adapter is None else self._adapters.find(adapter)
        if ttl_s is not None:
            asked_for = {"messages": messages, "tools": tools, "group": group, "adapter": adapter, **shown}
            weights = fingerprint_of(self.fingerprint.whole if self.fingerprint else "", chosen)
            pin = partial(self.pin, on_progress=on_progress, sources=sources)
            return self._groups.timed.pin(pin, (namespace, name or "pinned"), ttl_s, lease, asked_for, weights)
        called, received = time.perf_counter(), self.store.apply_deletions()
        sticky = () if group is None else self._groups.tools(namespace, group, chosen)
        layout = self.renderer.opening(messages, tools, sticky=sticky, namespace=namespace, most_tokens=self.model.context_tokens, **shown)
        filled = layout
        if self.model.spec is not None and self.model.spec.recurrent:
            from .layout.opening import at_multiple

            filled, layout = at_multiple(layout, self.model.support.alignment)
        if not layout.ids:
            raise ConfigError("nothing to warm: messages and tools give no common prefix under this chat template, or too short a one")
        asked = Asked(
            filled, namespace, fit_sampling(Sampling(max_tokens=1), filled, self.model), self._stop_ids, received, fill_only=True,
            on_progress=on_progress, adapter=chosen, acts_from=self._adapters.acts_from(chosen, filled, whole=False) if chosen else 0,
        )  # fmt: skip
        opened = Account.open(filled, namespace, self.name, called, weights=self.model.weights, adapter=chosen.digest if chosen else "")
        self.scheduler.check_caller()
        running = self._running(asked, opened)
        self.store.forget_late(namespace, received, self._forget_texts)
        try:
            self.scheduler.submit(running)
            deque(Stream(running, None), maxlen=0)
            listed = tuple(map(tool_name, sorted(tools, key=tool_name) if tools_order == "sorted" else tools))
            admit = partial(self._policy.check_pins, adapter) if self._policy is not None else None
            held = self._groups.hold(running, layout, name, listed, called, tuple(sources), admit)
        except BaseException:
            self._groups.abandon(running, layout)
            raise
        if self._approximate is not None:
            self._approximate.index_text(layout, held.scope, received)
        return held

    def release(self, name: str, *, namespace: str = "default") -> bool:
        """Unpin a tool group; its pages become evictable. False if there is none of that name."""
        check_name("namespace", namespace)
        check_name("name", name)
        return self._here and self._groups.release(namespace, name)

    @property
    def groups(self) -> tuple[ToolGroup, ...]:
        """The tool groups pinned now, of all namespaces."""
        self._groups.lapse()
        return self._groups.all

    # -- keeping in order ------------------------------------------------------------------------------------------

    def invalidate(self) -> None:
        """Declare a change that cannot be noticed (a sparse `.data` edit, state inside a hook): no earlier page is used again."""
        if self.fingerprint:
            self.fingerprint.invalidate()

    def forget(
        self, *, namespace: str | None = None, group: str | None = None, session: str | None = None, older_than: float | None = None
    ) -> Forgotten:
        """Delete pages in memory and on disk, pinned or not: of a namespace, made more than `older_than` seconds ago (0: all), or both;
        or the tool group or session of that name, in `namespace` or "default", and its continuations that no other shares. Every engine
        over the store lets go by its next request; running requests cache none of them. StoreError: the disk's part cannot be deleted."""
        self.check_open()
        return self._groups.forget(namespace, group, session, older_than)

    def _forget_texts(self, deletion: Deletion) -> None:
        """Forget prompts, and what became of them."""
        for part in self._texts:
            part.forget(deletion)

    def flush(self, timeout_s: float | None = None) -> bool:
        """Wait until everything worth keeping is on disk; False if it took longer or could not be written."""
        return self._here and self.store.flush(timeout_s)


def _end(process: int, scheduler: Scheduler) -> None:
    try:
        if process == os.getpid():  # threads, pins, leases and files are those of the process that made them
            scheduler.close_with_store()
    finally:  # also where Ctrl-C ends the waiting: nobody can close it again
        scheduler.runner.model.close()
