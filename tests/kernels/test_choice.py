"""Which implementation a run takes: by preference, device, dtype, and what can be had."""

import logging
import shutil
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from megazero.base.errors import UserError
from megazero.kernels import apex, cpu, reference
from megazero.kernels import select as choice
from megazero.kernels.build import BuildError
from megazero.kernels.operations import REFERENCE, WIDE_REFERENCE

needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="no g++")
CPU, GPU = torch.device("cpu"), torch.device("cuda")
TORCHS = ("name", "add_rows_", "wide_products")  # no kernels of ours


@needs_compiler
def test_the_choice() -> None:
    assert choice.choose("auto", CPU, torch.float32).name == "fused"
    assert choice.choose("auto", CPU, torch.bfloat16).name == "fused"
    assert choice.choose("reference", CPU, torch.float32) is REFERENCE
    assert choice.choose("auto", CPU, torch.float64) is REFERENCE
    assert choice.choose("auto", GPU, torch.float32) is WIDE_REFERENCE
    with pytest.raises(UserError, match=r"MZ-114 .*float64"):
        choice.choose("fused", CPU, torch.float64)


@needs_compiler
def test_every_operation_is_ours_where_ours_are_taken() -> None:
    chosen = choice.choose("fused", CPU, torch.bfloat16)
    for name in REFERENCE.__dataclass_fields__:
        assert name in TORCHS or getattr(chosen, name) is getattr(torch.ops.megazero, name)


@needs_compiler
def test_a_library_that_cannot_be_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a cache folder whose file system forbids execution: auto goes on with the reference."""
    damaged = tmp_path / "cpu.so"
    damaged.write_bytes(b"not a library")
    monkeypatch.setattr(cpu, "build_cpu", lambda source: damaged)
    with pytest.raises(BuildError, match="cannot be loaded"):
        cpu.load()
    assert choice.choose("auto", CPU, torch.float32) is REFERENCE


def test_without_a_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))  # in the other one a library may lie ready
    assert choice.choose("auto", CPU, torch.float32) is REFERENCE
    with pytest.raises(UserError, match=r"MZ-114 .*no g\+\+"):
        choice.choose("fused", CPU, torch.float32)


def test_a_gpu_without_fused_kernels_is_told_so_once(caplog: pytest.LogCaptureFixture) -> None:
    """What, why, and what to do; nothing where it was asked for, or where there are no such kernels."""
    with caplog.at_level(logging.WARNING, logger="megazero"):
        choice.choose("auto", GPU, torch.bfloat16)
        (said,) = caplog.messages
        assert "plain torch instead of fused kernels" in said and "torch sees no CUDA device" in said
        assert "MEGAZERO_KERNELS" in said and "precision.kernels=reference" in said
        caplog.clear()
        choice.choose("reference", GPU, torch.bfloat16)
        choice.choose("auto", GPU, torch.float64)
        choice.choose("auto", GPU, torch.bfloat16, present=False)
        choice.choose("auto", CPU, torch.float64)
    assert caplog.messages == []


class Extension(ModuleType):
    """What apex's compiled extension does, on the CPU: statistics are flat there."""

    @staticmethod
    def forward_affine(x: Tensor, shape: torch.Size, weight: Tensor, bias: Tensor, eps: float) -> tuple[Any, ...]:
        y, mean, rstd = torch.native_layer_norm(x, shape, weight, bias, eps)
        return y, mean.flatten(), rstd.flatten()

    @staticmethod
    def backward_affine(
        grad: Tensor, mean: Tensor, rstd: Tensor, x: Tensor, shape: torch.Size, weight: Tensor, bias: Tensor, *rest: Any
    ) -> tuple[Any, ...]:
        assert mean.dim() == 1 and rest[1] is False
        rows = mean.view(*x.shape[:-1], 1), rstd.view(*x.shape[:-1], 1)
        return torch.ops.aten.native_layer_norm_backward(grad, x, shape, *rows, weight, bias, [True] * 3)

    @staticmethod
    def rms_forward_affine(x: Tensor, shape: torch.Size, weight: Tensor, eps: float) -> tuple[Any, ...]:
        y, rrms = reference.rms_norm(x, weight, eps)
        return y, rrms.flatten()

    @staticmethod
    def rms_backward_affine(
        grad: Tensor, rrms: Tensor, x: Tensor, shape: torch.Size, weight: Tensor, *rest: Any
    ) -> tuple[Any, ...]:
        return reference.rms_norm_backward(grad, x, rrms.view(*x.shape[:-1], 1), weight)


@pytest.fixture
def plant(monkeypatch: pytest.MonkeyPatch):
    """plant(symbols of apex, its extensions): an installation of a package named apex."""
    apex._extension.cache_clear()

    def put(name: str, module: ModuleType) -> None:
        monkeypatch.setitem(sys.modules, name, module)

    def planted(symbols: dict[str, str], extensions: tuple[str, ...]) -> None:
        put("apex", ModuleType("apex"))
        for module, symbol in symbols.items():
            found = ModuleType(module)
            setattr(found, symbol, object)
            put(module, found)
        for extension in extensions:
            put(extension, Extension(extension))

    yield planted
    apex._extension.cache_clear()


SYMBOLS = {"apex.optimizers": "FusedAdam", "apex.normalization": "FusedLayerNorm"}
EXTENSIONS = ("amp_C", "fused_layer_norm_cuda")


def test_apex_is_taken_for_what_it_has(plant, caplog: pytest.LogCaptureFixture) -> None:
    plant(SYMBOLS, EXTENSIONS)
    with caplog.at_level(logging.INFO, logger="megazero"):
        chosen = choice.choose("apex", GPU, torch.bfloat16)
    assert caplog.messages == ["kernels: reference; apex: norm (asked for)"]
    assert chosen.swiglu is reference.swiglu and chosen.sums_of_squares is WIDE_REFERENCE.sums_of_squares
    x, weight, bias, grad = (torch.randn(4, 3, 8, generator=torch.Generator().manual_seed(i)) for i in range(4))
    weight, bias = weight[0, 0], bias[0, 0]
    for mine, theirs in (
        (chosen.layer_norm(x, weight, bias, 1e-5), reference.layer_norm(x, weight, bias, 1e-5)),
        (chosen.rms_norm(x, weight, 1e-5), reference.rms_norm(x, weight, 1e-5)),
    ):
        assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))
    _, mean, rstd = chosen.layer_norm(x, weight, bias, 1e-5)
    for mine, theirs in (
        (chosen.layer_norm_backward, reference.layer_norm_backward),
        (
            lambda g, x, _, s, w: chosen.rms_norm_backward(g, x, s, w),
            lambda g, x, _, s, w: reference.rms_norm_backward(g, x, s, w),
        ),
    ):
        arguments = grad, x, mean, rstd, weight
        assert all(torch.equal(a, b) for a, b in zip(mine(*arguments), theirs(*arguments), strict=True))


def test_auto_prefers_apex_to_the_reference_on_a_gpu(plant) -> None:
    plant(SYMBOLS, EXTENSIONS)
    assert choice.choose("auto", GPU, torch.float32).name == "reference; apex: norm"
    assert choice.choose("auto", GPU, torch.float64) is WIDE_REFERENCE
    assert choice.choose("reference", GPU, torch.float32) is WIDE_REFERENCE


@pytest.mark.parametrize(
    ("symbols", "extensions"),
    [
        ({}, ()),  # the package of that name on the package index
        (SYMBOLS, ()),  # NVIDIA's, built without extensions
        (SYMBOLS, ("amp_C",)),
        ({**SYMBOLS, "apex.optimizers": "Adam"}, EXTENSIONS),
        ({**SYMBOLS, "apex.normalization": "Norm"}, EXTENSIONS),
    ],
)
def test_what_only_looks_like_apex_is_not(plant, symbols: dict[str, str], extensions: tuple[str, ...]) -> None:
    plant(symbols, extensions)
    assert apex.lacking()
    assert choice.choose("auto", GPU, torch.float32) is WIDE_REFERENCE
    with pytest.raises(UserError, match=r"MZ-114 precision.kernels=apex: .*not installed"):
        choice.choose("apex", GPU, torch.float32)


def test_apex_has_nothing_for_a_cpu(plant) -> None:
    plant(SYMBOLS, EXTENSIONS)
    with pytest.raises(UserError, match=r"MZ-114 .*no CPU kernels"):
        choice.choose("apex", CPU, torch.float32)
