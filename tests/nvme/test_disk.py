"""Buffers on disks hold what memory would, in bounded memory; what a disk does wrong is found, told, or tried again."""

import errno
import os
import resource
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megazero.base.errors import UserError
from megazero.checkpoint.pieces import Piece as CheckpointPiece
from megazero.checkpoint.progress import Progress
from megazero.checkpoint.save import Checkpoints, ShardState
from megazero.checkpoint.store import Store
from megazero.comm.grid import single
from megazero.comm.ledger import DISK, Ledger
from megazero.nvme.disk import Disk
from megazero.nvme.disk_queue import DiskQueue, Transfer

PIECE = 1 << 12
DTYPES = (torch.float32, torch.bfloat16, torch.float64)


class Faulty(DiskQueue):
    """A queue whose next transfers fail."""

    fails: Sequence[str] = ()

    def __init__(self, **options: int):
        super().__init__(**options)  # type: ignore[arg-type]
        self._kinds: dict[int, str] = {}

    def _submit(self, file: int, offset: int, tensor: Tensor, *, write: bool) -> Transfer:
        found = super()._submit(file, offset, tensor, write=write)
        self._kinds[found._ticket] = "write" if write else "read"
        return found

    def wait_for(self, ticket: int) -> int:
        error, kind = super().wait_for(ticket), self._kinds.pop(ticket)
        if self.fails and self.fails[0] == kind:
            self.fails = self.fails[1:]
            return errno.EIO
        return error


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    found = of(tmp_path)
    yield found
    found.close()


def of(*folders: Path, queue: DiskQueue | None = None, memory: int = 1 << 20) -> Disk:
    return Disk(folders, Ledger(), memory, queue or Faulty(depth=4, block=1 << 13), window=PIECE)


def counted(numel: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed)).to(dtype)


def whole(disk: Disk, handle: Tensor) -> Tensor:
    found = torch.empty(handle.shape, dtype=handle.dtype)
    disk.bring(handle, found, "test")
    return found


def double(disk: Disk, handle: Tensor) -> None:
    """Update a buffer."""
    for _, (x,) in disk.windows([(handle, "update")], "test"):
        x.mul_(2)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("numel", [0, 1, PIECE - 1, PIECE, 3 * PIECE + 17])
def test_slices_of_any_place_are_as_in_memory(disk: Disk, numel: int, dtype: torch.dtype) -> None:
    handle, memory = disk.zeros(numel, dtype, "test"), torch.zeros(numel, dtype=dtype)
    draw = torch.Generator().manual_seed(numel)
    for number in range(12):
        first, last = sorted(torch.randint(0, numel + 1, (2,), generator=draw).tolist())
        values = counted(last - first, dtype, number)
        memory[first:last] = values
        disk.send(values, handle[first:last], "test")
        first, last = sorted(torch.randint(0, numel + 1, (2,), generator=draw).tolist())
        assert torch.equal(whole(disk, handle[first:last]), memory[first:last])
    assert torch.equal(whole(disk, handle), memory)


def test_several_disks_and_buffers(tmp_path: Path) -> None:
    folders = [tmp_path / str(number) for number in range(3)]
    for folder in folders:
        folder.mkdir()
    disk = of(*folders)
    sources = [counted(7 * PIECE + number, torch.float32, number) for number in range(4)]
    handles = [disk.zeros(len(x), x.dtype, "test") for x in sources]
    for x, handle in zip(sources, handles, strict=True):
        disk.send(x, handle, "test")
    disk.settle()
    assert all(torch.equal(whole(disk, handle), x) for x, handle in zip(sources, handles, strict=True))
    sizes = [os.fstat(file.handle).st_size for file in disk._files]
    assert max(sizes) < 1.5 * min(sizes), "in turns"
    assert all(list(folder.iterdir()) == [] for folder in folders), "without names"
    disk.close()


@pytest.mark.parametrize("numel", [PIECE // 2, 9 * PIECE + 5])
def test_an_update_in_windows_is_the_one_in_memory(disk: Disk, numel: int) -> None:
    master, moment = counted(numel, torch.float32, 1), counted(numel, torch.float32, 2)
    gradient, rounded = counted(numel, torch.bfloat16, 3), torch.zeros(numel, dtype=torch.bfloat16)
    handles = [disk.zeros(numel, x.dtype, "test") for x in (master, moment, gradient)]
    for x, handle in zip((master, moment, gradient), handles, strict=True):
        disk.send(x, handle, "test")
    for _ in range(3):
        seen = 0
        flats = list(zip([*handles, rounded], ("update", "update", "read", "write"), strict=True))
        for where, (p, m, g, r) in disk.windows(flats, "test"):
            assert where.start == seen and len(p) == len(r) == where.stop - where.start
            seen = where.stop
            m.mul_(0.9).add_(g.float())
            p.sub_(m, alpha=0.1)
            r.copy_(p)
        assert seen == numel
        moment.mul_(0.9).add_(gradient.float())
        master.sub_(moment, alpha=0.1)
    for x, handle in zip((master, moment, gradient), handles, strict=True):
        assert torch.equal(whole(disk, handle), x)
    assert torch.equal(rounded, master.to(torch.bfloat16))
    assert [disk.versions(handle) for handle in handles] == [{3}, {3}, {0}]
    sent, back = disk._ledger.traffic[DISK]["test out"], disk._ledger.traffic[DISK]["test back"]
    assert sent.bytes_sent == numel * (4 + 4 + 2) + 3 * numel * 8
    assert back.bytes_sent == 3 * numel * 10 + numel * 10


def test_memory_for_pieces_is_bounded(tmp_path: Path) -> None:
    disk = of(tmp_path, memory=8 * PIECE * 4)
    handles = [disk.zeros(40 * PIECE, torch.float32, "test") for _ in range(2)]
    for handle in handles:
        disk.send(torch.ones(40 * PIECE), handle, "test")
    for _, (a, b) in disk.windows([(handle, "update") for handle in handles], "test"):
        a.add_(b)
    assert disk._ledger.bytes["host_pieces"].peak <= 8 * PIECE * 4
    assert disk._ledger.bytes["nvme_test"].now == 80 * PIECE * 4
    disk.close()


def test_other_bytes_than_were_written_are_found(disk: Disk, tmp_path: Path) -> None:
    handle = disk.zeros(3 * PIECE, torch.float32, "test")
    disk.send(counted(3 * PIECE, torch.float32), handle, "test")
    disk.settle()
    (file,) = disk._files
    with open(f"/proc/self/fd/{file.handle}", "r+b", buffering=0) as other:
        other.seek(PIECE * 4 + 100)
        other.write(b"\x55")
    assert torch.equal(whole(disk, handle[:PIECE]), counted(3 * PIECE, torch.float32)[:PIECE])
    with pytest.raises(UserError, match=r"MZ-603.*expected xxh3 [0-9a-f]{16}, got"):
        whole(disk, handle[PIECE:])


def test_a_write_that_fails_ends_it(disk: Disk) -> None:
    queue: Any = disk._queue
    handle = disk.zeros(3 * PIECE, torch.float32, "test")
    double(disk, handle)
    queue.fails = ["write"]
    with pytest.raises(UserError, match=r"MZ-604.*could not be written: Input/output error"):
        double(disk, handle)
    with pytest.raises(UserError, match=r"MZ-604"):
        disk.settle()
    assert disk.versions(handle) == {1}, "what was not written is not counted"


def test_a_read_that_fails_is_told(disk: Disk) -> None:
    queue: Any = disk._queue
    handle = disk.zeros(PIECE, torch.float32, "test")
    disk.send(counted(PIECE, torch.float32), handle, "test")
    disk.settle()
    queue.fails = ["read"]
    with pytest.raises(UserError, match=r"MZ-603.*cannot be read: Input/output error"):
        whole(disk, handle)


def test_a_disk_without_room_is_told_before_anything_is_written(disk: Disk) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (PIECE * 4, before[1]))
    try:
        disk.zeros(PIECE, torch.float32, "test")
        with pytest.raises(
            UserError, match=r"MZ-602.*expected room for 32,768 bytes of this rank, got: File too large"
        ):
            disk.zeros(PIECE, torch.float32, "test")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    """Nor are the files left open that were made before."""
    before = os.listdir("/proc/self/fd")
    with pytest.raises(UserError, match=r"MZ-601.*No such file or directory"):
        of(tmp_path, tmp_path / "nowhere")
    assert os.listdir("/proc/self/fd") == before


def test_a_handle_cannot_be_computed_with(disk: Disk) -> None:
    handle = disk.zeros(8, torch.float32, "test")
    with pytest.raises((NotImplementedError, RuntimeError)):
        (handle + 1).tolist()
    assert isinstance(disk._queue.read(disk._files[0].handle, 0, torch.empty(0, dtype=torch.uint8)), Transfer)


@pytest.mark.parametrize("ends", ["break", "error", "read"])
def test_windows_that_end_early_give_their_memory_back(disk: Disk, ends: str) -> None:
    """While reads are under way: the system may not write into what others have by then."""
    queue: Any = disk._queue
    handle, x = disk.zeros(20 * PIECE, torch.float32, "test"), counted(20 * PIECE, torch.float32)
    disk.send(x, handle, "test")
    disk.settle()
    taken = disk._ledger.bytes["host_pieces"].now
    for _ in range(5):
        queue.fails = ["read"] if ends == "read" else []
        try:
            for _, _ in disk.windows([(handle, "update")], "test"):
                if ends == "break":
                    break
                if ends == "error":
                    raise ValueError
        except (ValueError, UserError):
            pass
        assert not queue._under_way and disk._ledger.bytes["host_pieces"].now == taken
    queue.fails = []
    assert torch.equal(whole(disk, handle), x)


@pytest.mark.parametrize("half", ["of one window", "of one buffer", "nothing"])
def test_a_half_update_is_not_saved(disk: Disk, tmp_path: Path, half: str) -> None:
    """One that ended behind its first window, and one that has reached a unit's masters and not its moments."""
    place = Store(tmp_path / "checkpoints", "token")
    handles = {kind: disk.zeros(3 * PIECE, torch.float32, "test") for kind in ("weight", "exp_avg", "exp_avg_sq")}
    for handle in handles.values():
        double(disk, handle)
    if half == "of one buffer":
        double(disk, handles["weight"])
    elif half == "of one window":
        for number, _ in enumerate(disk.windows([(handle, "update") for handle in handles.values()], "test")):
            if number == 1:  # the first is on its way back
                break
        disk.settle()
    holding = ShardState([CheckpointPiece("a", 0, 3 * PIECE, 0)], handles, disks=disk)
    world, cpu = single()["world"], torch.device("cpu")
    saver = Checkpoints(place, [holding], world, cpu, every=None, background=True, conclude=None, tidy=None)
    place.folder.mkdir()
    saver.save(1, Progress(updates=1, skipped=0, overflows=0, next_sample=8, loss_scale=None, good_steps=0))
    if half == "nothing":
        saver.finish()
    else:
        with pytest.raises(
            UserError, match=r"MZ-608.* a and its moments on disks have had different numbers of updates, 1 and 2"
        ) as caught:
            saver.finish()
        assert "\n" not in str(caught.value)
    assert (place.staging(1) / "part_00000.json").exists() == (half == "nothing")
    saver.close()
