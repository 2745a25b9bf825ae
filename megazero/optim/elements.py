"""Update pieces of flat intervals element by element: AdamW, Lion, SGD.

    adamw   m <- b1 m + (1 - b1) g,  v <- b2 v + (1 - b2) g^2,  u = m / (1 - b1^n) / (sqrt(v / (1 - b2^n)) + eps)
            Kingma and Ba 2015, algorithm 1
    lion    u = sign(b1 m + (1 - b1) g),  m <- b2 m + (1 - b2) g
            Chen et al. 2023, arXiv 2302.06675, algorithm 2
    sgd     m <- b1 m + g,  u = m

and then w <- (1 - lr decay) w - lr u: weight decay is decoupled (Loshchilov and Hutter 2019).

AdamW takes torch's fused kernel, which reads parameter, gradient and both moments once at memory bandwidth, and divides
the gradient by a scale in the same pass, so unscaling and clipping need no extra pass. For 16-bit parameters megazero's
own kernel also reads gradients in their dtype and writes the rounded parameters in the same pass, with bit-identical
results (`kernels/csrc/cpu.cpp`). If `skip` is 1, parameters, moments and step count do not change, and the host need
not know.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from megazero.comm.pool import same_place
from megazero.zero.layout import Group


@dataclass(frozen=True)
class Settings:
    """The options of the optimizers.

    Attributes:
        betas: decay rates of AdamW's and Lion's moments; SGD's momentum is the first.
        eps: added to AdamW's denominator.
        momentum, nesterov, iterations, scale: of Muon (`muon.py`).
        clip_value: the largest magnitude of each gradient; None: any.
        average: decay rate of the averages of parameters, if they are kept.
    """

    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    momentum: float = 0.95
    nesterov: bool = True
    iterations: int = 5
    scale: Literal["rms", "spectral"] = "rms"
    clip_value: float | None = None
    average: float = 0.0


@dataclass(frozen=True, eq=False)
class Piece:
    """Consecutive elements of a unit's shard, all of one group, that are updated at once.

    Attributes:
        where: their slice of the shard.
        group: their update rule.
        state: their state in memory; None: `update_windows` yields it with the masters.
        step: the number of updates, fp32, 0-dim.
    """

    where: slice
    group: Group
    state: Sequence[Tensor] | None
    step: Tensor


class Flats(NamedTuple):
    """The values of a piece: masters, reduced gradients, the state, and the memory for rounded masters."""

    masters: Tensor
    gradients: Tensor
    state: Sequence[Tensor]
    updated: Tensor


class Now(NamedTuple):
    """The numbers of an update.

    Attributes:
        lr: the learning rate.
        scale: the factor of gradients, or one for each norm by which groups are clipped.
        divide_by: 1 / scale, in fp32.
        skip: 1 if nothing changes, else 0; in fp32.
        keep: 1 - skip.
        clip_value: the largest magnitude of each scaled gradient; None: any.
    """

    lr: float
    scale: Tensor
    divide_by: Tensor
    skip: Tensor
    keep: Tensor
    clip_value: float | None = None

    def of(self, group: Group, values: Tensor) -> Tensor:
        """Return the number of a group in `scale` or `divide_by`."""
        return values[group.clip] if values.dim() else values

    def limit_(self, gradients: Tensor, group: Group) -> None:
        """Limit the magnitude of gradients that are not scaled yet."""
        if self.clip_value is not None:
            most = torch.where(self.skip > 0, torch.inf, self.clip_value / self.of(group, self.scale))
            gradients.clamp_(-most.to(gradients.dtype), most.to(gradients.dtype))

    def scaled(self, gradients: Tensor, group: Group, into: Tensor) -> Tensor:
        """Return gradients times their factor, in the dtype of `into` and in its memory; zeros if nothing changes."""
        found = into[: len(gradients)].copy_(gradients)
        return found.mul_(self.of(group, self.scale).to(found.dtype)).masked_fill_(self.skip > 0, 0.0)

    def rate(self, group: Group, like: Tensor) -> Tensor:
        """Return a group's learning rate, 0 if nothing changes; 0-dim, in the dtype of `like`."""
        return self.keep.to(like.dtype) * (self.lr * group.lr_factor)


def decay_(masters: Tensor, rate: Tensor, group: Group) -> None:
    """Shrink masters by the weight decay of their group."""
    if group.decay:
        masters.mul_(1.0 - rate * group.decay)


def fused_adamw(piece: Piece, flats: Flats, now: Now, settings: Settings, staging: Tensor) -> None:
    """Update a piece with torch's kernel.

    Args:
        staging: memory for gradients of another dtype than the masters'.
    """
    masters, gradients, (first, second), _ = flats
    wide = masters.dtype == torch.float64
    if wide:
        # The fused kernel accepts only an fp32 scale, which would limit fp64 training to fp32 accuracy.
        # The scale of a skipped step may be infinite, and padding must stay zero.
        gradients.mul_(torch.where(now.skip > 0, 0.0, now.of(piece.group, now.scale)))
    elif gradients.dtype != masters.dtype:
        gradients = staging[: len(gradients)].copy_(gradients)
    scales = {"grad_scale": None if wide else now.of(piece.group, now.divide_by), "found_inf": now.skip}
    rates = {"lr": now.lr * piece.group.lr_factor, "weight_decay": piece.group.decay}
    fixed = {"beta1": settings.betas[0], "beta2": settings.betas[1], "eps": settings.eps}
    how = {**scales, **rates, **fixed, "fused": True, "amsgrad": False, "maximize": False}
    adamw([masters], [gradients], [first], [second], [], [piece.step], **how)


def lion(piece: Piece, flats: Flats, now: Now, settings: Settings, staging: Tensor) -> None:
    """Update a piece with Lion. For `staging` see `fused_adamw`."""
    masters, gradients, (average,), _ = flats
    gradients, rate = now.scaled(gradients, piece.group, staging), now.rate(piece.group, masters)
    direction = torch.lerp(average, gradients, 1.0 - settings.betas[0]).sign_()
    average.lerp_(gradients, now.keep.to(masters.dtype) * (1.0 - settings.betas[1]))
    decay_(masters, rate, piece.group)
    masters.sub_(direction.mul_(rate))


def sgd(piece: Piece, flats: Flats, now: Now, settings: Settings, staging: Tensor) -> None:
    """Update a piece with SGD. For `staging` see `fused_adamw`."""
    masters, gradients, (momentum,), _ = flats
    gradients, rate = now.scaled(gradients, piece.group, staging), now.rate(piece.group, masters)
    keep = now.keep.to(masters.dtype)
    momentum.mul_(1.0 - keep + keep * settings.betas[0]).add_(gradients)
    decay_(masters, rate, piece.group)
    masters.sub_(gradients.copy_(momentum).mul_(rate))


def round_(flats: Flats) -> None:
    """Write masters, rounded, to the memory for them."""
    if not same_place(flats.updated, flats.masters):
        flats.updated.copy_(flats.masters)


def average_(average: Tensor, piece: Piece, masters: Tensor, now: Now, decay: float) -> None:
    """Update the averages of a piece after update n: a <- d a + (1 - d) w, with d at most 1 - 1/n.

    So the first 1 / (1 - d) updates count equally, and the initial weights do not count.
    """
    new = piece.step.to(masters.dtype).clamp(min=1.0).reciprocal().clamp(min=1.0 - decay)
    average.lerp_(masters, now.keep.to(masters.dtype) * new)


Update = Callable[[Piece, Flats, Now, Settings, Tensor], None]
UPDATES: dict[str, Update] = {"adamw": fused_adamw, "lion": lion, "sgd": sgd}
