"""Faults in what is on its way, or rests elsewhere: on the host, on disks, in codes, in second shards."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from megazero.base.quantized import BLOCK, code_bytes
from megazero.comm.home import Access
from megazero.memory.partition import PartitionedStore
from megazero.memory.recompute import Recomputed
from megazero.tools.certify.training import Rig
from megazero.zero.unit import Unit


def block_of(rig: Rig) -> Unit:
    """Return the unit of a block that this rank has."""
    return next(unit for unit in rig.built.engine.units if unit.layout.name.startswith("blocks."))


def lost_on_the_way(rig: Rig) -> None:
    away = block_of(rig).offloaded_gradients
    assert away is not None, "the layout offloads"
    away.send = lambda reduced, at=0: None  # type: ignore[method-assign]


def unwritten(rig: Rig) -> None:
    disks = block_of(rig).disks
    assert disks is not None, "the layout has disks"
    windows = disks.windows

    def read_only(
        flats: Sequence[tuple[Tensor, Access]], purpose: str, skip: Tensor | None = None
    ) -> Iterator[tuple[slice, list[Tensor]]]:
        return windows([(flat, "read" if access == "update" else access) for flat, access in flats], purpose, skip)

    disks.windows = read_only  # type: ignore[method-assign]


def inputs_of_another_block(rig: Rig) -> None:
    """Let each input that is kept on disks be the one that was kept before it, as if it left before it was copied."""
    layers = (getattr(layer, "layer", None) for layer in rig.built.model.layers)
    stores = {layer.store for layer in layers if isinstance(layer, Recomputed)}
    arenas = [store.arena for store in stores if isinstance(store, PartitionedStore)]
    assert arenas, "the layout splits kept inputs"
    for arena in arenas:
        arena.put = _one_late(arena.put)  # type: ignore[method-assign]


def _one_late(put: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    before: list[Tensor] = []

    def late(flat: Tensor) -> Tensor:
        before.append(flat.clone())
        return put(before.pop(0) if len(before) > 1 else flat)

    return late


def stale_neighbours(rig: Rig) -> None:
    second = block_of(rig).secondary
    assert second is not None, "the layout has second shards"
    second.forget = lambda: None  # type: ignore[method-assign]


def added_twice(rig: Rig) -> None:
    quantizer = block_of(rig).quantizers.gradients
    assert quantizer is not None, "the layout quantises gradients"
    dequantize_ = quantizer.ops.dequantize_

    def twice(into: Tensor, codes: Tensor, bits: int, add: bool) -> None:
        dequantize_(into, codes, bits, add)
        dequantize_(into, codes, bits, add)

    object.__setattr__(quantizer, "ops", replace(quantizer.ops, dequantize_=twice))


def scales_of_another(rig: Rig) -> None:
    quantizer = block_of(rig).quantizers.parameters
    assert quantizer is not None, "the layout quantises parameters"
    dequantize_ = quantizer.ops.dequantize_

    def swapped(into: Tensor, codes: Tensor, bits: int, add: bool) -> None:
        scales = codes[code_bytes(len(into), bits) :][: 4 * -(-len(into) // BLOCK)].view(torch.float32)
        own = scales.clone()
        scales.copy_(own.roll(1))
        dequantize_(into, codes, bits, add)
        scales.copy_(own)

    object.__setattr__(quantizer, "ops", replace(quantizer.ops, dequantize_=swapped))
