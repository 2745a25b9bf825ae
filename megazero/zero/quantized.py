"""Send values between ranks as integers of 8 or 4 bits (`zero.quantize`): a half to an eighth of the bytes.

    parameters   int8. A rank quantises its shard, the codes are gathered, and every rank, the owner too, computes with
                 what they mean: so all have the same values. Masters stay exact.
    gradients    int8 or int4. Each rank quantises the shards of the others and sends each to its owner (all-to-all),
                 which adds what the codes mean to its own gradients, in rank order: nothing is rounded twice, where a
                 ring would round at every hop. What a rank keeps for itself is not rounded. Where neighbours have an
                 axis of their own (`zero.secondary_ranks`), in two hops: first among them, for each of all the others'
                 shards the sum of the neighbours', and then these between ranks of the same place, which cross hosts
                 once; rounded once at each hop.

A code is off by at most 1/254 of the largest magnitude of its block of 256 with 8 bits, 1/14 with 4; bf16 adds 1/256.
A block with a value that is not finite arrives as NaN, so a step is skipped where it would have been.

With error feedback each rank keeps, of every gradient that it sends, what the codes do not mean, and adds it before it
rounds the next one: what it has sent in all is then off by one rounding, however many steps there were. That takes as
much memory as the gradients of all the other ranks' shards, in one hop or in two. Of a block that is not finite nothing
is kept. The first reduction of a step adds residuals times `carry`: 0 after a skipped step, which has changed nothing,
2 where the loss scale, and so each gradient, has doubled.

(Wang et al. 2023, ZeRO++, arXiv 2306.10209, sections 3.1 and 3.3: qwZ and qgZ. Seide et al. 2014, 1-bit stochastic
gradient descent, Interspeech, section 3.1: error feedback.)
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from megazero.base.quantized import BLOCK, quantized_bytes
from megazero.comm.collectives import Pending, start_all_gather_in_place, start_all_to_all
from megazero.comm.grid import Axis
from megazero.comm.pool import Pool, same_place
from megazero.kernels.operations import Operations
from megazero.plan.placements import ALIGNMENT


@dataclass(frozen=True, eq=False)
class Quantizer:
    """One kind of values, as it is sent.

    Attributes:
        bits: of a code.
        ops: the kernels to use.
        pool: of bytes, for codes.
        keep: called with the codes of all ranks, once they are here.
        carry: the factor of the residuals of the step before, 0-dim; of all units.
        feedback: what rounding loses of one unit's gradients is added to the next ones (`of_unit`).
        residuals: that of one unit, [shards of other ranks, elements of a shard]; None: nothing is kept.
    """

    bits: int
    ops: Operations
    pool: Pool
    keep: Callable[[Tensor], object] = lambda codes: None
    carry: Tensor = field(default_factory=lambda: torch.ones(()))
    feedback: bool = False
    residuals: Tensor | None = None

    def of_unit(self, shard: int, axis: Axis, dtype: torch.dtype, device: torch.device) -> "Quantizer":
        """Return what sends the gradients of one unit, with memory for residuals if they are fed back.

        Args:
            shard: elements of a shard.
            axis: the ranks that have one each.
            dtype, device: of the gradients.
        """
        if not self.feedback or axis.size == 1:
            return self
        residuals = torch.zeros((axis.size - 1, shard), dtype=dtype, device=device)
        axis.comm.ledger.hold("residuals", residuals.nbytes)
        return replace(self, residuals=residuals)

    def bytes_of(self, numel: int, axis: Axis) -> int:
        """Return the bytes of the codes of `numel` elements that rest sharded along an axis."""
        return axis.size * quantized_bytes(numel // axis.size, self.bits)

    def start_gather(self, own: Tensor, whole: Tensor, axis: Axis, purpose: str) -> Pending:
        """Start to fill `whole` with what the codes of all ranks mean; `own` is this rank's shard."""
        codes = self.pool.take(self.bytes_of(len(whole), axis))
        self.ops.quantize_(codes.chunk(axis.size)[axis.rank], own, self.bits)
        pending = start_all_gather_in_place(codes, axis, purpose)
        return pending.then(lambda: self._landed(codes, whole, axis))

    def start_gather_codes(self, own: Tensor, near: Axis, whole: Tensor, axis: Axis, purpose: str) -> Pending:
        """Start to fill `whole` with what codes mean that `start_gather` had along an axis.

        Args:
            own: this rank's part of them.
            near: the ranks that have all parts.
        """
        codes = self.pool.take(self.bytes_of(len(whole), axis))
        codes.chunk(near.size)[near.rank].copy_(own)
        pending = start_all_gather_in_place(codes, near, purpose)
        return pending.then(lambda: self._landed(codes, whole, axis))

    def _landed(self, codes: Tensor, whole: Tensor, axis: Axis) -> Tensor:
        self.keep(codes)
        for part, coded in zip(whole.chunk(axis.size), codes.chunk(axis.size), strict=True):
            self.ops.dequantize_(part, coded, self.bits, False)
        self.pool.give(codes)
        return whole

    def start_reduce_scatter(self, x: Tensor, out: Tensor, axis: Axis, purpose: str, *, accumulate: bool) -> Pending:
        """Start the sum of all ranks' x, of which each rank gets its part; x must not be touched until the end.

        Args:
            out: memory for the result; may be this rank's part of x.
            accumulate: the sum is added to what `out` holds.
        """
        return self._start_exchange(x.chunk(axis.size), out, axis, purpose, accumulate=accumulate)

    def start_reduce_scatter_in_hops(
        self, x: Tensor, out: Tensor, near: Axis, far: Axis, purpose: str, *, accumulate: bool
    ) -> Pending:
        """Start the same sum along two axes, of which `near` has the neighbours; the second hop begins in `wait`."""
        each = quantized_bytes(len(out), self.bits)
        parts = x.view(far.size, near.size, len(out))
        sent, received = (self.pool.take(far.size * near.size * each) for _ in range(2))
        coded, came = (codes.view(near.size, far.size, each) for codes in (sent, received))
        others = [(place, host) for place in range(near.size) if place != near.rank for host in range(far.size)]
        for number, (place, host) in enumerate(others):
            self._quantize(coded[place, host], parts[host, place], number, first=not accumulate)
        pending = start_all_to_all(sent, received, near, purpose)

        def land() -> Tensor:
            for place, host in others:
                self.ops.dequantize_(parts[host, near.rank], came[place, host], self.bits, True)
            self.pool.give(sent)
            self.pool.give(received)
            sums = [parts[host, near.rank] for host in range(far.size)]
            return self._start_exchange(sums, out, far, purpose, len(others), accumulate=accumulate).wait()

        return pending.then(land)

    def _start_exchange(
        self, parts: Sequence[Tensor], out: Tensor, axis: Axis, purpose: str, first: int = 0, *, accumulate: bool
    ) -> Pending:
        """Start the sum of what all ranks have in their part of this one's number.

        Args:
            parts: flat, by rank; not to be touched until the end.
            first: the number of the first residual.
        """
        each = quantized_bytes(len(out), self.bits)
        sent, received = self.pool.take(each * axis.size), self.pool.take(each * axis.size)
        codes = sent.split(each)
        for number, rank in enumerate(rank for rank in range(axis.size) if rank != axis.rank):
            self._quantize(codes[rank], parts[rank], first + number, first=not accumulate)
        pending = start_all_to_all(sent, received, axis, purpose)

        def land() -> Tensor:
            own = parts[axis.rank]
            if accumulate:
                out.add_(own)
            elif not same_place(out, own):
                out.copy_(own)
            for rank, coded in enumerate(received.split(each)):
                if rank != axis.rank:
                    self.ops.dequantize_(out, coded, self.bits, True)
            self.pool.give(sent)
            self.pool.give(received)
            return out

        return pending.then(land)

    def _quantize(self, codes: Tensor, x: Tensor, number: int, *, first: bool) -> None:
        """Quantise x for another rank; with residuals x and one of them, which then is what the codes do not mean.

        Args:
            number: of the residual.
            first: it is the first reduction of a step.
        """
        if self.residuals is None:
            self.ops.quantize_(codes, x, self.bits)
            return
        residual = self.residuals[number]
        x.addcmul_(residual, self.carry) if first else x.add_(residual)
        self.ops.quantize_(codes, x, self.bits)
        self.ops.dequantize_(residual, codes, self.bits, False)
        torch.sub(x, residual, out=residual).nan_to_num_(0.0, 0.0, 0.0)


@dataclass(frozen=True, eq=False)
class Quantizers:
    """Quantizers by which parameters and gradients of a unit are sent between shard ranks; None: as they are."""

    parameters: Quantizer | None = None
    gradients: Quantizer | None = None

    @property
    def alignment(self) -> int:
        """Return the elements at a multiple of which parameters begin: with quantised ones a block of their own."""
        return ALIGNMENT if self.parameters is None and self.gradients is None else BLOCK

    def of_unit(self, shard: int, axis: Axis, dtype: torch.dtype, device: torch.device) -> "Quantizers":
        """Return those of one unit; see `Quantizer.of_unit`."""
        if self.gradients is None:
            return self
        return replace(self, gradients=self.gradients.of_unit(shard, axis, dtype, device))
