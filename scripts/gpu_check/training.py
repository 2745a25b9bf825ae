"""Measure the training speed of one GPU: a GPT of 1.3B parameters, micro-batch 1 and 4, fused and reference kernels.

A step has 8 sequences of 2,048 tokens, in 8 micro-batches or in 2, from the same weights: so the losses of all rows
have to agree, and what differs is the size of the products. `host_s` is how long the host takes to queue a step: where
it is as long as the step itself, the device waits for the host.
"""

from collections.abc import Iterator

import torch

from megazero.comm.grid import single
from megazero.kernels.select import choose
from scripts.gpu_check.findings import Asked, Row
from scripts.gpu_check.kernels import missing
from scripts.gpu_check.layouts import Case
from scripts.gpu_check.speed import measured

MICRO_BATCHES = (1, 4)
ALLOWED = 1e-2  # of the last loss, relative: some steps of bf16 with other roundings, no wrong gradient


def rows(asked: Asked) -> Iterator[Row]:
    """Yield one row for each choice of kernels and micro-batch."""
    if (absent := missing(asked.device)) is not None:
        yield absent
    losses: list[float] = []
    for kernels in ("fused", "reference") if absent is None else ("reference",):
        ops = choose(kernels, asked.device, torch.bfloat16)
        for micro in MICRO_BATCHES:
            case = Case("training", {"micro_batch": micro}, dtype="bf16")
            row = measured(f"{kernels}, micro-batch {micro}", case, single(), asked, ops)
            if "fault" not in row:
                losses.append(row["loss"])
                row["loss_apart"] = apart = abs(losses[-1] - losses[0]) / abs(losses[0])
                if apart > ALLOWED:
                    row["fault"] = f"losses differ by {apart:.1e}, allowed {ALLOWED:.0e}"
            yield row
