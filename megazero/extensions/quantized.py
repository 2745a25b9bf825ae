"""Send values between ranks as integers of 8 or 4 bits (`zero.quantize`): a half to an eighth of the bytes.

    parameters   int8. A rank quantises its shard, the codes are all-gathered, and every rank, the owner too, computes
                 with the dequantised codes: so all ranks have equal values. Master weights stay exact.
    gradients    int8 or int4. Each rank quantises the shards of the other ranks and sends each to its owner
                 (all-to-all), which adds the dequantised codes to its own gradients, in rank order. So a value is
                 rounded once, where a ring would round at every hop, and a rank's own part is not rounded. With
                 `zero.secondary_ranks` there are two exchanges (hops), each with one rounding: first the i-th rank of
                 each group of neighbours sums its group's gradients for the i-th ranks of all groups; then the i-th
                 ranks exchange these sums, so that only they cross hosts.

A code's error is at most 1/254 of the largest magnitude in its block of 256 with 8 bits, 1/14 with 4; bf16 adds 1/256.
A block with a non-finite value arrives as NaN, so the same steps are skipped as without quantisation.

With error feedback each rank keeps the rounding error of every gradient that it sends, and adds it to the next one
before rounding: the sum of all that it has sent is then off by one rounding, after any number of steps. The residuals
take as much memory as the gradients of all other ranks' shards, with one hop or two. The residual of a non-finite block
is 0. The first reduction of a step adds residuals times `carry`: 0 after a skipped step, whose gradients were
discarded; 2 if the loss scale, and so each gradient, has doubled.

(Wang et al. 2023, ZeRO++, arXiv 2306.10209, sections 3.1 and 3.3: qwZ and qgZ. Seide et al. 2014, 1-bit stochastic
gradient descent, Interspeech, section 3.1: error feedback.)
"""

from __future__ import annotations  # no import of the config package: its types are only named here

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from megazero.base.quantized import BITS, BLOCK, quantized_bytes
from megazero.comm.collectives import Pending, start_all_gather_in_place, start_all_to_all
from megazero.comm.grid import Axis, Grid
from megazero.comm.pool import Pool, same_place
from megazero.kernels.operations import Operations
from megazero.zero.extension import Extension, Gathering, Summing
from megazero.zero.placement import FlatBuffer, Placement, Precision, UnitAxes, redistribute

if TYPE_CHECKING:
    from megazero.config.schema import Config


class QuantizedGathering(Gathering):
    """Gathers one unit's parameters as codes (quantised values).

    Args:
        bits: of a code.
        ops: the kernels to use.
        pool: of uint8 buffers, for codes.
        axis: the ranks that each have a shard.
        dtype: of the parameters.
    """

    rounds = True

    def __init__(self, bits: int, ops: Operations, pool: Pool, axis: Axis, dtype: torch.dtype):
        super().__init__(dtype)
        self.bits, self.ops, self._pool, self._axis = bits, ops, pool, axis

    def start(self, shard: FlatBuffer, whole: FlatBuffer) -> Pending:
        """Start to fill `whole` with the dequantised codes of all ranks."""
        own = whole.part(shard.elements, shard.placements)
        redistribute(shard, own, "parameters").wait()
        codes = self.message(whole.values)
        self.ops.quantize_(codes.chunk(self._axis.size)[self._axis.rank], own.values, self.bits)
        pending = start_all_gather_in_place(codes, self._axis, "parameters")
        return pending.then(lambda: self.arrive(self._noted(codes), whole.values))

    def message_bytes(self, numel: int) -> int:
        """Return the bytes of the codes of a unit of `numel` elements."""
        return self._axis.size * quantized_bytes(numel // self._axis.size, self.bits)

    def message(self, whole: Tensor) -> Tensor:
        """Return a buffer for the codes of a whole unit."""
        return self._pool.take(self.message_bytes(len(whole)))

    def arrive(self, message: Tensor, whole: Tensor) -> Tensor:
        """Dequantise the codes in `message` into `whole`, the unit's parameters; free `message`; return `whole`."""
        for part, codes in zip(whole.chunk(self._axis.size), message.chunk(self._axis.size), strict=True):
            self.ops.dequantize_(part, codes, self.bits, False)
        self._pool.give(message)
        return whole


@dataclass(eq=False)
class QuantizedSumming(Summing):
    """Sums one unit's gradients, sent as codes.

    Args:
        bits: of a code.
        ops: the kernels to use.
        pool: of uint8 buffers, for codes.
        axis: the ranks that each have a shard.
        hops: the axes of a two-step sum, together `axis`: the neighbours, then the ranks with this rank's index among
            their neighbours; None: one step over `axis`.
        residuals: this unit's rounding errors, [shards of other ranks, elements of a shard]; None: no error feedback.
        carry: factor for the previous step's residuals, 0-dim, shared by all units.
    """

    bits: int
    ops: Operations
    pool: Pool
    axis: Axis
    hops: tuple[Axis, Axis] | None = None
    residuals: Tensor | None = None
    carry: Tensor | None = None
    rounds = True

    def start(self, partial: FlatBuffer, own: FlatBuffer, *, accumulate: bool) -> Pending:
        """Start to sum `partial` over ranks into `own`, this rank's shard; add to it if `accumulate`, else overwrite.

        Until the sum is complete `partial` is used, and may be changed; `own` may be a view of it.
        """
        begins, outs = not accumulate, [own.values]
        if self.hops is None:
            parts = [[part] for part in partial.values.chunk(self.axis.size)]
            return self._start_exchange(parts, outs, self.axis, 0, adds=accumulate, begins=begins)
        near, far = self.hops  # `near`: the neighbours; the second hop starts when the first is waited for
        parts = [list(of_place) for of_place in partial.values.view(far.size, near.size, len(own)).unbind(1)]
        sums, first = parts[near.rank], (near.size - 1) * far.size
        return self._start_exchange(parts, sums, near, 0, adds=False, begins=begins).then(
            lambda: self._start_exchange(
                [[one] for one in sums], outs, far, first, adds=accumulate, begins=begins
            ).wait()
        )

    def _start_exchange(
        self,
        parts: Sequence[Sequence[Tensor]],
        outs: Sequence[Tensor],
        axis: Axis,
        first: int,
        *,
        adds: bool,
        begins: bool,
    ) -> Pending:
        """Start an exchange that sums, over all ranks, their parts for this rank.

        Args:
            parts: for each receiving rank as many tensors as `outs`; must not be touched until the exchange is done.
            outs: receive the sums; they may be `parts` of this rank.
            first: index in `residuals` of the first one to use.
            adds: add the sums to `outs`.
            begins: True in the first reduction of a step.
        """
        each = quantized_bytes(len(outs[0]), self.bits)
        sent, received = (self.pool.take(axis.size * len(outs) * each) for _ in range(2))
        coded, came = (codes.view(axis.size, len(outs), each) for codes in (sent, received))
        others = [(rank, k) for rank in range(axis.size) if rank != axis.rank for k in range(len(outs))]
        for number, (rank, k) in enumerate(others, first):
            self._quantize(coded[rank, k], parts[rank][k], number, first=begins)
        pending = start_all_to_all(sent, received, axis, "gradients")

        def land() -> Tensor:
            for out, own in zip(outs, parts[axis.rank], strict=True):
                if adds:
                    out.add_(own)
                elif not same_place(out, own):
                    out.copy_(own)
            for rank, k in others:
                self.ops.dequantize_(outs[k], came[rank, k], self.bits, True)
            self.pool.give(sent)
            self.pool.give(received)
            return outs[0]

        return pending.then(land)

    def _quantize(self, codes: Tensor, x: Tensor, number: int, *, first: bool) -> None:
        """Quantise x into `codes`. With error feedback, add a residual to x first; the new error replaces it.

        Args:
            number: index of the residual.
            first: True in the first reduction of a step.
        """
        if self.residuals is None:
            self.ops.quantize_(codes, x, self.bits)
            return
        assert self.carry is not None
        residual = self.residuals[number]
        x.addcmul_(residual, self.carry) if first else x.add_(residual)
        self.ops.quantize_(codes, x, self.bits)
        self.ops.dequantize_(residual, codes, self.bits, False)
        torch.sub(x, residual, out=residual).nan_to_num_(0.0, 0.0, 0.0)


@dataclass(eq=False)
class Quantized(Extension):
    """Extension that sends parameters, gradients or both as codes.

    Args:
        parameters, gradients: bits of a code; None: sent unquantised.
        pools: of uint8 buffers, for the codes of parameters and of gradients.
        feedback: keep the rounding errors of gradients and add them to the next gradients.
        hops: see `QuantizedSumming`.
    """

    alignment = BLOCK  # each parameter starts at a block boundary, so no block spans two parameters
    parameters: int | None
    gradients: int | None
    ops: Operations
    pools: tuple[Pool, Pool]
    precision: Precision
    device: torch.device
    feedback: bool
    hops: tuple[Axis, Axis] | None

    def __post_init__(self) -> None:
        self._carry = torch.ones((), device=self.device)

    def gathering(self, plain: Gathering, numel: int, axes: UnitAxes, device: torch.device) -> Gathering:
        """Return a gathering of codes if parameters are quantised and sharded over several ranks, else `plain`."""
        if self.parameters is None or axes.shard.size == 1 or axes.stage.parameters is not Placement.SHARD:
            return plain
        return QuantizedGathering(self.parameters, self.ops, self.pools[0], axes.shard, self.precision.parameters)

    def summing(self, plain: Summing, shard: slice, axes: UnitAxes) -> Summing:
        """Return a summing of codes if the optimizer state is sharded, else `plain`."""
        if self.gradients is None or axes.shard.size == 1 or axes.stage.optimizer is not Placement.SHARD:
            return plain
        residuals = None
        if self.feedback:
            shape = axes.shard.size - 1, shard.stop - shard.start
            residuals = torch.zeros(shape, dtype=self.precision.gradients, device=self.device)
            axes.shard.comm.ledger.hold("residuals", residuals.nbytes)
        return QuantizedSumming(self.gradients, self.ops, self.pools[1], axes.shard, self.hops, residuals, self._carry)

    def end_step(self, skipped: Tensor, scale: Tensor, next_scale: Tensor) -> None:
        """Set the factor of the residuals to `next_scale` / `scale`; to 0 after a skipped step."""
        if self.feedback:
            self._carry.copy_(torch.where(skipped, 0.0, next_scale / scale))

    def forget(self) -> None:
        """Discard the residuals: the next step multiplies them by 0."""
        self._carry.zero_()


def quantized(
    config: Config, grid: Grid, axes: tuple[Axis, Axis], ops: Operations, precision: Precision, device: torch.device
) -> Extension | None:
    """Return the extension for `zero.quantize`; None if nothing is quantised."""
    asked = config.zero.quantize
    parameters, gradients = BITS[asked.parameters], BITS[asked.gradients]
    if parameters is None and gradients is None:
        return None
    hops = axes if config.zero.secondary_ranks is not None and axes[1].size > 1 else None
    pools = Pool(torch.uint8, device, grid.comm.ledger, "pool"), Pool(torch.uint8, device, grid.comm.ledger, "pool")
    feedback = asked.error_feedback and gradients is not None
    return Quantized(parameters, gradients, ops, pools, precision, device, feedback, hops)
