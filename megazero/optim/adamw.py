"""AdamW on flat intervals (Kingma and Ba 2015; decoupled decay: Loshchilov and Hutter 2019).

torch's fused kernel runs at the memory's bandwidth on long contiguous tensors: parameter, gradient and both moments
are read once, and the kernel divides the gradient by a scale on the way, so unscaling and clipping cost no pass of
their own. Our own kernel does the same with 16-bit parameters: it takes gradients as they are, and writes the rounded
parameters on the way (`kernels/csrc/cpu.cpp`; the same bits). A raised `skip` flag leaves parameters, moments and step
count as they were, without the host knowing.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from megazero.kernels.operations import Operations
from megazero.zero.unit import Unit


@dataclass(frozen=True, eq=False)
class _Piece:
    """What one call of the kernel updates: elements of a unit's shard with one decay; `step` counts its updates."""

    where: slice
    decay: float
    step: Tensor


class AdamW:
    """The optimizer state of what this rank updates.

    Args:
        units: their masters are updated in place.
        betas, eps: of Adam.
        weight_decay: applied to the decayed part of each unit.
        bucket: bytes; 16-bit gradients are widened in pieces of this size, where the kernel does not do it.
        ops: the kernels to use, where the masters are.

    Attributes:
        moments: of each unit the two moments of its shard.
    """

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
        self._adamw = ops.adamw_ if all(unit.updated.dtype.itemsize == 2 for unit in units) else None
        self.moments = {unit: (torch.zeros_like(unit.masters), torch.zeros_like(unit.masters)) for unit in units}
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
        return self._staging.nbytes

    def steps(self, unit: Unit) -> list[Tensor]:
        """Updates done, for each piece of the unit."""
        return [piece.step for piece in self._pieces[unit]]

    def update(self, unit: Unit, *, lr: float, scale: Tensor, skip: Tensor) -> None:
        """One update of a unit's masters, with gradients multiplied by `scale`; `unit.updated` has them too then.

        Args:
            scale: 0-dim, any float dtype.
            skip: 0-dim fp32; when 1 nothing changes.
        """
        first, second = self.moments[unit]
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
                lr=lr,
                weight_decay=piece.decay,
                eps=self.eps,
                maximize=False,
            )
        unit.round_masters()

    def _update_in_one_pass(
        self, kernel: Callable[..., None], unit: Unit, *, lr: float, divide_by: Tensor, skip: Tensor
    ) -> None:
        first, second = self.moments[unit]
        for piece in self._pieces[unit]:
            kernel(
                *(flat[piece.where] for flat in (unit.masters, unit.reduced_gradients, first, second, unit.updated)),
                *(piece.step, divide_by, skip),
                *(lr, *self.betas, self.eps, piece.decay),
            )

    def _widens(self, unit: Unit) -> bool:
        """Gradients are put into the masters' precision before the update."""
        return self._adamw is None and unit.reduced_gradients.dtype != unit.masters.dtype

    def _gradients(self, unit: Unit, where: slice) -> Tensor:
        """In the masters' precision."""
        gradients = unit.reduced_gradients[where]
        if gradients.dtype == unit.masters.dtype:
            return gradients
        return self._staging[: len(gradients)].copy_(gradients)


def _pieces(unit: Unit, weight_decay: float, bucket: int | None) -> list[_Piece]:
    """The decayed part of a unit's shard, then the rest; in pieces of `bucket` bytes."""
    start, stop = unit.shard.start, unit.shard.stop
    border = min(max(unit.layout.decayed, start), stop)
    longest = unit.numel if bucket is None else max(bucket // unit.masters.element_size() // 16 * 16, 16)
    pieces = []
    for first, last, decay in ((start, border, weight_decay), (border, stop, 0.0)):
        for cut in range(first, last, longest):
            where = slice(cut - start, min(cut + longest, last) - start)
            pieces.append(_Piece(where, decay, torch.zeros((), dtype=torch.float32, device=unit.masters.device)))
    return pieces
