"""Optimizer state, gradients and shards on the host: the same bits, other places, and what is sent to and fro."""

import shutil
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from megazero.builders.assemble import build
from megazero.comm.grid import Grid, single
from megazero.comm.host import Host
from megazero.kernels import cpu, reference
from megazero.kernels.operations import REFERENCE
from megazero.plan.job import Job
from megazero.zero.engine import Engine
from megazero.zero.placement import Precision
from megazero.zero.unit import resting_table
from tests.layouts import CPU, DELAYED_STEPS, SHAPES, STEPS, Rank, config_of, equal, ids, job_on, pairwise, train
from tests.ranks import run_ranks

DTYPES = {
    "fp32": Precision(),
    "fp64": Precision(torch.float64, torch.float64),
    "bf16": Precision(torch.bfloat16, torch.float32),
    "bf16-param": Precision(torch.bfloat16, torch.bfloat16),
    "fp16": Precision(torch.float16, torch.float32),
}
HOME = {True: "cpu", False: "none"}
WHAT = {"optimizer": (True, False), "parameters": (False, True), "both": (True, True)}
CASES = [
    (flavour, dtype, grid, accumulation, stage, what)
    for flavour in ("deep", "deep-untied")
    for dtype in DTYPES
    for grid in ("1", "dp2", "tp2 sequence", "tp2 dp2 sequence", "pp2 dp2", "pp2 zb-v")
    for accumulation in (1, 4)
    for stage in (1, 2, 3)
    for what in WHAT
    if stage == 3 or what == "optimizer"
]
COVER = pairwise(CASES)


def layout_of(grid: str, accumulation: int, stage: int) -> Job:
    words = grid.split()
    sizes = {word[:2]: int(word[2:]) for word in words if word[:2] in ("tp", "dp", "pp")}
    layout = job_on(sizes.get("tp", 1), sizes.get("dp", 1), "sequence" in words, accumulation, stage)
    layout = replace(layout, pipeline=sizes.get("pp", 1))
    return replace(layout, schedule="zb-v", chunks=2) if "zb-v" in words else layout


def check(flavour: str, dtype: str, grid: str, accumulation: int, stage: int, what: str) -> None:
    layout = layout_of(grid, accumulation, stage)
    optimizer, parameters = WHAT[what]
    there = replace(layout, offload_optimizer=HOME[optimizer], offload_parameters=HOME[parameters])
    equal(train(there, flavour, DTYPES[dtype]), train(layout, flavour, DTYPES[dtype]))


FEW = COVER[:10]  # the first of a cover hold most of its pairs


@pytest.mark.parametrize(
    "case", [pytest.param(c, marks=() if c in FEW else pytest.mark.full) for c in COVER], ids=ids(COVER)
)
def test_it_changes_no_bit(case: tuple) -> None:
    check(*case)


REST = [case for case in CASES if case not in COVER][::5]  # evenly over all: the whole product takes half an hour


@pytest.mark.full
@pytest.mark.parametrize("case", REST, ids=ids(REST))
def test_it_changes_no_bit_anywhere(case: tuple) -> None:
    check(*case)


def tell(grid: Grid, layout: Job, precision: Precision) -> tuple[dict[str, int], dict[str, int], int, str]:
    """Bytes held; elements sent to and fro in the second step; elements of this rank's units; the table of a run."""
    rank = Rank(grid, layout, SHAPES["deep"], precision)
    ledger = grid.comm.ledger
    rank.step(0)
    before = {what: sent.elements for what, sent in ledger.traffic["host"].items()}
    rank.step(1)
    sent = {what: sent.elements - before[what] for what, sent in ledger.traffic["host"].items()}
    held = {category: held.now for category, held in ledger.bytes.items()}
    table = resting_table(rank.engine.units)
    return held, sent, sum(unit.numel for unit in rank.engine.units), table


@pytest.mark.parametrize("dtype", ["bf16", *(pytest.param(d, marks=pytest.mark.full) for d in ("fp32", "bf16-param"))])
@pytest.mark.parametrize(("stage", "what"), [(1, "optimizer"), (2, "optimizer"), *((3, what) for what in WHAT)])
@pytest.mark.parametrize("data", [1, 2])
def test_what_rests_where_and_what_is_sent(data: int, stage: int, dtype: str, what: str) -> None:
    """To the byte. With 2-byte parameters: on the host K = 12 of optimizer state, the reduced gradients, and the
    updated parameters on their way; on the device the parameters, and in stage 1 gradients that gather.
    """
    optimizer, parameters = WHAT[what]
    accumulation, precision = 2, DTYPES[dtype]
    layout = job_on(1, data, accumulation=accumulation, stage=stage)
    layout = replace(layout, offload_optimizer=HOME[optimizer], offload_parameters=HOME[parameters])
    wide, narrow, gradient = 4, precision.parameters.itemsize, precision.gradients.itemsize
    for held, sent, numel, table in run_ranks(data, tell, layout, precision):
        shard = numel // data
        masters = 0 if narrow == wide and optimizer == parameters else wide * shard
        state = masters + 2 * wide * shard
        departing = narrow * shard if optimizer and not parameters and narrow != wide else 0
        resting = narrow * (shard if stage == 3 else numel)
        gathering = gradient * (numel if stage == 1 else shard)
        assert held.get("host_optimizer", 0) == (state if optimizer else 0)
        assert held.get("optimizer", 0) == (0 if optimizer else state)
        assert held.get("host_gradients", 0) == (gradient * shard if optimizer else 0)
        assert held.get("gradients", 0) == (gathering if stage == 1 or not optimizer else 0)
        assert held.get("host_parameters", 0) == (resting if parameters else departing)
        assert held.get("parameters", 0) == (0 if parameters else resting)
        reductions = accumulation if stage > 1 else 1
        assert sent.get("gradients out", 0) == (reductions * shard if optimizer else 0)
        assert sent.get("gradients back", 0) == ((reductions - 1) * shard if optimizer else 0)
        if optimizer and not parameters:
            assert sent["parameters back"] == shard  # updated ones
        if parameters:
            assert sent.get("parameters out", 0) == (0 if optimizer else shard)
            assert sent["parameters back"] >= accumulation * shard  # for every forward and backward that needs them
        assert "on the host" in table


def test_gradients_are_gathered_with_the_device_s_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host's update has kernels of its own, which know nothing of tensors on the device."""
    calls: list[str] = []

    def counted(name: str) -> Any:
        return lambda *tensors: (calls.append(name), getattr(REFERENCE, name)(*tensors))

    both = {name: counted(name) for name in ("cast_", "accumulate_")}
    monkeypatch.setattr("tests.layouts.REFERENCE", replace(REFERENCE, **both))
    layout = replace(layout_of("1", 2, 2), offload_optimizer="cpu")
    rank = Rank(single(), layout, SHAPES["deep"], DTYPES["bf16"])
    rank.step(0)
    assert set(calls) == set(both)


def test_a_machine_without_a_device_apart_says_so(caplog: pytest.LogCaptureFixture) -> None:
    layout = replace(job_on(stage=3), offload_optimizer="cpu", offload_parameters="cpu")
    grid = single()
    with caplog.at_level("INFO", logger="megazero"):
        build(config_of(layout, SHAPES["deep"], DTYPES["fp32"]), grid, CPU, REFERENCE)
    assert "zero.offload to cpu has no effect: on a CPU, host memory is device memory" in caplog.text
    assert not any(category.startswith("host_") for category in grid.comm.ledger.bytes)


@pytest.mark.skipif(shutil.which("g++") is None, reason="no g++")
@pytest.mark.parametrize("dtype", ["bf16", *(pytest.param(d, marks=pytest.mark.full) for d in ("bf16-param", "fp16"))])
@pytest.mark.parametrize(
    ("stage", "optimizer"), [(0, False), *((stage, there) for stage in (1, 2, 3) for there in (False, True))]
)
def test_one_pass_over_everything_changes_no_bit(
    stage: int, optimizer: bool, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel that takes gradients as they are and publishes 16-bit parameters, against torch's and a copy."""
    layout = replace(job_on(1, 2, accumulation=2, stage=stage), offload_optimizer=HOME[optimizer])
    plain = train(layout, "gpt", DTYPES[dtype])
    cpu.load()
    kernel = torch.ops.megazero.adamw_
    monkeypatch.setattr("tests.layouts.REFERENCE", replace(REFERENCE, adamw_=kernel))
    found = train(layout, "gpt", DTYPES[dtype])
    # torch's kernel leaves gradients unscaled and clipped, ours leaves them alone
    equal(replace(found, gradients={}), replace(plain, gradients={}))


def delayed_by_hand(grid: Grid, layout: Job, precision: Precision) -> tuple[list[float], dict[str, Tensor]]:
    """Losses and final weights of steps that each see the parameters of the update before the last."""
    rank = Rank(grid, layout, SHAPES["deep"], precision)
    engine, losses = rank.engine, list[float]()
    seen = [unit.masters.clone() for unit in engine.units]
    for step in range(DELAYED_STEPS):
        newest = [unit.masters.clone() for unit in engine.units]
        show(engine, seen)
        engine.begin_step()
        rank.passes(step)
        show(engine, newest)
        losses.append(engine.finish_step(lr=1e-3).loss.item())
        seen = newest
    return losses, rank.weights()


def show(engine: Engine, values: list[Tensor]) -> None:
    for unit, value in zip(engine.units, values, strict=True):
        unit.masters.copy_(value)
    engine.restore(int(engine.optimizer.pieces(engine.units[0])[0].step), None, 0)
    engine.gather.unshard([unit for unit in engine.units if unit.parameters.rest_whole])


def delayed(grid: Grid, layout: Job, precision: Precision) -> tuple[list[float], dict[str, Tensor]]:
    rank = Rank(grid, layout, SHAPES["deep"], precision)
    losses = [rank.step(step).loss.item() for step in range(DELAYED_STEPS)]
    rank.engine.flush_delayed()
    return losses, rank.weights()


LATE = [("1", 1, False), ("dp2", 1, False), ("dp2", 2, False), ("dp2", 3, True), ("pp2 dp2", 2, False)]
NARROW = (LATE[0], LATE[3])


@pytest.mark.parametrize(
    ("grid", "stage", "parameters", "dtype"),
    [
        pytest.param(*case, dtype, marks=pytest.mark.full if dtype == "bf16" and case not in NARROW else ())
        for case in LATE
        for dtype in ("fp64", "bf16")
    ],
)
def test_a_delayed_update_is_one_step_late_and_nothing_else(
    grid: str, stage: int, parameters: bool, dtype: str
) -> None:
    layout = layout_of(grid, 4, stage)
    axes = {"tensor": layout.tensor, "pipeline": layout.pipeline}
    late = replace(layout, offload_optimizer="cpu", offload_parameters=HOME[parameters], delayed=True)
    by_hand = run_ranks(layout.ranks, delayed_by_hand, layout, DTYPES[dtype], **axes)
    found = run_ranks(layout.ranks, delayed, late, DTYPES[dtype], **axes)
    at_once = train(layout, "deep", DTYPES[dtype])
    for (losses, weights), (expected, same) in zip(found, by_hand, strict=True):
        assert losses == expected and losses[:STEPS] != at_once.losses
        assert all(torch.equal(value, same[name]) for name, value in weights.items())


class Lazy(Host):
    """A host whose copies to the device happen when something waits for them, which is a legal order of a GPU."""

    def __init__(self, *arguments: Any, **options: Any):
        super().__init__(*arguments, **options)
        self.late: list[tuple[Tensor, Tensor]] = []

    def bring(self, x: Tensor, into: Tensor, purpose: str) -> None:
        super().bring(x, into, purpose)
        if purpose == "parameters":
            into.zero_()
            self.late.append((x, into))

    def settle(self) -> None:
        for x, into in self.late:
            into.copy_(x)
        self.late.clear()
        super().settle()


def losses_of(grid: Grid, layout: Job, kind: type[Host], monkeypatch: pytest.MonkeyPatch) -> list[float]:
    monkeypatch.setattr("tests.layouts.Host", kind)
    rank, losses = Rank(grid, layout, SHAPES["deep"], Precision()), []
    for step in range(DELAYED_STEPS):
        losses.append(rank.step(step).loss.item())
        for _, done in rank.engine.delayed._under_way:  # type: ignore[union-attr]
            done.result()  # the host is quick
        rank.host.settle()  # the device gets round to its copies before it needs them
    return losses


def test_an_update_waits_for_what_is_published_to_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    layout = job_on(stage=2, offload_optimizer="cpu", delayed=True)
    at_once, late = (losses_of(single(), layout, kind, monkeypatch) for kind in (Host, Lazy))
    assert at_once == late


@pytest.mark.parametrize("delayed", [False, True])
def test_a_skipped_first_step_leaves_the_parameters(delayed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel that publishes leaves what it publishes alone then: it has to be there already."""
    kernel = replace(REFERENCE, adamw_=reference.adamw_)
    monkeypatch.setattr("tests.layouts.REFERENCE", kernel)
    rank = Rank(single(), job_on(stage=2, offload_optimizer="cpu", delayed=delayed), SHAPES["deep"], DTYPES["fp16"])
    before = rank.weights()
    rank.engine.loss_scale.scale.fill_(2.0**40)
    assert rank.step(0).skipped
    rank.engine.flush_delayed()
    assert all(torch.equal(value, before[name]) for name, value in rank.weights().items())
