"""The counts of the code base stay within their bounds."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import house
from tests.processes import program

pytestmark = pytest.mark.usefixtures("no_garbage")
# what an exact request needs none of: loaded by the first request, page or caller that does
UNUSED = (
    "adapters",
    "answer/call_json",
    "answer/call_python",
    "answer/grammar_compiler",
    "answer/grammar_rules",
    "answer/guide",
    "answer/tag_values",
    "approximate",
    "attached_ranges",
    "checkpoints",
    "document_packs",
    "foreign_settings",
    "hit_audit",
    "layout/declared",
    "layout/opening",
    "layout/repairs",
    "layout/splice",
    "layout/tail",
    "layout/template_report",
    "lint",
    "model/adapters",
    "model/experts",
    "model/int8",
    "model/kernels/ir",
    "model/kernels/layer",
    "model/kernels/linear_few",
    "model/kernels/linear_many",
    "model/kernels/linear_transposed",
    "model/kernels/norm_rope",
    "model/kernels/object_cache",
    "model/kernels/paged_attention",
    "model/proof",
    "model/recurrent",
    "model/stock",
    "page_check",
    "passage_order",
    "private",
    "shared_engines",
    "shared_layers",
    "store/admin",
    "store/deletion",
    "store/disk",
    "store/forgetting",
    "store/memory/checkpoint_room",
    "store/page_prefetch",
    "store/tool_group",
    "tool_groups",
)
MOST_LINES = 12_500  # of the wheel, that an exact request loads


@pytest.fixture(scope="module")
def loaded() -> list[Path]:
    return house.closure("None", lambda source: program(source)[0])


@pytest.mark.parametrize("part", UNUSED)
def test_an_exact_request_loads_no_line_of(part: str, loaded: list[Path]) -> None:
    found = [str(path) for path in loaded if path.relative_to(house.WHEEL).with_suffix("").is_relative_to(part)]
    assert len(loaded) > 50
    assert not found


def test_an_exact_request_loads_few_lines(loaded: list[Path]) -> None:
    assert house.lines(loaded) <= MOST_LINES


@pytest.fixture(scope="module")
def counts() -> dict[str, object]:
    return house.read_counts()


def test_no_file_is_over_400_lines(counts: dict[str, object]) -> None:
    assert counts["files over 400 lines"] == []


def test_the_main_path_is_twelve_files(counts: dict[str, object]) -> None:
    assert counts["files of the main path (docs/structure.md)"] == 12


def test_few_functions_have_over_eight_parameters(counts: dict[str, object]) -> None:
    many = counts["functions over 8 parameters, without commands"]
    assert isinstance(many, list)
    assert len(many) <= 6


def test_no_function_has_over_fourteen_parameters(counts: dict[str, object]) -> None:
    many = counts["functions over 8 parameters, without commands"]
    assert isinstance(many, list)
    assert max(count for count, _ in many) <= 14


def test_few_files_outside_the_wing_mention_it(counts: dict[str, object]) -> None:
    near = counts["files outside the wing that mention approximate reuse"]
    assert near == ["cli/app.py", "engine.py", "types.py"], "commands, the consent, its words"


def test_parameters_are_counted_without_self(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(house, "WHEEL", tmp_path)
    (tmp_path / "a.py").write_text("class A:\n    def f(self, a, /, b, *, c): ...\nasync def g(): ...\n")
    assert list(house.parameters(tmp_path / "a.py")) == [(0, "a.py:g"), (3, "a.py:f")]


def test_fields_are_those_of_the_class(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("class A:\n    x: int\nclass B:\n    x: int\n    y: int = 1\n    def z(self) -> None: ...\n")
    assert house.fields(tmp_path / "a.py", "B") == 2
