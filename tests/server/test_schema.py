"""Requests that schemathesis draws from the server's own OpenAPI schema; `python -m benchmarks.serve_fuzz` sends more of them."""

from __future__ import annotations

import pytest

from tests.serving import Served


def test_drawn_requests_have_documented_answers(served: Served) -> None:
    pytest.importorskip("schemathesis")
    from benchmarks.serve_fuzz import fuzz

    found = fuzz(served.url, examples=3, seed=0, phases="examples,fuzzing")
    assert found.failed == 0, found.output
    assert found.requests > 60
    assert found.accepted > 10, "the engine was asked"


def test_the_schema_tells_of_each_error(served: Served) -> None:
    with served.client() as http:
        paths = http.get("/openapi.json").json()["paths"]
    for path, methods in paths.items():
        for operation in methods.values():
            assert {"400", "401", "404", "429", "503"} <= set(operation["responses"]), path
            assert "422" not in operation["responses"], path
    assert set(paths["/v1/responses"]["post"]["responses"]["200"]["content"]) == {"application/json", "text/event-stream"}
