"""Keep the checkpoints of one run as folders: a step is committed, or it does not exist.

    checkpoints/.step_00000100.TOKEN.tmp/   being written: shards, and each rank's report on its shard
    checkpoints/step_00000100/              committed: shards and manifest, flushed before the folder got this name
    checkpoints/.step_00000050.TOKEN.old/   being deleted
    checkpoints/damaged_step_00000050.TOKEN/  a former step of this run, with a damaged file

A committed step is never changed or overwritten. The remains of a killed attempt have names that no reader takes for a
step; the next owner of the run's folder removes them. There is no pointer to the newest step: a reader lists the folder
and verifies.
"""

import re
import shutil
from pathlib import Path

from megazero.base.files import flush_folder, replace_file
from megazero.checkpoint.manifest import FILE_NAME, step_name, step_of

_LEFT = re.compile(r"\.step_\d{8,}\.\w+\.(tmp|old)")


class Store:
    """The folder of a run's checkpoints.

    Args:
        folder: the folder of all steps.
        token: of this attempt at the run; part of the names of uncommitted folders.
    """

    def __init__(self, folder: Path, token: str = "none"):
        self.folder, self._token = folder, token

    def path(self, step: int) -> Path:
        """Return the folder of a committed step."""
        return self.folder / step_name(step)

    def staging(self, step: int) -> Path:
        """Return the hidden folder in which a step is written."""
        return self.folder / f".{step_name(step)}.{self._token}.tmp"

    def steps(self) -> list[int]:
        """Return the committed steps, newest first. Raises OSError."""
        if not self.folder.is_dir():
            return []
        found = (step_of(path) for path in self.folder.iterdir())
        return sorted((step for step in found if step is not None), reverse=True)

    def commit(self, step: int, manifest: bytes) -> Path:
        """Write the manifest into the staging folder, which has all other files, and rename it. Raises OSError."""
        staging, path = self.staging(step), self.path(step)
        replace_file(staging / FILE_NAME, manifest)  # flushes file and folder
        # The rename can replace only an empty folder; it fails on a folder with files, which is a committed step.
        staging.rename(path)
        flush_folder(self.folder)
        return path

    def delete(self, step: int) -> None:
        """Delete a step; rename it first, so that a partly deleted step has no step's name. Raises OSError."""
        old = self.folder / f".{step_name(step)}.{self._token}.old"
        self.path(step).rename(old)
        flush_folder(self.folder)
        shutil.rmtree(old)

    def put_aside(self, step: int) -> None:
        """Rename a damaged step, so that readers skip it and it can be examined. Raises OSError."""
        path = self.path(step)
        path.rename(path.with_name(f"damaged_{path.name}.{self._token}"))
        flush_folder(self.folder)

    def abandon(self, step: int) -> None:
        """Remove the staging folder of a step that will not be committed; ignore errors."""
        shutil.rmtree(self.staging(step), ignore_errors=True)

    def reap(self) -> None:
        """Remove the remains of killed attempts; for the owner of the run's folder."""
        for path in self.folder.glob(".step_*"):
            if _LEFT.fullmatch(path.name):
                shutil.rmtree(path, ignore_errors=True)
