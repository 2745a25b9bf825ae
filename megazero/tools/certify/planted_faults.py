"""Faults that the certificate has to find: each small, realistic, and planted into a layout's ranks.

A fault changes what has been built on a rank (`Rig`), on every rank or on one, and nothing of the program. Each names
the layout that it is planted into; that layout must pass without it.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from megazero.build.assemble import StageInputs
from megazero.checkpoint.save import ShardState
from megazero.data.windows import MicroBatch
from megazero.model.block import Block
from megazero.optim.adamw import AdamW
from megazero.optim.optimizer import Optimizer
from megazero.plan.job import Job
from megazero.tools.certify.planted_on_the_way import (
    added_twice,
    block_of,
    inputs_of_another_block,
    inverted_residuals,
    larger_own,
    larger_scales,
    lost_on_the_way,
    lost_residuals,
    scales_of_another,
    stale_neighbours,
    truncated_codes,
    unwritten,
)
from megazero.tools.certify.tolerances import DECAY
from megazero.tools.certify.training import Plant, Rig
from megazero.zero.unit import Unit

DTYPES = ("fp64", "fp32", "bf16", "fp16")
Variant = Callable[[Job], Job]  # of a job on one process
ALONE: Variant = replace  # the reference alone can find what is on both sides of a comparison with it
DATA: Variant = partial(replace, data=2, stage=1)
SHARDED: Variant = partial(replace, data=2, stage=3)
PIPELINE: Variant = partial(replace, pipeline=2)
SEQUENCE: Variant = partial(replace, tensor=2, sequence=True)
CHUNKS: Variant = partial(replace, tensor=2, sequence=True, tensor_chunks=2)
OFFLOADED: Variant = partial(replace, data=2, stage=2, offload_optimizer=True)
ON_DISKS: Variant = partial(replace, data=2, stage=2, disk_optimizer=True)
DISK_INPUTS: Variant = partial(replace, tensor=2, recompute="full", partition=True, disk_inputs=True)
QUANTISED: Variant = partial(replace, data=2, stage=3, parameter_bits=8, gradient_bits=8)
CODES: Variant = partial(replace, data=2, stage=2, gradient_bits=4)
FED_BACK: Variant = partial(replace, data=2, stage=2, gradient_bits=8, error_feedback=True)
NEAR: Variant = partial(replace, data=2, stage=3, secondary_ranks=2)
DELAYED: Variant = partial(replace, data=2, stage=1, offload_optimizer=True, delayed=True)


@dataclass(frozen=True)
class Fault:
    """One fault to plant.

    Attributes:
        what: what is wrong, in a few words.
        layout: the layout that it is planted into.
        least: how many times its tolerance some measure has to be.
        dtypes: in which precisions it can be.
    """

    name: str
    what: str
    layout: Variant
    plant: Plant
    least: float = 1.0
    dtypes: tuple[str, ...] = DTYPES


def _of_one_rank(plant: Plant) -> Plant:
    """Return the fault on the second data rank only."""

    def on_second(rig: Rig) -> None:
        if rig.grid["data"].rank == 1:
            plant(rig)

    return on_second


def _around_update(rig: Rig, wrong: Callable[[Callable[..., None], Unit, dict[str, Any]], None]) -> None:
    """Call `wrong(update, unit, arguments)` instead of each update of a unit."""
    optimizer = rig.built.engine.optimizer
    update = optimizer.update
    optimizer.update = lambda unit, **how: wrong(update, unit, how)  # type: ignore[method-assign]


def _change_pieces(optimizer: Optimizer, change: Callable[[Any], dict[str, float]]) -> None:
    assert isinstance(optimizer, AdamW), "the fault is planted in it"
    optimizer._pieces = {
        unit: [replace(piece, **change(piece)) for piece in pieces] for unit, pieces in optimizer._pieces.items()
    }


def no_decay(rig: Rig) -> None:
    _change_pieces(rig.built.engine.optimizer, lambda piece: {"decay": 0.0})


def misplaced_decay(rig: Rig) -> None:
    _change_pieces(rig.built.engine.optimizer, lambda piece: {"decay": DECAY - piece.decay})


def one_rate(rig: Rig) -> None:
    _change_pieces(rig.built.engine.optimizer, lambda piece: {"lr_factor": 1.0})


def counted_skip(rig: Rig) -> None:
    def wrong(update: Callable[..., None], unit: Unit, how: dict[str, Any]) -> None:
        update(unit, **how)
        for step in rig.built.engine.optimizer.steps(unit):
            step += how["skip"]

    _around_update(rig, wrong)


def kept_scale(rig: Rig) -> None:
    rig.built.engine.loss_scale.update = lambda finite, counts: None  # type: ignore[method-assign]


def loose_clip(rig: Rig) -> None:
    rig.built.engine.clip *= 3


def frozen_norms(rig: Rig) -> None:
    def wrong(update: Callable[..., None], unit: Unit, how: dict[str, Any]) -> None:
        before = unit.masters.clone()
        update(unit, **how)
        for interval in unit.layout.intervals:
            if "norm" in interval.name:
                first, last = (max(end - unit.shard.start, 0) for end in (interval.start, interval.stop))
                unit.masters[first:last] = before[first:last]
        unit.resting.round_masters()

    _around_update(rig, wrong)


def wrong_lr(rig: Rig) -> None:
    _around_update(rig, lambda update, unit, how: update(unit, **{**how, "lr": 1.02 * how["lr"]}))


def no_update(rig: Rig) -> None:
    block = block_of(rig)
    _around_update(rig, lambda update, unit, how: None if unit is block else update(unit, **how))


def late_bias_correction(rig: Rig) -> None:
    optimizer = rig.built.engine.optimizer
    for unit in rig.built.engine.units:
        for step in optimizer.steps(unit):
            step.fill_(1)


def swapped_betas(rig: Rig) -> None:
    optimizer = rig.built.engine.optimizer
    assert isinstance(optimizer, AdamW), "the fault is planted in it"
    optimizer.betas = (optimizer.betas[1], optimizer.betas[0])


def scaled(by: float, *, everywhere: bool) -> Plant:
    """Multiply the gradients of one block, or of all units, when they have been reduced."""

    def plant(rig: Rig) -> None:
        for unit in rig.built.engine.units if everywhere else [block_of(rig)]:
            _scale_reduced(unit, by)

    return plant


def _scale_reduced(unit: Unit, by: float) -> None:
    end = unit.gradients.end_reduce

    def scale_and_end() -> None:
        unit.gradients.own.mul_(by)
        end()

    unit.gradients.end_reduce = scale_and_end  # type: ignore[method-assign]


def lost_gradients(rig: Rig) -> None:
    unit = block_of(rig)
    close = unit.gradients.close

    def close_and_lose() -> None:
        close()
        assert unit.gradients.partial is not None
        unit.gradients.partial.zero_()

    unit.gradients.close = close_and_lose  # type: ignore[method-assign]


def rough_sums(rig: Rig) -> None:
    """Round each rank's gradients to two bits before they are summed."""
    for unit in rig.built.engine.units:
        _round_before_sum(unit)


def _round_before_sum(unit: Unit) -> None:
    close = unit.gradients.close

    def close_and_round() -> None:
        close()
        assert unit.gradients.partial is not None
        mantissa, exponent = torch.frexp(unit.gradients.partial)
        unit.gradients.partial.copy_(torch.ldexp((mantissa * 4).round() / 4, exponent))

    unit.gradients.close = close_and_round  # type: ignore[method-assign]


def norm_without_a_unit(rig: Rig) -> None:
    engine = rig.built.engine
    engine._counted[0] = False


def other_weights(rig: Rig) -> None:
    block_of(rig).resting.parameters.values.mul_(1.01)


def stale_shards(rig: Rig) -> None:
    gather, block = rig.built.engine.gather, block_of(rig)
    publish = gather.publish
    gather.publish = lambda unit: unit.parameters.send_updated() if unit is block else publish(unit)  # type: ignore[method-assign]


def lost_micro_batch(rig: Rig) -> None:
    batches = rig.batches
    rig.batches = lambda step: batches(step)[:-1]


def samples_of_the_next_step(rig: Rig) -> None:
    batches = rig.batches
    rig.batches = lambda step: batches(step + 1)


def other_tokens(rig: Rig) -> None:
    batches = rig.batches

    def wrong(step: int) -> list[MicroBatch]:
        first, *rest = batches(step)
        return [replace(first, tokens_SB=first.tokens_SB.flip(0)), *rest]

    rig.batches = wrong


def targets_of_another(rig: Rig) -> None:
    feed, before = rig.feed, []

    def wrong(batch: MicroBatch, step: int, training: bool) -> StageInputs:
        own = feed(batch, step, training)
        before.append(own)
        return replace(own, targets_SB=before[max(len(before) - 2, 0)].targets_SB)

    rig.feed = wrong


def _fed(rig: Rig, wrong: Callable[[StageInputs], StageInputs]) -> None:
    feed = rig.feed
    rig.feed = lambda batch, step, training: wrong(feed(batch, step, training))


def across_documents(rig: Rig) -> None:
    _fed(rig, lambda own: replace(own, now=replace(own.now, documents=None)))


def all_scored(rig: Rig) -> None:
    _fed(rig, lambda own: replace(own, valid_SB=torch.ones_like(own.valid_SB)))


def masks_of_another_layer(rig: Rig) -> None:
    """Give the blocks of a pipeline rank numbers from 0."""
    if rig.grid["pipeline"].rank == 0:
        return
    for block in rig.built.model.blocks:
        assert isinstance(block, Block)
        for dropout in (block.attention_dropout, block.mlp_dropout):
            seed, layer, site = dropout._name
            dropout._name = seed, layer - 1, site


def untied(rig: Rig) -> None:
    rig.built.pipeline._reduce_tied = lambda: None


def incomplete_tails(rig: Rig) -> None:
    for unit in rig.built.engine.units:
        unit.axes = replace(unit.axes, sequence=False)


def swapped_chunks(rig: Rig) -> None:
    """Let one tensor rank take the chunks of its products in another order: sums then add other rows."""
    block = rig.built.model.blocks[0]
    assert isinstance(block, Block)
    region = block.mlp.down.product.region
    cut = region.cut
    if region.axis.rank == 1:
        object.__setattr__(region, "cut", lambda rows: cut(rows)[::-1])


def published_at_once(rig: Rig) -> None:
    engine = rig.built.engine
    finish = engine.finish_step

    def finish_and_catch_up(lr: float):
        done = finish(lr)
        engine.flush_delayed()
        return done

    engine.finish_step = finish_and_catch_up  # type: ignore[method-assign]


def _held_otherwise(rig: Rig, wrong: Callable[[ShardState], ShardState]) -> None:
    holdings = rig.holdings
    rig.holdings = lambda: [wrong(holding) if number == 1 else holding for number, holding in enumerate(holdings())]


def held_twice(rig: Rig) -> None:
    _held_otherwise(rig, lambda holding: replace(holding, pieces=(*holding.pieces, holding.pieces[0])))


def held_by_nobody(rig: Rig) -> None:
    def shorter(holding: ShardState) -> ShardState:
        first, *rest = holding.pieces
        return replace(holding, pieces=(replace(first, stop=first.stop - 1), *rest))

    _held_otherwise(rig, shorter)


FAULTS = (
    Fault("no-decay", "weight decay is dropped", DATA, no_decay, 10),
    Fault("misplaced-decay", "what should decay does not, all else does", DATA, misplaced_decay, 10),
    Fault("loose-clip", "the gradient norm is clipped to 3 times as much", DATA, loose_clip, 10),
    Fault("frozen-norms", "norms are never updated", DATA, frozen_norms, 10),
    Fault("wrong-lr", "the learning rate is 2 % too large", DATA, wrong_lr, 10),
    Fault("one-rate", "all groups learn at one rate, on both sides", ALONE, one_rate, 10),
    Fault("loose-clip-alone", "the clip is 3 times as much, on both sides", ALONE, loose_clip, 10),
    Fault("across-documents", "attention crosses documents, on both sides", ALONE, across_documents),
    Fault("all-scored", "targets of other documents are scored, on both sides", ALONE, all_scored),
    Fault("counted-skip", "Adam counts a skipped step, on both sides", ALONE, counted_skip, dtypes=("fp16",)),
    Fault("kept-scale", "the loss scale stays when gradients overflow", DATA, kept_scale, dtypes=("fp16",)),
    Fault("bias-correction", "Adam's bias correction counts one update more", DATA, late_bias_correction),
    Fault("swapped-betas", "Adam's betas are swapped", DATA, swapped_betas),
    Fault("no-update", "one rank never updates its part of a block", SHARDED, _of_one_rank(no_update)),
    Fault("lost-gradients", "one rank's gradients of a block are dropped", DATA, _of_one_rank(lost_gradients)),
    Fault("rough-sums", "gradients are rounded to two bits before they are summed", DATA, rough_sums),
    Fault("norm-of-fewer", "a unit is missing in the gradient norm", SHARDED, norm_without_a_unit),
    Fault("other-weights", "one rank begins with other weights", DATA, _of_one_rank(other_weights)),
    Fault("stale-shards", "a block's updated shards are never gathered", DATA, stale_shards),
    Fault("lost-micro-batch", "one rank skips a micro-batch", DATA, _of_one_rank(lost_micro_batch)),
    Fault("next-samples", "one rank reads a step ahead", DATA, _of_one_rank(samples_of_the_next_step)),
    Fault("other-tokens", "a sample's tokens come in another order", DATA, _of_one_rank(other_tokens)),
    Fault("other-targets", "the last stage scores another micro-batch's targets", PIPELINE, targets_of_another),
    Fault("other-masks", "dropout masks are those of another layer", PIPELINE, masks_of_another_layer),
    Fault("untied", "the tied weight's two gradients are not added", PIPELINE, untied),
    Fault("partial-tails", "norms get the gradient of a rank's own tokens", SEQUENCE, incomplete_tails),
    Fault("swapped-chunks", "one rank sums its chunks of rows in another order", CHUNKS, swapped_chunks),
    Fault("lost-to-host", "a block's gradients never reach the host", OFFLOADED, lost_on_the_way),
    Fault("lost-to-disk", "a block's gradients never reach the disk", ON_DISKS, lost_on_the_way),
    Fault("unwritten", "what an update changes is not written back to the disk", ON_DISKS, unwritten),
    Fault("late-inputs", "a block is computed again from another one's input", DISK_INPUTS, inputs_of_another_block),
    Fault("stale-neighbours", "neighbours keep a block's parameters of before the update", NEAR, stale_neighbours),
    Fault("added-twice", "what another rank's codes mean is added twice", QUANTISED, added_twice),
    Fault("other-scales", "a block of codes is multiplied by another one's scale", QUANTISED, scales_of_another),
    Fault("truncated-codes", "codes are truncated instead of rounded", CODES, truncated_codes),
    Fault("larger-scales", "scales of codes are 2 % too large", CODES, larger_scales),
    Fault("larger-own", "a rank adds 1.02 times its own gradients to the others' codes", CODES, larger_own),
    Fault(
        "lost-residuals",
        "rounding errors of codes are not sent with the next gradients",
        FED_BACK,
        lost_residuals,
        dtypes=DTYPES[:3],
    ),
    Fault(
        "inverted-residuals",
        "rounding errors of codes are subtracted from the next gradients",
        FED_BACK,
        inverted_residuals,
        dtypes=DTYPES[:3],
    ),
    Fault("not-delayed", "a delayed update is published at once", DELAYED, published_at_once),
    Fault("held-twice", "a piece of a parameter is held twice", DATA, _of_one_rank(held_twice)),
    Fault("held-by-nobody", "an element is held by nobody", DATA, _of_one_rank(held_by_nobody)),
)
