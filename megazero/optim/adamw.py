"""Update flat intervals with AdamW (Kingma and Ba 2015; decoupled decay: Loshchilov and Hutter 2019).

torch's fused kernel runs at the memory's bandwidth on long contiguous tensors: parameter, gradient and both moments
are read once, and the kernel divides the gradient by a scale in the same pass, so unscaling and clipping cost no pass
of their own. Our own kernel does the same for 16-bit parameters: it reads gradients in their dtype, and writes the
rounded parameters in the same pass (`kernels/csrc/cpu.cpp`; the same bits). When `skip` is 1, parameters, moments and
step count stay as they were, and the host need not know.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from megazero.comm.pool import same_place
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

    KIND = "adamw"
    STATE: tuple[str, ...] = ("exp_avg", "exp_avg_sq")

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
        self._adamw = ops.adamw_ if all(unit.resting.updated.values.dtype.itemsize == 2 for unit in units) else None
        self.state = {unit: {name: unit.resting.new_state() for name in self.STATE} for unit in units}
        self._pieces = {unit: _pieces(unit, weight_decay, bucket if self._widens(unit) else None) for unit in units}
        widened = [piece for unit in units if self._widens(unit) for piece in self._pieces[unit]]
        longest = max((piece.where.stop - piece.where.start for piece in widened), default=0)
        self._staging = units[0].resting.new_staging(longest)

    def steps(self, unit: Unit) -> list[Tensor]:
        """Return the update counts of a unit's pieces, to be set when a run resumes."""
        return [piece.step for piece in self._pieces[unit]]

    def update(self, unit: Unit, *, lr: float, scale: Tensor, skip: Tensor) -> None:
        """Update a unit's masters with gradients multiplied by `scale`, and write `unit.resting.updated`.

        Args:
            scale: 0-dim, any float dtype.
            skip: 0-dim fp32; when 1 nothing changes.
        """
        pieces, divide_by = iter(self._pieces[unit]), scale.reciprocal().to(torch.float32)
        piece = next(pieces, None)
        for where, (masters, gradients, first, second, updated) in unit.resting.update_windows(self.state[unit], skip):
            while piece is not None and piece.where.stop <= where.stop:  # no piece is cut by a window
                here = slice(piece.where.start - where.start, piece.where.stop - where.start)
                flats = (masters[here], gradients[here], first[here], second[here])
                if self._adamw is None:
                    self._update(piece, flats, lr, scale, divide_by, skip)
                else:
                    factors = (lr * piece.lr_factor, *self.betas, self.eps, piece.decay)
                    self._adamw(*flats, updated[here], piece.step, divide_by, skip, *factors)
                piece = next(pieces, None)
            if self._adamw is None and not same_place(updated, masters):
                updated.copy_(masters)
        assert piece is None or (unit.masters.is_meta and bool(skip)), "every piece is within a window"

    def _update(
        self, piece: _Piece, flats: Sequence[Tensor], lr: float, scale: Tensor, divide_by: Tensor, skip: Tensor
    ) -> None:
        """Update one piece by torch's kernel: its masters, with its gradients and moments."""
        masters, gradients, first, second = flats
        wide = masters.dtype == torch.float64
        if wide:
            # The fused kernel takes its scale in fp32 only, which would cap fp64 training at fp32 accuracy.
            # A skipped step's scale may be infinite, and padding has to stay zero.
            gradients.mul_(torch.where(skip > 0, 0.0, scale))
        elif gradients.dtype != masters.dtype:
            gradients = self._staging[: len(gradients)].copy_(gradients)
        scales = {"grad_scale": None if wide else divide_by, "found_inf": skip}
        rates = {"lr": lr * piece.lr_factor, "weight_decay": piece.decay}
        fixed = {"beta1": self.betas[0], "beta2": self.betas[1], "eps": self.eps}
        update = partial(adamw, fused=True, amsgrad=False, maximize=False, **fixed)
        update([masters], [gradients], [first], [second], [], [piece.step], **scales, **rates)

    def _widens(self, unit: Unit) -> bool:
        """Return whether gradients are copied to the masters' precision before the update."""
        return self._adamw is None and unit.gradients.reduced.dtype != unit.masters.dtype


def _pieces(unit: Unit, weight_decay: float, bucket: int | None) -> list[_Piece]:
    """Return the groups of a unit's shard, cut where windows begin, and in pieces of at most `bucket` bytes."""
    longest = unit.resting.window
    if bucket is not None:  # a power of two, as the length of a window is
        longest = min(longest, 1 << max(bucket // unit.masters.element_size(), 16).bit_length() - 1)
    pieces = []
    for group, elements in unit.layout.group_slices(unit.shard):
        assert group.optimizer == AdamW.KIND, f"unit {unit.layout.name}: a group for {group.optimizer}"
        cut = elements.start
        while cut < elements.stop:
            stop = min((cut // longest + 1) * longest, elements.stop)
            step = torch.zeros((), dtype=torch.float32, device=unit.resting.updates_on)
            pieces.append(_Piece(slice(cut, stop), weight_decay if group.decay else 0.0, group.lr_factor, step))
            cut = stop
    return pieces
