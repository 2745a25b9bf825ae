"""Compare values that several ranks hold, so that a rank with a corrupt copy is found.

    axis      values that its ranks hold twice
    shard     parameters that rest whole; masters, state and reduced gradients where the stage does not shard these
    replica   all values of a shard
    tensor    those of parameters that every tensor rank holds whole
    copies    those of a tied weight on both ends of a pipeline

Each rank sends 8 bytes for each parameter and kind of value. Values on disks are not compared. In stage 3 without
replicas no value of a matrix exists twice.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
from torch import Tensor

from megazero.base.errors import UserError
from megazero.comm.collectives import all_gather, all_reduce
from megazero.comm.grid import Axis
from megazero.optim.optimizer import Run
from megazero.train.fault import AFTER_SUMS
from megazero.train.trainer import Blame
from megazero.zero.engine import Engine
from megazero.zero.placement import Placement
from megazero.zero.unit import Unit

_AT_ONCE = 1 << 20  # elements that are widened to 64 bits at a time
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Replicas:
    """Compares replicas during training.

    Args:
        every: steps between comparisons; 0: none.
        now, blame: see `Trainer`.
    """

    def __init__(self, engine: Engine, every: int, now: Callable[[int, str], object], blame: Blame):
        self._engine, self._every, self._now, self._blame = engine, every, now, blame

    def check(self, done: int) -> None:
        """Compare after step `done`, counted from 1, if it is due. Raises UserError 306: values differ."""
        if not self._every or done % self._every:
            return
        self._now(done, "comparison of replicas")
        engine = self._engine
        for unit in engine.units:
            unit.gradients.wait()  # until an update under way has ended
        engine.gather.finish()
        found, device = differences(engine.units, engine.optimizer.runs), engine.loss_scale.scale.device
        if not all_reduce(
            torch.tensor([len(found)], dtype=torch.float64, device=device), engine.grid["world"], "agree"
        ):
            return

        def say(rank: int, fault: str | None) -> UserError:
            do = "resume from a checkpoint before it, on other hardware"
            return UserError(306, fault or "replicas differ", do, rank=rank, step=done)

        raise self._blame((AFTER_SUMS, found[0]) if found else None, say)


def differences(units: Iterable[Unit], runs: Callable[[Unit], Sequence[Run]]) -> list[str]:
    """Return a text on each value that differs on ranks that should hold equal ones. Every rank calls it.

    Args:
        runs: returns the optimizer state of a unit.
    """
    named: dict[Axis, list[tuple[str, Tensor]]] = {}
    for unit in units:
        for what, first, flat, sharded in _values(unit, runs(unit)):
            for interval in () if flat.is_meta else unit.layout.intervals:
                whole = interval.start >= unit.layout.tp_replicated
                axes = [unit.axes.shard] * (not sharded) + [unit.axes.replica, unit.axes.copies]
                if axes := [axis for axis in axes + [unit.axes.tensor] * whole if axis.size > 1]:
                    part = flat[max(interval.start - first, 0) : max(interval.stop - first, 0)]
                    found = (f"{what} of {interval.name}", digest(part).to(unit.device))
                    for axis in axes:
                        named.setdefault(axis, []).append(found)
    return [each for axis, found in named.items() for each in _compared(axis, found)]


def _values(unit: Unit, runs: Sequence[Run]) -> Iterator[tuple[str, int, Tensor, bool]]:
    """Yield a name, the first element, the values, and whether shard ranks hold different ones, of what rests here."""
    resting, stage = unit.resting, unit.axes.stage
    updated = stage.optimizer is Placement.SHARD
    yield "parameters", resting.parameters.first, resting.parameters.values, stage.parameters is Placement.SHARD
    yield "masters", unit.shard.start, unit.masters, updated
    yield "reduced gradients", unit.shard.start, resting.reduced_gradients, updated
    for run in runs:
        for kind, values in run.state.items():
            yield kind, unit.shard.start + run.where.start, values, updated


def digest(x: Tensor) -> Tensor:
    """Return a number that any change of one element of a flat tensor changes: int64, 0-dim."""
    total = torch.zeros((), dtype=torch.int64, device=x.device)
    for piece in x.split(_AT_ONCE):
        odd = 2 * torch.arange(len(piece), device=x.device) + 1  # so that no bit is lost
        total = 31 * total + (piece.view(_INTEGERS[x.element_size()]) * odd).sum()
    return total


def _compared(axis: Axis, found: Sequence[tuple[str, Tensor]]) -> Iterator[str]:
    everyone = all_gather(torch.stack([value for _, value in found])[None], axis, "replicas").tolist()
    for (what, _), values in zip(found, zip(*everyone, strict=True), strict=True):
        (usual, count), *_ = Counter(values).most_common(1)
        odd = [str(rank) for rank, value in zip(axis.ranks, values, strict=True) if value != usual]
        if odd and 2 * count > axis.size:
            yield f"{what} on rank {', '.join(odd)} differ from the other ranks of the {axis.name} axis"
        elif odd:
            yield f"{what} differ on ranks {', '.join(map(str, axis.ranks))} of the {axis.name} axis"
