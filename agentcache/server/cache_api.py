"""The cache's own routes: tool groups, questions to them, probes, status, receipts, forgetting, health and metrics."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

import anyio.to_thread
from fastapi import APIRouter, Query, Request
from fastapi.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from pydantic import Field

from .. import __version__
from ..errors import GenerationError
from ..types import Reason
from .answers import EVENTS, running, sse
from .chat import chat, with_role
from .errors import ServerError
from .registered_tools import Registered
from .schemas import Body, ChatBody, Messages, Most, Objects
from .served_models import adapter_of
from .state import Caller, ServerState, Serving
from .tenants import Tenant

if TYPE_CHECKING:
    from ..engine import Engine
    from ..store.tool_group import ToolGroup

router = APIRouter()
PROGRESS_S = 1.0  # between two events while nothing changes
CALM_S = 0.2  # between two events at least


class ToolsBody(Body):
    """POST /tools: what every question to this group begins with."""

    name: Annotated[str, Field(min_length=1, max_length=128)]
    system: str = ""
    tools: Objects = Field(default_factory=list)
    ttl_s: Annotated[float | None, Field(gt=0)] = None
    pinned: bool = True


class PinBody(Body):
    """PATCH /tools/{name}: hold a group in memory, or let it be evicted."""

    pinned: bool


class QueryBody(Body):
    """POST /query: a question to a registered group."""

    group: str
    question: str
    max_tokens: Most = None
    tool_choice: str | dict[str, Any] | None = None


class ProbeBody(Body):
    """POST /v1/cache/probe: a conversation, as it would be sent."""

    messages: Messages
    tools: Objects = Field(default_factory=list)
    adapter: str | None = None


class ForgetBody(Body):
    """POST /v1/cache/forget: all of the caller's namespace, or the pages older than so many seconds, or one tool group."""

    group: str | None = None
    older_than: float | None = None


# -- is it there ---------------------------------------------------------------------------------------------------


@router.get("/health", tags=["server"])
async def health(state: Serving) -> Response:
    """Tell that the server lives, and what its models do."""
    models = [model.about() for model in state.models.all]
    first = models[0]["state"]
    return JSONResponse({"status": first if first in ("failed", "loading") else "ok", "version": __version__, "models": models})


@router.get("/ready", tags=["server"])
async def ready(state: Serving) -> Response:
    """200 once the first model can answer, else 503."""
    model = state.models.first
    is_ready = model.state in ("ready", "unloaded") and model.began > 0
    return JSONResponse({"ready": is_ready, **model.about()}, 200 if is_ready else 503, None if is_ready else {"Retry-After": "1"})


@router.get("/v1/models", tags=["openai"])
async def models(state: Serving) -> Response:
    """The models that can be named."""
    return JSONResponse({"object": "list", "data": [_model(name) for name in state.models.names]})


@router.get("/v1/models/{name:path}", tags=["openai"])
async def model(name: str, state: Serving) -> Response:
    """One of them."""
    state.models.get(name)
    return JSONResponse(_model(name))


def _model(name: str) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": 0, "owned_by": "agentcache"}


# -- tool groups ---------------------------------------------------------------------------------------------------


@router.post("/tools", tags=["cache"])
async def register(body: ToolsBody, request: Request, state: Serving, tenant: Caller) -> Response:
    """Compute a tool group once, pin it, and remember it by name."""
    model = body.model if body.model is not None and state.models.get(body.model) else state.models.first.name
    group = Registered(body.name, tenant.namespace, model, body.system, body.tools, body.ttl_s, body.pinned)
    return await _registered(group, request, state, tenant)


@router.patch("/tools/{name:path}", tags=["cache"])
async def pin(name: str, body: PinBody, request: Request, state: Serving, tenant: Caller) -> Response:
    """Pin a tool group, and compute what is gone of it; or release its pin."""
    known = state.group(tenant.namespace, name)
    if known.registered:
        return await _registered(replace(known, pinned=body.pinned), request, state, tenant)
    async with state.models.use(known.model) as engine:  # a client pinned it: what it is computed from is not known here
        if not body.pinned:
            engine.release(name, namespace=tenant.namespace)
        state.records.wake()
        return JSONResponse(_about(known, None, body.pinned))


async def _registered(group: Registered, request: Request, state: ServerState, tenant: Tenant) -> Response:
    state.tools.check_room(group)
    async with running(state, request, group.model) as engine:
        made = await _warmed(engine, group, tenant)
        state.tools.add(group)
        state.tools.use(group.namespace, group.name)
        state.records.wake()
        return JSONResponse({**_about(group, made, True), "computed_tokens": made.computed_tokens, "warm_ms": made.warm_ms})


async def _warmed(engine: Engine, group: Registered, tenant: Tenant) -> ToolGroup:
    """The group's pages, pinned if it is. PolicyError: the tenant would pin more than it may."""

    def warm() -> ToolGroup:
        named: dict[str, Any] = {"name": group.name, "namespace": group.namespace, "adapter": adapter_of(engine, group.model)}
        deleted = engine.store.deletions.generation
        try:
            made = engine.warm(group.system or None, group.tools, **named)
        except GenerationError as error:
            if engine.store.deletions.generation == deleted:
                raise
            raise ServerError(503, str(error), kind="server_error", code="group_forgotten", headers={"Retry-After": "1"}) from error
        if group.pinned:
            tenant.check_pins(made, engine)
        else:
            engine.release(group.name, namespace=group.namespace)
        return made

    return await anyio.to_thread.run_sync(warm)


def _about(group: Registered, made: ToolGroup | None, held: bool) -> dict[str, Any]:
    """A tool group as it is listed. made: its pages, in memory or on disk. held: in memory now."""
    told = {
        "name": group.name,
        "namespace": group.namespace,
        "model": group.model,
        "tools": [str(tool.get("function", tool).get("name", "")) for tool in group.tools],
        "ttl_s": group.ttl_s,
        "pinned": held and group.pinned,
        "status": "pinned" if not group.registered else "warm" if held else "registered",
        "tier": "memory" if held else "disk" if made else None,
    }
    if made is None:
        return {**told, "digest": None, "prefix_tokens": None, "pages": None, "bytes": None, "created": None}
    sizes = {"prefix_tokens": made.prefix_tokens, "pages": made.pages, "bytes": made.kv_bytes + made.checkpoint_bytes}
    return {**told, "digest": made.page_keys[-1], **sizes, "created": made.created}


@router.get("/tools", tags=["cache"])
async def groups(state: Serving, tenant: Caller) -> Response:
    """The tool groups of the caller."""
    return JSONResponse({"groups": _groups(state, tenant.namespace)})


def _groups(state: ServerState, namespace: str | None) -> list[dict[str, Any]]:
    engines = state.models.engines
    pinned = {(name, one.namespace, one.name): one for name, engine in engines.items() for one in engine.groups}
    asked: dict[tuple[str, str | None], list[int]] = {}  # cached tokens of the last requests that wanted reuse
    for record in state.records.last(namespace, 1 << 30):
        if record.receipt and not any(refusal.reason == Reason.REUSE_OFF for refusal in record.receipt.refusals):
            asked.setdefault((record.namespace, record.group), []).append(record.receipt.cached_tokens)
    told = []
    for group in state.groups(namespace):
        owner = state.models.owner(group.model)
        made = pinned.get((owner, group.namespace, group.name))
        stored = made or _stored(engines.get(owner), group)
        cached = asked.get((group.namespace, group.name), [])
        hits = sum(tokens >= stored.prefix_tokens for tokens in cached) if stored else 0
        told.append({**_about(group, stored, made is not None), "requests": len(cached), "hits": hits})
    return told


def _stored(engine: Engine | None, group: Registered) -> ToolGroup | None:
    """Its manifest on disk, with the size of its pages."""
    if engine is None or engine.closed or engine.fingerprint is None:
        return None
    from ..matching import fingerprint_of  # loads torch, as the engine has

    adapter = engine.model.adapters.get(engine.adapters.get(group.model, ""))
    fingerprint, spec = fingerprint_of(engine.fingerprint.last_digest or engine.fingerprint.whole, adapter), engine.model.spec
    found = engine.store.recorded(group.namespace, group.name, fingerprint)
    return replace(found, kv_bytes=found.prefix_tokens * spec.token_bytes) if found and spec else found


@router.delete("/tools/{name:path}", tags=["cache"])
async def delete(name: str, state: Serving, tenant: Caller) -> Response:
    """Delete a tool group, in memory and on disk."""
    return JSONResponse({"deleted": name, **await _forget(state, tenant.namespace, state.group(tenant.namespace, name))})


@router.post("/query", tags=["cache"], responses=EVENTS)
async def query(body: QueryBody, request: Request, state: Serving, tenant: Caller) -> Response:
    """Ask a registered group a question."""
    group = state.tools.find(tenant.namespace, body.group)
    async with running(state, request, group.model) as engine:
        if group.pinned and not any((one.namespace, one.name) == (group.namespace, group.name) for one in engine.groups):
            await _warmed(engine, group, tenant)  # its time was over
    messages = [{"role": "system", "content": group.system}] if group.system else []
    messages.append({"role": "user", "content": body.question})
    said = body.model_dump(exclude={"group", "question"}, exclude_none=True) | {"model": group.model}
    asked = ChatBody(messages=messages, tools=group.tools or None, **said)
    request.state.group = group.name
    return await chat(asked, request, state, tenant)


# -- looking, and forgetting ---------------------------------------------------------------------------------------


@router.post("/v1/cache/probe", tags=["cache"])
async def probe(body: ProbeBody, request: Request, state: Serving, tenant: Caller) -> Response:
    """Tell how many tokens of a prompt would be found, in which tier, and why no more."""
    async with running(state, request, body.model) as engine:
        messages = [with_role(message) for message in body.messages]
        volatile = tuple(body.volatile or ())

        def look() -> dict[str, Any]:
            adapter, most = body.adapter or adapter_of(engine, body.model), engine.model.context_tokens
            asked: dict[str, Any] = {"namespace": tenant.namespace, "volatile": volatile, "adapter": adapter, "most_tokens": most}
            return engine.probe(messages, body.tools, **asked).as_dict()

        return JSONResponse(await anyio.to_thread.run_sync(look))


@router.post("/v1/cache/forget", tags=["cache"])
async def forget(body: ForgetBody, state: Serving, tenant: Caller) -> Response:
    """Delete what the caller's namespace has cached, in memory and on disk, and its stored responses."""
    group = None if body.group is None else state.tools.find(tenant.namespace, body.group)
    return JSONResponse(await _forget(state, tenant.namespace, group, body.older_than, body.model))


async def _forget(
    state: ServerState, namespace: str, group: Registered | None, older_than: float | None = None, model: str | None = None
) -> dict[str, Any]:
    """Delete a tool group, by the model that holds it or, if that is served no more, by any; without one, the namespace's pages of all."""
    name = None if group is None else group.name
    if group is not None:
        model = group.model if group.model in state.models.names else None
    async with AsyncExitStack() as stack:
        engines = [await stack.enter_async_context(state.models.use(model))]
        for other in () if model or group else state.models.all:  # without a store each knows only its own
            if other.name in state.models.engines and other.engine not in engines:  # kept open: an idle one may be closed at any time
                engines.append(await stack.enter_async_context(state.models.use(other.name)))
        wanted: dict[str, Any] = {"namespace": namespace, "group": name, "older_than": older_than}
        done = await anyio.to_thread.run_sync(lambda: [one.forget(**wanted) for one in engines])
    if group is not None:
        state.tools.drop(group)
    else:
        from ..store.deletion import Deletion  # loads numpy, as the engine has

        state.responses.forget(Deletion(namespace, None if older_than is None else time.time() - older_than))
    state.records.wake()
    sums = {"memory_pages": "memory_pages", "disk_pages": "pages", "disk_bytes": "bytes"}
    groups = sorted({group for one in done for group in one.groups})
    return {**{said: sum(getattr(one, count) for one in done) for said, count in sums.items()}, "groups": groups}


@router.get("/status", tags=["cache"])
async def status(state: Serving, tenant: Caller, last: Annotated[int, Query(ge=0, le=200)] = 20) -> Response:
    """Models, tool groups, tiers and the last requests of the caller; of all callers for an admin."""
    return JSONResponse(_status(state, tenant, last))


def _status(state: ServerState, tenant: Tenant, last: int) -> dict[str, Any]:
    namespace = None if tenant.admin else tenant.namespace
    records = state.records.last(namespace, 1 << 30)
    sums: dict[str, Counter[str]] = {"tokens": Counter(), "refusals": Counter()}
    for engine in state.models.engines.values():
        for family, counts in engine.stats(namespace).items():
            sums.get(family, Counter()).update(counts)
    cached = sum(sums["tokens"][source] for source in ("memory", "disk", "segment"))
    prompt = cached + sums["tokens"]["computed"]
    return {
        "version": __version__,
        "namespace": tenant.namespace,
        "models": [{**model.about(), **_tiers(model.engine)} for model in state.models.all],
        "groups": _groups(state, namespace),
        "requests": {"running": state.tenants.running if tenant.admin else tenant.running, "known": len(records)},
        "tokens": {"prompt": prompt, "cached": cached, "hit_share": cached / prompt if prompt else 0.0},
        "refusals": sums["refusals"],
        "last": [record.as_dict() for record in records[:last]],
    }


def _tiers(engine: Engine | None) -> dict[str, Any]:
    """Counts of an engine's tiers: nothing of any prompt."""
    if engine is None or engine.closed:
        return {"device": None, "memory": None, "disk": None}
    tree, disk = engine.store.tree.audit(), engine.store.disk
    return {
        "device": str(engine.model.device),
        "memory": {
            "bytes": tree["bytes"],
            "budget_bytes": engine.store.budget_bytes,
            "pages": tree["pages"],
            "pinned_pages": tree["pinned_pages"],
        },
        "disk": None if disk is None else {"folder": str(disk.folder.path), "budget_bytes": disk.options.disk_bytes},
    }


@router.get("/v1/receipts/{identity}", tags=["cache"])
async def receipt(identity: str, state: Serving, tenant: Caller) -> Response:
    """The receipt of one of the last requests."""
    found = state.records.find(identity, None if tenant.admin else tenant.namespace)
    if found is None:
        raise ServerError(404, f"there is no receipt {identity!r} among the last requests", code="receipt_not_found")
    return JSONResponse(found.as_dict())


@router.get("/events", tags=["cache"], responses=EVENTS)
async def events(request: Request, state: Serving, tenant: Caller) -> Response:
    """The status again and again, as server-sent events: whenever a request begins or ends, and while a model loads."""

    async def told() -> AsyncIterator[str]:
        while not state.closing.is_set():
            seen = state.records.changes
            loading = any(model.state == "loading" for model in state.models.all)
            yield sse(_status(state, tenant, 20), "status")
            if "head" in request.scope:
                return
            await asyncio.sleep(CALM_S)
            for _ in range(1 if loading else 15):
                if seen == state.records.changes and not state.closing.is_set():
                    await state.records.wait(PROGRESS_S)

    return StreamingResponse(told(), media_type="text/event-stream", headers={"Cache-Control": "no-cache"})


@router.get("/metrics", tags=["server"], response_class=PlainTextResponse)
async def metrics(state: Serving, tenant: Caller) -> Response:
    """Counters for Prometheus."""
    if not tenant.admin:
        raise ServerError(403, "this key may not read the metrics", kind="permission_error", code="forbidden")
    return Response(generate_latest(state.metrics), media_type=CONTENT_TYPE_LATEST)
