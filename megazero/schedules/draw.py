"""Draw a timeline: a row for each rank, a box for each computation.

Colours show forward and backward or its two parts, darker in later chunks of a rank; numbers are micro-batches. White
areas are the bubble.
"""

from pathlib import Path
from typing import Any

from megazero.base.picture import picture
from megazero.schedules.actions import Kind, Schedule
from megazero.schedules.simulate import Timeline

BOXES = {  # kind: (name, colour in the first chunk of a rank, colour in later ones)
    Kind.FORWARD: ("forward", "#8fb8de", "#4f86bd"),
    Kind.BACKWARD: ("backward", "#a9d18e", "#6fa84f"),
    Kind.BACKWARD_INPUT: ("backward: input", "#a9d18e", "#6fa84f"),
    Kind.BACKWARD_WEIGHT: ("backward: weights", "#f2c879", "#d99f3b"),
}
_MOST_NUMBERS = 600  # boxes; with more, numbers would not be readable


def draw(schedule: Schedule, timeline: Timeline, path: Path) -> None:
    """Write the timeline as SVG or PNG, by the path's suffix. Raises OSError."""
    with picture(path, 14, 0.9 + 0.45 * len(timeline.ranks)) as figure:
        _draw_on(figure.add_subplot(), schedule, timeline)


def _draw_on(axes: Any, schedule: Schedule, timeline: Timeline) -> None:
    from matplotlib.patches import Patch

    numbered = sum(map(len, timeline.ranks)) <= _MOST_NUMBERS
    used: dict[Kind, None] = {}
    for rank, row in enumerate(timeline.ranks):
        chunks = schedule.stages_of(rank)
        for timed in row:
            kind, width = timed.action.kind, timed.end - timed.start
            used[kind] = None
            shade = BOXES[kind][1 + min(chunks.index(timed.action.stage), 1)]
            axes.barh(rank, width, 0.8, timed.start, color=shade, edgecolor="white", linewidth=0.4)
            if numbered:
                place = (timed.start + width / 2, rank)
                axes.annotate(str(timed.action.micro_batch), place, ha="center", va="center", fontsize=6)
    axes.set_yticks(range(len(timeline.ranks)), [f"rank {rank}" for rank in range(len(timeline.ranks))])
    axes.invert_yaxis()
    axes.set_xlim(0, timeline.makespan)
    axes.set_xticks([])
    axes.spines[["top", "right", "bottom"]].set_visible(False)
    title = f"{schedule.name}: {len(timeline.ranks)} ranks, {schedule.micro_batches} micro-batches, "
    axes.set_title(title + f"bubble {timeline.bubble:.1%} of the work", fontsize=9, loc="left")
    handles = [Patch(facecolor=BOXES[kind][1], label=BOXES[kind][0]) for kind in BOXES if kind in used]
    axes.legend(handles=handles, frameon=False, fontsize=7, ncols=3, loc="upper left", bbox_to_anchor=(0, 0))
