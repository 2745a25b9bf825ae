"""Scale the loss for fp16, so that small gradients do not vanish and none overflows.

fp16 has 5 bits of exponent; most gradients of a large model are smaller than its smallest number (Micikevicius et al.
2018, section 3.2). The loss is multiplied by a power of two before backward, and the update divides by it. An overflow
shows as a norm that is not finite: that step is skipped and the scale is halved; after many finite steps it is doubled.
All of this happens on the device.
"""

import torch
from torch import Tensor

INITIAL, GROWTH_INTERVAL, SMALLEST = 2.0**16, 2000, 1.0


class LossScale:
    """The factor of the loss, and the count of steps after which it grows.

    Attributes:
        dynamic: whether the scale changes; if not, it is always 1.
        scale: the factor, fp32, 0-dim.
        good: finite steps since it last changed, int32, 0-dim.
    """

    def __init__(self, device: torch.device, *, dynamic: bool):
        self.dynamic = dynamic
        self.scale = torch.full((), INITIAL if dynamic else 1.0, dtype=torch.float32, device=device)
        self.good = torch.zeros((), dtype=torch.int32, device=device)

    def scaled(self, loss: Tensor) -> Tensor:
        """Return the loss that backward runs on."""
        return loss * self.scale if self.dynamic else loss

    def update(self, finite: Tensor, counts: Tensor) -> None:
        """Change the scale after a step.

        Args:
            finite: whether the norm was, bool, 0-dim.
            counts: whether the step had valid tokens; one without is not counted as good. bool, 0-dim.
        """
        if not self.dynamic:
            return
        self.good.copy_(torch.where(finite, self.good + counts, 0))
        grows = self.good >= GROWTH_INTERVAL
        self.scale.mul_(torch.where(finite, torch.where(grows, 2.0, 1.0), 0.5)).clamp_(min=SMALLEST)
        self.good.masked_fill_(grows, 0)
