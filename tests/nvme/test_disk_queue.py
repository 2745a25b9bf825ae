"""Transfers arrive whole and in their place, whichever way the system is asked, and every error is that of its own."""

import errno
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from megazero.nvme.disk_queue import ALIGNMENT, ENGINES, DiskQueue, aligned
from megazero.nvme.files import UnnamedFile

BLOCK = 4 * ALIGNMENT


@pytest.fixture(params=ENGINES)
def queue(request: pytest.FixtureRequest) -> Iterator[DiskQueue]:
    try:
        found = DiskQueue(request.param, depth=3, block=BLOCK)
    except OSError:
        pytest.skip(f"{request.param} is refused here")
    yield found
    found.close()


@pytest.fixture
def file(tmp_path: Path) -> Iterator[UnnamedFile]:
    found = UnnamedFile(tmp_path)
    yield found
    found.close()


def values(size: int, seed: int = 0) -> Tensor:
    memory = aligned(size)
    memory.copy_(torch.arange(size).mul_(7 + 2 * seed).add_(seed).to(torch.uint8))
    return memory


@pytest.mark.parametrize("blocks", [0, 1, 2, 9])
def test_what_is_written_is_read(queue: DiskQueue, file: UnnamedFile, blocks: int) -> None:
    size = blocks * BLOCK + ALIGNMENT * (blocks % 2)
    source = values(size)
    assert queue.write(file.handle, ALIGNMENT, source).wait() is source
    read = queue.read(file.handle, ALIGNMENT, aligned(size))
    assert torch.equal(read.wait(), source) and torch.equal(read.wait(), source)


def test_many_transfers_in_any_order(queue: DiskQueue, file: UnnamedFile) -> None:
    """More blocks than the system has at a time, of files and places that cross."""
    sources = [values(5 * BLOCK, number) for number in range(8)]
    writes = [queue.write(file.handle, number * 5 * BLOCK, source) for number, source in enumerate(sources)]
    for write in reversed(writes):
        write.wait()
    reads = [queue.read(file.handle, number * 5 * BLOCK, aligned(5 * BLOCK)) for number in range(8)]
    assert all(torch.equal(read.wait(), source) for read, source in zip(reads, sources, strict=True))


def test_an_early_end_of_a_file_is_an_error(queue: DiskQueue, file: UnnamedFile) -> None:
    queue.write(file.handle, 0, values(2 * BLOCK)).wait()
    beyond, within = queue.read(file.handle, 0, aligned(3 * BLOCK)), queue.read(file.handle, 0, aligned(2 * BLOCK))
    with pytest.raises(OSError, match="the file ends too early") as caught:
        beyond.wait()
    assert caught.value.errno == errno.ENODATA
    assert torch.equal(within.wait(), values(2 * BLOCK)), "the error is that of its own transfer"


def test_a_full_disk_is_an_error(queue: DiskQueue, file: UnnamedFile) -> None:
    full = os.open("/dev/full", os.O_RDWR)
    try:
        with pytest.raises(OSError, match="No space left on device"):
            queue.write(full, 0, values(5 * BLOCK)).wait()
        queue.write(file.handle, 0, values(BLOCK)).wait()
    finally:
        os.close(full)


def test_a_file_that_is_not_there_is_an_error(queue: DiskQueue) -> None:
    with pytest.raises(OSError, match="Bad file descriptor"):
        queue.read(10**6, 0, aligned(BLOCK)).wait()


def test_a_closed_queue_has_ended_what_was_under_way(queue: DiskQueue, file: UnnamedFile) -> None:
    source = values(7 * BLOCK, 3)
    queue.write(file.handle, 0, source)
    queue.close()
    queue.close()
    assert file.direct or os.pread(file.handle, 7 * BLOCK, 0) == bytes(source.numpy())


def test_a_file_without_a_name_leaves_nothing(tmp_path: Path) -> None:
    file = UnnamedFile(tmp_path)
    file.reserve(1 << 20)
    assert os.fstat(file.handle).st_size == 1 << 20 and list(tmp_path.iterdir()) == []
    file.close()


def test_room_that_is_not_there_is_told_before_it_is_needed(tmp_path: Path) -> None:
    file = UnnamedFile(tmp_path)
    with pytest.raises(OSError):
        file.reserve(1 << 60)
    file.close()


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        UnnamedFile(tmp_path / "nowhere")
