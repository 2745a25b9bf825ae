"""Check every kernel on the given device against its specification in fp64, on fresh random inputs.

Errors are in units of the allowed error: more than 1 is a fault. `samples.py` explains the allowed error.

    python -m scripts.gpu_check.correctness cuda      calls each kernel once, for compute-sanitizer
"""

import math
import re
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from megazero.kernels import counter
from megazero.kernels.proof import DTYPES
from megazero.kernels.samples import FORMS, SAMPLES, Arguments, Draw, Sizes, distances, results
from scripts.gpu_check import commands
from scripts.gpu_check.findings import Asked, Row, error_line
from scripts.gpu_check.kernels import missing, obstacle

SANITIZER_S = 90  # limit of one tool, in seconds
TINY = (Sizes(3, 2, 64, 48, 72, 2, 16, 100), Sizes(5, 1, 33, 7, 50, 1, 6, 33_001))
# Rows of whole packs, rows of an odd length, rows for both register layouts of the norms, rows too long for registers.
LARGE = (
    Sizes(257, 3, 4096, 5120, 50_304, 8, 128, 1 << 22),
    Sizes(129, 2, 1001, 333, 50_257, 3, 22, (1 << 22) + 5),
    Sizes(64, 1, 8192, 16_384, 131_072, 2, 64, 1000),
    Sizes(48, 1, 16_384, 20_000, 4096, 2, 256, 12_345),
    Sizes(33, 1, 20_000, 8, 8, 1, 8, 7),
)


def rows(asked: Asked) -> Iterator[Row]:
    """Yield all operations in all forms and dtypes; a row gives the seed, which comes from the clock."""
    if (absent := missing(asked.device)) is not None:
        yield absent
        return
    seed = time.time_ns() % 2**31
    yield {"name": "seed", "number": seed}
    generator = torch.Generator(asked.device).manual_seed(seed)
    for name, make in (SAMPLES | FORMS).items():
        for dtype in DTYPES:
            row: Row = {"name": name, "dtype": str(dtype).removeprefix("torch.")}
            try:
                error, complaint = _checked(name, make, Draw(dtype, generator), TINY if asked.tiny else LARGE)
            except Exception as broken:  # go on with the other operations
                error, complaint = math.inf, error_line(broken)
            if not complaint and not error <= 1:
                complaint = f"{error:.3g} times what is allowed"
            yield row | {"error": error, "fault": complaint}


def sanitized(asked: Asked) -> Iterator[Row]:
    """Run each operation on small sizes under compute-sanitizer; yield the results of memcheck and racecheck.

    torch's caching allocator is off: in its cache, an access past the end of a tensor would hit another tensor. On a
    CPU the operations run without the tool.
    """
    if (absent := missing(asked.device)) is not None:
        yield absent
        return
    name = "compute-sanitizer"
    sanitizer = shutil.which(name) or shutil.which(name, path="/usr/local/cuda/bin")
    if asked.on_gpu and sanitizer is None:
        yield {"name": name, "absent": "not on the PATH or in /usr/local/cuda"}
        return
    with TemporaryDirectory(prefix="megazero-sanitizer-") as scratch, ThreadPoolExecutor() as pool:
        folder = Path(scratch)
        words, apart = (
            ["-m", "scripts.gpu_check.correctness", asked.device.type],
            {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"},
        )
        futures = {}
        for tool in ("memcheck", "racecheck"):
            line = [*([sanitizer, "--tool", tool] if asked.on_gpu else []), sys.executable, *words]
            futures[tool] = pool.submit(commands.run, line, folder / tool, SANITIZER_S, asked.device, **apart)
        for tool, future in futures.items():
            fault = future.result()
            yield verdict(tool, (folder / tool).read_text(errors="replace"), fault, asked)


def verdict(tool: str, said: str, fault: str, asked: Asked) -> Row:
    """Return the row of compute-sanitizer's output; reports on torch's kernels are counted, but are no fault."""
    reports = [report for report in re.split(r"^=========\s*$", said, flags=re.MULTILINE) if " at " in report]
    ours = [line for report in reports for line in re.findall(r".*(?:megazero::|8megazero).*", report)[:1]]
    summary = re.findall(r"SUMMARY: (.*)", said) or [""]
    row: Row = {"name": tool, "calls": said.count("called "), "of_ours": len(ours), "summary": summary[-1]}
    row["of_others"] = len(reports) - len(ours)
    if not ours and asked.on_gpu:
        fault = "" if summary[-1] else fault or "no summary"
    return row | {"fault": ours[0].strip("= ")[:200] if ours else fault or None}


def call_all(device: torch.device) -> None:
    """Call each operation in all forms and dtypes on small sizes, without checking results."""
    obstacle(device)
    generator = torch.Generator(device).manual_seed(0)
    for name, make in (SAMPLES | FORMS).items():
        for dtype in DTYPES:
            for sizes in TINY:
                results(torch.ops.megazero, name.partition(",")[0], make(Draw(dtype, generator), sizes))
            if device.type == "cuda":
                torch.cuda.synchronize()
            print(f"called {name}, {dtype}", flush=True)


def _checked(
    form: str, make: Callable[[Draw, Sizes], Arguments], draw: Draw, all_sizes: tuple[Sizes, ...]
) -> tuple[float, str]:
    """Return the largest error over all sizes, and a text on any other fault."""
    worst, complaint, name = 0.0, "", form.partition(",")[0]
    for sizes in all_sizes:
        arguments = make(draw, sizes)
        found = results(torch.ops.megazero, name, arguments)
        again = results(torch.ops.megazero, name, arguments)
        if not all(torch.allclose(a, b, rtol=0, atol=0, equal_nan=True) for a, b in zip(found, again, strict=True)):
            complaint = "not reproducible"
        worst = max(worst, *distances(name, arguments, found))
        if name == "dropout_backward" and not _same_mask(arguments):
            complaint = "another mask than the counter's"
    return worst, complaint


def _same_mask(arguments: tuple) -> bool:
    grad, ids, positions, key, drop = arguments
    found = torch.ops.megazero.dropout_backward(torch.ones_like(grad), ids, positions, key, drop) != 0
    channels = torch.arange(grad.shape[-1], device=grad.device)
    return torch.equal(found, counter.keep_mask(key, ids, positions, channels, drop))


if __name__ == "__main__":
    call_all(torch.device("cuda", 0) if sys.argv[1] == "cuda" else torch.device("cpu"))
