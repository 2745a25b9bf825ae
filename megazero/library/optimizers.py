"""Make the optimizer that a user asks for: megazero's AdamW by name, or any elementwise torch optimizer.

    "adamw"                                          AdamW with its defaults (those of torch.optim.AdamW)
    {"name": "adamw", "lr": 3e-4, ...}               with options: lr, betas, eps, weight_decay
    lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9)

Groups are (pattern, options) pairs: a parameter takes the options of the first pattern that its name matches. Groups of
megazero's AdamW may have "lr", and "weight_decay" (the optimizer's own value or 0).

An update does not change the values, the state and the update count of frozen parameters. If only some parameters of a
unit are frozen, each of its parameters becomes a group of its own in the unit's layout, with its own update count. A
frozen one is updated with the rest, and its earlier values are then restored.
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
    """How to make the optimizers of units.

    Attributes:
        lr: the learning rate of steps that give none.
        state: the names of an optimizer's state tensors, which have one value per element.
        make: (unit, bucket in bytes, kernels) -> the optimizer of a unit.
        groups: patterns of parameter names, each with its group.
        rest: the group of all other parameters.
    """

    lr: float
    state: tuple[str, ...]
    make: Callable[[Unit, int, Operations], UnitOptimizer]
    groups: Sequence[tuple[str, Group]]
    rest: Group

    def group(self, name: str) -> Group:
        """Return the group of the first pattern that a parameter's name matches, else `rest`."""
        return next((group for pattern, group in self.groups if fnmatchcase(name, pattern)), self.rest)


def recipe_of(asked: Asked | None, groups: Groups) -> Recipe:
    """Return the recipe of the optimizer that was asked for; asked None: one that trains no parameter.

    Raises:
        UserError: 501, an unknown name or option, or an optimizer that is not elementwise.
    """
    if asked is None:
        return replace(_adamw(dict(_ADAMW), ()), lr=0.0, state=())
    if callable(asked):
        return _of_torch(asked, groups)
    if not isinstance(asked, str | Mapping):
        what = f"expected a name, options or a function of parameters, got a {type(asked).__name__}"
        do = "shard replaces the module's parameters: give lambda parameters: torch.optim.SGD(parameters, lr=0.1)"
        raise UserError(501, what, do, where=_WHERE)
    options = {"name": asked} if isinstance(asked, str) else dict(asked)
    if (name := options.pop("name", None)) != AdamW.KIND:
        do = 'give "adamw", or a function that makes a torch optimizer for given parameters'
        raise UserError(501, f"unknown optimizer {name!r}", do, where=_WHERE)
    if odd := sorted(options.keys() - _ADAMW.keys()):
        raise UserError(501, f"adamw has no option {odd[0]!r}", f"it has {', '.join(_ADAMW)}", where=_WHERE)
    return _adamw({**_ADAMW, **options}, groups)


def _adamw(options: dict[str, Any], groups: Groups) -> Recipe:
    lr, decay = options.pop("lr"), options["weight_decay"]
    for pattern, own in groups:
        if odd := sorted(own.keys() - {"lr", "weight_decay"}):
            raise UserError(501, f"{pattern!r}: adamw has no option {odd[0]!r} for a group", where=_WHERE)
        if own.get("weight_decay", decay) not in (0.0, decay):
            what = f"{pattern!r}: weight_decay {own['weight_decay']} differs from the optimizer's {decay}"
            raise UserError(501, what, "give 0, or a torch optimizer", where=_WHERE)
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
        raise UserError(501, f"{name} has no learning rate", "give it lr", where=_WHERE)
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
    """Return a group's lr divided by the optimizer's, `lr`. Raises UserError 501: `lr` is 0 and the group's is not."""
    own = options.get("lr", lr)
    if own != lr and lr == 0:
        raise UserError(501, f"{pattern!r}: lr {own}, but the optimizer's lr is 0", "give both one", where=_WHERE)
    return own / lr if lr else 1.0


class Following:
    """One optimizer per unit, which leaves frozen parameters unchanged; `optim/optimizer.py` has the interface.

    Args:
        bucket, ops: arguments of `Recipe.make`.

    Attributes:
        STATE: the names of an optimizer's state tensors.
        state: the state tensors of each unit, by name.
        frozen: the names of the parameters that the next update does not change.
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
        """Add a unit that was frozen in the first `updates` updates."""
        self._add(unit)
        self._missed |= {i.name: torch.tensor(float(updates), device=unit.device) for i in unit.layout.intervals}

    def steps(self, unit: Unit) -> list[Tensor]:
        """Return the update counts of a unit's pieces, to be set when a run resumes."""
        return self._of[unit].steps(unit)

    def update(self, unit: Unit, *, lr: float, scale: Tensor, skip: Tensor) -> None:
        """Update a unit's masters with gradients times `scale`; write them to `unit.resting.updated`.

        If `skip` is 1, nothing changes. Frozen parameters never change.
        """
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
        """Return the update counts, by name, of parameters that have missed some of `updates` updates."""
        return {name: updates - int(missed) for name, missed in self._missed.items() if missed}

    def restore(self, updates: int, counts: Mapping[str, int]) -> None:
        """Continue after `updates` updates; `counts` has the update counts of parameters that missed some."""
        self._missed = {name: torch.tensor(float(updates - count)) for name, count in counts.items()}
        for unit in self._of:
            if not counts.keys().isdisjoint(interval.name for interval in unit.layout.intervals):
                self._separate(unit)
                for (name, _), step in zip(_pieces(unit), self.steps(unit), strict=True):
                    step.fill_(counts.get(name, updates))

    def _values_of(self, unit: Unit, names: Collection[str]) -> Iterator[Tensor]:
        """Yield this rank's values, state and update counts of some parameters of a unit."""
        if names:
            flats = [unit.masters, unit.resting.updated.values, *self.state[unit].values()]
            for (name, where), step in zip(_pieces(unit), self.steps(unit), strict=True):
                if name in names:
                    yield from (step, *(flat[where] for flat in flats))

    def _separate(self, unit: Unit) -> None:
        """Give each parameter of a unit a group of its own; the unit's new optimizer takes over the state."""
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
    """Return (first parameter, interval in the shard) of each group with elements in this rank's shard of a unit."""
    starts = [interval.start for interval in unit.layout.intervals]
    places = [where for _, where in unit.layout.group_slices(unit.shard)]
    firsts = [bisect_right(starts, unit.shard.start + where.start) - 1 for where in places]
    return [(unit.layout.intervals[first].name, where) for first, where in zip(firsts, places, strict=True)]
