"""Train transformers' vision transformer from random weights, with ZeRO over all ranks.

    python examples/vit.py                                           one rank
    torchrun --nproc-per-node 2 examples/vit.py --stage 3            two ranks

Each layer is a unit; patches, positions and the classifier belong to the root unit.
"""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from transformers import ViTConfig, ViTForImageClassification

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run from any folder, also without an installation

from examples.training import CLASSES, SIZE, bright_quarter, train


def make(layers: int = 2, width: int = 32) -> nn.Module:
    """Return a small vision transformer without dropout."""
    config = ViTConfig(
        hidden_size=width,
        num_hidden_layers=layers,
        num_attention_heads=4,
        intermediate_size=2 * width,
        image_size=SIZE,
        patch_size=4,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        num_labels=CLASSES,  # pyright: ignore[reportCallIssue] - of the base class
    )
    return ViTForImageClassification(config)


def loss(model: Callable[..., Any], images_and_labels: tuple[Tensor, Tensor]) -> Tensor:
    images, labels = images_and_labels
    return model(pixel_values=images, labels=labels).loss


if __name__ == "__main__":
    train(__doc__, make, bright_quarter, loss)
