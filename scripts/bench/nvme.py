"""Reads and writes of a disk by our queue beside plain threads that do the same, what verified buffers add, and a step.

    python scripts/bench/nvme.py [--folder DIR] [--megabytes 512] [--depth 16] [--blocks 12]
                                 [--launches 3] [--pairs 21] [--json] [--save]

Every system has a file of its own on the disk of --folder (the current one), opened for direct I/O, and reads or writes
all of it from its first byte to its last, in blocks of 1 MiB of which --depth are with the system at a time:

    threads of pread, pwrite   as fio's sequential jobs with its psync engine: so many threads, each with the next block
    queue, io_uring / threads  csrc/disk_queue.cpp, by either engine
    buffers                    `nvme/disk.py`: pieces of 4 MiB through bounded memory, hashed when they are written,
                               verified when they are read, copied to or from a tensor
    update                     of four such buffers of a quarter each: read, changed in place, written back; the
                               reference is a read and a write of plain threads

    step                       a GPT of --blocks blocks of hidden size 768 (7 million parameters each), stage 3 on one
                               rank in fp32, with all its state on disks; beside the same step in memory, which is its
                               computation, and beside plain threads that read and write as many bytes as the step
                               does by its ledger, which is its I/O: of the larger of the two it should take at most
                               1.15; and beside DeepSpeed's stage 3 with all states on the disk, where its async_io
                               builds (it needs the headers of libaio)

What a disk's own cache takes is in the figures of all. Nothing is sent between ranks.
"""

import argparse
import importlib.util
import sys
import tempfile
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # so that it runs from any folder, uninstalled too

import os

import torch

from megazero.base.machine import return_freed_memory
from megazero.builders.assemble import build
from megazero.builders.job import job_of
from megazero.comm.grid import single
from megazero.comm.host import Host
from megazero.comm.ledger import DISK, Ledger
from megazero.config.schema import Batch, Config, Model, Offload, Zero, resolved
from megazero.kernels.select import choose
from megazero.nvme.disk import Disk
from megazero.nvme.disk_queue import BLOCK, ENGINES, DiskQueue, Engine, aligned
from megazero.nvme.files import UnnamedFile
from megazero.plan.traffic import traffic
from scripts.bench import data_parallel as peers
from scripts.bench.harness import Group, Pair, add_options, run
from scripts.bench.ours import CPU, LR, feeder
from scripts.bench.processes import Call, System

STAGING = 256 << 20  # bytes of memory for pieces
FLATS = 4
HIDDEN, HEADS, VOCAB, SEQ_LEN, MICRO = 768, 12, 1024, 128, 2  # of the GPT that takes steps
IN_MEMORY, ON_DISKS, ALONE, DEEPSPEED = "in memory", "on disks", "its bytes alone", "deepspeed, on disks"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("."))
    parser.add_argument("--megabytes", type=int, default=512)
    parser.add_argument("--depth", type=int, default=16)
    parser.add_argument("--blocks", type=int, default=12)
    add_options(parser)
    options = parser.parse_args()
    return run(groups_of(options.folder, options.megabytes << 20, options.depth, options.blocks), options)


def groups_of(folder: Path, size: int, depth: int, blocks: int) -> Iterator[Group]:
    """Yield a group for reads, one for writes, one for both and one for a step."""
    about = (folder, size, depth)
    for kind, way in (("read", "of pread"), ("write", "of pwrite")):
        write = kind == "write"
        systems = [System(f"threads {way}", plain, (*about, write), has_loss=False)]
        engines = ENGINES[ENGINES.index(best()) :]
        systems += [System(f"queue, {engine}", queued, (*about, engine, write), has_loss=False) for engine in engines]
        systems.append(System("buffers", buffered, (*about, write), has_loss=False))
        yield Group(f"{kind}, {size >> 20} MiB", systems)
    systems = [System("threads of pread and pwrite", both, about, has_loss=False)]
    yield Group(f"update, {size >> 20} MiB", [*systems, System("update", updated, about, has_loss=False)])
    systems = [System(ALONE, bytes_of_a_step, (folder, depth, blocks), has_loss=False)]
    systems += [System(name, step, (folder, depth, blocks, name == ON_DISKS)) for name in (IN_MEMORY, ON_DISKS)]
    pairs = [Pair(f"{ON_DISKS}, beside that {IN_MEMORY}", ON_DISKS, IN_MEMORY)]
    if deepspeed_uses_disks():
        systems.append(System(DEEPSPEED, deepspeed_step, (folder, depth, blocks)))
        pairs.append(Pair(f"{ON_DISKS}, beside {DEEPSPEED}", ON_DISKS, DEEPSPEED))
    yield Group(f"step, {blocks} blocks", systems, pairs=lambda _: pairs)


def best() -> Engine:
    """Return the best engine that works here."""
    with closing(DiskQueue(depth=1)) as queue:
        return queue.engine


def plain(folder: Path, size: int, depth: int, write: bool) -> Call:
    """Return a pass of threads that each read or write the next block."""
    file = UnnamedFile(folder)
    file.reserve(size)
    memory = [aligned(BLOCK).fill_(1).numpy().data for _ in range(depth)]

    def work(own: memoryview, places: Iterator[int], lock: threading.Lock) -> None:
        move: Callable[[int, list[memoryview], int], int] = os.pwritev if write else os.preadv
        while True:
            with lock:
                place = next(places, None)
            if place is None:
                return
            assert move(file.handle, [own], place) == BLOCK

    def once() -> float:
        places, lock = iter(range(0, size, BLOCK)), threading.Lock()
        threads = [threading.Thread(target=work, args=(own, places, lock)) for own in memory]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return 0.0

    if not write:
        queue, ones = DiskQueue(depth=depth), aligned(min(size, STAGING)).fill_(1)
        for first in range(0, size, STAGING):
            queue.write(file.handle, first, ones[: size - first]).wait()
        queue.close()
    return once


def both(folder: Path, size: int, depth: int) -> Call:
    """Return a read and a write of everything."""
    read, write = (plain(folder, size, depth, way) for way in (False, True))

    def once() -> float:
        return read() + write()

    return once


def queued(folder: Path, size: int, depth: int, engine: Engine, write: bool) -> Call:
    """Return one transfer of everything."""
    file, memory = UnnamedFile(folder), aligned(size).fill_(1)
    file.reserve(size)
    queue = DiskQueue(engine, depth=depth)
    queue.write(file.handle, 0, memory).wait()

    def once() -> float:
        (queue.write if write else queue.read)(file.handle, 0, memory).wait()
        return 0.0

    return once


def buffered(folder: Path, size: int, depth: int, write: bool) -> Call:
    """Return a copy of a tensor to a disk, or back."""
    disk = Disk([folder], Ledger(), STAGING, DiskQueue(depth=depth))
    x = torch.ones(size // 4)
    handle = disk.zeros(len(x), x.dtype, "test")
    disk.send(x, handle, "test")
    disk.settle()

    def once() -> float:
        if write:
            disk.send(x, handle, "test")
            disk.settle()
        else:
            disk.bring(handle, x, "test")
        return 0.0

    return once


def updated(folder: Path, size: int, depth: int) -> Call:
    """Return a change of all elements of some buffers."""
    disk = Disk([folder], Ledger(), STAGING, DiskQueue(depth=depth))
    handles = [disk.zeros(size // 4 // FLATS, torch.float32, "test") for _ in range(FLATS)]
    for handle in handles:
        disk.send(torch.ones(len(handle)), handle, "test")

    def once() -> float:
        for _, window in disk.windows([(handle, "update") for handle in handles], "test"):
            for values in window:
                values.mul_(0.5)
        return 0.0

    return once


def config_of(blocks: int, where: str) -> Config:
    """Return the config of the step, with all state in one place."""
    model = Model(layers=blocks, hidden=HIDDEN, heads=HEADS, vocab=VOCAB, seq_len=SEQ_LEN)
    offload = Offload.model_validate({"optimizer": where, "parameters": where, "path": "."})  # who builds opens it
    batch = Batch.model_validate({"global": MICRO, "micro": MICRO})
    return resolved(Config(model=model, batch=batch, zero=Zero(stage=3, offload=offload)))


def bytes_of_a_step(folder: Path, depth: int, blocks: int) -> Call:
    """Return a read and a write of as many bytes as a step reads and writes on disks by plan's formula."""
    sent = traffic(job_of(config_of(blocks, "nvme"), 1, apart=False), 0)[DISK]
    back, out = (sum(size for purpose, size in sent.items() if purpose.endswith(way)) for way in ("back", "out"))
    read, write = (plain(folder, -(-size // BLOCK) * BLOCK, depth, way) for size, way in ((back, False), (out, True)))

    def once() -> float:
        return read() + write()

    return once


def step(folder: Path, depth: int, blocks: int, on_disks: bool) -> Call:
    """Return a step of training."""
    if on_disks:
        return_freed_memory()  # as a run does
    config, grid = config_of(blocks, "nvme" if on_disks else "none"), single()
    ledger = grid.comm.ledger
    homes = {"nvme": Disk([folder], ledger, STAGING, DiskQueue(depth=depth))} if on_disks else {}
    built = build(config, grid, CPU, choose("auto", CPU, torch.float32), Host(CPU, ledger), homes=homes)
    feed = feeder(config, grid)
    steps = iter(range(1 << 30))

    def once() -> float:
        built.engine.begin_step()
        built.pipeline.train([feed(next(steps))], lambda batch: batch)
        return built.engine.finish_step(LR).loss.item()

    return once


def deepspeed_uses_disks() -> bool:
    """Return whether DeepSpeed is there and the library that its NVMe offload is built on."""
    return importlib.util.find_spec("deepspeed") is not None and Path("/usr/include/libaio.h").exists()


def deepspeed_step(folder: Path, depth: int, blocks: int) -> Call:
    """Return a step of DeepSpeed's with all states on the disk."""
    files = tempfile.TemporaryDirectory(dir=folder)
    work = peers.gpt(config_of(blocks, "none"), 1)
    once = peers.deepspeed_on_disks(work, files.name, depth, 0, 1, f"{files.name}/store")
    weakref.finalize(once, files.cleanup)
    return once


if __name__ == "__main__":
    sys.exit(main())
