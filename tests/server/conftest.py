"""A server of the embedded model for all tests of a file, on loopback only."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

pytest.importorskip("fastapi")
pytest.importorskip("uvicorn")

from tests.serving import Served, ready, serving


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "tests/server" in str(item.path):
            item.add_marker(pytest.mark.enable_socket)
            item.add_marker(pytest.mark.allow_hosts(["127.0.0.1", "localhost"]))


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A server of the embedded model, ready, with a store of its own."""
    with serving(store=tmp_path_factory.mktemp("store")) as one:
        yield ready(one)
