"""AdamW on flat intervals (Kingma and Ba 2015; decoupled decay: Loshchilov and Hutter 2019).

torch's fused kernel runs at the memory's bandwidth on long contiguous tensors: parameter, gradient and both moments
are read once, and the kernel divides the gradient by a scale on the way, so unscaling and clipping cost no pass of
their own. A raised `skip` flag leaves parameters, moments and step count as they were, without the host knowing.
"""

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from megazero.zero.unit import Unit


class AdamW:
    """The optimizer state of all units of a rank.

    Args:
        units: their flat parameters are updated in place.
        betas, eps: of Adam.
        weight_decay: applied to the decayed part of each unit.
    """

    def __init__(self, units: list[Unit], *, betas: tuple[float, float], eps: float, weight_decay: float):
        self.betas, self.eps = betas, eps
        self.moments = [(torch.zeros_like(unit.parameters), torch.zeros_like(unit.parameters)) for unit in units]
        device = units[0].parameters.device
        self.groups: list[tuple[float, list[list[Tensor]]]] = []
        for decay, part in ((weight_decay, _decayed), (0.0, _not_decayed)):
            flats: list[list[Tensor]] = [[], [], [], [], []]
            for unit, (first, second) in zip(units, self.moments, strict=True):
                where = part(unit)
                if where.start < where.stop:
                    for flat, whole in zip(flats, (unit.parameters, unit.gradients, first, second), strict=False):
                        flat.append(whole[where])
                    flats[4].append(torch.zeros((), dtype=torch.float32, device=device))
            if flats[0]:
                self.groups.append((decay, flats))

    def update(self, *, lr: float, scale: Tensor, skip: Tensor) -> None:
        """One update with gradients multiplied by `scale`.

        Args:
            scale: 0-dim, any float dtype.
            skip: 0-dim bool; when True nothing changes.
        """
        for decay, (parameters, gradients, firsts, seconds, steps) in self.groups:
            divide_by = None
            if parameters[0].dtype == torch.float64:
                # The fused kernel takes its scale in fp32 only, which would cap fp64 training at fp32 accuracy.
                for gradient in gradients:
                    gradient *= scale
            else:
                divide_by = scale.reciprocal().to(torch.float32)
            adamw(
                parameters,
                gradients,
                firsts,
                seconds,
                [],
                steps,
                fused=True,
                grad_scale=divide_by,
                found_inf=skip.to(torch.float32),
                amsgrad=False,
                beta1=self.betas[0],
                beta2=self.betas[1],
                lr=lr,
                weight_decay=decay,
                eps=self.eps,
                maximize=False,
            )


def _decayed(unit: Unit) -> slice:
    return slice(0, unit.layout.decayed)


def _not_decayed(unit: Unit) -> slice:
    return slice(unit.layout.decayed, unit.layout.numel)
