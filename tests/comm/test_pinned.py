"""Page-locked memory of exact size, with a stand-in for CUDA's runtime."""

import gc
import mmap

import pytest
import torch

from megazero.comm.host import Host
from megazero.comm.ledger import Ledger
from megazero.comm.pinned import fetched, pinned_bytes
from megazero.comm.pool import Pool


class Runtime:
    """Notes what is locked: bytes by address."""

    def __init__(self, error: int = 0) -> None:
        self.locked: dict[int, int] = {}
        self.error = error

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
        assert flags == 1 and address % mmap.PAGESIZE == 0
        self.locked[address] = size
        return self.error

    def cudaHostUnregister(self, address: int) -> int:
        del self.locked[address]
        return 0


def test_what_is_locked_is_what_was_asked_for() -> None:
    """torch's allocator of pinned memory would lock 8 MiB for 5."""
    runtime = Runtime()
    sizes = (5 << 20, 3 * mmap.PAGESIZE, 1000)
    blocks = [pinned_bytes(size, runtime) for size in sizes]
    assert [len(block) for block in blocks] == list(sizes) == list(runtime.locked.values())
    assert [block.data_ptr() for block in blocks] == list(runtime.locked)
    blocks[0].fill_(7)
    assert int(blocks[0].sum(dtype=torch.int64)) == 7 * sizes[0] and not blocks[1].any()


def test_it_is_unlocked_when_the_last_view_goes() -> None:
    runtime = Runtime()
    view = pinned_bytes(4096, runtime)[16:48].view(torch.float32)
    gc.collect()
    assert len(runtime.locked) == 1
    view.fill_(1.0)
    del view
    gc.collect()
    assert not runtime.locked


def test_memory_that_cannot_be_locked_is_an_error_of_memory() -> None:
    with pytest.raises(MemoryError, match="4,096 bytes of host memory: CUDA error 2"):
        pinned_bytes(4096, Runtime(error=2))


def test_nothing_is_of_size_nothing() -> None:
    assert pinned_bytes(0, Runtime()).shape == (0,)


def test_hosts_and_pools_take_theirs_from_there(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = Runtime()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    host = Host(torch.device("cpu"), ledger := Ledger(), apart=True)
    host._pinned = True  # as beside a GPU
    slots = host.empty((3, 1 << 18), torch.bfloat16, "inputs")
    assert slots.shape == (3, 1 << 18) and slots.is_contiguous() and slots.dtype == torch.bfloat16
    assert list(runtime.locked.values()) == [3 << 19] and ledger.bytes["host_inputs"].now == 3 << 19
    assert not host.zeros(5000, torch.float32, "optimizer").any()
    pool = Pool(torch.uint8, torch.device("cpu"), ledger, "host_staging", pinned=True)
    buffer = pool.take(5 << 20)
    pool.give(buffer)
    assert pool.take(5 << 20) is buffer and list(runtime.locked.values())[-1] == 5 << 20


def test_numbers_of_the_host_are_fetched_by_a_gpu_itself() -> None:
    calls: list[tuple[object, ...]] = []

    class Numbers:
        device = torch.device("cpu")

        def pin_memory(self) -> "Numbers":
            calls.append(("pin_memory",))
            return self

        def to(self, device: torch.device, **how: bool) -> "Numbers":
            calls.append((device.type, how))
            return self

    x = torch.ones(2)
    assert fetched(x, torch.device("cpu")) is x
    assert fetched(x, torch.device("meta")).is_meta
    fetched(Numbers(), torch.device("cuda"))  # type: ignore[arg-type]
    assert calls == [("pin_memory",), ("cuda", {"non_blocking": True})]
