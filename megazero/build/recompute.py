"""Wrap layers as a config's memory section asks.

It says which are computed again in backward, and how their inputs are kept until then.
"""

from __future__ import annotations  # a checked config is all that is needed, not the package that checks it

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch

from megazero.comm.grid import Axis, Grid
from megazero.comm.host import Host
from megazero.comm.pool import Pool
from megazero.memory.activation_store import Arena, ArenaStore
from megazero.memory.partition import PartitionedStore
from megazero.memory.recompute import PlainStore, Recomputed
from megazero.model.block import Block
from megazero.model.contract import Layer
from megazero.model.transformer import Transformer
from megazero.schedules.layers import Layers

if TYPE_CHECKING:
    from megazero.config.schema import Config

_LOG = logging.getLogger("megazero")


def recompute(
    config: Config,
    model: Transformer,
    layers: Layers,
    stages: Mapping[int, range],
    grid: Grid,
    dtype: torch.dtype,
    device: torch.device,
    host: Host,
) -> set[Layer]:
    """Put recomputed layers in the place of blocks, or of their attention's core.

    Args:
        stages: of this rank, with their parts of the model's path.
        dtype: of activations.
        host: where inputs are kept, if the config says so and it is apart.

    Returns:
        The parts of the path that run again in their backward.
    """
    blocks = {i: part for parts in stages.values() for i in parts if isinstance(part := model.layers[i], Block)}
    if config.memory.recompute == "selective":
        for block in blocks.values():
            block.attention.core = Recomputed(block.attention.core, PlainStore)
    if config.memory.recompute != "full":
        return set()
    axis = _axis(config, grid["tensor"])
    host_of = host if config.memory.offload and host.apart else None
    for line in _no_ops(config, axis, host):
        _LOG.info(line)
    ledger = grid.comm.ledger
    numel = config.model.seq_len * config.batch.micro * config.model.hidden
    numel //= grid["tensor"].size if config.parallel.sequence else 1
    micro_batches = config.batch.global_ // (config.batch.micro * grid["data"].size)
    kept = layers.kept_inputs(micro_batches)
    pool = Pool(dtype, device, ledger, "inputs")
    recomputed: set[Layer] = set()
    for stage, parts in stages.items():
        own = [i for i in parts if i in blocks]
        arena = Arena(len(own) * kept[stage], numel // axis.size, dtype, device, ledger, host_of)
        store = ArenaStore(arena) if axis.size == 1 and host_of is None else PartitionedStore(arena, axis, pool, device)
        for i in own:
            model.layers[i] = Recomputed(blocks[i], store)
            recomputed.add(model.layers[i])
    return recomputed


def _axis(config: Config, tensor: Axis) -> Axis:
    """Return the axis whose ranks each keep a part of an input that all have; of size 1 where nothing is shared."""
    return tensor if config.memory.partition and not config.parallel.sequence else Axis("tensor", comm=tensor.comm)


def _no_ops(config: Config, axis: Axis, host: Host) -> list[str]:
    """Return a line for each option that was asked for and changes nothing."""
    lines = []
    if config.memory.partition and axis.size == 1:
        why = "the tensor axis has one rank"
        if config.parallel.sequence and config.parallel.tensor > 1:
            why = "parallel.sequence has split block inputs over the tensor axis already"
        lines.append(f"memory.partition changes nothing: {why}")
    if config.memory.offload and not host.apart:
        lines.append("memory.offload changes nothing: on a CPU the host's memory is the device's")
    return lines
