"""Engine's own interface over HTTP, for agentcache's client: requests as `Engine.stream` takes them, and all that its completion holds."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any, Literal

import anyio.to_thread
from fastapi import APIRouter, Query, Request
from fastapi.responses import JSONResponse, Response
from pydantic import ConfigDict, Field

from ..documents import PACK_TOKENS
from ..errors import ConfigError, PolicyError
from ..model_facts import ModelFacts
from ..types import Constraint, Rendering, Reuse, Sampling, ToolOrder
from .answers import EVENTS, Answer, EventStream, opened, running, sse
from .chat import failed_event
from .schemas import Ids, Messages, Objects, Strict, Text, Texts
from .served_models import adapter_of
from .state import ServerState, Serving
from .tenants import Tenant

if TYPE_CHECKING:
    from ..engine import Engine
    from ..stream import Stream

router = APIRouter(prefix="/v1/engine", tags=["engine"])


class EngineBody(Strict):
    """A body of these routes."""

    model_config = ConfigDict(allow_inf_nan=False)
    model: str | None = None


class CallBody(EngineBody):
    """Arguments of one of the engine's calls. A model's name may be that of an adapter."""

    adapter: str | None = None

    def options(self, engine: Engine) -> dict[str, Any]:
        """The arguments by name."""
        given = {name: getattr(self, name) for name in type(self).model_fields if name != "model"}
        return {**given, "adapter": self.adapter or adapter_of(engine, self.model)}


class PromptBody(CallBody):
    """Parts of a prompt, as `Engine.stream` takes them."""

    messages: Text | Messages
    tools: Objects = Field(default_factory=list)
    tools_order: ToolOrder = "given"
    group: str | None = None
    template_kwargs: dict[str, Any] | None = None


class StreamBody(PromptBody):
    """POST /v1/engine/stream."""

    sampling: Sampling | None = None
    constraint: Constraint | None = None
    volatile: Text | dict[str, Any] | Annotated[list[Text | dict[str, Any]], Field(fail_fast=True)] = Field(default_factory=list)
    turn: str = ""
    session: str | None = None
    reuse: Reuse | None = None
    rendering: Rendering = "canonical"
    diagnose: Literal["", "routes"] = ""


class PinBody(PromptBody):
    """POST /v1/engine/pin."""

    messages: Messages
    name: Annotated[str | None, Field(min_length=1, max_length=128)] = None
    ttl_s: Annotated[float | None, Field(gt=0)] = None


class RenderBody(EngineBody):
    """POST /v1/engine/render: a prompt, or a text without a template."""

    messages: Messages | None = None
    tools: Objects = Field(default_factory=list)
    template_kwargs: dict[str, Any] | None = None
    text: Text | None = None


class DecodeBody(EngineBody):
    """POST /v1/engine/decode."""

    ids: Ids


class ReleaseBody(EngineBody):
    """POST /v1/engine/release."""

    name: str


class ForgetBody(EngineBody):
    """POST /v1/engine/forget, as `Engine.forget` takes it."""

    group: str | None = None
    session: str | None = None
    older_than: float | None = None


class ArrangeBody(CallBody):
    """POST /v1/engine/arrange, as `Engine.arrange` takes it."""

    passages: list[Any]  # texts, as in messages: half a character is replaced
    messages: Messages
    tools: Objects = Field(default_factory=list)
    tools_order: ToolOrder = "given"
    template_kwargs: dict[str, Any] | None = None


class LearnBody(CallBody):
    """POST /v1/engine/learn, as `Engine.learn` takes it."""

    texts: dict[str, Any] | list[Any]  # as `passages`
    system: Text | None = None
    tools: Objects = Field(default_factory=list)
    name: Annotated[str, Field(min_length=1, max_length=128)] = "documents"
    messages: Messages = Field(default_factory=list)
    separator: Text = "\n\n"
    pack_tokens: Annotated[int, Field(ge=1)] = PACK_TOKENS


class NamedBody(EngineBody):
    """GET /v1/engine/documents: of one name, or of all."""

    name: str | None = None


class UnlearnBody(EngineBody):
    """POST /v1/engine/unlearn."""

    sources: Texts
    name: str = "documents"


@router.post("/stream", responses=EVENTS)
async def stream(body: StreamBody, request: Request, state: Serving) -> Response:
    """Answer a prompt in events: chunks with their deltas, then the completion."""

    def ask(engine: Engine, namespace: str) -> Stream:
        return engine.stream(**body.options(engine), namespace=namespace)

    async with AsyncExitStack() as stack:
        answer = await opened(state, request, stack, body.model, "engine", ask)
        return EventStream(state, stack.pop_all(), answer, _events(answer), failed=failed_event, end=": end\n\n")


async def _events(answer: Answer) -> AsyncIterator[str]:
    last: list[dict[str, Any]] = []
    async for chunk, deltas in answer.stream.aparts():
        last = [asdict(delta) for delta in deltas]
        if chunk.ids or chunk.text:
            yield sse({"text": chunk.text, "ids": chunk.ids, "deltas": last}, "chunk")
    completion = answer.stream.completion
    yield sse({**asdict(completion), "receipt": completion.receipt.as_dict(), "deltas": last}, "completion")


Work = Callable[["Engine", Tenant, Any], Any]


def _call(path: str, kind: type[EngineBody], method: str = "POST") -> Callable[[Work], Work]:
    """Make a route of work(engine, tenant, said), which runs on a thread; said: the body, of a GET the query."""

    def routed(work: Work) -> Work:
        async def route(said: Any, request: Request) -> Response:
            state: ServerState = request.app.state.server
            tenant: Tenant = request.state.tenant
            async with running(state, request, said.model) as engine:
                return JSONResponse(await anyio.to_thread.run_sync(work, engine, tenant, said))

        route.__annotations__["said"] = kind if method == "POST" else Annotated[kind, Query()]
        router.add_api_route(path, route, methods=[method], name=work.__name__, description=work.__doc__)
        return work

    return routed


@_call("", EngineBody, "GET")
def facts(engine: Engine, tenant: Tenant, asked: EngineBody) -> dict[str, Any]:
    """Tell what a client asks about a model before it uses it."""
    said = {"name": engine.name, "context_tokens": engine.model.context_tokens, "namespace": tenant.namespace}
    return {**asdict(ModelFacts.of_engine(engine)), **said, "eos_token_id": engine.tokenizer.eos_token_id}


@_call("/render", RenderBody)
def render(engine: Engine, tenant: Tenant, body: RenderBody) -> dict[str, Any]:
    """The token ids of a prompt, and its text."""
    if body.messages is None:
        return {"ids": list(engine.tokenizer(body.text or "", add_special_tokens=False)["input_ids"]), "text": body.text or ""}
    layout = engine.renderer.render(body.messages, body.tools, namespace=tenant.namespace, template_kwargs=body.template_kwargs)
    return {"ids": list(layout.ids), "text": layout.text}


@_call("/decode", DecodeBody)
def decode(engine: Engine, tenant: Tenant, body: DecodeBody) -> dict[str, str]:
    """The text of token ids."""
    if body.ids and max(body.ids) >= engine.model.vocab:
        raise ConfigError(f"ids={max(body.ids)!r}: the vocabulary has {engine.model.vocab} tokens")
    return {"text": str(engine.tokenizer.decode(body.ids))}


@_call("/pin", PinBody)
def pin(engine: Engine, tenant: Tenant, body: PinBody) -> dict[str, Any]:
    """Pin the start of a conversation."""
    made = engine.pin(**body.options(engine), namespace=tenant.namespace)
    tenant.check_pins(made, engine)
    return asdict(made)


@_call("/release", ReleaseBody)
def release(engine: Engine, tenant: Tenant, body: ReleaseBody) -> dict[str, bool]:
    """Unpin a tool group of the caller."""
    return {"released": engine.release(body.name, namespace=tenant.namespace)}


@_call("/groups", EngineBody, "GET")
def groups(engine: Engine, tenant: Tenant, asked: EngineBody) -> dict[str, Any]:
    """The tool groups of the caller that are pinned now."""
    return {"groups": [asdict(group) for group in engine.groups if group.namespace == tenant.namespace]}


@_call("/arrange", ArrangeBody)
def arrange(engine: Engine, tenant: Tenant, body: ArrangeBody) -> dict[str, Any]:
    """The order of passages in which most of them are cached for the caller."""
    return asdict(engine.arrange(**body.options(engine), namespace=tenant.namespace))


@_call("/learn", LearnBody)
def learn(engine: Engine, tenant: Tenant, body: LearnBody) -> dict[str, Any]:
    """Compute texts for later prompts of the caller. Those with which the caller would pin too much are deleted again."""
    before = {group.name for group in engine.groups if group.namespace == tenant.namespace}
    learnt = engine.learn(**body.options(engine), namespace=tenant.namespace)
    made = [group for group in engine.groups if group.namespace == tenant.namespace and group.name not in before]
    try:
        for group in made:
            tenant.rule.check_pins(group, engine.groups)
    except PolicyError:
        for group in made:
            engine.forget(group=group.name, namespace=tenant.namespace)
        raise
    return asdict(learnt)


@_call("/documents", NamedBody, "GET")
def documents(engine: Engine, tenant: Tenant, asked: NamedBody) -> dict[str, Any]:
    """The texts that are learnt for the caller."""
    return {"documents": [asdict(document) for document in engine.documents(asked.name, namespace=tenant.namespace)]}


@_call("/unlearn", UnlearnBody)
def unlearn(engine: Engine, tenant: Tenant, body: UnlearnBody) -> dict[str, int]:
    """Release texts of the caller by name."""
    return {"released": engine.unlearn(body.sources, name=body.name, namespace=tenant.namespace)}


@_call("/stats", EngineBody, "GET")
def stats(engine: Engine, tenant: Tenant, asked: EngineBody) -> dict[str, Any]:
    """Counts of the caller's requests; those of all callers, the device and the store for an admin."""
    return engine.stats(None if tenant.admin else tenant.namespace)


@_call("/forget", ForgetBody)
def forget(engine: Engine, tenant: Tenant, body: ForgetBody) -> dict[str, Any]:
    """Delete pages of the caller, in memory and on disk."""
    return asdict(engine.forget(namespace=tenant.namespace, **body.model_dump(exclude={"model"})))
