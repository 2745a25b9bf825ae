"""The loss scale of fp16: large enough that small gradients do not vanish, small enough that none overflows.

fp16 has 5 bits of exponent; most gradients of a large model are smaller than its smallest number (Micikevicius et al.
2018, section 3.2). The loss is multiplied by a power of two before backward, and the update divides by it. An overflow
shows as a norm that is not finite: that step is skipped and the scale halved; after many good steps it is doubled. All
of it happens on the device.
"""

import torch
from torch import Tensor

INITIAL, GROWTH_INTERVAL, SMALLEST = 2.0**16, 2000, 1.0


class LossScale:
    """`scale` is what losses are multiplied by: fp32, 0-dim; 1 for ever unless `dynamic`.

    `good` counts the finite steps since it last changed: int32, 0-dim.
    """

    def __init__(self, device: torch.device, *, dynamic: bool):
        self.dynamic = dynamic
        self.scale = torch.full((), INITIAL if dynamic else 1.0, dtype=torch.float32, device=device)
        self.good = torch.zeros((), dtype=torch.int32, device=device)

    def scaled(self, loss: Tensor) -> Tensor:
        return loss * self.scale if self.dynamic else loss

    def update(self, finite: Tensor, counts: Tensor) -> None:
        """After a step whose norm was finite or not; one without tokens does not count (both bool, 0-dim)."""
        if not self.dynamic:
            return
        self.good.copy_(torch.where(finite, self.good + counts, 0))
        grows = self.good >= GROWTH_INTERVAL
        factor = torch.where(finite, torch.where(grows, 2.0, 1.0), 0.5)
        self.scale.mul_(factor).clamp_(min=SMALLEST)
        self.good.masked_fill_(grows, 0)
