"""Update flat intervals with AdamW (Kingma and Ba 2015; decoupled decay: Loshchilov and Hutter 2019).

torch's fused kernel runs at the memory's bandwidth on long contiguous tensors: parameter, gradient and both moments
are read once, and the kernel divides the gradient by a scale in the same pass, so unscaling and clipping cost no pass
of their own. Our own kernel does the same for 16-bit parameters: it reads gradients in their dtype, and writes the
rounded parameters in the same pass (`kernels/csrc/cpu.cpp`; the same bits). When `skip` is 1, parameters, moments and
step count stay as they were, and the host need not know.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from megazero.kernels.operations import Operations
from megazero.zero.unit import Unit


@dataclass(frozen=True, eq=False)
class _Piece:
    """The elements of a unit's shard, all of one group, that one call of the kernel updates.

    Attributes:
        where: their place in the shard.
        decay: the weight decay.
        lr_factor: multiplies the learning rate.
        step: counts the updates, fp32, 0-dim.
    """

    where: slice
    decay: float
    lr_factor: float
    step: Tensor


class AdamW:
    """AdamW, with the state of the elements that this rank updates.

    Args:
        units: the units whose masters are updated, in place.
        betas, eps: Adam's decay rates of the moments, and its small divisor.
        weight_decay: applied to the groups that decay.
        bucket: bytes; 16-bit gradients are widened in pieces of this size, where the kernel does not do it.
        ops: the kernels to use, where the masters are.

    Attributes:
        state: for each unit, the two moments of its shard.
    """

    KIND: ClassVar[str] = "adamw"
    STATE: ClassVar[tuple[str, ...]] = ("exp_avg", "exp_avg_sq")

    def __init__(
        self,
        units: list[Unit],
        *,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float,
        bucket: int,
        ops: Operations,
    ):
        self.betas, self.eps = betas, eps
        self._adamw = ops.adamw_ if all(unit.updated.values.dtype.itemsize == 2 for unit in units) else None
        self.state = {unit: {name: torch.zeros_like(unit.masters) for name in self.STATE} for unit in units}
        self._pieces = {unit: _pieces(unit, weight_decay, bucket if self._widens(unit) else None) for unit in units}
        widened = [
            piece.where.stop - piece.where.start
            for unit, pieces in self._pieces.items()
            for piece in pieces
            if self._widens(unit)
        ]
        some = units[0].masters
        self._staging = torch.empty(max(widened, default=0), dtype=some.dtype, device=some.device)

    @property
    def staging_bytes(self) -> int:
        """Return the bytes of the buffer in which 16-bit gradients are widened."""
        return self._staging.nbytes

    def steps(self, unit: Unit) -> list[Tensor]:
        """Return the update counts of a unit's pieces, to be set when a run resumes."""
        return [piece.step for piece in self._pieces[unit]]

    def update(self, unit: Unit, *, lr: float, scale: Tensor, skip: Tensor) -> None:
        """Update a unit's masters with gradients multiplied by `scale`, and write `unit.updated`.

        Args:
            scale: 0-dim, any float dtype.
            skip: 0-dim fp32; when 1 nothing changes.
        """
        first, second = self.state[unit].values()
        divide_by: Tensor | None = None
        if unit.masters.dtype == torch.float64:
            # The fused kernel takes its scale in fp32 only, which would cap fp64 training at fp32 accuracy.
            # A skipped step's scale may be infinite, and padding has to stay zero.
            unit.reduced_gradients.mul_(torch.where(skip > 0, 0.0, scale))
        else:
            divide_by = scale.reciprocal().to(torch.float32)
        if self._adamw is not None and divide_by is not None:
            self._update_in_one_pass(self._adamw, unit, lr=lr, divide_by=divide_by, skip=skip)
            return
        for piece in self._pieces[unit]:
            adamw(
                [unit.masters[piece.where]],
                [self._gradients(unit, piece.where)],
                [first[piece.where]],
                [second[piece.where]],
                [],
                [piece.step],
                fused=True,
                grad_scale=divide_by,
                found_inf=skip,
                amsgrad=False,
                beta1=self.betas[0],
                beta2=self.betas[1],
                lr=lr * piece.lr_factor,
                weight_decay=piece.decay,
                eps=self.eps,
                maximize=False,
            )
        unit.round_masters()

    def _update_in_one_pass(
        self, kernel: Callable[..., None], unit: Unit, *, lr: float, divide_by: Tensor, skip: Tensor
    ) -> None:
        flats = (unit.masters, unit.reduced_gradients, *self.state[unit].values(), unit.updated.values)
        for piece in self._pieces[unit]:
            kernel(
                *(flat[piece.where] for flat in flats),
                *(piece.step, divide_by, skip),
                *(lr * piece.lr_factor, *self.betas, self.eps, piece.decay),
            )

    def _widens(self, unit: Unit) -> bool:
        """Return whether gradients are copied to the masters' precision before the update."""
        return self._adamw is None and unit.reduced_gradients.dtype != unit.masters.dtype

    def _gradients(self, unit: Unit, where: slice) -> Tensor:
        """Return some gradients in the masters' precision."""
        gradients = unit.reduced_gradients[where]
        if gradients.dtype == unit.masters.dtype:
            return gradients
        return self._staging[: len(gradients)].copy_(gradients)


def _pieces(unit: Unit, weight_decay: float, bucket: int | None) -> list[_Piece]:
    """Return the groups of a unit's shard, in pieces of `bucket` bytes."""
    longest = unit.numel if bucket is None else max(bucket // unit.masters.element_size() // 16 * 16, 16)
    pieces = []
    for group, elements in unit.layout.group_slices(unit.shard):
        assert group.optimizer == AdamW.KIND, f"unit {unit.layout.name}: a group for {group.optimizer}"
        for cut in range(elements.start, elements.stop, longest):
            where = slice(cut, min(cut + longest, elements.stop))
            step = torch.zeros((), dtype=torch.float32, device=unit.masters.device)
            pieces.append(_Piece(where, weight_decay if group.decay else 0.0, group.lr_factor, step))
    return pieces
