"""Choose the step that a run resumes from: the newest one that every rank has read and verified.

All ranks try a step together. If a rank reads a damaged file, all ranks learn of it, the first rank reports it, and all
try the next older step. A step of another model is an error without a fallback: it is the user's mistake, and older
steps are of that model too.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from functools import partial
from pathlib import Path
from threading import Event
from typing import TypeVar

import torch

from megazero.base.errors import UserError
from megazero.checkpoint.load import load_tensors
from megazero.checkpoint.manifest import Manifest, read_manifest
from megazero.checkpoint.pieces import ShardState
from megazero.checkpoint.store import Store
from megazero.comm.agreement import agree, until_all
from megazero.comm.collectives import gather_bytes
from megazero.comm.grid import Axis

T = TypeVar("T")


def load_newest(
    store: Store,
    steps: Sequence[int],
    holdings: Sequence[ShardState],
    *,
    check: Callable[[Manifest, Path], None],
    world: Axis,
    device: torch.device,
    damaged: Callable[[int, str], object],
) -> Manifest:
    """Fill all ranks' tensors from the first undamaged step of `steps`. Collective.

    Args:
        steps: the steps to try in order, equal on all ranks.
        holdings: the state to fill.
        check: raises if a folder's manifest is of another model.
        damaged: called on every rank with each damaged step and the message of its fault.

    Raises:
        UserError: from `check`; 411, all steps are damaged.
    """

    def read(folder: Path, stop: Callable[[], bool]) -> Manifest:
        manifest = read_manifest(folder)
        check(manifest, folder)
        load_tensors(folder, manifest, holdings, stop=stop)
        return manifest

    for step in steps:
        manifest, fault = _attempt(partial(read, store.path(step)), world, device)
        if manifest is not None:
            return manifest
        damaged(step, fault)
    tried = ", ".join(str(step) for step in steps[:5]) + (", ..." if len(steps) > 5 else "")
    what = f"none of {len(steps)} checkpoints is whole (steps {tried})"
    raise UserError(411, what, "restore a checkpoint, or start again in another run.dir", where=store.folder)


def _attempt(action: Callable[[Callable[[], bool]], T], world: Axis, device: torch.device) -> tuple[T | None, str]:
    """Return (result, "") if all ranks succeed, else (None, the message of the first rank that found damage).

    Other errors, such as a disk that does not answer, are raised: they are no reason to use an older step.
    """
    stop = Event()
    with ThreadPoolExecutor(max_workers=1, thread_name_prefix="load") as thread:
        future = thread.submit(action, stop.is_set)
        try:
            until_all(world, device, lambda seconds: not wait([future], seconds).not_done)
        except BaseException:  # such as a signal; leaving the block waits for the thread, so stop it
            stop.set()
            raise
    error = future.exception()
    fault = str(error) if isinstance(error, UserError) and error.code == 410 else ""
    result = agree(world, device, lambda: None if fault else future.result())
    faults = [text.decode() for text in gather_bytes(fault.encode(), world, "agree", device)]
    first = next((text for text in faults if text), "")
    return (None, first) if first else (result, "")
