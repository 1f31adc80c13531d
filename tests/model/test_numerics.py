"""The probe of the machine: deterministic, remembered, safe where it says pure, and honest where nothing is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional

from agentcache.model import machine_report, numerics
from agentcache.model.hf import HFModel
from agentcache.model.kernels import dispatch, linear_library, paged_attention
from agentcache.model.kernels.dispatch import RowPureLinear, linear
from agentcache.model.numerics import Numerics, probe
from tests import families, models
from tests.processes import program

CPU = torch.device("cpu")
TYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)


@pytest.fixture
def forgetful() -> Any:
    """The probe without its memory, and without leaving anything in it."""
    numerics._probe.cache_clear()
    yield
    numerics._probe.cache_clear()


@TYPES
def test_the_probe_is_deterministic_and_remembered(dtype: torch.dtype, forgetful: None, threads: Callable[[int], None]) -> None:
    threads(1)
    first = probe(dtype, CPU, (256, 64), 2, (32,))
    assert probe(dtype, CPU, (64, 256, 64), 2, (32,)) is first
    numerics._probe.cache_clear()
    again = probe(dtype, CPU, (64, 256), 2, (32,))
    assert again is not first
    assert (again.kernel, again.widen, again.rows, again.query_rows, again.pure, again.digest) == (
        first.kernel,
        first.widen,
        first.rows,
        first.query_rows,
        first.pure,
        first.digest,
    )
    assert first.pure
    assert first.rows >= 2
    assert first.query_rows >= (1 if first.compiled else 2)
    assert (first.threads, first.probe_ms > 0) == (1, True)


def test_the_digest_differs_by_kernel_and_type(forgetful: None, monkeypatch: pytest.MonkeyPatch) -> None:
    digests = {probe(dtype, CPU, (64,), 2, (32,)).digest for dtype in (torch.float32, torch.bfloat16)}
    for kernel in ("upcast", "aten", "library", "onednn"):
        numerics._probe.cache_clear()
        monkeypatch.setattr(numerics, "choose_kernel", lambda dtype, device, kernel=kernel: kernel)
        digests.add(probe(torch.float32, CPU, (64,), 2, (32,)).digest)
    assert len(digests) == 5  # one of the four is what float32 runs on anyway


@TYPES
@pytest.mark.parametrize("count", [1, 2])
def test_padded_rows_are_alike(dtype: torch.dtype, count: int, threads: Callable[[int], None]) -> None:
    threads(count)
    found = probe(dtype, CPU, (256,), 2, (32,))
    weight, x = torch.randn(384, 256).to(dtype), torch.randn(40, 256).to(dtype)
    full = linear(found.kernel, x, weight)
    for rows in range(found.rows, 41, found.rows):
        assert torch.equal(linear(found.kernel, x[:rows], weight), full[:rows]), f"{rows} rows"


def test_threads_are_looked_up_each_time(threads: Callable[[int], None]) -> None:
    held = HFModel(models.build("llama"))
    for count in (1, 2):
        threads(count)
        assert held.numerics is not None
        assert held.numerics.threads == count


def test_nothing_safe_is_not_called_pure(forgetful: None, monkeypatch: pytest.MonkeyPatch) -> None:
    original = numerics._probed_product
    monkeypatch.setattr(numerics, "_probed_product", lambda kernel, x, weight: original(kernel, x, weight) + x.shape[0] * 1e-3)
    monkeypatch.setattr(dispatch, "compiled", lambda *_: None)
    found = probe(torch.float32, CPU, (64,), 2, (32,))
    assert not found.pure
    assert (found.rows, found.even) == (8, 8)
    assert not HFModel(models.build("llama")).bitwise


@pytest.mark.parametrize(
    ("impure", "multiple"),
    [
        (lambda rows: rows in (1, 2, 3, 6, 10), 4),
        (lambda rows: rows % 8 > 0, 8),
        (lambda rows: rows < 100, 0),
    ],
)
def test_impure_counts_move_the_padding(impure: Any, multiple: int, forgetful: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def uneven(kernel: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return (x[:, None] * weight).sum(-1) + 1e-3 * impure(len(x))

    monkeypatch.setattr(numerics, "_probed_product", uneven)
    monkeypatch.setattr(numerics, "UNSAFE", False)
    monkeypatch.setattr(dispatch, "compiled", lambda *_: None)
    padded: Numerics = probe(torch.float32, CPU, (64,), 2, (32,))
    assert (padded.pure, padded.rows, padded.even) == (bool(multiple), multiple or 8, multiple or 8)
    numerics._probe.cache_clear()
    monkeypatch.setattr(dispatch, "compiled", lambda *_: True)
    alone: Numerics = probe(torch.float32, CPU, (64,), 2, (32,))
    assert (alone.pure, alone.rows, alone.even) == (True, 2, 0)
    assert alone.digest != padded.digest, "other bits of what is not compiled"


def test_no_padding_is_safe_before_pytorch_2_12(forgetful: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(numerics, "UNSAFE", True)
    alone: Numerics = probe(torch.float32, CPU, (64,), 2, (32,))
    compiles = dispatch.compiled(alone.kernel, torch.empty(64, 64), torch.float32) is not None
    assert (alone.pure, alone.even) == ((True, 0) if compiles else (False, 8))
    numerics._probe.cache_clear()
    monkeypatch.setattr(dispatch, "compiled", lambda *_: None)
    assert not probe(torch.float32, CPU, (64,), 2, (32,)).pure


@pytest.mark.parametrize("family", ["qwen3", "olmo2"])  # stepped; by transformers' own modules
def test_an_impure_library_multiplies_row_by_row(family: str, forgetful: None, monkeypatch: pytest.MonkeyPatch) -> None:
    if dispatch.compiled("onednn", torch.empty(64, 64), torch.float32) is None:
        pytest.skip("nothing is compiled here")
    library = linear_library.product_of_library
    for module in (linear_library, numerics):
        monkeypatch.setattr(module, "product_of_library", lambda x, weight, bias: library(x, weight, bias) + len(x) * 1e-3)
    monkeypatch.setattr(linear_library, "packing_agrees", lambda threads: False)
    held = HFModel(models.build(family, intermediate_size=100))  # of no whole vectors: the library multiplies
    assert held.numerics is not None
    assert (held.stepped, held.bitwise, held.numerics.even) == (family == "qwen3", True, 0)
    whole = families.Run(held, families.tokens(600)).chunks()
    assert families.differing(whole, families.Run(held, whole.ids).chunks(301, 1, 2, 7)) == []


def test_impure_attention_is_not_called_pure(forgetful: None, monkeypatch: pytest.MonkeyPatch) -> None:
    bmm = torch.bmm
    monkeypatch.setattr(torch, "bmm", lambda a, b: bmm(a, b) + a.shape[0])  # how many heads run together shows
    assert not probe(torch.float32, CPU, (64,), 2, (36,)).pure, "no vector of channels: not compiled"


def test_impure_compiled_attention_is_not_called_pure(forgetful: None, monkeypatch: pytest.MonkeyPatch) -> None:
    if not paged_attention.takes(torch.float32, CPU, (32,)):
        pytest.skip("nothing is compiled here")
    attend = paged_attention.attend
    monkeypatch.setattr(paged_attention, "attend", lambda q, *given: attend(q, *given) + len(q))
    assert not probe(torch.float32, CPU, (64,), 2, (32,)).pure


@TYPES
@pytest.mark.parametrize("kernel", ["onednn", "library", "upcast", "aten"])
@pytest.mark.parametrize("biased", [False, True])
def test_kernels_compute_a_product(kernel: Any, dtype: torch.dtype, biased: bool) -> None:
    if kernel in ("onednn", "library") and not linear_library.onednn_takes(dtype):
        pytest.skip("oneDNN has no code for this type here")
    x, weight = torch.randn(2, 5, 96).to(dtype), torch.randn(1100, 96).to(dtype)
    bias = torch.randn(1100).to(dtype) if biased else None
    exact = functional.linear(x.double(), weight.double(), None if bias is None else bias.double())
    ours, stock = (out.double() - exact for out in (linear(kernel, x, weight, bias), functional.linear(x, weight, bias)))
    assert ours.shape == (2, 5, 1100)
    assert ours.abs().max() <= 2 * stock.abs().max() + 1e-5


@pytest.mark.parametrize("count", [1, 2, 3, 4])
@pytest.mark.parametrize("function", [functional.gelu, functional.silu])
def test_activations_of_cuts_see_no_other_rows(function: Any, count: int, threads: Callable[[int], None]) -> None:
    threads(count)
    gate, _ = numerics.pattern(512, 2 * 128, torch.float32, CPU, 0).chunk(2, -1)  # as of modules that compute gate and up in one product
    with RowPureLinear("aten"):
        whole = function(gate)
        assert all(torch.equal(function(gate[at : at + rows]), whole[at : at + rows]) for rows in (1, 2, 119, 247) for at in (0, 3))


def test_modules_run_on_the_kernel_only_inside_the_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    original = dispatch.linear
    monkeypatch.setattr(dispatch, "linear", lambda kernel, *args, **kw: calls.append(kernel) or original(kernel, *args, **kw))
    module, x = torch.nn.Linear(16, 8), torch.ones(4, 16)
    with RowPureLinear("onednn"):
        module(x)
    module(x)
    assert calls == ["onednn"]


def test_doctor_names_every_type() -> None:
    report = machine_report.describe()
    assert {"float32", "bfloat16", "float16", "threads", "not bitwise"} <= set(report)
    assert all(report[name]["linear rows padded to"] for name in ("float32", "bfloat16", "float16"))


@TYPES
def test_what_is_probed_with_is_what_every_machine_makes(dtype: torch.dtype) -> None:
    rows, columns, salt = 40, 12_288, 71
    grid = torch.arange(rows)[:, None] * 7919 + torch.arange(columns)[None] * 104_729 + salt
    expected = ((grid * grid + grid) % 65_521).double() / 32_760.5 - 1
    assert torch.equal(numerics.pattern(rows, columns, dtype, CPU, salt), expected.to(dtype))


def test_kernels_between_the_products_count() -> None:
    asked = "probe(torch.float32, torch.device('cpu'), (64,), 2, (16,)).digest"
    told = f"from agentcache.model.numerics import probe; import torch; torch.set_num_threads(1); print({asked})"
    digests = {program(told, ATEN_CPU_CAPABILITY=capability)[0] for capability in ("default", "avx2")}
    assert len(digests) == 2, digests
