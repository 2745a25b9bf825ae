"""Hold what the loop reads from the device for a row of metrics, and the values that a row may have."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

Number = float | int | None
Value = Number | dict[str, Number]


@dataclass(frozen=True)
class Numbers:
    """The results of a step, read from the device; see `Row` for their meaning."""

    loss: float
    grad_norm: float
    clipped: int
    lr: float
    loss_scale: float
    skipped: int
    samples: int
    epoch: float
    epochs: Mapping[str, float] | None


def finite(row: Mapping[str, Value]) -> dict[str, Value]:
    """Return a row with None for every value that is not finite."""
    return {key: _finite(value) for key, value in row.items()}


def _finite(value: Value) -> Value:
    if isinstance(value, dict):
        return {key: number if number is None or math.isfinite(number) else None for key, number in value.items()}
    return value if value is None or math.isfinite(value) else None
