"""The fused AdamW on the CPU: against the specification, torch's bits, and rounding."""

import math
import shutil

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.optim.adamw import adamw as torch_adamw

from megazero.kernels import cpu, reference

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="no g++")
fused = torch.ops.megazero


@pytest.fixture(scope="module", autouse=True)
def built() -> None:
    cpu.load()


def state(numel: int, seed: int, dtype: torch.dtype, wide_gradients: bool) -> list[torch.Tensor]:
    """Masters, gradients, moments, published parameters (poisoned), step; values as late in a run."""
    generator = torch.Generator().manual_seed(seed)
    masters, gradients, first, noise = torch.randn(4, numel, generator=generator).unbind()
    gradients = gradients * 2.0**8
    second = (noise * 0.1).square()
    gradients = gradients if wide_gradients else gradients.to(dtype)
    return [
        masters.clone(),
        gradients,
        first * 0.1,
        second,
        torch.full((numel,), math.nan, dtype=dtype),
        torch.tensor(7.0),
    ]


SETTINGS = {"lr": 1e-3, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.1}
GO = {"divide_by": torch.tensor(300.0), "skip": torch.tensor(0.0)}
SIXTEEN = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])


def ulps(found: torch.Tensor, expected: torch.Tensor, scale: torch.Tensor) -> float:
    """The largest difference, in units of the last place of `scale`."""
    unit = torch.finfo(torch.float32).eps * 2.0 ** scale.abs().log2().floor()
    return float(((found - expected).abs() / unit.clamp(min=1e-38)).max()) if len(found) else 0.0


@SIXTEEN
@pytest.mark.parametrize("wide", [True, False])
@given(numel=st.integers(0, 300), seed=st.integers(0, 2**31))
def test_adamw(dtype: torch.dtype, wide: bool, numel: int, seed: int) -> None:
    """Against the specification, to one unit in the last place of the largest number in each sum; the published
    parameters are the masters, rounded as torch rounds.
    """
    found, expected = state(numel, seed, dtype, wide), state(numel, seed, dtype, wide)
    fused.adamw_(*found, **SETTINGS, **GO)
    reference.adamw_(*expected, **SETTINGS, **GO)
    masters, gradients, first, second = state(numel, seed, dtype, wide)[:4]
    unscaled = gradients.float() / 300
    assert ulps(found[2], expected[2], torch.maximum(first.abs(), unscaled.abs())) <= 1
    assert ulps(found[3], expected[3], torch.maximum(second, unscaled.square())) <= 1
    # What is subtracted from a master carries the roundings of its own five operations.
    subtracted = (
        1e-3 * torch.maximum(first.abs(), unscaled.abs()) / (expected[3] / (1 - 0.95**8)).sqrt().clamp(min=1e-8)
    )
    assert ulps(found[0], expected[0], masters.abs() + 5 * subtracted) <= 1
    assert torch.equal(found[4], found[0].to(dtype)) and found[5] == 8


@SIXTEEN
@pytest.mark.parametrize("wide", [True, False])
def test_adamw_gives_the_bits_of_torch(dtype: torch.dtype, wide: bool) -> None:
    """Of its fused kernel, on intervals that are a multiple of 16 elements, as units' are."""
    found, theirs = state(1 << 16, 0, dtype, wide), state(1 << 16, 0, dtype, wide)
    for _ in range(3):
        fused.adamw_(*found, **SETTINGS, **GO)
        masters, gradients, first, second, _, step = theirs
        torch_adamw(
            *([each] for each in (masters, gradients.float().clone(), first, second)),
            [],
            [step],
            fused=True,
            grad_scale=GO["divide_by"],
            found_inf=GO["skip"],
            amsgrad=False,
            beta1=0.9,
            beta2=0.95,
            lr=1e-3,
            weight_decay=0.1,
            eps=1e-8,
            maximize=False,
        )
    assert all(torch.equal(a, b) for a, b in zip(found[:4] + found[5:], theirs[:4] + theirs[5:], strict=True))


@SIXTEEN
def test_adamw_that_is_skipped_changes_nothing(dtype: torch.dtype) -> None:
    found, before = state(100, 1, dtype, True), state(100, 1, dtype, True)
    fused.adamw_(*found, **SETTINGS, divide_by=torch.tensor(math.inf), skip=torch.tensor(1.0))
    assert all(torch.equal(a, b) for a, b in zip(found[:4] + found[5:], before[:4] + before[5:], strict=True))
    assert found[4].isnan().all()


def test_rounding_is_torch_s() -> None:
    """Ties, subnormals, what overflows 16 bits, infinities and NaN."""
    values = torch.cat(
        [
            torch.arange(0, 2**32, 65_521, dtype=torch.int64).to(torch.int32).view(torch.float32),
            torch.tensor([0x3F808000, 0x3F818000, 0x7F7FFFFF, 0x7F800000, 0x00008000], dtype=torch.int32).view(
                torch.float32
            ),
        ]
    )
    for dtype in (torch.bfloat16, torch.float16):
        zeros, published = torch.zeros_like(values), torch.empty_like(values, dtype=dtype)
        still = {"lr": 0.0, "beta1": 0.9, "beta2": 0.95, "eps": 1.0, "weight_decay": 0.0}
        fused.adamw_(values.clone(), zeros, zeros.clone(), zeros.clone(), published, torch.tensor(0.0), **still, **GO)
        expected = values.to(dtype)
        assert torch.equal(published.isnan(), expected.isnan())
        assert torch.equal(published[~expected.isnan()], expected[~expected.isnan()])


def test_adamw_refuses_what_it_cannot_do() -> None:
    good = state(32, 0, torch.bfloat16, True)
    for place, bad, message in (
        (1, good[1][:16], "sizes differ"),
        (1, good[1].double(), "expected gradients in fp32"),
        (2, good[2][::2], "expected a contiguous tensor|sizes differ"),
        (4, good[4].float(), "expected 16-bit parameters"),
    ):
        arguments = [bad if i == place else each for i, each in enumerate(good)]
        with pytest.raises(RuntimeError, match=message):
            fused.adamw_(*arguments, **SETTINGS, **GO)
