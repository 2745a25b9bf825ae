"""Measure the peak memory of a step in addition to long-lived memory: activations and their gradients.

Every tensor operation passes through a dispatch mode. Memory that an operation returns and that no earlier operation
has seen is new; it is counted until no reference to it is left. Memory that an operation allocates and frees internally
is not counted. This works on any device and costs some microseconds per operation: use it for one step, not for all.
"""

import weakref
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter


class Allocations(TorchDispatchMode):
    """A counter that is active as a context: `with Allocations() as counted: ...; counted.peak`."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False: nothing is compiled here. With torch's True each rank would import the compiler: one second."""
        return False

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._known: dict[int, weakref.ref] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        for tensor in tree_iter((args, kwargs)):
            self._note(tensor, new=False)
        result = func(*args, **kwargs)
        for tensor in tree_iter(result):
            self._note(tensor, new=True)
        return result

    def _note(self, tensor: Any, *, new: bool) -> None:
        if not isinstance(tensor, torch.Tensor) or tensor.is_meta:  # its storage has a size, but no memory
            return
        if tensor.layout == torch.sparse_coo:  # sparse gradients of a table
            for part in (tensor._indices(), tensor._values()):
                self._note(part, new=new)
            return
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._known:
            return
        size = storage.nbytes() if new else 0
        number = self.came(size)

        def gone(_: object) -> None:
            self.went(size, number)
            self._known.pop(key, None)

        self._known[key] = weakref.ref(storage, gone)

    def came(self, size: int) -> int:
        """Count `size` newly allocated bytes; return the allocation's number for `went`, always 0 here."""
        self.now += size
        self.peak = max(self.peak, self.now)
        return 0

    def went(self, size: int, number: int) -> None:
        """Count `size` freed bytes of the allocation for which `came` returned `number`."""
        self.now -= size
