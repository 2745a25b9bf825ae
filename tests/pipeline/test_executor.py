"""Pipelines against one process: every schedule, ZeRO stage and precision that the peers refuse or mishandle.

Dropout is on, valid tokens are uneven, clipping acts. The whole product of layouts is the certificate's
(tests/tools/certify/test_certify.py).
"""

from functools import cache, partial

import pytest
import torch

from megazero.builders.assemble import StageInputs
from megazero.comm.grid import Grid
from megazero.plan.job import Job
from megazero.schedules.catalogue import make
from megazero.tools.certify.tolerances import (
    GRADIENT_FP64,
    LOSS_16_BITS,
    LOSS_FP64,
    NORM_16_BITS,
    WEIGHTS_FP64,
    difference,
    weight_differences,
)
from megazero.zero.placement import Precision
from tests.layouts import SHAPES, Rank, Trained, Wires, equal, job_on, record, samples, train, train_rank
from tests.ranks import run_ranks

FP32, FP64 = Precision(), Precision(torch.float64, torch.float64)
FP16 = Precision(torch.float16, torch.float32)
BF16 = Precision(torch.bfloat16, torch.bfloat16)
SCHEDULES = {"gpipe": 1, "1f1b": 1, "interleaved": 2, "zb-h1": 1, "zb-v": 2}
# One of each kind: forward before backward by turns, several stages of a rank, backward in two parts.
FEW = [pytest.param(one, marks=() if one in ("1f1b", "interleaved", "zb-v") else pytest.mark.full) for one in SCHEDULES]


@cache
def alone(flavour: str, precision: Precision, micro_batches: int) -> Trained:
    return train(job_on(accumulation=micro_batches), flavour, precision)


def check(layout: Job, flavour: str) -> None:
    """In fp64, against one process and as many samples in a micro-batch."""
    expected, found = alone(flavour, FP64, layout.micro_batches * layout.data), train(layout, flavour, FP64)
    assert all(torch.equal(found.initial[name], value) for name, value in expected.initial.items())
    assert difference(found.losses, expected.losses) <= LOSS_FP64
    assert difference(found.norms[:1], expected.norms[:1]) <= GRADIENT_FP64
    heads, kv_heads = SHAPES[flavour].heads, SHAPES[flavour].kv_heads
    for mine, theirs, bound in (
        (found.gradients, expected.gradients, GRADIENT_FP64),
        (found.weights, expected.weights, WEIGHTS_FP64),
    ):
        assert max(weight_differences(mine, theirs, heads=heads, kv_heads=kv_heads).values()) <= bound


@pytest.mark.parametrize(
    ("stage", "schedule"),
    [pytest.param(stage, *one.values, marks=one.marks) for stage in (2, 3) for one in FEW],
)
def test_zero_2_and_3_with_a_tied_weight(stage: int, schedule: str) -> None:
    """The shared weight is on two ranks, or on one (zb-v)."""
    check(job_on(1, 2, False, 4, stage, pipeline=2, schedule=schedule, chunks=SCHEDULES[schedule]), "deep")


@pytest.mark.parametrize(
    ("stage", "schedule"),
    [(0, "zb-h1"), (1, "zb-v"), *(pytest.param(*case, marks=pytest.mark.full) for case in ((0, "zb-v"), (1, "zb-h1")))],
)
def test_zero_bubble_with_zero_1(stage: int, schedule: str) -> None:
    check(job_on(1, 2, False, 4, stage, pipeline=2, schedule=schedule, chunks=SCHEDULES[schedule]), "deep-untied")


@pytest.mark.parametrize("schedule", FEW)
def test_sequence_parallelism_in_every_schedule(schedule: str) -> None:
    check(job_on(2, 1, True, 4, 1, pipeline=2, schedule=schedule, chunks=SCHEDULES[schedule]), "deep")


@pytest.mark.parametrize("precision", [FP16, BF16], ids=["fp16", "bf16"])
@pytest.mark.parametrize(("schedule", "stage"), [("1f1b", 1), ("zb-h1", 3), ("interleaved", 2), ("zb-v", 0)])
def test_16_bits_are_the_same_bits_as_without_a_pipeline(schedule: str, stage: int, precision: Precision) -> None:
    """And as near to fp32 as they let it."""
    layout = job_on(1, 1, False, 4, stage, pipeline=2, schedule=schedule, chunks=SCHEDULES[schedule])
    found = train(layout, "deep-untied", precision)
    equal(found, alone("deep-untied", precision, 4))
    assert difference(found.losses, alone("deep-untied", FP32, 4).losses) <= LOSS_16_BITS
    assert difference(found.norms, alone("deep-untied", FP32, 4).norms) <= NORM_16_BITS


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_one_rank_is_the_same_code(schedule: str) -> None:
    """Several stages, or backward in two parts, on one process: the same bits. Tied, the sum has another order."""
    layout = job_on(accumulation=4, schedule=schedule, chunks=SCHEDULES[schedule])
    equal(train(layout, "deep-untied", FP32), alone("deep-untied", FP32, 4))
    check(layout, "deep")


@pytest.mark.parametrize("accumulation", [1, *(pytest.param(n, marks=pytest.mark.full) for n in (2, 8))])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_micro_batches_need_not_fill_the_pipeline(schedule: str, accumulation: int) -> None:
    layout = job_on(1, 1, False, accumulation, 1, pipeline=2, schedule=schedule, chunks=SCHEDULES[schedule])
    equal(train(layout, "deep-untied", FP32), alone("deep-untied", FP32, accumulation))


@pytest.mark.parametrize("sockets", [False, True], ids=["shared", "sockets"])
def test_the_way_of_the_messages_changes_nothing(sockets: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pieces of 512 bytes, far more than there are slots; or gloo's sockets."""
    layout = job_on(2, 1, True, 4, 1, pipeline=2, schedule="interleaved", chunks=2)
    whole = train(layout, "deep", FP32)
    monkeypatch.setattr("megazero.comm.transport.p2p.SLOT_BYTES", 512)
    equal(train(layout, "deep", FP32, partial(train_rank, wires=Wires(sockets=sockets))), whole)


@pytest.mark.parametrize("schedule", FEW)
def test_messages_of_more_pieces_than_slots_do_not_stand_in_each_other_s_way(
    schedule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In zb-v activations that nobody expects yet stand before the gradient that the next rank waits for."""
    monkeypatch.setattr("megazero.comm.transport.p2p.SLOT_BYTES", 128)
    for pipeline, chunks in ((2, SCHEDULES[schedule]), (4, 1)):
        if pipeline * SCHEDULES[schedule] <= 4:
            layout = job_on(1, 1, False, 8, 1, pipeline=pipeline, schedule=schedule, chunks=chunks)
            equal(train(layout, "deep-untied", FP32), alone("deep-untied", FP32, 8))


def overflow(grid: Grid, layout: Job) -> tuple[list[bool], list[float], bool]:
    """fp16 with a scale that is too large: only the last stage sees the loss, every rank skips."""
    rank = Rank(grid, layout, SHAPES["deep"], FP16)
    rank.engine.loss_scale.scale.fill_(2.0**28)
    before = rank.weights()
    skipped, scales, same = [], [], True
    for step in range(10):
        result = rank.step(step)
        skipped.append(bool(result.skipped))
        scales.append(float(result.loss_scale))
        if all(skipped):
            same &= all(torch.equal(before[name], value) for name, value in rank.weights().items())
    return skipped, scales, same


def test_overflowing_steps_are_skipped_on_all_stages() -> None:
    found = run_ranks(4, overflow, job_on(1, 2, False, 2, 2, pipeline=2), pipeline=2)
    assert all(result == found[0] for result in found)
    skipped, scales, same = found[0]
    assert same and skipped[:2] == [True, True] and not skipped[-1]
    assert scales == [2.0 ** (28 - min(step, sum(skipped))) for step in range(10)]


def live(grid: Grid, layout: Job) -> list[int]:
    """Of each stage of this rank the most micro-batches that it kept something of."""
    rank = Rank(grid, layout, SHAPES["deep-untied"], FP32)
    peaks = dict.fromkeys(rank.pipeline.stages, 0)
    for index, stage in rank.pipeline.stages.items():
        forward = stage.forward

        def count(*arguments, stage=stage, index=index, forward=forward):
            result = forward(*arguments)
            peaks[index] = max(peaks[index], len(stage._live))
            return result

        stage.forward = count
    record(rank, Rank.step)
    assert not any(stage._live for stage in rank.pipeline.stages.values()), "nothing is kept between steps"
    assert not any(stage._deferred for stage in rank.engine.stages)
    return list(peaks.values())


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_as_many_micro_batches_are_live_as_the_simulator_says(schedule: str) -> None:
    from megazero.schedules.simulate import peak_live

    layout = job_on(1, 1, False, 8, 1, pipeline=2, schedule=schedule)
    assert [sum(each) for each in run_ranks(2, live, layout, pipeline=2)] == peak_live(make(schedule, 2, 8, 1))


def scores(grid: Grid, layout: Job) -> list[torch.Tensor]:
    """Of two micro-batches of two rows, and of a last one of one row, as a validation's may be."""
    rank = Rank(grid, layout, SHAPES["deep"], FP64)
    feeds = [rank.feed(0, 0), rank.feed(0, 1), StageInputs(*samples([7], 0, SHAPES["deep"]))]
    return [loss.clone() for _ in range(2) for loss in rank.pipeline.evaluate(feeds, lambda feed: feed)]


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_evaluation_computes_losses_where_the_last_stage_is(schedule: str) -> None:
    layout = job_on(accumulation=8, pipeline=2, schedule=schedule, chunks=SCHEDULES[schedule])
    found = run_ranks(2, scores, layout, pipeline=2)
    last = 0 if schedule == "zb-v" else 1
    (expected,) = run_ranks(1, scores, job_on(accumulation=8))
    assert found[1 - last] == [] and len(found[last]) == 6
    assert all(torch.equal(a, b) for a, b in zip(found[last], expected, strict=True))
