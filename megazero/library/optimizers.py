"""Make the optimizer that a user asks for: ours by name, or any class of torch's that treats elements alike.

    "adamw"                                          ours, with its defaults (those of torch.optim.AdamW)
    {"name": "adamw", "lr": 3e-4, ...}               with options: lr, betas, eps, weight_decay
    lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9)

Parameters whose names fit the pattern of a group have that group's options instead: (pattern, options) pairs, of which
the first that fits counts. Ours knows "lr", and "weight_decay" (the same or 0).
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, ClassVar

import torch
from torch import Tensor

from megazero.base.errors import UserError
from megazero.kernels.operations import Operations
from megazero.library.elementwise import Elementwise, Factory, Options, kind_of, trial
from megazero.optim.adamw import AdamW
from megazero.optim.optimizer import Optimizer
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
        state: the names of what it keeps of each element.
        lr: its learning rate where a step does not say one.
        make: (units, bucket, kernels) -> the optimizer.
        group: the group of a parameter, by its name.
    """

    state: tuple[str, ...]
    lr: float
    make: Callable[[list[Unit], int, Operations], Optimizer]
    group: Callable[[str], Group]


def recipe_of(asked: Asked, groups: Groups) -> Recipe:
    """Return how to make the optimizer that was asked for.

    Raises:
        UserError: 501, there is none of that name, it does not know an option, or it does not treat elements alike.
    """
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
    decay, lr = options["weight_decay"], options["lr"]
    for pattern, own in groups:
        if odd := sorted(own.keys() - {"lr", "weight_decay"}):
            raise UserError(501, f"{pattern!r}: adamw has no option {odd[0]!r} of a group", where=_WHERE)
        if own.get("weight_decay", decay) not in (0.0, decay):
            what = f"{pattern!r}: weight_decay {own['weight_decay']} beside {decay}"
            raise UserError(501, what, "give 0, or an optimizer of torch", where=_WHERE)

    def group(name: str) -> Group:
        own = _fitting(name, groups)
        return Group(own.get("weight_decay", decay) != 0.0, own.get("lr", lr) / lr if "lr" in own else 1.0)

    def make(units: list[Unit], bucket: int, ops: Operations) -> Optimizer:
        by_kind: dict[tuple[torch.dtype, torch.dtype], list[Unit]] = {}
        for unit in units:
            by_kind.setdefault((unit.masters.dtype, unit.updated.values.dtype), []).append(unit)
        told = {"betas": options["betas"], "eps": options["eps"], "weight_decay": decay}
        return ByUnit([(some, AdamW(some, **told, bucket=bucket, ops=ops)) for some in by_kind.values()])

    return Recipe(AdamW.STATE, lr, make, group)


def _of_torch(make: Factory, groups: Groups) -> Recipe:
    name = getattr(make, "__name__", None) or getattr(getattr(make, "func", None), "__name__", "the optimizer")
    kept = trial(make, name)
    if not kept.lr:
        raise UserError(501, f"{name} has no learning rate of its own", "give it lr", where=_WHERE)
    options: dict[str, Options] = {Elementwise.KIND: {}}
    for number, (pattern, own) in enumerate(groups):
        rest = {key: value for key, value in own.items() if key != "lr"}
        trial(lambda parameters, rest=rest: make([{**one, **rest} for one in parameters]), f"{name} for {pattern!r}")
        options[f"{Elementwise.KIND} {number}"] = rest

    def group(parameter: str) -> Group:
        number = next((n for n, (pattern, _) in enumerate(groups) if fnmatchcase(parameter, pattern)), None)
        if number is None:
            return Group(True, 1.0, Elementwise.KIND)
        return Group(True, groups[number][1].get("lr", kept.lr) / kept.lr, f"{Elementwise.KIND} {number}")

    def of(units: list[Unit], bucket: int, ops: Operations) -> Optimizer:
        return kind_of(kept)(units, make, options, counts=kept.counts)

    return Recipe(kept.elements, kept.lr, of, group)


def _fitting(name: str, groups: Groups) -> Options:
    return next((options for pattern, options in groups if fnmatchcase(name, pattern)), {})


class ByUnit:
    """Several optimizers of one kind, each for units of one dtype (`optim/optimizer.py`)."""

    KIND: ClassVar[str] = AdamW.KIND
    STATE: ClassVar[tuple[str, ...]] = AdamW.STATE

    def __init__(self, optimizers: Iterable[tuple[list[Unit], AdamW]]):
        self._of = {unit: optimizer for units, optimizer in optimizers for unit in units}
        self.state = {unit: optimizer.state[unit] for unit, optimizer in self._of.items()}

    @property
    def staging_bytes(self) -> int:
        """Return the bytes kept besides the state."""
        return sum(optimizer.staging_bytes for optimizer in dict.fromkeys(self._of.values()))

    def steps(self, unit: Unit) -> list[Tensor]:
        """Return the update counts of a unit's pieces, to be set when a run resumes."""
        return self._of[unit].steps(unit)

    def update(self, unit: Unit, *, lr: float, scale: Tensor, skip: Tensor) -> None:
        """Update a unit's masters with gradients multiplied by `scale`, and write `unit.updated`."""
        self._of[unit].update(unit, lr=lr, scale=scale, skip=skip)
