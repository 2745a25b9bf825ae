"""Check everything that needs a GPU, on one machine, in at most nine minutes.

The parts check that kernels build and are correct; that train.py trains, saves, resumes and gives the same bits again;
that a step waits for the GPU only in named places; that training on several ranks and with fused kernels computes what
a CPU does. They measure the speed of kernels and of steps, compared with plain torch, torch.compile and FSDP2.

    scripts/gpu_check.sh [--device cuda|cpu] [--tiny] [--only PART ...] [--second] [--seconds S] [--json FILE]

Each part (`parts.py`) is a process with a time limit: if one hangs or fails, the others still run. A missing tool
(nvcc, Liger, compute-sanitizer, a second GPU) is a line of the report, not a failure. With --json the figures go to
FILE, as tables to a Markdown file next to it, and the rows and the output of each part to the folder FILE.parts; all
are written while the check runs. The summary is printed last. Exits with 1 if something is wrong (not if it is slow).
"""

import argparse
import json
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from scripts.gpu_check.findings import Asked, Row, finite, markdown, summary
from scripts.gpu_check.parts import ALL, PARTS, SECOND, SHOWN, imported, run

SECONDS = 525.0  # for all parts of a call together


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--tiny", action="store_true", help="tiny sizes for a trial, not for figures")
    parser.add_argument("--second", action="store_true", help="models of 7B parameters, for a GPU of 140 GB")
    parser.add_argument("--only", choices=list(ALL), nargs="+", help="parts (default: all)")
    parser.add_argument("--seconds", type=float, help="time limit of all parts together")
    parser.add_argument("--json", type=Path, default=None)
    options = parser.parse_args()
    begin = time.perf_counter()
    device = torch.device("cuda", 0) if options.device == "cuda" else torch.device("cpu")
    report: dict[str, Any] = {"machine": {}, "failures": 0, "seconds": 0.0, "parts": {}}
    parts = options.only or (SECOND if options.second else PARTS)
    chosen = [name for name in ALL if name in parts or name == "machine"]

    def tell(name: str, rows: list[Row], seconds: float) -> bool:
        report["parts"][name] = {"title": ALL[name].title, "seconds": seconds, "rows": rows}
        report["failures"] += sum(bool(row.get("fault")) for row in rows)
        report["seconds"] = time.perf_counter() - begin
        if name == "machine":
            report["machine"] = rows[0] if rows else {}
        if options.json is not None:
            write(report, options.json)
        return name != "machine" or not report["failures"]  # no other part would find its device

    imported(chosen)
    with TemporaryDirectory(prefix="megazero-check-") as scratch:
        folder = Path(scratch) if options.json is None else options.json.with_suffix(".parts")
        folder.mkdir(parents=True, exist_ok=True)
        run(chosen, Asked(device, options.tiny), options.seconds or SECONDS, folder, tell)
    print(f"\n{summary(report, SHOWN)}")
    return 1 if report["failures"] else 0


def write(report: dict[str, Any], target: Path) -> None:
    """Write a report to a JSON file, and as Markdown tables next to it."""
    target.write_text(json.dumps(finite(report), indent=1, allow_nan=False) + "\n", encoding="utf-8")
    target.with_suffix(".md").write_text(markdown(report), encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
