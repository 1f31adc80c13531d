"""The conductor: messages in, completion and receipt out. Reading `Engine.stream` top to bottom names every part of a request once.

layout -> match -> plan -> fill -> decode -> keep -> receipt
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from typing import Any

import psutil
import torch

from .errors import AgentCacheError, ConfigError, ContextOverflowError, EngineClosedError
from .layout import Renderer
from .model.fingerprint import Fingerprint
from .model.hf import HFModel, load
from .model.sampling import Sampler, TextStream
from .model.tool_calls import parse
from .receipt import Receipt
from .runner import Runner
from .scheduler import Chunk, Done, Request, Scheduler
from .store.store import Scope, Store, as_ids
from .types import Layout, Message, Reason, Rendering, Reuse, Sampling, Tool, ToolGroup, ToolOrder

__all__ = ["Chunk", "Completion", "Engine", "Stream"]

Messages = Seq[Message | Mapping[str, Any]] | str
Tools = Seq[Tool | Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class Completion:
    """What a request produced. `message` is the assistant turn to send back; unchanged, it costs nothing the next time."""

    text: str
    ids: tuple[int, ...]
    message: Message
    receipt: Receipt

    @property
    def finish_reason(self) -> str | None:
        """Why it ended: stop, length or tool_calls."""
        return self.receipt.finish_reason

    @property
    def usage(self) -> dict[str, Any]:
        """Token counts in OpenAI's shape, cached tokens included."""
        return self.receipt.usage


class Stream(Iterator[Chunk]):
    """Chunks of one running request. Leaving early (`close`, or the end of a `with` block) frees the device within one step.

    completion: the whole result; reading it runs the stream to its end.
    """

    def __init__(self, request: Request, finish: Callable[[Request], Completion]) -> None:
        self._request = request
        self._finish = finish
        self._completion: Completion | None = None
        self._error: AgentCacheError | None = None
        self._over = False

    def __iter__(self) -> Stream:
        return self

    def __next__(self) -> Chunk:
        if self._over:
            raise StopIteration
        event = self._request.events.get()
        if isinstance(event, Chunk):
            return event
        self._over = True
        if isinstance(event, Done):
            self._completion = self._finish(self._request)
            raise StopIteration
        self._error = event
        raise event

    @property
    def receipt(self) -> Receipt:
        """The account so far; final once the stream has ended."""
        return self._request.receipt

    @property
    def completion(self) -> Completion:
        """The whole result; runs what is left of the stream."""
        for _ in self:
            pass
        if self._completion is None:
            raise self._error or EngineClosedError("the stream was closed before it ended")
        return self._completion

    def close(self) -> None:
        """Stop the request; what it had computed stays reusable."""
        self._request.cancelled.set()
        self._over = True

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *exc: object) -> None:
        if not self._over:
            self.close()

    def __del__(self) -> None:
        self._request.cancelled.set()


class Engine:
    """A local chat model whose prompts are computed once. Thread safe; close it, or use it as a context manager.

    model: Hugging Face id, folder, or a loaded model (then with its tokenizer). memory_bytes: budget for kept pages, by default a quarter
    of the memory that is free. chunk_tokens: longest piece of a prompt run at once. reuse: "exact", or "off" to keep nothing.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any = None,
        *,
        device: str | None = None,
        dtype: str | torch.dtype | None = None,
        load_in_4bit: bool = False,
        load_in_8bit: bool = False,
        chat_template: str | None = None,
        memory_bytes: int | None = None,
        chunk_tokens: int = 512,
        reuse: Reuse = "exact",
        redact: bool = False,
    ) -> None:
        if chunk_tokens < 1:
            raise ConfigError(f"chunk_tokens={chunk_tokens!r}: must be at least 1")
        if reuse not in ("exact", "off"):
            raise ConfigError(f"reuse={reuse!r}: must be 'exact' or 'off'")
        if load_in_4bit and load_in_8bit:
            raise ConfigError("load_in_4bit=True and load_in_8bit=True: choose one")
        self.store = Store(_default_budget(device) if memory_bytes is None else memory_bytes)
        name = model if isinstance(model, str) else getattr(getattr(model, "config", None), "_name_or_path", "") or type(model).__name__
        loaded, self.tokenizer = load(model, tokenizer, device=device, dtype=dtype, bits=4 if load_in_4bit else 8 if load_in_8bit else None)
        self.name = str(name)
        self.reuse: Reuse = reuse
        self.redact = redact
        self.renderer = Renderer(self.tokenizer, chat_template=chat_template)
        self.model = HFModel(loaded)
        self.fingerprint = Fingerprint(self.model.model, self.model.numerics.kernel) if self.model.numerics else None
        self.scheduler = Scheduler(Runner(self.model), self.store, chunk_tokens)
        self._groups: dict[tuple[str, str], tuple[ToolGroup, Scope, tuple[int, ...], tuple[str, ...]]] = {}
        self._closed = False
        ends = self.model.stop_ids
        own = getattr(self.tokenizer, "eos_token_id", None)
        self._stop_ids = ends | {own} if own is not None else ends

    # -- asking ----------------------------------------------------------------------------------------------------

    def stream(
        self,
        messages: Messages,
        tools: Tools = (),
        *,
        sampling: Sampling | None = None,
        namespace: str = "default",
        reuse: Reuse | None = None,
        rendering: Rendering = "canonical",
        tools_order: ToolOrder = "given",
        group: str | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
        on_progress: Callable[[int, int], None] | None = None,
    ) -> Stream:
        """Answer messages (or continue a raw text prompt), chunk by chunk. Raises before any computation when the input cannot work.

        group: a tool group whose recorded tool order `tools_order="sticky"` follows. on_progress(done, total): prompt tokens so far, called
        on the device thread.
        """
        called = time.perf_counter()
        sampling = sampling or Sampling()
        layout = self.renderer.render(
            messages,
            tools,
            rendering=rendering,
            tools_order=tools_order,
            sticky=self._sticky(namespace, group),
            namespace=namespace,
            template_kwargs=template_kwargs,
        )
        sampling = self._fit(layout, sampling)
        request = self._request(layout, sampling, namespace, reuse or self.reuse, called)
        request.on_progress = on_progress
        self.scheduler.submit(request)
        return Stream(request, lambda done: self._complete(done, layout))

    def generate(self, messages: Messages, tools: Tools = (), **options: Any) -> Completion:
        """The whole answer at once; options as of `stream`."""
        return self.stream(messages, tools, **options).completion

    def _sticky(self, namespace: str, group: str | None) -> tuple[str, ...]:
        if group is None:
            return ()
        if (namespace, group) not in self._groups:
            raise ConfigError(f"group={group!r} is not warm in namespace {namespace!r}: call warm(name={group!r}) first")
        return self._groups[namespace, group][3]

    def _fit(self, layout: Layout, sampling: Sampling) -> Sampling:
        """Refuse a prompt that leaves no room for a token; shorten max_tokens to the room there is."""
        context, prompt = self.model.context_tokens, len(layout.ids)
        if prompt + 1 > context:
            raise ContextOverflowError(prompt, context, 1)
        return replace(sampling, max_tokens=min(sampling.max_tokens, context - prompt))

    def _request(self, layout: Layout, sampling: Sampling, namespace: str, reuse: Reuse, called: float) -> Request:
        if self._closed:
            raise EngineClosedError("the engine is closed: create a new one")
        receipt = Receipt(
            namespace=namespace,
            model=self.name,
            prompt_tokens=len(layout.ids),
            spliced_tokens=layout.spliced_tokens,
            differences=layout.differences,
            spans=layout.spans,
            redacted=self.redact,
        )
        forced = self._forced(sampling)
        request = Request(
            ids=list(layout.ids),
            namespace=namespace,
            fingerprint=self.fingerprint.whole if self.fingerprint else "",
            sampling=sampling,
            sampler=Sampler(sampling, self.model.device),
            text=TextStream(self.tokenizer, sampling.stop, self._stop_ids),
            stop_ids=self._stop_ids,
            receipt=receipt,
            reuse=reuse == "exact",
            forced=deque(forced),
            called=called,
        )
        receipt.layout_ms = (time.perf_counter() - called) * 1e3
        return request

    def _forced(self, sampling: Sampling) -> Seq[int]:
        if isinstance(sampling.forced, str):
            return self.tokenizer(sampling.forced, add_special_tokens=False)["input_ids"]  # type: ignore[no-any-return]
        if any(not 0 <= token < self.model.vocab for token in sampling.forced):
            raise ConfigError(f"forced={sampling.forced!r}: ids must lie in [0, {self.model.vocab})")
        return sampling.forced

    def _complete(self, request: Request, layout: Layout) -> Completion:
        receipt = request.receipt
        generated = tuple(request.ids[receipt.prompt_tokens :])
        message = parse(request.text.text)
        if message.tool_calls and receipt.finish_reason == "stop":
            receipt.finish_reason = "tool_calls"
        if generated and not isinstance(layout.text, type(None)):
            self.renderer.remember(layout, generated, message, namespace=request.namespace)
        receipt.saved_ms = receipt.cached_tokens * self.scheduler.ms_per_token
        receipt.saved_flops = self._flops(receipt.cached_tokens)
        return Completion(request.text.text, generated, message, receipt)

    def _flops(self, tokens: int) -> float:
        """2 per weight and token for the layers, 4·heads·head_dim per layer and pair of tokens for causal attention."""
        if not self.model.spec:
            return 0.0
        config, spec = self.model.config, self.model.spec
        weights = sum(p.numel() for p in self.model.model.get_decoder().layers.parameters())
        return tokens * 2.0 * weights + 2.0 * spec.layers * config.num_attention_heads * spec.head_dim * tokens * (tokens + 1)

    # -- tool groups -----------------------------------------------------------------------------------------------

    def warm(
        self,
        system: str | None = None,
        tools: Tools = (),
        *,
        name: str | None = None,
        namespace: str = "default",
        tools_order: ToolOrder = "given",
        on_progress: Callable[[int, int], None] | None = None,
    ) -> ToolGroup:
        """Compute the prefix of system prompt and tools, pin it, and name it. Warming a name again moves its pins to the new prefix."""
        called = time.perf_counter()
        messages = [Message("system", system)] if system else []
        layout = self.renderer.prefix(messages, tools, tools_order=tools_order, namespace=namespace)
        if not layout.ids:
            raise ConfigError("nothing to warm: system and tools give no common prefix under this chat template")
        request = self._request(layout, Sampling(max_tokens=1), namespace, "exact", called)
        request.fill_only, request.on_progress = True, on_progress
        self.scheduler.submit(request)
        for event in iter(request.events.get, None):
            if isinstance(event, AgentCacheError):
                raise event
            if isinstance(event, Done):
                break
        return self._pin(request, layout, name, tools, called)

    def _pin(self, request: Request, layout: Layout, name: str | None, tools: Tools, called: float) -> ToolGroup:
        scope, ids = request.scope, tuple(layout.ids)
        if scope is None:
            raise ConfigError(f"this model's state cannot be kept ({self.model.support.why or Reason.ROPE_REGIME}): nothing to warm")
        name = name or self.store.key(scope.root, as_ids(ids)).hex()[:12]
        self.release(name, namespace=request.namespace)
        pages = self.store.pin(scope, as_ids(ids))
        if not pages:
            need = -(-len(ids) // 512) * (self.model.spec.page_bytes if self.model.spec else 0)
            raise ConfigError(f"memory_bytes={self.store.budget_bytes!r} cannot hold this tool group: it needs {need} bytes")
        spec = self.model.spec
        group = ToolGroup(
            name=name,
            namespace=request.namespace,
            prefix_tokens=len(ids),
            pages=pages,
            kv_bytes=len(ids) * spec.token_bytes if spec else 0,
            computed_tokens=request.receipt.computed_tokens,
            warm_ms=(time.perf_counter() - called) * 1e3,
        )
        names = tuple(_tool_name(tool) for tool in tools)
        self._groups[request.namespace, name] = (group, scope, ids, names)
        return group

    def release(self, name: str, *, namespace: str = "default") -> bool:
        """Unpin a tool group; its pages become evictable. False if there is none of that name."""
        held = self._groups.pop((namespace, name), None)
        if held is not None:
            self.store.pin(held[1], as_ids(held[2]), -1)
        return held is not None

    @property
    def groups(self) -> tuple[ToolGroup, ...]:
        """The tool groups pinned now, of all namespaces."""
        return tuple(held[0] for held in self._groups.values())

    # -- keeping in order ------------------------------------------------------------------------------------------

    def invalidate(self) -> None:
        """Declare that weights changed in a way that cannot be noticed (`.data` edits): nothing kept so far is used again."""
        if self.fingerprint:
            self.fingerprint.invalidate()

    def close(self) -> None:
        """End running requests, free all pages, give the model object back as it was. Closing twice is fine."""
        if not self._closed:
            self._closed = True
            self.scheduler.close()
            self.store.clear()
            self.model.close()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def _default_budget(device: str | None) -> int:
    if device and device.startswith("cuda") and torch.cuda.is_available():
        return torch.cuda.mem_get_info()[0] // 4
    return psutil.virtual_memory().available // 4


def _tool_name(tool: Tool | Mapping[str, Any]) -> str:
    if isinstance(tool, Tool):
        return tool.name
    return str(tool.get("function", tool).get("name", ""))
