"""Describe where flat buffers rest, and move them: a communication is a change of placement.

The table is in `plan/placements.py`; its rows are the placements along the axis over which a unit is sharded. Along the
axis of its replicas (hybrid sharding, `zero.shard_ranks`) every stage has the row of stage 0: each shard group holds a
copy of the values of the others, and the reduced gradients of a shard are summed over the groups once a step.

Rajbhandari et al. 2019 (ZeRO), section 5: each data rank computes the gradients of its own samples (Partial: their
value is the sum over the ranks). Partial gradients are accumulated over the micro-batches of a step and change their
placement once, at its end; sharded ones are reduced into the shard after each micro-batch. Gradients are reduced to
where the optimizer state is. Updated parameters come from there; sharded ones are gathered for each use. A rank's shard
is one of `size` equal intervals of a unit's flat buffer.
"""

from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field

import torch
from torch import Tensor

from megazero.comm.collectives import Pending, done, start_all_gather_in_place, start_all_reduce, start_reduce_scatter
from megazero.comm.grid import Axis
from megazero.comm.home import Home, PagedHome
from megazero.comm.pool import Pool, same_place
from megazero.kernels.reference import wide_dtype
from megazero.plan.placements import STAGES, Placement, ZeroStage


@dataclass(frozen=True)
class Precision:
    """The dtypes of a run.

    Attributes:
        parameters: the dtype of the parameters that forward and backward compute with, and of activations.
        gradients: the dtype in which gradients are accumulated.
        reduced: the dtype in which gradients are summed over the data axis and the copies of a tied weight; None: the
            dtype of `gradients`.
        has_masters: 16-bit parameters have masters in fp32; False: they are updated themselves.
        moments: the dtype of optimizer state, without averages; None: fp64 for fp64, else fp32.
    """

    parameters: torch.dtype = torch.float32
    gradients: torch.dtype = torch.float32
    reduced: torch.dtype | None = None
    has_masters: bool = True
    moments: torch.dtype | None = None

    @property
    def masters(self) -> torch.dtype:
        """Return the dtype of the values that are updated: fp32 with 16-bit parameters, if these have masters."""
        return self.update if self.has_masters else self.parameters

    @property
    def update(self) -> torch.dtype:
        """Return the dtype in which updates are computed."""
        return wide_dtype(self.parameters)

    @property
    def state(self) -> torch.dtype:
        """Return the dtype of optimizer state, without averages."""
        return self.moments or self.update


@dataclass(frozen=True, eq=False)
class UnitAxes:
    """The axes of the ranks that share a unit, and those along which its gradients are partial.

    Attributes:
        stage: the placements along `shard`.
        shard: ranks with different samples, each with its own interval of the values that rest sharded.
        replica: ranks with different samples that hold the same interval as this one.
        tensor: ranks with different parts of the matrices.
        sequence: gradients of parameters that are whole on every tensor rank are partial along `tensor`.
        copies: ranks with a copy of the unit that has another use (a tied weight on two pipeline stages).
    """

    shard: Axis
    tensor: Axis
    stage: ZeroStage = STAGES[0]
    replica: Axis = field(default_factory=lambda: Axis("replica"))
    sequence: bool = False
    copies: Axis = field(default_factory=lambda: Axis("ends"))


@dataclass(frozen=True, eq=False)
class FlatBuffer:
    """The part that a rank holds of one kind of a unit's values.

    Attributes:
        values: flat.
        placements: along each axis; REPLICATE along axes that are not named.
        first: the element of the unit's whole flat buffer at which `values` begins.
        home: where the values are; None: in the device's memory.
    """

    values: Tensor
    placements: Mapping[Axis, Placement]
    first: int = 0
    home: Home | None = None

    def __len__(self) -> int:
        return len(self.values)

    @property
    def elements(self) -> slice:
        """Return the elements of the unit's flat buffer that are here."""
        return slice(self.first, self.first + len(self.values))

    def part(self, elements: slice, placements: Mapping[Axis, Placement] | None = None) -> "FlatBuffer":
        """Return elements of the unit's flat buffer that are here, as a view; perhaps with other placements."""
        values = self.values[elements.start - self.first : elements.stop - self.first]
        return FlatBuffer(values, self.placements if placements is None else placements, elements.start, self.home)

    def write(self, values: Tensor, first: int) -> None:
        """Write the values of elements [first, ...) of the unit's flat buffer, as far as these are here."""
        begin, end = max(first, self.first), min(first + len(values), self.first + len(self.values))
        if begin < end:
            new = FlatBuffer(values[begin - first : end - first], {}, begin)
            into = self.part(new.elements)
            if into.values.is_meta:
                redistribute(new, into, "initial values")
            else:
                into.values.copy_(new.values)


def shard_slice(numel: int, placement: Placement, axis: Axis) -> slice:
    """Return what this rank holds of a flat buffer of `numel` (a multiple of the axis' size): all, unless SHARD."""
    if placement is not Placement.SHARD:
        return slice(0, numel)
    part = numel // axis.size
    return slice(axis.rank * part, (axis.rank + 1) * part)


def redistribute(
    source: FlatBuffer, target: FlatBuffer, purpose: str, *, accumulate: bool = False, through: Pool | None = None
) -> Pending:
    """Start to bring the value of `source` to the placement of `target`: copy between homes, gather, reduce.

    | along an axis        | operation                                                     |
    |----------------------|---------------------------------------------------------------|
    | Shard -> Replicate   | all-gather; the rank's own elements are copied to their place |
    | Partial -> Shard     | reduce-scatter; `source` is undefined afterwards              |
    | Partial -> Replicate | all-reduce, in the memory of `target`                         |
    | equal, or size 1     | nothing, or a copy if the memory differs                      |

    This changes one axis at a time. No other function here starts these operations; extensions start others.

    Args:
        purpose: its name in the ledger and in profiles.
        accumulate: add the sum of a reduce-scatter to `target`.
        through: buffers of another dtype, in which a sum is taken: a rounded copy of `source`, which stays unchanged.
    """
    change = _change(source, target)
    if change is None:
        return _copy(source, target, purpose)
    axis, before, after = change
    if before is Placement.PARTIAL and through is not None:
        return _sum_through(through, source, target, axis, purpose, accumulate=accumulate)
    if after is Placement.SHARD:
        return start_reduce_scatter(source.values, axis, purpose, out=target.values, accumulate=accumulate)
    if not same_place(source.values, target.values):
        _copy(source, target, purpose).wait()
    start = start_all_gather_in_place if before is Placement.SHARD else start_all_reduce
    return start(target.values, axis, purpose)


def _change(source: FlatBuffer, target: FlatBuffer) -> tuple[Axis, Placement, Placement] | None:
    """Return (axis, placement of `source`, that of `target`) where the two differ; None: they are equal."""
    found = None
    for axis, before in source.placements.items():
        after = target.placements.get(axis, Placement.REPLICATE)
        if before is not after and axis.size > 1:
            assert found is None, "one axis at a time"
            found = axis, before, after
    return found


def _sum_through(
    pool: Pool, source: FlatBuffer, target: FlatBuffer, axis: Axis, purpose: str, *, accumulate: bool
) -> Pending:
    """Start a sum in a buffer of the pool; its result is rounded or widened to the dtype of `target`."""
    staged = pool.take(len(source))
    staged.copy_(source.values)
    if target.placements.get(axis) is Placement.SHARD:
        result = staged[shard_slice(len(staged), Placement.SHARD, axis)]
        pending = start_reduce_scatter(staged, axis, purpose, out=result)
    else:
        result = staged
        pending = start_all_reduce(staged, axis, purpose)

    def land() -> Tensor:
        target.values.add_(result) if accumulate else target.values.copy_(result)
        pool.give(staged)
        return target.values

    return pending.then(land)


def _copy(source: FlatBuffer, target: FlatBuffer, purpose: str) -> Pending:
    """Start to copy the elements of `source` to their place in `target`, rounded to its dtype, if they are not there.

    Values from a paged home have arrived after the wait; other copies are ordered before later work of the device.
    """
    into = target.part(source.elements).values
    if same_place(source.values, into):
        return done(target.values)
    if isinstance(source.home, PagedHome):
        coming = source.home.start_bring(source.values, into, purpose)
        return Pending(None, purpose, lambda: _after(coming, target.values))
    if source.home is target.home:
        into.copy_(source.values)
    elif source.home is not None and not into.is_meta:
        source.home.bring(source.values, into, purpose)
    else:
        assert target.home is not None, "one of two different memories is a home"
        target.home.send(source.values.to(into.dtype), into, purpose)
    return done(target.values)


def _after(coming: Future[None], values: Tensor) -> Tensor:
    coming.result()
    return values
