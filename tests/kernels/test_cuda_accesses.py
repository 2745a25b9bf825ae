"""Kernels that work on packs of 16 bytes read and write memory in packs: the compiler has split none of them.

A split pack costs no register and computes the right numbers, so neither the report of ptxas nor the emulator shows it.
It shows in PTX: as many narrow accesses as the pack has elements. The narrow accesses that belong to a kernel are in
`NARROW`. (Local memory, which spills and arrays that are indexed at run time take, is refused in test_cuda_build.py.)
"""

import re
import subprocess
from collections import Counter
from pathlib import Path

import pytest

from megazero.kernels import build
from scripts import ptxas
from tests.kernels.test_cuda_build import SOURCE, needs_nvcc

BYTES = {"8": 1, "16": 2, "32": 4, "64": 8}
ACCESS = re.compile(r"\s+(?:@!?%\w+ )?(ld|st)\.global(?:\.\w+)*?(?:\.v(\d))?\.[usfb](\d+)\b")
# The last template argument that is a number is the width of a pack; kernels of one element are the fallback.
PACKED = re.compile(r", [2-9](?:, (?:true|false))?>$")

# Accesses of less than 8 bytes, (loads, stores), of kernels that have some.
NARROW = {
    "norm_forward": (0, 2),  # mean and 1 / deviation of a row; RMSNorm has one of them
    "norm_backward": (4, 0),  # the same, of two rows at a time
    "dropout_add_forward": (4, 0),  # a sample's id for each of four rows
    "dropout_backward": (4, 0),
    "cross_entropy_parts": (1, 3),  # the target's logit; maximum, sum and logit of a row
    "cross_entropy_backward": (8, 0),  # two numbers of each of four rows
    "adamw_update": (9, 0),  # the settings of the step
    "quantize": (0, 10),  # four codes of a byte at once, and a scale; unrolled
    "dequantize": (3, 0),
}


def accesses(ptx: str) -> dict[str, Counter[tuple[str, int]]]:
    """Return how often each kernel has a load or store ("ld", "st") of so many bytes of global memory."""
    found: dict[str, Counter[tuple[str, int]]] = {}
    name = ""
    for line in ptx.splitlines():
        if entry := re.search(r"\.entry (\w+)", line):
            name = entry[1]
            found[name] = Counter()
        elif name and (access := ACCESS.match(line)):
            found[name][access[1], int(access[2] or 1) * BYTES[access[3]]] += 1
    return dict(zip(ptxas._demangled(list(found)), found.values(), strict=True))


def split(kernels: dict[str, Counter[tuple[str, int]]]) -> list[str]:
    """Return the kernels on packs with more narrow accesses than belong to them."""
    wrong = []
    for name, counts in kernels.items():
        base = name.partition("<")[0]
        if PACKED.search(name) or base == "norm_forward":
            loads, stores = (
                sum(n for (k, size), n in counts.items() if k == kind and size < 8) for kind in ("ld", "st")
            )
            most = NARROW.get(base, (0, 0))
            if loads > most[0] or stores > most[1] or not any(size >= 8 for _, size in counts):
                wrong.append(f"{name}: {dict(counts)}")
    return wrong


def compiled(source: Path, folder: Path, *options: str) -> dict[str, Counter[tuple[str, int]]]:
    out = folder / "kernels.ptx"
    command = [build.find_nvcc(), "-O3", "-std=c++20", "-ptx", "-arch=sm_90", *options, str(source), "-o", str(out)]
    subprocess.run(command, check=True, capture_output=True)
    return accesses(out.read_text())


@pytest.mark.full
@needs_nvcc
def test_packs_are_whole(tmp_path: Path) -> None:
    kernels = compiled(SOURCE, tmp_path, *build._TORCH_FOLDERS, "-DTORCH_TARGET_VERSION=0x020a000000000000")
    packed = [name for name in kernels if PACKED.search(name)]
    assert len(packed) >= 60 and {name.partition("<")[0] for name in packed} >= NARROW.keys() - {"norm_forward"}
    assert split(kernels) == []


GELU = """#include "gelu.cuh"
template __global__ void megazero::bias_gelu_forward<__nv_bfloat16, 8>(
    const __nv_bfloat16*, const __nv_bfloat16*, __nv_bfloat16*, const Tiles);
"""


@pytest.mark.full
@needs_nvcc
def test_a_split_store_is_found(tmp_path: Path) -> None:
    """A struct that is copied as such is split in this kernel."""
    for header in SOURCE.with_suffix("").glob("*.cuh"):
        text = header.read_text()
        before, signature, after = text.partition("void store(")
        (tmp_path / header.name).write_text(before + signature + after.replace("#ifdef __CUDA_ARCH__", "#if 0", 1))
    source = tmp_path / "one.cu"
    source.write_text(GELU)
    (wrong,) = split(compiled(source, tmp_path))
    assert wrong.startswith("bias_gelu_forward<bf16, 8>")
