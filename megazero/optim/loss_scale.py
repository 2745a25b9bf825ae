"""Scale the loss for fp16, so that small gradients do not underflow and large ones do not overflow.

fp16 has 5 exponent bits; most gradients of a large model are smaller than its smallest number (Micikevicius et al.
2018, section 3.2). The loss is multiplied by a power of two before backward, and the update divides by it. An overflow
gives a non-finite norm: the step is skipped and the scale is halved; after many finite steps the scale is doubled. All
of this happens on the device.
"""

import torch
from torch import Tensor

INITIAL, GROWTH_INTERVAL, SMALLEST = 2.0**16, 2000, 1.0


class LossScale:
    """The loss scale, and the count of finite steps after which it grows.

    Attributes:
        dynamic: True if the scale changes; if False, it is always 1.
        scale: the factor, fp32, 0-dim.
        good: finite steps since the scale last changed, int32, 0-dim.
    """

    def __init__(self, device: torch.device, *, dynamic: bool):
        self.dynamic = dynamic
        self.scale = torch.full((), INITIAL if dynamic else 1.0, dtype=torch.float32, device=device)
        self.good = torch.zeros((), dtype=torch.int32, device=device)

    def scaled(self, loss: Tensor) -> Tensor:
        """Return the scaled loss, for backward."""
        return loss * self.scale if self.dynamic else loss

    def update(self, finite: Tensor, counts: Tensor) -> None:
        """Update the scale after a step.

        Args:
            finite: True if the gradient norm was finite; bool, 0-dim.
            counts: True if the step had valid tokens; other steps do not count as good. bool, 0-dim.
        """
        if not self.dynamic:
            return
        self.good.copy_(torch.where(finite, self.good + counts, 0))
        grows = self.good >= GROWTH_INTERVAL
        self.scale.mul_(torch.where(finite, torch.where(grows, 2.0, 1.0), 0.5)).clamp_(min=SMALLEST)
        self.good.masked_fill_(grows, 0)
