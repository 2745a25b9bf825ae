"""The folder of a run, and the names in it, which are a public interface.

config.yaml  plan.json  metrics.jsonl  ledger.json  checkpoints/step_00000100/  logs/rank_00.log  loss.png  profile/
logs/slurm-1234.out  lock  STOP  early_stops
"""

from pathlib import Path

from megazero.base.errors import UserError
from megazero.base.packages import is_installed
from megazero.base.reading import looked_up
from megazero.run.early_stops import EarlyStops
from megazero.run.lock import RunLock


class RunFolder:
    """The paths inside one run's folder; making the object does not touch the disk.

    Attributes:
        config, plan, metrics, ledger, loss_plot, profile, checkpoints: as in the list above.
        lock: names the job that owns the folder.
        early_stops: counts how often in a row the run was stopped before its first step.
        stop: the kill switch: while that file exists, nothing trains here.
    """

    def __init__(self, path: str | Path):
        self.path = path = Path(path)
        self.config, self.plan = path / "config.yaml", path / "plan.json"
        self.metrics, self.ledger, self.loss_plot = path / "metrics.jsonl", path / "ledger.json", path / "loss.png"
        self.checkpoints, self.profile = path / "checkpoints", path / "profile"
        self.lock, self.stop, self.early_stops = path / "lock", path / "STOP", EarlyStops(path / "early_stops")

    def create(self, lock: RunLock, *, resume: bool) -> str | None:
        """Create and lock the folder for this job; return the dead job whose lock it took over, or None.

        Args:
            lock: the lock of this folder; the caller releases it, also after an error.
            resume: whether the folder may hold a run, to be resumed.

        Raises:
            UserError: 110, it holds a run already; 401, it cannot be written; 420, another job trains there.
        """
        if not resume:  # another run's folder is not touched
            self.refuse_if_taken(lock)
        try:
            for folder in (self.path, self.checkpoints, self.log(0).parent):
                folder.mkdir(parents=True, exist_ok=True)
            dead = lock.take()
            if not resume:  # another job may have started and ended
                self._refuse_a_run()
            for left in self.path.glob("*.tmp-*"):  # by a job that was killed while it wrote
                left.unlink(missing_ok=True)
        except OSError as error:
            where = error.filename or self.path
            what = f"cannot be written: {error.strerror}"
            raise UserError(401, what, "choose another run.dir", where=where) from None
        return dead

    def refuse_if_taken(self, lock: RunLock) -> None:
        """Refuse a folder in which a job trains, or has trained. Raises UserError 420, 110."""
        lock.refuse_if_held()  # the next error suggests to remove the folder: not a running job's
        self._refuse_a_run()

    def _refuse_a_run(self) -> None:
        rows_and_steps = (self.metrics, *sorted(self.checkpoints.glob("*step_*")))
        if (found := next((path for path in rows_and_steps if path.exists()), None)) is not None:
            do = "give another run.dir=..., remove the folder, or go on with checkpoint.resume=auto"
            raise UserError(110, f"holds a run already ({found.relative_to(self.path)})", do, where=self.path)

    def require_run(self) -> None:
        """Refuse a folder that is not a run's. Raises UserError 113."""
        if not self.config.is_file():
            what = f"is not a run's folder (no config.yaml){looked_up(self.path)}"
            raise UserError(113, what, "give --run runs/NAME", where=self.path)

    def picture_is_old(self) -> bool:
        """Return whether the loss curve can be drawn, and is missing or older than the newest row."""
        if not is_installed("matplotlib"):
            return False
        try:
            return self.loss_plot.stat().st_mtime_ns < self.metrics.stat().st_mtime_ns
        except OSError:
            return True

    def log(self, rank: int) -> Path:
        """Return the log of a rank."""
        return self.path / "logs" / f"rank_{rank:02d}.log"
