"""What goes wrong is found: planted faults, numbers that are not finite, gradients at the wrong moment."""

import re
from collections.abc import Callable
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from megazero.base.errors import UserError
from megazero.builders.assemble import StageInputs
from megazero.comm.grid import Grid
from megazero.observe.jsonl import read_rows
from megazero.plan.job import Job
from megazero.schedules.actions import Kind
from megazero.tools.certify.tolerances import GRADIENT_FP64, LOSS_FP64, WEIGHTS_FP64, difference
from megazero.zero.gradients import DeliveryCounter
from megazero.zero.placement import Precision
from tests.layouts import SHAPES, Rank, Trained, job_on, record, train
from tests.ranks import run_ranks
from tests.tiny_run import TinyData, command
from tests.zero.poisoned import poison_reduced

FP64 = Precision(torch.float64, torch.float64)
NAME = "blocks.1.mlp.down.weight"
SLOW = partial(pytest.param, marks=pytest.mark.full)


def doubled(rank: Rank) -> None:
    """One rank's gradient of one parameter counts twice, in every step."""
    unit = next(unit for unit in rank.engine.units if NAME in unit.gradients.views)
    close = unit.gradients.close

    def close_and_double() -> None:
        close()
        if rank.data.rank == 1:
            unit.gradients.views[NAME].view.mul_(2)

    unit.gradients.close = close_and_double


def skipped(rank: Rank) -> None:
    """No rank reduces the gradients of one unit."""
    from megazero.comm.collectives import done

    reduction = rank.engine.stages[0].reduction
    start = reduction._start

    def start_some(unit):
        if NAME not in unit.gradients.views:
            return start(unit)
        unit.gradients.own.copy_(unit.gradients.partial[unit.shard])
        return done(unit.gradients.partial)

    reduction._start = start_some


def late(rank: Rank) -> None:
    """One rank computes with the samples of the step before."""
    honest = rank.feed
    if rank.data.rank == 1:
        rank.feed = lambda step, m: honest(max(step - 1, 0), m)


def with_fault(grid: Grid, layout: Job, shape, precision: Precision, plant: Callable[[Rank], None]) -> Trained:
    rank = Rank(grid, layout, shape, precision)
    plant(rank)
    return record(rank, Rank.step)


@pytest.mark.parametrize("plant", [doubled, skipped, late])
@pytest.mark.parametrize("stage", [SLOW(0), SLOW(1), 2, 3])
def test_planted_faults_are_found(stage: int, plant: Callable[[Rank], None]) -> None:
    """By the comparison with one process, well outside of its tolerance, or because replicas are no longer the same."""
    layout = job_on(1, 2, stage=stage)

    def fault(*arguments) -> Trained:
        return with_fault(*arguments, plant)

    expected = train(job_on(), "gpt", FP64)
    try:
        found = train(layout, "gpt", FP64, fault)
    except AssertionError as error:
        assert plant is skipped and stage == 0 and "replicas differ" in str(error)
        return
    weights = max(difference(found.weights[name], value) for name, value in expected.weights.items())
    assert weights > 1e6 * WEIGHTS_FP64
    if plant is late:
        assert difference(found.losses, expected.losses) > 1e6 * LOSS_FP64
    else:
        assert difference(found.gradients[NAME], expected.gradients[NAME]) > 1e6 * GRADIENT_FP64


def everything(rank: Rank) -> list[torch.Tensor]:
    """All that an update may change."""
    engine = rank.engine
    kept = [
        t
        for u in engine.units
        for t in (u.resting.parameters.values, u.masters, *engine.optimizer.runs(u)[0].state.values())
    ]
    return [t.clone() for t in kept + [piece.step for u in engine.units for piece in engine.optimizer.pieces(u)]]


def poisoned(grid: Grid, layout: Job, precision: Precision, bad: int, what: str) -> tuple[bool, bool, bool, str | None]:
    """A good step, one in which rank `bad` has something that is not finite, and another good one.

    Returns whether the second and the third were skipped, whether they changed nothing, and what this rank finds.
    """
    rank = Rank(grid, layout, SHAPES["gpt"], precision)
    rank.step(0)
    rank.engine.gather.unshard(rank.engine.units)
    rank.engine.gather.reshard(rank.engine.units)
    before, honest = everything(rank), rank.last.run
    bad_feed = rank.feed(1, layout.micro_batches - 1)

    def run(x, feed: StageInputs):
        losses_SB = honest(x, feed)
        if grid["world"].rank == bad and torch.equal(feed.now.sample_ids_B, bad_feed.now.sample_ids_B):
            if what == "loss":
                losses_SB = losses_SB * torch.nan
            else:
                losses_SB.register_hook(lambda gradient: gradient * torch.inf)
        return losses_SB

    rank.last.run = run
    second = rank.step(1)
    rank.last.run = honest
    third = rank.step(2)
    rank.engine.gather.unshard(rank.engine.units)
    rank.engine.gather.reshard(rank.engine.units)
    rank.last.run = run
    outputs: list[str] = []

    def look(kind: Kind, stage: int, m: int, losses_SB: torch.Tensor) -> None:
        outputs.extend([] if losses_SB.isfinite().all() else [f"loss of micro-batch {m}"])

    gradients = rank.engine.examine(lambda: rank.passes(1, look=look), second.loss_scale)
    found = next(iter([*outputs, *(fault for _, fault in gradients)]), None)
    same = all(torch.equal(a, b) for a, b in zip(before, everything(rank), strict=True))
    return bool(second.skipped) and not bool(second.finite), bool(third.skipped), same, found


@pytest.mark.parametrize("what", ["loss", "gradient"])
@pytest.mark.parametrize(
    "precision", [Precision(), SLOW(Precision(torch.bfloat16, torch.float32))], ids=["fp32", "bf16"]
)
@pytest.mark.parametrize(
    "layout",
    [
        *(SLOW(job_on(1, 2, False, 2, stage)) if stage < 2 else job_on(1, 2, False, 2, stage) for stage in range(4)),
        job_on(2, 2, True, 1, 3),
    ],
    ids=str,
)
def test_what_is_not_finite_on_one_rank_changes_nothing_on_any(layout: Job, precision: Precision, what: str) -> None:
    """And is found on that rank: of tensor ranks that share a sample, each sees it in its own part."""
    bad = layout.tensor * layout.data - 1
    found = run_ranks(layout.tensor * layout.data, poisoned, layout, precision, bad, what, tensor=layout.tensor)
    assert all(skipped and still and same for skipped, still, same, _ in found)
    assert found[0][3] is None, "the first rank's own part was right"
    expected = "loss of micro-batch" if what == "loss" else "gradient of head.norm"
    assert found[bad][3].startswith(expected)


TAIL = "head.norm.bias"
COPIES = {  # of a reduced gradient: who holds one that is not the first, and of what
    "stage 0": (job_on(1, 2, stage=0), 1, NAME),
    "stage 1": (job_on(1, 2, stage=1), 1, TAIL),
    "stage 3": (job_on(1, 2, stage=3), 1, TAIL),
    "replicas": (job_on(1, 4, stage=2, shard_ranks=2), 3, TAIL),
    "tensor": (job_on(2, 1, stage=0), 1, TAIL),
    "tied": (job_on(1, 1, False, 2, 1, pipeline=2), 1, "embedding.tokens.weight"),
}


def poisoned_after_sums(grid: Grid, layout: Job, bad: int, name: str) -> tuple[bool, bool, float, str | None]:
    """A step in which one rank's copy of a reduced gradient is not finite at the end.

    Returns whether it was skipped, whether it changed nothing, its loss, and what this rank finds.
    """
    rank = Rank(grid, layout, SHAPES["gpt"], Precision())
    rank.step(0)
    rank.engine.gather.unshard(rank.engine.units)
    rank.engine.gather.reshard(rank.engine.units)
    before = everything(rank)
    if grid["world"].rank == bad:
        poison_reduced(rank.engine, name, 1)
    done = rank.step(1)
    fault = rank.engine.reduced_fault()
    rank.engine.gather.unshard(rank.engine.units)
    rank.engine.gather.reshard(rank.engine.units)
    same = all(torch.equal(a, b) for a, b in zip(before, everything(rank), strict=True))
    return bool(done.skipped) and not bool(done.finite), same, float(done.loss), fault


def first_element(grid: Grid) -> str | None:
    """The fault that is found if the first element of the first unit's shard is not finite."""
    rank = Rank(grid, job_on(), SHAPES["gpt"], Precision())
    poison_reduced(rank.engine, rank.engine.units[0].layout.intervals[0].name, 0, at=0)
    rank.step(0)
    return rank.engine.reduced_fault()


def test_the_first_reduced_gradient_is_examined_too() -> None:
    assert run_ranks(1, first_element) == ["reduced gradient of embedding.tokens.weight"]


@pytest.mark.parametrize("case", COPIES)
def test_all_ranks_skip_a_step_whose_reduced_gradient_is_not_finite_on_one(case: str) -> None:
    layout, bad, name = COPIES[case]
    axes = {"tensor": layout.tensor, "pipeline": layout.pipeline, "shard": layout.neighbours}
    for rank, (skipped, same, loss, fault) in enumerate(
        run_ranks(layout.ranks, poisoned_after_sums, layout, bad, name, **axes)
    ):
        assert skipped and same and 0 < loss < torch.inf, f"rank {rank}"
        assert fault == (f"reduced gradient of {name}" if rank == bad else None)


@pytest.mark.parametrize("stage", [SLOW(0), 1])
def test_a_run_names_the_rank_whose_reduced_gradient_is_at_fault(
    tiny_data: TinyData, tmp_path: Path, stage: int
) -> None:
    """In that step, on all ranks: none waits for another one."""
    options = (f"run.dir={tmp_path / 'run'}", f"zero.stage={stage}", "batch.micro=1", "data.valid=null")
    done = command("-m", "tests.zero.poisoned", "head.norm.bias", "1", "3", tiny_data.config, *options)
    assert done.returncode == 1 and done.stderr.count("\n") == 1
    assert re.match(
        r"MZ-301 rank=1 step=3: loss \d.*, gradient norm nan; first not finite: reduced gradient of head.norm.bias; "
        r"computed again, all finite: a hardware fault or an overflow\?; this step did not update .*; "
        r"lower optimizer.lr or raise schedule.warmup\n",
        done.stderr,
    )


def test_a_gradient_at_the_wrong_moment_is_an_error_with_its_name() -> None:
    deliveries = DeliveryCounter("blocks.3")
    with pytest.raises(AssertionError, match=r"no gradient of a is due in micro-batch \d+ of unit blocks.3"):
        deliveries.delivered("a")
    completed = []
    deliveries.on_complete = lambda: completed.append(1)
    deliveries.expect("a")
    deliveries.expect("a")
    deliveries.expect("b")
    deliveries.delivered("a")
    assert not completed
    with pytest.raises(AssertionError, match=r"no gradient of c is due"):
        deliveries.delivered("c")
    deliveries.delivered("b")
    deliveries.delivered("a")
    assert completed == [1]
    with pytest.raises(AssertionError, match=r"no gradient of b is due"):
        deliveries.delivered("b")
    with pytest.raises(AssertionError, match=r"b is used after the backward of"):
        deliveries.expect("b")
    deliveries.end()
    deliveries.expect("b")  # the micro-batch is over, its number may come again


def unreached(grid: Grid, stage: int) -> list[float]:
    """Every second loss of rank 1 depends on nothing: its backward reaches no unit. (Stage 3 could not gather.)"""
    rank = Rank(grid, job_on(1, 2, False, 2, stage), SHAPES["gpt"], FP64)
    honest, reaches = rank.last.run, cycle((True, False))

    def run(x: torch.Tensor | None, feed: Any) -> torch.Tensor:
        losses = honest(x, feed)
        return losses if next(reaches) else torch.zeros_like(losses).requires_grad_()

    if grid["world"].rank == 1:
        rank.last.run = run
    return [float(rank.step(step).grad_norm) for step in range(2)]


def test_a_rank_whose_backward_reaches_no_unit_takes_part_in_every_reduction() -> None:
    found = [run_ranks(2, unreached, stage) for stage in range(3)]
    assert found[0] == found[1], "stages 0 and 1 are equal bit for bit; 2 adds in another order"
    norms = torch.tensor(found, dtype=torch.float64)
    assert torch.allclose(norms[0], norms[2], rtol=GRADIENT_FP64, atol=0)
    assert all(ranks[0] == ranks[1] for ranks in found) and all(norm > 0 for norm in found[0][0])


@pytest.mark.parametrize("stage", [SLOW(1), 3])
def test_a_run_names_the_rank_that_is_at_fault(tiny_data: TinyData, tmp_path: Path, stage: int) -> None:
    options = (f"run.dir={tmp_path / 'run'}", f"zero.stage={stage}", "batch.micro=1", "data.valid=null")
    done = command("-m", "tests.zero.poisoned", "loss", "1", "3", tiny_data.config, *options)
    assert done.returncode == 1
    line = (
        r"MZ-301 rank=1 step=3: loss (inf|nan), gradient norm nan; first not finite: loss of micro-batch 0; this step"
    )
    look = f"`megazero data --run {tmp_path / 'run'} --step 3` shows its text"
    assert re.fullmatch(
        rf"{line} did not update .*; {look}; lower optimizer.lr or raise schedule.warmup\n", done.stderr
    )
    assert [row["step"] for row in read_rows(tmp_path / "run/metrics.jsonl")] == [1, 2]


def test_fp16_goes_on_for_50_steps_and_not_longer(tiny_data: TinyData, tmp_path: Path) -> None:
    """The scale falls to 1, the learning rate stands still; then the run says whose fault it is."""
    shape = ("model.hidden=16", "model.layers=1", "model.seq_len=8", "model.heads=2")
    options = (f"run.dir={tmp_path / 'run'}", "zero.stage=2", "precision.dtype=fp16", "run.steps=60", "data.valid=null")
    done = command("-m", "tests.zero.poisoned", "loss", "1", "3", tiny_data.config, *options, *shape)
    assert done.returncode == 1
    assert re.match(
        r"MZ-301 rank=1 step=52: .*, skipped 50 steps in a row, loss scale 1; first not finite: loss of micro-batch 0;",
        done.stderr,
    )
    rows = read_rows(tmp_path / "run/metrics.jsonl")
    assert [row["step"] for row in rows] == list(range(1, 52))
    assert [row["skipped"] for row in rows] == [0, 0, *range(1, 50)]
    assert [row["loss_scale"] for row in rows] == [2.0**16] * 2 + [2.0 ** max(16 - n, 0) for n in range(49)]
    assert len({row["lr"] for row in rows[2:]}) == 1


def silent(grid: Grid, stage: int) -> str:
    """One layer computes with a parameter, and delivers no gradient of it."""
    rank = Rank(grid, job_on(1, grid["data"].size, False, 2, stage), SHAPES["gpt"], FP64)
    norm = rank.model.blocks[1].attention_norm
    norm.run = lambda tape, x: F.layer_norm(x, x.shape[-1:], norm.weight, norm.bias)
    norm.back_of_sum = lambda tape, grad, by_residual: grad + by_residual
    with pytest.raises(UserError) as error:
        rank.step(0)
    return str(error.value)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_parameter_whose_gradient_nobody_delivers_is_an_error_with_its_name(stage: int) -> None:
    for said in run_ranks(2, silent, stage):
        assert "a gradient of blocks.1.attention_norm.weight in each step, got none (1 more of unit blocks.1)" in said
