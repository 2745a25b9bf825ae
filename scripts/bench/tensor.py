"""Compare training speed of tensor parallelism over two ranks with torch DTensor.

    python scripts/bench/tensor.py [--model small wide] [--launches 3] [--pairs 21] [--json] [--save]
    python scripts/bench/tensor.py --only 'ours-tp2, *' 'ours-tp2-sequence, *' --before TREE
       our engine next to itself in another checkout

    small   8 layers, hidden 512, 8 heads, vocabulary 8,192 untied, sequence 256, micro-batch 4     33.7M parameters
    wide    9 layers, hidden 1,024, 16 heads, the same vocabulary and sequence, micro-batch 2      130.4M

Every process has one thread, so two ranks have twice the cores of one process. The reference is our engine in one
process, and ratios are to half its time: 1.00 is a perfect division of the work, 2.00 the reference itself.

Transport: `ours-tp2` uses memory that the ranks of a host share, as no peer does; `ours-tp2-sockets` uses gloo's
sockets over the loopback, as DTensor does; `ours-tp2-chunks` is like the first, with the sums and gathers of forward in
two chunks (`parallel.tensor_chunks`). *no exchange* is `ours-tp2` with collectives that end at once: its excess over
1.00 is not a cost of the transport. Its losses are meaningless.

fp32, no dropout, AdamW, clip 1.0. All start from the same weights and see the same tokens.
"""

import argparse
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # run from any folder, also without an installation

import torch.distributed as dist
from torch import Tensor

from megazero.comm.context import BUCKET
from megazero.comm.fake_group import FakeProcessGroup, alone
from megazero.comm.grid import single
from megazero.comm.ledger import Ledger
from megazero.config.schema import Batch, Config, Model, Parallel, resolved
from scripts.bench import recomputing_peers
from scripts.bench.harness import Group, add_options, chosen, run
from scripts.bench.other_tree import add_before, pairs_of, with_before
from scripts.bench.ours import SEQ_LEN, SHARED, SOCKETS, TRANSPORTS, VOCAB, engine_step, grid_of
from scripts.bench.processes import Call, System

SIZES = {"small": (8, 512, 8, 4), "wide": (9, 1024, 16, 2)}  # layers, hidden, heads, micro-batch
RANKS = 2


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=SIZES, nargs="+", default=["small"])
    add_before(parser)
    add_options(parser)
    options = parser.parse_args()
    return run((group_of(model, options.only, options.before) for model in options.model), options)


def group_of(model: str, only: list[str], before: str | None) -> Group:
    """Return the group of a model."""
    systems = with_before(chosen(systems_of(model), only), before, "tensor", (model,))
    return Group(model, systems, divide_by=RANKS, pairs=pairs_of)


def systems_of(model: str) -> list[System]:
    """Return all systems, the reference first."""
    systems = [
        System(f"ours, one process, {model}", our_step, (model,)),
        System(f"plain torch, one process, {model}", plain_step, (model,)),
    ]
    sequences = (("", False), ("-sequence", True))
    for suffix, transport in TRANSPORTS.items():
        for of, sequence in sequences:
            arguments = (model, sequence, transport, 1)
            name = f"ours-tp{RANKS}{of}{suffix}, {model}"
            systems.append(System(name, our_rank, arguments, ranks=RANKS, transport=transport))
    for of, sequence in sequences:
        arguments = (model, sequence, SHARED, 2)
        systems.append(
            System(f"ours-tp{RANKS}{of}-chunks, {model}", our_rank, arguments, ranks=RANKS, transport=SHARED)
        )
    systems.append(System(f"tp{RANKS}, no exchange, {model}", lone_rank, (model,), ranks=RANKS, has_loss=False))
    for of, sequence in sequences:
        name = f"dtensor-tp{RANKS}{of}, {model}"
        systems.append(System(name, dtensor_rank, (model, sequence), ranks=RANKS, transport=SOCKETS))
    return systems


def config_of(model: str, tensor: int = 1, sequence: bool = False, chunks: int = 1) -> Config:
    """Return the config of a model in `SIZES` over some tensor ranks."""
    layers, hidden, heads, micro = SIZES[model]
    shape = Model(layers=layers, hidden=hidden, heads=heads, vocab=VOCAB, seq_len=SEQ_LEN, tie_embeddings=False)
    batch = Batch(**{"global": micro, "micro": micro})
    parallel = Parallel(tensor=tensor, sequence=sequence, tensor_chunks=chunks)
    return resolved(Config(model=shape, batch=batch, parallel=parallel))


def our_step(model: str) -> Call:
    """Return a training step of the engine in one process."""
    return engine_step(config_of(model), single())


def our_rank(model: str, sequence: bool, transport: str, chunks: int, rank: int, size: int, store: str) -> Call:
    """Return a training step of the engine on one of `size` tensor ranks."""
    grid = grid_of(rank, size, store, tensor=size, transport=transport)
    return engine_step(config_of(model, size, sequence, chunks), grid)


class Zeros(FakeProcessGroup):
    """A fake group in which the other ranks' parts are zeros, so that all numbers stay finite."""

    def all_gather_single(self, whole: Tensor, part: Tensor, *options: Any) -> dist.Work:
        """Fill `whole` with this rank's part and zeros."""
        own = part.reshape(-1).clone()
        whole.zero_().view(self.size(), -1)[self.rank()].copy_(own)
        return super().all_gather_single(whole, part)

    _allgather_base = all_gather_single  # type: ignore[assignment]


def lone_rank(model: str, rank: int, size: int, store: str) -> Call:
    """Return a step of rank 0 of `size` without communication: it uses its own part instead of each sum."""
    grid = alone(0, size, tensor=size, pipeline=1, backend="nccl", bucket=BUCKET, ledger=Ledger())
    grid = grid.with_groups({axis.name: Zeros(axis.rank, axis.size) for axis in grid.values()})
    return engine_step(config_of(model, size), grid)


def plain_step(model: str) -> Call:
    """Return a training step of plain torch in one process."""
    return recomputing_peers.plain_step(config_of(model), again=False)


def dtensor_rank(model: str, sequence: bool, rank: int, size: int, store: str) -> Call:
    """Return a training step of the same model spread with DTensor, on one of `size` ranks."""
    return recomputing_peers.spread_step(config_of(model, sequence=sequence), "none", rank, size, store)


if __name__ == "__main__":
    sys.exit(main())
