"""Compare a library's operations with their specification on the device of a run, before the run takes them.

A library can be wrong on a device that it was not tested on: a compiler, a driver or a kernel may have a fault.
The comparison calls every operation, forward and backward, in all forms and dtypes on small odd shapes (`samples`). A
result must be within the allowed error and equal in two calls, memory next to a written argument must not change, and a
NaN must arrive where the specification has one.

This takes less than a second. The verdict is kept in the cache folder, under a hash of the library, the device, its
driver and the code of the comparison.
"""

import contextlib
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

import torch
import xxhash
from torch import Tensor
from torch.utils import _pytree as pytree

from megazero.base import quantized
from megazero.base.errors import UserError
from megazero.base.files import replace_file
from megazero.base.reading import parse_json, read_file
from megazero.kernels import counter, reference, samples, schema
from megazero.kernels.build import cache_folder
from megazero.kernels.samples import FORMS, SAMPLES, Arguments, Draw, Make, Sizes, distances, results, truth

DTYPES = (torch.float32, torch.bfloat16, torch.float16)  # of all kernels but the specification, which has fp64 too
# Rows of whole packs; rows of an odd length; rows that fill the registers of a GPU's block; rows too long for them.
SIZES = (
    Sizes(3, 2, 64, 48, 72, 2, 16, 100),
    Sizes(5, 1, 33, 7, 50, 1, 6, 33_001),
    Sizes(2, 1, 4096, 4104, 4099, 1, 64, 7),
    Sizes(1, 1, 16_392, 8, 33_000, 1, 2, 1),
)
_VERDICT_BYTES = 1 << 20
_MARGIN, _MARK = 64, 77  # elements before and after a written argument, and their value
_DRIVER, _PROCESSOR = Path("/proc/driver/nvidia/version"), Path("/proc/cpuinfo")


class Fault(NamedTuple):
    """A form of an operation (`samples`) that is wrong in a dtype, such as "float32", and how."""

    form: str
    dtype: str
    error: str

    @property
    def operation(self) -> str:
        """Return the operation's name."""
        return self.form.partition(",")[0]


def faults(library: Path, device: torch.device) -> list[Fault]:
    """Return the faults of a library that is loaded, from the kept verdict if there is one.

    Raises:
        UserError: 114, an operation has made the device unusable for this process.
    """
    path = cache_folder() / f"proof-{_key(library, device)}.json"
    with contextlib.suppress(OSError, ValueError, TypeError):
        return [Fault(*each) for each in parse_json(read_file(path, _VERDICT_BYTES))]
    found = list(compare(getattr(torch.ops, schema.NAMESPACE), device))
    with contextlib.suppress(OSError):  # a cache that cannot be written: every start compares
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        replace_file(path, json.dumps(found).encode())
    return found


def compare(implementation: Any, device: torch.device) -> Iterator[Fault]:
    """Yield the faults of an implementation: an object whose attributes are the operations."""
    for form, make in (SAMPLES | FORMS).items():
        for dtype in DTYPES:
            generator = torch.Generator().manual_seed(0)  # on the CPU: equal numbers on every device
            drawing = Draw(dtype, generator, device), _WithNaN(dtype, generator, device)
            if error := _error(implementation, form.partition(",")[0], make, *drawing):
                yield Fault(form, str(dtype).removeprefix("torch."), error)


def _error(implementation: Any, name: str, make: Make, draw: Draw, with_nan: Draw) -> str:
    """Return the fault of an operation; "" if it has none."""
    margins = _Margins()
    try:
        for sizes in SIZES:
            arguments = make(draw, sizes)
            found, again = (results(implementation, name, arguments, margins.copy) for _ in range(2))
            if not all(torch.equal(*pair) for pair in zip(found, again, strict=True)):
                return "two calls give different results"
            worst = max(distances(name, _on_cpu(arguments), _on_cpu(found)))
            if not worst <= 1:
                return f"its error is {worst:.3g} times the allowed one"
        arguments = make(with_nan, SIZES[0])
        found, expected = (
            _on_cpu(results(implementation, name, arguments, margins.copy)),
            truth(name, _on_cpu(arguments)),
        )
        if name == "cross_entropy_parts_":  # one of the three numbers of a row suffices: the loss is NaN
            found, expected = (reference.cross_entropy_merge(parts[0][None]) for parts in (found, expected))
        pairs = zip(found, expected, strict=True)
        if not all(torch.equal(ours.isnan(), theirs.isnan()) for ours, theirs in pairs if ours.is_floating_point()):
            return "NaN is lost or is where it should not be"
    except torch.OutOfMemoryError:  # says nothing about the operation, and the verdict is kept
        raise
    except RuntimeError as error:
        said = (str(error).splitlines() or [""])[0][:150]
        _require_usable(draw.device, f"{name} in {draw.dtype}: {said}")
        return f"it does not run: {said}"
    return "" if margins.are_intact() else "it writes outside of its arguments"


def _require_usable(device: torch.device, what: str) -> None:
    """Raise UserError 114 if the device has failed for good: after an illegal access nothing runs on it any more."""
    try:
        torch.ones(1, device=device).sum().item()
    except RuntimeError:
        do = "set precision.kernels=reference"
        raise UserError(114, f"an operation broke the device: {what}", do, where="precision.kernels") from None


@dataclass(frozen=True)
class _WithNaN(Draw):
    """A source whose first tensor has a NaN in its first place."""

    number: Iterator[int] = field(default_factory=count)

    def __call__(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        drawn = super().__call__(*shape, dtype=dtype)
        if next(self.number) == 0:
            drawn.view(-1)[0] = torch.nan
        return drawn


class _Margins:
    """The memory around copies of tensors, which no operation may write."""

    def __init__(self) -> None:
        self._wholes: list[Tensor] = []

    def copy(self, x: Tensor) -> Tensor:
        """Return a copy of a tensor with margins around it."""
        whole = torch.full((x.numel() + 2 * _MARGIN,), _MARK, dtype=x.dtype, device=x.device)
        self._wholes.append(whole)
        return whole[_MARGIN:-_MARGIN].view(x.shape).copy_(x)

    def are_intact(self) -> bool:
        """Return whether no margin has changed."""
        ends = (part for whole in self._wholes for part in (whole[:_MARGIN], whole[-_MARGIN:]))
        return all(bool((end == _MARK).all()) for end in ends)


def _on_cpu(tensors: Arguments) -> Arguments:
    return pytree.tree_map_only(Tensor, Tensor.cpu, tensors)


def _key(library: Path, device: torch.device) -> str:
    """Return the hash that names a verdict."""
    code = [Path(str(module.__file__)).read_bytes() for module in (reference, samples, counter, quantized)]
    if device.type == "cuda":
        about = [torch.cuda.get_device_name(device), _DRIVER.read_text() if _DRIVER.exists() else ""]
    else:
        kinds = ("model name", "flags", "CPU part", "Features")
        text = _PROCESSOR.read_text() if _PROCESSOR.exists() else ""
        about = sorted({line for line in text.splitlines() if line.startswith(kinds)})
    about.append(f"{torch.__version__}, CUDA {torch.version.cuda}")
    parts = [library.read_bytes(), Path(__file__).read_bytes(), *code, "\n".join(about).encode()]
    return xxhash.xxh3_128_hexdigest(b"".join(parts))
