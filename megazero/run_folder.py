"""The folder of a run and the names in it (the contract's):

config.yaml  metrics.jsonl  checkpoints/step_00000100/  logs/rank_00.log  loss.png  profile/
"""

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
        found = [path for path in (self.metrics, *self.checkpoints.glob("step_*")) if path.exists()]
        if found:
            do = "give another run.dir=..., or remove the folder"
            raise UserError(110, f"holds a run already ({found[0].relative_to(self.path)})", do, where=self.path)
        try:
            for folder in (self.path, self.checkpoints, self.log(0).parent):
                folder.mkdir(parents=True, exist_ok=True)
            self.log(0).touch()
        except OSError as error:
            where = error.filename or self.path
            raise UserError(
                401, f"cannot be written: {error.strerror}", "choose another run.dir", where=where
            ) from None

    @property
    def config(self) -> Path:
        return self.path / "config.yaml"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

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
