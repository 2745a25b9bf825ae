"""Draw the loss curve of a run as a picture.

The training loss of single batches is noise around a trend: it is drawn thin, with its trend on top. The trend at a
step is the value there of the straight line that fits the rows around it best (local linear regression with tricube
weights: Cleveland 1979, "Robust locally weighted regression and smoothing scatterplots"), always as many rows, WIDTH of
all and at least LEAST. A mean would lag behind a falling loss where the rows lie to one side only; a window that
shrinks towards the ends would end on the noise of the last batch. A line has neither fault, so both ends mean what the
middle means. Validation losses are joined points: few, and each one a measurement.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from megazero.base.picture import picture
from megazero.observe.metrics import VALID_LOSS, valid_losses

WIDTH, LEAST = 0.1, 15  # of the rows, and in rows: the window of the trend
POINTS = 1000  # that the trend is drawn through, at most
TRAIN, TREND = "#9db7d5", "#1f4e8c"
VALID = ("#d1495b", "#2a9d6f", "#e08a2c", "#7b4fa3", "#6b6b6b", "#b08968")


def draw_loss(rows: Iterable[Mapping[str, Any]], path: Path) -> None:
    """Draw training and validation loss over the step into a PNG, replaced atomically.

    Args:
        rows: as read from metrics.jsonl; losses that are missing or not finite are left out.
        path: the PNG to write.
    """
    from matplotlib.ticker import MaxNLocator

    rows = list(rows)
    train = _points(rows, "loss")
    keys = dict.fromkeys(key for row in rows for key in valid_losses(row))
    valid = {key.removeprefix(VALID_LOSS): points for key in keys if (points := _points(rows, key))}
    with picture(path, 8, 4.5) as figure:
        axes = figure.add_subplot()
        if train:
            steps = [step for step, _ in train]
            losses, marker = [loss for _, loss in train], "o" if len(train) == 1 else ""
            axes.plot(steps, losses, color=TRAIN, linewidth=0.8, marker=marker, label="training")
            axes.plot(*trend(steps, losses), color=TREND, linewidth=1.8, label="training, trend")
        for number, (name, points) in enumerate(valid.items()):
            colour = VALID[number % len(VALID)]
            label = f"validation{name.replace('.', ' ', 1)}"
            axes.plot(*zip(*points, strict=True), "o-", color=colour, linewidth=1, markersize=4, label=label)
            step, loss = points[-1]
            axes.annotate(f"{loss:.3f}", (step, loss), (0, 7), textcoords="offset points", ha="right", color=colour)
        axes.set_xlabel("step")
        axes.set_ylabel("loss (nats/token)")
        axes.grid(color="#e3e3e3", linewidth=0.6)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
        if train or valid:
            axes.legend(frameon=False, loc="upper right")
        else:
            axes.text(0.5, 0.5, "no finite loss was logged", transform=axes.transAxes, ha="center", color="#777777")


def trend(steps: Sequence[float], losses: Sequence[float]) -> tuple[list[float], list[float]]:
    """Return steps, and at each the value of the line that best fits the rows around it.

    Args:
        steps: ascending; as many as losses. Fewer than LEAST are returned unchanged.
    """
    if len(steps) < LEAST:
        return list(steps), list(losses)
    x, y = np.asarray(steps, np.float64), np.asarray(losses, np.float64)
    width = max(LEAST, round(WIDTH * len(x)))
    places = np.unique(np.linspace(0, len(x) - 1, min(POINTS, len(x))).round().astype(int))
    return x[places].tolist(), [_line_at(x, y, int(place), width) for place in places]


def _line_at(x: np.ndarray, y: np.ndarray, place: int, width: int) -> float:
    first = min(max(place - width // 2, 0), len(x) - width)  # as many rows at the ends as in the middle
    near, values = x[first : first + width] - x[place], y[first : first + width]
    weights = (1 - (np.abs(near) / (1.001 * np.abs(near).max())) ** 3) ** 3
    mean, height = np.average(near, weights=weights), np.average(values, weights=weights)
    slope = (weights * (near - mean) * (values - height)).sum() / (weights * (near - mean) ** 2).sum()
    return float(height - slope * mean)


def _points(rows: list[Mapping[str, Any]], key: str) -> list[tuple[int, float]]:
    found = [(row["step"], row.get(key)) for row in rows]
    return [(step, value) for step, value in found if isinstance(value, (int, float)) and math.isfinite(value)]
