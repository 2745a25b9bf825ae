"""Build our engine for the benchmarks, with the settings, weights and tokens of the systems compared with it."""

import math
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import FileStore

from megazero.builders.assemble import Built, StageInputs, build, build_model, feeds_of
from megazero.comm.context import CommContext
from megazero.comm.grid import Grid, make_grid
from megazero.comm.host import Host
from megazero.comm.status_board import StatusBoard
from megazero.config.schema import Config, Optimizer
from megazero.data.batch import MicroBatch
from megazero.kernels.select import choose
from megazero.launcher.environment import RankContext, stay_on
from megazero.launcher.rendezvous import connect
from megazero.launcher.world import World
from megazero.model.parameter import declarations_by_name

CPU = torch.device("cpu")
VOCAB, SEQ_LEN = 8192, 256
SHARED, SOCKETS = "shared memory", "sockets"  # how bytes go from rank to rank
TRANSPORTS = {"": SHARED, "-sockets": SOCKETS}  # by the suffix of the names of our systems
LR, BETAS, EPS, DECAY, CLIP = 3e-4, (0.9, 0.95), 1e-8, 0.1, 1.0
ADAM: dict[str, Any] = {"lr": LR, "betas": BETAS, "eps": EPS, "weight_decay": DECAY}


def meet(rank: int, size: int, store: str) -> None:
    """Join a gloo process group as a rank of a peer system."""
    stay_on("lo")
    dist.init_process_group("gloo", store=FileStore(store, size), rank=rank, world_size=size)


def comm_of(rank: int, size: int, store: str, *, transport: str = SHARED) -> tuple[RankContext, CommContext]:
    """Connect to the other ranks through the file `store`; return this rank's context and its communication."""
    place = RankContext(World(rank, size, rank, "local"), StatusBoard().status_slot(0), Path(store))
    shared = transport == SHARED
    return place, connect(place, timeout=timedelta(seconds=120), fingerprint="", shared_memory=shared)


def grid_of(
    rank: int,
    size: int,
    store: str,
    tensor: int = 1,
    pipeline: int = 1,
    *,
    transport: str = SHARED,
    shard_ranks: int | None = None,
) -> Grid:
    """Connect `size` ranks through the file `store`; return a rank's grid. The data axis takes the remaining ranks."""
    _, comm = comm_of(rank, size, store, transport=transport)
    return make_grid(tensor=tensor, pipeline=pipeline, comm=comm, device_type="cpu", shard_ranks=shard_ranks)


def feeder(config: Config, grid: Grid) -> Callable[[int], StageInputs]:
    """Return a function step -> this rank's next micro-batch."""
    feed_of = feeds_of(grid["tensor"], CPU, config.parallel.sequence)
    micro = config.batch.rows
    batches = random_batches(micro, grid["data"].rank, config.model.vocab, config.model.seq_len)

    def feed(step: int) -> StageInputs:
        tokens_SB, targets_SB = next(batches)
        valid_SB = torch.ones_like(tokens_SB, dtype=torch.bool)
        return feed_of(MicroBatch(tokens_SB, targets_SB, valid_SB, None, None, torch.arange(micro)), step, True)

    return feed


def engine_step(config: Config, grid: Grid, kernels: str = "auto", host: Host | None = None) -> Callable[[], float]:
    """Return one training step of the engine on one rank of a grid; it returns the step's loss."""
    return built_step(config, grid, kernels, host)[1]


def built_step(
    config: Config, grid: Grid, kernels: str = "auto", host: Host | None = None
) -> tuple[Built, Callable[[], float]]:
    """Return the objects that compute a step on one rank of a grid, and the step, which returns its loss."""
    ops, own = choose(kernels, CPU, torch.float32), config.optimizer
    optimizer = Optimizer(**ADAM, clip=CLIP, name=own.name, moments=own.moments)
    built = build(config.model_copy(update={"optimizer": optimizer}), grid, CPU, ops, host)
    feed = feeder(config, grid)
    micro_batches = config.batch.global_ // (config.batch.rows * grid["data"].size)
    steps = iter(range(1 << 30))

    def step() -> float:
        now = next(steps)
        built.engine.begin_step()
        built.pipeline.train([feed(now) for _ in range(micro_batches)], lambda batch: batch)
        return built.engine.finish_step(LR).loss.item()

    return built, step


def initial_weights(config: Config) -> Callable[[str], Tensor]:
    """Return a function name -> whole initial weight, made on demand so that no peak includes all weights."""
    declarations = declarations_by_name(build_model(config).named_parameters())

    def weight(name: str) -> Tensor:
        declared = declarations[name]
        values = declared.initial(config.run.seed, name, 0, math.prod(declared.local_shape))
        return values.to(torch.float32).view(declared.shape)

    return weight


def random_batches(
    micro: int, seed: int = 0, vocab: int = VOCAB, seq_len: int = SEQ_LEN
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield endless (tokens, targets) [S, B], equal for equal seeds."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        window = torch.randint(0, vocab, (seq_len + 1, micro), generator=generator)
        yield window[:-1].contiguous(), window[1:].contiguous()
