"""A shape small enough to time in a test. Holds no tests."""

from __future__ import annotations

from agentcache.bench import shapes

TINY_SHAPE = {
    **shapes.SHAPES["small"][1],
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "head_dim": 16,
    "vocab_size": 2048,
}
