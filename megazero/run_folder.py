"""The folder of a run and the names in it (the contract's):

config.yaml  metrics.jsonl  ledger.json  checkpoints/step_00000100/  logs/rank_00.log  loss.png  profile/
"""

import contextlib
import re
from pathlib import Path

from megazero.errors import UserError

_STEP = re.compile(r"step_(\d{8,})")


class RunFolder:
    """Paths inside one run's folder. Making the object touches nothing."""

    def __init__(self, path: str | Path):
        self.path = Path(path)

    def create(self) -> None:
        """Makes the folder for a new run.

        Raises:
            UserError: 110, it holds a run already; 401, it cannot be written.
        """
        for path in (self.metrics, *self.checkpoints.glob("step_*")):
            if path.exists():
                raise self._taken(path)
        try:
            for folder in (self.path, self.checkpoints, self.log(0).parent):
                folder.mkdir(parents=True, exist_ok=True)
            self.board.unlink(missing_ok=True)  # of a run that left the folder again
            self.log(0).touch()
            self.metrics.touch(exist_ok=False)  # the folder is taken from here on, also if two runs start at once
        except OSError as error:
            if isinstance(error, FileExistsError) and error.filename == str(self.metrics):  # not: a file in the way
                raise self._taken(self.metrics) from None
            where = error.filename or self.path
            what = f"cannot be written: {error.strerror}"
            raise UserError(401, what, "choose another run.dir", where=where) from None

    def _taken(self, found: Path) -> UserError:
        do = "give another run.dir=..., or remove the folder"
        return UserError(110, f"holds a run already ({found.relative_to(self.path)})", do, where=self.path)

    def release(self) -> None:
        """A run that ended before its first row does not keep the folder."""
        with contextlib.suppress(OSError):
            if self.metrics.stat().st_size == 0:
                self.metrics.unlink()

    @property
    def config(self) -> Path:
        return self.path / "config.yaml"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def ledger(self) -> Path:
        return self.path / "ledger.json"

    @property
    def board(self) -> Path:
        """Where ranks without a common parent show what they are doing."""
        return self.path / "logs" / "board"

    @property
    def loss_plot(self) -> Path:
        return self.path / "loss.png"

    @property
    def profile(self) -> Path:
        return self.path / "profile"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    def log(self, rank: int) -> Path:
        return self.path / "logs" / f"rank_{rank:02d}.log"

    def checkpoint(self, step: int) -> Path:
        """The folder of the weights after `step` steps."""
        return self.checkpoints / f"step_{step:08d}"

    def newest_checkpoint(self) -> Path:
        """The checkpoint with the largest step.

        Raises:
            UserError: 402, there is none.
        """
        found = {int(m[1]): p for p in self.checkpoints.glob("step_*") if (m := _STEP.fullmatch(p.name))}
        if not found:
            raise UserError(402, "no checkpoint here", "has the run ended? give --run a run's folder", where=self.path)
        return found[max(found)]
