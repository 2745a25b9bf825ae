"""Draw the loss curve of a run as a picture.

The training loss is drawn through at most POINTS points: each is the mean over the rows of its interval, at their mean
step. This line, with the remaining noise of single batches, is thin. Its trend is drawn on top: the mean over a window
of WIDTH of the points, at least LEAST points, at the middle of the window and only where a whole window fits. So a
straight line is its own trend, and the ends of the trend do not follow the last batches. Validation losses are drawn as
joined points, because they are few; so are losses on texts, and, in a panel below, results on tasks.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from megazero.base.picture import picture
from megazero.observe.metrics import EVAL, VALID_LOSS, results, valid_losses

POINTS = 400
WIDTH, LEAST = 0.1, 5  # the window of the trend: a share of the points, and the fewest points
TRAIN, TREND = "#9db7d5", "#1f4e8c"
VALID = ("#d1495b", "#2a9d6f", "#e08a2c", "#7b4fa3", "#6b6b6b", "#b08968")


def draw_loss(rows: Iterable[Mapping[str, Any]], path: Path) -> None:
    """Draw training and validation loss over the step into a PNG, replaced atomically.

    Args:
        rows: as read from metrics.jsonl; losses that are missing or not finite are left out.
        path: the PNG to write.
    """
    rows = list(rows)
    train = _points(rows, "loss")
    keys = dict.fromkeys(key for row in rows for key in valid_losses(row))
    valid = {f"validation{key.removeprefix(VALID_LOSS).replace('.', ' ', 1)}": key for key in keys}
    found = {key.removeprefix(EVAL): key for row in rows for key in results(row)}
    valid |= {key.removesuffix(".loss"): own for key, own in found.items() if key.endswith(".loss")}
    tasks = {key: own for key, own in found.items() if not key.endswith((".loss", ".bits_per_byte", ".tokens"))}
    with picture(path, 8, 7.5 if tasks else 4.5) as figure:
        axes = figure.add_subplot(2 if tasks else 1, 1, 1)
        if train:
            steps, losses = means(train)
            marker = "o" if len(train) == 1 else ""
            axes.plot(steps, losses, color=TRAIN, linewidth=0.8, marker=marker, label="training")
            label = "training, trend" if len(steps) >= LEAST else None
            axes.plot(*trend(steps, losses), color=TREND, linewidth=1.8, label=label)
        _draw(axes, rows, valid, "loss (nats/token)", "no finite loss was logged")
        if tasks:
            _draw(figure.add_subplot(2, 1, 2), rows, tasks, "result", "no finite result was logged")


def _draw(axes: Any, rows: list[Mapping[str, Any]], lines: Mapping[str, str], what: str, nothing: str) -> None:
    """Draw keys of rows, by their labels, as joined points; then label the panel."""
    from matplotlib.ticker import MaxNLocator

    for number, (label, key) in enumerate(lines.items()):
        colour = VALID[number % len(VALID)]
        if points := _points(rows, key):
            axes.plot(*zip(*points, strict=True), "o-", color=colour, linewidth=1, markersize=4, label=label)
            step, value = points[-1]
            axes.annotate(f"{value:.3f}", (step, value), (0, 7), textcoords="offset points", ha="right", color=colour)
    axes.set_xlabel("step")
    axes.set_ylabel(what)
    axes.grid(color="#e3e3e3", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    if axes.get_legend_handles_labels()[1]:
        axes.legend(frameon=False, loc="best")
    else:
        axes.text(0.5, 0.5, nothing, transform=axes.transAxes, ha="center", color="#777777")


def means(points: Sequence[tuple[int, float]]) -> tuple[np.ndarray, np.ndarray]:
    """Return the mean step and the mean loss of at most POINTS intervals, each of about as many rows.

    Args:
        points: (step, loss), steps ascending.
    """
    intervals = np.array_split(np.asarray(points, np.float64), min(POINTS, len(points)))
    steps, losses = np.array([interval.mean(0) for interval in intervals]).T
    return steps, losses


def trend(steps: np.ndarray, losses: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the means of steps and of losses over a moving window, where a whole window fits."""
    width = max(LEAST, round(WIDTH * len(steps)))
    if len(steps) < width:
        return steps[:0], losses[:0]
    window = np.full(width, 1 / width)
    return np.convolve(steps, window, "valid"), np.convolve(losses, window, "valid")


def _points(rows: list[Mapping[str, Any]], key: str) -> list[tuple[int, float]]:
    found = [(row["step"], row.get(key)) for row in rows]
    return [(step, value) for step, value in found if isinstance(value, (int, float)) and math.isfinite(value)]
