"""Check which options a stage may change, and which a resumed run may change."""

from collections.abc import Sequence

from megazero.base.errors import UserError
from megazero.config.changes import CHANGEABLE, FREE, row_of
from megazero.config.nearest import nearest


def refusal(place: str, key: str, known: Sequence[str], where: str) -> UserError:
    """Return the error for a key in a stage that is unknown (104) or that a stage may not change (109).

    Args:
        place: the key as the user gave it, such as `stages[0].zero.stage`.
        known: all options.
        where: the place of the key (file and line), for the error.
    """
    inside = _inside(key, known)
    if not inside:
        mine = [*(each for each in known if not row_of(each).in_stage), "until_step", "until_tokens"]
        return UserError(104, f"unknown key {place}", nearest(key, mine), where=where)
    do = f"a stage may change {', '.join(row.keys for row in CHANGEABLE if not row.in_stage)}"
    return UserError(109, f"{place} cannot change: {row_of(inside[0]).in_stage}", do, where=where)


def permitted(text: str, known: Sequence[str]) -> tuple[str, ...]:
    """Parse the comma-separated options and sections of `--allow-change`.

    Raises:
        UserError: 104, there is no such option or section; 123, a resumed run cannot change it.
    """
    given = tuple(part.strip() for part in text.split(","))
    for key in given:
        inside = _inside(key, known)
        if not inside:
            raise UserError(104, f"unknown key {key!r}", nearest(key, list(known)), where="--allow-change")
        if all(row_of(each).on_resume not in ("", FREE) for each in inside):
            raise UserError(123, f"{key} cannot change: {row_of(inside[0]).on_resume}", where="--allow-change")
    return given


def is_permitted(key: str, given: Sequence[str]) -> bool:
    """Return True if an option may change on a resume with permission and `given` permits it."""
    return not row_of(key).on_resume and any(_inside(each, [key]) for each in given)


def _inside(key: str, known: Sequence[str]) -> list[str]:
    """Return the options that a key stands for: itself, or all options of a section."""
    return [each for each in known if each == key or each.startswith(f"{key}.")]
