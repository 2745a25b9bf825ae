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
    """The optimizer state of all units of a rank, or of its shards of them.

    Args:
        units: their flat parameters are updated in place.
        shards: of each unit the elements that this rank updates; None for all.
        betas, eps: of Adam.
        weight_decay: applied to the decayed part of each unit.
    """

    def __init__(
        self,
        units: list[Unit],
        *,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float,
        shards: list[slice] | None = None,
    ):
        self.betas, self.eps = betas, eps
        shards = shards or [slice(0, len(unit.parameters)) for unit in units]
        ours = [unit.parameters[shard] for unit, shard in zip(units, shards, strict=True)]
        self.moments = [(torch.zeros_like(flat), torch.zeros_like(flat)) for flat in ours]
        device = units[0].parameters.device
        self.groups: list[tuple[float, list[list[Tensor]]]] = []
        for decay, part in ((weight_decay, _decayed), (0.0, _not_decayed)):
            flats: list[list[Tensor]] = [[], [], [], [], []]
            for unit, shard, (first, second) in zip(units, shards, self.moments, strict=True):
                where = part(unit, shard)
                if where.start < where.stop:
                    of_state = slice(where.start - shard.start, where.stop - shard.start)
                    wholes = ((unit.parameters, where), (unit.gradients, where), (first, of_state), (second, of_state))
                    for flat, (whole, place) in zip(flats, wholes, strict=False):
                        flat.append(whole[place])
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


def _decayed(unit: Unit, shard: slice) -> slice:
    return slice(shard.start, min(shard.stop, unit.layout.decayed))


def _not_decayed(unit: Unit, shard: slice) -> slice:
    return slice(max(shard.start, unit.layout.decayed), shard.stop)
