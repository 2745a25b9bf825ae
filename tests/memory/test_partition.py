"""A slot is free when what was in it has been read, not when its reading has been queued."""

from pathlib import Path

import pytest
import torch

from megazero.comm.grid import Axis
from megazero.comm.host import Host
from megazero.comm.ledger import Ledger
from megazero.comm.pool import Pool
from megazero.memory.activation_store import Arena
from megazero.memory.partition import PartitionedStore
from megazero.nvme.disk import Disk
from megazero.nvme.disk_queue import DiskQueue

CPU = torch.device("cpu")


def store_of(slots: int, place: str, folder: Path) -> PartitionedStore:
    ledger = Ledger()
    if place == "disk":
        disk = Disk([folder], ledger, 1 << 20, DiskQueue(depth=4), window=4)
        arena = Arena(slots, 6, torch.float32, CPU, ledger, disk, torch.empty(6))
    else:
        host = Host(CPU, ledger, apart=True) if place == "host" else None
        arena = Arena(slots, 6, torch.float32, CPU, ledger, host)
    return PartitionedStore(arena, Axis("tensor"), Pool(torch.float32, CPU, ledger, "inputs"), CPU)


@pytest.mark.parametrize("place", ["device", "host", "disk"])
def test_a_slot_is_taken_until_its_reading_is_behind_the_computation(place: str, tmp_path: Path) -> None:
    """The second input is asked for, which starts to fetch the first: that slot must not be written to yet."""
    store = store_of(2, place, tmp_path)
    first, second = (store(torch.full((2, 3), float(number))) for number in (1, 2))
    assert not store.arena._free
    assert torch.equal(second.restore(), torch.full((2, 3), 2.0))
    assert len(store.arena._free) == 1, "the second's; the first's has been queued to be read"
    second.free()
    third = store(torch.full((2, 3), 3.0))  # takes the slot of the second
    assert not store.arena._free
    assert torch.equal(first.restore(), torch.full((2, 3), 1.0))
    first.free()
    assert torch.equal(third.restore(), torch.full((2, 3), 3.0))
    third.free()
    assert len(store.arena._free) == 2


@pytest.mark.parametrize("place", ["device", "host", "disk"])
def test_an_input_may_be_written_to_when_it_is_kept(place: str, tmp_path: Path) -> None:
    """On a CPU at once, whatever is on its way; nor is one lost that is kept right behind another."""
    store, x = store_of(8, place, tmp_path), torch.empty(2, 3)
    kept = [store(x.fill_(number)) for number in range(8)]
    for number, one in reversed(list(enumerate(kept))):
        assert torch.equal(one.restore(), torch.full((2, 3), float(number)))
        one.free()


@pytest.mark.parametrize("place", ["device", "host", "disk"])
def test_what_has_been_used_is_not_fetched_again(place: str, tmp_path: Path) -> None:
    store = store_of(2, place, tmp_path)
    first = store(torch.ones(2, 3))
    first.restore()
    first.free()
    second = store(torch.full((2, 3), 2.0))  # its `before` is the first
    assert torch.equal(second.restore(), torch.full((2, 3), 2.0)) and first._whole is None
    second.free()
    assert len(store.arena._free) == 2
