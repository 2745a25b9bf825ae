"""Make sharded parameters refuse unsupported operations, and name the call of `Sharded` to use instead.

Users of torch read and change a module's parameters in many ways: `state_dict`, `deepcopy`, `pickle`, an optimizer,
`clip_grad_norm_`, `nn.init`. All of them are operations on the parameters, and torch passes each operation to
`__torch_function__` of a subclass of `Tensor` (as in torch.nn.UninitializedParameter):

    shape, dtype, device, ...  those of the whole parameter, also while its values rest in shards
    values                     those of the last update; refused while they rest in shards
    changes in place           refused outside of `Sharded.gathered`: masters and other ranks would not get them;
                               the next call of `Sharded` detects changes through a view
    `.grad`, hooks of it       refused: it stays empty, so an optimizer or a norm would silently do nothing

While a part's forward runs, the module sees plain tensors in place of its parameters (`calls.py`).
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_iter

from megazero.base.errors import UserError
from megazero.library.tables import RowShard
from megazero.library.values import Values

_SHAPES = {"size", "numel", "nelement", "dim", "ndimension", "stride", "is_contiguous", "__len__"}
_SHAPE_PROPERTIES = {"shape", "ndim", "nbytes"}
_VALUE_PROPERTIES = {"data", "real", "imag", "T", "mT", "H", "mH"}
_FREE = {"is_floating_point", "is_complex", "element_size", "get_device", "requires_grad_", "__hash__"}
_HOOKS = {"register_hook", "register_post_accumulate_grad_hook", "retain_grad"}
_CHANGE = "call sharded.load_state_dict(state), or change values within `with sharded.gathered(...)`"


class ShardedParameter(nn.Parameter):
    """A parameter of a sharded module; `guard` makes it one.

    Attributes:
        full_name: its name in the module.
        whole: the shape of the whole parameter.
        of: the `Values` of its module.
    """

    full_name: str
    whole: tuple[int, ...]
    of: Values

    @classmethod
    def __torch_function__(
        cls,
        function: Callable[..., Any],
        types: Iterable[type],
        arguments: Sequence[Any] = (),
        named: Mapping[str, Any] | None = None,
    ) -> Any:
        """Compute an operation on parameters. Raises UserError 502: it changes one; 506: it needs values or `.grad`."""
        named, name = named or {}, function.__name__
        attribute = getattr(getattr(function, "__self__", None), "__name__", "")  # of a property
        with torch._C.DisableTorchFunctionSubclass():
            if name == "__get__" and attribute == "grad":
                return arguments[0]._own_grad()
            if name in _HOOKS:
                what = f"{arguments[0].full_name}.{name} was called, but it gets no gradient"
                raise UserError(506, what, "sharded.gradients() returns gradients; change a loss, or hook activations")
            if name in _SHAPES or (name == "__get__" and attribute in _SHAPE_PROPERTIES):
                return function(arguments[0]._shaped(), *arguments[1:], **named)
            if name in _FREE or (name in ("__get__", "__set__") and attribute not in _VALUE_PROPERTIES):
                return function(*arguments, **named)
            in_place = name.endswith("_") and (not name.endswith("__") or name in ("__set__", "__setitem__"))
            in_place = in_place or (name.startswith("__i") and name.endswith("__"))
            for changed in tree_iter((arguments[:1] or named) if in_place else named.get("out")):
                if isinstance(changed, cls) and changed.full_name not in (changed.of.lent or ()):
                    raise UserError(502, f"{changed.full_name} was changed outside of `sharded.gathered`", _CHANGE)
            for used in tree_iter((arguments, named)):
                if isinstance(used, cls):
                    used._require_values()
            if name == "__get__" and attribute == "data":
                return arguments[0].detach()  # it shares the version counter, so changes are detected
            return function(*arguments, **named)

    @property
    def _is_here(self) -> bool:
        with torch._C.DisableTorchFunctionSubclass():
            return tuple(self.shape) == self.whole

    def _shaped(self) -> Tensor:
        """Return a tensor of the whole parameter's shape: the parameter, or one without data while it is in shards."""
        return self if self._is_here else torch.empty(self.whole, dtype=self.dtype, device="meta")

    def _own_grad(self) -> Tensor:
        if self.grad is None:
            do = "sharded.gradients() returns gradients, shard(clip=...) clips them, sharded.step() updates and clears"
            raise UserError(506, f"{self.full_name}.grad was read, but it stays empty", do)
        return self.grad

    def _require_values(self) -> None:
        """Refuse a use of values that rest in shards. Raises UserError 506."""
        if not self._is_here:
            what = f"{self.full_name} was used outside of the forward of its submodule, while it is sharded"
            raise UserError(506, what, "sharded.full_state_dict() and sharded.gathered(names) have whole values")

    def _refuse_copy(self, *_: Any, **__: Any) -> NoReturn:
        """Refuse a copy of the module, which would run this module's forward. Raises UserError 506."""
        do = "sharded.save(folder) saves it; build another module and load sharded.full_state_dict() for a copy"
        raise UserError(506, f"{self.full_name}: a sharded module cannot be copied or pickled", do)

    __deepcopy__ = __reduce_ex__ = _refuse_copy

    def __repr__(self) -> str:
        if not self._is_here:
            return f"Parameter {self.full_name} of shape {self.whole}, in shards"
        with torch._C.DisableTorchFunctionSubclass():
            return super().__repr__()

    def __format__(self, spec: str) -> str:
        return super().__format__(spec) if self._is_here else repr(self)


def guard(module: nn.Module, values: Values, tables: Iterable[RowShard]) -> None:
    """Make a module and its parameters refuse operations that would bypass the shards.

    Args:
        tables: the tables whose rows are split.
    """
    for member in (member for part in values.parts for member in part.members):
        for parameter in (member.parameter, member.former):
            if parameter is not None:
                _guard(parameter, member.name, member.shape, values)
    for table in tables:
        owner = module.get_submodule(table.name.rpartition(".")[0])
        _guard(owner._parameters["weight"], table.name, table.shape, values)
    for one in module.modules():
        one._apply = _refuse_conversion  # type: ignore[method-assign]
        one.register_load_state_dict_pre_hook(_refuse_load)


def _guard(parameter: Any, name: str, whole: Sequence[int], values: Values) -> None:
    parameter.__class__ = ShardedParameter  # in place: optimizers and hooks keep the object
    parameter.full_name, parameter.whole, parameter.of = name, tuple(whole), values


def _refuse_conversion(*_: object, **__: object) -> NoReturn:
    what = "a sharded module cannot be moved or converted (`to`, `half`, `cuda`, ...)"
    raise UserError(502, what, "megazero.shard has moved it to the rank's device; convert it before or give precision=")


def _refuse_load(*_: object) -> NoReturn:
    raise UserError(502, "load_state_dict of a sharded module was called", _CHANGE)
