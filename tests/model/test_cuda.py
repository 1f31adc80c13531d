"""On a GPU: kernels against PyTorch's operations, graphs against the forward they hold, and the tokens of a hit. Skipped without one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from agentcache import Engine
from agentcache.events import Chunk
from agentcache.kv import Sequence
from agentcache.runner import Work
from tests import models
from tests.engines import TOOLS, chat, decode, engine, long_text
from tests.model.kernels import gpu_pages

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
GPU = torch.device("cuda:0")
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)


def on_gpu(family: str = "qwen3", dtype: torch.dtype = torch.float32, **overrides: Any) -> Any:
    return models.build(family, dtype, **overrides).to(GPU)


@DTYPES
@pytest.mark.parametrize("layer", gpu_pages.LAYERS)
@pytest.mark.parametrize("pack", gpu_pages.PACKS)
def test_attention_reads_pages_where_they_lie(dtype: torch.dtype, layer: str, pack: str) -> None:
    gpu_pages.check(dtype, layer, pack, GPU)


@DTYPES
def test_norms_and_angles_are_near_the_operations(dtype: torch.dtype) -> None:
    from agentcache.model.kernels import cuda

    assert cuda.norms_agree(dtype, GPU)


@pytest.mark.parametrize("family", ["qwen3", "llama", "mistral_window", "phi3", "smollm3"])
@pytest.mark.parametrize("ids", [[5], list(range(7, 77))], ids=["decode", "tail"])
def test_a_graph_has_the_logits_of_its_forward(family: str, ids: list[int]) -> None:
    with engine(model=on_gpu(family)) as running:
        running.generate(chat("one"), sampling=decode(2))  # whose weights they are is known from now on
        graphs, run, known = running.model.graphs, running.scheduler.runner.run, []
        for graph in (False, False, True, True):  # it is made when a size is asked for again
            running.model.graphs = graphs if graph else None
            sequence = Sequence(running.model.spec)
            run([Work(sequence, [3 + at % 590 for at in range(700)], "")])
            known.append([run([Work(sequence, ids, "")])[0].logits for _ in range(3)])
        assert any(graphs._graphs.values())
        for expected, found in zip(known[0], known[-1], strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)


def test_graphs_end_with_other_weights() -> None:
    model = on_gpu()
    with engine(model=model) as running:
        running.generate(chat("one"), sampling=decode(8))
        running.generate(chat("one"), sampling=decode(8))
        before = running.generate(chat("one"), sampling=decode(8)).ids
        layer = model.model.layers[0].mlp.down_proj
        layer.weight = torch.nn.Parameter(layer.weight * -3)
        after = running.generate(chat("one"), sampling=decode(8)).ids
        assert after == running.generate(chat("one"), sampling=decode(8), reuse="off").ids
        assert after != before


def test_a_hook_is_called_though_there_are_graphs() -> None:
    model, seen = on_gpu("smollm3"), []
    with engine(model=model) as running:
        for _ in range(3):
            running.generate(chat("one"), sampling=decode(8))
        model.model.layers[0].mlp.register_forward_hook(lambda *_: seen.append(1))
        running.generate(chat("two"), sampling=decode(8))
    assert len(seen) >= 8


@pytest.mark.parametrize("family", ["qwen3", "smollm3", "qwen3_moe"])
def test_hits_have_the_tokens_of_reuse_off(family: str, tmp_path: Path) -> None:
    """In fp32, where a tie is not drawn by chance."""
    said = [chat(long_text(300)), chat(long_text(300), "aye", "and then?")]
    answers: list[list[Any]] = []
    for number in range(2):
        with engine(model=on_gpu(family), store=tmp_path) as running:
            assert not number or running.generate(said[0], TOOLS, sampling=decode(12)).receipt.cached_tokens
            running.warm(chat("")[0]["content"], TOOLS)
            for reuse in ("off", None, None):
                answers.append([running.generate(each, TOOLS, sampling=decode(12), reuse=reuse).ids for each in said])
            running.flush()
    assert all(each == answers[0] for each in answers)


def test_several_requests_share_forwards() -> None:
    with engine(model=on_gpu()) as running:
        texts = [long_text(40 * n, n) for n in range(1, 6)]
        alone = [running.generate(chat(text), sampling=decode(24), reuse="off").ids for text in texts]
        for _ in range(2):
            streams = [running.stream(chat(text), sampling=decode(24)) for text in texts]
            assert [tuple(token for chunk in stream if isinstance(chunk, Chunk) for token in chunk.ids) for stream in streams] == alone


def test_pages_move_to_the_host_and_back() -> None:
    model = on_gpu()
    with Engine(model, models.toy_tokenizer(), store=None, memory_bytes=3 * 512 * 2 * 3 * 2 * 32 * 4) as running:
        texts = [long_text(250, n) for n in range(6)]
        first = [running.generate(chat(text), sampling=decode(4)).ids for text in texts]
        assert [running.generate(chat(text), sampling=decode(4)).ids for text in texts] == first
