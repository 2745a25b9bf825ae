"""Make the optimizer that a user asks for: ours by name, or any class of torch's that treats elements alike.

    "adamw"                                          ours, with its defaults (those of torch.optim.AdamW)
    {"name": "adamw", "lr": 3e-4, ...}               with options: lr, betas, eps, weight_decay
    lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9)

Parameters whose names fit the pattern of a group have that group's options instead: (pattern, options) pairs, of which
the first that fits counts. Ours knows "lr", and "weight_decay" (the same or 0).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch

from megazero.base.errors import UserError
from megazero.kernels.operations import Operations
from megazero.library.elementwise import Elementwise, Factory, Options, trial
from megazero.library.following import UnitOptimizer
from megazero.optim.adamw import AdamW
from megazero.zero.layout import Group
from megazero.zero.unit import Unit

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
        group: the group of a parameter, by its name.
    """

    lr: float
    state: tuple[str, ...]
    make: Callable[[Unit, int, Operations], UnitOptimizer]
    group: Callable[[str], Group]


def recipe_of(asked: Asked | None, groups: Groups) -> Recipe:
    """Return how to make the optimizer that was asked for; None: one of no parameter.

    Raises:
        UserError: 501, there is none of that name, it does not know an option, or it does not treat elements alike.
    """
    if asked is None:
        return Recipe(0.0, (), _none, lambda name: Group(True))
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
    own_groups = [Group(own.get("weight_decay", decay) != 0.0, _lr_factor(pattern, own, lr)) for pattern, own in groups]
    group = _first_that_fits(groups, own_groups, Group(decay != 0.0))
    return Recipe(lr, AdamW.STATE, lambda unit, bucket, ops: AdamW([unit], **options, bucket=bucket, ops=ops), group)


def _of_torch(make: Factory, groups: Groups) -> Recipe:
    name = getattr(make, "__name__", None) or getattr(getattr(make, "func", None), "__name__", "the optimizer")
    kept = trial(make, name)
    if (lr := kept.lr) is None:
        raise UserError(501, f"{name} has no learning rate of its own", "give it lr", where=_WHERE)
    options: dict[str, Options] = {Elementwise.KIND: {}}
    own_groups: list[Group] = []
    for number, (pattern, own) in enumerate(groups):
        rest = {key: value for key, value in own.items() if key != "lr"}
        trial(lambda parameters, rest=rest: make([{**one, **rest} for one in parameters]), f"{name} for {pattern!r}")
        kind = f"{Elementwise.KIND} {number}"
        options[kind] = rest
        own_groups.append(Group(True, _lr_factor(pattern, own, lr), kind))
    group = _first_that_fits(groups, own_groups, Group(True, 1.0, Elementwise.KIND))
    return Recipe(lr, kept.elements, lambda unit, bucket, ops: Elementwise(unit, make, options, kept), group)


def _none(unit: Unit, bucket: int, ops: Operations) -> AdamW:
    raise AssertionError(f"{unit.name} is not trained")


def _first_that_fits(groups: Groups, own: Sequence[Group], rest: Group) -> Callable[[str], Group]:
    """Return a function that returns the group of a parameter by its name: of the first pattern that fits it."""

    def group(name: str) -> Group:
        return next((one for (pattern, _), one in zip(groups, own, strict=True) if fnmatchcase(name, pattern)), rest)

    return group


def _lr_factor(pattern: str, options: Options, lr: float) -> float:
    """Return a group's learning rate as a multiple of the optimizer's. Raises UserError 501: that is 0."""
    own = options.get("lr", lr)
    if own != lr and lr == 0:
        raise UserError(501, f"{pattern!r}: lr {own} next to an optimizer's lr of 0", "give both one", where=_WHERE)
    return own / lr if lr else 1.0
