"""Hold what the loop reads from the device for a row of metrics, and the values that a row may have."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

Number = float | int | None
Value = Number | dict[str, Number]


@dataclass(frozen=True)
class Numbers:
    """The results of a step, read from the device, in the order of their keys in metrics.jsonl.

    Attributes:
        samples: consumed since the start of the run; skipped steps consume too.
        epoch: samples over those of the data set.
        epochs: the epoch of each source that has a name; None: none has.
        loss: of this step's batch before its update, in nats per token.
        grad_norm: unscaled and before the clip.
        clipped: 1 where grad_norm was beyond the clip.
        skipped: all skipped steps so far.
    """

    samples: int
    epoch: float
    epochs: Mapping[str, float] | None
    loss: float
    grad_norm: float
    clipped: int
    lr: float
    loss_scale: float
    skipped: int


def finite(row: Mapping[str, Value]) -> dict[str, Value]:
    """Return a row with None for every value that is not finite."""
    return {key: _finite(value) for key, value in row.items()}


def _finite(value: Value) -> Value:
    if isinstance(value, dict):
        return {key: None if number is None or not math.isfinite(number) else number for key, number in value.items()}
    return None if value is None or not math.isfinite(value) else value
