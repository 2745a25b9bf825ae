"""The loss curve of a run, as a picture.

The training loss of single batches is noise around a trend: it is drawn thin, with its mean on top. Row i's mean is
over the rows i - w .. i + w: a mean of the past alone would lag behind a falling loss and show it too high. w is
HALF_WIDTH of all rows and shrinks towards both ends, so that the window stays centred and the line starts and ends on
the data. Validation losses are points: few, and each one a measurement.

matplotlib is used through its object interface, on the Agg canvas: no display, no shared state with a caller's plots.
"""

import io
import math
from collections.abc import Iterable, Mapping
from itertools import accumulate
from pathlib import Path
from typing import Any

from megazero.files import replace_file

HALF_WIDTH = 0.02  # of the rows: in a run of 1,000 rows, a mean over 41
TRAIN, TREND, VALID = "#9db7d5", "#1f4e8c", "#d1495b"


def draw_loss(rows: Iterable[Mapping[str, Any]], path: Path) -> None:
    """Draw training and validation loss over the step into a PNG, replaced atomically.

    Args:
        rows: as read from metrics.jsonl; losses that are missing or not finite are left out.
        path: the PNG to write.
    """
    # Imported here: half a second and 30 MB that a training process needs once, at its end.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    rows = list(rows)
    train = _points(rows, "loss")
    valid = _points(rows, "valid_loss")
    figure = Figure(figsize=(8, 4.5), dpi=150, layout="constrained")
    canvas = FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    if train:
        steps = [step for step, _ in train]
        losses = [loss for _, loss in train]
        axes.plot(steps, losses, color=TRAIN, linewidth=0.8, marker="o" if len(train) == 1 else "", label="training")
        axes.plot(steps, centred_mean(losses), color=TREND, linewidth=1.8, label="training, mean")
    if valid:
        axes.plot(*zip(*valid, strict=True), "o", color=VALID, markersize=5, label="validation")
        step, loss = valid[-1]
        axes.annotate(f"{loss:.3f}", (step, loss), (0, 7), textcoords="offset points", ha="right", color=VALID)
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
    image = io.BytesIO()
    canvas.print_png(image)
    replace_file(path, image.getvalue())


def centred_mean(values: list[float]) -> list[float]:
    """Mean of each value and its neighbours, equally many on both sides: at most HALF_WIDTH of all values each."""
    widest = int(HALF_WIDTH * len(values))
    sums = [0.0, *accumulate(values)]
    means = []
    for place in range(len(values)):
        width = min(widest, place, len(values) - 1 - place)
        first, end = place - width, place + width + 1
        means.append((sums[end] - sums[first]) / (end - first))
    return means


def _points(rows: list[Mapping[str, Any]], key: str) -> list[tuple[int, float]]:
    found = [(row["step"], row.get(key)) for row in rows]
    return [(step, value) for step, value in found if isinstance(value, (int, float)) and math.isfinite(value)]
