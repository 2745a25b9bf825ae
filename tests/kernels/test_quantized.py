"""Quantised values: every implementation has the specification's bits; how far they are off, and what is not finite."""

import shutil

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from megazero.base.quantized import BLOCK, code_bytes, quantized_bytes
from megazero.kernels import cpu, reference
from tests.kernels.emulated import Emulated

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="no g++")
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
NUMELS = [16, 240, 256, 272, 1024, 2 * BLOCK + 128, 33 * BLOCK]


def library(name: str) -> object:
    if name == "cuda, emulated":
        return Emulated()
    cpu.load()
    return torch.ops.megazero


def drawn(numel: int, dtype: torch.dtype, seed: int) -> Tensor:
    """Blocks of very different sizes."""
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(numel, generator=draw, dtype=torch.float64)
    sizes = 10.0 ** torch.randint(-4, 4, (-(-numel // BLOCK),), generator=draw)
    return (x * sizes.repeat_interleave(BLOCK)[:numel]).to(dtype)


def coded(implementation: object, x: Tensor, bits: int) -> Tensor:
    codes = torch.zeros(quantized_bytes(len(x), bits), dtype=torch.uint8)
    implementation.quantize_(codes, x, bits)  # type: ignore[attr-defined]
    return codes


def decoded(implementation: object, codes: Tensor, like: Tensor, bits: int) -> Tensor:
    into = torch.full_like(like, torch.nan)
    implementation.dequantize_(into, codes, bits, False)  # type: ignore[attr-defined]
    return into


@pytest.mark.parametrize("name", ["cpu", "cuda, emulated"])
@pytest.mark.parametrize("bits", [8, 4])
@settings(max_examples=12, deadline=None)
@given(st.sampled_from(NUMELS), st.sampled_from(DTYPES), st.integers(0, 99))
def test_every_implementation_has_the_specification_s_bits(
    name: str, bits: int, numel: int, dtype: torch.dtype, seed: int
) -> None:
    x, ours = drawn(numel, dtype, seed), library(name)
    codes = coded(reference, x, bits)
    assert torch.equal(coded(ours, x, bits), codes)
    expected = decoded(reference, codes, x, bits)
    assert torch.equal(decoded(ours, codes, x, bits), expected)
    for implementation, into in ((reference, one := x.clone()), (ours, two := x.clone())):
        implementation.dequantize_(into, codes, bits, True)  # type: ignore[attr-defined]
    assert torch.equal(one, two)


@pytest.mark.parametrize("bits", [8, 4])
def test_a_value_is_off_by_half_a_step_of_its_block(bits: int) -> None:
    x = drawn(33 * BLOCK, torch.float32, 0).double()
    found = decoded(reference, coded(reference, x, bits), x, bits)
    most = x.view(-1, BLOCK).abs().amax(1, keepdim=True)
    allowed = most / ((1 << bits) - 2) * (1 + 1e-5)  # half of most / (2^(bits-1) - 1)
    off = (x - found).view(-1, BLOCK).abs()
    assert (off <= allowed).all() and (off > allowed / 2).any()
    again = decoded(reference, coded(reference, found, bits), found, bits)
    assert torch.allclose(again, found, rtol=1e-6, atol=0.0)  # what was rounded stays


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize(("dtype", "rounding"), [(torch.bfloat16, 2.0**-8), (torch.float16, 2.0**-11)])
def test_values_of_16_bits_are_rounded_a_second_time(bits: int, dtype: torch.dtype, rounding: float) -> None:
    """The figures of docs/zero.md: half a step of the code, and half a step of the dtype; int8 as bf16 nearly twice."""
    step = 1.0 / (2 * (2 ** (bits - 1) - 1))
    x = drawn(4096 * BLOCK, dtype, 0)
    found = decoded(reference, coded(reference, x, bits), x, bits)
    x, found = x.double().view(-1, BLOCK), found.double().view(-1, BLOCK)
    worst = float(((found - x).abs() / x.abs().amax(1, keepdim=True)).max())
    assert step < worst <= step + rounding
    if (bits, dtype) == (8, torch.bfloat16):
        assert 1.8 / 254 < worst < 2.0 / 254


@pytest.mark.parametrize("name", ["reference", "cpu", "cuda, emulated"])
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("odd", [torch.nan, torch.inf, -torch.inf])
def test_what_is_not_finite_makes_its_block_nan(name: str, bits: int, odd: float) -> None:
    implementation = reference if name == "reference" else library(name)
    x = drawn(3 * BLOCK + 16, torch.float32, 1)
    x[BLOCK + 7] = odd
    found = decoded(implementation, coded(implementation, x, bits), x, bits)
    assert found[BLOCK : 2 * BLOCK].isnan().all()
    assert found[:BLOCK].isfinite().all() and found[2 * BLOCK :].isfinite().all()


@pytest.mark.parametrize("name", ["reference", "cpu", "cuda, emulated"])
@pytest.mark.parametrize("bits", [8, 4])
def test_zeros_and_the_smallest_numbers_are_zeros(name: str, bits: int) -> None:
    implementation = reference if name == "reference" else library(name)
    x = torch.zeros(2 * BLOCK)
    x[BLOCK:] = 1e-39
    assert torch.equal(decoded(implementation, coded(implementation, x, bits), x, bits), torch.zeros_like(x))


def test_bytes() -> None:
    assert quantized_bytes(1 << 20, 8) == (1 << 20) + 4 * (1 << 12)
    assert quantized_bytes(1 << 20, 4) == (1 << 19) + 4 * (1 << 12)
    assert quantized_bytes(16, 4) == 16 and code_bytes(48, 4) == 24
