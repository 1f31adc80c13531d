"""Lossy storage: how far off an element may be, what is refused, and that a blob of it comes back labelled and checked like any other."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from agentcache.errors import BlobError, StoreError
from agentcache.kv import Page
from agentcache.kv_spec import KVSpec
from agentcache.store.disk import blob_io, quantize
from agentcache.store.disk.folder import Folder
from tests.store.stored_pages import SPEC, SPECS, blob_path, empty_from, files_under_blobs, fill_page, noise_page, unstored_row

ULP = {torch.float64: 2.0**-52, torch.float32: 2.0**-23, torch.float16: 2.0**-10, torch.bfloat16: 2.0**-7}
# below, rounding is absolute
FLOOR = {torch.float64: 2.0**-1022, torch.float32: 2.0**-126, torch.float16: 2.0**-24, torch.bfloat16: 2.0**-126}
SHAPES = st.tuples(st.integers(1, 3), st.sampled_from([1, 2, 16, 64, 80, 128]), st.sampled_from([1, 2, 63, 64, 65, 129, 512]))
PRECISIONS = ("int8", "int4")
MAKERS = ("noise", "constant", "zero", "outlier", "offset", "tiny", "large", "ends")


def noise(kind: str, shape: tuple[int, ...], seed: int) -> torch.Tensor:
    made = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    if kind == "constant":
        made[:] = made.flatten()[0]
    elif kind == "zero":
        made[:, ::2] = 0
    elif kind == "outlier":
        made.flatten()[seed % made.numel()] = -3000
    elif kind == "offset":
        made += 500
    elif kind == "tiny":
        made *= 1e-30
    elif kind == "large":
        made = made.clamp(-4, 4) * 1e4
    elif kind == "ends":
        made = made.sign() * 3
    return made


def there_and_back(keys: torch.Tensor, values: torch.Tensor, precision: str) -> tuple[torch.Tensor, torch.Tensor]:
    found = quantize.quantize(keys, values, precision)
    kv_heads, head_dim, tokens = keys.shape
    for name, dtype, shape in quantize.parts(precision, kv_heads, (head_dim, values.shape[-1]), tokens):
        assert found[name].shape == shape
        assert found[name].is_contiguous()
        assert str(found[name].dtype) == {"F32": "torch.float32", "U8": "torch.uint8"}[dtype]
    out = torch.full_like(keys, 7), torch.full_like(values, 7)
    quantize.dequantize(found, precision, *out)
    return out


def half_steps(x: torch.Tensor, precision: str) -> torch.Tensor:
    """The bound, computed another way: half a step of each group."""
    x, (size, steps) = x.double(), {"int8": (128, 510), "int4": (64, 30)}[precision]
    bound = torch.empty_like(x)
    for start in range(0, x.shape[2], size):
        group = x[:, :, start : start + size]
        bound[:, :, start : start + size] = (group.amax(2, keepdim=True) - group.amin(2, keepdim=True)) / steps
    return bound


@settings(derandomize=True, deadline=None, max_examples=150)
@given(SHAPES, st.sampled_from(MAKERS), st.sampled_from(list(ULP)), st.sampled_from(PRECISIONS), st.integers(0, 2**20))
def test_no_element_is_off_by_more_than_half_a_step(
    shape: tuple[int, int, int], kind: str, dtype: torch.dtype, precision: str, seed: int
) -> None:
    kv_heads, head_dim, tokens = shape
    keys = noise(kind, (kv_heads, head_dim, tokens), seed).to(dtype)
    values = noise(kind, (kv_heads, tokens, head_dim), seed + 1).to(dtype)
    for x, y in zip((keys, values), there_and_back(keys, values, precision)):
        assert y.dtype == dtype
        largest = x.double().abs().amax()
        allowed = half_steps(x, precision) * (1 + 1e-5) + largest * (ULP[dtype] + 4 * ULP[torch.float32]) + FLOOR[dtype]
        assert ((x.double() - y.double()).abs() <= allowed).all()


@pytest.mark.parametrize("dtype", ULP)
@pytest.mark.parametrize("precision", PRECISIONS)
def test_zeros_and_constants_come_back_as_they_were(precision: str, dtype: torch.dtype) -> None:
    zeros = torch.zeros(2, 16, 100, dtype=dtype), torch.zeros(2, 100, 16, dtype=dtype)
    assert all(torch.equal(x, y) for x, y in zip(zeros, there_and_back(*zeros, precision)))
    assert not any(map(torch.any, quantize.quantize(*zeros, precision).values())), "0 / 0 would depend on how a processor casts NaN"
    constant = tuple(torch.full_like(x, -2.75) for x in zeros)
    assert all(torch.allclose(x, y, rtol=1e-6, atol=0) for x, y in zip(constant, there_and_back(*constant, precision)))


def test_the_end_of_the_range_does_not_wrap() -> None:
    """A scale rounded to 16 bits once made more of the largest element than a byte holds."""
    for seed in range(20):
        keys, values = noise("noise", (2, 64, 512), seed).bfloat16(), noise("ends", (2, 512, 64), seed).bfloat16()
        for x, y in zip((keys, values), there_and_back(keys, values, "int8")):
            assert (x.sign() == y.sign())[x.abs() > x.abs().amax() / 100].all()
            assert ((x.float() - y.float()).norm() / x.float().norm()) < 0.01


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf"), 3e38])
@pytest.mark.parametrize("which", [0, 1])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_what_is_not_finite_is_refused(tmp_path: Path, precision: str, which: int, bad: float) -> None:
    spec = replace(SPEC, dtype=torch.float32)
    made = noise_page(spec)
    (made.keys, made.values)[which][1, 1, 3, 5] = bad
    folder = Folder.open(tmp_path / "store")
    with pytest.raises(StoreError, match=precision):
        blob_io.write(folder, unstored_row(spec, precision=precision), made)
    assert files_under_blobs(folder) == []


@pytest.mark.parametrize("encrypted", [False, True])
@pytest.mark.parametrize("dtype", ULP)
@pytest.mark.parametrize("tokens", [512, 131, 1])
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_blobs_of_fewer_bits(tmp_path: Path, spec: KVSpec, precision: str, tokens: int, dtype: torch.dtype, encrypted: bool) -> None:
    folder = Folder.open(tmp_path / "store", key=b"k" * 32 if encrypted else None)
    spec = replace(spec, dtype=dtype)
    original = noise_page(spec, tokens)
    written = blob_io.write(folder, unstored_row(spec, tokens, precision), original)
    assert blob_io.describe(folder, written.blob) == written
    blob_io.verify(folder, written)
    wanted = max(1, tokens - 2)
    found = Page(spec)
    fill_page(folder, written, found, tokens=wanted)
    assert found.filled == wanted
    assert empty_from(found, wanted)
    for layer in range(spec.layers):
        keys, values = original.layer_keys[layer][..., :tokens], original.layer_values[layer][:, :tokens]
        expected = there_and_back(keys.contiguous(), values.contiguous(), precision)
        assert torch.equal(found.layer_keys[layer][..., :wanted], expected[0][:, :, :wanted])
        assert torch.equal(found.layer_values[layer][:, :wanted], expected[1][:, :wanted])
    file = blob_path(folder, written)
    whole = file.read_bytes()
    for at in (4096, 4096 + 100, len(whole) - 40):
        file.write_bytes(whole[:at] + bytes([whole[at] ^ 4]) + whole[at + 1 :])
        found = Page(spec)
        with pytest.raises(BlobError):
            fill_page(folder, written, found, tokens=tokens)
        assert found.filled == 0
        assert empty_from(found, 0)


def test_an_exact_row_is_never_served_from_a_lossy_blob(tmp_path: Path) -> None:
    folder = Folder.open(tmp_path / "store")
    written = blob_io.write(folder, unstored_row(precision="int8"), noise_page())
    with pytest.raises(BlobError, match="precision"):
        fill_page(folder, replace(written, precision="exact"), Page(SPEC), tokens=512)


@pytest.mark.parametrize(("precision", "share"), [("exact", 1.0), ("int8", 0.53125), ("int4", 0.313)])
def test_bytes_per_token_are_those_of_the_documentation(tmp_path: Path, precision: str, share: float) -> None:
    """docs/format-blobs.md says what a full page of a model with 28 layers and 8 heads of 128 takes; here with one layer."""
    spec = KVSpec(1, 8, 128, torch.bfloat16)
    written = blob_io.write(Folder.open(tmp_path / "store"), unstored_row(spec, precision=precision), noise_page(spec))
    assert written.bytes - 4096 - 2048 - 64 == pytest.approx(share * spec.page_bytes, rel=2e-3)


def test_drift_on_noise() -> None:
    """Relative error of normal noise, as documented."""
    keys, values = noise("noise", (8, 128, 512), 1), noise("noise", (8, 512, 128), 2)
    for precision, most in (("int8", 0.0065), ("int4", 0.095)):
        for x, y in zip((keys, values), there_and_back(keys, values, precision)):
            assert most / 2 < (x - y).norm() / x.norm() < most
