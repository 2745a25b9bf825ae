"""Make the update rule of each parameter: its optimizer, learning rate, weight decay and clip.

A group is a pattern of parameter names with options; a parameter is in the first group whose pattern matches its name.
Options that its group leaves out, and parameters in no group, take those of the optimizer.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from megazero.plan.optimizers import WHOLE, Optimizers
from megazero.zero.layout import Group


class Asked(NamedTuple):
    """A group that the user asks for; None: as without the group.

    Attributes:
        match: a pattern of full parameter names, with * and ?.
        name: the optimizer.
        lr_factor: multiplies the learning rate.
        weight_decay: the weight decay of all parameters of the group.
        clip: the largest norm of the gradients of the group, which then do not count in the global norm's clip.
    """

    match: str
    name: str | None = None
    lr_factor: float | None = None
    weight_decay: float | None = None
    clip: float | None = None


@dataclass(frozen=True)
class Groups:
    """The update rules of a model.

    Attributes:
        name: the optimizer of parameters whose group names none.
        weight_decay: of parameters that decay, in groups without their own.
        whole_lr_factor: multiplies the learning rate of optimizers of whole matrices.
        averages: the optimizers keep averages of parameters.
    """

    name: str
    weight_decay: float
    asked: Sequence[Asked] = ()
    whole_lr_factor: float = 1.0
    averages: bool = False

    @property
    def optimizers(self) -> Optimizers:
        """Return which optimizer updates which parameter."""
        return Optimizers(self.name, tuple((own.match, own.name) for own in self.asked), self.averages)

    @property
    def clips(self) -> list[float]:
        """Return the clips of groups that have one; `Group.clip` counts them from 1."""
        return [own.clip for own in self.asked if own.clip is not None]

    def of(self, parameter: str, *, decays: bool, hidden: bool) -> Group:
        """Return the update rule of a parameter.

        Args:
            decays: the optimizer's weight decay applies to it.
            hidden: it is the weight of a matrix product inside of a block.
        """
        optimizer, number = self.optimizers.of(parameter, hidden=hidden)
        own = self.asked[number] if number >= 0 else Asked("")
        return Group(
            own.weight_decay if own.weight_decay is not None else self.weight_decay if decays else 0.0,
            (1.0 if own.lr_factor is None else own.lr_factor) * (self.whole_lr_factor if optimizer in WHOLE else 1.0),
            optimizer,
            number,
            0 if own.clip is None else 1 + sum(each.clip is not None for each in self.asked[:number]),
        )
