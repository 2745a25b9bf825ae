"""The CUDA library is built without a GPU: no kernel spills, and it loads where torch has no CUDA."""

import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from megazero.kernels import build, cuda, schema
from megazero.kernels.build import BuildError
from scripts import ptxas

SOURCE = Path(build.__file__).parent / "csrc" / "cuda.cu"
_ = schema  # defines the operations


def _nvcc() -> str | None:
    try:
        return build.find_nvcc()
    except BuildError:
        return None


needs_nvcc = pytest.mark.skipif(_nvcc() is None, reason="no nvcc on this machine")


def check(archs: list[int]) -> None:
    library = build.build_cuda(SOURCE, archs)
    found = ptxas.resources(build.compiler_report(library))
    rows = [row for row in found if row.arch in archs]  # a library for more may lie ready
    print(ptxas.table(rows))
    kernels = {row.kernel for row in rows}
    assert {row.arch for row in rows} == set(archs)
    assert len(rows) == len(kernels) * len(archs)
    assert {"norm_forward<bf16, false>", "adamw_update<fp32, bf16, 4>", "sum_blocks"} <= kernels or not shutil.which(
        "c++filt"
    )
    assert [row for row in rows if row.spills or row.stack] == []
    assert all(0 < row.registers <= 128 for row in rows)
    torch.ops.load_library(library)


@needs_nvcc
def test_one_architecture() -> None:
    check([90])
    for name in ("layer_norm", "adamw_", "cross_entropy_parts_"):
        assert torch._C._dispatch_has_kernel_for_dispatch_key(f"megazero::{name}", "CUDA")


@needs_nvcc
@pytest.mark.skipif(shutil.which("readelf") is None, reason="no readelf")
def test_the_library_sees_torch_s_cuda() -> None:
    """Its own needs name torch's CUDA library, where there is one; otherwise nobody would resolve the weak symbol."""
    command = ["readelf", "--dynamic", "--wide", str(build.build_cuda(SOURCE, [90]))]
    needed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    with_cuda = (Path(torch.__file__).parent / "lib" / "libtorch_cuda.so").exists()
    assert ("libtorch_cuda.so" if with_cuda else "libtorch.so") in needed
    assert "libcudart" not in needed


def test_the_archs_of_this_machine_s_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(BuildError, match="no CUDA device"):
        cuda.load()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: [(9, 0), (8, 0), (9, 0)][device])
    assert cuda.present_archs() == [80, 90]


@needs_nvcc
@pytest.mark.full
def test_all_architectures() -> None:
    check(ptxas.release_archs(build.find_nvcc()))


@needs_nvcc
@pytest.mark.full
def test_a_spill_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    source = tmp_path / "spilling.cu"
    source.write_text(
        "extern __global__ void __launch_bounds__(1024, 2) spill(float* p) {\n"
        "  float a[96];\n"
        "#pragma unroll\n"
        "  for (int i = 0; i < 96; i++) a[i] = p[i * 1024 + threadIdx.x];\n"
        "  __syncthreads();\n"
        "#pragma unroll\n"
        "  for (int i = 0; i < 96; i++) p[i * 1024 + threadIdx.x] = a[i] * a[(i * 7 + 3) % 96];\n"
        "}\n"
    )
    with pytest.raises(BuildError, match="spill"):
        build.build_cuda(source, [90])
    assert "spill" in build.compiler_report(build.build_cuda(source, [90], spills=True))


@needs_nvcc
def test_an_architecture_that_nvcc_does_not_know() -> None:
    with pytest.raises(BuildError, match=r"nvcc failed on .*_999"):
        build.build_cuda(SOURCE, [90, 999])


def test_without_nvcc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    with pytest.raises(BuildError, match=r"no nvcc in .*CUDA_HOME"):
        build.find_nvcc()


def test_nvcc_of_cuda_home_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nvcc = tmp_path / "bin" / "nvcc"
    nvcc.parent.mkdir()
    nvcc.write_text("#!/bin/sh\necho compute_60 compute_70 compute_80 compute_90 compute_120\n")
    nvcc.chmod(0o755)
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    assert build.find_nvcc() == str(nvcc)
    assert ptxas.known_archs(str(nvcc)) == [70, 80, 90, 120]
    assert ptxas.release_archs(str(nvcc)) == [70, 80, 90, 120]


REPORT = """\
ptxas info    : 8 bytes gmem
ptxas info    : Compiling entry function 'first' for 'sm_90a'
ptxas info    : Function properties for first
    16 bytes stack frame, 20 bytes spill stores, 24 bytes spill loads
ptxas info    : Used 40 registers, used 1 barriers, 16 bytes stack, 512 bytes smem, 400 bytes cmem[0]
ptxas info    : Compiling entry function 'second' for 'sm_80'
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 128 registers, used 0 barriers
"""


def test_the_report_is_read() -> None:
    first, second = ptxas.resources(REPORT)
    assert first == ptxas.Resources(90, "first", registers=40, stack=16, spills=44, shared=512)
    assert second == ptxas.Resources(80, "second", registers=128, stack=0, spills=0, shared=0)
    assert "first" in ptxas.table([first, second]) and "128" in ptxas.table([first, second])


def test_occupancy() -> None:
    """40 registers are 1,280 a warp: 51 warps fit, of which a block of 8 takes 48; 128 registers leave 16 warps."""
    first, second = ptxas.resources(REPORT)
    assert first.occupancy(256) == 48 / 64
    assert second.occupancy(512) == 16 / 64
    assert first.occupancy(32) == 32 / 64  # blocks
