"""Keep places of sharded parameters where autograd saves them (`zero/saved.py`), and let other hooks keep the rest.

torch asks only the innermost hooks; so whatever is no parameter of ours goes to those around (of
`torch.utils.checkpoint`, say).
"""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._C._autograd import _top_saved_tensors_default_hooks

from megazero.base.errors import UserError
from megazero.zero.saved import saved_places
from megazero.zero.unit import Unit


@dataclass(eq=False, slots=True)
class _Kept:
    """A saved tensor that is no parameter, and its version then: torch does not check it where there are hooks."""

    tensor: Tensor
    version: int


def saving(need: Callable[[Unit], object], gathered: Mapping[int, Unit]) -> AbstractContextManager[object]:
    """Return the hooks around a call of a part.

    Args:
        need: gathers a unit in backward.
        gathered: the sharded units whose parameters are whole, by the storage that holds these.
    """
    outer = _top_saved_tensors_default_hooks(False)
    pack_outer, unpack_outer = outer or (lambda x: x, lambda x: x)

    def keep(x: Tensor) -> Any:
        if outer or x.is_inference():
            return pack_outer(x)
        return _Kept(x.detach(), x._version)  # the tensor itself would hold the graph that holds it

    def restore(kept: Any) -> Tensor:
        if not isinstance(kept, _Kept):
            return unpack_outer(kept)
        if kept.tensor._version != kept.version:
            what = f"a tensor that backward needs, of shape {tuple(kept.tensor.shape)}, was changed in place"
            raise UserError(506, what, "change a copy")
        return kept.tensor

    def need_once(unit: Unit) -> None:
        if torch.is_grad_enabled():  # a second backward would find another unit in the memory of this one
            what = f"create_graph=True of {unit.name}, which rests in shards"
            raise UserError(505, what, "take gradients of gradients in stages 0 to 2")
        need(unit)

    return saved_places(gathered, [], need=need_once, keep=keep, restore=restore)
