"""A slot is free when what was in it has been read, not when its reading has been queued."""

import torch

from megazero.comm.grid import Axis
from megazero.comm.host import Host
from megazero.comm.ledger import Ledger
from megazero.comm.pool import Pool
from megazero.memory.activation_store import Arena
from megazero.memory.partition import PartitionedStore

CPU = torch.device("cpu")


def store_of(slots: int, host: Host | None = None) -> PartitionedStore:
    ledger = Ledger()
    arena = Arena(slots, 6, torch.float32, CPU, ledger, host)
    return PartitionedStore(arena, Axis("tensor"), Pool(torch.float32, CPU, ledger, "inputs"), CPU)


def test_a_slot_is_taken_until_its_reading_is_behind_the_computation() -> None:
    """The second input is asked for, which starts to fetch the first: that slot must not be written to yet."""
    for host in (None, Host(CPU, Ledger(), apart=True)):
        store = store_of(2, host)
        first, second = (store.keep(torch.full((2, 3), float(number))) for number in (1, 2))
        assert not store.arena._free
        assert torch.equal(second.restore(), torch.full((2, 3), 2.0))
        assert len(store.arena._free) == 1, "the second's; the first's has been queued to be read"
        second.free()
        third = store.keep(torch.full((2, 3), 3.0))  # takes the slot of the second
        assert not store.arena._free
        assert torch.equal(first.restore(), torch.full((2, 3), 1.0))
        first.free()
        assert torch.equal(third.restore(), torch.full((2, 3), 3.0))
        third.free()
        assert len(store.arena._free) == 2


def test_what_has_been_used_is_not_fetched_again() -> None:
    store = store_of(2)
    first = store.keep(torch.ones(2, 3))
    first.restore()
    first.free()
    second = store.keep(torch.full((2, 3), 2.0))  # its `before` is the first
    assert torch.equal(second.restore(), torch.full((2, 3), 2.0)) and first._coming is None
    second.free()
    assert len(store.arena._free) == 2
