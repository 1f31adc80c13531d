"""What layers of each kind keep with a page, and that reuse of it from memory, from disk and in a branch has the bits of reuse off."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch

from agentcache import Completion, Engine, Sampling
from agentcache.bench import families
from agentcache.model import hf
from agentcache.model.family import slots_of
from agentcache.model.fingerprint import Fingerprint
from tests import models

SYSTEM = {"role": "system", "content": "You are the keeper of a lighthouse. " * 12}
# kind -> a family that has such layers, settings, bytes of a token, and whether bits are promised
KINDS: dict[str, tuple[str, dict[str, Any], int, bool]] = {
    "alike": ("phi3", {}, 4 * 2 * 2 * 16 * 4, True),
    "two read what earlier ones keep": ("gemma3n_text", {}, 2 * 2 * 2 * 16 * 4, True),
    "widths that differ": ("gemma4_unified_text", {}, 2 * 2 * (2 * 16 + 2 * 32) * 4, True),
    "both": ("gemma4_text", {"num_kv_shared_layers": 2, "hidden_size_per_layer_input": 16}, 2 * 2 * (16 + 32) * 4, True),
    "latents, keys wider than values": ("minicpm3", {}, 4 * (24 + 16) * 4, True),
}


pytestmark = pytest.mark.usefixtures("one_thread")


def engine(kind: str, store: Path | None = None, **options: Any) -> Engine:
    family, settings, _, _ = KINDS[kind]
    return Engine(families.build(family, **settings), models.toy_tokenizer(), store=store, **options)


def ask(running: Engine, text: str, **options: Any) -> tuple[Completion, torch.Tensor]:
    """Six greedy tokens after the system's words and a question, and the logits of each."""
    logits: list[torch.Tensor] = []
    sampling = Sampling(max_tokens=6, temperature=0.0, ignore_eos=True)
    messages = [SYSTEM, {"role": "user", "content": text}]
    said = running.generate(messages, (), sampling=sampling, on_logits=lambda found: logits.append(found.clone()), **options)
    return said, torch.stack(logits)


@pytest.mark.parametrize("kind", KINDS)
def test_reuse_has_the_result_of_reuse_off(kind: str, tmp_path: Path) -> None:
    with closing(engine(kind, tmp_path / "store")) as running:
        assert running.model.bitwise is KINDS[kind][3]
        group = running.warm(SYSTEM["content"], (), name="lighthouse")
        expected = {text: ask(running, text, reuse="off")[1] for text in ("How high is the tide?", "Is there wind?")}
        for text, logits in expected.items():  # each continues amid the page that the group ends in
            said, found = ask(running, text)
            assert said.receipt.cached_tokens >= group.prefix_tokens
            assert_same(found, logits, kind)
        running.flush()
    with closing(engine(kind, tmp_path / "store")) as other:
        for text, logits in expected.items():
            said, found = ask(other, text)
            assert said.receipt.cached_tokens > group.prefix_tokens
            assert_same(found, logits, kind)


def assert_same(found: torch.Tensor, expected: torch.Tensor, kind: str) -> None:
    if KINDS[kind][3]:
        assert torch.equal(found, expected)
    else:
        assert torch.equal(found.argmax(-1), expected.argmax(-1))


@pytest.mark.parametrize("kind", KINDS)
def test_a_page_holds_what_its_layers_keep(kind: str) -> None:
    family, settings, token_bytes, _ = KINDS[kind]
    held = hf.HFModel(families.build(family, **settings))
    assert held.spec is not None
    assert held.spec.token_bytes == token_bytes
    assert held.spec.page_bytes == 512 * token_bytes
    held.close()


@pytest.mark.parametrize("kind", KINDS)
def test_the_layout_of_pages_is_in_the_fingerprint(kind: str) -> None:
    family, settings, _, _ = KINDS[kind]
    held = hf.HFModel(families.build(family, **settings))
    assert held.fingerprint is not None
    assert held.numerics is not None
    assert (Fingerprint(held.model, held.numerics.kernel).whole == held.fingerprint.whole) is (kind == "alike")
    held.close()


@pytest.mark.parametrize("kind", ["two read what earlier ones keep", "both"])
def test_pages_of_another_layout_are_no_hits(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def each_its_own(layers: list[Any]) -> tuple[int, ...]:
        return tuple(range(len(slots_of(layers))))

    with monkeypatch.context() as earlier:
        earlier.setattr(hf, "slots_of", each_its_own)
        with closing(engine(kind, tmp_path / "store")) as running:
            ask(running, "How high is the tide?")
            running.flush()
            assert running.store.disk is not None
            written = running.store.disk.index.total()[0]
    assert written
    with closing(engine(kind, tmp_path / "store")) as running:
        said, found = ask(running, "How high is the tide?")
        assert said.receipt.cached_tokens == 0
        assert_same(found, ask(running, "How high is the tide?", reuse="off")[1], kind)
        running.flush()
        assert running.store.disk is not None
        assert running.store.disk.index.total()[0] == 2 * written
    with closing(engine(kind, tmp_path / "store")) as running:
        assert ask(running, "How high is the tide?")[0].receipt.cached_tokens > 0
