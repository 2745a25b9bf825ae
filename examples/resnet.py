"""Train a residual network for images, with ZeRO over all ranks.

    python examples/resnet.py                                        one rank
    torchrun --nproc-per-node 2 examples/resnet.py --stage 3         two ranks

Residual blocks of two convolutions (He et al. 2015, arXiv 1512.03385, section 4.2), written here. Each stage is a unit.
Norms are over groups of channels: batch normalisation would see only its own rank's samples, as under any data
parallelism, so that results would depend on the number of ranks.
"""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run from any folder, also without an installation

from examples.training import CLASSES, bright_quarter, train


class Block(nn.Module):
    """Two convolutions and a shortcut."""

    def __init__(self, inputs: int, outputs: int, stride: int):
        super().__init__()
        self.first = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.second = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.norms = nn.ModuleDict({"first": nn.GroupNorm(4, outputs), "second": nn.GroupNorm(4, outputs)})
        self.shortcut = nn.Identity() if inputs == outputs else nn.Conv2d(inputs, outputs, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu(self.norms["first"](self.first(x)))
        return torch.relu(self.norms["second"](self.second(y)) + self.shortcut(x))


class ResNet(nn.Module):
    """Stages of blocks; each stage but the first halves the image and doubles the channels."""

    def __init__(self, channels: int, stages: int, blocks: int):
        super().__init__()
        self.first = nn.Conv2d(3, channels, 3, padding=1, bias=False)
        widths = [channels << stage for stage in range(stages)]
        self.stages = nn.Sequential()
        for before, width in zip([channels, *widths], widths, strict=False):
            first = Block(before, width, 1 if before == width else 2)
            self.stages.append(nn.Sequential(first, *(Block(width, width, 1) for _ in range(blocks - 1))))
        self.head = nn.Linear(widths[-1], CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.stages(self.first(images)).mean((2, 3)))


def make(channels: int = 8, stages: int = 2, blocks: int = 2) -> nn.Module:
    return ResNet(channels, stages, blocks)


def loss(model: Callable[..., Any], images_and_labels: tuple[Tensor, Tensor]) -> Tensor:
    images, labels = images_and_labels
    return nn.functional.cross_entropy(model(images), labels)


if __name__ == "__main__":
    train(__doc__, make, bright_quarter, loss)
