"""Delete old checkpoints, but never the last one that is known to be whole."""

from collections.abc import Callable
from pathlib import Path

from megazero.base.doing import doing
from megazero.base.errors import UserError
from megazero.checkpoint.load import headers
from megazero.checkpoint.manifest import read_manifest
from megazero.checkpoint.shard import ShardReader
from megazero.checkpoint.store import Store


def verify(folder: Path, stop: Callable[[], bool] = lambda: False) -> None:
    """Read and verify a whole checkpoint, until `stop` is true. Raises UserError 410: a file in it is damaged."""
    manifest = read_manifest(folder)
    expected = headers(manifest, range(len(manifest.files)))
    with doing(f"verifying {folder}", len(manifest.files)) as progress:
        for index, file in enumerate(manifest.files):
            reader = ShardReader(folder, manifest.shard(index))
            try:
                reader.check_header(expected[index])
                for _ in reader.read(0, file.size):
                    if stop():
                        return
                progress.advance()
            finally:
                reader.close()


def retire(store: Store, keep: int, warn: Callable[[str], object], stop: Callable[[], bool] = lambda: False) -> None:
    """Delete all but the newest `keep` steps, once one of these has been read back and found whole.

    Args:
        stop: polled meanwhile; True: leave the rest for another time.
    """
    try:
        steps = store.steps()
        if not steps[keep:]:
            return
        if any(_is_whole(store.path(step), warn, stop) for step in steps[:keep]):
            for step in reversed(steps[keep:]):  # the oldest first, so that who is killed here leaves the newest
                if stop():
                    return
                store.delete(step)
    except OSError as error:
        warn(f"old checkpoints are not deleted: {error}")


def _is_whole(folder: Path, warn: Callable[[str], object], stop: Callable[[], bool]) -> bool:
    try:
        verify(folder, stop)
    except UserError as error:
        warn(f"{error}; older checkpoints are kept")
        return False
    return True
