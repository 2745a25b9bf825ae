"""Old checkpoints go, but never the last one that is known to be whole."""

from collections.abc import Callable
from pathlib import Path

from megazero.checkpoint.manifest import read_manifest
from megazero.checkpoint.shard import ShardReader
from megazero.checkpoint.store import Store
from megazero.errors import UserError


def verify(folder: Path) -> None:
    """Reads a whole checkpoint. Raises UserError 410: something in it is damaged."""
    manifest = read_manifest(folder)
    for index, file in enumerate(manifest.files):
        reader = ShardReader(folder, manifest.shard(index))
        try:
            for _ in reader.read(0, file.size):
                pass
        finally:
            reader.close()


def retire(store: Store, keep: int, warn: Callable[[str], object]) -> None:
    """Deletes all but the newest `keep` steps, once one of these has been read back and found whole."""
    try:
        steps = store.steps()
        if not steps[keep:]:
            return
        if any(_is_whole(store.path(step), warn) for step in steps[:keep]):
            for step in steps[keep:]:
                store.delete(step)
    except OSError as error:
        warn(f"old checkpoints are not deleted: {error}")


def _is_whole(folder: Path, warn: Callable[[str], object]) -> bool:
    try:
        verify(folder)
    except UserError as error:
        warn(f"{error}; older checkpoints are kept")
        return False
    return True
