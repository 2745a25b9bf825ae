"""Update flat shards with an elementwise torch optimizer.

A rank has an interval of a unit's flat buffer: some rows of one matrix, a part of the next. An optimizer is elementwise
if its update of an element depends only on that element's own gradient and state: on a shard it computes the same
values as on whole matrices. Muon, LAMB, Adafactor and Shampoo are not elementwise. `trial` tests an optimizer and finds
its state: it steps on a small matrix, and on the same elements in two pieces.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from megazero.base.errors import UserError
from megazero.optim.optimizer import Run
from megazero.zero.unit import Unit

Factory = Callable[[Iterable[Any]], torch.optim.Optimizer]
Options = Mapping[str, Any]
_SHAPE, _CUT, _STEPS = (6, 4), 9, 3


@dataclass(frozen=True)
class Kept:
    """The state that a torch optimizer keeps.

    Attributes:
        elements: the names of its state tensors with one value per element.
        counts: whether it counts its updates, as "step".
        lr: the learning rate that it was made with; or None.
    """

    elements: tuple[str, ...]
    counts: bool
    lr: float | None


def trial(make: Factory, name: str) -> Kept:
    """Test that an optimizer, called `name` in errors, is elementwise; return the state that it keeps.

    Raises:
        UserError: 501, it fails, it is not elementwise, or it has state other than values per element and a count.
    """
    draw = torch.Generator().manual_seed(0)
    start, *gradients = torch.randn(1 + _STEPS, *_SHAPE, generator=draw, dtype=torch.float64)
    whole, optimizer = _stepped(make, name, start, gradients)
    for cut in (slice(0, _CUT), slice(_CUT, None)):
        piece, _ = _stepped(make, name, start.view(-1)[cut], [gradient.view(-1)[cut] for gradient in gradients])
        if not torch.allclose(piece, whole.view(-1)[cut], rtol=1e-12, atol=0.0):
            do = "give an optimizer whose update of an element depends on that element alone"
            raise UserError(501, f"{name} computes a different update on a part of a matrix", do, where="optimizer")
    state = next(iter(optimizer.state.values()), {})
    elements = tuple(key for key, value in state.items() if isinstance(value, Tensor) and value.shape == _SHAPE)
    others = [key for key, value in state.items() if key not in elements and value is not None]
    if odd := [key for key in others if key != "step"]:
        raise UserError(501, f"{name} keeps {odd[0]!r}, which is not one value per element", where="optimizer")
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
    except Exception as error:  # user code may raise anything; its text gives the reason
        raise UserError(501, f"{name} failed in a trial: {error}", where="optimizer") from error
    return parameter.detach(), optimizer


@dataclass(eq=False)
class TorchPiece:
    """The elements of a unit's shard that are in one group.

    Attributes:
        where: their interval in the shard.
        parameter: a view of the masters.
        states: views of the optimizer's state tensors, by name; `state` returns them in order.
        make: makes the torch optimizer.
        lr_factor: multiplies the learning rate.
        step: counts the updates, fp32, 0-dim, on the host.
    """

    where: slice
    parameter: nn.Parameter
    states: dict[str, Tensor]
    make: Callable[[], torch.optim.Optimizer]
    lr_factor: float
    step: Tensor

    @property
    def state(self) -> Sequence[Tensor]:
        """Return the state tensors."""
        return list(self.states.values())

    def update(self, gradient: Tensor, lr: float, *, counts: bool) -> None:
        """Update with a gradient in the masters' dtype; a new optimizer gets the old state, with "step" if `counts`."""
        optimizer = self.make()
        if updates := int(self.step):  # a first update without state may differ from one with a state of zeros
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
        """Copy state that an optimizer has allocated into the unit's state, which checkpoints save."""
        own = optimizer.state.get(self.parameter, {})
        for name, values in self.states.items():
            if name in own and own[name] is not values:
                values.copy_(own[name])


class Elementwise:
    """A torch optimizer for the shard of a unit; the interface is in `optim/optimizer.py`.

    Args:
        unit: its masters are updated, in place.
        make: makes the optimizer for some parameters.
        options: options that override those of `make`, by the group's name (`zero.layout.Group.optimizer`).
        kept: the state that it keeps.
    """

    KIND = "torch"

    def __init__(self, unit: Unit, make: Factory, options: Mapping[str, Options], kept: Kept):
        self._counts, self.kinds = kept.counts, kept.elements
        numel = len(unit.masters)
        self._run = Run(slice(0, numel), self.KIND, {kind: unit.resting.new_state(numel) for kind in self.kinds})
        self._pieces: list[TorchPiece] = []
        for group, where in unit.layout.group_slices(unit.shard):
            parameter = nn.Parameter(unit.masters[where])
            states = {kind: flat[where] for kind, flat in self._run.state.items()}
            of_group = partial(make, [{"params": [parameter], **options[group.optimizer]}])
            piece = TorchPiece(where, parameter, states, of_group, group.lr_factor, torch.zeros(()))
            piece.keep(of_group())  # some optimizers begin with state that is not zero
            self._pieces.append(piece)

    def runs(self, unit: Unit) -> Sequence[Run]:
        """Return the state of this rank's elements of the unit."""
        return [self._run]

    def pieces(self, unit: Unit) -> Sequence[TorchPiece]:
        """Return the pieces in which the unit is updated, in their order."""
        return self._pieces

    def update(self, unit: Unit, *, lr: float, scale: Tensor, skip: Tensor) -> None:
        """Update the unit's masters with gradients multiplied by `scale`, and write `unit.resting.updated`.

        The host waits for `skip`, because a flag on the device cannot make a torch optimizer change nothing.
        """
        if not bool(skip):
            for piece in self._pieces:
                gradient = unit.gradients.reduced[piece.where].to(unit.masters.dtype)
                piece.update(gradient * scale.to(gradient.dtype), lr, counts=self._counts)
        unit.resting.round_masters()
