"""The CUDA kernels on a CPU: their launchers over emulated blocks, behind the signatures of the operations.

Every tensor is copied into memory of its own, surrounded by poison, at an offset of a few elements if one is asked for;
afterwards the poison must be whole, and what is not an output must be as it was. Outputs are poisoned before.
"""

import ctypes
import math
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megazero.kernels import build

_KERNELS = Path(build.__file__).parent / "csrc" / "cuda"
_SOURCE = Path(__file__).parent / "emulator.cpp"
_TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_MARGIN = 64  # bytes of poison on either side, a multiple of every alignment
_POISON = 0x7F  # a byte of which every float is NaN or about 3e38
_FLAGS = ["-O1", "-std=c++20", "-fPIC", "-shared", "-ffp-contract=off", "-Wall", "-Wno-unknown-pragmas"]


@cache
def library() -> ctypes.CDLL:
    """Built once for each state of the sources. Raises BuildError."""
    folders = [f"-I{_SOURCE.with_suffix('')}", f"-I{_KERNELS}"]
    headers = b"".join(path.read_bytes() for path in sorted(_KERNELS.glob("*.cuh")))
    flags = [*_FLAGS, f"-DHEADERS=0x{zlib.crc32(headers):x}"]  # so that other headers make another library
    path = build.build_library(_SOURCE, build.find_gcc, flags, folders=folders)
    loaded = ctypes.CDLL(str(path))
    loaded.last_error.restype = ctypes.c_char_p
    loaded.norm_blocks.restype = loaded.sum_lanes.restype = ctypes.c_int64
    return loaded


@dataclass(frozen=True)
class Written:
    """A tensor that a kernel may write."""

    tensor: Tensor


@dataclass(frozen=True)
class Own:
    """A tensor whose own memory a kernel gets: a view, or what a launcher uses for itself (aligned, as torch gives)."""

    tensor: Tensor


class _Guarded:
    """A contiguous tensor's copy between two margins of poison."""

    def __init__(self, tensor: Tensor, offset: int):
        self.bytes = tensor.numel() * tensor.element_size()
        self.start = _MARGIN + offset * tensor.element_size()
        self.memory = torch.full((self.start + self.bytes + 2 * _MARGIN,), _POISON, dtype=torch.uint8)
        base = -self.memory.data_ptr() % 64  # so that an offset of 0 is aligned
        self.start += base
        self.inside = self.memory[self.start : self.start + self.bytes]
        self.inside.copy_(tensor.contiguous().reshape(-1).view(torch.uint8))

    def whole(self) -> bool:
        outside = torch.cat([self.memory[: self.start], self.memory[self.start + self.bytes :]])
        return bool((outside == _POISON).all())


def poisoned(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.full(shape, math.nan, dtype=dtype)


@dataclass(frozen=True)
class Emulated:
    """The operations of `schema`, by the CUDA kernels.

    Attributes:
        offset: of every tensor's memory from an aligned address, in elements.
        multiprocessors: that the launchers see.
        descending: the order in which the threads of a block take turns.
    """

    offset: int = 0
    multiprocessors: int = 2
    descending: bool = False

    def call(self, name: str, *arguments: Tensor | Written | Own | float | None) -> None:
        """One launcher, over guarded copies; raises RuntimeError with what it complains of."""
        values, copies = [], []
        for argument in arguments:
            tensor = argument.tensor if isinstance(argument, Written) else argument
            if isinstance(tensor, Own):
                values.append(ctypes.c_void_p(tensor.tensor.data_ptr()))
            elif isinstance(tensor, Tensor):
                copies.append((argument, _Guarded(tensor, self.offset)))
                values.append(ctypes.c_void_p(copies[-1][1].inside.data_ptr()))
            elif tensor is None:
                values.append(ctypes.c_void_p(None))
            else:
                values.append(ctypes.c_double(tensor) if isinstance(tensor, float) else ctypes.c_int64(tensor))
        self.configure()
        if getattr(library(), name)(*values):
            raise RuntimeError(library().last_error().decode())
        for argument, copy in copies:
            assert copy.whole(), f"{name} wrote outside its tensors"
            if isinstance(argument, Written):
                argument.tensor.copy_(copy.inside.view(argument.tensor.dtype).view(argument.tensor.shape))
            else:
                unchanged = torch.equal(copy.inside, argument.contiguous().reshape(-1).view(torch.uint8))
                assert unchanged, f"{name} wrote to an input"

    def configure(self, first_block: int = 0, end_block: int = 2**62) -> None:
        numbers = (self.multiprocessors, int(self.descending), first_block, end_block)
        library().configure(*map(ctypes.c_int64, numbers))

    def _norm(
        self,
        rms: bool,
        x: Tensor,
        residual: Tensor | None,
        weight: Tensor,
        bias: Tensor | None,
        eps: float,
        offset: float = 0.0,
        twice: bool = True,
    ) -> tuple[Tensor, ...]:
        columns = x.shape[-1]
        total = None if residual is None else Written(poisoned(*x.shape, dtype=x.dtype))
        y = Written(poisoned(*x.shape, dtype=x.dtype))
        mean = None if rms else Written(poisoned(*x.shape[:-1], 1, dtype=torch.float32))
        rstd = Written(poisoned(*x.shape[:-1], 1, dtype=torch.float32))
        outputs = (total, y, mean, rstd)
        sizes = (x.numel() // columns, columns)
        self.call(
            "norm", _TYPES[x.dtype], int(rms), x, residual, weight, bias, *outputs, *sizes, eps, offset, int(twice)
        )
        return tuple(output.tensor for output in outputs if output)

    def _norm_backward(
        self,
        grad: Tensor,
        other: Tensor | None,
        x: Tensor,
        mean: Tensor | None,
        rstd: Tensor,
        weight: Tensor,
        offset: float = 0.0,
    ) -> tuple[Tensor, ...]:
        columns, dtype, rms = x.shape[-1], x.dtype, mean is None
        rows = x.numel() // columns
        self.configure()
        blocks = library().norm_blocks(*map(ctypes.c_int64, (_TYPES[dtype], rows, columns)))
        dx, dweight = Written(poisoned(*x.shape, dtype=dtype)), Written(poisoned(columns, dtype=torch.float32))
        dbias = None if rms else Written(poisoned(columns, dtype=torch.float32))
        partial = Own(poisoned(2 - rms, blocks, columns, dtype=torch.float32))
        inputs = (grad, other, x, mean, rstd, weight, dx)
        self.call("norm_backward", _TYPES[dtype], int(rms), *inputs, partial, dweight, dbias, rows, columns, offset)
        return tuple(output.tensor for output in (dx, dweight, dbias) if output)

    def layer_norm(self, x: Tensor, weight: Tensor, bias: Tensor, *numbers: float) -> tuple[Tensor, ...]:
        return self._norm(False, x, None, weight, bias, *numbers)

    def layer_norm_backward(self, grad: Tensor, *rest: Any) -> tuple[Tensor, ...]:
        return self._norm_backward(grad, None, *rest)

    def rms_norm(self, x: Tensor, weight: Tensor, *numbers: Any) -> tuple[Tensor, ...]:
        return self._norm(True, x, None, weight, None, *numbers)

    def rms_norm_backward(self, grad: Tensor, x: Tensor, *rest: Any) -> tuple[Tensor, ...]:
        return self._norm_backward(grad, None, x, None, *rest)

    def add_layer_norm(self, x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor, *numbers: float):
        return self._norm(False, x, residual, weight, bias, *numbers)

    def add_layer_norm_backward(self, *given: Any) -> tuple[Tensor, ...]:
        return self._norm_backward(*given)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, *numbers: Any) -> tuple[Tensor, ...]:
        return self._norm(True, x, residual, weight, None, *numbers)

    def add_rms_norm_backward(self, grad: Tensor, grad_total: Tensor, total: Tensor, *rest: Any) -> tuple[Tensor, ...]:
        return self._norm_backward(grad, grad_total, total, None, *rest)

    def bias_gelu(self, x: Tensor, bias: Tensor | None) -> Tensor:
        y = Written(poisoned(*x.shape, dtype=x.dtype))
        self.call("bias_gelu", _TYPES[x.dtype], x, bias, y, x.numel() // x.shape[-1], x.shape[-1])
        return y.tensor

    def bias_gelu_backward(self, grad: Tensor, x: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
        dx, columns = Written(poisoned(*x.shape, dtype=x.dtype)), 0 if bias is None else x.shape[-1]
        dbias, sizes = Written(poisoned(columns, dtype=torch.float32)), (x.numel() // x.shape[-1], x.shape[-1])
        self.call("bias_gelu_backward", _TYPES[x.dtype], grad, x, bias, dx, self._partial(x, columns), dbias, *sizes)
        return dx.tensor, dbias.tensor

    def sum_rows_(self, into: Tensor, x: Tensor, add: bool) -> None:
        columns = x.shape[-1]
        sizes = (x.numel() // columns, columns, int(add))
        self.call("sum_rows_", _TYPES[x.dtype], x, self._partial(x, columns), Written(into), *sizes)

    def _partial(self, x: Tensor, columns: int) -> Own:
        self.configure()
        sizes = (_TYPES[x.dtype], x.numel() // x.shape[-1], x.shape[-1])
        return Own(poisoned(library().sum_lanes(*map(ctypes.c_int64, sizes)), columns, dtype=torch.float32))

    def swiglu(self, gate: Tensor, up: Tensor) -> Tensor:
        y = Written(poisoned(*gate.shape, dtype=gate.dtype))
        self.call("swiglu", _TYPES[gate.dtype], gate, up, y, gate.numel())
        return y.tensor

    def swiglu_backward(self, grad: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
        dgate, dup = (Written(poisoned(*gate.shape, dtype=gate.dtype)) for _ in range(2))
        self.call("swiglu_backward", _TYPES[gate.dtype], grad, gate, up, dgate, dup, gate.numel())
        return dgate.tensor, dup.tensor

    def dropout_add(self, x: Tensor, residual: Tensor, ids: Tensor, positions: Tensor, key: int, drop: float) -> Tensor:
        y = Written(poisoned(*x.shape, dtype=x.dtype))
        sizes = (x.shape[0] * x.shape[1], x.shape[1], x.shape[2])
        inputs = (x, residual, y, ids, positions)
        self.call("dropout_add", _TYPES[x.dtype], *inputs, key, float(drop), *sizes)
        return y.tensor

    def dropout_backward(self, grad: Tensor, ids: Tensor, positions: Tensor, key: int, drop: float) -> Tensor:
        dx = Written(poisoned(*grad.shape, dtype=grad.dtype))
        sizes = (grad.shape[0] * grad.shape[1], grad.shape[1], grad.shape[2])
        self.call("dropout_backward", _TYPES[grad.dtype], grad, dx, ids, positions, key, float(drop), *sizes)
        return dx.tensor

    def rotary(self, x: Tensor, cos: Tensor, sin: Tensor, inverse: bool) -> Tensor:
        y = Written(poisoned(*x.shape, dtype=x.dtype))
        sizes = (*x.shape[:3], x.shape[3] // 2)
        angles = (cos.shape[1] * x.shape[3], 0 if cos.shape[1] == 1 else x.shape[3])
        self.call("rotary", _TYPES[x.dtype], Own(x), cos, sin, y, *sizes, *x.stride()[:3], *angles, int(inverse))
        return y.tensor

    def cross_entropy_parts_(self, logits: Tensor, targets: Tensor) -> Tensor:
        parts = Written(poisoned(3, len(logits), dtype=torch.float32))
        self.call("cross_entropy_parts", _TYPES[logits.dtype], logits, targets, parts, *logits.shape)
        return parts.tensor

    def cross_entropy_backward_(
        self, logits: Tensor, maxima: Tensor, log_sums: Tensor, targets: Tensor, grad: Tensor
    ) -> None:
        inputs = (Written(logits), log_sums, targets, grad)
        self.call("cross_entropy_backward", _TYPES[logits.dtype], *inputs, *logits.shape)

    def adamw_(self, master: Tensor, grad: Tensor, first: Tensor, second: Tensor, published: Tensor, *rest) -> None:
        step, divide_by, skip, *settings = rest
        types = (_TYPES[grad.dtype], _TYPES[published.dtype])
        memory = (Written(master), grad, Written(first), Written(second), Written(published), Written(step))
        common = Own(poisoned(16, dtype=torch.float32))
        self.call("adamw", *types, *memory, divide_by, skip, common, *map(float, settings), master.numel())

    def sums_of_squares(self, flats: Sequence[Tensor]) -> Tensor:
        copies = [_Guarded(flat, self.offset) for flat in flats]
        at = Own(torch.tensor([copy.inside.data_ptr() for copy in copies]))
        numel = Own(torch.tensor([len(flat) for flat in flats]))
        partial = Own(poisoned(sum(-(-len(flat) // (1 << 15)) for flat in flats), dtype=torch.float64))
        totals = Written(poisoned(len(flats), dtype=torch.float64))
        self.call("sums_of_squares", _TYPES[flats[0].dtype], at, numel, len(flats), partial, totals)
        for flat, copy in zip(flats, copies, strict=True):
            assert copy.whole() and torch.equal(copy.inside, flat.view(torch.uint8)), "written beside or to an input"
        return totals.tensor

    def accumulate_(self, into: Tensor, x: Tensor) -> None:
        self.call("accumulate_flat", _TYPES[x.dtype], Written(into), x, x.numel())

    def cast_(self, into: Tensor, x: Tensor) -> None:
        self.call("cast_flat", _TYPES[into.dtype], _TYPES[x.dtype], Written(into), x, x.numel())

    def quantize_(self, codes: Tensor, x: Tensor, bits: int) -> None:
        self.call("quantize_flat", _TYPES[x.dtype], Written(codes), x, x.numel(), bits)

    def dequantize_(self, into: Tensor, codes: Tensor, bits: int, add: bool) -> None:
        self.call("dequantize_flat", _TYPES[into.dtype], Written(into), codes, into.numel(), bits, int(add))
