"""Update flat shards with an optimizer of torch that treats every element alike.

A rank has an interval of a unit's flat buffer: some rows of a matrix, a part of the next one. An optimizer whose update
of an element depends on that element's own gradient and state alone computes the same there as on whole matrices;
others do not (Muon, LAMB, Adafactor, Shampoo). `trial` finds out which it is, and what state it keeps: it steps on a
small matrix, and on the same elements in two pieces.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

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
    start = torch.randn(_SHAPE, generator=draw, dtype=torch.float64)
    gradients = [torch.randn(_SHAPE, generator=draw, dtype=torch.float64) for _ in range(_STEPS)]
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


class _Piece:
    """The elements of a unit's shard that are in one group, with the optimizer of torch that updates them.

    Args:
        where: their place in the shard.
        parameter: a view of the masters.
        states: views of the unit's buffers, by name.
        make: makes the optimizer.

    Attributes:
        step: counts the updates, fp32, 0-dim, on the host.
    """

    def __init__(
        self,
        where: slice,
        parameter: nn.Parameter,
        states: dict[str, Tensor],
        make: Callable[[], torch.optim.Optimizer],
    ):
        self.where, self._parameter, self._states, self._make = where, parameter, states, make
        self._optimizer = make()
        self.step = torch.zeros(())
        self._done = 0  # updates that the optimizer's own state has seen
        self._adopt()

    def update(self, gradient: Tensor, lr: float, *, counts: bool) -> None:
        """Update with a gradient of the masters' dtype."""
        if (updates := int(self.step)) != self._done:  # a checkpoint was loaded
            self._optimizer = self._make()  # its first update may be another one than with a state of zeros
            if updates:
                self._optimizer.state[self._parameter] = dict(self._states)
            if updates and counts:
                there = any(group.get("fused") or group.get("capturable") for group in self._optimizer.param_groups)
                device = self._parameter.device if there else None
                self._optimizer.state[self._parameter]["step"] = torch.tensor(float(updates), device=device)
        for group in self._optimizer.param_groups:
            group["lr"] = lr
        self._parameter.grad = gradient
        self._optimizer.step()
        self._parameter.grad = None
        self.step += 1
        self._done = int(self.step)
        self._adopt()

    def _adopt(self) -> None:
        """Move state that the optimizer has made into the unit's buffers, which checkpoints save."""
        own = self._optimizer.state.get(self._parameter, {})
        for name, buffer in self._states.items():
            if name in own and own[name] is not buffer:
                buffer.copy_(own[name])
                own[name] = buffer


class Elementwise:
    """An optimizer of torch over the shards of units (`optim/optimizer.py`); `kind_of` gives its class.

    Args:
        units: the units whose masters are updated, in place.
        make: makes it for some parameters.
        options: what differs from `make`, by the name of a group (`zero.layout.Group.optimizer`).
        counts: it keeps a count of its updates.

    Attributes:
        STATE: the names of what it keeps of each element.
        state: for each unit its state.
    """

    KIND: ClassVar[str] = "torch"
    STATE: ClassVar[tuple[str, ...]] = ()

    def __init__(self, units: Sequence[Unit], make: Factory, options: Mapping[str, Options], *, counts: bool):
        self._counts = counts
        self.state = {unit: {name: unit.resting.new_state() for name in self.STATE} for unit in units}
        self._pieces: dict[Unit, list[tuple[_Piece, float]]] = {}
        for unit in units:
            self._pieces[unit] = []
            for group, where in unit.layout.group_slices(unit.shard):
                parameter = nn.Parameter(unit.masters[where])
                states = {name: flat[where] for name, flat in self.state[unit].items()}
                asked = [{"params": [parameter], **options[group.optimizer]}]
                piece = _Piece(where, parameter, states, partial(make, asked))
                self._pieces[unit].append((piece, group.lr_factor))

    @property
    def staging_bytes(self) -> int:
        """Return the bytes kept besides the state: none, gradients are widened while a unit is updated."""
        return 0

    def steps(self, unit: Unit) -> list[Tensor]:
        """Return the update counts of a unit's pieces, to be set when a run resumes."""
        return [piece.step for piece, _ in self._pieces[unit]]

    def update(self, unit: Unit, *, lr: float, scale: Tensor, skip: Tensor) -> None:
        """Update a unit's masters with gradients multiplied by `scale`, and write `unit.resting.updated`.

        The host waits for `skip`: an optimizer of torch cannot be told by the device to change nothing.
        """
        if not bool(skip):
            for piece, factor in self._pieces[unit]:
                gradient = unit.gradients.reduced[piece.where].to(unit.masters.dtype)
                piece.update(gradient * scale.to(gradient.dtype), lr * factor, counts=self._counts)
        unit.resting.round_masters()


def kind_of(kept: Kept) -> type[Elementwise]:
    """Return the class of an optimizer that keeps this state."""
    return type("Elementwise", (Elementwise,), {"STATE": kept.elements})
