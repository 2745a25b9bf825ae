"""Find where the host would wait for a GPU in a training step, on a CPU: by the operations that are called.

    with SyncDetector() as detector:
        trainer.train_step(0)
    assert detector.found == []

On a CPU nothing waits, and a copy to the same device is not even made, so calls are watched twice: as Python makes
them (`.to(device)`, `.item()`, `.cpu()`), and as torch dispatches them (a boolean index, a tensor made of Python's
numbers). What a host that is declared apart allocates counts as its memory: a copy between it and the rest must not
block. Threads beside the step are not watched: they may wait.
"""

import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple, Self
from unittest.mock import patch

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from megazero.comm.host import Host

ROOT = Path(__file__).parents[2]
aten = torch.ops.aten

# Where the host may wait, or reads its own memory: file, function, reason.
ALLOWED = {
    ("megazero/comm/readback.py", "numbers"): "memory of the host, to which they have come",
    ("megazero/train/trainer.py", "_validate"): "a validation is no part of a step",
    ("megazero/train/trainer.py", "_save"): "a save is no part of a step",
    ("megazero/model/documents.py", "_there"): "numbers of the host; a GPU fetches them from pinned memory by itself",
}
ALLOWED_FOLDERS = ("megazero/comm/transport/",)  # gloo's messages; NCCL has none

READS = {"item", "tolist", "cpu", "numpy", "__bool__", "__int__", "__float__", "__index__", "__array__", "__contains__"}
READS |= {"cuda", "pin_memory"}
MAKES = {torch.tensor, torch.as_tensor, torch.from_numpy}
WAITS = {"aten::_local_scalar_dense", "aten::item", "aten::nonzero", "aten::masked_select", "aten::equal"}
WAITS |= {"aten::_unique2", "aten::unique_dim", "aten::unique_consecutive", "aten::is_nonzero"}


class Wait(NamedTuple):
    """A place where the host would wait: the operation, and the function of ours that called it."""

    operation: str
    place: str


class SyncDetector:
    """The waits of all that is called inside the context, in this thread.

    Attributes:
        found: in order, each place once.
    """

    def __init__(self) -> None:
        self.found: list[Wait] = []
        self._host: dict[int, Tensor] = {}  # by storage; kept, so that no other tensor's takes its place
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        self._stack.enter_context(_Calls(self))
        self._stack.enter_context(_Operations(self))
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def watch_hosts(self) -> ExitStack:
        """Return a context in which the memory of hosts that are apart becomes known."""
        honest = Host.empty

        def empty(host: Host, *arguments: Any) -> Tensor:
            x = honest(host, *arguments)
            if host.apart:
                self.is_of_host(x)
            return x

        stack = ExitStack()
        stack.enter_context(patch.object(Host, "empty", empty))
        return stack

    def add(self, operation: str) -> None:
        frames = list(_our_frames())
        if any(frame in ALLOWED or frame[0].startswith(ALLOWED_FOLDERS) for frame in frames):
            return
        self.report(Wait(operation, ":".join(frames[0]) if frames else "?"))

    def report(self, wait: Wait) -> None:
        """Note a wait that is in no named place."""
        if wait not in self.found:
            self.found.append(wait)

    def is_of_host(self, x: Tensor) -> None:
        """Count a tensor's memory as the host's."""
        self._host[x.untyped_storage()._cdata] = x

    def crosses(self, a: Tensor, b: Tensor) -> bool:
        """Return whether one of two tensors is in the host's memory and the other is not."""
        return self.on_host(a) != self.on_host(b)

    def on_host(self, x: Tensor) -> bool:
        return x.untyped_storage()._cdata in self._host


class _Calls(TorchFunctionMode):
    """Calls of torch's functions as Python makes them."""

    def __init__(self, detector: SyncDetector):
        super().__init__()
        self._detector = detector

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name in READS or (func in MAKES if callable(func) else False):
            self._detector.add(f".{name}()" if name in READS else f"torch.{name}()")
        elif name == "to" and _names_a_device(args[1:], kwargs) and not kwargs.get("non_blocking"):
            self._detector.add(".to(device)")
        return func(*args, **kwargs)


class _Operations(TorchDispatchMode):
    """Operations as torch dispatches them."""

    def __init__(self, detector: SyncDetector):
        super().__init__()
        self._detector = detector

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, detector, name = kwargs or {}, self._detector, func._schema.name
        if name in WAITS:
            detector.add(name)
        elif name == "aten::copy_" and detector.crosses(args[0], args[1]):
            if not (kwargs.get("non_blocking") or (len(args) > 2 and args[2])):
                detector.add("aten::copy_ that blocks")
        elif name in ("aten::index", "aten::index_put_", "aten::_index_put_impl_"):
            indices = [index for index in args[1] if index is not None]
            # One number where a mask says so is filled in without counting.
            if (name == "aten::index" or args[2].numel() != 1) and any(index.dtype == torch.bool for index in indices):
                detector.add(f"{name} by a mask")
            if any(detector.on_host(index) for index in indices):
                detector.add(f"{name} by a list")
        elif name == "aten::repeat_interleave" and kwargs.get("output_size") is None:
            detector.add(name)
        found = func(*args, **kwargs)
        if name == "aten::lift_fresh":  # a tensor of Python's numbers, which is made on the host
            detector.is_of_host(found)
        return found


def _names_a_device(args: tuple, kwargs: dict[str, Any]) -> bool:
    return "device" in kwargs or any(isinstance(value, torch.device | str) for value in args[:1])


def _our_frames() -> Iterator[tuple[str, str]]:
    """Yield (file, function) of the project's frames, the innermost first; not those of this file."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        path = frame.f_code.co_filename.removeprefix(f"{ROOT}/")
        if path.startswith(("megazero/", "tests/")) and path != "tests/checkers/sync.py":
            yield path, frame.f_code.co_name
        frame = frame.f_back
