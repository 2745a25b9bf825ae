"""Compare the memory that recompute, Pa and offload save, and their cost in time, with torch and DeepSpeed.

    python scripts/bench/memory.py [--launches 3] [--pairs 21] [--json] [--save]

    one process    ours without and with recompute (the core of attention, whole blocks), and a model of plain torch
                   modules without and with torch.utils.checkpoint
    tp=2           two tensor ranks: ours with recompute, Pa, Pa+cpu, and optimizer state on the host; the plain model
                   spread with DTensor, without and with torch.utils.checkpoint, and with DeepSpeed's checkpointing
                   (whole inputs, partitioned, partitioned and on the host). The reference is ours without any of
                   these. Ours treats the host as apart from the device, as with a GPU, so that every copy is made; on
                   a CPU, DeepSpeed does not copy to the host

The model has 8 blocks of hidden size 512 with 8 heads, vocabulary 8,192 (untied), sequences of 256 tokens, micro-batch
4, fp32, no dropout; every process has one thread.

Ours uses memory that the ranks of a host share, and the peers gloo's sockets over the loopback; tensor.py compares
both.
"""

import argparse
import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # run from any folder, also without an installation

from megazero.comm.grid import Grid, single
from megazero.comm.host import Host
from megazero.config.schema import Batch, Config, Memory, Model, Offload, Parallel, Zero, resolved
from scripts.bench.harness import Group, add_options, chosen, run
from scripts.bench.ours import CPU, SEQ_LEN, SHARED, SOCKETS, VOCAB, engine_step, grid_of
from scripts.bench.processes import Call, System
from scripts.bench.recomputing_peers import plain_step, spread_step

LAYERS, HIDDEN, HEADS, MICRO = 8, 512, 8, 4
MODES: dict[str, tuple[Memory, Offload]] = {
    "none": (Memory(), Offload()),
    "selective": (Memory(recompute="selective"), Offload()),
    "full": (Memory(recompute="full"), Offload()),
    "Pa": (Memory(recompute="full", partition=True), Offload()),
    "Pa+cpu": (Memory(recompute="full", partition=True, offload="cpu"), Offload()),
    "offload": (Memory(), Offload(optimizer="cpu")),
}
IN_ONE = ("none", "selective", "full")
PEERS = ("none", "torch", "deepspeed", "deepspeed partitioned", "deepspeed partitioned, cpu")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser)
    options = parser.parse_args()
    return run(groups_of(options.only), options)


def groups_of(only: list[str]) -> Iterator[Group]:
    """Yield the groups: one process; then two tensor ranks, in parts, as not all fit into memory together."""
    plain = config_of("none")
    systems = [
        System(f"plain torch{', torch.utils.checkpoint' * again}", plain_step, (plain, again)) for again in (0, 1)
    ]
    systems += [System(f"ours, {mode}", our_step, (mode,)) for mode in IN_ONE]
    yield Group("one process", chosen(systems, only))
    ours = [System(f"tp=2, ours, {mode}", our_rank, (mode,), ranks=2, transport=SHARED) for mode in MODES]
    yield Group("tp=2", chosen(ours, only))
    here = importlib.util.find_spec("deepspeed") is not None
    peers = [again for again in PEERS if here or not again.startswith("deepspeed")]
    spread = [
        System(f"tp=2, DTensor, {again}", spread_step, (plain, again), ranks=2, transport=SOCKETS) for again in peers
    ]
    absent = {again: "not installed" for again in PEERS if again not in peers}
    yield Group("tp=2 and DTensor", chosen([ours[0], *spread], only), absent=absent)


def config_of(mode: str, tensor: int = 1) -> Config:
    """Return the config of a mode (`MODES`) over some tensor ranks."""
    memory, offload = MODES[mode]
    return resolved(
        Config(
            model=Model(layers=LAYERS, hidden=HIDDEN, heads=HEADS, vocab=VOCAB, seq_len=SEQ_LEN, tie_embeddings=False),
            batch=Batch.model_validate({"global": MICRO, "micro": MICRO}),
            parallel=Parallel(tensor=tensor),
            memory=memory,
            zero=Zero(stage=1, offload=offload),
        )
    )


def our_step(mode: str) -> Call:
    """Return a step of the engine in one process."""
    return _step(mode, single())


def our_rank(mode: str, rank: int, size: int, store: str) -> Call:
    """Return a step of the engine on one of `size` tensor ranks."""
    return _step(mode, grid_of(rank, size, store, tensor=size))


def _step(mode: str, grid: Grid) -> Call:
    config = config_of(mode, grid["tensor"].size)
    return engine_step(config, grid, host=Host(CPU, grid.comm.ledger, apart=True))


if __name__ == "__main__":
    sys.exit(main())
