"""Memory that could not be had: one line that says what was asked for, what holds the rest, what spares how much."""

import errno
import re
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from megazero.config import Config
from megazero.errors import UserError
from megazero.parallel.grid import Grid
from megazero.pipelining import layers_of, model_shape
from megazero.plan.activations import Micro, kept_by_block

_UNITS = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
_ASKED = re.compile(r"[Tt]ried to allocate ([\d.]+) (bytes|KiB|MiB|GiB)")
_WORDS = ("can't allocate memory", "out of memory", "bad_alloc", "can't start new thread")
_SHOWN = 4  # categories


@contextmanager
def told(config: Config, grid: Grid, item: int) -> Iterator[None]:
    """Around what allocates.

    Args:
        item: bytes of an activation.

    Raises:
        UserError: 330, instead of what the libraries say when there is no memory left.
    """
    try:
        yield
    except (MemoryError, RuntimeError, OSError) as error:
        if not _is_it(error):
            raise
        found = _ASKED.search(str(error))
        asked = f" when {_mb(float(found[1]) * _UNITS[found[2]])} MB more were asked for" if found else ""
        held = {category: held.now for category, held in grid.world.wire.ledger.bytes.items() if held.now}
        shown = sorted(held.items(), key=lambda pair: -pair[1])[:_SHOWN]
        what = f"out of memory{asked}; there are " + ", ".join(f"{name} {_mb(size)}" for name, size in shown) + " MB"
        spare = sorted(_spare(config, grid, held, item), reverse=True)
        do = ", ".join(f"{option} spares {_mb(size)} MB" for size, option in spare[:3]) or "more ranks"
        raise UserError(330, what, do, rank=grid.world.rank) from None


def _is_it(error: Exception) -> bool:
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    return any(word in str(error) for word in _WORDS)


def _spare(config: Config, grid: Grid, held: dict[str, int], item: int) -> Iterator[tuple[float, str]]:
    """(bytes that this rank would have less, option) of what the config leaves."""
    tensor, data, micro, memory = grid.tensor.size, grid.data.size, config.batch.micro, config.memory
    shares = config.parallel.sequence or tensor == 1
    if memory.recompute == "full":
        if not memory.partition and not shares:
            yield held.get("inputs", 0) * (1 - 1 / tensor), "memory.partition=true"
    else:
        layers, micro_batches = layers_of(config), config.batch.global_ // (micro * data)
        live = layers.kept_inputs(micro_batches)
        stages = layers.of_rank(grid.pipeline.rank)
        blocks = sum(live[s] * sum(1 <= i <= config.model.layers for i in parts) for s, parts in stages.items())
        shape = model_shape(config)
        each = Micro(micro, tensor, config.parallel.sequence, item, config.model.dropout > 0)
        now, then = (kept_by_block(shape, each, recompute) for recompute in (memory.recompute, "full"))
        yield blocks * (now - then), "memory.recompute=full"
    stage = config.zero.stage or 0
    if data > 1 and stage < 3:
        kinds = ("optimizer", "gradients", "parameters")[stage:]
        yield sum(held.get(kind, 0) for kind in kinds) * (1 - 1 / data), "zero.stage=3"
    if micro > 1:
        yield held.get("inputs", 0) / 2, f"batch.micro={micro // 2} (and half of what a block needs)"


def _mb(size: float) -> str:
    return f"{size / 1e6:,.1f}"
