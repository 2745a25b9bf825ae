"""Train a small U-Net that steps a physical field forward in time, with ZeRO over all ranks.

    python examples/unet.py                                          one rank
    torchrun --nproc-per-node 2 examples/unet.py --stage 3           two ranks

A field on a periodic grid follows the heat equation; the network learns one step of it from pairs of fields, as models
of weather and flow do. Levels halve the grid on the way down; on the way up each level also gets the output of the
level of the same size (Ronneberger et al. 2015, arXiv 1505.04597). Each level is a unit.
"""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run from any folder, also without an installation

from examples.training import generator, train

SIZE, DIFFUSION = 16, 0.2


class Level(nn.Module):
    """Two convolutions at one resolution, on a periodic grid."""

    def __init__(self, inputs: int, outputs: int):
        super().__init__()
        self.first = nn.Conv2d(inputs, outputs, 3, padding=1, padding_mode="circular")
        self.second = nn.Conv2d(outputs, outputs, 3, padding=1, padding_mode="circular")

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.gelu(self.second(nn.functional.gelu(self.first(x))))


class UNet(nn.Module):
    """Map a field [B, 1, H, W] to the field one step later."""

    def __init__(self, channels: int, levels: int):
        super().__init__()
        widths = [channels << level for level in range(levels)]
        self.down = nn.ModuleList(Level(a, b) for a, b in zip([1, *widths], widths, strict=False))
        self.up = nn.ModuleList(Level(a + b, b) for a, b in zip(widths[:0:-1], widths[-2::-1], strict=True))
        self.last = nn.Conv2d(channels, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        field, kept = x, []
        for level in self.down:
            x = level(x if not kept else nn.functional.avg_pool2d(x, 2))
            kept.append(x)
        kept.pop()
        for level in self.up:
            x = level(torch.cat([nn.functional.interpolate(x, scale_factor=2.0), kept.pop()], dim=1))
        return field + self.last(x)


def make(channels: int = 4, levels: int = 3) -> nn.Module:
    return UNet(channels, levels)


def batch(step: int, rank: int, samples: int = 2) -> tuple[Tensor, Tensor]:
    """Return smooth fields [B, 1, H, W] and the same fields one step later."""
    field = torch.randn(samples, 1, SIZE, SIZE, generator=generator(step, rank))
    for _ in range(4):
        field = field + DIFFUSION * laplace(field)
    return field, field + DIFFUSION * laplace(field)


def laplace(x: Tensor) -> Tensor:
    """Return the discrete Laplacian on a periodic grid."""
    neighbours = (x.roll(shift, dim) for dim in (-2, -1) for shift in (1, -1))
    return sum(neighbours, -4.0 * x)


def loss(model: Callable[..., Any], pair: tuple[Tensor, Tensor]) -> Tensor:
    field, later = pair
    return nn.functional.mse_loss(model(field), later)


if __name__ == "__main__":
    train(__doc__, make, batch, loss)
