"""The instructions in use: the environment's limits hold for PyTorch, oneDNN and compiled kernels alike; bits are equal under each."""

from __future__ import annotations

import json
from typing import Any

import pytest

from agentcache.bench.options import VARIABLES, Isa
from agentcache.model.kernels import instructions, jit
from tests.processes import program

LEVELS = ("avx2", "avx512", "avx512_bf16", "amx")
FEATURES = {"avx2": True, "fma": True, "avx512f": True, "avx512bf16": True, "amx-tile": True, "avxneconvert": True, "avx512fp16": False}

# one request after its tool group, in memory and with reuse off: what was cached, whether the bits are equal, and what computed them
ASKED = """
import json
import torch
from agentcache import Engine, Sampling
from agentcache.model.kernels import instructions, jit
from tests import models

torch.set_num_threads(1)
found = jit.compiler()
said = {"level": instructions.level(), "lanes": found.lanes if found else 0, "pairs": jit.multiplies_pairs()}
tools = [{"name": "tide", "description": "Tells the tide. " * 60, "parameters": {"type": "object", "properties": {}}}]
messages = [{"role": "system", "content": "You keep a lighthouse."}, {"role": "user", "content": "When is the flood?"}]
for dtype in (torch.float32, torch.bfloat16):
    with Engine(models.build("qwen3", dtype), models.toy_tokenizer()) as engine:
        engine.warm(messages[0]["content"], tools)
        one, other = (
            engine.generate(messages, tools, sampling=Sampling(max_tokens=4, logprobs=0), reuse=reuse) for reuse in ("exact", "off")
        )
        assert one.receipt.cached_tokens > 0 and one.receipt.bitwise
        said[str(dtype)] = one.text == other.text and one.logprobs == other.logprobs
print(json.dumps(said))
"""


def asked(isa: Isa, source: str) -> dict[str, Any]:
    """What a process says that has no other instructions."""
    said: dict[str, Any] = json.loads(program(source, **VARIABLES[isa])[0].splitlines()[-1])
    return said


@pytest.mark.parametrize("isa", Isa)
def test_hits_have_the_bits_of_reuse_off_under_each_set(isa: Isa) -> None:
    if instructions.level() not in LEVELS or LEVELS.index(instructions.level()) < LEVELS.index(isa.value):
        pytest.skip(f"this processor has {instructions.level()}")
    said = asked(isa, ASKED)
    assert said.pop("level") == isa.value
    assert said.pop("lanes") in ((0,) if jit.compiler() is None else (8,) if isa is Isa.avx2 else (16,))
    assert said.pop("pairs") is (isa is Isa.avx512_bf16 and jit.compiler() is not None)
    assert said == {"torch.float32": True, "torch.bfloat16": True}


@pytest.mark.skipif(instructions.level() not in LEVELS, reason=f"this processor has {instructions.level()}")
def test_hits_have_the_bits_of_reuse_off_without_llvmlite() -> None:
    said = asked(Isa.avx2, f"import sys\nsys.modules['llvmlite'] = None\n{ASKED}")
    assert said == {"level": "avx2", "lanes": 0, "pairs": False, "torch.float32": True, "torch.bfloat16": True}


@pytest.mark.parametrize(
    ("level", "kept"),
    [
        ("amx", {"avx2", "fma", "avx512f", "avx512bf16", "amx-tile", "avxneconvert"}),
        ("avx512_bf16", {"avx2", "fma", "avx512f", "avx512bf16", "avxneconvert"}),
        ("avx512", {"avx2", "fma", "avx512f"}),
        ("avx2", {"avx2", "fma"}),
    ],
)
def test_kernels_are_compiled_for_no_more_than_is_in_use(level: str, kept: set[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(instructions, "level", lambda: level)
    cpu, features = instructions.target("znver9", FEATURES)
    assert {name for name, has in features.items() if has} == kept
    assert cpu == ("x86-64-v3" if level == "avx2" else "znver9")
