"""Define which options may change during a run: planned, in a stage, or on a resume, with `--allow-change`.

One table serves the reading of configs and checkpoints, `explain` and the documents. The first row that matches an
option applies.
"""

from dataclasses import dataclass
from fnmatch import fnmatchcase

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
