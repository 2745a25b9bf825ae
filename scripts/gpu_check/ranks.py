"""Compare training on the device with training on the CPU, and a sharded, offloading engine with a plain one.

    ranks     two processes on one GPU (one layout: four), gloo through the host's memory, against one process on the
              CPU: initial weights equal, losses, norms, gradients and weights within the tolerances of certify
    engine    one process on the device, stage 3 with recompute and offload, against stage 0 there: every bit, but for
              what an optimizer on the host computes, which is another device's arithmetic

The processes are fresh interpreters: a fork cannot use a GPU that its parent has used.
"""

import json
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from megazero.comm.grid import single
from megazero.launch.scratch import scratch_folder
from megazero.tools.certify.comparison import Compared, compare
from megazero.tools.certify.rank import Results, load_results
from megazero.tools.certify.tolerances import Tolerance, tolerance_of
from scripts.gpu_check.layouts import HEADS, Case, train

ROOT = Path(__file__).parents[2]
LIMIT_S = 120  # for the processes of one size
DTYPES = ("fp32", "bf16")
SAVED = {"recompute": "full", "partition": True, "offload": True}
TWO = (
    Case("stage 1, data 2", {"stage": 1, "data": 2, "micro_batch": 2}),
    Case("stage 2, data 2", {"stage": 2, "data": 2, "micro_batch": 2}),
    Case("stage 3, data 2, recompute", {"stage": 3, "data": 2, "micro_batch": 4, "recompute": "full"}),
    Case("stage 3, data 2, offload", {"stage": 3, "data": 2, "micro_batch": 2, "offload_parameters": True} | SAVED),
    Case("tensor 2", {"tensor": 2}),
    Case("tensor 2, sequence", {"tensor": 2, "sequence": True}),
    Case("pipeline 2", {"pipeline": 2, "micro_batch": 2}),
    Case("tensor 2, sequence, chunks", {"tensor": 2, "sequence": True, "tensor_chunks": 2}),
)
FOUR = (Case("stage 2, data 2, pipeline 2", {"stage": 2, "data": 2, "pipeline": 2, "micro_batch": 2}),)
SHARED = (TWO, FOUR)
PLAIN = Case("stage 0")
ALONE = (
    PLAIN,
    Case("stage 0 again"),
    Case("stage 3", {"stage": 3}),
    Case("stage 3, recompute, inputs on the host", {"stage": 3} | SAVED),
    Case("the same, parameters on the host", {"stage": 3, "offload_parameters": True} | SAVED),
    Case(
        "the same, optimizer on the host", {"stage": 3, "offload_parameters": True, "offload_optimizer": True} | SAVED
    ),
)


@dataclass(frozen=True)
class Trained:
    """The largest differences of a layout, beside what they may be.

    Attributes:
        exact: every bit must be equal.
    """

    part: str
    layout: str
    dtype: str
    ranks: int
    exact: bool
    found: Compared
    allowed: Tolerance

    @property
    def fault(self) -> str | None:
        if self.found.fault is None and self.exact and not self.found.bitwise:
            return "not equal bit for bit"
        return self.found.fault

    def as_json(self) -> dict[str, Any]:
        return asdict(self) | {"fault": self.fault}


def on_shared_gpu(device: torch.device) -> Iterator[Trained]:
    """Yield the comparison of several processes on the one device with one on the CPU."""
    alone = {dtype: train(replace(PLAIN, dtype=dtype), single(), torch.device("cpu")) for dtype in DTYPES}
    for layouts in SHARED:
        for layout, ranks in _trained(device, layouts):
            yield _row("ranks", layout, ranks, alone[layout.dtype], exact=False)


def engine(device: torch.device) -> Iterator[Trained]:
    """Yield the comparison, in one process, of what is sharded, computed again and moved with what is not."""
    found = list(_trained(device, ALONE))
    plain = {layout.dtype: ranks for layout, ranks in found if layout.name == PLAIN.name}
    for layout, ranks in found:
        beside = plain[layout.dtype]
        if isinstance(beside, str):  # it says why in its own row
            yield _row("engine", layout, beside, None, exact=True)
        elif layout.name != PLAIN.name:
            yield _row("engine", layout, ranks, beside[0], exact=not layout.job.offload_optimizer)


def table(rows: Sequence[Trained]) -> str:
    """Return one line a layout: differences, and which of them may not be."""
    lines = [f"{'layout':40} {'ranks':>5} {'dtype':5} {'loss':>8} {'norm':>8} {'gradient':>8} {'weight':>8}"]
    for dtype in dict.fromkeys(row.dtype for row in rows):
        t = tolerance_of(dtype)
        numbers = " ".join(f"{value:8.0e}" for value in (t.loss, t.norm, t.gradients, t.weights))
        lines.append(f"{'  allowed':40} {'':5} {dtype:5} {numbers}")
    for row in rows:
        c = row.found
        numbers = " ".join(f"{value:8.1e}" for value in (c.loss, c.norm, c.gradients, c.weights))
        verdict = f"FAILED {row.fault}" if row.fault else "every bit" if c.bitwise else ""
        lines.append(f"{row.layout:40} {row.ranks:5} {row.dtype:5} {numbers}  {verdict}")
    return "\n".join(lines)


def _row(part: str, layout: Case, ranks: list[Results] | str, alone: Results | None, *, exact: bool) -> Trained:
    tolerance = tolerance_of(layout.dtype)
    if isinstance(ranks, str) or alone is None:
        found = Compared(fault=str(ranks))
    else:
        found = compare(ranks, alone, HEADS, HEADS, tolerance)
    return Trained(part, layout.name, layout.dtype, layout.job.ranks, exact, found, tolerance)


def _trained(device: torch.device, layouts: Sequence[Case]) -> Iterator[tuple[Case, list[Results] | str]]:
    """Yield what each rank of each layout, all of one size, computed in each dtype; or why it did not."""
    each = [replace(layout, dtype=dtype) for dtype in DTYPES for layout in layouts]
    with scratch_folder("check") as folder:
        size = layouts[0].job.ranks
        job = {"size": size, "device": device.type, "layouts": [asdict(layout) for layout in each]}
        (folder / "job.json").write_text(json.dumps(job))
        fault = _run(folder, size, device)
        for layout in each:
            where, last = folder / layout.folder, layout is each[-1]
            there = all((where / f"{rank}.json").exists() for rank in range(size))
            if there and not (fault and last):  # one that fails after its last layout has failed too
                yield layout, [load_results(where, rank) for rank in range(size)]
            else:
                yield layout, fault or "no results"


def _run(folder: Path, size: int, device: torch.device) -> str:
    """Run the ranks; return what the first that failed said last, or ""."""
    line = ["env", "CUBLAS_WORKSPACE_CONFIG=:4096:8", *(["CUDA_VISIBLE_DEVICES="] if device.type == "cpu" else [])]
    line += [sys.executable, "-m", "scripts.gpu_check.rank", str(folder)]
    logs = [folder / f"rank-{rank}.log" for rank in range(size)]
    ranks: list[subprocess.Popen[bytes]] = []
    fault, failed = "", 0
    try:
        for rank, log in enumerate(logs):
            with log.open("wb") as out:
                ranks.append(subprocess.Popen([*line, str(rank)], cwd=ROOT, stdout=out, stderr=subprocess.STDOUT))
        late = time.monotonic() + LIMIT_S
        while any(rank.poll() is None for rank in ranks) and not any(rank.poll() for rank in ranks) and not fault:
            fault = f"not done within {LIMIT_S} s" if time.monotonic() > late else ""
            time.sleep(0.05)
        ended = [number for number, rank in enumerate(ranks) if rank.poll()]  # by themselves, signals too
        if ended:
            failed = ended[0]
            fault = f"rank {failed} ended with {ranks[failed].returncode}"
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    texts = [log.read_text(errors="replace").rstrip() for log in logs]
    for text in filter(None, texts if fault else texts[:1]):
        print(text, flush=True)
    return f"{fault}: {texts[failed].splitlines()[-1]}" if fault and texts[failed] else fault
