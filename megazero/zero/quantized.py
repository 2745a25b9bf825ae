"""Send values between ranks as integers of 8 or 4 bits (`zero.quantize`): a half to an eighth of the bytes.

    parameters   int8. A rank quantises its shard, the codes are gathered, and every rank, the owner too, computes with
                 what they mean: so all have the same values. Masters stay exact.
    gradients    int8 or int4. Each rank quantises the shards of the others and sends each to its owner (all-to-all),
                 which adds what the codes mean to its own gradients, in rank order: nothing is rounded twice, where a
                 ring would round at every hop. What a rank keeps for itself is not rounded. Where neighbours have an
                 axis of their own (`zero.secondary_ranks`), in two hops: first among them, for each of all the others'
                 shards the sum of the neighbours', and then these between ranks of the same place, which cross hosts
                 once; rounded once at each hop.

A value is off by at most 1/254 of the largest magnitude of its block of 256 with 8 bits, 1/14 with 4 (`kernels/
reference.py`). A block with a value that is not finite arrives as NaN, so a step is skipped where it would have been.

(Wang et al. 2023, ZeRO++, arXiv 2306.10209, sections 3.1 and 3.3: qwZ and qgZ.)
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from megazero.base.quantized import quantized_bytes
from megazero.comm.collectives import Pending, start_all_gather_in_place, start_all_to_all
from megazero.comm.grid import Axis
from megazero.comm.pool import Pool, same_place
from megazero.kernels.operations import Operations


@dataclass(frozen=True, eq=False)
class Quantizer:
    """One kind of values, as it is sent.

    Attributes:
        bits: of a code.
        ops: the kernels to use.
        pool: of bytes, for codes.
        keep: called with the codes of all ranks, once they are here.
    """

    bits: int
    ops: Operations
    pool: Pool
    keep: Callable[[Tensor], object] = lambda codes: None

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
        for place in (place for place in range(near.size) if place != near.rank):
            for host in range(far.size):
                self.ops.quantize_(coded[place, host], parts[host, place], self.bits)
        pending = start_all_to_all(sent, received, near, purpose)

        def land() -> Tensor:
            for place in (place for place in range(near.size) if place != near.rank):
                for host in range(far.size):
                    self.ops.dequantize_(parts[host, near.rank], came[place, host], self.bits, True)
            self.pool.give(sent)
            self.pool.give(received)
            sums = [parts[host, near.rank] for host in range(far.size)]
            return self._start_exchange(sums, out, far, purpose, accumulate=accumulate).wait()

        return pending.then(land)

    def _start_exchange(
        self, parts: Sequence[Tensor], out: Tensor, axis: Axis, purpose: str, *, accumulate: bool
    ) -> Pending:
        """Start the sum of what all ranks have in their part of this one's number.

        Args:
            parts: flat, by rank; not to be touched until the end.
        """
        each = quantized_bytes(len(out), self.bits)
        sent, received = self.pool.take(each * axis.size), self.pool.take(each * axis.size)
        for rank, (part, coded) in enumerate(zip(parts, sent.split(each), strict=True)):
            if rank != axis.rank:
                self.ops.quantize_(coded, part, self.bits)
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


@dataclass(frozen=True, eq=False)
class Quantizers:
    """How parameters and gradients of a unit are sent between shard ranks; None: as they are."""

    parameters: Quantizer | None = None
    gradients: Quantizer | None = None
