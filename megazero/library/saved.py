"""Keep places of sharded parameters instead of the parameters, where autograd saves them for backward.

What autograd saves of a sharded unit's parameters is replaced by (unit, place), with torch's saved_tensors_hooks, and
looked up again in backward. torch asks only the innermost hooks; so whatever is no parameter of ours goes to those
around (of `torch.utils.checkpoint`, say).
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._C._autograd import _top_saved_tensors_default_hooks

from megazero.base.errors import UserError
from megazero.zero.unit import Unit


@dataclass(eq=False, slots=True)
class _Saved:
    """A place in a unit's parameters, which stands for a saved tensor."""

    unit: Unit
    dtype: torch.dtype  # complex, where real parameters are looked at as complex ones
    offset: int
    shape: torch.Size
    stride: tuple[int, ...]
    signs: tuple[bool, bool]  # it is conjugated, and negated, which torch remembers of a view

    def of(self, whole: Tensor) -> Tensor:
        """Return the tensor, from the whole values of the unit."""
        x = whole.view(self.dtype).as_strided(self.shape, self.stride, self.offset)
        x = x.conj() if self.signs[0] else x
        return -x if self.signs[1] else x


@dataclass(eq=False, slots=True)
class _Kept:
    """A saved tensor that is no parameter, and its version then: torch does not check it where there are hooks."""

    tensor: Tensor
    version: int


def saving(need: Callable[[Unit], Tensor], unit_of: Callable[[Tensor], Unit | None]) -> AbstractContextManager[object]:
    """Return the hooks around a call of a part.

    Args:
        need: gathers a unit in backward, and returns its whole values.
        unit_of: the sharded unit that a tensor is in.
    """
    outer = _top_saved_tensors_default_hooks(False)
    pack_outer, unpack_outer = outer or (lambda x: x, lambda x: x)

    def pack(x: Tensor) -> Any:
        unit = unit_of(x)
        if unit is None:
            if outer or x.is_inference():
                return pack_outer(x)
            return _Kept(x.detach(), x._version)  # the tensor itself would hold the graph that holds it
        signs = x.is_conj(), x.is_neg()
        return _Saved(unit, x.dtype, int(x.storage_offset()), x.shape, x.stride(), signs)

    def unpack(kept: Any) -> Tensor:
        if isinstance(kept, _Kept):
            if kept.tensor._version != kept.version:
                what = f"a tensor that backward needs, of shape {tuple(kept.tensor.shape)}, was changed in place"
                raise UserError(506, what, "change a copy")
            return kept.tensor
        if not isinstance(kept, _Saved):
            return unpack_outer(kept)
        if torch.is_grad_enabled():  # a second backward would find another unit in the memory of this one
            what = f"create_graph=True of {kept.unit.name}, which rests in shards"
            raise UserError(505, what, "take gradients of gradients in stages 0 to 2")
        return kept.of(need(kept.unit))

    return torch.autograd.graph.saved_tensors_hooks(pack, unpack)
