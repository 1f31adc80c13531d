"""The server's application: routes, tenants, bounds, and its start and end."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .. import __version__, extras
from ..errors import AgentCacheError
from . import cache_api, chat, engine_api, messages, page, responses
from .errors import Problem, ServerError, problems
from .state import ServerState

LOCAL = ("127.0.0.1", "localhost", "::1")  # names that a request may be sent to where no key is asked for
OPEN = ("/health", "/ready", "/openapi.json", *page.FILES)  # without a key


def create_app(state: ServerState) -> FastAPI:
    """The application over these models and tenants."""
    extras.library("fastapi", "0.132", "server", "serve")  # older ones read a body without a type, which a page of any site may send

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        state.models.first.load()
        looking = asyncio.create_task(state.models.look_after())
        yield
        looking.cancel()
        with suppress(asyncio.CancelledError):
            await looking
        await state.models.close()

    told = problems(Problem)
    app = FastAPI(title="agentcache", version=__version__, lifespan=lifespan, docs_url=None, redoc_url=None, responses=told)
    app.state.server = state
    app.openapi = partial(_described, app, app.openapi)  # type: ignore[method-assign]
    for router in (chat.router, responses.router, messages.router, cache_api.router, engine_api.router, page.router):
        app.include_router(router)
    app.add_exception_handler(HTTPException, _refused)
    app.add_exception_handler(RequestValidationError, _invalid)
    app.add_exception_handler(AgentCacheError, _failed)
    app.add_exception_handler(Exception, _broken)
    app.add_middleware(Gate, state=state)
    return app


def _described(app: FastAPI, describe: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """The OpenAPI document; FastAPI's own status of a wrong body is 400 here."""
    if app.openapi_schema is None:
        for methods in describe()["paths"].values():
            for operation in methods.values():
                operation["responses"].pop("422", None)
    assert app.openapi_schema is not None
    return app.openapi_schema


class Gate:
    """Checks that every request passes first: its host, its key, and the size of its body."""

    def __init__(self, app: ASGIApp, state: ServerState) -> None:
        self._app, self._state = app, state

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in scope["headers"]}
        try:
            self._check_host(headers.get("host", ""))
            if scope["path"] not in OPEN:
                tenant = self._state.tenants.of(headers.get("authorization"), headers.get("x-api-key"))
                scope.setdefault("state", {})["tenant"] = tenant
            self._check_size(int(headers.get("content-length") or 0))
        except ServerError as error:
            await _response(error, scope)(scope, receive, send)
            return
        except ValueError:
            await _response(ServerError(400, "content-length is no number"), scope)(scope, receive, send)
            return
        if scope["method"] == "HEAD":  # as monitors ask; the socket's server leaves out the body
            scope = {**scope, "method": "GET", "head": True}
        await self._app(scope, self._bounded(receive), send)

    def _check_host(self, host: str) -> None:
        """A page of another site must not reach a server that asks for no key, by a name that was made to lead here."""
        name = re.sub(r"(?<!:):\d*$", "", host).strip("[]").lower()
        if not self._state.tenants.asks_for_keys and name not in LOCAL:
            raise ServerError(403, f"host {host!r} is not one of this machine: give --keys to serve other hosts", code="forbidden_host")

    def _check_size(self, size: int) -> None:
        if size > self._state.body_bytes:
            raise ServerError(413, f"the body has {size} bytes, at most {self._state.body_bytes} are read", code="body_too_large")

    def _bounded(self, receive: Receive) -> Receive:
        """A body of unknown length is bounded as it comes."""
        read = 0

        async def bounded() -> Message:
            nonlocal read
            message = await receive()
            read += len(message.get("body", b""))
            self._check_size(read)
            return message

        return bounded


def _response(error: ServerError, scope: Scope) -> Response:
    body = error.anthropic if scope["path"].startswith(messages.ROUTE) else error.body
    return JSONResponse(body, error.status_code, dict(error.headers or {}))


async def _refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    if not isinstance(error, ServerError):
        code = {404: "not_found", 400: "invalid_json"}.get(error.status_code)  # FastAPI's 400: a body that json cannot read
        way = {404: "; OpenAI's and Anthropic's APIs lie under /v1, and GET /openapi.json tells of all routes"}
        way |= {400: "; send JSON in UTF-8, neither compressed nor nested so deep"}
        detail = f"{request.method} {request.url.path}: {error.detail}{way.get(error.status_code, '')}"
        error = ServerError(error.status_code, detail, code=code, headers=error.headers)
    return _response(error, request.scope)


async def _failed(request: Request, error: Exception) -> Response:
    assert isinstance(error, AgentCacheError)
    return _response(ServerError.of(error), request.scope)


async def _broken(request: Request, error: Exception) -> Response:
    """A fault of the server, which its log shows."""
    said = f"{request.method} {request.url.path}: {type(error).__name__}: a fault of the server; its log says where"
    return _response(ServerError(500, said, kind="server_error", code="internal_error"), request.scope)


async def _invalid(request: Request, error: Exception) -> Response:
    """A body that is no JSON, or not of this shape: 400 as OpenAI says it, with the first place that is wrong."""
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    kind = str(first["type"])
    place = "" if kind == "json_invalid" else ".".join(str(part) for part in first["loc"] if part != "body")
    unknown = kind == "extra_forbidden"
    said = f"{place}: this parameter is not known here: leave it out" if unknown else f"{place or 'body'}: {first['msg']}"
    if kind == "json_invalid":
        said = f"body: is no JSON: {first['ctx']['error']} at character {first['loc'][-1]}"
    if kind == "none_required":
        said = f"{place}={first['input']!r:.200}: cannot be honoured here: leave it out"
    if kind == "model_attributes_type" and not place and "json" not in request.headers.get("content-type", ""):
        said = f"content-type={request.headers.get('content-type', '')!r}: send the header content-type: application/json"
    code = "unknown_parameter" if unknown else "invalid_json" if kind == "json_invalid" else "invalid_type"
    return _response(ServerError(400, said, param=place or None, code=code), request.scope)
