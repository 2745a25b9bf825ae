"""The fused CPU kernels against fp64 references on random shapes, and their builder."""

import math
import multiprocessing
import shutil
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.optim.adamw import adamw as torch_adamw

from megazero.errors import UserError
from megazero.kernels import build, choice, cpu, reference
from megazero.kernels.build import BuildError, build_cpu
from megazero.kernels.operations import REFERENCE, WIDE_REFERENCE

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="no g++")
# Of the largest output: a few fp32 roundings of the exponential and its sums.
TOLERANCE = 1e-6
SOURCE = Path(cpu.__file__).parent / "csrc" / "cpu.cpp"


@pytest.fixture(scope="module", autouse=True)
def fused() -> None:
    cpu.fused_operations(torch.float32)


@given(st.integers(0, 9), st.integers(1, 70), st.integers(0, 3), st.floats(0.01, 30), st.integers(0, 2**31))
def test_bias_gelu(rows: int, columns: int, offset: int, scale: float, seed: int) -> None:
    """Odd sizes, no rows, one column, unaligned memory, small and large values."""
    generator = torch.Generator().manual_seed(seed)
    memory = torch.randn(rows * columns + offset, generator=generator) * scale
    x = memory[offset:].view(rows, columns)
    bias, grad = torch.randn(columns, generator=generator), torch.randn(rows, columns, generator=generator)
    for found, expected in (
        (cpu.bias_gelu(x, bias, True), reference.bias_gelu(x.double(), bias.double(), True)),
        (
            cpu.bias_gelu_backward(grad, x, bias, True),
            reference.bias_gelu_backward(grad.double(), x.double(), bias.double(), True),
        ),
    ):
        assert found.shape == (rows, columns)
        assert torch.all((found - expected).abs() <= TOLERANCE * max(1.0, expected.abs().max() if rows else 1.0))


def test_bias_gelu_of_special_values() -> None:
    x = torch.tensor([math.nan, math.inf, 3e38, -3e38, -0.0, 1e-40])
    y = cpu.bias_gelu(x, torch.zeros(6), True)
    assert y[0].isnan()
    assert y[1] == math.inf
    assert y[2] == x[2]
    assert torch.equal(y[4:], x[4:] / 2)
    gradient = cpu.bias_gelu_backward(torch.ones(6), x, torch.zeros(6), True)
    assert gradient[0].isnan()


def test_the_gradient_of_huge_values_is_zero_or_one() -> None:
    x = torch.tensor([1e3, 1e13, 3e38, -1e3, -1e13, -3e38])
    gradient = cpu.bias_gelu_backward(torch.ones(6), x, torch.zeros(6), True)
    assert torch.allclose(gradient, torch.tensor([1.0, 1, 1, 0, 0, 0]), atol=1e-30)


@pytest.mark.parametrize("numel", [0, 1, 31, 32, 33, 65_535, 65_536, 65_537, 300_001])
def test_sum_of_squares(numel: int) -> None:
    flat = torch.randn(numel + 1, generator=torch.Generator().manual_seed(0))[1:]
    found = cpu.sum_of_squares(flat)
    assert found.dtype == torch.float64
    assert abs(found.item() - math.fsum(v * v for v in flat.tolist())) <= 1e-14 * numel


def test_sums_do_not_depend_on_the_number_of_threads() -> None:
    flat = torch.randn(1_000_003, generator=torch.Generator().manual_seed(0))
    sums = set()
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        sums.add(cpu.sum_of_squares(flat).item())
    torch.set_num_threads(2)
    assert len(sums) == 1


def test_not_finite_values_reach_the_sum() -> None:
    for poison in (math.nan, math.inf):
        flat = torch.ones(100_000)
        flat[77_777] = poison
        assert not math.isfinite(cpu.sum_of_squares(flat).item())


def test_wrong_inputs_are_refused() -> None:
    with pytest.raises(RuntimeError, match="fp32"):
        cpu.bias_gelu(torch.ones(2, 3, dtype=torch.float64), torch.ones(3), True)
    with pytest.raises(RuntimeError, match="contiguous"):
        cpu.bias_gelu(torch.ones(3, 2).T, torch.ones(3), True)
    with pytest.raises(RuntimeError, match="differ"):
        cpu.bias_gelu(torch.ones(2, 3), torch.ones(4), True)


def _build_in(cache: str) -> None:
    import os

    os.environ["XDG_CACHE_HOME"] = cache
    assert build_cpu(SOURCE).exists()


def test_many_builders_at_once_leave_one_library(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    builders = [context.Process(target=_build_in, args=(str(tmp_path),)) for _ in range(3)]
    for builder in builders:
        builder.start()
    for builder in builders:
        builder.join()
    assert [builder.exitcode for builder in builders] == [0, 0, 0]
    assert sorted(path.suffix for path in (tmp_path / "megazero").iterdir()) == [".lock", ".so"]


def test_another_header_makes_another_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    source, header = tmp_path / "tiny.cpp", tmp_path / "tiny" / "value.h"
    source.write_text('#include "tiny/value.h"\nint value() { return VALUE; }\n')
    header.parent.mkdir()
    libraries = set()
    for value in (1, 2, 1):
        header.write_text(f"#define VALUE {value}\n")
        libraries.add(build_cpu(source))
    assert len(libraries) == 2


def test_a_source_that_does_not_compile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    broken = tmp_path / "broken.cpp"
    broken.write_text("int main( {")
    with pytest.raises(BuildError, match=r"broken\.cpp: .*error"):
        build_cpu(broken)
    assert not list((tmp_path / "cache" / "megazero").glob("*.so*"))
    assert not list((tmp_path / "cache" / "megazero").glob("*.tmp"))


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
    cpu.adamw_(*found, **SETTINGS, **GO)
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
        cpu.adamw_(*found, **SETTINGS, **GO)
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
    cpu.adamw_(*found, **SETTINGS, divide_by=torch.tensor(math.inf), skip=torch.tensor(1.0))
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
        cpu.adamw_(values.clone(), zeros, zeros.clone(), zeros.clone(), published, torch.tensor(0.0), **still, **GO)
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
            cpu.adamw_(*arguments, **SETTINGS, **GO)


def test_a_library_that_cannot_be_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a cache folder whose file system forbids execution: auto goes on with the reference."""
    damaged = tmp_path / "cpu.so"
    damaged.write_bytes(b"not a library")
    monkeypatch.setattr(cpu, "build_cpu", lambda source: damaged)
    with pytest.raises(BuildError, match="cannot be loaded"):
        cpu.fused_operations(torch.float32)
    assert choice.choose("auto", torch.device("cpu"), torch.float32) is REFERENCE


def test_without_a_home_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", homeless)
    with pytest.raises(BuildError, match="XDG_CACHE_HOME"):
        build_cpu(SOURCE)


def test_without_a_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    device = torch.device("cpu")
    assert choice.choose("auto", device, torch.float32) is REFERENCE
    with pytest.raises(UserError, match=r"MZ-114 .*no g\+\+"):
        choice.choose("fused", device, torch.float32)


def test_the_choice() -> None:
    device = torch.device("cpu")
    assert choice.choose("auto", device, torch.float32).name == "fused"
    assert choice.choose("reference", device, torch.float32) is REFERENCE
    assert choice.choose("auto", device, torch.float64) is REFERENCE
    assert choice.choose("auto", torch.device("cuda"), torch.float32) is WIDE_REFERENCE
    with pytest.raises(UserError, match="MZ-114"):
        choice.choose("fused", device, torch.float64)


def test_the_cache_folder_cannot_be_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "megazero").write_text("in the way")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(build.BuildError, match="cannot be used"):
        build_cpu(SOURCE)
