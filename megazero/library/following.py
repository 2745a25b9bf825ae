"""Update the parameters of a module, except those that are frozen: these keep values, state and count.

Where some parameters of a unit are frozen and others not, each becomes a group of its own in the unit's layout, which
then has a count of its updates for each. A frozen one is updated with the rest and put back.
"""

from bisect import bisect_right
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from megazero.library.elementwise import Elementwise
from megazero.optim.adamw import AdamW
from megazero.zero.unit import Unit

UnitOptimizer = AdamW | Elementwise


class Following:
    """An optimizer for each unit, which follows `requires_grad_` (`optim/optimizer.py`).

    Args:
        make: makes the optimizer of a unit.
        names: of the state that they keep of each element.

    Attributes:
        STATE: these names.
        state: for each unit its state.
        frozen: the parameters that the next update leaves alone, by name.
    """

    def __init__(self, units: Sequence[Unit], make: Callable[[Unit], UnitOptimizer], names: tuple[str, ...]):
        self._make, self.STATE = make, names
        self._of: dict[Unit, UnitOptimizer] = {}
        self.state: dict[Unit, dict[str, Tensor]] = {}
        self._missed: dict[str, Tensor] = {}  # updates in which a parameter was frozen
        self.frozen: Collection[str] = ()
        for unit in units:
            self._add(unit)

    def _add(self, unit: Unit) -> None:
        self._of[unit] = self._make(unit)
        self.state[unit] = self._of[unit].state[unit]

    def add(self, unit: Unit, updates: int) -> None:
        """Update another unit from now on, which was frozen in so many updates."""
        self._add(unit)
        self._missed |= {i.name: torch.tensor(float(updates), device=unit.device) for i in unit.layout.intervals}

    def steps(self, unit: Unit) -> list[Tensor]:
        """Return the update counts of a unit's pieces, to be set when a run resumes."""
        return self._of[unit].steps(unit)

    def update(self, unit: Unit, *, lr: float, scale: Tensor, skip: Tensor) -> None:
        """Update a unit's masters with gradients multiplied by `scale`, and write `unit.resting.updated`."""
        intervals = unit.layout.intervals
        if frozen := {interval.name for interval in intervals if interval.name in self.frozen}:
            for name in frozen:
                self._missed[name] = self._missed.get(name, torch.zeros_like(skip)) + (1 - skip)
            if len(frozen) == len(intervals):
                return
            self._separate(unit)
        kept = [(values, values.clone()) for values in self._values_of(unit, frozen)]
        self._of[unit].update(unit, lr=lr, scale=scale, skip=skip)
        for values, before in kept:
            values.copy_(before)

    def counts(self, updates: int) -> dict[str, int]:
        """Return how many updates parameters have seen that have missed some of `updates`."""
        return {name: updates - int(missed) for name, missed in self._missed.items() if missed}

    def restore(self, updates: int, counts: Mapping[str, int]) -> None:
        """Continue after `updates`, with the `counts` of parameters that have missed some."""
        self._missed = {name: torch.tensor(float(updates - count)) for name, count in counts.items()}
        for unit in self._of:
            if not counts.keys().isdisjoint(interval.name for interval in unit.layout.intervals):
                self._separate(unit)
                for (name, _), step in zip(_pieces(unit), self.steps(unit), strict=True):
                    step.fill_(counts.get(name, updates))

    def _values_of(self, unit: Unit, names: Collection[str]) -> Iterator[Tensor]:
        """Yield what rests here of some parameters of a unit: values, state, counts."""
        if names:
            flats = [unit.masters, unit.resting.updated.values, *self.state[unit].values()]
            for (name, where), step in zip(_pieces(unit), self.steps(unit), strict=True):
                if name in names:
                    yield from (step, *(flat[where] for flat in flats))

    def _separate(self, unit: Unit) -> None:
        """Give each parameter of a unit a group of its own, and the optimizer that it had its state."""
        layout = unit.layout
        if len(layout.groups) == len(layout.intervals):
            return
        before, steps, state = _pieces(unit), self.steps(unit), self.state[unit]
        begins = [begin for _, begin in layout.groups]
        groups = [(layout.groups[bisect_right(begins, i.start) - 1][0], i.start) for i in layout.intervals]
        unit.layout = replace(layout, groups=tuple(groups))
        ledger = unit.axes.shard.comm.ledger
        held = ledger.held()
        self._add(unit)
        ledger.let_go(held)
        for name, values in self.state[unit].items():
            values.copy_(state[name])
        starts = [where.start for _, where in before]
        for (_, where), step in zip(_pieces(unit), self.steps(unit), strict=True):
            step.copy_(steps[bisect_right(starts, where.start) - 1])


def _pieces(unit: Unit) -> list[tuple[str, slice]]:
    """Return the place in a unit's shard of each of its groups that has some of it, with its first parameter."""
    starts = [interval.start for interval in unit.layout.intervals]
    places = [where for _, where in unit.layout.group_slices(unit.shard)]
    firsts = [bisect_right(starts, unit.shard.start + where.start) - 1 for where in places]
    return [(unit.layout.intervals[first].name, where) for first, where in zip(firsts, places, strict=True)]
