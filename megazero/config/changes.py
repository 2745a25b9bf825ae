"""Define which options may change during a run: planned, in a stage, or on a resume, with `--allow-change`.

One table serves the reading of configs and checkpoints, `explain` and the documents. The first row that matches an
option applies.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from megazero.base.errors import UserError
from megazero.config.nearest import nearest

FREE = "free"


@dataclass(frozen=True)
class Changeable:
    """A row of the table.

    Attributes:
        keys: an option, or `section.*` for all options of a section.
        in_stage: the reason why a stage may not change the option; "": it may.
        on_resume: the reason why a resumed run may not change it; "": it may, with `--allow-change`; `FREE`: it may
            without.
    """

    keys: str
    in_stage: str
    on_resume: str

    def fits(self, key: str) -> bool:
        """Return True if the row matches an option."""
        return key == self.keys.removesuffix(".*") or fnmatchcase(key, self.keys)


_SHAPE = "the weights have this shape, or were trained with this value"
_WHOLE = "it applies to the whole run"
CHANGEABLE: tuple[Changeable, ...] = (
    Changeable("data.sources", "", ""),
    Changeable("data.mask_eod", "", ""),
    Changeable("data.pack", _WHOLE, ""),
    Changeable("data.train", "a stage names its sources: give data.sources", ""),
    Changeable("data.valid", _WHOLE, "documents that were held out would be trained on"),
    Changeable("data.tokenizer", _WHOLE, "the same ids would stand for other text"),
    Changeable("data.*", _WHOLE, FREE),
    Changeable("batch.global", "", ""),
    Changeable("batch.micro", "", FREE),
    Changeable("model.seq_len", "", ""),
    Changeable("model.loss_chunk", _WHOLE, FREE),
    Changeable("model.*", _SHAPE, _SHAPE),
    Changeable("optimizer.lr", "", FREE),
    Changeable("optimizer.clip", "", FREE),
    Changeable("optimizer.name", _WHOLE, "its moments are those of another optimizer"),
    Changeable("optimizer.muon.*", _WHOLE, ""),
    Changeable("optimizer.average.*", _WHOLE, FREE),
    Changeable("optimizer.moments", _WHOLE, FREE),
    Changeable("optimizer.groups", _WHOLE, ""),
    Changeable("optimizer.*", "", ""),
    Changeable("schedule.*", "", FREE),
    Changeable("stages", "stages cannot be nested", ""),
    Changeable("run.seed", _WHOLE, "every random number of the run depends on it"),
    Changeable("run.*", _WHOLE, FREE),
    Changeable("parallel.*", "ranks keep their places as long as they run", FREE),
    Changeable("pipeline.*", "ranks keep their places as long as they run", FREE),
    Changeable("zero.*", "state keeps its place as long as the ranks run", FREE),
    Changeable("memory.*", _WHOLE, FREE),
    Changeable("precision.dtype", _WHOLE, "it is the dtype of weights and moments"),
    Changeable("precision.*", _WHOLE, FREE),
    Changeable("checkpoint.*", _WHOLE, FREE),
    Changeable("observe.*", _WHOLE, FREE),
)


def row_of(key: str) -> Changeable:
    """Return the first row that matches an option."""
    return next(row for row in CHANGEABLE if row.fits(key))


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
