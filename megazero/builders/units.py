"""Build the units of a model from a config: the ranks that share each one, where it is kept, how it is sent."""

from __future__ import annotations  # no import of the config package: its types are only named here

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from megazero.base.doing import doing
from megazero.comm.grid import Grid
from megazero.comm.home import Home
from megazero.comm.host import Host
from megazero.comm.ledger import Ledger
from megazero.comm.pool import Pool
from megazero.kernels.operations import REFERENCE, Operations
from megazero.model.contract import TIED, Model
from megazero.model.parameter import declarations_by_name
from megazero.optim.groups import Groups
from megazero.plan.placements import ALIGNMENT
from megazero.zero.extension import Extension
from megazero.zero.layout import Entry, lay_out
from megazero.zero.offload import Offload
from megazero.zero.placement import STAGES, Precision, UnitAxes
from megazero.zero.resting import Resources
from megazero.zero.unit import Unit

if TYPE_CHECKING:
    from megazero.config.schema import Config

_LOG = logging.getLogger("megazero")


def axes_of(config: Config, grid: Grid) -> Callable[[str], UnitAxes]:
    """Return the function that maps a unit's name to the axes of the ranks that share the unit."""
    assert config.zero.stage is not None, "a resolved config"
    stage, sequence = STAGES[config.zero.stage], config.parallel.sequence
    along = {"shard": grid["shard"], "replica": grid["replica"]}
    if config.zero.shard_ranks is None:  # shard over all data ranks; the shard axis may be for second shards only
        along = {"shard": grid["data"]}
    axes = UnitAxes(**along, tensor=grid["tensor"], stage=stage, sequence=sequence)
    return lambda unit: replace(axes, copies=grid["ends"]) if unit == TIED else axes


def offload_of(config: Config, host: Host, homes: Mapping[str, Home]) -> Offload:
    """Return where optimizer state and parameters are kept between steps: on the device, the host or disks.

    Args:
        homes: this rank's places other than the device and the host (disks), by the config's name for them.
    """
    asked = config.zero.offload
    if "cpu" in (asked.optimizer, asked.parameters) and not host.apart:
        _LOG.info("zero.offload to cpu has no effect: on a CPU, host memory is device memory")
    own: dict[str, Home | None] = {"none": None, "cpu": host if host.apart else None}
    optimizer, parameters = ((own | dict(homes))[word] for word in (asked.optimizer, asked.parameters))
    if optimizer is None and parameters is None:
        return Offload()
    return Offload(host if host.apart else None, optimizer, parameters, asked.delayed and optimizer is not None)


def build_units(
    model: Model,
    names: Collection[str],
    groups: Groups,
    *,
    seed: int | None,
    axes: Callable[[str], UnitAxes],
    resources: Resources,
    trains: bool = True,
) -> list[Unit]:
    """Build the named units: allocate this rank's part of their state and fill it with initial values.

    A rank allocates only the part it keeps, never a whole unit first.

    Args:
        groups: the update rules of parameters.
        seed: of the initial values; None: leave the memory uninitialised.
        axes: maps a unit's name to its axes.
        resources: shared by all units (`resources_of`).
        trains: units have gradients and masters; False: only parameters.
    """
    alignment = max((extension.alignment for extension in resources.extensions), default=ALIGNMENT)
    units = []
    with doing("making parameters", len(names)) as progress:
        for name, members in model.units():
            if name not in names:
                continue
            declarations = declarations_by_name(members)
            entries = []
            for n, d in declarations.items():
                group = groups.of(n, decays=d.decay, hidden=d.matrix is not None)
                entries.append(Entry(n, d.local_shape, group, d.split, d.first_row * d.row, d.partial, d.matrix))
            unit = Unit(lay_out(name, entries, alignment), axes(name), resources, trainable=trains)
            if seed is not None:
                unit.resting.fill(lambda n, start, stop, of=declarations: of[n].initial(seed, n, start, stop))
            model.materialise(unit.parameters.make())
            units.append(unit)
            progress.advance()
    return units


def resources_of(
    precision: Precision,
    device: torch.device,
    ledger: Ledger,
    *,
    offload: Offload | None = None,
    ops: Operations = REFERENCE,
    extensions: Sequence[Extension] = (),
) -> Resources:
    """Return the resources that a run's units share, with new pools. See `Resources` for the arguments."""
    dtypes = [precision.parameters, precision.gradients]
    if precision.reduced not in (None, precision.gradients):
        dtypes.append(precision.reduced)
    pools = [Pool(dtype, device, ledger, "pool") for dtype in dtypes]
    return Resources(precision, device, *pools, offload=offload or Offload(), ops=ops, extensions=extensions)
