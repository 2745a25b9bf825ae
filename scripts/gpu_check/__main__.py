"""Check all that can be shown on one machine.

That is: that kernels build, are right, how fast they are and train, and that training in several ranks on its one GPU,
through streams and the host's memory, computes what one process does.

    scripts/gpu_check.sh [--device cuda|cpu] [--tiny] [--only PART ...] [--json FILE]

Parts: build, correctness, bandwidth, training (kernels); ranks, engine (what is sharded, sent and moved, `ranks.py`).
A part that breaks leaves the others to be done. Prints tables; with --json it writes the same numbers to a file, after
each part. Exits 1 when something is wrong (not when slow).
"""

import argparse
import json
import math
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from megazero.kernels import cpu, cuda, ptxas, schema
from megazero.kernels.build import compiler_report
from scripts.gpu_check import bandwidth, correctness

PARTS = ("build", "correctness", "bandwidth", "training", "ranks", "engine")
Rows = list[dict[str, Any]]
_ = schema  # defines the operations


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--tiny", action="store_true", help="sizes for a try, not for figures")
    parser.add_argument("--only", choices=PARTS, nargs="+", default=PARTS)
    parser.add_argument("--batch", type=int, default=8, help="sequences of a training step")
    parser.add_argument("--json", type=Path, default=None)
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("torch sees no GPU; --device cpu tries the same steps without one")
    begin = time.perf_counter()
    device, tiny = torch.device(options.device), options.tiny
    report: dict[str, Any] = {"machine": machine(device)}
    print(json.dumps(report["machine"]))
    parts: dict[str, Callable[[], tuple[Any, int]]] = {
        "build": lambda: built(device),
        "correctness": lambda: checked(device, tiny),
        "bandwidth": lambda: timed(device, tiny),
        "training": lambda: trained(device, tiny, options.batch),
        "ranks": lambda: compared("ranks", device),
        "engine": lambda: compared("engine", device),
    }
    failures = 0
    for part, do in parts.items():
        if part not in (*options.only, "build"):
            continue
        try:
            report[part], failed = do()
        except Exception as error:
            traceback.print_exc()
            report[part], failed = {"error": repr(error)}, 1
        failures += failed
        report["failures"] = failures
        report["seconds"] = time.perf_counter() - begin
        if options.json is not None:
            options.json.write_text(json.dumps(finite(report), indent=1, allow_nan=False) + "\n", encoding="utf-8")
        if part == "build" and "error" in report[part]:
            break  # nothing else would find its kernels
    print(f"\n{failures} failures, {report['seconds']:.0f} s")
    return 1 if failures else 0


def finite(value: Any) -> Any:
    """Replace what is not a finite number by null: JSON has no other."""
    if isinstance(value, dict):
        return {name: finite(each) for name, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def machine(device: torch.device) -> dict[str, Any]:
    """Return what the numbers belong to: the machine and its software."""
    found: dict[str, Any] = {"torch": torch.__version__, "python": sys.version.split()[0], "cuda": torch.version.cuda}
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        found["gpu"] = properties.name
        found["multiprocessors"] = properties.multi_processor_count
        found["level_2_megabytes"] = properties.L2_cache_size >> 20
    return found


def built(device: torch.device) -> tuple[Rows, int]:
    """Build and load; return of the CUDA library one row for each kernel, and how many spill."""
    begin = time.perf_counter()
    how = cuda.load() if device.type == "cuda" else cpu.load()
    print(f"\nkernels: {how}, {time.perf_counter() - begin:.1f} s")
    if device.type != "cuda":
        return [], 0
    rows = ptxas.resources(compiler_report(cuda.library(cuda.present_archs())))
    print(
        f"{len(rows)} kernels, {max(row.registers for row in rows)} registers at most, "
        f"{sum(row.spills for row in rows)} bytes spilled"
    )
    return [asdict(row) for row in rows], sum(row.spills > 0 for row in rows)


def checked(device: torch.device, tiny: bool) -> tuple[Rows, int]:
    """Print a line for each operation; return all rows, and how many failed."""
    print(f"\n{'operation':26} {'dtype':9} {'error / allowed':>15}")
    rows, failures = [], 0
    for row in correctness.check(device, tiny):
        verdict = "" if row.passed else f"  FAILED {row.complaint}"
        print(f"{row.name:26} {row.dtype:9} {row.error:15.3f}{verdict}")
        rows.append(asdict(row))
        failures += not row.passed
    return rows, failures


def timed(device: torch.device, tiny: bool) -> tuple[dict[str, Any], int]:
    """Print a line for each operation and size, and the copy's speed before and after; shares are of that before.

    Returns all rows, and how many operations could not be timed.
    """
    before = bandwidth.copy_speed(device, tiny)
    print(f"\ncopy {before / 1e9:.0f} GB/s, read and written")
    print(
        f"{'operation':26} {'size':>20} {'MB':>8} {'us':>9} {'GB/s':>6} {'of copy':>7} {'wanted':>6} "
        f"{'eager':>6} {'compiled':>8}"
    )
    rows, failures = [], 0
    for row in bandwidth.measure(device, tiny, device.type == "cuda", before):
        if row is None:
            failures += 1
            continue
        slower = [f"{each / row.fused_us:.2f}x" if each else "-" for each in (row.eager_us, row.compiled_us)]
        wanted = "-" if row.target is None else f"{row.target:.2f}"
        print(
            f"{row.name:26} {row.sizes:>20} {row.megabytes:8.1f} {row.fused_us:9.1f} {row.gigabytes_s:6.0f} "
            f"{row.of_copy:7.2f} {wanted:>6} {slower[0]:>6} {slower[1]:>8}",
            flush=True,
        )
        rows.append(asdict(row))
    after = bandwidth.copy_speed(device, tiny)
    print(f"copy afterwards {after / 1e9:.0f} GB/s")
    return {"copy_before": before, "copy_after": after, "rows": rows}, failures


def trained(device: torch.device, tiny: bool, batch: int) -> tuple[Rows, int]:
    """Print a line for each choice of kernels; return them, and whether their losses are apart."""
    from scripts.gpu_check import training  # it needs more of the package than the kernels do

    print(f"\n{'kernels':10} {'s/step':>8} {'tokens/s':>10} {'MFU':>6} {'loss':>8} {'GiB':>6}")
    rows = training.train(device, tiny, batch)
    for row in rows:
        mfu = "-" if row.mfu is None else f"{row.mfu:.3f}"
        print(f"{row.kernels:10} {row.step_s:8.3f} {row.tokens_s:10.0f} {mfu:>6} {row.loss:8.4f} {row.peak_gib:6.1f}")
    apart = training.apart(rows)
    print(
        f"losses differ by {apart:.1e}, allowed {training.ALLOWED:.0e}"
        + ("" if apart <= training.ALLOWED else "  FAILED")
    )
    return [asdict(row) for row in rows], not apart <= training.ALLOWED


def compared(part: str, device: torch.device) -> tuple[Rows, int]:
    """Print a line for each layout; return all rows, and how many failed."""
    from scripts.gpu_check import ranks  # it needs more of the package than the kernels do

    print(f"\n{part}: largest relative differences", flush=True)
    rows = list(ranks.on_shared_gpu(device) if part == "ranks" else ranks.engine(device))
    print(ranks.table(rows))
    return [row.as_json() for row in rows], sum(row.fault is not None for row in rows)


if __name__ == "__main__":
    sys.exit(main())
