"""Save places of sharded parameters instead of the parameters when autograd saves tensors for backward.

The buffers of sharded units rotate: when backward needs a parameter, it is in other memory than in forward. With
torch's saved_tensors_hooks a saved view of a unit's gathered parameters is replaced by (unit, place), which backward
looks up in the unit's current buffer.
"""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megazero.zero.unit import Unit


@dataclass(slots=True, eq=False)
class SavedPlace:
    """A place in a unit's parameters, which stands for a saved tensor; not frozen, for speed: a layer makes many."""

    unit: Unit
    dtype: torch.dtype  # complex, if real parameters are viewed as complex ones
    offset: int
    shape: torch.Size
    stride: tuple[int, ...]
    conjugated: bool
    negated: bool

    def view(self) -> Tensor:
        """Return the saved tensor, as a view of the unit's current buffer."""
        x = self.unit.parameters.whole
        assert x is not None, f"backward needs unit {self.unit.name}, which is not there"
        if self.dtype != x.dtype:
            x = x.view(self.dtype)
        x = x.as_strided(self.shape, self.stride, self.offset)
        if self.conjugated:
            x = x.conj()
        return -x if self.negated else x


def saved_places(
    gathered: Mapping[int, Unit],
    needed: list[Unit],
    *,
    need: Callable[[Unit], object] | None = None,
    keep: Callable[[Tensor], Any] = Tensor.detach,
    restore: Callable[[Any], Tensor] | None = None,
) -> AbstractContextManager[object]:
    """Return the hooks of saved tensors for one call of a layer.

    Args:
        gathered: the sharded units whose parameters are whole, by the storage (`_cdata`) that holds the parameters.
        needed: receives each unit with a saved parameter.
        need: called in backward before a unit's parameters are looked up; None: they are gathered already.
        keep: returns the object to save for any other tensor. The tensor itself would hold the graph that holds it.
        restore: turns the result of `keep` back into the tensor; None: `keep` returns tensors.
    """

    def pack(x: Tensor) -> Any:
        unit = gathered.get(x.untyped_storage()._cdata) if x.layout == torch.strided else None
        if unit is None:
            return keep(x)
        if unit not in needed:
            needed.append(unit)
        return SavedPlace(unit, x.dtype, int(x.storage_offset()), x.shape, x.stride(), x.is_conj(), x.is_neg())

    def unpack(saved: Any) -> Tensor:
        if not isinstance(saved, SavedPlace):
            return saved if restore is None else restore(saved)
        if need is not None:
            need(saved.unit)
        return saved.view()

    return torch.autograd.graph.saved_tensors_hooks(pack, unpack)


def before_backward(x: Tensor, event: Callable[[object], None]) -> None:
    """Make autograd call `event` when the gradient of x has arrived, before it goes on; nothing if x has no graph."""
    if x.grad_fn is not None:
        x.grad_fn.register_prehook(event)
