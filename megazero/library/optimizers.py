"""Make the optimizer that a user asks for: one of megazero's by name, or any elementwise torch optimizer.

    "adamw"                                          an optimizer with its defaults (`DEFAULTS`)
    {"name": "muon", "lr": 3e-4, ...}                with options
    lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9)

Groups are (pattern, options) pairs: a parameter takes the options of the first pattern that its name matches. Groups of
megazero's optimizers may have "name", "lr" or "lr_factor", "weight_decay", and "clip".

Every optimizer of megazero keeps averages of the parameters if its option "average" is {"kind": "ema", "decay": 0.999},
and its state in bf16 if "moments" is "bf16".

Muon updates parameters with two dims, except the weights of embeddings; AdamW updates all others. A module's output
projection is better left to AdamW: give it a group with {"name": "adamw"}. A parameter that joins n matrices of equal
sizes, one after the other, is split into them if "fused" has its pattern: {"*in_proj_weight": 3}.

An update does not change the values, the state and the update count of frozen parameters. If only some parameters of a
unit are frozen, each of its parameters becomes a group of its own in the unit's layout, with its own update count. A
frozen one is updated with the rest, and its earlier values are then restored.
"""

from bisect import bisect_right
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from megazero.base.errors import UserError
from megazero.comm.pool import Scratch
from megazero.kernels.operations import Operations
from megazero.library.elementwise import Elementwise, Factory, Options, TorchPiece, trial
from megazero.library.parts import Member
from megazero.optim import groups as rules
from megazero.optim.elements import Piece, Settings
from megazero.optim.mixture import Mixture
from megazero.optim.optimizer import Run
from megazero.plan.matrices import Matrix
from megazero.plan.optimizers import STATES
from megazero.zero.layout import Entry, Group
from megazero.zero.unit import Unit

UnitOptimizer = Mixture | Elementwise
Groups = Sequence[tuple[str, Options]]
Asked = str | Mapping[str, Any] | Callable[[Any], torch.optim.Optimizer]
_ADAMW = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 1e-2}
_MUON = {"momentum": 0.95, "nesterov": True, "steps": 5, "scale": "rms", "lr_factor": 1.0, "weight_decay": 0.1}
DEFAULTS: dict[str, dict[str, Any]] = {
    "adamw": _ADAMW,
    "muon": {**_ADAMW, **_MUON, "fused": {"*in_proj_weight": 3}},
    "lion": {"lr": 1e-4, "betas": (0.9, 0.99), "weight_decay": 0.0},
    "sgd": {"lr": 1e-2, "momentum": 0.0, "weight_decay": 0.0},
}
_IN_GROUPS = ("name", "lr", "lr_factor", "weight_decay", "clip")
_WHERE = "optimizer"


@dataclass(frozen=True)
class Recipe:
    """How to make the optimizers of units.

    Attributes:
        name: the optimizer's name in a config; that of `Elementwise` for one of torch.
        lr: the learning rate of steps that give none.
        kinds: the kinds of values that the optimizers keep for elements.
        states: (name of an optimizer) -> the kinds of values that it keeps.
        make: (unit, bucket in bytes, kernels, memory of all units) -> the optimizer of a unit.
        entry: (name, shape, whether it is the weight of an embedding) -> the parameter, to be laid out in its unit.
        clips: the largest norms of the gradients of groups that have one.
        moments: the dtype of optimizer state, without averages; None: that of masters.
    """

    name: str
    lr: float
    kinds: Sequence[str]
    states: Callable[[str], Sequence[str]]
    make: Callable[..., UnitOptimizer]
    entry: Callable[[str, tuple[int, ...], bool], Entry]
    clips: Sequence[float] = ()
    moments: torch.dtype | None = None

    def entry_of(self, member: Member) -> Entry:
        """Return a parameter of a module, to be laid out in its unit."""
        embeds = any(isinstance(place.owner, nn.Embedding | nn.EmbeddingBag) for place in member.places)
        return self.entry(member.name, tuple(member.parameter.shape), embeds)


def recipe_of(asked: Asked | None, groups: Groups) -> Recipe:
    """Return the recipe of the optimizer that was asked for; asked None: one that trains no parameter.

    Raises:
        UserError: 501, an unknown name or option, or an optimizer that is not elementwise.
    """
    if asked is None:
        return replace(_ours("adamw", dict(_ADAMW), ()), lr=0.0, kinds=())
    if callable(asked):
        return _of_torch(asked, groups)
    if not isinstance(asked, str | Mapping):
        what = f"expected a name, options or a function of parameters, got a {type(asked).__name__}"
        do = "shard replaces the module's parameters: give lambda parameters: torch.optim.SGD(parameters, lr=0.1)"
        raise UserError(501, what, do, where=_WHERE)
    options = {"name": asked} if isinstance(asked, str) else dict(asked)
    known = DEFAULTS.get(name := options.pop("name", ""))
    if known is None:
        do = f"give one of {', '.join(DEFAULTS)}, or a function that makes a torch optimizer for given parameters"
        raise UserError(501, f"unknown optimizer {name!r}", do, where=_WHERE)
    if odd := sorted(options.keys() - known.keys() - {"average", "moments"}):
        raise UserError(
            501, f"{name} has no option {odd[0]!r}", f"it has {', '.join(known)}, average, moments", where=_WHERE
        )
    return _ours(name, {**known, **options}, groups)


def _ours(name: str, options: dict[str, Any], groups: Groups) -> Recipe:
    lr, takes = options["lr"], (name, "adamw") if name == "muon" else (name,)
    settings = {other: _settings(options if other in takes else own) for other, own in DEFAULTS.items()}
    if (scale := settings["muon"].scale) not in ("rms", "spectral"):
        raise UserError(501, f"muon has no scale {scale!r}", "it has rms and spectral", where=_WHERE)
    asked = []
    for pattern, own in groups:
        if odd := sorted(own.keys() - {*_IN_GROUPS}):
            do = f"it has {', '.join(_IN_GROUPS)}"
            raise UserError(501, f"{pattern!r}: {name} has no option {odd[0]!r} for a group", do, where=_WHERE)
        if (other := own.get("name", name)) not in STATES:
            do = f"give one of {', '.join(STATES)}"
            raise UserError(501, f"{pattern!r}: unknown optimizer {other!r}", do, where=_WHERE)
        factor = own.get("lr_factor", 1.0) * _lr_factor(pattern, own, lr)
        asked.append(rules.Asked(pattern, own.get("name"), factor, own.get("weight_decay"), own.get("clip")))
    average = options.get("average") or {"kind": "none"}
    if average.get("kind") not in ("none", "ema") or not {*average} <= {"kind", "decay"}:
        do = 'give {"kind": "ema", "decay": 0.999}'
        raise UserError(501, f"{name} has no average {average}", do, where=_WHERE)
    settings = {key: replace(own, average=average.get("decay", 0.999)) for key, own in settings.items()}
    averages, moments = average["kind"] == "ema", options.get("moments", "fp32")
    if moments not in ("fp32", "bf16"):
        raise UserError(501, f"{name} has no moments {moments!r}", "they are fp32 or bf16", where=_WHERE)
    of = rules.Groups(name, options["weight_decay"], asked, options.get("lr_factor", 1.0), averages)

    def entry(parameter: str, shape: tuple[int, ...], embeds: bool) -> Entry:
        matrix = None if len(shape) != 2 or embeds else _matrix(parameter, shape, options.get("fused", {}))
        group = of.of(parameter, decays=True, hidden=matrix is not None)
        return Entry(parameter, shape, group, split=True, matrix=matrix)

    def make(unit: Unit, bucket: int, ops: Operations, scratch: Scratch) -> UnitOptimizer:
        return Mixture([unit], of.optimizers, settings, bucket=bucket, ops=ops, scratch=scratch)

    own = of.optimizers
    dtype = torch.bfloat16 if moments == "bf16" else None
    return Recipe(name, lr, own.kinds, own.states, make, entry, of.clips, dtype)


def _settings(options: Mapping[str, Any]) -> Settings:
    own = {"iterations" if key == "steps" else key: value for key, value in options.items()}
    known = {field.name for field in fields(Settings)}
    betas = own.get("betas", (own.get("momentum"), 0.0))  # sgd has only a momentum
    return Settings(**{**{key: value for key, value in own.items() if key in known}, "betas": betas})


def _matrix(parameter: str, shape: tuple[int, ...], fused: Mapping[str, int]) -> Matrix:
    """Return the matrices of a parameter. Raises UserError 501: its rows are not so many equal parts."""
    rows, columns = shape
    parts = next((parts for pattern, parts in fused.items() if fnmatchcase(parameter, pattern)), 1)
    if rows % parts:
        what = f"fused: {parameter} has {rows} rows, which are not {parts} equal matrices"
        raise UserError(501, what, "correct its pattern in fused", where=_WHERE)
    each = rows // parts
    return Matrix(rows, columns, tuple((k * each, (k + 1) * each) for k in range(parts)), rows)


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
        own_groups.append((pattern, Group(0.0, _lr_factor(pattern, own, lr), kind)))
    rest = Group(0.0, 1.0, Elementwise.KIND)

    def entry(parameter: str, shape: tuple[int, ...], _: bool) -> Entry:
        group = next((group for pattern, group in own_groups if fnmatchcase(parameter, pattern)), rest)
        return Entry(parameter, shape, group, split=True)

    def made(unit: Unit, **_: object) -> UnitOptimizer:
        return Elementwise(unit, make, options, kept)

    return Recipe(Elementwise.KIND, lr, kept.elements, lambda _: kept.elements, made, entry)


def _lr_factor(pattern: str, options: Options, lr: float) -> float:
    """Return a group's lr divided by the optimizer's, `lr`. Raises UserError 501: `lr` is 0 and the group's is not."""
    own = options.get("lr", lr)
    if own != lr and lr == 0:
        raise UserError(501, f"{pattern!r}: lr {own}, but the optimizer's lr is 0", "give both one", where=_WHERE)
    return own / lr if lr else 1.0


class Following:
    """One optimizer per unit, which leaves frozen parameters unchanged; `optim/optimizer.py` has the interface.

    Args:
        bucket, ops, scratch: arguments of `Recipe.make`.

    Attributes:
        kinds, states: as in `Recipe`.
        frozen: the names of the parameters that the next update does not change.
    """

    def __init__(self, units: Sequence[Unit], recipe: Recipe, bucket: int, ops: Operations, scratch: Scratch):
        self._make = partial(recipe.make, bucket=bucket, ops=ops, scratch=scratch)
        self.kinds, self.states = recipe.kinds, recipe.states
        self._of: dict[Unit, UnitOptimizer] = {}
        self._missed: dict[str, Tensor] = {}  # updates in which a parameter was frozen
        self.frozen: Collection[str] = ()
        for unit in sorted(units, key=lambda unit: unit.numel, reverse=True):  # smaller ones use the memory of larger
            self._of[unit] = self._make(unit)

    def add(self, unit: Unit, updates: int) -> None:
        """Add a unit that was frozen in the first `updates` updates."""
        self._of[unit] = self._make(unit)
        self._missed |= {i.name: torch.tensor(float(updates), device=unit.device) for i in unit.layout.intervals}

    def runs(self, unit: Unit) -> Sequence[Run]:
        """Return the state of this rank's elements of a unit; none of a unit that is not trained."""
        return self._of[unit].runs(unit) if unit in self._of else ()

    def pieces(self, unit: Unit) -> Sequence[Piece | TorchPiece]:
        """Return the pieces in which a unit is updated, in their order."""
        return self._of[unit].pieces(unit)

    def update(self, unit: Unit, *, lr: float, scale: Tensor, skip: Tensor) -> None:
        """Update a unit's masters with gradients times `scale`; write them to `unit.resting.updated`.

        If `skip` is 1, nothing changes. Frozen parameters never change.
        """
        intervals = unit.layout.intervals
        if frozen := {interval.name for interval in intervals if interval.name in self.frozen}:
            for name in frozen:
                if unit.masters.is_meta:
                    raise UserError(502, f"{name} is frozen, and its state is on disks", "freeze it before shard")
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
                for name, piece in self._named(unit):
                    piece.step.fill_(counts.get(name, updates))

    def _values_of(self, unit: Unit, names: Collection[str]) -> Iterator[Tensor]:
        """Yield this rank's values, state and update counts of some parameters of a unit."""
        for name, piece in self._named(unit) if names else ():
            if name in names:
                flats = (unit.masters, unit.resting.updated.values)
                yield from (piece.step, *(flat[piece.where] for flat in flats), *(piece.state or ()))

    def _separate(self, unit: Unit) -> None:
        """Give each parameter of a unit a group of its own; the unit's new optimizer takes over the state."""
        layout = unit.layout
        if len(layout.groups) == len(layout.intervals):
            return
        before, runs = self.pieces(unit), self.runs(unit)
        of_group = list(layout.group_slices(slice(0, layout.numel)))
        groups = [(group, i.start) for group, of in of_group for i in layout.intervals if of.start <= i.start < of.stop]
        unit.layout = replace(layout, groups=tuple(groups))
        ledger = unit.axes.shard.comm.ledger
        held = ledger.held()
        self._of[unit] = self._make(unit)
        ledger.let_go(held)
        for old, new in zip(runs, self.runs(unit), strict=True):
            for kind, values in new.state.items():
                values.copy_(old.state[kind])
        starts = [piece.where.start for piece in before]
        for piece in self.pieces(unit):
            piece.step.copy_(before[bisect_right(starts, piece.where.start) - 1].step)

    def _named(self, unit: Unit) -> Iterator[tuple[str, Piece | TorchPiece]]:
        """Yield the pieces of a unit, each with the name of its first parameter."""
        starts = [interval.start for interval in unit.layout.intervals]
        for piece in self.pieces(unit):
            yield unit.layout.intervals[bisect_right(starts, unit.shard.start + piece.where.start) - 1].name, piece
