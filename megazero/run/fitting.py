"""Check the parts of a run against its number of ranks, without importing torch."""

from fnmatch import fnmatchcase

from megazero.base.errors import UserError
from megazero.builders.pipeline import check_world, model_shape
from megazero.config.stages import Course
from megazero.plan.states import units


def check_parts(course: Course, size: int, given: str = "", *, done: int | None = 0) -> None:
    """Check the remaining parts of a run against the number of ranks, as `check_world` does, and groups of parameters.

    Args:
        given: the source of `size` for error messages, such as `--nproc 4`.
        done: the steps done; None: unknown, so that only the last part is sure to remain.

    Raises:
        UserError: 106, the sizes do not fit; 107, a group matches no parameter.
    """
    config = course.parts[-1].config
    names = [unit.full_name(weight) for unit in units(model_shape(config), 1) for weight in unit.weights]
    for number, own in enumerate(config.optimizer.groups or ()):
        if not any(fnmatchcase(name, own.match) for name in names):
            do = "correct the pattern: `megazero plan --parameters` lists the names"
            raise UserError(107, f"{own.match!r} matches no parameter", do, where=f"optimizer.groups[{number}].match")
    for part in course.parts[-1:] if done is None else course.parts[course.parts.index(course.part(done)) :]:
        check_world(part.config, size, " in ".join(text for text in (given, part.name) if text))
