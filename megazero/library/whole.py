"""Read and change whole values of a sharded module: parameters, gradients, state_dicts."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor
from xxhash import xxh3_64_digest

from megazero.base.errors import UserError
from megazero.comm.agreement import agree
from megazero.comm.collectives import gather_bytes
from megazero.library.adopt import from_first, take
from megazero.library.assembly import Assembly
from megazero.library.parts import fitting, saved_buffers
from megazero.zero.unit import Unit

Names = str | Sequence[str]


class WholeValues:
    """The methods of `Sharded` that read or change whole values. Every rank must call each of them."""

    def __init__(self, assembly: Assembly):
        self.module, self._assembly, self._world = assembly.module, assembly, assembly.memory.world

    @contextmanager
    def gathered(self, names: Names = "*") -> Iterator[dict[str, Tensor]]:
        """Yield the whole values of parameters by name, on every rank; changes in place are kept.

        Every rank enters the context, and makes the same changes.

        Args:
            names: names of parameters, or patterns of names.

        Raises:
            UserError: 500, a name matches no parameter; 502, the ranks have changed values differently.
        """
        values, all_units = self._assembly.values, self._assembly.values.units
        chosen = fitting(names, [name for unit in all_units for name in _names(unit)], "gathered")
        units = [unit for unit in all_units if not chosen.isdisjoint(_names(unit))]
        self._assembly.meet("gathered")
        with values.lend(units, chosen):
            found = {name: unit.parameters.value(name) for unit in units for name in _names(unit) if name in chosen}
            before = {unit: unit.parameters.version for unit in units}
            yield found
            changed = [unit for unit in units if unit.parameters.version != before[unit]]
            odd = self._difference({name: found[name] for unit in changed for name in _names(unit) if name in chosen})
            if odd is not None:
                changed = units
                for value in found.values():
                    from_first(value, self._world)
            for unit in changed:
                unit.parameters.keep_changes([name for name in _names(unit) if name in chosen])
        if changed:
            values.begin_epoch()
        values.require_unchanged(chosen)
        if odd is not None:
            raise odd

    def full_state_dict(self, *, everywhere: bool = False) -> dict[str, Tensor]:
        """Return the module's whole state_dict in host memory on rank 0; on other ranks, an empty dictionary.

        Every rank calls it. Parameters are in the precision of forward and backward.

        Args:
            everywhere: return it on every rank.
        """
        self._assembly.meet("full_state_dict")
        wanted = everywhere or self._world.rank == 0
        values, found = self._assembly.values, dict[str, Tensor]()
        values.release_all()
        for unit in values.units:
            values.gather.unshard([unit])
            if wanted:
                found |= {name: unit.parameters.value(name).to("cpu", copy=True) for name in _names(unit)}
            values.gather.reshard([unit])
        for table in self._assembly.tables.shards:
            if (whole := table.gathered(wanted=wanted)) is not None:
                found[table.name] = whole
        if not wanted:
            return {}
        found |= {name: buffer.detach().to("cpu", copy=True) for name, buffer in saved_buffers(self.module).items()}
        return {key: found[name] for key, (name, _) in self._keys().items()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Take the values of rank 0's state_dict of the whole module; those of other ranks are not read.

        The optimizer's state does not change. Every rank calls it.

        Raises:
            UserError: 508, a name is missing or is not the module's, or a tensor has another shape.
        """
        self._assembly.meet("load_state_dict")
        values, world = self._assembly.values, self._world
        keys = self._keys()
        shapes = {key: shape for key, (_, shape) in keys.items()}
        agree(world, values.device, lambda: None if world.rank else _require_fitting(state, shapes))
        by_name = {name: state.get(key) for key, (name, _) in reversed(keys.items())}
        values.release_all()
        for unit in values.units:
            take(unit, by_name, world)
        values.begin_epoch()
        for table in self._assembly.tables.shards:
            table.take(by_name.get(table.name))
        for name, buffer in saved_buffers(self.module).items():
            if (value := by_name.get(name)) is not None and world.rank == 0:
                buffer.copy_(value)
            from_first(buffer, world)

    def gradients(self, names: Names = "*") -> dict[str, Tensor]:
        """Return whole reduced gradients, between `backward` and `step`: what `.grad` holds in plain torch.

        Every rank calls it and gets copies of the mean over the ranks, before clipping, in the dtype of accumulation.

        Args:
            names: names of parameters, or patterns of names.

        Raises:
            UserError: 500, a name matches no trained parameter; 503, there was no backward.
        """
        self._assembly.require_backward("gradients")
        self._assembly.meet("gradients")
        engine, found = self._assembly.engine, dict[str, Tensor]()
        chosen = fitting(names, [name for unit in engine.units for name in _names(unit)], "gradients")
        self._assembly.stage_gradients.finish_reduction()
        factor = 1.0 / (self._world.size * engine.loss_scale.scale.double())
        for unit in engine.units:
            if not chosen.isdisjoint(_names(unit)):
                whole = unit.gradients.whole() * factor.to(unit.gradients.reduced.dtype)
                of_unit = {i.name: whole[i.start : i.stop].view(i.shape) for i in unit.layout.intervals}
                found |= {name: values for name, values in of_unit.items() if name in chosen}
        return found

    def _keys(self) -> dict[str, tuple[str, tuple[int, ...]]]:
        """Return the keys of the module's state_dict, each with the name and the shape of its parameter or buffer."""
        found = {id(m.parameter): (m.name, m.shape) for part in self._assembly.parts for m in part.members}
        found |= {id(table.weight): (table.name, table.shape) for table in self._assembly.tables.shards}
        found |= {id(buffer): (name, tuple(buffer.shape)) for name, buffer in saved_buffers(self.module).items()}
        keys: dict[str, tuple[str, tuple[int, ...]]] = {}
        for prefix, owner in self.module.named_modules(remove_duplicate=False):
            for attribute, value in (*owner._parameters.items(), *owner._buffers.items()):
                if id(value) in found and attribute not in owner._non_persistent_buffers_set:
                    keys[f"{prefix}.{attribute}".lstrip(".")] = found[id(value)]
        return keys

    def _difference(self, values: Mapping[str, Tensor]) -> UserError | None:
        """Return error 502 for values that ranks have changed differently; None: they are equal."""
        if self._world.size == 1:
            return None
        raw = (value.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy() for value in values.values())
        mine = b"".join(xxh3_64_digest(each.tobytes()) for each in raw)
        everybody = gather_bytes(mine, self._world, "agree", self._assembly.values.device)
        for rank, theirs in enumerate(everybody):
            if theirs != everybody[0]:
                odd = next((n for i, n in enumerate(values) if theirs[8 * i :][:8] != everybody[0][8 * i :][:8]), "?")
                what = f"{odd}: rank {rank} has changed it to other values than rank 0, whose values all ranks have now"
                return UserError(502, what, "make the same change on every rank", where="gathered")
        return None


def _names(unit: Unit) -> list[str]:
    return [interval.name for interval in unit.layout.intervals]


def _require_fitting(state: Mapping[str, Tensor], shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Refuse a state_dict that is not the module's, before any value is taken. Raises UserError 508."""
    if not isinstance(state, Mapping):
        what = f"expected a mapping of names to tensors, got a {type(state).__name__}"
        raise UserError(508, what, "give the state_dict of this module", where="load_state_dict")
    for key in (*shapes, *state):
        got = _in_words(state[key]) if key in state else "nothing"
        if (expected := str(shapes.get(key, "no such name"))) != got:
            what = f"{key}: expected {expected}, got {got}"
            raise UserError(508, what, "give the state_dict of this module", where="load_state_dict")


def _in_words(value: object) -> str:
    """Return the shape of a tensor whose values can be read, else a description of the value."""
    if not isinstance(value, Tensor):
        return f"a {type(value).__name__}"
    try:
        value.detach().reshape(-1)[:1].tolist()
    except RuntimeError as error:  # on the meta device, or of an unusual layout or class
        return f"a tensor on {value.device} that cannot be read: {str(error).splitlines()[0]}"
    return str(tuple(value.shape))
