"""Tenants: API keys, their namespaces, and the bounds of what each may ask for at once. Knows no models.

Without a keys file there is one tenant, on this machine only. A keys file is TOML:

    [alice]
    key = "sk-..."          # or key_sha256 = "..."
    namespace = "alice"     # by default the name
    requests = 4            # at once; by default 8
    pages = 2000            # that tool groups may pin; by default no bound
    admin = false           # sees all namespaces in /status, and /metrics
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..errors import ConfigError, PolicyError
from ..policy import Rule
from ..toml_file import read_toml
from ..types import check_name
from .errors import ServerError

if TYPE_CHECKING:
    from ..engine import Engine
    from ..store.tool_group import ToolGroup

REQUESTS = 8  # at once, of one tenant


@dataclass(slots=True, eq=False)
class Tenant:
    """Caller of one API key."""

    name: str
    namespace: str
    # its bounds of requests at once, and of pinned pages
    rule: Rule
    # sees other namespaces and the metrics
    admin: bool = False
    # requests that run now
    running: int = 0

    def check_pins(self, made: ToolGroup, engine: Engine) -> None:
        """Release a tool group with which this tenant pins more than it may. PolicyError: it does."""
        try:
            self.rule.check_pins(made, engine.groups)
        except PolicyError:
            engine.release(made.name, namespace=made.namespace)
            raise


class Tenants:
    """All tenants, and the bound of requests that the server takes at once. keys: by SHA-256; None where no key is asked for."""

    def __init__(self, keys: Mapping[str, Tenant] | None, most: int) -> None:
        self._keys, self._most = keys, most
        self._local = Tenant("local", "default", Rule(requests=most), admin=True)
        self.running = 0

    @classmethod
    def read(cls, path: str | os.PathLike[str] | None, most: int) -> Tenants:
        """From a keys file. ConfigError: it cannot be used."""
        if path is None:
            return cls(None, most)
        plain, _ = read_toml(path, f"keys={os.fspath(path)!r}")
        if not plain:
            raise ConfigError(f"keys={os.fspath(path)!r} names no tenant: give each a table with a key")
        keys: dict[str, Tenant] = {}
        for name, said in plain.items():
            digest, tenant = _tenant(name, said)
            if digest in keys:
                raise ConfigError(f"keys: {name!r} and {keys[digest].name!r} have the same key")
            keys[digest] = tenant
        return cls(keys, most)

    def __iter__(self) -> Iterator[Tenant]:
        return iter([self._local] if self._keys is None else self._keys.values())

    @property
    def asks_for_keys(self) -> bool:
        """Tell whether a key is needed."""
        return self._keys is not None

    def of(self, authorization: str | None, key: str | None = None) -> Tenant:
        """The tenant of a request's headers. ServerError 401: there is no key, or it is none of ours."""
        if self._keys is None:
            return self._local
        scheme, _, bearer = (authorization or "").partition(" ")
        given = bearer.strip() if scheme.lower() == "bearer" else key or ""
        tenant = self._keys.get(hashlib.sha256(given.encode("utf-8", "replace")).hexdigest()) if given else None
        if tenant is None:
            none = "no API key was given: say --api-key or api_key=, or send 'Authorization: Bearer KEY'"
            said = "this API key is unknown" if given else none
            raise ServerError(401, said, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})
        return tenant

    def most(self, tenant: Tenant) -> int:
        """Its bound of requests at once."""
        return self._most if tenant.rule.requests is None else min(tenant.rule.requests, self._most)

    @contextmanager
    def admit(self, tenant: Tenant) -> Iterator[None]:
        """Count one running request. ServerError 429: the tenant, or the server, runs as many as it may."""
        most = self.most(tenant)
        if tenant.running >= most or self.running >= self._most:
            whose, bound = ("this key has", most) if tenant.running >= most else ("the server has", self._most)
            said = f"{whose} {bound} requests running: wait for one to end"
            raise ServerError(429, said, kind="rate_limit_error", code="too_many_requests", headers={"Retry-After": "1"})
        tenant.running += 1
        self.running += 1
        try:
            yield
        finally:
            tenant.running -= 1
            self.running -= 1


def _tenant(name: str, said: Any) -> tuple[str, Tenant]:
    """The digest of a tenant's key, and the tenant."""
    known, bounds = {"key", "key_sha256", "namespace", "admin"}, {"requests", "pages"}
    if not isinstance(said, dict) or said.keys() - known - bounds:
        raise ConfigError(f"keys: {name!r} must be a table of {sorted(known | bounds)!r}")
    key, digest = said.get("key", ""), said.get("key_sha256", "")
    if bool(key) is bool(digest) or not isinstance(key, str) or not isinstance(digest, str) or len(key or digest) < 16:
        raise ConfigError(f"keys: {name!r} needs either a key of at least 16 characters or its key_sha256")
    if digest and not re.fullmatch("[0-9a-fA-F]{64}", digest):
        raise ConfigError(f"keys: {name!r}: key_sha256={digest!r} must be 64 hexadecimal digits, as `printf %s KEY | sha256sum` has them")
    rule = Rule.of({"name": name, "requests": REQUESTS, **{key: said[key] for key in said.keys() & bounds}}, lambda key: f"keys: {name!r}")
    namespace, admin = said.get("namespace", name), said.get("admin", False)
    check_name("namespace", namespace)
    if not namespace:
        raise ConfigError(f"keys: {name!r}: namespace='' is no name")
    if type(admin) is not bool:
        raise ConfigError(f"keys: {name!r}: admin={admin!r} must be true or false")
    found = digest.lower() if digest else hashlib.sha256(key.encode()).hexdigest()
    return found, Tenant(name, namespace, rule, admin)
