"""Engine's own interface over HTTP, for agentcache's client: requests as `Engine.stream` takes them, and all that its completion holds."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any, Literal

import anyio.to_thread
from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response
from pydantic import BaseModel, ConfigDict, Field

from ..documents import PACK_TOKENS
from ..errors import ConfigError, PolicyError
from ..model_facts import ModelFacts
from ..types import Constraint, Rendering, Reuse, Sampling, ToolOrder
from .answers import EVENTS, Answer, EventStream, opened, sse
from .chat import failed_event
from .schemas import Messages, Text
from .served_models import adapter_of
from .state import ServerState, Serving
from .tenants import Tenant

if TYPE_CHECKING:
    from ..engine import Engine
    from ..stream import Stream

router = APIRouter(prefix="/v1/engine", tags=["engine"])
Objects = list[dict[str, Any]]


class EngineBody(BaseModel):
    """A body of these routes: unknown parameters are refused."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)
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
    volatile: Text | dict[str, Any] | list[Text | dict[str, Any]] = Field(default_factory=list)
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

    ids: list[Annotated[int, Field(ge=0, lt=1 << 31)]]


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


class UnlearnBody(EngineBody):
    """POST /v1/engine/unlearn."""

    sources: list[Text]
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


async def _run(request: Request, model: str | None, work: Callable[[Engine, Tenant], Any]) -> Response:
    """The result of `work` with an engine, on a thread."""
    state: ServerState = request.app.state.server
    tenant: Tenant = request.state.tenant
    with state.admit(tenant):
        async with state.models.use(model) as engine:
            return JSONResponse(await anyio.to_thread.run_sync(work, engine, tenant))


@router.get("")
async def facts(request: Request, model: str | None = None) -> Response:
    """Tell what a client asks about a model before it uses it."""

    def told(engine: Engine, tenant: Tenant) -> dict[str, Any]:
        said = {"name": engine.name, "context_tokens": engine.model.context_tokens, "namespace": tenant.namespace}
        return {**asdict(ModelFacts.of_engine(engine)), **said, "eos_token_id": engine.tokenizer.eos_token_id}

    return await _run(request, model, told)


@router.post("/render")
async def render(body: RenderBody, request: Request) -> Response:
    """The token ids of a prompt, and its text."""

    def work(engine: Engine, tenant: Tenant) -> dict[str, Any]:
        if body.messages is None:
            return {"ids": list(engine.tokenizer(body.text or "", add_special_tokens=False)["input_ids"]), "text": body.text or ""}
        layout = engine.renderer.render(body.messages, body.tools, namespace=tenant.namespace, template_kwargs=body.template_kwargs)
        return {"ids": list(layout.ids), "text": layout.text}

    return await _run(request, body.model, work)


@router.post("/decode")
async def decode(body: DecodeBody, request: Request) -> Response:
    """The text of token ids."""

    def work(engine: Engine, tenant: Tenant) -> dict[str, str]:
        if body.ids and max(body.ids) >= engine.model.vocab:
            raise ConfigError(f"ids={max(body.ids)!r}: the vocabulary has {engine.model.vocab} tokens")
        return {"text": str(engine.tokenizer.decode(body.ids))}

    return await _run(request, body.model, work)


@router.post("/pin")
async def pin(body: PinBody, request: Request) -> Response:
    """Pin the start of a conversation."""

    def work(engine: Engine, tenant: Tenant) -> dict[str, Any]:
        made = engine.pin(**body.options(engine), namespace=tenant.namespace)
        tenant.check_pins(made, engine)
        return asdict(made)

    return await _run(request, body.model, work)


@router.post("/release")
async def release(body: ReleaseBody, request: Request) -> Response:
    """Unpin a tool group of the caller."""
    return await _run(request, body.model, lambda engine, tenant: {"released": engine.release(body.name, namespace=tenant.namespace)})


@router.get("/groups")
async def groups(request: Request, model: str | None = None) -> Response:
    """The tool groups of the caller that are pinned now."""

    def work(engine: Engine, tenant: Tenant) -> dict[str, Any]:
        return {"groups": [asdict(group) for group in engine.groups if group.namespace == tenant.namespace]}

    return await _run(request, model, work)


@router.post("/arrange")
async def arrange(body: ArrangeBody, request: Request) -> Response:
    """The order of passages in which most of them are cached for the caller."""

    def work(engine: Engine, tenant: Tenant) -> dict[str, Any]:
        return asdict(engine.arrange(**body.options(engine), namespace=tenant.namespace))

    return await _run(request, body.model, work)


@router.post("/learn")
async def learn(body: LearnBody, request: Request) -> Response:
    """Compute texts for later prompts of the caller. Those with which the caller would pin too much are deleted again."""

    def work(engine: Engine, tenant: Tenant) -> dict[str, Any]:
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

    return await _run(request, body.model, work)


@router.get("/documents")
async def documents(request: Request, model: str | None = None, name: str | None = None) -> Response:
    """The texts that are learnt for the caller."""

    def work(engine: Engine, tenant: Tenant) -> dict[str, Any]:
        return {"documents": [asdict(document) for document in engine.documents(name, namespace=tenant.namespace)]}

    return await _run(request, model, work)


@router.post("/unlearn")
async def unlearn(body: UnlearnBody, request: Request) -> Response:
    """Release texts of the caller by name."""

    def work(engine: Engine, tenant: Tenant) -> dict[str, int]:
        return {"released": engine.unlearn(body.sources, name=body.name, namespace=tenant.namespace)}

    return await _run(request, body.model, work)


@router.get("/stats")
async def stats(request: Request, model: str | None = None) -> Response:
    """Counts of the caller's requests; those of all callers, the device and the store for an admin."""
    return await _run(request, model, lambda engine, tenant: engine.stats(None if tenant.admin else tenant.namespace))


@router.post("/forget")
async def forget(body: ForgetBody, request: Request) -> Response:
    """Delete pages of the caller, in memory and on disk."""

    def work(engine: Engine, tenant: Tenant) -> dict[str, Any]:
        return asdict(engine.forget(namespace=tenant.namespace, **body.model_dump(exclude={"model"})))

    return await _run(request, body.model, work)
