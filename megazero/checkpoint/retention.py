"""Delete old checkpoints, but never the last one that was verified."""

from collections.abc import Callable
from pathlib import Path

from megazero.base.errors import UserError
from megazero.checkpoint.load import opened
from megazero.checkpoint.manifest import Manifest, read_manifest
from megazero.checkpoint.shard import ReadingStoppedError
from megazero.checkpoint.store import Store


def verify(folder: Path, stop: Callable[[], bool] = lambda: False, files: slice = slice(None)) -> Manifest:
    """Read and verify a whole checkpoint, or some of its files; return its manifest.

    Args:
        stop: polled while reading; True: give up.
        files: slice of the file numbers to read.

    Raises:
        UserError: 410, a file in it is damaged.
        ReadingStoppedError: `stop` returned True.
    """
    manifest = read_manifest(folder)
    chosen = range(len(manifest.files))[files]
    for index, reader in opened(folder, manifest, chosen, f"verifying {folder}", stop):
        for _ in reader.read(0, manifest.files[index].size):
            pass
    return manifest


def retire(store: Store, keep: int, warn: Callable[[str], object], stop: Callable[[], bool] = lambda: False) -> None:
    """Delete all but the newest `keep` steps if one of the kept steps, read back, is undamaged.

    Args:
        stop: polled during the work; True: stop, and leave the other steps for a later call.
    """
    try:
        steps = store.steps()
        if not steps[keep:] or not any(_is_whole(store.path(step), warn, stop) for step in steps[:keep]):
            return
        for step in reversed(steps[keep:]):  # oldest first: a job killed here leaves the newer ones
            if stop():
                return
            store.delete(step)
    except ReadingStoppedError:
        return
    except OSError as error:
        warn(f"old checkpoints could not be deleted: {error}")


def _is_whole(folder: Path, warn: Callable[[str], object], stop: Callable[[], bool]) -> bool:
    try:
        verify(folder, stop)
    except UserError as error:
        warn(f"{error}; older checkpoints are kept")
        return False
    return True
