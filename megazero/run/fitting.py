"""Check the parts of a run against its number of ranks, without importing torch."""

from megazero.builders.pipeline import check_world
from megazero.config.stages import Course


def check_parts(course: Course, size: int, given: str = "", *, done: int | None = 0) -> None:
    """Check the remaining parts of a run against the number of ranks, as `check_world` does.

    Args:
        given: the source of `size` for error messages, such as `--nproc 4`.
        done: the steps done; None: unknown, so that only the last part is sure to remain.

    Raises:
        UserError: 106, the sizes do not fit.
    """
    for part in course.parts[-1:] if done is None else course.parts[course.parts.index(course.part(done)) :]:
        check_world(part.config, size, " in ".join(text for text in (given, part.name) if text))
