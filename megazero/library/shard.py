"""Shard a module: connect the ranks, divide the module into units, give these memory and an optimizer."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from functools import partial
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from megazero.base.errors import UserError
from megazero.comm.collectives import gather_bytes
from megazero.comm.grid import Axis, make_grid, single
from megazero.library.adopt import Initial, Memory, adopt_buffers, give_units
from megazero.library.assembly import Assembly
from megazero.library.calls import Calls
from megazero.library.meeting import meet
from megazero.library.optimizers import Asked, Groups, recipe_of
from megazero.library.parameters import ShardedParameter
from megazero.library.parts import Part, Units, fitting, parts_of, submodules
from megazero.library.row_optimizers import row_optimizer
from megazero.library.sharded import Sharded
from megazero.library.tables import Table, split_rows
from megazero.library.tiers import Tiers, options_of
from megazero.library.values import Values
from megazero.zero.placement import STAGES, UnitAxes

_DTYPES = {"fp32": torch.float32, "fp64": torch.float64, "bf16": torch.bfloat16, "fp16": torch.float16}


def shard(
    module: nn.Module,
    optimizer: Asked | None,
    *,
    stage: int,
    units: Units | None = None,
    precision: str | None = None,
    masters: str = "fp32",
    clip: float = 0.0,
    offload: str | Mapping[str, Any] | None = None,
    quantize: Mapping[str, Any] | None = None,
    shard_ranks: int | None = None,
    secondary_ranks: int | None = None,
    groups: Groups = (),
    tables: Units = (),
    table_optimizer: str | Mapping[str, Any] = "adagrad",
    initial: Initial | None = None,
    kernels: str = "auto",
    timeout: float = 120.0,
) -> Sharded:
    """Shard a module's parameters, gradients and optimizer state over all ranks. Every rank calls it.

    Args:
        module: on any device, or on meta; every rank gets the values of rank 0.
        optimizer: see `optimizers.py`; None: nothing is trained, and all parameters become frozen.
        stage: the ZeRO stage, 0 to 3.
        units: the submodules whose parameters are gathered together: names, patterns of names, classes, or the
            submodules; None: its repeated blocks. All other parameters are one more unit.
        precision: "fp32", "fp64", "bf16" or "fp16" of parameters and inputs; 16-bit ones have masters and gradients in
            fp32. None: parameters keep their dtypes.
        masters: "fp32", or "none": bf16 parameters are updated themselves, with stochastic rounding.
        clip: the largest allowed global gradient norm; 0 disables clipping.
        offload, quantize, secondary_ranks: see `tiers.py`.
        shard_ranks: the number of neighbouring ranks that shard the module; such groups are replicas. None: all ranks.
        groups: (pattern of parameter names, optimizer options) pairs; the first pattern that matches a name applies.
        tables: the embeddings whose rows are split over the ranks (`tables.py`), given like `units`.
        table_optimizer: the optimizer of tables: "adagrad", "adam" or {"name": ..., "lr": ...} (`row_optimizers.py`).
        initial: called as (name, tensor) on rank 0, fills a parameter or buffer that is on meta; None: the modules'
            `reset_parameters` do.
        kernels: as the option precision.kernels.
        timeout: seconds that a rank waits for the others.

    Raises:
        UserError: 5xx, see docs/library.md; 111 and 3xx, the ranks cannot connect; 104 to 107, options of tiers that
            are unknown, wrong or exclude each other; 6xx, the disks cannot be used.
    """
    _require_known(module, stage, precision)
    _require_masters(masters, optimizer)
    if optimizer is None:
        module.requires_grad_(False)
    recipe, rows, by_row = recipe_of(optimizer, groups), row_optimizer(table_optimizer), _tables(module, tables)
    parts = parts_of(module, units, by_row)
    fitting([pattern for pattern, _ in groups], [name for name, _ in module.named_parameters()], "groups")
    _require_trainable(parts, frozen=optimizer is None)
    how = {"offload": offload, "quantize": quantize, "shard_ranks": shard_ranks, "secondary_ranks": secondary_ranks}
    config = options_of(stage, recipe, groups, **how)
    world, comm, process = meet(timedelta(seconds=timeout))
    device, dtype = world.device, None if precision is None else _DTYPES[precision]
    device_type = device.type if comm.backend == "nccl" else "cpu"
    near = shard_ranks or secondary_ranks
    grid = single(comm) if world.size == 1 else make_grid(comm=comm, device_type=device_type, shard_ranks=near)
    _require_one_module(parts, grid["world"], device)
    axes = UnitAxes(shard=grid["data"], tensor=grid["tensor"], stage=STAGES[stage])
    if shard_ranks:
        axes = replace(axes, shard=grid["shard"], replica=grid["replica"])
    tiers = Tiers.open(config, grid, device)
    memory = Memory(grid["world"], axes, device, tiers, kernels, initial, masters != "none", recipe.moments)
    give_units(parts, dtype, recipe, memory)
    adopt_buffers(module, memory)
    calls = Calls(Values(parts, process, world.rank, device))
    split = split_rows(by_row, rows, grid["world"], calls, dtype)
    return Sharded(Assembly(module, calls, split, recipe, grid, memory, clip), partial(_cast, dtype=dtype))


def _require_trainable(parts: Sequence[Part], *, frozen: bool) -> None:
    """Refuse a module without a parameter to train, and trained parameters that are not floating point.

    Raises:
        UserError: 510.
    """
    trained = [member for part in parts for member in part.members if member.parameter.requires_grad]
    if not trained and not frozen:
        do = "give None for the optimizer of a frozen module"
        raise UserError(510, "the module has no parameter that requires a gradient", do, where="shard")
    if odd := next((member for member in trained if not member.parameter.is_floating_point()), None):
        what = f"{odd.name} is {odd.parameter.dtype}: only floating-point parameters can be trained"
        raise UserError(510, what, "freeze it, or store its real and imaginary parts as two parameters", where="shard")


def _require_known(module: nn.Module, stage: int, precision: str | None) -> None:
    """Refuse an unknown stage or precision, and a module with parameters that are sharded already.

    Raises:
        UserError: 510.
    """
    if stage not in STAGES:
        raise UserError(510, f"stage: expected 0 to 3, got {stage!r}", where="shard")
    if precision is not None and precision not in _DTYPES:
        raise UserError(510, f"precision: expected one of {', '.join(_DTYPES)}, got {precision!r}", where="shard")
    # After a failed call of `shard`, parameters may be views of units without being guarded.
    named = module.named_parameters()
    sharded = [n for n, p in named if isinstance(p, ShardedParameter) or hasattr(p, "gradient_slot")]
    if sharded:
        do = "shard a module only once; put modules that share a parameter into one module"
        raise UserError(510, f"{sharded[0]} is sharded already", do, where="shard")


def _require_masters(masters: str, optimizer: Asked | None) -> None:
    """Refuse parameters without masters for a torch optimizer. Raises UserError 510."""
    if masters != "fp32" and (masters != "none" or callable(optimizer)):
        do = 'give "fp32", or "none" with an optimizer of megazero'
        raise UserError(510, f"masters: {masters!r}", do, where="shard")


def _tables(module: nn.Module, asked: Units) -> dict[str, Table]:
    """Return the requested tables by name. Raises UserError 511: one is not an embedding, or shares its weight."""
    chosen, found = submodules(module, asked, "tables"), dict[str, Table]()
    uses = Counter(id(parameter) for one in module.modules() for parameter in one._parameters.values())
    for name, table in module.named_modules():
        if name not in chosen:
            continue
        if not isinstance(table, nn.Embedding | nn.EmbeddingBag):
            raise UserError(511, f"tables: {name} is a {type(table).__name__}", "give nn.Embedding or nn.EmbeddingBag")
        if uses[id(table.weight)] > 1:
            raise UserError(511, f"tables: {name} shares its weight", "leave it out of tables")
        found[name] = table
    return found


def _require_one_module(parts: Sequence[Part], world: Axis, device: torch.device) -> None:
    """Refuse ranks with different modules. Raises UserError 504, with the first difference."""
    own = ((part.name, m.name, m.parameter) for part in parts for m in part.members)
    lines = [f"{name} {tuple(p.shape)} {p.dtype} requires_grad={p.requires_grad} in {part}" for part, name, p in own]
    first, *others = [said.decode() for said in gather_bytes("\n".join(lines).encode(), world, "agree", device)]
    for rank, theirs in enumerate(others, 1):
        if theirs != first:
            pairs = zip_longest(first.split("\n"), theirs.split("\n"), fillvalue="nothing")
            expected, other = next((a, b) for a, b in pairs if a != b)
            what = f"has another module than rank 0: {other}; rank 0 has {expected}"
            raise UserError(504, what, "build the same module on every rank", rank=rank)


def _cast(inputs: Any, dtype: torch.dtype | None) -> Any:
    """Return inputs with every floating-point tensor converted to a dtype; None: unchanged."""
    if dtype is None:
        return inputs

    def narrowed(x: Any) -> Any:
        if isinstance(x, dict):  # torch does not look into subclasses of dict
            return {key: _cast(value, dtype) for key, value in x.items()}
        return x.to(dtype) if isinstance(x, Tensor) and x.is_floating_point() else x

    return tree_map(narrowed, inputs)
