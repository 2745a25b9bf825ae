"""Every layout computes the bits of CPU ranks, however late or early GPUs do what waits allow; a lost wait shows."""

import functools
from typing import Any

import pytest
import torch
from torch import Tensor

from megazero.comm import collectives
from megazero.comm.context import CommContext
from megazero.model.transformer import Shape
from megazero.plan.job import Job
from megazero.zero.placement import Precision
from tests.checkers.late import Gpu, Queueing, on_gpus, trained_on_gpus
from tests.checkers.machine import Item, Kind, Machine, Order, as_queued, early, late, mixed
from tests.checkers.plants import BF16, LAYOUTS, PLANTS, SUMS_IN_BF16, keep_three, plant_slot, store_of
from tests.layouts import SHAPES, Trained, train_rank
from tests.model.small import GPT
from tests.ranks import run_ranks

FP32 = Precision()
ORDERS: dict[str, Order] = {"late": late, "early": early}
SEEN = [name for name, plant in PLANTS.items() if plant.order is not None]
QUICK = ["gather, stage 1", "reduction", "fetch", "send", "queued", "wait"]


def trained(name: str, order: Order, shape: Shape = GPT, precision: Precision = FP32) -> list[Trained]:
    return trained_on_gpus(LAYOUTS[name], shape, precision, order)


@functools.cache
def as_meant(name: str, shape: Shape = GPT) -> list[Trained]:
    """Return what a layout computes when everything is done as soon as it is queued."""
    return trained(name, as_queued, shape)


def on_cpu_ranks(job: Job, shape: Shape, precision: Precision) -> list[Trained]:
    """Return what ranks compute on a CPU, where nothing is beside the computation."""
    axes: dict[str, Any] = {"tensor": job.tensor, "pipeline": job.pipeline, "shard": job.neighbours}
    return run_ranks(job.ranks, train_rank, job, shape, precision, **axes)


def same(one: list[Trained], other: list[Trained]) -> bool:
    """Return whether all ranks computed the same bits, none of them NaN."""
    pairs = list(zip(one, other, strict=True))
    tensors = [
        (mine, getattr(b, kind)[name])
        for a, b in pairs
        for kind in ("initial", "gradients", "weights")
        for name, mine in getattr(a, kind).items()
    ]
    assert tensors
    return all(a.losses == b.losses and a.norms == b.norms for a, b in pairs) and all(
        torch.equal(mine, theirs) for mine, theirs in tensors
    )


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("name", ["stage 2", "1f1b", "offload", "delayed"])
def test_late_and_early_are_the_same_bits(name: str, order: str) -> None:
    assert same(trained(name, ORDERS[order]), as_meant(name))


def test_they_are_the_bits_of_cpu_ranks() -> None:
    assert same(as_meant("1f1b"), on_cpu_ranks(LAYOUTS["1f1b"], GPT, FP32))


@pytest.mark.full
@pytest.mark.parametrize("precision", [FP32, BF16, SUMS_IN_BF16], ids=["fp32", "bf16", "sums in bf16"])
@pytest.mark.parametrize("name", LAYOUTS)
def test_every_layout_in_every_order(name: str, precision: Precision) -> None:
    shape = SHAPES["deep"]
    expected = on_cpu_ranks(LAYOUTS[name], shape, precision)
    others = (as_queued, mixed(0), mixed(1)) if precision == FP32 else ()
    for order in (late, early, *others):
        assert same(trained(name, order, shape, precision), expected), order


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.full) for name in SEEN]
)
def test_a_wait_that_is_taken_away_changes_bits(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    plant, shape = PLANTS[name], GPT if name in QUICK else SHAPES["deep"]  # whose buffers come again within a step
    expected = as_meant(plant.layout, shape)
    plant.take_away(monkeypatch)
    assert plant.order is not None
    assert not same(trained(plant.layout, ORDERS[plant.order], shape), expected)


def test_a_sum_that_is_lost_on_the_way_through_nccl_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = as_meant("stage 2")
    honest = collectives.nccl_scatter
    lost = lambda into, x, **named: honest(torch.empty_like(into), x, **named)  # noqa: E731
    monkeypatch.setattr(collectives, "nccl_scatter", lost)
    assert not same(trained("stage 2", as_queued), expected)


def restored(order: Order) -> list[Tensor]:
    """Return what each of two ranks gets back from a store of inputs."""

    def work(comm: CommContext, gpu: Gpu) -> Tensor:
        store = store_of(comm)
        with Queueing(gpu):
            return keep_three(store).clone()

    return on_gpus(2, order, work)


def test_a_kept_input_is_not_written_over(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = [torch.ones(8)] * 2
    assert all(map(torch.equal, restored(late), expected))
    plant_slot(monkeypatch)
    assert all(map(torch.equal, restored(as_queued), expected))
    assert not any(map(torch.equal, restored(late), expected))


def done_in(order: Order, *, waits: bool) -> list[str]:
    """Return the order in which two items of the computation and one beside it, queued between them, are done."""
    machine, done = Machine(1, order), list[str]()
    first = Item(Kind.COMPUTE, lambda: done.append("first"))
    machine.add(first)
    beside = Item(Kind.BESIDE, lambda: done.append("beside"), [first] if waits else [])
    machine.add(beside)
    second = Item(Kind.COMPUTE, lambda: done.append("second"), [first])
    machine.add(second)
    for item in (second, beside):
        machine.force(item)
    return done


def test_an_order_is_as_late_or_early_as_waits_allow() -> None:
    assert done_in(as_queued, waits=False) == ["first", "beside", "second"]
    assert done_in(late, waits=False) == ["first", "second", "beside"]
    assert done_in(early, waits=False) == ["beside", "first", "second"]
    assert done_in(early, waits=True) == ["first", "beside", "second"]
    found = {tuple(done_in(mixed(series), waits=False)) for series in range(100)}
    assert len(found) == 3


def test_ranks_that_wait_for_each_other_are_told() -> None:
    def work(comm: CommContext, gpu: Gpu) -> None:
        gpu.communicator(((0, 1), gpu.rank)).allreduce([torch.zeros(1)])

    with pytest.raises(AssertionError, match="every rank waits for another"):
        on_gpus(2, late, work)
