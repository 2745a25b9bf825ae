"""Compare training on the device with training on the CPU, and a sharded, offloading engine with a plain one.

    ranks     two processes on one GPU (one layout: four), gloo through the host's memory, against one process on the
              CPU: initial weights equal, losses, norms, gradients and weights within the tolerances of certify
    nccl      the same layouts with a GPU for each rank, where there are several: NCCL
    engine    one process on the device, stage 3 with recompute and offload, against stage 0 there: every bit, but for
              what an optimizer on the host computes, which is another device's arithmetic

Ranks are forked from a fresh interpreter: a fork cannot use a GPU, or threads, that its parent has used.
"""

import json
import subprocess
import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from megazero.comm.grid import single
from megazero.launcher.scratch import scratch_folder
from megazero.tools.certify.comparison import Compared, compare
from megazero.tools.certify.rank import Results, load_results
from megazero.tools.certify.tolerances import tolerance_of
from scripts.gpu_check.findings import Asked, Row, told
from scripts.gpu_check.layouts import HEADS, Case, exact, train

ROOT = Path(__file__).parents[2]
LIMIT_S, LAST_S = 60, 5  # for the ranks of one size, and for their end
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
    Case("stage 0 again"),
    Case("stage 3", {"stage": 3}),
    Case("stage 3, recompute, inputs on the host", {"stage": 3} | SAVED),
    Case("the same, parameters on the host", {"stage": 3, "offload_parameters": True} | SAVED),
    Case(
        "the same, optimizer on the host", {"stage": 3, "offload_parameters": True, "offload_optimizer": True} | SAVED
    ),
)


def on_shared_gpu(asked: Asked) -> Iterator[Row]:
    """Yield the comparison of several processes on the one device with one on the CPU."""
    yield from _beside_cpu(SHARED, asked, shares_gpus=True)


def on_own_gpus(asked: Asked) -> Iterator[Row]:
    """Yield the same with a GPU for each process, through NCCL; on a CPU through shared memory."""
    gpus = torch.cuda.device_count() if asked.on_gpu else 2
    fitting = [layouts for layouts in SHARED if layouts[0].job.ranks <= gpus]
    if not fitting:
        yield {"name": "NCCL with several ranks", "absent": f"there is {gpus} GPU, and NCCL refuses two ranks on it"}
    yield from _beside_cpu(fitting, asked, shares_gpus=False)


def engine(asked: Asked) -> Iterator[Row]:
    """Yield the comparison, in one process, of what is sharded, computed again and moved with what is not."""
    yield from _allowed()
    exact(asked.device)
    for dtype in DTYPES:
        plain = train(replace(PLAIN, dtype=dtype), single(), asked.device)
        for each in ALONE:
            layout = replace(each, dtype=dtype)
            try:
                found: Results | str = train(layout, single(), asked.device)
            except Exception as error:
                traceback.print_exc()
                found = told(error)
            ranks = found if isinstance(found, str) else [found]
            yield row_of(layout, ranks, plain, exact=not layout.job.offload_optimizer)


def speeds(gpus: int, asked: Asked, stages: Sequence[int]) -> Iterator[Row]:
    """Yield what rank 0 measures in some stages of ZeRO over so many GPUs (`exchange.py`)."""
    with scratch_folder("check") as folder:
        fault = _started(folder, gpus, asked, shares_gpus=False, tiny=asked.tiny, stages=list(stages))
        found = folder / "speeds.json"
        yield from json.loads(found.read_text()) if found.exists() else []
        if fault:
            yield {"name": f"{gpus} GPUs", "fault": fault}


def row_of(layout: Case, ranks: list[Results] | str, alone: Results | None, *, exact: bool) -> Row:
    """Return the largest relative differences of a layout, or why there are none.

    Args:
        exact: every bit must be equal.
    """
    if isinstance(ranks, str) or alone is None:
        found = Compared(fault=str(ranks))
    else:
        found = compare(ranks, alone, HEADS, HEADS, tolerance_of(layout.dtype))
    fault = found.fault
    if fault is None and exact and not found.bitwise:
        fault = "not equal bit for bit"
    row: Row = {"name": layout.name, "ranks": layout.job.ranks, "dtype": layout.dtype, "loss": found.loss}
    row |= {"norm": found.norm, "gradients": found.gradients, "weights": found.weights}
    return row | {"bits": "all" if found.bitwise else "not all", "fault": fault}


def _allowed() -> Iterator[Row]:
    for dtype in DTYPES:
        t = tolerance_of(dtype)
        allowed = {"loss": t.loss, "norm": t.norm, "gradients": t.gradients, "weights": t.weights}
        yield {"name": "  allowed", "dtype": dtype} | allowed


def _beside_cpu(sizes: Sequence[Sequence[Case]], asked: Asked, *, shares_gpus: bool) -> Iterator[Row]:
    if not sizes:
        return
    yield from _allowed()
    alone = {dtype: train(replace(PLAIN, dtype=dtype), single(), torch.device("cpu")) for dtype in DTYPES}
    for layouts in sizes:
        for layout, ranks in _trained(asked, layouts, shares_gpus=shares_gpus):
            yield row_of(layout, ranks, alone[layout.dtype], exact=False)


def _trained(asked: Asked, layouts: Sequence[Case], *, shares_gpus: bool) -> Iterator[tuple[Case, list[Results] | str]]:
    """Yield what each rank of each layout, all of one size, computed in each dtype; or why it did not."""
    each = [replace(layout, dtype=dtype) for dtype in DTYPES for layout in layouts]
    with scratch_folder("check") as folder:
        size = layouts[0].job.ranks
        told = {"layouts": [asdict(layout) for layout in each]}
        fault = _started(folder, size, asked, shares_gpus=shares_gpus, **told)
        for layout in each:
            where, last = folder / layout.folder, layout is each[-1]
            there = all((where / f"{rank}.json").exists() for rank in range(size))
            if there and not (fault and last):  # one that fails after its last layout has failed too
                yield layout, [load_results(where, rank) for rank in range(size)]
            else:
                yield layout, fault or "no results"


def _started(folder: Path, size: int, asked: Asked, **told: Any) -> str:
    """Run the ranks of a job (`rank.py`); return what the first that failed said last, or ""."""
    (folder / "job.json").write_text(json.dumps({"size": size, "device": asked.device.type} | told))
    return _run(folder, asked.device)


def _run(folder: Path, device: torch.device) -> str:
    line = ["env", *(["CUDA_VISIBLE_DEVICES="] if device.type == "cpu" else [])]
    line += [sys.executable, "-m", "scripts.gpu_check.rank", str(folder)]
    log, fault = folder / "log", ""
    with log.open("wb") as out:
        process = subprocess.Popen(line, cwd=ROOT, stdout=out, stderr=subprocess.STDOUT)
        try:
            process.wait(LIMIT_S)
        except subprocess.TimeoutExpired:
            fault = f"not done within {LIMIT_S} s"
            process.terminate()
            with suppress(subprocess.TimeoutExpired):
                process.wait(LAST_S)
        finally:
            process.kill()
            process.wait()
    text = log.read_text(errors="replace").rstrip()
    print(text, flush=True)
    last = text.splitlines()[-1] if text else "it said nothing"
    return f"{fault}: {last}" if fault else last if process.returncode else ""
