"""One unit: flat parameters, flat gradients, and the model's parameters as views of them.

All memory of a unit is allocated once and reused for the whole run, so a training step neither allocates gradients
nor touches fresh pages for them.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from megazero.zero.layout import Interval, UnitLayout, aligned

# Initial values are made in intervals of this many elements: bounds the fp64 working memory to some 10 MB.
_INITIAL_PIECE = 1 << 20


class GradientView:
    """The gradient of one parameter inside its unit's flat buffer (a `GradientSlot` of the model).

    The first delivery of a step overwrites what the step before left, later ones (the next micro-batch, the other use
    of a tied weight) add to it: nothing is ever zeroed for its own sake.
    """

    def __init__(self, view: Tensor):
        self.view = view
        self.fresh = True

    def add(self, gradient: Tensor) -> None:
        if self._first():
            self.view.copy_(gradient)
        else:
            self.view += gradient

    def add_product(self, left: Tensor, right: Tensor) -> None:
        if self._first():
            torch.mm(left, right, out=self.view)
        else:
            self.view.addmm_(left, right)

    def add_rows(self, rows: Tensor, values: Tensor) -> None:
        if self._first():
            self.view.zero_()
        self.view.index_add_(0, rows, values)

    def _first(self) -> bool:
        first, self.fresh = self.fresh, False
        return first


class Unit:
    """The parameters that are kept, moved and updated together.

    Args:
        layout: who lies where.
        dtype, device: of parameters and gradients.
        shards: the buffers can be cut into this many equal parts; what that adds at their ends is zero and stays so.
    """

    def __init__(self, layout: UnitLayout, *, dtype: torch.dtype, device: torch.device, shards: int = 1):
        self.layout = layout
        padded = aligned(max(layout.numel, layout.decayed), shards)
        self.parameters = torch.zeros(padded, dtype=dtype, device=device)
        self.gradients = torch.zeros(padded, dtype=dtype, device=device)
        self.views = {i.name: GradientView(_view(self.gradients, i)) for i in layout.intervals}

    def fill(self, initial: Callable[[str, int, int], Tensor]) -> None:
        """Writes initial values; `initial(name, start, stop)` gives those of an interval of one parameter."""
        for interval in self.layout.intervals:
            flat = self.parameters[interval.start : interval.stop]
            for start in range(0, len(flat), _INITIAL_PIECE):
                stop = min(start + _INITIAL_PIECE, len(flat))
                flat[start:stop] = initial(interval.name, start, stop)

    def adopt(self, parameters: dict[str, nn.Parameter]) -> None:
        """Makes the model's (meta) parameters views of this unit's memory; whoever holds them keeps holding them."""
        for interval in self.layout.intervals:
            old = parameters[interval.name]
            new = nn.Parameter(_view(self.parameters, interval))
            vars(new).update(vars(old), gradient_slot=self.views[interval.name])
            torch.utils.swap_tensors(old, new)

    def begin_step(self) -> None:
        for view in self.views.values():
            view.fresh = True

    def close_gradients(self) -> None:
        """A parameter that no delivery reached in this step has a zero gradient, not the last step's."""
        for view in self.views.values():
            if view.fresh:
                view.view.zero_()
                view.fresh = False

    def parameter(self, name: str) -> Tensor:
        """The values of one parameter, as a view."""
        return _view(self.parameters, next(i for i in self.layout.intervals if i.name == name))


def _view(flat: Tensor, interval: Interval) -> Tensor:
    return flat[interval.start : interval.stop].view(interval.shape)
