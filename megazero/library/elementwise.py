"""Update flat shards with an optimizer of torch that treats every element alike.

A rank has an interval of a unit's flat buffer: some rows of a matrix, a part of the next one. An optimizer whose update
of an element depends on that element's own gradient and state alone computes the same there as on whole matrices;
others do not (Muon, LAMB, Adafactor, Shampoo). `trial` finds out which it is, and what state it keeps: it steps on a
small matrix, and on the same elements in two pieces.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from megazero.base.errors import UserError
from megazero.zero.unit import Unit

Factory = Callable[[Iterable[Any]], torch.optim.Optimizer]
Options = Mapping[str, Any]
_SHAPE, _CUT, _STEPS = (6, 4), 9, 3


@dataclass(frozen=True)
class Kept:
    """The state of an optimizer of torch.

    Attributes:
        elements: its names for values of each element.
        counts: it has a count of its updates, called "step".
        lr: the learning rate that it was made with; None: it has none.
    """

    elements: tuple[str, ...]
    counts: bool
    lr: float | None


def trial(make: Factory, name: str) -> Kept:
    """Return what state an optimizer keeps.

    Raises:
        UserError: 501, it cannot be made, it does not treat elements alike, or its state is neither of elements nor a
            count.
    """
    draw = torch.Generator().manual_seed(0)
    start, *gradients = torch.randn(1 + _STEPS, *_SHAPE, generator=draw, dtype=torch.float64)
    whole, optimizer = _stepped(make, name, start, gradients)
    for cut in (slice(0, _CUT), slice(_CUT, None)):
        piece, _ = _stepped(make, name, start.view(-1)[cut], [gradient.view(-1)[cut] for gradient in gradients])
        if not torch.allclose(piece, whole.view(-1)[cut], rtol=1e-12, atol=0.0):
            do = "give one whose update of an element depends on that element alone"
            raise UserError(501, f"{name} computes another update on a part of a matrix", do, where="optimizer")
    state = next(iter(optimizer.state.values()), {})
    elements = tuple(key for key, value in state.items() if isinstance(value, Tensor) and value.shape == _SHAPE)
    others = [key for key, value in state.items() if key not in elements and value is not None]
    if odd := [key for key in others if key != "step"]:
        raise UserError(501, f"{name} keeps {odd[0]!r}, which is no value of each element", where="optimizer")
    lr = optimizer.defaults.get("lr")
    return Kept(elements, "step" in others, None if lr is None else float(lr))


def _stepped(
    make: Factory, name: str, start: Tensor, gradients: Sequence[Tensor]
) -> tuple[Tensor, torch.optim.Optimizer]:
    """Return the values after some steps, and the optimizer. A learning rate of 0 would show nothing: it becomes 1."""
    parameter = nn.Parameter(start.clone())
    try:
        optimizer = make([{"params": [parameter]}])
        for group in optimizer.param_groups:
            group["lr"] = group.get("lr") or 1.0
        for gradient in gradients:
            parameter.grad = gradient.clone()
            optimizer.step()
    except Exception as error:  # whatever a stranger's code raises: it says why
        raise UserError(501, f"{name} cannot be tried: {error}", where="optimizer") from error
    return parameter.detach(), optimizer


@dataclass(eq=False)
class _Piece:
    """The elements of a unit's shard that are in one group.

    Attributes:
        where: their place in the shard.
        parameter: a view of the masters.
        states: views of what the optimizer keeps of each element, by name.
        make: makes the optimizer of torch.
        lr_factor: multiplies the learning rate.
        step: counts the updates, fp32, 0-dim, on the host.
    """

    where: slice
    parameter: nn.Parameter
    states: dict[str, Tensor]
    make: Callable[[], torch.optim.Optimizer]
    lr_factor: float
    step: Tensor

    def update(self, gradient: Tensor, lr: float, *, counts: bool) -> None:
        """Update with a gradient of the masters' dtype, by an optimizer that gets the state of the update before."""
        optimizer = self.make()
        if updates := int(self.step):  # a first update may be another one than with a state of zeros
            state: dict[str, Any] = dict(self.states)
            if counts:
                there = any(group.get("fused") or group.get("capturable") for group in optimizer.param_groups)
                state["step"] = torch.tensor(float(updates), device=self.parameter.device if there else None)
            optimizer.state[self.parameter] = state
        for group in optimizer.param_groups:
            group["lr"] = lr * self.lr_factor
        self.parameter.grad = gradient
        optimizer.step()
        self.parameter.grad = None
        self.step += 1
        self.keep(optimizer)

    def keep(self, optimizer: torch.optim.Optimizer) -> None:
        """Copy state that an optimizer has made into the unit's, which checkpoints save."""
        own = optimizer.state.get(self.parameter, {})
        for name, values in self.states.items():
            if name in own and own[name] is not values:
                values.copy_(own[name])


class Elementwise:
    """An optimizer of torch over the shard of a unit (`optim/optimizer.py`).

    Args:
        unit: its masters are updated, in place.
        make: makes the optimizer for some parameters.
        options: what differs from `make`, by the name of a group (`zero.layout.Group.optimizer`).
        kept: what it keeps.

    Attributes:
        state: by unit and name.
    """

    KIND = "torch"

    def __init__(self, unit: Unit, make: Factory, options: Mapping[str, Options], kept: Kept):
        self._counts = kept.counts
        self.state = {unit: {name: unit.resting.new_state() for name in kept.elements}}
        self._pieces: list[_Piece] = []
        for group, where in unit.layout.group_slices(unit.shard):
            parameter = nn.Parameter(unit.masters[where])
            states = {name: flat[where] for name, flat in self.state[unit].items()}
            of_group = partial(make, [{"params": [parameter], **options[group.optimizer]}])
            piece = _Piece(where, parameter, states, of_group, group.lr_factor, torch.zeros(()))
            piece.keep(of_group())  # some begin with other values than zeros
            self._pieces.append(piece)

    def steps(self, unit: Unit) -> list[Tensor]:
        """Return the update counts of the unit's pieces, to be set when a run resumes."""
        return [piece.step for piece in self._pieces]

    def update(self, unit: Unit, *, lr: float, scale: Tensor, skip: Tensor) -> None:
        """Update the unit's masters with gradients multiplied by `scale`, and write `unit.resting.updated`.

        The host waits for `skip`: an optimizer of torch cannot be told by the device to change nothing.
        """
        if not bool(skip):
            for piece in self._pieces:
                gradient = unit.gradients.reduced[piece.where].to(unit.masters.dtype)
                piece.update(gradient * scale.to(gradient.dtype), lr, counts=self._counts)
        unit.resting.round_masters()
