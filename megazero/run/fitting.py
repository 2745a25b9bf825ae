"""Hold the parts of a run against its number of ranks. Does not import torch."""

from megazero.builders.pipeline import check_world
from megazero.config.stages import Course


def check_parts(course: Course, size: int, given: str = "", *, done: int | None = 0) -> None:
    """Hold the parts that a run has left against the number of ranks, as `check_world` does.

    Args:
        done: steps; None: it is not known how many, so that only the last part is sure to be left.

    Raises:
        UserError: 106.
    """
    for part in course.parts[-1:] if done is None else course.parts[course.parts.index(course.part(done)) :]:
        check_world(part.config, size, " in ".join(text for text in (given, part.name) if text))
