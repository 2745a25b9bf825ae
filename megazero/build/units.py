"""Build the units of a model from a config: which ranks share each, where it rests, how it is sent."""

from __future__ import annotations  # a checked config is all that is needed, not the package that checks it

import logging
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from megazero.base.doing import doing
from megazero.comm.grid import Axis, Grid
from megazero.comm.home import Home, PagedHome
from megazero.comm.host import Host
from megazero.comm.ledger import Ledger
from megazero.comm.pool import Pool
from megazero.kernels.operations import REFERENCE, Operations
from megazero.model.contract import TIED, Model
from megazero.model.parameter import Declaration, declarations_by_name
from megazero.plan.job import BITS
from megazero.zero.layout import Entry, Group, UnitLayout, lay_out
from megazero.zero.offload import Offload
from megazero.zero.placement import STAGES, Precision, UnitAxes
from megazero.zero.quantized import Quantizer, Quantizers
from megazero.zero.unit import Unit

if TYPE_CHECKING:
    from megazero.config.schema import Config

_LOG = logging.getLogger("megazero")


def axes_of(config: Config, grid: Grid) -> Callable[[str], UnitAxes]:
    """Return the function that gives each unit, by its name, the ranks that share it."""
    assert config.zero.stage is not None, "a resolved config"
    stage, sequence = STAGES[config.zero.stage], config.parallel.sequence
    along = {"shard": grid["shard"], "replica": grid["replica"]}
    if config.zero.secondary_ranks is not None:  # shards are of all data ranks
        along = {"shard": grid["data"], "near": _near(grid), "far": grid["replica"]}
    axes = UnitAxes(**along, tensor=grid["tensor"], stage=stage, sequence=sequence)
    return lambda unit: replace(axes, copies=grid["ends"]) if unit == TIED else axes


def _near(grid: Grid) -> Axis:
    """Return the axis of neighbours, through memory only where all data ranks talk so.

    Else a rank that waits for a socket of the one axis could be waited for by one that waits for memory of the other.
    """
    near, memory = grid["shard"], grid.comm.shared_memory
    if memory is None or memory.reached.issuperset(grid["data"].ranks):
        return near
    return replace(near, comm=replace(near.comm, shared_memory=None))


def offload_of(config: Config, host: Host, disks: PagedHome | None) -> Offload | None:
    """Return where optimizer and parameters rest, if not on the device; None: both do.

    Args:
        disks: of this rank, where the config asks for them.
    """
    asked = config.zero.offload
    if "cpu" in (asked.optimizer, asked.parameters) and not host.apart:
        _LOG.info("zero.offload to cpu changes nothing: on a CPU the host's memory is the device's")
    homes: dict[str, Home | None] = {"none": None, "cpu": host if host.apart else None, "nvme": disks}
    optimizer, parameters = homes[asked.optimizer], homes[asked.parameters]
    assert disks is not None or "nvme" not in (asked.optimizer, asked.parameters), "whoever builds opens the disks"
    if optimizer is None and parameters is None:
        return None
    return Offload(host, optimizer, parameters, disks, asked.delayed and optimizer is not None)


def build_units(
    model: Model,
    names: Collection[str],
    *,
    seed: int | None,
    axes: Callable[[str], UnitAxes],
    precision: Precision,
    device: torch.device,
    ledger: Ledger,
    offload: Offload | None = None,
    ops: Operations = REFERENCE,
    quantizers: Quantizers | None = None,
) -> list[Unit]:
    """Give each of the named units of the model memory for what of it rests on this rank, and initial values.

    Nothing else is ever allocated: no rank holds a whole unit that it will not keep.

    Args:
        seed: of the initial values; None: nobody looks at them, and they are left as they are.
        axes: of each unit, by its name.
        ops: the kernels to use, where gradients are delivered.
        quantizers: of what is sent between shard ranks; None: it is sent as it is.
    """
    whole, partial = (Pool(dtype, device, ledger, "pool") for dtype in (precision.parameters, precision.gradients))
    apart = precision.reduced not in (None, precision.gradients)
    reduction = Pool(precision.reduced or precision.gradients, device, ledger, "pool") if apart else None
    units = []
    with doing("making parameters", len(names)) as progress:
        for name, members in model.units():
            if name not in names:
                continue
            declarations = declarations_by_name(members)
            layout = unit_layout_of(name, declarations, (quantizers or Quantizers()).alignment)
            pools, told = (whole, partial), {"reduction": reduction, "quantizers": quantizers}
            unit = Unit(layout, axes(name), precision, device, pools, offload, ops=ops, **told)
            if seed is not None:
                unit.resting.fill(lambda n, start, stop, of=declarations: of[n].initial(seed, n, start, stop))
            model.materialise(unit.make_parameters())
            units.append(unit)
            progress.advance()
    return units


def quantizers_of(config: Config, ops: Operations, device: torch.device, ledger: Ledger) -> Quantizers:
    """Return how parameters and gradients are sent between shard ranks."""
    quantize = config.zero.quantize
    parameters, gradients = (
        None if bits is None else Quantizer(bits, ops, Pool(torch.uint8, device, ledger, "pool"))
        for bits in (BITS[quantize.parameters], BITS[quantize.gradients])
    )
    if gradients is not None and quantize.error_feedback:
        gradients = replace(gradients, feedback=True, carry=torch.ones((), device=device))
    return Quantizers(parameters, gradients)


def unit_layout_of(unit: str, declarations: Mapping[str, Declaration], alignment: int) -> UnitLayout:
    """Return where the parameters of a unit lie, which begin at multiples of `alignment` elements."""
    each = declarations.items()
    entries = [Entry(n, d.local_shape, Group(d.decay), d.split, d.first_row * d.row) for n, d in each]
    return lay_out(unit, entries, alignment)
