"""What is on a GPU is copied on a stream beside the computation, with a stand-in for the stream."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch import Tensor

from megazero.checkpoint import save, snapshot
from megazero.checkpoint.pieces import Piece
from megazero.checkpoint.progress import Progress
from megazero.checkpoint.snapshot import Snapshot
from megazero.checkpoint.store import Store
from megazero.comm.grid import single

PROGRESS = Progress(updates=1, skipped=0, overflows=0, next_sample=8, loss_scale=None, good_steps=0)


class Stream:
    """A side stream that notes what it is told."""

    def __init__(self, seen: list[str]):
        self.seen, self.inside = seen, False

    @contextmanager
    def queued(self) -> Iterator[None]:
        self.inside = True
        yield
        self.inside = False
        self.seen.append("queued")

    def join(self) -> None:
        self.seen.append("join")

    def wait(self) -> None:
        self.seen.append("wait")


def far(x: Tensor) -> bool:
    return x.dtype == torch.float64  # stands for what is on a GPU


def allocate(size: int) -> Tensor:
    return torch.zeros(size, dtype=torch.uint8)


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return what the stand-in for a stream hears; fp64 stands for tensors on a GPU."""
    told: list[str] = []
    monkeypatch.setattr(snapshot, "on_device", far)
    monkeypatch.setattr(save, "on_device", far)
    monkeypatch.setattr(snapshot, "pinned_bytes", allocate)
    monkeypatch.setattr(snapshot, "SideStream", lambda device: Stream(told))
    return told


def test_the_gpu_s_are_queued_at_once_and_the_host_s_copied_by_the_thread(seen: list[str]) -> None:
    sources = [torch.full((3,), 1.0), torch.full((4,), 2.0, dtype=torch.float64), torch.full((2, 2), 3.0)]
    taken = Snapshot(sources)
    memory = [copy.data_ptr() for copy in taken.copies]
    for number in (1.0, 5.0):
        for source in sources:
            source.fill_(number)
        taken.begin()
        assert seen == ["queued"] and torch.equal(taken.copies[1], sources[1])
        taken.copy_near()
        taken.join()
        sources[1].zero_()  # an update, behind the copy on the device
        taken.join()  # the next step's, which has nothing to wait for
        taken.arrive()
        assert seen == ["queued", "join", "wait"]
        assert [float(copy.view(-1)[0]) for copy in taken.copies] == [number] * 3
        assert [copy.data_ptr() for copy in taken.copies] == memory, "the memory is used again"
        seen.clear()


def test_without_a_gpu_there_is_no_stream() -> None:
    taken = Snapshot([torch.ones(3)])
    taken.begin()
    assert not torch.equal(taken.copies[0], torch.ones(3)) or taken._stream is None
    taken.copy_near()
    taken.join()
    taken.arrive()
    assert torch.equal(taken.copies[0], torch.ones(3))


def test_a_save_waits_for_its_copies_and_the_update_behind_it_does_on_the_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seen: list[str]
) -> None:
    """The host goes on from `settle` when the rest has been copied; the file is written behind the stream."""
    write = save.write_shard
    monkeypatch.setattr(save, "write_shard", lambda *arguments: [seen.append("write"), write(*arguments)][1])
    tensors = {kind: torch.ones(4, dtype=torch.float64) for kind in ("weight", "exp_avg", "exp_avg_sq")}
    holdings = [save.ShardState([Piece("a", 0, 4, 0)], tensors)]
    place, world, cpu = Store(tmp_path / "checkpoints", "token"), single()["world"], torch.device("cpu")
    saver = save.Checkpoints(place, holdings, world, cpu, every=None, background=True, conclude=None, tidy=None)
    assert saver.copy_bytes == 3 * 4 * 8
    saver.save(1, PROGRESS)
    saver.settle()
    assert seen[0] == "queued" and seen.count("join") == 1
    saver.finish()
    assert [what for what in seen if what != "join"] == ["queued", "wait", "write"]
    saver.settle()
    assert seen.count("join") == 1, "no step without a save waits"
    saver.close()


def test_copies_do_not_block(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bool] = []

    class Target:
        def copy_(self, source: Tensor, non_blocking: bool) -> None:
            asked.append(non_blocking)

    snapshot.copy_all([(torch.ones(1), Target())])  # type: ignore[list-item]
    assert asked == [True]
