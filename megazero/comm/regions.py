"""Gather and reduce at the two ends of tensor-parallel regions, where a layer's work is split over the tensor axis.

Inside a region every rank has its own columns of a matrix or its own attention heads and sees all tokens; outside,
the residual stream is either the same on every rank, or (sequence parallelism) each rank holds its own part of the
sequence. Two operations connect the two sides, and each is the backward of the other:

                 gather: into the region           sum: out of the region
    plain        x                                 all-reduce of the partial results
    sequence     all-gather of the parts           reduce-scatter of the partial results

Forward gathers on the way in and sums on the way out; backward gathers the gradient on the way in and sums it on the
way out: the f and g of Megatron-LM (Shoeybi et al. 2019, section 3) and the g and g-bar of Korthikanti et al. 2022
(section 4.2.2). Both move 2 n (t - 1) / t elements for each pair of ends, also with sequence
parallelism.

The layers call the operations themselves (`model/linear.py`), because a matrix product's backward has other work to
do while the sum is under way. `leave` is for results of other layers than matrix products.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megazero.comm.collectives import Pending, done, start_all_gather, start_all_reduce, start_reduce_scatter
from megazero.comm.grid import Axis


@dataclass(eq=False)
class Region:
    """The two ends of a tensor-parallel region.

    Attributes:
        axis: the tensor axis.
        sequence: the residual stream is split over the axis along the sequence (dim 0).
        name: the name of its traffic in the ledger.
        chunks: forward gathers or sums in this many chunks, each in parallel with the matrix product of another
            (`model/linear.py`).
    """

    axis: Axis
    sequence: bool
    name: str
    chunks: int = 1

    def cut(self, rows: int) -> list[slice]:
        """Cut `rows` rows into chunks of nearly equal size: at most one per row; one if nothing is sent."""
        count = min(self.chunks, rows) if self.axis.size > 1 else 1
        return [slice(rows * i // count, rows * (i + 1) // count) for i in range(count)]

    def gather(self, x: Tensor, direction: str) -> Pending:
        """Start to gather all tokens [S, ...] from x, which is [S / t, ...] with sequence parallelism.

        Args:
            direction: "forward", "backward", or "again" for a repeated gather; for the ledger.
        """
        return start_all_gather(x, self.axis, f"{self.name} {direction}") if self.sequence else done(x)

    def sum(self, partial: Tensor, direction: str, out: Tensor | None = None) -> Pending:
        """Start the sum of partial results for all tokens, into the residual stream; `partial` may be overwritten.

        Args:
            out: memory for this rank's part of the sum under sequence parallelism; None: new memory.
        """
        if self.sequence:
            return start_reduce_scatter(partial, self.axis, f"{self.name} {direction}", out=out)
        return start_all_reduce(partial, self.axis, f"{self.name} {direction}")


class _Leave(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, partial: Tensor, region: Region) -> Tensor:
        ctx.region = region
        if not region.sequence:
            ctx.mark_dirty(partial)  # an all-reduce works in place
        return region.sum(partial, "forward").wait()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.region.gather(grads[0].contiguous(), "backward").wait(), None


def leave(partial: Tensor, region: Region) -> Tensor:
    """Return the sum of all ranks' partial results, in the layout of the residual stream; may overwrite `partial`."""
    return partial if region.axis.size == 1 else _Leave.apply(partial, region)
