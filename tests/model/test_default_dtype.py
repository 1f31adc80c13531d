"""While some thread loads a model, torch's default type is that model's, for all threads: what an engine computes must not depend on it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from agentcache import Engine, Sampling
from tests import models


@pytest.fixture
def default_type() -> Iterator[Callable[[torch.dtype], None]]:
    """default_type(torch.bfloat16): as transformers sets it while it loads such weights."""
    yield torch.set_default_dtype
    torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_default_type_changes_nothing(tiny: Callable[..., Any], dtype: torch.dtype, default_type: Callable[..., None]) -> None:
    """Prompts of several pages, filled together with decoding ones, in an engine that was made before and in one that is made meanwhile."""

    def answers(engine: Engine) -> list[tuple[int, ...]]:
        prompts = [f"The keeper {number} of the harbour reads the tables. " * (20 * number + 1) for number in range(4)]
        streams = [engine.stream(prompt, sampling=Sampling(max_tokens=6, ignore_eos=True)) for prompt in prompts]
        return [stream.completion.ids for stream in streams]

    model = tiny("qwen3", dtype)
    with Engine(model, models.toy_tokenizer(), store=None) as engine:
        want = answers(engine)
    with Engine(model, models.toy_tokenizer(), store=None) as engine:
        default_type(torch.bfloat16)
        assert answers(engine) == want
    with Engine(model, models.toy_tokenizer(), store=None) as engine:
        assert answers(engine) == want
