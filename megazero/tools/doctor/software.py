"""Find packages, compilers and backends.

Only torch is imported, and apex if it is NVIDIA's. The search for a package only reads its files, because a broken
package may crash the process.
"""

import importlib.metadata
import importlib.util
import re
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from megazero.base.packages import PACKAGES, Package, is_installed
from megazero.tools.doctor.finding import Finding

_INSTALLED = Path("/usr/local")  # where the build of kernels looks for nvcc, too
_SECONDS = 8  # time limit for a compiler to print its version


def torch_backends() -> Iterator[Finding]:
    """Yield the version and the backends of this build of torch."""
    import torch.cuda.nccl
    import torch.distributed as dist

    yield Finding("torch", f"{torch.__version__}, CUDA {torch.version.cuda or 'none'}")
    without = "not in this build of torch"
    gloo, nccl = (dist.is_available() and there() for there in (dist.is_gloo_available, dist.is_nccl_available))
    absent = Finding("gloo", without, "missing", "install another build: pip install torch==...")
    yield Finding("gloo", "available, for ranks on CPUs") if gloo else absent
    absent = Finding("NCCL", without, "absent", "on a GPU machine install a CUDA build: pip install torch==...")
    version = ".".join(map(str, torch.cuda.nccl.version())) if nccl else ""
    yield Finding("NCCL", f"{version}, for ranks on GPUs") if nccl else absent


def packages(table: tuple[Package, ...] = PACKAGES) -> Iterator[Finding]:
    """Yield a line for each package that is missing or too old, and one for all others."""
    present = []
    for package in table:
        version = _version(package)
        if version is not None and _numbers(version)[: len(package.least)] >= package.least:
            present.append(f"{package.name} {version}")
            continue
        wanted = package.name + (f">={'.'.join(map(str, package.least))}" if package.least else "")
        got = "not installed" if version is None else f"{version}, expected {wanted}"
        said = f"{got}; only for {package.use}" if package.use else got
        yield Finding(package.name, said, "absent" if package.use else "missing", f"pip install '{wanted}'")
    yield Finding("packages", ", ".join(present) or "none")


def cpp_compiler() -> Iterator[Finding]:
    """Yield g++'s version; whether it compiles the kernels is known only when a run builds them."""
    do = "install it (apt-get install g++, or your system's package); it compiles the fused CPU kernels"
    yield _compiler("g++", shutil.which("g++"), "-dumpfullversion", do)


def cuda_compiler() -> Iterator[Finding]:
    """Yield nvcc's version."""
    do = "install the CUDA toolkit of torch's CUDA version; on a GPU it compiles the fused kernels, and apex"
    path = shutil.which("nvcc") or max(map(str, _INSTALLED.glob("cuda*/bin/nvcc")), default=None)
    yield _compiler("nvcc", path, "--version", do)


def _compiler(name: str, path: str | None, option: str, do: str) -> Finding:
    if path is None:
        return Finding(name, "not found", "absent", do)
    said = subprocess.run([path, option], capture_output=True, text=True, check=False, timeout=_SECONDS).stdout
    version = re.search(r"(?:release |^)(\d[\d.]*)", said)
    return Finding(name, version[1] if version else "of unknown version")


def apex() -> Iterator[Finding]:
    """Yield a line about NVIDIA's apex; import nothing if its extensions are not installed."""
    do = "build it from NVIDIA's repository with its C++ and CUDA extensions; `pip install apex` is another project"
    without = "not installed, or another package of that name"
    if importlib.util.find_spec("amp_C") is not None:
        from megazero.kernels.apex import lacking  # imports torch first: apex is linked to its libraries

        names = " and ".join(lacking())
        without = f"without {names}" if names else ""
    yield Finding("apex", without, "absent", do) if without else Finding("apex", "NVIDIA's, with its CUDA extensions")


def _version(package: Package) -> str | None:
    """Return the version, None if not installed; a plain folder of that name does not count."""
    parent = package.module.rpartition(".")[0]
    if (parent and importlib.util.find_spec(parent) is None) or not is_installed(package.module):
        return None
    with suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version(package.name)
    return "of unknown version"


def _numbers(version: str) -> tuple[float, ...]:
    """Return the numbers of a version: 2.13.0+cpu is (2, 13, 0); an unknown version counts as new enough."""
    return tuple(map(float, re.findall(r"\d+", version.partition("+")[0]))) or (float("inf"),)
