"""Wrap layers for activation recomputation.

The job says which layers run again in backward, and where their inputs are kept until then.
"""

import logging
import math
from collections.abc import Mapping
from functools import partial

import torch

from megazero.comm.grid import Axis, Grid
from megazero.comm.home import Home, PagedHome
from megazero.comm.host import Host
from megazero.comm.pool import Pool
from megazero.memory.activation_store import Arena, KeptInSlot
from megazero.memory.graphs import Exchange, GraphedLayer, graphs_of
from megazero.memory.partition import PartitionedStore
from megazero.memory.recompute import Kept, Recomputed
from megazero.model.block import Block
from megazero.model.contract import Layer
from megazero.model.transformer import Transformer
from megazero.plan.job import Job
from megazero.plan.liveness import liveness
from megazero.schedules.layers import Layers

_LOG = logging.getLogger("megazero")


def recompute(
    job: Job,
    model: Transformer,
    layers: Layers,
    stages: Mapping[int, range],
    grid: Grid,
    dtype: torch.dtype,
    device: torch.device,
    host: Host,
    homes: Mapping[str, Home],
) -> set[Layer]:
    """Replace blocks, or their attention's core, by recomputed layers.

    Args:
        stages: for each stage of this rank, its range of layers in `model.layers`.
        dtype: of activations.
        host: keeps the inputs, if the job offloads them to the host and host memory is separate.
        homes: further places for offloaded values (disks), by the config's name for them.

    Returns:
        The layers that run again in backward as a whole; empty for `selective`.
    """
    blocks = {i: part for parts in stages.values() for i in parts if isinstance(part := model.layers[i], Block)}
    if job.recompute == "selective":
        for block in blocks.values():
            block.attention.core = Recomputed(block.attention.core, Kept)
    if job.recompute != "full":
        return set()
    axis = _axis(job, grid["tensor"])
    host_of = host if job.offload == "cpu" and host.apart else None
    _say_no_ops(job, axis, host)
    ledger = grid.comm.ledger
    shape = job.local(job.shape.seq_len), job.micro_batch, job.shape.hidden
    numel = math.prod(shape)
    _, kept = liveness(job, grid["pipeline"].rank)
    pool = Pool(dtype, device, ledger, "inputs")
    exchange = Exchange(shape, dtype, device, ledger) if job.cuda_graphs and host.apart else None
    graphs = None if exchange is None else graphs_of(device)
    disks = homes["nvme"] if job.offload == "nvme" else None
    assert disks is None or isinstance(disks, PagedHome), "disks have windows"
    going = pool.take(numel // axis.size) if disks is not None else None
    recomputed: set[Layer] = set()
    for stage, parts in stages.items():
        own = [i for i in parts if i in blocks]
        arena = Arena(len(own) * kept[stage], numel // axis.size, dtype, device, ledger, disks or host_of, going)
        plain = axis.size == 1 and disks is None and host_of is None
        store = partial(KeptInSlot, arena) if plain else PartitionedStore(arena, axis, pool, device)
        for i in own:
            block = blocks[i]
            if exchange is None or graphs is None:
                model.layers[i] = Recomputed(block, store)
            else:
                model.layers[i] = GraphedLayer(block, store, graphs, exchange)
            recomputed.add(model.layers[i])
    return recomputed


def _axis(job: Job, tensor: Axis) -> Axis:
    """Return the axis over which kept inputs are partitioned; of size 1 if they are not."""
    return tensor if job.partition and not job.sequence else Axis("tensor", comm=tensor.comm)


def _say_no_ops(job: Job, axis: Axis, host: Host) -> None:
    """Log a line for each requested option that has no effect."""
    if job.partition and axis.size == 1:
        why = "the tensor axis has one rank"
        if job.sequence and job.tensor > 1:
            why = "parallel.sequence already splits block inputs over the tensor axis"
        _LOG.info(f"memory.partition has no effect: {why}")
    if job.offload == "cpu" and not host.apart:
        _LOG.info("memory.offload has no effect: on a CPU, host memory is device memory")
    if job.cuda_graphs and not host.apart:
        _LOG.info("memory.cuda_graphs has no effect: a CPU has no CUDA graphs")
