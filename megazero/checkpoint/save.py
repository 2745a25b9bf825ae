"""Save checkpoints: all ranks write their parts in parallel, and the first rank commits the step by a rename.

    1  snapshot   the state to save is copied to host memory, if it is on a GPU or the save runs in the background; then
                  the copy overlaps with the next step's passes: the state does not change before the next update,
                  which waits for the copy (`snapshot.py`)
    2  shard      each rank writes its file into the staging folder, hashes every block on the way, and flushes it
    3  part       each rank writes a small file that lists the shard's content and hashes
    4  manifest   the first rank waits for all parts, merges them into one manifest, and flushes it
    5  commit     the first rank renames the folder to the step's name; from then on the step exists, complete
    6  retention  old steps are deleted, if a kept one has been read back and verified

One background thread of each rank does all of this except the wait for the snapshot, even if training waits for the
save. It communicates with other ranks only through files, because the collectives belong to the training thread, which
settles a save before the next update and finishes it on all ranks or on none.
"""

import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from megazero.base.errors import UserError
from megazero.base.files import announce_file, flush_folder
from megazero.checkpoint.manifest import WrittenShard, read_part, shard_name
from megazero.checkpoint.pieces import Piece, ShardState
from megazero.checkpoint.progress import Progress
from megazero.checkpoint.shard import key_of, plan_shard, write_shard
from megazero.checkpoint.snapshot import Snapshot, on_device
from megazero.checkpoint.store import Store
from megazero.comm.agreement import agree, until_all
from megazero.comm.collectives import all_gather
from megazero.comm.grid import Axis

_LOOK = 0.005  # seconds between two checks for other ranks' parts, at first
_SELDOM = 0.25  # the longest such interval
_SLOW_DISK = 2e8  # bytes/s
_PATIENCE = 10.0  # seconds to wait for a save under way when a run fails


@dataclass(frozen=True, eq=False)
class _Entry:
    """The values of one kind (weight, optimizer state) of one piece; a meta tensor stands for values on disks."""

    kind: str
    piece: Piece
    values: Tensor
    holding: ShardState

    def in_memory(self) -> Iterator[Tensor]:
        """Yield the values, in several tensors if they are on disks, to limit memory."""
        disks = self.holding.disks
        if disks is None:
            yield self.values
            return
        for part in self.values.split(disks.window):
            read = torch.empty(len(part), dtype=part.dtype)
            disks.bring(part, read, "checkpoint")
            yield read


class Checkpoints:
    """Saves a run's checkpoints: each rank writes its part, rank 0 commits.

    Args:
        store: the checkpoints of the run.
        holdings: the state that this rank saves and no other rank does.
        world: all ranks.
        every: steps between checkpoints; None: only on request.
        background: copy the state first, and train on while the files are written.
        conclude: on rank 0, the function (step, progress, parts of all ranks) that commits a step, called when all
            parts are on the disk; None on other ranks.
        tidy: on rank 0, deletes old steps, in the background after a commit; its argument returns True if it must stop.

    Attributes:
        saved: the last step whose save was begun, or the step in the run's own folder that it resumed from; else None.
        seconds: from the start to the commit of the last save that this process committed; before, an estimate.
    """

    def __init__(
        self,
        store: Store,
        holdings: Sequence[ShardState],
        world: Axis,
        device: torch.device,
        *,
        every: int | None,
        background: bool,
        conclude: Callable[[int, Progress, list[WrittenShard]], None] | None,
        tidy: Callable[[Callable[[], bool]], None] | None,
    ):
        self._store, self._world, self._device, self._conclude, self._tidy = store, world, device, conclude, tidy
        self._every, self._background = every, background
        self.saved: int | None = None
        here = [holding for holding in holdings if holding.disks is None]
        sources = [holding.tensors[kind] for holding in here for kind in holding.kinds]
        # State on a GPU has to be copied to the host before it can be written.
        self._snapshot = Snapshot(sources) if background or any(on_device(source) for source in sources) else None
        self._entries = list(_entries(holdings, iter(sources if self._snapshot is None else self._snapshot.copies)))
        self._on_disks = [holding for holding in holdings if holding.disks is not None and holding.pieces]
        self._copied, self._give_up = threading.Event(), threading.Event()
        self._copied.set()
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="saver")
        self._tidying = ThreadPoolExecutor(max_workers=1, thread_name_prefix="tidy")
        self._under_way: list[Future[None]] = []  # this rank's part; on rank 0 also the commit
        self._tidied: list[Future[None]] = []
        self._began, self.seconds = 0.0, sum(entry.values.nbytes for entry in self._entries) / _SLOW_DISK

    @property
    def copy_bytes(self) -> int:
        """Return the bytes of host memory that snapshots use."""
        return sum(copy.nbytes for copy in self._snapshot.copies) if self._snapshot is not None else 0

    def due(self, done: int) -> bool:
        """Return True if a checkpoint is due after step `done`, counted from 1."""
        return self._every is not None and done % self._every == 0

    def save(self, done: int, progress: Progress) -> None:
        """Start to save the state after step `done`, if it is not saved; wait unless `background`. Collective.

        With `background` the tensors must not change before `settle` returns.

        Raises:
            UserError: this save or the previous one failed: 403, a file could not be written; 423, the run's folder is
                gone; 302, a value is not finite; 608, an update wrote state on disks only in part.
            FailedElsewhere: another rank's save failed.
        """
        if self.saved == done:
            return
        self.finish()
        self.saved = done
        self._copied.clear()
        if self._snapshot is not None:
            self._snapshot.begin()
        self._began = time.monotonic()
        self._under_way = [self._thread.submit(self._write, done)]
        if self._conclude is not None:
            self._under_way.append(self._thread.submit(self._wait_and_conclude, done, progress))
        if not self._background:
            self.finish()

    def settle(self) -> None:
        """Wait until the tensors may change: until the snapshot is taken or, without one, the file is complete."""
        self._copied.wait()
        if self._snapshot is not None:
            self._snapshot.join()

    @property
    def failed(self) -> bool:
        """Return whether this rank's save has failed; `finish` raises its error."""
        return any(future.done() and future.exception() is not None for future in self._under_way)

    def finish(self) -> None:
        """Wait until the save under way is committed. Collective; raises the errors of `save`."""
        if self.saved is None or not self._under_way:
            return
        until_all(self._world, self._device, self._written)
        ended, self._under_way = self._under_way, []
        try:
            agree(self._world, self._device, lambda: [future.result() for future in ended])
        except UserError:  # all ranks have stopped writing
            self._store.abandon(self.saved)
            raise

    def tidy(self, patience: float = math.inf) -> None:
        """Wait until old steps have been deleted. Collective; call it after `finish`.

        Args:
            patience: seconds after which the remaining steps are left for another job.
        """
        end = time.monotonic() + patience

        def ready(seconds: float) -> bool:
            left = end - time.monotonic()
            return not wait(self._tidied, max(min(seconds, left), 0.0)).not_done or left <= 0

        until_all(self._world, self._device, ready)

    def close(self) -> None:
        """End the background threads; give up a save that is not committed within _PATIENCE seconds."""
        wait(self._under_way, _PATIENCE)
        self._give_up.set()
        for thread in (self._thread, self._tidying):
            thread.shutdown(cancel_futures=True)

    def _written(self, seconds: float) -> bool:
        ended = not wait(self._under_way, seconds, FIRST_EXCEPTION).not_done
        failed = torch.tensor([self.failed], dtype=torch.int64, device=self._device)
        if all_gather(failed, self._world, "agree").any():
            self._give_up.set()  # rank 0 must not wait for parts of failed ranks
        return ended

    def _write(self, step: int) -> None:
        staging = self._store.staging(step)
        try:
            if self._snapshot is not None:
                self._snapshot.copy_near()
                if not self._on_disks:  # state on disks has no snapshot: the next update waits for the whole file
                    self._copied.set()
                self._snapshot.arrive()
            self._store.folder.mkdir(exist_ok=True)  # without parents: if the run's folder was moved away, fail
            staging.mkdir(exist_ok=True)
            part = self._write_shard(step, staging)
            flush_folder(staging)
            # The first rank may commit, and so rename the folder, as soon as it sees the part.
            announce_file(staging / _part_name(self._world.rank), part.model_dump_json().encode())
        except OSError as error:
            raise self._not_saved(error.strerror, step) from None
        finally:
            self._copied.set()

    def _write_shard(self, step: int, staging: Path) -> WrittenShard:
        self._require_whole_updates(step)
        keys = [key_of(e.kind, e.piece.name, e.piece.start, e.piece.stop) for e in self._entries]
        tensors = [(key, e.values.dtype, e.values.numel()) for key, e in zip(keys, self._entries, strict=True)]
        rank = self._world.rank
        beginning, places = plan_shard(tensors, {"megazero": f"step {step}, rank {rank} of {self._world.size}"})
        shard = write_shard(staging / shard_name(rank), beginning, self._finite_values(step))
        rows: dict[Piece, list[int]] = {}
        for entry, place in zip(self._entries, places, strict=True):  # a piece's kinds follow in their order
            rows.setdefault(entry.piece, [rank, entry.piece.start, entry.piece.stop]).append(place)
        written: dict[str, list[list[int]]] = {}
        for piece, row in rows.items():
            written.setdefault(piece.name, []).append(row)
        return WrittenShard(shard=shard, tensors=written)

    def _finite_values(self, step: int) -> Iterator[Tensor]:
        """Yield the values of all entries. Raises UserError 302 if values other than buffers are not finite."""
        for entry in self._entries:
            for values in entry.in_memory():
                # Each value is checked only if their sum is not finite: it may have overflowed.
                if not (entry.holding.any_value or values.sum().isfinite() or values.isfinite().all()):
                    what = f"not saved: {entry.kind} of {entry.piece.name} is not finite after the last update"
                    do = "lower optimizer.lr and resume from an earlier checkpoint"
                    raise UserError(302, f"{what}; earlier steps are intact", do, where=self._store.folder, step=step)
                yield values

    def _require_whole_updates(self, step: int) -> None:
        """Refuse state on disks that an update has written only in part. Raises UserError 608."""
        for holding in self._on_disks:
            assert holding.disks is not None
            seen = set[int]().union(*map(holding.disks.versions, holding.tensors.values()))
            if len(seen) > 1:
                name, updates = holding.pieces[0].name, " and ".join(map(str, sorted(seen)))
                what = f"not saved: {name} and its moments on disks have had different numbers of updates, {updates}"
                do = "resume from an earlier checkpoint, which is intact"
                raise UserError(608, what, do, where=self._store.folder, step=step)

    def _not_saved(self, why: str | None, step: int) -> UserError:
        code, what = 403, f"checkpoint not saved: {why}; earlier ones are intact"
        if not self._store.folder.parent.is_dir():
            code, what = 423, "checkpoint not saved: the run's folder was deleted or moved during training"
        do = "fix that, and run again with checkpoint.resume=auto"
        return UserError(code, what, do, where=self._store.folder, step=step)

    def _wait_and_conclude(self, step: int, progress: Progress) -> None:
        assert self._conclude is not None, "rank 0"
        staging = self._store.staging(step)
        parts, pause = [], _LOOK
        try:
            for rank in range(self._world.size):
                path = staging / _part_name(rank)
                while not path.exists():
                    if self._give_up.wait(pause):
                        return  # the failed ranks report the reason
                    pause = min(1.5 * pause, _SELDOM)
                parts.append(read_part(path))
                path.unlink()
            self._conclude(step, progress, parts)
            self.seconds = time.monotonic() - self._began
            if self._tidy is not None:
                self._tidied = [self._tidying.submit(self._tidy, self._give_up.is_set)]
        except OSError as error:
            raise self._not_saved(error.strerror, step) from None


def _entries(holdings: Sequence[ShardState], buffers: Iterator[Tensor]) -> Iterator[_Entry]:
    """Yield the entries in file order: by unit, then kind, then piece; `buffers` has the values in memory, in order."""
    for holding in holdings:
        for kind in holding.kinds:
            buffer = next(buffers) if holding.disks is None else holding.tensors[kind]
            for piece in holding.pieces:
                yield _Entry(kind, piece, buffer[piece.at : piece.at + piece.stop - piece.start], holding)


def _part_name(rank: int) -> str:
    return f"part_{rank:05d}.json"
