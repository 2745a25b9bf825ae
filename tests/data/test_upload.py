"""A step's micro-batches packed and sent by one copy, with a stand-in for pinned memory and for the device's queue."""

import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from megazero.builders.upload import Upload, views
from megazero.data.batch import MicroBatch
from megazero.data.loader import BatchLoader
from megazero.data.mixture import Mixture, Source
from megazero.plan.job import Bytes, Job
from megazero.plan.memory import batch
from megazero.plan.model import Shape
from tests.data.test_loader import windows_of

CPU = torch.device("cpu")


class Queue:
    """A device that has passed a mark when it is told so."""

    def __init__(self) -> None:
        self.marks: list[Queue.Place] = []

    class Place:
        done = False

        def query(self) -> bool:
            return self.done

    def mark(self, device: torch.device) -> Place:
        self.marks.append(Queue.Place())
        return self.marks[-1]


class Memory:
    """Host memory, and how much of it was asked for."""

    def __init__(self) -> None:
        self.blocks: list[Tensor] = []

    def allocate(self, size: int) -> Tensor:
        self.blocks.append(torch.zeros(size, dtype=torch.uint8))
        return self.blocks[-1]


class Copies(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[bool] = []  # of each copy whether it blocks

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func._schema.name in ("aten::copy_", "aten::_to_copy"):
            self.seen.append(not (len(args) > 2 and args[2]))
        return func(*args, **(kwargs or {}))


def equal(a: list[MicroBatch], b: list[MicroBatch]) -> bool:
    return all(
        (x.dtype == y.dtype and torch.equal(x, y)) if isinstance(x, Tensor) else x == y
        for one, other in zip(a, b, strict=True)
        for x, y in zip(vars(one).values(), vars(other).values(), strict=True)
    )


@pytest.fixture
def steps(make_dataset) -> list[list[MicroBatch]]:
    """The micro-batches of a few steps, with documents."""
    dataset = windows_of(make_dataset([list(range(d * 7, d * 7 + 7)) for d in range(60)]), 8, mask_eod=True)
    return [[dataset.micro_batch(np.array([s, s + m]), np.array([s, m])) for m in range(3)] for s in range(6)]


def upload_with(allocate: Callable[[int], Tensor], marked: Callable[[torch.device], Any]) -> Upload:
    upload: Any = Upload(CPU)
    upload.allocate, upload.marked = allocate, marked
    return upload


def test_one_copy_takes_all_and_what_comes_are_views(steps: list[list[MicroBatch]]) -> None:
    memory, queue = Memory(), Queue()
    send = upload_with(memory.allocate, queue.mark).pack(steps[0])
    with Copies() as copies:
        found = send()
    assert copies.seen == [False] and equal(found, steps[0]) and len(queue.marks) == 1
    storages = {x.untyped_storage()._cdata for batch in found for x in vars(batch).values() if isinstance(x, Tensor)}
    assert len(storages) == 1 and memory.blocks[0].untyped_storage()._cdata not in storages
    assert all(x.is_contiguous() for batch in found for x in vars(batch).values() if isinstance(x, Tensor))


def test_fields_that_are_not_there_stay_so(make_dataset) -> None:
    dataset = windows_of(make_dataset([list(range(100))]), 8)
    batch = dataset.micro_batch(np.array([1]), np.array([5]))
    (found,) = upload_with(Memory().allocate, lambda device: None).pack([batch])()
    assert found.positions_SB is None and found.documents is None and equal([found], [batch])


def test_a_buffer_is_written_again_only_when_it_has_been_read(steps: list[list[MicroBatch]]) -> None:
    """The third step waits in the loader's thread for the copy of the first, and for nothing else."""
    memory, queue = Memory(), Queue()
    upload = upload_with(memory.allocate, queue.mark)
    first, second = upload.pack(steps[0])(), upload.pack(steps[1])()
    assert len(memory.blocks) == 2
    packed = []
    thread = threading.Thread(target=lambda: packed.append(upload.pack(steps[2])), daemon=True)
    thread.start()
    time.sleep(0.05)
    assert not packed and equal(views(memory.blocks[0], steps[0]), steps[0]), "the first copy is still under way"
    queue.marks[0].done = True
    thread.join(10)
    assert equal(packed[0](), steps[2]) and len(memory.blocks) == 2, "the memory is used again"
    assert equal(first, steps[0]) and equal(second, steps[1]), "what has come is not changed by what comes later"


def test_a_loader_that_packs_gives_the_same_steps_in_any_order(make_dataset) -> None:
    dataset = windows_of(make_dataset([list(range(d * 9, d * 9 + 9)) for d in range(50)]), 8, mask_eod=True)
    mixture, sizes = Mixture([Source(None, dataset, 1, 3)]), {"global_batch": 12, "micro_batch": 3}
    upload = upload_with(Memory().allocate, lambda device: None)
    plain, packing = BatchLoader(mixture, **sizes), BatchLoader(mixture, **sizes, pack=upload.pack)
    order = (0, 1, 2, 2, 7, 8, 0, 9)
    kept = [packing.step(step) for step in order]
    assert all(equal(batches, plain.step(step)) for step, batches in zip(order, kept, strict=True))
    plain.close()
    packing.close()


def test_a_loader_can_be_closed_beside_a_device_that_hangs(make_dataset) -> None:
    """Its thread waits for a copy that is never made, and the process for its thread."""
    dataset, queue = windows_of(make_dataset([list(range(500))]), 8), Queue()
    upload = upload_with(Memory().allocate, queue.mark)
    loader = BatchLoader(
        Mixture([Source(None, dataset, 1, 0)]), global_batch=2, micro_batch=1, pack=upload.pack, stop=upload.stop
    )
    loader.step(0), loader.step(1)
    closing = threading.Thread(target=loader.close, daemon=True)
    closing.start()
    closing.join(10)
    assert not closing.is_alive()


@pytest.mark.parametrize("mask_eod", [False, True])
def test_a_plan_counts_what_is_sent(make_dataset, mask_eod: bool) -> None:
    """On an odd shape: every tensor is padded by itself."""
    length, micro_batch, micro_batches = 7, 3, 2
    dataset = windows_of(make_dataset([list(range(d * 7, d * 7 + 5)) for d in range(60)]), length, mask_eod=mask_eod)
    memory, rows = Memory(), np.arange(micro_batch)
    upload_with(memory.allocate, lambda device: None).pack([dataset.micro_batch(rows, rows)] * micro_batches)
    shape = Shape(1, 8, 1, 1, 8, 64, length)
    sizes = {"micro_batch": micro_batch, "global_batch": micro_batch * micro_batches}
    assert batch(Job(shape, Bytes(2, 4, 4), mask_eod=mask_eod, **sizes)) == len(memory.blocks[0])
