"""Weights of fewer bits under layers of each kind: the greedy tokens of reuse off, from memory and from disk in another process."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import closing
from importlib.util import find_spec
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

from agentcache import Engine
from agentcache.bench import families
from agentcache.errors import ModelError
from agentcache.store import page_prefetch
from tests import models
from tests.asking import SYSTEM, TOOLS, Asking, user
from tests.processes import Child

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.skipif(find_spec("bitsandbytes") is None, reason="no bitsandbytes"),  # importing it takes seconds of each worker
    pytest.mark.filterwarnings("ignore:MatMul8bitLt. inputs will be cast:UserWarning"),
]
KINDS = {"window": "gemma3_text", "sinks": "gpt_oss", "recurrent": "qwen3_5_text", "latent": "youtu"}
FIRST = [SYSTEM, user("How high is the tide?")]


def serve(parent: Connection) -> None:
    """In a process of its own: answer from the store in each folder that is named, until it is killed."""
    page_prefetch.slow_load_ms, page_prefetch.give_up = lambda *_: 0.0, lambda *_: False  # type: ignore[assignment]  # a busy disk is not refused
    while True:
        folder, options, messages = parent.recv()
        one = Asking(folder, folder / "store", **options)
        with closing(one.engine):
            said, _ = one(messages)
        parent.send((said.receipt.cached_tokens, list(said.ids), sorted({one.reason for one in said.receipt.refusals})))


def save(kind: str, folder: Path) -> None:
    """A tiny model with such layers, and a tokenizer."""
    families.build(KINDS[kind], initializer_range=0.05).save_pretrained(folder)  # sharper ones differ by the rounding of int8
    models.toy_tokenizer().save_pretrained(folder)


@pytest.fixture(scope="module")
def second_process() -> Iterator[Callable[..., Any]]:
    """Ask a model of a folder in another process: cached tokens, and the ids of the answer."""
    child = Child(serve)

    def ask(*asked: Any) -> Any:
        child.pipe.send(asked)
        return child.hear()

    yield ask
    child.kill()


@pytest.mark.parametrize(
    ("kind", "bits"), [(kind, bits) for kind in KINDS for bits in ("4bit", "8bit") if (kind, bits) != ("latent", "8bit")]
)
def test_fewer_bits_give_the_tokens_of_reuse_off(
    kind: str, bits: str, asking: Callable[..., Asking], second_process: Callable[..., Any], tmp_path: Path
) -> None:
    save(kind, tmp_path)
    options = {f"load_in_{bits}": True}
    ask = asking(tmp_path, tmp_path / "store", **options)
    held = ask.engine.model
    assert (held.support.paged, held.quantized, held.bitwise) == (True, True, False), held.support.why
    group = ask.engine.warm(SYSTEM["content"], TOOLS, name="group")
    first, off = ask(FIRST)[0], ask(FIRST, reuse="off")[0]
    then = [*FIRST, {"role": "assistant", "content": first.text}, user("And the wind?")]
    step, alone = ask(then)[0], ask(then, reuse="off")[0]
    ask.engine.flush()
    assert first.ids == off.ids
    assert step.ids == alone.ids
    assert step.receipt.cached_tokens >= first.receipt.cached_tokens >= group.prefix_tokens > 500
    cached, ids, reasons = second_process(tmp_path, options, then)
    assert cached >= group.prefix_tokens, reasons
    assert ids == list(alone.ids)


def test_layers_that_do_not_run_in_int8_are_named(tmp_path: Path) -> None:
    save("latent", tmp_path)  # bitsandbytes gives four dimensions back as two
    with pytest.raises(ModelError, match="'youtu' does not run with its quantised weights .*: load it with other bits"):
        Engine(str(tmp_path), store=None, load_in_8bit=True)


def test_a_config_of_weights_that_are_whole_is_named(tmp_path: Path) -> None:
    models.build("llama").save_pretrained(tmp_path)  # as a merged model is saved whose config still says that it was quantised
    models.toy_tokenizer().save_pretrained(tmp_path)
    said = json.loads((tmp_path / "config.json").read_text())
    said["quantization_config"] = {"quant_method": "bitsandbytes", "load_in_8bit": True}
    (tmp_path / "config.json").write_text(json.dumps(said))
    with pytest.raises(ModelError, match="'llama' does not run with its quantised weights .*: load it with other bits, or without"):
        Engine(str(tmp_path), store=None)
