"""Compare training on the device with training on the CPU, and a sharded engine with offload with a plain one.

    ranks     two or four processes on one GPU (gloo through host memory), compared with one process on the CPU: equal
              initial weights; losses, norms, gradients and weights within the tolerances of certify
    nccl      the same layouts with one GPU per rank, if there are several: NCCL
    fused     some of these layouts, and one process, with fused kernels on the device; the CPU uses the reference
    engine    one process on the device in stage 3 with recompute and offload, compared with stage 0 on the device: bit
              for bit, unless the optimizer is on the host, whose arithmetic differs

The tolerances are those of the certificate, whose CPU ranks differ in the order of their sums. A GPU and a CPU differ
in the same way, with fp32 products in fp32 and attention by plain products (`layouts.exact`). Layouts with quantised
messages have the tolerances of their codes. In 16 bits no single gradient or weight is compared, so a wrong kernel
shows in fp32.

Ranks are forked from a fresh interpreter: a forked process cannot use a GPU or threads that its parent has used.
"""

import json
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from megazero.comm.grid import single
from megazero.tools.certify.comparison import Compared, compare
from megazero.tools.certify.rank import Results, load_results
from megazero.tools.certify.tolerances import tolerance_of
from scripts.gpu_check import commands
from scripts.gpu_check.findings import Asked, Row, error_line
from scripts.gpu_check.kernels import missing
from scripts.gpu_check.layouts import HEADS, Case, config_of, exact, train

LIMIT_S = 60  # limit of all layouts with the same number of ranks, in seconds
DTYPES = ("fp32", "bf16")
_MEASURES = {"loss": "loss", "norm": "gradient norm", "gradients": "first gradients", "weights": "weights"}
SAVED = {"recompute": "full", "partition": True, "offload": "cpu"}
TWO = (
    Case("stage 1, data 2", {"stage": 1, "data": 2, "micro_batch": 2}),
    Case("stage 2, data 2", {"stage": 2, "data": 2, "micro_batch": 2}),
    Case("stage 3, data 2, recompute", {"stage": 3, "data": 2, "micro_batch": 4, "recompute": "full"}),
    Case("stage 3, data 2, offload", {"stage": 3, "data": 2, "micro_batch": 2, "offload_parameters": "cpu"} | SAVED),
    Case("tensor 2", {"tensor": 2}),
    Case("tensor 2, sequence", {"tensor": 2, "sequence": True}),
    Case("pipeline 2", {"pipeline": 2, "micro_batch": 2}),
    Case("tensor 2, sequence, chunks", {"tensor": 2, "sequence": True, "tensor_chunks": 2}),
)
QUANTISED = {"quantize_parameters": "int8", "quantize_gradients": "int8"}
FOUR = (
    Case("stage 2, data 2, pipeline 2", {"stage": 2, "data": 2, "pipeline": 2, "micro_batch": 2}),
    Case("stage 3, data 4, hybrid", {"stage": 3, "data": 4, "shard_ranks": 2, "micro_batch": 2}),
    Case("stage 3, data 4, quantised", {"stage": 3, "data": 4, "micro_batch": 2} | QUANTISED),
)
SHARED = (TWO, FOUR)
PLAIN = Case("stage 0")
ALONE = (
    Case("stage 0 again"),
    Case("stage 3", {"stage": 3}),
    Case("stage 3, recompute, inputs on the host", {"stage": 3} | SAVED),
    Case("the same, parameters on the host", {"stage": 3, "offload_parameters": "cpu"} | SAVED),
    Case(
        "the same, optimizer on the host", {"stage": 3, "offload_parameters": "cpu", "offload_optimizer": "cpu"} | SAVED
    ),
)
FUSED = tuple(replace(case, kernels="fused") for case in (PLAIN, ALONE[2], ALONE[4]))
FUSED_TWO = tuple(replace(case, kernels="fused") for case in (TWO[2], TWO[5]))


def on_shared_gpu(asked: Asked) -> Iterator[Row]:
    """Compare several processes that share one device with one process on the CPU."""
    yield from _beside_cpu(SHARED, asked, shares_gpus=True)


def on_own_gpus(asked: Asked) -> Iterator[Row]:
    """Compare processes with one GPU each (NCCL) with one process on the CPU."""
    gpus = torch.cuda.device_count() if asked.on_gpu else 1
    fitting = [layouts for layouts in SHARED if layouts[0].job.ranks <= gpus]
    if not fitting:
        yield {"name": "NCCL with several ranks", "absent": "it needs a GPU for each rank"}
    yield from _beside_cpu(fitting, asked, shares_gpus=False)


def fused(asked: Asked) -> Iterator[Row]:
    """Compare fused kernels with the reference on the CPU, in fp32: in one process, then in two."""
    if (absent := missing(asked.device)) is not None:
        yield absent
        return
    alone = train(PLAIN, single(), torch.device("cpu"))
    exact(asked.device)
    for layout in FUSED:
        yield row_of(layout, alone_on(layout, asked), alone, exact=False)
    for layout, ranks in _trained(asked, FUSED_TWO, shares_gpus=True):
        yield row_of(layout, ranks, alone, exact=False)


def engine(asked: Asked) -> Iterator[Row]:
    """Compare stage 3 with recompute and offload with stage 0, in one process on the device."""
    yield from _allowed()
    exact(asked.device)
    for dtype in DTYPES:
        plain = train(replace(PLAIN, dtype=dtype), single(), asked.device)
        for each in ALONE:
            layout = replace(each, dtype=dtype)
            yield row_of(layout, alone_on(layout, asked), plain, exact=not layout.job.optimizer_away)


def row_of(layout: Case, ranks: list[Results] | str, alone: Results | None, *, exact: bool) -> Row:
    """Return the row of a layout: its largest relative differences, or the fault.

    Args:
        ranks: results of each rank; a text: why there are none.
        alone: results of the one process to compare with.
        exact: require equality of every bit.
    """
    if isinstance(ranks, str) or alone is None:
        found = Compared(fault=str(ranks))
    else:
        bits = layout.job.parameter_bits, layout.job.gradient_bits
        how = config_of(layout)
        allowed = tolerance_of(
            layout.dtype,
            parameter_bits=bits[0],
            gradient_bits=bits[1],
            optimizers=(how.optimizer.name,),
            narrow_moments=how.optimizer.moments == "bf16",
            masters=how.precision.masters != "none",
        )
        found = compare(ranks, alone, (HEADS, HEADS), allowed)
    fault = found.fault
    if fault is None and exact and not found.bitwise:
        fault = "not equal bit for bit"
    row: Row = {"name": layout.name, "ranks": layout.job.ranks, "dtype": layout.dtype}
    row |= {name: found.worst.get(measure, 0.0) for name, measure in _MEASURES.items()}
    return row | {"bits": "all" if found.bitwise else "not all", "fault": fault}


def alone_on(layout: Case, asked: Asked) -> list[Results] | str:
    """Return the results of one process on the device, or a text on why there are none."""
    try:
        return [train(layout, single(), asked.device)]
    except Exception as error:
        traceback.print_exc()
        return error_line(error)


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
        each = [replace(layout, dtype=dtype) for dtype in DTYPES for layout in layouts]
        for layout, ranks in _trained(asked, each, shares_gpus=shares_gpus):
            yield row_of(layout, ranks, alone[layout.dtype], exact=False)


def _trained(asked: Asked, layouts: Sequence[Case], *, shares_gpus: bool) -> Iterator[tuple[Case, list[Results] | str]]:
    """Train layouts of one number of ranks; yield the results of all ranks of each, or why there are none."""
    with TemporaryDirectory(prefix="megazero-check-") as name:
        folder = Path(name)
        size = layouts[0].job.ranks
        fault = _run(folder, size, asked, layouts, shares_gpus=shares_gpus)
        for layout in layouts:
            where, last = folder / layout.folder, layout is layouts[-1]
            found = [results for rank in range(size) if (results := load_results(where, rank)) is not None]
            if len(found) == size and not (fault and last):  # a failure after the last layout counts too
                yield layout, found
            else:
                yield layout, fault or "no results"


def _run(folder: Path, size: int, asked: Asked, layouts: Sequence[Case], *, shares_gpus: bool) -> str:
    """Run the ranks of a job (`rank.py`); return "", or the fault and the last line of output."""
    job = {"size": size, "device": asked.device.type, "shares_gpus": shares_gpus, "layouts": list(map(asdict, layouts))}
    (folder / "job.json").write_text(json.dumps(job))
    return commands.python(["-m", "scripts.gpu_check.rank", folder], folder / "log", LIMIT_S, asked.device)
