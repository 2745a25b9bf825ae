"""Faults in what is on its way, or rests elsewhere: on the host, on disks, in codes, in second shards."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

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
    away = block_of(rig).resting.offloaded_gradients
    assert away is not None, "the layout offloads"
    away.send = lambda reduced, at=0: None  # type: ignore[method-assign]


def unwritten(rig: Rig) -> None:
    disks = block_of(rig).resting.paged
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
    block_of(rig).parameters.gathering.forget = lambda: None  # type: ignore[method-assign]


def _summing_of(unit: Unit) -> Any:
    """Return what quantises the gradients of a unit: an extension, which only its registry imports."""
    assert unit.gradients.summing.rounds, "the layout quantises gradients"
    return unit.gradients.summing


def _before(rig: Rig, method: str, wrong: Callable[..., object]) -> None:
    """Call `wrong(quantizer, ...)` before a method of what quantises the gradients of a block."""
    quantizer = _summing_of(block_of(rig))
    right = getattr(quantizer, method)

    def both(*given: Any, **options: Any) -> Any:
        wrong(quantizer, *given)
        return right(*given, **options)

    setattr(quantizer, method, both)


def lost_residuals(rig: Rig) -> None:
    _before(rig, "_quantize", lambda quantizer, *given: quantizer.residuals.zero_())


def inverted_residuals(rig: Rig) -> None:
    _before(rig, "_quantize", lambda quantizer, codes, x, number: quantizer.residuals[number].neg_())


def larger_own(rig: Rig) -> None:
    _before(rig, "_start_exchange", lambda quantizer, parts, out, axis, *rest: parts[axis.rank].mul_(1.02))


def _coded_otherwise(rig: Rig, wrong: Callable[[Callable[..., None], Tensor, Tensor, int], None]) -> None:
    quantizer = _summing_of(block_of(rig))
    right = quantizer.ops.quantize_
    ops = replace(quantizer.ops, quantize_=lambda codes, x, bits: wrong(right, codes, x, bits))
    quantizer.ops = ops


def truncated_codes(rig: Rig) -> None:
    def wrong(right: Callable[..., None], codes: Tensor, x: Tensor, bits: int) -> None:
        blocks = x.view(-1, BLOCK)
        step = blocks.abs().amax(1, keepdim=True) / (2 ** (bits - 1) - 1)
        right(codes, (step * (blocks / step).trunc().nan_to_num()).flatten(), bits)

    _coded_otherwise(rig, wrong)


def larger_scales(rig: Rig) -> None:
    def wrong(right: Callable[..., None], codes: Tensor, x: Tensor, bits: int) -> None:
        right(codes, x, bits)
        _scales(codes, len(x), bits).mul_(1.02)

    _coded_otherwise(rig, wrong)


def _scales(codes: Tensor, numel: int, bits: int) -> Tensor:
    return codes[code_bytes(numel, bits) :][: 4 * -(-numel // BLOCK)].view(torch.float32)


def added_twice(rig: Rig) -> None:
    quantizer = _summing_of(block_of(rig))
    dequantize_ = quantizer.ops.dequantize_

    def twice(into: Tensor, codes: Tensor, bits: int, add: bool) -> None:
        dequantize_(into, codes, bits, add)
        dequantize_(into, codes, bits, add)

    quantizer.ops = replace(quantizer.ops, dequantize_=twice)


def scales_of_another(rig: Rig) -> None:
    gathering = block_of(rig).parameters.gathering
    assert gathering.rounds, "the layout quantises parameters"
    quantizer: Any = getattr(gathering, "far", gathering)
    dequantize_ = quantizer.ops.dequantize_

    def swapped(into: Tensor, codes: Tensor, bits: int, add: bool) -> None:
        scales = _scales(codes, len(into), bits)
        own = scales.clone()
        scales.copy_(own.roll(1))
        dequantize_(into, codes, bits, add)
        scales.copy_(own)

    quantizer.ops = replace(quantizer.ops, dequantize_=swapped)
