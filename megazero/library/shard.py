"""Shard a module: meet the other ranks, divide it into units, give these memory and an optimizer."""

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from megazero.base.errors import UserError
from megazero.comm.agreement import agree
from megazero.comm.collectives import gather_bytes
from megazero.comm.grid import Axis, Grid, make_grid, single
from megazero.comm.host import Host
from megazero.comm.ledger import Ledger
from megazero.comm.pool import Pool
from megazero.kernels.operations import Operations
from megazero.kernels.select import choose
from megazero.library.adopt import Initial, Shapes, adopt, adopt_buffers, make_values
from megazero.library.agreed import AgreedGather
from megazero.library.built import BuiltPart, Shown
from megazero.library.calls import Calls
from megazero.library.meeting import meet
from megazero.library.optimizers import Asked, Groups, Recipe, recipe_of
from megazero.library.parameters import guard
from megazero.library.parts import ROOT, Member, Part, Units, fitting, parts_of, submodules
from megazero.library.row_optimizers import row_optimizer
from megazero.library.sharded import Sharded
from megazero.library.tables import Table, split_rows
from megazero.zero.engine import Engine
from megazero.zero.layout import Entry, lay_out
from megazero.zero.offload import Offload
from megazero.zero.placement import STAGES, Precision, UnitAxes
from megazero.zero.unit import Unit

_LOG = logging.getLogger("megazero")
_DTYPES = {"fp32": torch.float32, "fp64": torch.float64, "bf16": torch.bfloat16, "fp16": torch.float16}
_OFFLOAD = ("optimizer", "parameters")


def shard(
    module: nn.Module,
    optimizer: Asked,
    *,
    stage: int,
    units: Units | None = None,
    precision: str | None = None,
    clip: float = 0.0,
    offload: str | Mapping[str, str] | None = None,
    shard_ranks: int | None = None,
    groups: Groups = (),
    tables: Units = (),
    table_optimizer: str | Mapping[str, Any] = "adagrad",
    initial: Initial | None = None,
    lockstep: bool = True,
    kernels: str = "auto",
    timeout: float = 120.0,
) -> Sharded:
    """Shard a module's parameters, gradients and optimizer state over all ranks. Every rank calls it.

    Args:
        module: on any device, or on meta; every rank gets the values of rank 0.
        optimizer: see `optimizers.py`.
        stage: of ZeRO, 0 to 3.
        units: the submodules whose parameters are gathered together: names, patterns of names, classes, or the
            submodules; None: its repeated blocks. What is in none of them is one more unit.
        precision: "fp32", "fp64", "bf16" or "fp16" of parameters and inputs; 16-bit ones have masters and gradients in
            fp32. None: parameters keep their dtypes.
        clip: the largest global gradient norm let through; 0: no clipping.
        offload: "cpu", or {"optimizer": "cpu", "parameters": "cpu"}: what rests in the host's memory.
        shard_ranks: neighbouring ranks over which is sharded, replicated over the rest; None: all.
        groups: (pattern of parameters' names, options of the optimizer) where these differ; the first that fits counts.
        tables: the embeddings whose rows are split over the ranks (`tables.py`), as `units`.
        table_optimizer: "adagrad" or "adam", or {"name": ..., "lr": ...}: of these (`row_optimizers.py`).
        initial: (name, tensor), writes the values of a parameter or buffer on meta, on rank 0; None: the modules'
            `reset_parameters` do.
        lockstep: every rank calls the same units in the same order; False: each those that it likes, at the price of a
            message between the ranks before each gathering and each sum in stage 3 (`agreed.py`).
        kernels: as of the option precision.kernels.
        timeout: seconds that a rank waits for the others.

    Raises:
        UserError: 5xx, see docs/library.md; 111 and 3xx, the ranks do not come together; 106, shard_ranks.
    """
    if stage not in STAGES:
        raise UserError(510, f"stage: expected 0 to 3, got {stage!r}", where="shard")
    if precision is not None and precision not in _DTYPES:
        raise UserError(510, f"precision: expected one of {', '.join(_DTYPES)}, got {precision!r}", where="shard")
    if tables and not lockstep:
        raise UserError(510, "lockstep=False beside tables, in which all ranks look up together", where="shard")
    if any(hasattr(parameter, "gradient_slot") for parameter in module.parameters()):
        raise UserError(510, "the module is sharded already", "shard a module once", where="shard")
    recipe, rows, by_row = recipe_of(optimizer, groups), row_optimizer(table_optimizer), _tables(module, tables)
    parts = parts_of(module, units, by_row)
    fitting([pattern for pattern, _ in groups], [name for name, _ in module.named_parameters()], "groups")
    if not any(member.parameter.requires_grad for part in parts for member in part.members):
        raise UserError(510, "the module has no parameter that requires a gradient", where="shard")
    if odd := next((m for p in parts for m in p.members if _untrainable(m.parameter)), None):
        what = f"{odd.name} is {odd.parameter.dtype}: only parameters of floating point are trained"
        raise UserError(510, what, "freeze it, or keep its real and imaginary parts", where="shard")
    world, comm = meet(timedelta(seconds=timeout))
    device = world.device
    grid = single(comm)
    if world.size > 1:
        grid = make_grid(
            comm=comm, device_type=device.type if comm.backend == "nccl" else "cpu", shard_ranks=shard_ranks
        )
    _require_one_module(parts, grid["world"], device)
    dtype = None if precision is None else _DTYPES[precision]
    memory = _Memory(device, comm.ledger, _offload_of(offload, device, comm.ledger), kernels)
    axes = UnitAxes(shard=grid["shard"], tensor=grid["tensor"], stage=STAGES[stage], replica=grid["replica"])
    shapes = {place: m.parameter.shape for part in parts for m in part.members for place in m.places}
    built = [_built(part, dtype, recipe, memory, axes, grid["world"], initial, shapes) for part in parts]
    adopt_buffers(module, grid["world"], device, initial)
    agreed = None if lockstep else _agreed(built, device)
    engine = _engine(built, recipe, grid, memory, clip, agreed)
    calls = Calls(built, engine.gather)
    split = split_rows(by_row, rows, grid["world"], device, dtype)
    guard(module, built, split.shards, calls)
    return Sharded(module, built, engine, calls, split, grid, recipe.lr, partial(_cast, dtype=dtype), agreed)


def _untrainable(parameter: nn.Parameter) -> bool:
    return parameter.requires_grad and not parameter.is_floating_point()


def _tables(module: nn.Module, asked: Units) -> dict[str, Table]:
    """Return the tables that were asked for, by name. Raises UserError 511: one is no embedding, or is shared."""
    modules, found = dict(module.named_modules()), dict[str, Table]()
    uses = Counter(id(parameter) for one in modules.values() for parameter in one._parameters.values())
    chosen = submodules(module, asked, "tables")
    for name, table in modules.items():
        if name not in chosen:
            continue
        if not isinstance(table, nn.Embedding | nn.EmbeddingBag):
            raise UserError(511, f"tables: {name} is a {type(table).__name__}", "give nn.Embedding or nn.EmbeddingBag")
        if uses[id(table.weight)] > 1:
            raise UserError(511, f"tables: {name} shares its weight", "leave it out of tables")
        found[name] = table
    return found


@dataclass(frozen=True)
class _Memory:
    """Give units the place where they rest, buffers, and the kernels that compute on them."""

    device: torch.device
    ledger: Ledger
    offload: Offload | None
    kernels: str
    _pools: dict[torch.dtype, Pool] = field(default_factory=dict)

    def ops(self, dtype: torch.dtype, *, updates: bool = False) -> Operations:
        """Return the kernels beside parameters of a dtype; those of an update are where the update is."""
        there = updates and self.offload is not None and self.offload.optimizer is not None
        return choose(self.kernels, torch.device("cpu") if there else self.device, dtype)

    def pool(self, dtype: torch.dtype) -> Pool:
        """Return the buffers of all units for whole parameters, and whole gradients, of a dtype."""
        return self._pools.setdefault(dtype, Pool(dtype, self.device, self.ledger, "pool"))


def _offload_of(asked: str | Mapping[str, str] | None, device: torch.device, ledger: Ledger) -> Offload | None:
    """Return what rests on the host; None: nothing. Raises UserError 510."""
    options: dict[str, str] = dict.fromkeys(_OFFLOAD, asked) if isinstance(asked, str) else dict(asked or {})
    odd = [key for key, value in options.items() if key not in _OFFLOAD or value not in ("cpu", "none")]
    if odd:
        do = 'give "cpu", or {"optimizer": "cpu", "parameters": "cpu"}'
        raise UserError(510, f"offload: {odd[0]!r}: {options[odd[0]]!r}", do, where="shard")
    if "cpu" not in options.values():
        return None
    host = Host(device, ledger)
    if not host.apart:
        _LOG.info("offload changes nothing: on a CPU the host's memory is the device's")
        return None
    optimizer, parameters = (host if options.get(key) == "cpu" else None for key in _OFFLOAD)
    return Offload(host, optimizer, parameters)


def _require_one_module(parts: Sequence[Part], world: Axis, device: torch.device) -> None:
    """Refuse ranks with different modules. Raises UserError 504, with the first difference."""
    lines = [
        f"{m.name} {tuple(m.parameter.shape)} {m.parameter.dtype} {m.parameter.requires_grad} in {part.name}"
        for part in parts
        for m in part.members
    ]
    everybody = [said.decode().split("\n") for said in gather_bytes("\n".join(lines).encode(), world, "agree", device)]
    for rank, theirs in enumerate(everybody):
        if theirs != everybody[0]:
            pairs = zip([*everybody[0], "nothing"], [*theirs, "nothing"], strict=False)
            first, other = next((a, b) for a, b in pairs if a != b)
            what = f"has another module than rank 0: {other} instead of {first}"
            raise UserError(504, what, "build the same module on every rank", rank=rank)


def _built(
    part: Part,
    dtype: torch.dtype | None,
    recipe: Recipe,
    memory: _Memory,
    axes: UnitAxes,
    world: Axis,
    initial: Initial | None,
    shapes: Shapes,
) -> BuiltPart:
    """Give the parameters of a part memory and initial values."""
    kinds = part.groups(dtype)
    agree(world, memory.device, lambda: make_values(part, world, memory.device, initial, shapes))
    shown: list[tuple[bool, Shown]] = []
    for (own, trained), members in kinds.items():
        unit = _unit(_unit_name(part, own, kinds, trained=trained), own, members, recipe, memory, axes, trained=trained)
        adopt(unit, members, world)
        index = {interval.name: place for place, interval in enumerate(unit.layout.intervals)}
        shown += [(trained, Shown(unit, index[m.name], m.name, m.places)) for m in members]
    part.members.clear()  # nobody holds the parameters that the module came with any more
    return BuiltPart(
        part,
        [one for trained, one in shown if trained],
        [one for trained, one in shown if not trained],
        part.name == ROOT,
    )


def _unit_name(part: Part, dtype: torch.dtype, kinds: Mapping[tuple[torch.dtype, bool], Any], *, trained: bool) -> str:
    """Return a unit's name: the part's, with what tells it from the part's other units."""
    words = [str(dtype).removeprefix("torch.")] * (len({one for one, _ in kinds}) > 1) + ["frozen"] * (not trained)
    return f"{part.name} ({', '.join(words)})" if words else part.name


def _unit(
    name: str,
    dtype: torch.dtype,
    members: Sequence[Member],
    recipe: Recipe,
    memory: _Memory,
    axes: UnitAxes,
    *,
    trained: bool,
) -> Unit:
    entries = [Entry(m.name, tuple(m.parameter.shape), recipe.group(m.name), split=True) for m in members]
    narrow = dtype in (torch.bfloat16, torch.float16)
    precision = Precision(dtype, torch.float32 if narrow else dtype)
    return Unit(
        lay_out(name, entries),
        axes,
        precision,
        memory.device,
        (memory.pool(dtype), memory.pool(precision.gradients)),
        memory.offload,
        ops=memory.ops(dtype if dtype.is_floating_point else torch.float32),
        trainable=trained,
    )


def _agreed(built: Sequence[BuiltPart], device: torch.device) -> AgreedGather | None:
    """Return the gathering of units by ranks that call different ones; None: no unit is gathered."""
    units = [unit for part in built for unit in part.units]
    return None if all(unit.parameters_rest_whole for unit in units) else AgreedGather(device, units)


def _engine(
    built: Sequence[BuiltPart],
    recipe: Recipe,
    grid: Grid,
    memory: _Memory,
    clip: float,
    agreed: AgreedGather | None,
) -> Engine:
    """Return the engine over the units that are trained, in the order of the module."""
    units = [unit for part in built for unit in part.units if unit.trainable]
    names = [unit.layout.name for unit in units]
    there = "host_" if memory.offload is not None and memory.offload.optimizer is not None else ""
    wide = any(unit.masters.dtype == torch.float64 for unit in units)
    ops = memory.ops(torch.float64 if wide else units[0].updated.values.dtype, updates=True)
    optimizer = recipe.make(units, grid.comm.bucket, ops)
    memory.ledger.hold(f"{there}staging", optimizer.staging_bytes)
    scaling = any(unit.parameters.values.dtype == torch.float16 for unit in units)
    told = {"clip": clip, "tokens_per_step": 1, "grid": grid, "scaling": scaling, "ops": ops, "offload": memory.offload}
    engine = Engine([names], units, names, optimizer, **told, halts=False, gather=agreed)
    if agreed is not None:
        engine.stages[0].reduction.before = agreed.before_sum
    return engine


def _cast(inputs: Any, dtype: torch.dtype | None) -> Any:
    """Return inputs with every tensor of floating point in this dtype; None: as they are."""
    if dtype is None:
        return inputs
    if isinstance(inputs, Tensor):
        return inputs.to(dtype) if inputs.is_floating_point() else inputs
    if isinstance(inputs, dict):
        return {key: _cast(value, dtype) for key, value in inputs.items()}
    if type(inputs) in (list, tuple):
        return type(inputs)(_cast(value, dtype) for value in inputs)
    return inputs
