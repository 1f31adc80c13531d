"""Kept pages after which nothing is finite: the prompt is computed once more without them, the wrong one is found and never used again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from agentcache import Engine, Reason
from agentcache.errors import NonFiniteLogitsError
from agentcache.store.disk import blob_io
from agentcache.types import StoreOptions
from tests import models
from tests.engines import TOOLS, chat, check_store, decode, engine, long_text

PROMPT = chat(long_text(300))
NAN = float("nan")


@pytest.fixture(scope="module")
def model() -> Any:
    return models.build("qwen3", num_hidden_layers=2)


def entries(running: Engine) -> list[Any]:
    """The pages of the one prompt in memory, root first."""
    return sorted(running.store.tree.entries("default"), key=lambda entry: entry.place)


def spoil_disk(running: Engine, place: int, value: float = NAN) -> None:
    """Store one page anew with a wrong number in it, authenticated as an import would be."""
    assert running.flush()
    disk, entry = running.store.disk, entries(running)[place]
    row = next(row for row in disk.index.rows() if row.page_key == entry.key)
    page = entry.page.copy(len(entry.ids))
    page.values[0, 0, 7] = value
    disk.index.remove([row.id], force=True)
    disk.index.add([blob_io.write(disk.folder, row, page)])


def reasons(done: Any) -> set[Reason]:
    return {refusal.reason for refusal in done.receipt.refusals}


@pytest.mark.parametrize("place", [0, 1])
@pytest.mark.parametrize("chunk_tokens", [128, 4096])
def test_a_spoiled_page_in_memory_costs_one_computation(model: Any, place: int, chunk_tokens: int) -> None:
    with engine(model=model, store=None, chunk_tokens=chunk_tokens) as running:
        wanted = running.generate(PROMPT, sampling=decode(4))
        before = entries(running)
        before[place].page.values[0, 0, 7] = NAN
        done = running.generate(PROMPT, sampling=decode(4))
        assert done.ids == wanted.ids
        assert done.receipt.cached_tokens == 0
        assert done.receipt.computed_tokens == done.receipt.prompt_tokens
        assert Reason.NON_FINITE in reasons(done)
        assert f"page {place} of the kept prompt was wrong" in " ".join(done.receipt.notes)
        after = entries(running)
        assert [after[at] is before[at] for at in range(place + 1)] == [True] * place + [False], "what is right stays"
        again = running.generate(PROMPT, sampling=decode(4))
        assert (again.ids, again.receipt.computed_tokens, reasons(again)) == (wanted.ids, 1, {Reason.LAST_TOKEN})
        check_store(running.store)


@pytest.mark.parametrize("value", [NAN, float("inf")])
def test_a_spoiled_page_on_disk_is_quarantined_and_written_anew(model: Any, tmp_path: Path, value: float) -> None:
    options = StoreOptions(tmp_path / "store", check_one_in=0)
    with engine(model=model, store=options) as running:
        wanted = running.generate(PROMPT, sampling=decode(4))
        spoil_disk(running, 1, value)
    with engine(model=model, store=options) as running:
        done = running.generate(PROMPT, sampling=decode(4))
        assert done.ids == wanted.ids
        assert (done.receipt.cached_tokens, done.receipt.disk_tokens) == (0, 0)
        assert Reason.NON_FINITE in reasons(done)
        assert running.flush()
    with engine(model=model, store=options) as running:
        assert not list(running.store.disk.index.rows(bad=True)), "the page that was computed took its place"
        done = running.generate(PROMPT, sampling=decode(4))
        assert done.ids == wanted.ids
        assert done.receipt.disk_tokens == done.receipt.cached_tokens == done.receipt.prompt_tokens - 1
        assert reasons(done) == {Reason.LAST_TOKEN}


def test_a_tool_group_over_a_spoiled_page_still_warms(model: Any) -> None:
    system = long_text(300)
    with engine(model=model, store=None) as running:
        running.warm(system, TOOLS, name="tools")
        entries(running)[0].page.keys[0, 0, 3, 7] = NAN  # in the last layer only a request would see it
        assert running.warm(system, TOOLS, name="again").computed_tokens > 512
        for entry in entries(running):
            assert torch.isfinite(entry.page.keys).all()
        done = running.generate(chat("hi", system=system), TOOLS, sampling=decode(2))
        assert done.receipt.cached_tokens > 512
        check_store(running.store)


def test_a_non_finite_model_leaves_cached_pages_alone() -> None:
    with engine("qwen3") as running:
        first = running.generate(PROMPT, sampling=decode(2))
        poison = running.tokenizer("<!>")["input_ids"][-1]
        before = entries(running)
        with torch.no_grad():
            running.model.model.get_input_embeddings().weight.data[poison] = NAN
        with pytest.raises(NonFiniteLogitsError, match="nothing of this request was kept"):
            running.generate([*PROMPT, first.message, {"role": "user", "content": "<!>"}], sampling=decode(2))
        assert entries(running)[:2] == before[:2]
        assert running.generate(PROMPT, sampling=decode(2)).receipt.computed_tokens == 1
