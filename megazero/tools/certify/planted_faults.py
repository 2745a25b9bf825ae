"""Faults that the certificate has to find: each small, realistic, and planted into a layout's ranks.

A fault changes the objects of a rank (`Rig`), on every rank or on one, but not the program's code. Each names the
layout that it is planted into; that layout must pass without the fault. Most faults replace a method by another
function: `planted_calls.py` has the helpers, and the objects whose methods are replaced.
"""

from collections.abc import Callable
from dataclasses import replace
from itertools import count
from typing import Any

import torch
from torch import Tensor

from megazero.base.quantized import BLOCK
from megazero.checkpoint.pieces import ShardState
from megazero.kernels.operations import Operations
from megazero.kernels.reference import scales_of
from megazero.memory.partition import PartitionedStore
from megazero.memory.recompute import Recomputed
from megazero.model.block import Block
from megazero.optim.mixture import Mixture
from megazero.plan.job import Job
from megazero.plan.states import units_of
from megazero.tools.certify.fault import (
    ALONE,
    CHUNKS,
    CODES,
    DATA,
    DELAYED,
    DISK_INPUTS,
    FED_BACK,
    NEAR,
    OFFLOADED,
    ON_DISKS,
    PIPELINE,
    QUANTISED,
    SEQUENCE,
    SHARDED,
    TENSOR,
    Fault,
    in_three_chunks,
)
from megazero.tools.certify.planted_calls import Where, after, before, block, changed, in_codes, instead, itself, units
from megazero.tools.certify.tolerances import DECAY
from megazero.tools.certify.training import Plant, Rig
from megazero.zero.unit import Unit
from megazero.zero.unit_gradients import UnitGradients

_ADAM, _QUANTIZE = "built.engine.optimizer", "gradients.summing._quantize"
_UPDATE = f"{_ADAM}.update"


def _of_one_rank(plant: Plant) -> Plant:
    """Return the fault on the second data rank only."""
    return lambda rig: plant(rig) if rig.grid["data"].rank == 1 else None


def _pieces(change: Callable[[Any], dict[str, float]]) -> Plant:
    """Return the fault that gives each piece (elements that are updated at once) the settings `change(its group)`."""

    def of_all(of: dict[Unit, list[Any]]) -> dict[Unit, list[Any]]:
        for pieces in of.values():
            for each in pieces:
                object.__setattr__(each, "group", replace(each.group, **change(each.group)))
        return of

    return changed(itself, f"{_ADAM}._pieces", of_all)


def _scaled(where: Where) -> Plant:
    """Return the fault that multiplies the gradients of some units by 1.04 after their reduction."""
    return before(where, "gradients.end_reduce", lambda gradients: gradients.own.mul_(1.04))


def _late_bias_correction(rig: Rig) -> None:
    for unit in rig.built.engine.units:
        for piece in rig.built.engine.optimizer.pieces(unit):
            piece.step.fill_(1)


def _count_skip(adam: Mixture, unit: Unit, *, skip: Tensor, **how: Any) -> None:
    for piece in adam.pieces(unit):
        piece.step.add_(skip)


def _update_but_norms(adam: Mixture, update: Callable[..., None], unit: Unit, **how: Any) -> None:
    kept = unit.masters.clone()
    update(unit, **how)
    for interval in unit.layout.intervals:
        if "norm" in interval.name:
            first, last = (max(end - unit.shard.start, 0) for end in (interval.start, interval.stop))
            unit.masters[first:last] = kept[first:last]
    unit.resting.round_masters()


def _update_but_block(adam: Mixture, update: Callable[..., None], unit: Unit, **how: Any) -> None:
    if unit.layout.name != "blocks.0":
        update(unit, **how)


def _publish_but_block(_: object, publish: Callable[[Unit], None], unit: Unit) -> None:
    if unit.layout.name == "blocks.0":
        unit.parameters.send_updated()
    else:
        publish(unit)


def _round_to_two_bits(gradients: UnitGradients) -> None:
    assert gradients.partial is not None
    mantissa, exponent = torch.frexp(gradients.partial)
    gradients.partial.copy_(torch.ldexp((mantissa * 4).round() / 4, exponent))


def _fed(wrong: Callable[[Any], Any]) -> Plant:
    """Return the fault that replaces the inputs that stages get of each micro-batch by `wrong(inputs)`."""
    return instead(itself, "feed", lambda rig, feed, *batch: wrong(feed(*batch)))


def _targets_of_another(rig: Rig) -> None:
    seen: list[Tensor] = []

    def wrong(own: Any) -> Any:
        seen.append(own.targets_SB)
        return replace(own, targets_SB=seen[max(len(seen) - 2, 0)])

    _fed(wrong)(rig)


def _read_other_tokens(rig: Rig, batches: Callable[..., Any], step: int) -> list[Any]:
    first, *rest = batches(step)
    return [replace(first, tokens_SB=first.tokens_SB.flip(0)), *rest]


def _dropouts(rig: Rig) -> list[Any]:
    """Return the dropouts of the blocks of the second pipeline rank."""
    blocks = rig.built.model.blocks if rig.grid["pipeline"].rank else []
    return [each for of in blocks if isinstance(of, Block) for each in (of.attention_dropout, of.mlp_dropout)]


def _regions(rig: Rig) -> list[Any]:
    layer = rig.built.model.blocks[0]
    assert isinstance(layer, Block)
    return [layer.attention.projection.region]


def _arenas(rig: Rig) -> list[Any]:
    layers = (getattr(layer, "layer", None) for layer in rig.built.model.layers)
    stores = {layer.store for layer in layers if isinstance(layer, Recomputed)}
    return [store.arena for store in stores if isinstance(store, PartitionedStore)]


def _keep_the_one_before(arena: Any, put: Callable[[Tensor], Tensor], flat: Tensor) -> Tensor:
    """Store the previous input in place of this one, as if it was sent before it was copied."""
    before, arena.seen = getattr(arena, "seen", flat), flat.clone()
    return put(before)


def _read_only(disks: object, windows: Callable[..., Any], flats: Any, *rest: Any) -> Any:
    return windows([(flat, "read" if access == "update" else access) for flat, access in flats], *rest)


def _truncate(quantize_: Callable[..., None], codes: Tensor, x: Tensor, bits: int) -> None:
    blocks = x.view(-1, BLOCK)
    step = blocks.abs().amax(1, keepdim=True) / (2 ** (bits - 1) - 1)
    quantize_(codes, (step * (blocks / step).trunc().nan_to_num()).flatten(), bits)


def _enlarge_scales(quantize_: Callable[..., None], codes: Tensor, x: Tensor, bits: int) -> None:
    quantize_(codes, x, bits)
    scales_of(codes, len(x), bits).mul_(1.02)


def _has_tails(job: Job) -> bool:
    """Return whether parameters that are whole on all tensor ranks have partial gradients there."""
    return any(unit.summed_from(sequence=job.sequence) is not None for unit in units_of(job))


def _of_chunk(factor: float) -> Plant:
    """Return the fault that multiplies the gradients of the logits of one of three chunks of the loss."""

    def wrong(ops: Operations) -> Operations:
        calls = count()

        def backward_(exponentials: Tensor, maxima: Tensor, log_sums: Tensor, targets: Tensor, grads: Tensor) -> None:
            scale = factor if next(calls) % 3 == 2 else 1.0
            ops.cross_entropy_backward_(exponentials, maxima, log_sums, targets, grads * scale)

        return replace(ops, cross_entropy_backward_=backward_)

    return changed(lambda rig: [rig.built.model.head.loss], "ops", wrong)


def _add_twice(dequantize_: Callable[..., None], *given: Any) -> None:
    dequantize_(*given)
    dequantize_(*given)


def _swap_scales(dequantize_: Callable[..., None], into: Tensor, codes: Tensor, bits: int, add: bool) -> None:
    scales = scales_of(codes, len(into), bits)
    own = scales.clone()
    scales.copy_(own.roll(1))
    dequantize_(into, codes, bits, add)
    scales.copy_(own)


def _held_otherwise(wrong: Callable[[ShardState], Any]) -> Plant:
    """Return the fault that replaces the pieces that a rank would save of its second unit by `wrong(holding)`."""

    def held(rig: Rig, holdings: Callable[[], list[ShardState]]) -> list[ShardState]:
        first, second, *rest = holdings()
        return [first, replace(second, pieces=wrong(second)), *rest]

    return instead(itself, "holdings", held)


def _shorter(holding: ShardState) -> list[Any]:
    first, *rest = holding.pieces
    return [replace(first, stop=first.stop - 1), *rest]


_NO_DECAY, _OTHER_DECAY = _pieces(lambda group: {"decay": 0.0}), _pieces(lambda group: {"decay": DECAY - group.decay})
_ONE_RATE = _pieces(lambda group: {"lr_factor": 1.0})
_LOOSE_CLIP = changed(itself, "built.engine.clips", lambda clips: [3 * clip for clip in clips])
_FASTER = instead(itself, _UPDATE, lambda adam, update, unit, *, lr, **how: update(unit, lr=1.02 * lr, **how))
_FROZEN_NORMS = instead(itself, _UPDATE, _update_but_norms)
_NO_UPDATE = _of_one_rank(instead(itself, _UPDATE, _update_but_block))
_COUNTED = after(itself, _UPDATE, _count_skip)
_SWAPPED_BETAS = changed(
    itself, f"{_ADAM}.settings", lambda it: {n: replace(own, betas=own.betas[::-1]) for n, own in it.items()}
)
_KEPT_SCALE = instead(itself, "built.engine.loss_scale.update", lambda scale, update, finite, counts: None)
_LOST = _of_one_rank(after(block, "gradients.close", lambda gradients: gradients.partial.zero_()))
_ROUGH = after(units, "gradients.close", _round_to_two_bits)
_NORM_OF_FEWER = changed(itself, "built.engine._counted", lambda it: torch.cat((torch.zeros_like(it[:1]), it[1:])))
_OTHER_WEIGHTS = _of_one_rank(changed(block, "resting.parameters.values", lambda values: values.mul_(1.01)))
_STALE = instead(itself, "built.engine.gather.publish", _publish_but_block)
_FEWER = _of_one_rank(instead(itself, "batches", lambda rig, batches, step: batches(step)[:-1]))
_AHEAD = _of_one_rank(instead(itself, "batches", lambda rig, batches, step: batches(step + 1)))
_OTHER_TOKENS = _of_one_rank(instead(itself, "batches", _read_other_tokens))
_ACROSS = _fed(lambda own: replace(own, now=replace(own.now, documents=None)))
_ALL_SCORED = _fed(lambda own: replace(own, valid_SB=torch.ones_like(own.valid_SB)))
_OTHER_MASKS = changed(_dropouts, "_name", lambda name: (name[0], name[1] - 1, name[2]))
_UNTIED = instead(itself, "built.pipeline._reduce_tied", lambda pipeline, reduce: None)
_HEADS = changed(units, "layout", lambda layout: replace(layout, tp_partial=None))
_TAILS = changed(units, "axes", lambda axes: replace(axes, sequence=False))
_SWAPPED = instead(_regions, "cut", lambda region, cut, rows: cut(rows)[:: -1 if region.axis.rank == 1 else 1])
_NOT_SENT = instead(block, "gradients.send", lambda away, send, reduced, at=0: None)
_UNWRITTEN = instead(block, "resting.paged.windows", _read_only)
_LATE_INPUTS = instead(_arenas, "put", _keep_the_one_before)
_KEPT_SECOND = instead(block, "parameters.gathering.forget", lambda second, forget: None)
_ADDED_TWICE = in_codes("gradients.summing", "dequantize_", _add_twice)
_OTHER_SCALES = in_codes("parameters.gathering", "dequantize_", _swap_scales)
_TRUNCATED = in_codes("gradients.summing", "quantize_", _truncate)
_LARGER_SCALES = in_codes("gradients.summing", "quantize_", _enlarge_scales)
_LARGER_OWN = before(
    block,
    "gradients.summing._start_exchange",
    lambda _, parts, outs, axis, *rest, **how: parts[axis.rank][0].mul_(1.02),
)
_NO_RESIDUALS = before(block, _QUANTIZE, lambda quantizer, *given, **how: quantizer.residuals.zero_())
_INVERTED = before(block, _QUANTIZE, lambda quantizer, codes, x, number, **how: quantizer.residuals[number].neg_())
_AT_ONCE = after(itself, "built.engine.finish_step", lambda engine, lr: engine.flush_delayed())
_TWICE = _of_one_rank(_held_otherwise(lambda holding: [*holding.pieces, holding.pieces[0]]))
_NOT_HELD = _of_one_rank(_held_otherwise(_shorter))

FAULTS = (
    Fault("no-decay", "weight decay is dropped", DATA, _NO_DECAY, 10),
    Fault("misplaced-decay", "weight decay is applied to the wrong parameters", DATA, _OTHER_DECAY, 10),
    Fault("loose-clip", "the clipping limit is 3 times too large", DATA, _LOOSE_CLIP, 10),
    Fault("frozen-norms", "norms are never updated", DATA, _FROZEN_NORMS, 10),
    Fault("wrong-lr", "the learning rate is 2 % too large", DATA, _FASTER, 10),
    Fault("one-rate", "all groups use one learning rate, on both sides", ALONE, _ONE_RATE, 10),
    Fault("loose-clip-alone", "the clipping limit is 3 times too large, on both sides", ALONE, _LOOSE_CLIP, 10),
    Fault("across-documents", "attention crosses documents, on both sides", ALONE, _ACROSS),
    Fault("all-scored", "targets of other documents are scored, on both sides", ALONE, _ALL_SCORED),
    Fault("counted-skip", "Adam counts a skipped step, on both sides", ALONE, _COUNTED, overflows=True),
    Fault("kept-scale", "the loss scale is kept when gradients overflow", DATA, _KEPT_SCALE, overflows=True),
    Fault("bias-correction", "Adam's bias correction counts one update too many", DATA, _late_bias_correction),
    Fault("swapped-betas", "Adam's betas are swapped", DATA, _SWAPPED_BETAS),
    Fault("no-update", "one rank never updates its part of a block", SHARDED, _NO_UPDATE),
    Fault("lost-gradients", "one rank's gradients of a block are dropped", DATA, _LOST),
    Fault("rough-sums", "gradients are rounded to two bits before they are summed", DATA, _ROUGH),
    Fault("scaled-block", "a block's reduced gradients are 4 % too large", DATA, _scaled(block)),
    Fault("scaled-gradient", "all reduced gradients are 4 % too large", DATA, _scaled(units)),
    Fault("norm-of-fewer", "a unit is missing from the gradient norm", SHARDED, _NORM_OF_FEWER),
    Fault("other-weights", "one rank begins with other weights", DATA, _OTHER_WEIGHTS),
    Fault("stale-shards", "a block's updated shards are never gathered", DATA, _STALE),
    Fault("lost-micro-batch", "one rank skips a micro-batch", DATA, _FEWER),
    Fault("next-samples", "one rank reads a step ahead", DATA, _AHEAD),
    Fault("other-tokens", "a sample's tokens come in another order", DATA, _OTHER_TOKENS),
    Fault("other-targets", "the last stage scores another micro-batch's targets", PIPELINE, _targets_of_another),
    Fault("other-masks", "a layer uses the dropout masks of another layer", PIPELINE, _OTHER_MASKS),
    Fault("untied", "the tied weight's two gradients are not added", PIPELINE, _UNTIED),
    Fault("partial-tails", "gradients of norms include only a rank's own tokens", SEQUENCE, _TAILS),
    Fault("partial-heads", "gradients of head norms include only a rank's own heads", TENSOR, _HEADS, needs=_has_tails),
    Fault("lost-chunk", "a chunk of the loss gives no gradient", in_three_chunks, _of_chunk(0.0)),
    Fault("doubled-chunk", "a chunk of the loss gives its gradient twice", in_three_chunks, _of_chunk(2.0)),
    Fault("swapped-chunks", "one rank sums its chunks of rows in another order", CHUNKS, _SWAPPED),
    Fault("lost-to-host", "a block's gradients never reach the host", OFFLOADED, _NOT_SENT),
    Fault("lost-to-disk", "a block's gradients never reach the disk", ON_DISKS, _NOT_SENT),
    Fault("unwritten", "updated state is not written back to the disk", ON_DISKS, _UNWRITTEN),
    Fault("late-inputs", "a block is recomputed from another block's input", DISK_INPUTS, _LATE_INPUTS),
    Fault("stale-neighbours", "neighbours keep a block's parameters from before the update", NEAR, _KEPT_SECOND),
    Fault("added-twice", "another rank's decoded gradients are added twice", QUANTISED, _ADDED_TWICE),
    Fault("other-scales", "a block of codes is multiplied by another block's scale", QUANTISED, _OTHER_SCALES),
    Fault("truncated-codes", "codes are truncated instead of rounded", CODES, _TRUNCATED),
    Fault("larger-scales", "scales of codes are 2 % too large", CODES, _LARGER_SCALES),
    Fault("larger-own", "a rank adds 1.02 times its own gradients to the others' codes", CODES, _LARGER_OWN),
    Fault("lost-residuals", "rounding errors of codes are not sent with the next gradients", FED_BACK, _NO_RESIDUALS),
    Fault("inverted-residuals", "rounding errors of codes are subtracted from the next gradients", FED_BACK, _INVERTED),
    Fault("not-delayed", "a delayed update is published at once", DELAYED, _AT_ONCE),
    Fault("held-twice", "a piece of a parameter is held twice", DATA, _TWICE),
    Fault("held-by-nobody", "an element is held by no rank", DATA, _NOT_HELD),
)
