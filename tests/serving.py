"""Servers on a loopback port, with tools, keys and a store of the test's own; and the one that a command would run."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from typer.testing import CliRunner

from agentcache import Engine
from agentcache.cli.app import app
from agentcache.server.app import create_app
from agentcache.server.listening import EndingServer, listening
from agentcache.server.registered_tools import RegisteredTools
from agentcache.server.served_models import ServedModel, ServedModels
from agentcache.server.state import ServerState
from agentcache.server.tenants import Tenants
from tests import models

TIDE = {
    "type": "function",
    "function": {
        "name": "tide",
        "description": "High water in a port",
        "parameters": {"type": "object", "properties": {"port": {"type": "string"}}, "required": ["port"]},
    },
}
SYSTEM = "Answer in one sentence. " + "The harbour master reads the tables of the day before he answers. " * 20
ASKED = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": "When is high water in Port Averil?"}]
ENDLESS = {"prompt": "The keeper of the", "max_tokens": 3000, "stream": True}  # for /v1/completions: the embedded model finds no end
ALICE, BOB, ADMIN = "sk-alice-0123456789", "sk-bob-0123456789", "sk-admin-0123456789"
KEYS = f"""
[alice]
key = "{ALICE}"
requests = 2
pages = 3
[bob]
key = "{BOB}"
[root]
key = "{ADMIN}"
admin = true
"""


def embedded(store: Path | None) -> ServedModel:
    """The embedded model under its name."""
    return ServedModel("embedded", lambda say: Engine("embedded", store=store))


def adapted(judge: Path, store: Path | None = None) -> ServedModel:
    """A tiny model under the name "base", with this adapter of it under the name "judge"."""

    def opened(say: object) -> Engine:
        return Engine(models.build("qwen3"), models.toy_tokenizer(), store=store, adapters={"judge": judge})

    return ServedModel("base", opened, adapters=("judge",))


class Served:
    """A running server. url: where it listens."""

    def __init__(self, state: ServerState, port: int, end: ExitStack) -> None:
        self.state, self.url, self._end = state, f"http://127.0.0.1:{port}", end
        self._made: dict[tuple[str, bool], Any] = {}

    def client(self, key: str | None = None, **options: Any) -> httpx.Client:
        """A client with this API key."""
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        options = {"timeout": 120, "trust_env": False, "verify": False, **options}  # there are no certificates to load
        return httpx.Client(base_url=self.url, headers=headers, **options)

    def post(self, path: str, body: Any, status: int = 200) -> dict[str, Any]:
        """The answer to this body, which has this status."""
        with self.client() as http:
            answer = http.post(path, json=body)
        assert answer.status_code == status, answer.text
        told: dict[str, Any] = answer.json()
        return told

    def openai(self, *, strict: bool = False) -> Any:
        """OpenAI's client, closed with the server: a collector may find its sockets before the client that would close them."""
        return self._sdk(pytest.importorskip("openai").OpenAI, f"{self.url}/v1", strict)

    def anthropic(self) -> Any:
        """Anthropic's client, which takes no answer of another shape; closed with the server."""
        return self._sdk(pytest.importorskip("anthropic").Anthropic, self.url, True)

    def _sdk(self, kind: Any, url: str, strict: bool) -> Any:
        if (kind.__name__, strict) not in self._made:
            made = kind(base_url=url, api_key="none", max_retries=0, _strict_response_validation=strict)
            self._made[kind.__name__, strict] = self._end.enter_context(made)
        return self._made[kind.__name__, strict]


@contextmanager
def serving(
    *models: ServedModel,
    store: Path | None = None,
    keys: Path | None = None,
    most: int = 16,
    idle_s: float = 0.0,
    **bounds: Any,
) -> Iterator[Served]:
    """Serve these models, by default the embedded one, until the block ends."""
    served = ServedModels(list(models) or [embedded(store)], idle_s)
    state = ServerState(served, Tenants.read(keys, most), RegisteredTools(store), **bounds)
    with listening("127.0.0.1", 0) as listener, ExitStack() as end:
        server = EndingServer(create_app(state), state.closing)
        thread = threading.Thread(target=server.run, args=([listener],), daemon=True)
        thread.start()
        end.callback(thread.join)
        end.callback(setattr, server, "should_exit", True)
        yield Served(state, listener.getsockname()[1], end)


def ready(served: Served) -> Served:
    """The same server, once its first model can answer."""
    with served.client() as client:
        while client.get("/ready").status_code != 200:
            time.sleep(0.02)
    return served


@contextmanager
def keyed(folder: Path) -> Iterator[Served]:
    """A ready server of the embedded model that asks for KEYS, with a store in this folder."""
    (folder / "keys.toml").write_text(KEYS)
    with serving(store=folder / "store", keys=folder / "keys.toml") as one:
        yield ready(one)


def commanded(monkeypatch: pytest.MonkeyPatch, *words: str) -> tuple[ServerState | None, str]:
    """The server that `agentcache serve` would run with these words, None if it is refused, and what the command says."""
    made: list[ServerState] = []
    monkeypatch.setattr(EndingServer, "run", lambda server, sockets: None)
    monkeypatch.setattr("agentcache.server.app.create_app", made.append)
    done = CliRunner().invoke(app, ["serve", "--port", "0", *words])
    assert done.exit_code == (0 if made else 1), done.output
    return made[0] if made else None, done.output
