"""Define the values that a row of metrics may have."""

import math
from collections.abc import Mapping

Number = float | int | None
Value = Number | dict[str, Number]


def finite(row: Mapping[str, Value]) -> dict[str, Value]:
    """Return a row with None for every value that is not finite."""
    return {key: _finite(value) for key, value in row.items()}


def _finite(value: Value) -> Value:
    if isinstance(value, dict):
        return {key: None if number is None or not math.isfinite(number) else number for key, number in value.items()}
    return None if value is None or not math.isfinite(value) else value
