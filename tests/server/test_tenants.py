"""API keys: whose is whose, what each may ask for at once, and who is not answered at all."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from agentcache import Message
from agentcache.errors import ConfigError, PolicyError
from agentcache.server.tenants import Tenants
from tests.serving import ADMIN, ALICE, ASKED, BOB, ENDLESS, KEYS, SYSTEM, TIDE, Served, commanded, keyed


@pytest.fixture(scope="module", name="keyed")
def keyed_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with keyed(tmp_path_factory.mktemp("keyed")) as one:
        yield one


def test_a_key_is_asked_for(keyed: Served) -> None:
    for key, said in ((None, "no API key"), ("sk-unknown-0123456789", "unknown")):
        with keyed.client(key) as http:
            answer = http.post("/v1/chat/completions", json={"messages": ASKED})
            assert answer.status_code == 401
            assert said in answer.json()["error"]["message"]
            assert http.get("/status").status_code == http.get("/events").status_code == 401
            assert http.get("/health").status_code == 200
    with keyed.client() as http:
        assert http.get("/v1/models", headers={"X-API-Key": ALICE}).status_code == 200


def test_what_is_someone_elses_is_not_there(keyed: Served) -> None:
    group = {"name": "own", "system": SYSTEM, "tools": [TIDE]}
    with keyed.client(ALICE) as alice, keyed.client(BOB) as bob, keyed.client(ADMIN) as admin:
        made = alice.post("/tools", json=group).json()
        asked = alice.post("/v1/responses", json={"input": "When is high water?", "max_output_tokens": 2}).json()
        for there, nowhere in (
            (f"/v1/responses/{asked['id']}", "/v1/responses/resp-none"),
            (f"/v1/receipts/{asked['id']}", "/v1/receipts/resp-none"),
        ):
            assert alice.get(there).status_code == 200
            assert bob.get(there).status_code == bob.get(nowhere).status_code == 404
        assert bob.delete("/tools/own").text.replace("own", "none") == bob.delete("/tools/none").text
        assert bob.post("/query", json={"group": "own", "question": "?"}).status_code == 404
        assert bob.get("/tools").json()["groups"] == []
        assert bob.get("/status").json()["last"] == []
        assert [one["name"] for one in admin.get("/status").json()["groups"]] == ["own"]
        again = bob.post("/tools", json=group).json()
        assert again["computed_tokens"] == made["prefix_tokens"], "nothing is shared between namespaces"
        assert bob.get("/metrics").status_code == 403
        assert admin.get("/metrics").status_code == 200


def test_tenants_change_and_delete_their_own_groups_only(keyed: Served) -> None:
    opening = {"messages": [{"role": "system", "content": "A tide table."}], "name": "pinned"}
    with keyed.client(ALICE) as alice, keyed.client(BOB) as bob:
        for tenant in (alice, bob):
            assert tenant.post("/v1/cache/forget", json={"older_than": 0}).status_code == 200
            assert tenant.post("/tools", json={"name": "same", "system": "A harbour."}).status_code == 200
        assert alice.post("/v1/engine/pin", json=opening).status_code == 200
        before = alice.get("/tools").json()
        for name in ("pinned", "none"):
            assert bob.patch(f"/tools/{name}", json={"pinned": False}).status_code == 404
            assert bob.delete(f"/tools/{name}").status_code == bob.post("/v1/cache/forget", json={"group": name}).status_code == 404
            assert bob.post("/v1/engine/release", json={"name": name}).json() == {"released": False}
            assert bob.post("/v1/engine/forget", json={"group": name}).json()["memory_pages"] == 0
        assert bob.patch("/tools/same", json={"pinned": False}).json()["pinned"] is False
        assert bob.delete("/tools/same").json()["groups"] == ["same"]
        for path in ("/v1/cache/forget", "/v1/engine/forget"):
            assert bob.post(path, json={"older_than": 0}).status_code == 200
        assert alice.get("/tools").json() == before
        for name in ("same", "pinned"):
            assert alice.patch(f"/tools/{name}", json={"pinned": True}).json()["pinned"] is True
            assert alice.delete(f"/tools/{name}").json()["groups"] == [name]


def test_pinned_pages_are_bounded(keyed: Served) -> None:
    with keyed.client(ALICE) as alice:
        answer = alice.post("/tools", json={"name": "large", "system": SYSTEM * 5})
        assert (answer.status_code, answer.json()["error"]["code"]) == (403, "quota")
        assert "large" not in {group["name"] for group in alice.get("/tools").json()["groups"]}
    engine = keyed.state.models.first.engine
    assert engine is not None
    assert "large" not in {group.name for group in engine.groups}


def test_each_tenant_finds_what_is_warmed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "keys.toml").write_text(KEYS)
    words = ("embedded", "--keys", str(tmp_path / "keys.toml"), "--store", str(tmp_path / "store"), "--system", SYSTEM)
    state, said = commanded(monkeypatch, *words)
    assert state is not None, said
    with state.models.first.open(lambda phase: None) as engine:
        found = [engine.probe([Message("system", SYSTEM), Message("user", "?")], namespace=name) for name in ("alice", "bob", "root")]
    assert min(probe.memory_tokens for probe in found) > 100


def test_what_is_warmed_counts_as_a_tenants_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "keys.toml").write_text(KEYS.replace("pages = 3", "pages = 1"))
    words = ("embedded", "--keys", str(tmp_path / "keys.toml"), "--store", str(tmp_path / "store"), "--system", SYSTEM * 4)
    state, said = commanded(monkeypatch, *words)
    assert state is not None, said
    with pytest.raises(PolicyError, match="'alice' may pin 1 pages"):
        state.models.first.open(lambda phase: None)


def test_requests_at_once_are_bounded(keyed: Served) -> None:
    opened, leave = threading.Barrier(3), threading.Event()

    def hold() -> None:
        with keyed.client(ALICE) as http, http.stream("POST", "/v1/completions", json=ENDLESS) as answer:
            lines = answer.iter_lines()  # what ends with it ends the answer
            next(lines)
            opened.wait()
            leave.wait()

    holders = [threading.Thread(target=hold) for _ in range(2)]
    for holder in holders:
        holder.start()
    opened.wait()
    with keyed.client(ALICE) as alice, keyed.client(BOB) as bob:
        full = alice.post("/v1/chat/completions", json={"messages": ASKED})
        assert full.status_code == 429, full.text
        assert (full.status_code, full.headers["retry-after"]) == (429, "1")
        assert bob.post("/v1/chat/completions", json={"messages": ASKED, "max_tokens": 1}).status_code == 200
    leave.set()
    for holder in holders:
        holder.join()


def test_another_host_is_refused_without_keys(served: Served, keyed: Served) -> None:
    with served.client() as http:
        assert http.get("/health", headers={"Host": "evil.example"}).status_code == 403
        assert http.get("/health", headers={"Host": "[::1].evil.example"}).status_code == 403
        assert http.get("/health", headers={"Host": "[::1]"}).status_code == 200
        assert http.get("/health", headers={"Host": "LocalHost:1"}).status_code == 200
    with keyed.client(BOB) as http:
        assert http.get("/v1/models", headers={"Host": "models.example"}).status_code == 200


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "no tenant"),
        ("[a", "cannot be read"),
        ("a = 1", "must be a table"),
        ("[a]", "needs either a key"),
        ('[a]\nkey = "short"', "16 characters"),
        ('[a]\nkey = "0123456789abcdef"\nkey_sha256 = "0123456789abcdef"', "needs either"),
        ('[a]\nkey_sha256 = "sha256:0123456789abcdef"', "64 hexadecimal digits"),
        ('[a]\nkey = "0123456789abcdef"\nrequests = 0', "requests=0"),
        ('[a]\nkey = "0123456789abcdef"\nadmin = "yes"', "admin='yes'"),
        ('[a]\nkey = "0123456789abcdef"\nnamespace = ""', "namespace"),
        ('[a]\nkey = "0123456789abcdef"\nkeys = 1', "must be a table"),
        ('[a]\nkey = "0123456789abcdef"\n[b]\nkey = "0123456789abcdef"', "the same key"),
    ],
)
def test_a_keys_file_that_cannot_be_used_says_why(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "keys.toml").write_text(text)
    with pytest.raises(ConfigError, match=said):
        Tenants.read(tmp_path / "keys.toml", 4)
