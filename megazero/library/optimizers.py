"""Make the optimizer that a user asks for: ours by name, or any class of torch's that treats elements alike.

    "adamw"                                          ours, with its defaults (those of torch.optim.AdamW)
    {"name": "adamw", "lr": 3e-4, ...}               with options: lr, betas, eps, weight_decay
    lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9)

Parameters whose names fit the pattern of a group have that group's options instead: (pattern, options) pairs, of which
the first that fits counts. Ours knows "lr", and "weight_decay" (the same or 0).

Frozen parameters keep values, state and count in an update. Where some parameters of a unit are frozen and others not,
each becomes a group of its own in the unit's layout, which then has a count of its updates for each. A frozen one is
updated with the rest and put back.
"""

from bisect import bisect_right
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor

from megazero.base.errors import UserError
from megazero.kernels.operations import Operations
from megazero.library.elementwise import Elementwise, Factory, Options, trial
from megazero.optim.adamw import AdamW
from megazero.zero.layout import Group
from megazero.zero.unit import Unit

UnitOptimizer = AdamW | Elementwise
Groups = Sequence[tuple[str, Options]]
Asked = str | Mapping[str, Any] | Callable[[Any], torch.optim.Optimizer]
_ADAMW = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 1e-2}
_WHERE = "optimizer"


@dataclass(frozen=True)
class Recipe:
    """An optimizer that can be made for units.

    Attributes:
        lr: its learning rate where a step does not say one.
        state: the names of what it keeps of each element.
        make: (unit, bucket, kernels) -> the optimizer of a unit.
        groups: patterns of parameters' names, each with its group.
        rest: the group of the others.
    """

    lr: float
    state: tuple[str, ...]
    make: Callable[[Unit, int, Operations], UnitOptimizer]
    groups: Sequence[tuple[str, Group]]
    rest: Group

    def group(self, name: str) -> Group:
        """Return the group of a parameter by its name: of the first pattern that fits it."""
        return next((group for pattern, group in self.groups if fnmatchcase(name, pattern)), self.rest)


def recipe_of(asked: Asked | None, groups: Groups) -> Recipe:
    """Return how to make the optimizer that was asked for; None: one of no parameter.

    Raises:
        UserError: 501, there is none of that name, it does not know an option, or it does not treat elements alike.
    """
    if asked is None:
        return replace(_adamw(dict(_ADAMW), ()), lr=0.0, state=())
    if callable(asked):
        return _of_torch(asked, groups)
    if not isinstance(asked, str | Mapping):
        what = f"expected a name, options or a function of parameters, got a {type(asked).__name__}"
        do = "shard has other parameters than the module: give lambda parameters: torch.optim.SGD(parameters, lr=0.1)"
        raise UserError(501, what, do, where=_WHERE)
    options = {"name": asked} if isinstance(asked, str) else dict(asked)
    if (name := options.pop("name", None)) != AdamW.KIND:
        do = 'give "adamw", or a function that makes an optimizer of torch for some parameters'
        raise UserError(501, f"no optimizer of ours is called {name!r}", do, where=_WHERE)
    if odd := sorted(options.keys() - _ADAMW.keys()):
        raise UserError(501, f"adamw has no option {odd[0]!r}", f"it has {', '.join(_ADAMW)}", where=_WHERE)
    return _adamw({**_ADAMW, **options}, groups)


def _adamw(options: dict[str, Any], groups: Groups) -> Recipe:
    lr, decay = options.pop("lr"), options["weight_decay"]
    for pattern, own in groups:
        if odd := sorted(own.keys() - {"lr", "weight_decay"}):
            raise UserError(501, f"{pattern!r}: adamw has no option {odd[0]!r} of a group", where=_WHERE)
        if own.get("weight_decay", decay) not in (0.0, decay):
            what = f"{pattern!r}: weight_decay {own['weight_decay']} next to {decay}"
            raise UserError(501, what, "give 0, or an optimizer of torch", where=_WHERE)
    return Recipe(
        lr,
        AdamW.STATE,
        lambda unit, bucket, ops: AdamW([unit], **options, bucket=bucket, ops=ops),
        [(p, Group(own.get("weight_decay", decay) != 0.0, _lr_factor(p, own, lr))) for p, own in groups],
        Group(decay != 0.0),
    )


def _of_torch(make: Factory, groups: Groups) -> Recipe:
    name = getattr(make, "__name__", None) or getattr(getattr(make, "func", None), "__name__", "the optimizer")
    kept = trial(make, name)
    if (lr := kept.lr) is None:
        raise UserError(501, f"{name} has no learning rate of its own", "give it lr", where=_WHERE)
    options: dict[str, Options] = {Elementwise.KIND: {}}
    own_groups: list[tuple[str, Group]] = []
    for number, (pattern, own) in enumerate(groups):
        rest = {key: value for key, value in own.items() if key != "lr"}
        trial(lambda parameters, rest=rest: make([{**one, **rest} for one in parameters]), f"{name} for {pattern!r}")
        kind = f"{Elementwise.KIND} {number}"
        options[kind] = rest
        own_groups.append((pattern, Group(True, _lr_factor(pattern, own, lr), kind)))
    rest = Group(True, 1.0, Elementwise.KIND)
    return Recipe(lr, kept.elements, lambda unit, *_: Elementwise(unit, make, options, kept), own_groups, rest)


def _lr_factor(pattern: str, options: Options, lr: float) -> float:
    """Return a group's learning rate as a multiple of the optimizer's. Raises UserError 501: that is 0."""
    own = options.get("lr", lr)
    if own != lr and lr == 0:
        raise UserError(501, f"{pattern!r}: lr {own} next to an optimizer's lr of 0", "give both one", where=_WHERE)
    return own / lr if lr else 1.0


class Following:
    """An optimizer for each unit, which follows `requires_grad_` (`optim/optimizer.py`).

    Args:
        bucket, ops: of these optimizers (`Recipe.make`).

    Attributes:
        STATE: the names of what they keep of each element.
        state: for each unit its state.
        frozen: the parameters that the next update leaves alone, by name.
    """

    def __init__(self, units: Sequence[Unit], recipe: Recipe, bucket: int, ops: Operations):
        self._make, self._bucket, self._ops, self.STATE = recipe.make, bucket, ops, recipe.state
        self._of: dict[Unit, UnitOptimizer] = {}
        self.state: dict[Unit, dict[str, Tensor]] = {}
        self._missed: dict[str, Tensor] = {}  # updates in which a parameter was frozen
        self.frozen: Collection[str] = ()
        for unit in units:
            self._add(unit)

    def _add(self, unit: Unit) -> None:
        self._of[unit] = self._make(unit, self._bucket, self._ops)
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
        of_group = list(layout.group_slices(slice(0, layout.numel)))
        groups = [(group, i.start) for group, of in of_group for i in layout.intervals if of.start <= i.start < of.stop]
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
