"""The models that a server serves: loaded in the background, or when first asked for, and closed after an idle time. Knows no HTTP."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from ..errors import AgentCacheError
from .errors import ServerError

if TYPE_CHECKING:
    from ..engine import Engine

State = Literal["unloaded", "loading", "ready", "failed"]
LOOK_S = 1.0
log = logging.getLogger("agentcache")


@dataclass(eq=False)
class ServedModel:
    """One model by name. open: makes its engine, on a thread of its own; it is told a function that says what is done.

    adapters: their names, which requests give as those of models.
    """

    name: str
    open: Callable[[Callable[[str], None]], Engine]
    state: State = "unloaded"
    # what is being done, while it loads; the error, once it failed
    phase: str = ""
    # requests that run on it
    busy: int = 0
    # by time.monotonic(), of the start of loading and of the last use
    began: float = 0.0
    used: float = field(default_factory=time.monotonic)
    engine: Engine | None = None
    adapters: tuple[str, ...] = ()
    _loading: asyncio.Task[Engine] | None = None

    def load(self) -> asyncio.Task[Engine]:
        """The task that loads it, or has loaded it. Runs on the loop's thread."""
        if self._loading is None:
            self.state, self.phase, self.began = "loading", "starting", time.monotonic()
            self._loading = asyncio.create_task(self._load())
            self._loading.add_done_callback(self._tell_failure)
        return self._loading

    def _tell_failure(self, loading: asyncio.Task[Engine]) -> None:
        """Let the log say why it could not be loaded, for those who asked for nothing yet. A traceback is of use where it is a fault."""
        if not loading.cancelled() and (error := loading.exception()) is not None:
            fault = None if isinstance(error, AgentCacheError) else error
            log.error("model %r could not be loaded: %s", self.name, self.phase, exc_info=fault)

    async def _load(self) -> Engine:
        def say(phase: str) -> None:
            self.phase = phase

        try:
            engine = await asyncio.to_thread(self.open, say)
        except BaseException as error:
            self.state, self.phase, self._loading = "failed", f"{type(error).__name__}: {error}", None
            raise
        self.engine, self.state, self.phase, self.used = engine, "ready", "", time.monotonic()
        return engine

    async def unload(self) -> None:
        """Close its engine; the next request loads it again."""
        if self._loading is not None:
            loading, self._loading = self._loading, None
            await asyncio.wait([loading])
            if loading.exception() is None:  # else `phase` tells of it
                self.engine, self.state = None, "unloaded"
                await asyncio.to_thread(loading.result().close)

    def about(self) -> dict[str, object]:
        """State, in words and seconds."""
        seconds = round(time.monotonic() - self.began, 1) if self.state == "loading" else 0.0
        return {"model": self.name, "state": self.state, "phase": self.phase, "loading_seconds": seconds, "running": self.busy}


class ServedModels:
    """All models of a server. The first one loads at once; idle_s: a model without requests for so long is closed, 0 for never.

    keep: called about once a second, on the loop's thread.
    """

    def __init__(self, models: list[ServedModel], idle_s: float = 0.0) -> None:
        self.all, self.first = models, models[0]
        self._named = {model.name: model for model in models} | {name: model for model in models for name in model.adapters}
        self._idle_s = idle_s
        self.keep: Callable[[], None] = lambda: None

    @property
    def engines(self) -> dict[str, Engine]:
        """The engines of loaded models, by their names."""
        return {model.name: model.engine for model in self.all if model.engine is not None and not model.engine.closed}

    def owner(self, name: str) -> str:
        """The name of the model that an adapter of this name belongs to; else the name."""
        return found.name if (found := self._named.get(name)) else name

    @property
    def names(self) -> list[str]:
        """All names that requests may give: of models, then of adapters."""
        return list(self._named)

    def get(self, name: str | None) -> ServedModel:
        """The model of that name, or under the adapter of that name; the first one for None. ServerError 404: there is none."""
        found = self.first if name is None else self._named.get(name)
        if found is None:
            known = ", ".join(map(repr, self._named))
            raise ServerError(404, f"model={name!r}: there is no such model, only {known}", param="model", code="model_not_found")
        return found

    @asynccontextmanager
    async def use(self, name: str | None, wait: Callable[[Awaitable[object]], Awaitable[object]] | None = None) -> AsyncIterator[Engine]:
        """The engine of that model, loaded if it is not, and kept open until the block ends. wait: for its loading."""
        model = self.get(name)
        model.busy += 1
        try:
            loading = model.load()
            loaded = asyncio.wait([loading])  # which goes on for others, if this request ends
            await (wait(loaded) if wait else loaded)
            if (error := loading.exception()) is not None:
                said = f"model {model.name!r} could not be loaded: {model.phase}"
                raise ServerError(503, said, kind="server_error", code="model_failed", headers={"Retry-After": "5"}) from error
            yield loading.result()
        finally:
            model.busy -= 1
            model.used = time.monotonic()

    async def look_after(self) -> None:
        """Close models that are idle for too long, and call `keep`, for ever."""
        while True:
            await asyncio.sleep(min(LOOK_S, self._idle_s or LOOK_S))
            self.keep()
            for model in self.all:
                idle = self._idle_s and time.monotonic() - model.used >= self._idle_s
                if idle and model.state == "ready" and not model.busy:
                    await model.unload()

    async def close(self) -> None:
        await asyncio.gather(*(model.unload() for model in self.all))


def adapter_of(engine: Engine, name: str | None) -> str | None:
    """The adapter that a request means by the name of a model; None: the model itself."""
    return name if name in engine.adapters else None
