"""Find packages, compilers and backends.

Nothing is imported but torch, and apex where it is NVIDIA's.

Looking for a package reads its files only: a broken one may take the process down, and wandb takes a second.
"""

import importlib.metadata
import importlib.util
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

from megazero.base.packages import PACKAGES, Package
from megazero.base.this_copy import here
from megazero.tools.doctor.finding import Finding

_INSTALLED = Path("/usr/local")  # where the builder of kernels looks for nvcc, too
_COMPILE_SECONDS = 8
_PROGRAM = "#include <vector>\nint sum(const std::vector<int>& v) { int s = 0; for (int x : v) s += x; return s; }\n"


def packages(table: tuple[Package, ...] = PACKAGES) -> Iterator[Finding]:
    """Yield a line of all that are here, and one for each that is not."""
    present = []
    for package in table:
        version = _version(package)
        if version is not None and _numbers(version)[: len(package.least)] >= package.least:
            present.append(f"{package.name} {version}")
            continue
        wanted = package.name + (f">={'.'.join(map(str, package.least))}" if package.least else "")
        got = "not installed" if version is None else f"{version}, expected {wanted}"
        if package.use:
            yield Finding(package.name, f"{got}; only for {package.use}", "absent", f"pip install '{wanted}'")
        else:
            yield Finding(package.name, got, "missing", here("make setup, or ", "") + f"pip install '{wanted}'")
    yield Finding("packages", ", ".join(present) or "none")


def cpp_compiler() -> Iterator[Finding]:
    """Yield a line on g++, by what it makes of a small program."""
    compiler = shutil.which("g++")
    if compiler is None:
        do = "install it (apt-get install g++, or your system's package); it compiles the fused CPU kernels"
        yield Finding("g++", "not found", "absent", do)
        return
    fault = _fault_of(compiler)
    if fault:
        do = "complete its installation (linker, C++ headers); it compiles the fused CPU kernels"
        yield Finding("g++", fault, "absent", do)
    else:
        version = (_output([compiler, "-dumpfullversion"]).split() or ["of unknown version"])[0]
        yield Finding("g++", f"{version}, compiles C++20")


def cuda_compiler() -> Iterator[Finding]:
    nvcc = shutil.which("nvcc") or max(map(str, _INSTALLED.glob("cuda*/bin/nvcc")), default=None)
    if nvcc is None:
        do = "install the CUDA toolkit of torch's CUDA version; on a GPU it compiles the fused kernels, and apex"
        yield Finding("nvcc", "not found", "absent", do)
        return
    release = re.search(r"release ([\d.]+)", _output([nvcc, "--version"]))
    yield Finding("nvcc", release[1] if release else "of unknown version")


def apex() -> Iterator[Finding]:
    """Yield a line on NVIDIA's apex; nothing is imported where its extensions are not installed."""
    do = "build it from NVIDIA's repository with its C++ and CUDA extensions; `pip install apex` is another project"
    if importlib.util.find_spec("amp_C") is None:
        other = importlib.util.find_spec("apex") is not None
        yield Finding("apex", "a package of that name without amp_C" if other else "not installed", "absent", do)
        return
    from megazero.kernels.apex import lacking  # which imports torch first: apex is linked to its libraries

    if names := lacking():
        yield Finding("apex", f"without {' and '.join(names)}", "absent", do)
    else:
        yield Finding("apex", "NVIDIA's, with its CUDA extensions")


def backends() -> Iterator[Finding]:
    """Yield what torch was built with."""
    import torch
    import torch.distributed as dist

    yield Finding("torch", f"{torch.__version__}, CUDA {torch.version.cuda or 'none'}")
    if not dist.is_available() or not dist.is_gloo_available():
        do = f"take another build: {here('make setup TORCH=...', 'pip install torch==...')}"
        yield Finding("gloo", "not in this build of torch", "missing", do)
    else:
        yield Finding("gloo", "there, for ranks on CPUs")
    if dist.is_available() and dist.is_nccl_available():
        from torch.cuda import nccl

        version = ".".join(map(str, nccl.version()))
        yield Finding("NCCL", f"{version}, for ranks on GPUs")
    else:
        do = f"on a GPU machine take a CUDA build: {here('make setup TORCH=...', 'pip install torch==...')}"
        yield Finding("NCCL", "not in this build of torch", "absent", do)


def _version(package: Package) -> str | None:
    """Return the version, None if not installed.

    A folder beside the program that is called like it is found too, as one without a file.
    """
    parent = package.module.rpartition(".")[0]
    if parent and importlib.util.find_spec(parent) is None:
        return None
    spec = importlib.util.find_spec(package.module)
    if spec is None or spec.origin is None:
        return None
    try:
        return importlib.metadata.version(package.name)
    except importlib.metadata.PackageNotFoundError:
        return "of unknown version"


def _numbers(version: str) -> tuple[int, ...]:
    """Return the numbers of a version: 2.13.0+cpu is (2, 13, 0); of an unknown version nothing is expected."""
    numbers = tuple(int(number) for number in re.findall(r"\d+", version.partition("+")[0]))
    return numbers or (sys.maxsize,)


def _fault_of(compiler: str) -> str:
    """Return why a small library cannot be compiled, in one line; "" if it can."""
    with TemporaryDirectory(prefix="megazero-compile-") as folder:
        source, library = Path(folder, "probe.cpp"), Path(folder, "probe.so")
        source.write_text(_PROGRAM)
        line = [compiler, "-std=c++20", "-fPIC", "-shared", str(source), "-o", str(library)]
        try:
            result = subprocess.run(line, capture_output=True, text=True, check=False, timeout=_COMPILE_SECONDS)
        except subprocess.TimeoutExpired:
            return f"does not end within {_COMPILE_SECONDS} s on a small program"
    if result.returncode == 0:
        return ""
    errors = [text for text in result.stderr.splitlines() if "error" in text] or result.stderr.splitlines()
    return f"fails on a small program: {errors[0][:160] if errors else f'exit code {result.returncode}'}"


def _output(command: list[str]) -> str:
    result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=_COMPILE_SECONDS)
    return result.stdout
