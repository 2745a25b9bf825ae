"""Update flat intervals with AdamW (Kingma and Ba 2015; decoupled decay: Loshchilov and Hutter 2019).

torch's fused kernel runs at memory bandwidth on long contiguous tensors: it reads parameter, gradient and both moments
once, and divides the gradient by a scale in the same pass, so unscaling and clipping need no extra pass. For 16-bit
parameters megazero's own kernel also reads gradients in their dtype and writes the rounded parameters in the same pass,
with bit-identical results (`kernels/csrc/cpu.cpp`). If `skip` is 1, parameters, moments and step count do not change,
and the host need not know.
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
    """Consecutive elements of a unit's shard, all of one group, that one kernel call updates.

    Attributes:
        where: their slice of the shard.
        decay: the weight decay.
        lr_factor: multiplies the learning rate.
        step: the number of updates, fp32, 0-dim.
    """

    where: slice
    decay: float
    lr_factor: float
    step: Tensor


class AdamW:
    """AdamW, with the state of the elements that this rank updates.

    Args:
        units: the units whose masters are updated, in place.
        betas, eps: Adam's decay rates of the moments, and the constant added to its denominator.
        weight_decay: applied to the groups with `decay`.
        bucket: bytes; gradients are copied to the masters' dtype in pieces of this size if the kernel cannot read them.
        ops: the kernels for the device of the masters.

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
        """Return the update counts of a unit's pieces, for a resumed run to set."""
        return [piece.step for piece in self._pieces[unit]]

    def update(self, unit: Unit, *, lr: float, scale: Tensor, skip: Tensor) -> None:
        """Update a unit's masters with gradients times `scale`; write them, in forward's dtype, to `resting.updated`.

        Args:
            scale: 0-dim, any float dtype.
            skip: 0-dim fp32; when 1 nothing changes.
        """
        pieces, divide_by = iter(self._pieces[unit]), scale.reciprocal().to(torch.float32)
        piece = next(pieces, None)
        for where, (masters, gradients, first, second, updated) in unit.resting.update_windows(self.state[unit], skip):
            while piece is not None and piece.where.stop <= where.stop:  # a piece never crosses a window's end
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
        """Update one piece with torch's kernel; `flats` are its masters, gradients and two moments."""
        masters, gradients, first, second = flats
        wide = masters.dtype == torch.float64
        if wide:
            # The fused kernel accepts only an fp32 scale, which would limit fp64 training to fp32 accuracy.
            # The scale of a skipped step may be infinite, and padding must stay zero.
            gradients.mul_(torch.where(skip > 0, 0.0, scale))
        elif gradients.dtype != masters.dtype:
            gradients = self._staging[: len(gradients)].copy_(gradients)
        scales = {"grad_scale": None if wide else divide_by, "found_inf": skip}
        rates = {"lr": lr * piece.lr_factor, "weight_decay": piece.decay}
        fixed = {"beta1": self.betas[0], "beta2": self.betas[1], "eps": self.eps}
        update = partial(adamw, fused=True, amsgrad=False, maximize=False, **fixed)
        update([masters], [gradients], [first], [second], [], [piece.step], **scales, **rates)

    def _widens(self, unit: Unit) -> bool:
        """Return True if gradients must be copied to the masters' dtype before the update."""
        return self._adamw is None and unit.gradients.reduced.dtype != unit.masters.dtype


def _pieces(unit: Unit, weight_decay: float, bucket: int | None) -> list[_Piece]:
    """Return the pieces of a unit's shard: its groups, split to at most `bucket` bytes and one window.

    A window (`RestingState.update_windows`) is the part of a shard on disks that is in memory at once, else the shard.
    """
    longest = unit.resting.window
    if bucket is not None:  # round to a power of two, like the window length
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
