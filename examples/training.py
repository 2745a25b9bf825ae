"""The training loop of the examples and their data: tokens that count up, images with one bright quarter."""

import argparse
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import megazero

VOCAB, LENGTH = 64, 32
SIZE, CLASSES = 16, 4


def generator(step: int, rank: int) -> torch.Generator:
    """Return the random generator for one rank's samples of a step."""
    return torch.Generator().manual_seed(1_000_003 * step + rank)


def counting(step: int, rank: int, samples: int = 2) -> Tensor:
    """Return token ids [B, S] that count up from a random start."""
    start = torch.randint(0, VOCAB, (samples, 1), generator=generator(step, rank))
    return (start + torch.arange(LENGTH)) % VOCAB


def bright_quarter(step: int, rank: int, samples: int = 2) -> tuple[Tensor, Tensor]:
    """Return images [B, 3, H, W] with one brighter quarter, and the number of that quarter [B]."""
    draw = generator(step, rank)
    images = 0.1 * torch.randn(samples, 3, SIZE, SIZE, generator=draw)
    labels = torch.randint(0, CLASSES, (samples,), generator=draw)
    half = SIZE // 2
    for image, label in zip(images, labels.tolist(), strict=True):
        row, column = half * (label // 2), half * (label % 2)
        image[:, row : row + half, column : column + half] += 1.0
    return images, labels


def train(
    about: str | None,
    make: Callable[[], nn.Module],
    batch: Callable[[int, int], Any],
    loss: Callable[[Any, Any], Tensor],
) -> None:
    """Train a model in the ZeRO stage given on the command line.

    Args:
        about: the text of `--help`.
        make: returns the model.
        batch: (step, rank) -> that rank's samples of the step.
        loss: (model, samples) -> their mean loss.
    """
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stage", type=int, default=3, help="of ZeRO (default: 3)")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--save", help="a folder for a checkpoint at the end")
    options = parser.parse_args()
    sharded = megazero.shard(make(), {"name": "adamw", "lr": 1e-3}, stage=options.stage, clip=1.0)
    for step in range(options.steps):
        sharded.backward(loss(sharded, batch(step, sharded.rank)))
        found = sharded.step()
        if sharded.rank == 0 and (step + 1) % 20 == 0:
            print(f"step {step + 1}: loss {found.loss:.4f}")
    if options.save:
        sharded.save(options.save)
