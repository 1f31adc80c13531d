"""RemoteEngine: the interface of Engine over a running `agentcache serve`. Renders and computes nothing, and loads no torch.

One thread with an event loop sends all requests of an engine; their events reach the caller through an ordinary Stream.
"""

from __future__ import annotations

import asyncio
import json
import os
import threading
import time
import weakref
from collections.abc import Callable, Coroutine, Mapping
from collections.abc import Sequence as Seq
from concurrent import futures
from dataclasses import asdict
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeVar

from . import errors, extras
from .errors import ConfigError, EngineClosedError, PromptError
from .layout.plain import plain_message
from .layout.schemas import plain_tools
from .process_owned import ProcessOwned
from .remote_stream import RemoteEvents, RemoteRequest, RemoteStream, checked, read, reads
from .shared_engines import EngineLease, shared_engine
from .store.tool_group import ToolGroup
from .stream import Completion, Stream
from .types import Constraint, Forgotten, Layout, Message, Probe, Sampling, Tool

if TYPE_CHECKING:
    import httpx

    from .document_packs import Arrangement, Document, Learnt
    from .layout import Volatile

T = TypeVar("T")
Messages = Seq[Message | Mapping[str, Any]] | str
Tools = Seq[Tool | Mapping[str, Any]]
CONNECT_S = 10.0
RETRY_S = 30.0  # the longest wait for a server that has as many requests as it takes


class RemoteModel:
    """Tokenizer, renderer and size of a model that a server runs, as far as integrations ask for them."""

    def __init__(self, call: Callable[[str, str, Mapping[str, Any]], Any]) -> None:
        self._call = call
        self._texts: dict[int, str] = {}

    @cached_property
    def facts(self) -> Mapping[str, Any]:
        """Name and context, as the server tells them."""
        return dict(self._call("GET", "/v1/engine", {}))

    @property
    def context_tokens(self) -> int:
        """The most tokens of prompt and completion together."""
        return int(self.facts["context_tokens"])

    @property
    def eos_token_id(self) -> int | None:
        """The token that ends an answer, with which a scripted one ends."""
        found: int | None = self.facts["eos_token_id"]
        return found

    def __call__(self, text: str, *, add_special_tokens: bool = False) -> dict[str, list[int]]:
        """The token ids of a text, without special tokens, in the shape of transformers' tokenizers."""
        if add_special_tokens:
            raise ConfigError("add_special_tokens=True: a server tells the ids of the text alone")
        return {"input_ids": self._call("POST", "/v1/engine/render", {"text": text})["ids"]}

    def decode(self, ids: Seq[int]) -> str:
        """The text of token ids. That of a token alone is remembered: likelihoods name hundreds, mostly the same."""
        if len(ids) == 1 and ids[0] in self._texts:
            return self._texts[ids[0]]
        text = str(self._call("POST", "/v1/engine/decode", {"ids": list(ids)})["text"])
        return self._texts.setdefault(ids[0], text) if len(ids) == 1 else text

    def render(
        self, messages: Messages, tools: Tools = (), *, namespace: str = "default", template_kwargs: Mapping[str, Any] | None = None
    ) -> Layout:
        """The prompt of messages and tools. Its spans stay on the server."""
        body = {"messages": _plain(messages), "tools": plain_tools(tools), "template_kwargs": template_kwargs or None}
        said = self._call("POST", "/v1/engine/render", body)
        return Layout(said["ids"], (), said["text"])


class RemoteEngine(ProcessOwned):
    """A model that `agentcache serve` runs, with the interface of Engine: the same answers, receipts, tool groups and errors.

    base_url: of the server, such as http://127.0.0.1:8787. api_key: decides the namespace, where the server asks for keys. model: one of
    the server's names, of a model or an adapter, by default its first model. Thread safe; close it, or use it as a
    context manager: the server runs on.
    """

    _HOLDS = "connections"

    def __init__(self, base_url: str, api_key: str | None = None, *, model: str | None = None) -> None:
        super().__init__()
        told = f"base_url={base_url!r}: must be the address of an `agentcache serve`, such as 'http://127.0.0.1:8787'"
        self._httpx = httpx = extras.library("httpx", "0.27", "client", "RemoteEngine")
        extras.library("pydantic", "2.7", "client", "RemoteEngine")
        try:
            url = httpx.URL(base_url)
        except (TypeError, httpx.InvalidURL) as error:
            raise ConfigError(told) from error
        if url.scheme not in ("http", "https") or not url.host or (url.port or 0) > 65535:
            raise ConfigError(told)
        self._url, self._model = base_url.rstrip("/").removesuffix("/v1"), model or None
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._http = httpx.AsyncClient(
            base_url=self._url,
            headers=headers,
            timeout=httpx.Timeout(None, connect=CONNECT_S),
            limits=httpx.Limits(max_connections=None),
        )
        self._loop = asyncio.new_event_loop()
        thread = threading.Thread(target=self._loop.run_forever, name="agentcache-client", daemon=True)
        thread.start()
        self.renderer = self.tokenizer = self.model = RemoteModel(_caller(weakref.ref(self)))
        self._gate = threading.Lock()  # held while a call is given to the loop: none comes after that which ends all
        self._end = weakref.finalize(self, _end, os.getpid(), self._loop, self._http, thread, self._gate)

    @classmethod
    def shared(cls, model: str | None = None, *, lease: EngineLease, base_url: str, api_key: str | None = None) -> RemoteEngine:
        """This process's engine for a server, a key and a model: made for the first lease that asks, closed with the last."""
        shared: RemoteEngine = shared_engine(_shared, model or "", None, lease, {"base_url": base_url, "api_key": api_key})
        return shared

    @property
    def name(self) -> str:
        """The model's name; without one of its own, as the server tells it."""
        return self._model or str(self.model.facts["name"])

    # -- asking ----------------------------------------------------------------------------------------------------

    def stream(
        self,
        messages: Messages,
        tools: Tools = (),
        *,
        sampling: Sampling | None = None,
        constraint: Constraint | None = None,
        volatile: Volatile = (),
        namespace: str = "default",
        **options: Any,
    ) -> Stream:
        """Answer messages, or continue a text, as `Engine.stream` does; options: turn, reuse, rendering, tools_order, group,
        session, adapter, template_kwargs. ConfigError: on_logits, on_progress, a calibration, or a namespace other than the key's own."""
        self._check_namespace(namespace)
        body = {
            **{name: value for name, value in options.items() if value is not None},
            "messages": _plain(messages),
            "tools": plain_tools(tools),
            "sampling": None if sampling is None else asdict(sampling),
            "constraint": None if constraint is None else asdict(constraint),
            "volatile": _plain(volatile),
        }
        for name in ("on_logits", "on_progress"):
            if name in body:
                raise ConfigError(f"{name}={body[name]!r:.100}: cannot be carried over HTTP; it needs an Engine in this process")
        if not isinstance(body.get("reuse", ""), str):
            raise ConfigError("reuse: a calibration cannot be carried over HTTP; name the kind of reuse, such as 'exact' or 'off'")
        return RemoteStream(self._run(self._opened(self._content(body))))

    def generate(self, messages: Messages, tools: Tools = (), **options: Any) -> Completion:
        """The whole answer at once; options as of `stream`."""
        return self.stream(messages, tools, **options).completion

    def probe(
        self, messages: Messages, tools: Tools = (), *, volatile: Seq[str] = (), namespace: str = "default",
        adapter: str | None = None,
    ) -> Probe:  # fmt: skip
        """Tell what of a prompt is cached on the server now, per tier, and why no more."""
        self._check_namespace(namespace)
        body = {"messages": _plain(messages), "tools": plain_tools(tools), "volatile": list(volatile), "adapter": adapter}
        return Probe(**self._call("POST", "/v1/cache/probe", body))

    def stats(self, namespace: str | None = None) -> dict[str, dict[str, float]]:
        """Counts as of `Engine.stats`: of this key's requests, or of all that the server answers where the key is an admin's."""
        self._check_namespace(namespace or "default")
        return dict(self._call("GET", "/v1/engine/stats", {}))

    # -- tool groups -----------------------------------------------------------------------------------------------

    def warm(self, system: str | None = None, tools: Tools = (), *, name: str | None = None, **options: Any) -> ToolGroup:
        """Compute the prefix of system prompt and tools on the server, pin it, and name it; options as of `pin`."""
        return self.pin([Message("system", system)] if system else [], tools, name=name, **options)

    def pin(
        self,
        messages: Seq[Message | Mapping[str, Any]],
        tools: Tools = (),
        *,
        namespace: str = "default",
        lease: EngineLease | None = None,
        **options: Any,
    ) -> ToolGroup:
        """Pin the start of a conversation on the server; options: name, tools_order, group, adapter, template_kwargs, ttl_s.

        lease: a timed pin ends by its time alone, as other programs may want it.
        """
        self._check_namespace(namespace)
        said = {option: value for option, value in options.items() if value is not None}
        body = {"messages": _plain(messages), "tools": plain_tools(tools), **said}
        return reads(tuple[ToolGroup, ...])([self._call("POST", "/v1/engine/pin", body)])[0]

    def release(self, name: str, *, namespace: str = "default") -> bool:
        """Unpin a tool group of this key; False if there is none of that name."""
        self._check_namespace(namespace)
        return bool(self._call("POST", "/v1/engine/release", {"name": name})["released"])

    @property
    def groups(self) -> tuple[ToolGroup, ...]:
        """The tool groups of this key that are pinned now."""
        return reads(tuple[ToolGroup, ...])(self._call("GET", "/v1/engine/groups", {})["groups"])

    def forget(
        self, *, namespace: str | None = None, group: str | None = None, session: str | None = None, older_than: float | None = None
    ) -> Forgotten:
        """Delete pages of this key's namespace on the server, as `Engine.forget` does."""
        if namespace is None and group is None and session is None and older_than is None:
            raise ConfigError("forget(): name what is to be forgotten: namespace=, group=, session= or older_than= (0 for everything)")
        self._check_namespace(namespace or "default")
        said = self._call("POST", "/v1/engine/forget", {"group": group, "session": session, "older_than": older_than})
        return Forgotten(**{**said, "groups": tuple(said["groups"])})

    def add_adapter(self, name: str, source: Any, **options: Any) -> str:
        """Refuse: a server loads adapters as it starts."""
        raise ConfigError(f"add_adapter({name!r}): adapters are the server's: start it with `agentcache serve MODEL --adapter NAME=PATH`")

    def remove_adapter(self, name: str) -> bool:
        """Refuse, as `add_adapter` does."""
        raise ConfigError(f"remove_adapter({name!r}): adapters are the server's: start it without this one")

    # -- documents -------------------------------------------------------------------------------------------------

    def arrange(
        self, passages: Seq[str], messages: Messages, tools: Tools = (), *, namespace: str = "default", **rendered: Any
    ) -> Arrangement:
        """Order retrieved passages along what the server has cached, as `Engine.arrange` does; rendered: tools_order, adapter,
        template_kwargs."""
        from .document_packs import Arrangement, listed

        self._check_namespace(namespace)
        body = {"passages": listed("passages", passages), "messages": _plain(messages), "tools": plain_tools(tools), **rendered}
        said = self._call("POST", "/v1/engine/arrange", body)
        return Arrangement(**{**said, "order": tuple(said["order"])})

    def learn(
        self, texts: Mapping[str, str] | Seq[str], *, tools: Tools = (), messages: Messages = (), namespace: str = "default", **options: Any
    ) -> Learnt:
        """Compute texts on the server for later prompts, as `Engine.learn` does; options: system, name, separator, adapter, pack_tokens."""
        from .document_packs import Document, Learnt, named

        self._check_namespace(namespace)
        if options.pop("progress", False):
            raise ConfigError("progress: cannot be carried over HTTP; it needs an Engine in this process")
        body = {"texts": named(texts), "tools": plain_tools(tools), "messages": _plain(messages), **options}
        said = self._call("POST", "/v1/engine/learn", body)
        return Learnt(**{**said, "documents": tuple(Document(**one) for one in said["documents"])})

    def documents(self, name: str | None = None, *, namespace: str | None = None) -> tuple[Document, ...]:
        """The texts of this key that are learnt; of one name."""
        from .document_packs import Document

        self._check_namespace(namespace or "default")
        return tuple(Document(**one) for one in self._call("GET", "/v1/engine/documents", {"name": name})["documents"])

    def unlearn(self, sources: Seq[str], *, name: str = "documents", namespace: str = "default") -> int:
        """Release texts of this key by name; returns how many."""
        self._check_namespace(namespace)
        body = {"sources": [sources] if isinstance(sources, str) else list(sources), "name": name}
        return int(self._call("POST", "/v1/engine/unlearn", body)["released"])

    # -- requests --------------------------------------------------------------------------------------------------

    def _check_namespace(self, namespace: str) -> None:
        self.check_open()
        if namespace != "default":
            raise ConfigError(f"namespace={namespace!r}: on a server the API key decides it; leave it out, and give each user a key")

    def _content(self, body: Mapping[str, Any]) -> str:
        """A body as JSON, with the model's name."""
        try:
            return json.dumps({**body, **({"model": self._model} if self._model else {})}, default=dict)
        except (TypeError, ValueError, RecursionError) as error:
            raise PromptError(f"the request cannot be written as JSON: {error}") from error

    def _call(self, method: str, path: str, body: Mapping[str, Any]) -> Any:
        """The JSON that a route answers with."""
        self.check_open()
        if method == "GET":
            asked = {"params": {name: value for name, value in {**body, "model": self._model}.items() if value is not None}}
            return self._run(self._answered(method, path, asked))
        return self._run(self._answered(method, path, {"content": self._content(body)}))

    async def _answered(self, method: str, path: str, options: Mapping[str, Any]) -> Any:
        response = await self._sent(self._http.build_request(method, path, headers=JSON, **options))
        await response.aread()
        await response.aclose()
        return checked(response).json()

    async def _opened(self, content: str) -> RemoteRequest:
        """A request that the server has laid out."""
        response = await self._sent(self._http.build_request("POST", "/v1/engine/stream", headers=JSON, content=content))
        if "text/event-stream" not in response.headers.get("content-type", ""):
            await response.aread()
            checked(response, "text/event-stream")
        request = RemoteRequest(RemoteEvents(self._loop))
        request.events.begin(asyncio.ensure_future(read(response, request)))
        return request

    async def _sent(self, request: httpx.Request) -> httpx.Response:
        """The response. A server that is full is asked again when it says, within RETRY_S."""
        end = time.monotonic() + RETRY_S
        while True:
            try:
                response = await self._http.send(request, stream=True)
            except self._httpx.TransportError as error:
                told = f"{self._url!r}: no server answers ({error or type(error).__name__}); start one with `agentcache serve MODEL`"
                raise EngineClosedError(told) from error
            pause = response.headers.get("retry-after", "")
            if response.status_code != 429 or not pause.isdecimal() or time.monotonic() + int(pause) > end:
                return response
            await response.aclose()
            await asyncio.sleep(int(pause))

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of a coroutine on the client's thread."""
        with self._gate:
            try:
                self.check_open()
            except EngineClosedError:
                work.close()
                raise
            running = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return running.result()
        except futures.CancelledError as error:
            raise EngineClosedError("the engine was closed while it asked the server") from error
        finally:
            running.cancel()  # the caller was interrupted


JSON = {"Content-Type": "application/json"}


def _shared(model: str, tokenizer: None, *, base_url: str, api_key: str | None) -> RemoteEngine:
    return RemoteEngine(base_url, api_key, model=model)


def _caller(engine: weakref.ref[RemoteEngine]) -> Callable[[str, str, Mapping[str, Any]], Any]:
    """Calls of an engine that its own parts make, without keeping it alive."""

    def call(method: str, path: str, body: Mapping[str, Any]) -> Any:
        owner = engine()
        if owner is None:
            raise EngineClosedError("the engine is closed: create a new one")
        return owner._call(method, path, body)

    return call


def _plain(said: Any) -> Any:
    """Messages, or volatile text, as JSON has them."""
    if isinstance(said, Message):
        return plain_message(0, said)
    if isinstance(said, (str, Mapping)):
        return said
    if isinstance(said, Seq):
        return [one if isinstance(one, str) else plain_message(index, one) for index, one in enumerate(said)]
    raise errors.MessageError(f"messages must be a list of messages or a string prompt, got {type(said).__name__}")


def _end(
    process: int, loop: asyncio.AbstractEventLoop, http: httpx.AsyncClient, thread: threading.Thread, gate: threading.Lock
) -> None:  # fmt: skip
    if process != os.getpid() or loop.is_closed() or thread is threading.current_thread():  # in a child the thread is the parent's
        return

    async def end() -> None:
        tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await http.aclose()

    with gate:
        ended = asyncio.run_coroutine_threadsafe(end(), loop)
    ended.result()
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()
