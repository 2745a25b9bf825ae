"""Check all that can be shown on one machine, in less than 8 minutes.

That is: that kernels build, are right, how fast they are; that a step waits for the GPU in named places only; how fast
training, stage 3's exchange and the host are; and that training in several ranks, through streams, NCCL where there are
several GPUs, and the host's memory, computes what one process does.

    scripts/gpu_check.sh [--device cuda|cpu] [--tiny] [--only PART ...] [--seconds 460] [--json FILE]

Each part (`parts.py`) is a process of its own with a limit: one that hangs or breaks leaves the others to be done. What
a machine lacks (nvcc, Liger, a second GPU) is said in a line, and is no failure. With --json, the figures are in FILE,
and as tables in Markdown beside it, after each part. Exits 1 when something is wrong (not when slow).
"""

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch

from scripts.gpu_check.findings import Asked, Row, finite, markdown
from scripts.gpu_check.parts import PARTS, imported, run

SECONDS = 460.0  # for all parts together
LEAST = 5.0  # without so many left, a part is not begun


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--tiny", action="store_true", help="sizes for a try, not for figures")
    parser.add_argument("--only", choices=list(PARTS), nargs="+", default=list(PARTS))
    parser.add_argument("--seconds", type=float, default=SECONDS, help="for all parts together")
    parser.add_argument("--json", type=Path, default=None)
    options = parser.parse_args()
    begin = time.perf_counter()
    device = torch.device("cuda", 0) if options.device == "cuda" else torch.device("cpu")
    asked = Asked(device, options.tiny)
    report: dict[str, Any] = {"machine": {}, "failures": 0, "seconds": 0.0, "parts": {}}
    chosen = [name for name in PARTS if name in options.only or name == "machine"]
    imported(chosen)
    for name in chosen:
        print(f"\n{PARTS[name].title}", flush=True)
        left = options.seconds - (time.perf_counter() - begin)
        rows, seconds = run(name, asked, min(left, PARTS[name].limit)) if left > LEAST else (_no_time(name), 0.0)
        report["parts"][name] = {"title": PARTS[name].title, "seconds": seconds, "rows": rows}
        report["failures"] += sum(bool(row.get("fault")) for row in rows)
        report["seconds"] = time.perf_counter() - begin
        if name == "machine":
            report["machine"] = rows[0] if rows else {}
        if options.json is not None:
            write(report, options.json)
        if name == "machine" and report["failures"]:
            break  # nothing else would find its device
    print(f"\n{report['failures']} failures, {report['seconds']:.0f} s")
    return 1 if report["failures"] else 0


def write(report: dict[str, Any], target: Path) -> None:
    """Write a report to a file, and as tables beside it."""
    target.write_text(json.dumps(finite(report), indent=1, allow_nan=False) + "\n", encoding="utf-8")
    target.with_suffix(".md").write_text(markdown(report), encoding="utf-8")


def _no_time(name: str) -> list[Row]:
    row: Row = {"name": name, "absent": "all of it: the check's time was over"}
    print(row["absent"])
    return [row]


if __name__ == "__main__":
    sys.exit(main())
