"""Report the multiprocessor resources that each CUDA kernel uses, from the output of ptxas at its build.

python -m scripts.ptxas      # all kernels on each architecture of a release: takes some minutes, needs no GPU
"""

import re
import shutil
import subprocess
import sys
from dataclasses import dataclass, replace

from megazero.kernels import cuda
from megazero.kernels.build import BuildError, compiler_report, find_nvcc

_ENTRY = re.compile(r"Compiling entry function '(\S+)' for 'sm_(\d+)[a-z]*'")
_SPILLS = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
_USED = re.compile(r"Used (\d+) registers")
_SHARED = re.compile(r"(\d+) bytes smem")

# A multiprocessor's registers, and its largest numbers of resident threads and blocks by compute capability (CUDA C++
# Programming Guide, table of technical specifications per compute capability). Registers are allocated to warps in
# units of 256.
_REGISTERS = 65_536
_REGISTER_UNIT = 256
_WARP = 32
_THREADS = {70: 2048, 75: 1024, 80: 2048, 86: 1536, 89: 1536, 90: 2048, 100: 2048, 103: 2048, 120: 1536}
_OLDEST_ARCH = 70  # Volta: older architectures have no tensor cores
_RELEASE_ARCHS = (80, 90, 100, 120)
_BLOCKS = {70: 32, 75: 16, 80: 32, 86: 16, 89: 24, 90: 32, 100: 32, 103: 32, 120: 24}


@dataclass(frozen=True)
class Resources:
    """The resources of a kernel on an architecture.

    Attributes:
        arch: compute capability, 90 for 9.0.
        kernel: name with template arguments.
        registers: per thread.
        stack, spills: bytes per thread of local memory; spills are stores plus loads.
        shared: bytes per block that the kernel declares, without those that a launch adds.
    """

    arch: int
    kernel: str
    registers: int
    stack: int
    spills: int
    shared: int

    def occupancy(self, threads: int) -> float:
        """Return the share of a multiprocessor's threads that can be resident, limited by registers and blocks.

        Args:
            threads: threads per block.

        Raises:
            KeyError: the architecture is not in the tables of this module.
        """
        warps = -(-threads // _WARP)
        of_a_warp = -(-self.registers * _WARP // _REGISTER_UNIT) * _REGISTER_UNIT
        limits = (_REGISTERS // (of_a_warp * warps), _THREADS[self.arch] // (warps * _WARP), _BLOCKS[self.arch])
        return min(limits) * warps * _WARP / _THREADS[self.arch]


def resources(report: str) -> list[Resources]:
    """Parse a report of `ptxas -v`; return its kernels in order."""
    rows: list[Resources] = []
    for line in report.splitlines():
        if found := _ENTRY.search(line):
            rows.append(Resources(int(found[2]), found[1], 0, 0, 0, 0))
        elif rows and (found := _SPILLS.search(line)):
            rows[-1] = replace(rows[-1], stack=int(found[1]), spills=int(found[2]) + int(found[3]))
        elif rows and (found := _USED.search(line)):
            shared = _SHARED.search(line)
            rows[-1] = replace(rows[-1], registers=int(found[1]), shared=int(shared[1]) if shared else 0)
    names = _demangled([row.kernel for row in rows])
    return [replace(row, kernel=name) for row, name in zip(rows, names, strict=True)]


def table(rows: list[Resources]) -> str:
    """Return a text table with one line per kernel: registers and spills on every architecture."""
    archs = sorted({row.arch for row in rows})
    by_kernel: dict[str, dict[int, Resources]] = {}
    for row in rows:
        by_kernel.setdefault(row.kernel, {})[row.arch] = row
    width = max((len(kernel) for kernel in by_kernel), default=6)
    lines = [f"{'kernel':{width}}" + "".join(f"  sm_{arch:<4} spills" for arch in archs)]
    for kernel, columns in sorted(by_kernel.items()):
        cells = (columns.get(arch) for arch in archs)
        lines.append(
            f"{kernel:{width}}"
            + "".join(f"  {cell.registers:7} {cell.spills:6}" if cell else " " * 16 for cell in cells)
        )
    return "\n".join(lines)


def _demangled(names: list[str]) -> list[str]:
    """Return demangled names without namespace, result and parameters; unchanged if there is no c++filt."""
    tool = shutil.which("c++filt")
    if tool is None or not names:
        return names
    lines = subprocess.run(
        [tool], input="\n".join(names), capture_output=True, text=True, check=True
    ).stdout.splitlines()
    return [_short(line) for line in lines]


def _short(line: str) -> str:
    line = line.removeprefix("void ").replace("megazero::", "")
    line = line.replace("__nv_bfloat16", "bf16").replace("__half", "fp16").replace("float", "fp32")
    return line.split("(")[0]


def known_archs(nvcc: str) -> list[int]:
    """Return the compute capabilities that nvcc compiles for, ascending, from 70 up."""
    lines = subprocess.run([nvcc, "--list-gpu-arch"], capture_output=True, text=True, check=True).stdout.split()
    archs = sorted(int(line.removeprefix("compute_")) for line in lines if line.startswith("compute_"))
    return [arch for arch in archs if arch >= _OLDEST_ARCH]


def release_archs(nvcc: str) -> list[int]:
    """Return the architectures of a release: the oldest, 80, 90, 100 and 120, of those that nvcc knows from 70 up."""
    known = known_archs(nvcc)
    return sorted({known[0], *(arch for arch in _RELEASE_ARCHS if arch in known)})


def main() -> int:
    """Print the registers and spills of each CUDA kernel; return 1 if the kernels cannot be built."""
    try:
        library = cuda.library(release_archs(find_nvcc()))
    except BuildError as error:
        print(f"cuda kernels: not built, {error}", file=sys.stderr)
        return 1
    print(table(resources(compiler_report(library))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
