"""`megazero simulate`: run the steps of one rank of any grid, on tensors without data, without the other ranks.

The code that runs is that of training: the model, the engine, the pipeline's schedule, the update, and the ledger that
counts. Only three things are missing: the numbers (torch's FakeTensorMode computes shapes), the other ranks
(`comm/fake_group.py`), and initial values. So every byte is that of the real rank, and one rank of thousands takes a
process of some hundred megabytes. Only as many micro-batches run as fill the pipeline (`_enough`): more of them need
no more memory, and each sends the same bytes, which a step with fewer micro-batches measures.

Tensors report the CPU as their device, whatever is simulated. Choices that depend on the hardware (algorithms, kernels,
whether the host has its own memory) follow the declared device.
"""

from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from megazero.base.doing import Doing, doing
from megazero.builders.assemble import (
    DTYPES,
    Built,
    StageInputs,
    bucket_of,
    build,
    feeds_of,
    neighbours_of,
    precision_of,
)
from megazero.builders.job import job_of
from megazero.comm.fake_group import Idle, alone
from megazero.comm.grid import Grid
from megazero.comm.host import Host
from megazero.comm.ledger import Ledger, Sent
from megazero.config.schema import Config
from megazero.data.batch import MicroBatch
from megazero.kernels.operations import Operations
from megazero.kernels.select import choose, for_host
from megazero.plan.memory import DISK, HOST, RankMemory, memory
from megazero.plan.traffic import traffic
from megazero.run.planned import fuses
from megazero.schedules.actions import Action
from megazero.schedules.simulate import most_live
from megazero.tools.dry_run.idle_disk import IdleDisk
from megazero.tools.dry_run.timeline import MemoryTimeline, RecordingLedger

CPU = torch.device("cpu")


@dataclass(frozen=True)
class StepRecord:
    """The record of one step.

    Attributes:
        timeline: memory during the step; its peak is `activations` in a run's ledger.
        traffic: totals by axis and purpose, as the ledger counts them.
    """

    timeline: MemoryTimeline
    traffic: dict[str, dict[str, Sent]]


@dataclass(frozen=True)
class Simulated:
    """The results of a simulated rank.

    Attributes:
        first, steady: the first step, which allocates the buffers that stay, and the second, which all later steps
            equal.
        micro_batches: number of micro-batches of a step.
        simulated: number of them in the timelines; the last of these stand for the last of the step.
        ledger: the ledger after both steps.
        planned, planned_traffic: the memory and traffic of this rank by the formulas of plan/ (docs/planning.md).
    """

    grid: Grid
    first: StepRecord
    steady: StepRecord
    micro_batches: int
    simulated: int
    ledger: Ledger
    planned: RankMemory
    planned_traffic: dict[str, dict[str, int]]


def simulate(config: Config, rank: int, world: int, device: str) -> Simulated:
    """Simulate two steps of a rank of `world` ranks.

    Args:
        device: the hardware: "cuda", or "cpu" for ranks of one host.

    Raises:
        UserError: 106, the sizes do not fit; 114, kernels that this device does not have.
    """
    with FakeTensorMode():
        grid = alone(
            rank,
            world,
            tensor=config.parallel.tensor,
            pipeline=config.parallel.pipeline,
            shard_ranks=neighbours_of(config),
            backend="nccl" if device == "cuda" else "gloo",
            bucket=bucket_of(config),
            ledger=RecordingLedger(),
        )
        dtype = DTYPES[config.precision.dtype]
        ops = choose(config.precision.kernels, torch.device(device), dtype, present=device == "cpu")
        host_ops = for_host(config.precision.kernels, precision_of(config).update) if device == "cuda" else ops
        return two_steps(config, grid, ops, Host(CPU, grid.comm.ledger, apart=device == "cuda"), device, host_ops)


def two_steps(
    config: Config, grid: Grid, ops: Operations, host: Host, device: str, host_ops: Operations | None = None
) -> Simulated:
    """Simulate two steps on a given grid; the caller enters a FakeTensorMode.

    Args:
        grid: its ledger is a `RecordingLedger`.
    """
    ledger = grid.comm.ledger
    assert isinstance(ledger, RecordingLedger)
    with doing("building the rank's model"):
        homes = {"nvme": IdleDisk(ledger)}
        built = build(config, grid, CPU, ops, host, host_ops=host_ops, homes=homes, filled=False)
        if built.engine.delayed is not None:
            built.engine.delayed.thread = Idle()
    job, pipeline = job_of(config, grid["world"].size, apart=host.apart), grid["pipeline"]
    # An interleaved schedule takes as many micro-batches at a time as there are ranks.
    period = pipeline.size if config.pipeline.schedule == "interleaved" else 1
    with doing("checking the schedule"):
        number = _enough(built.pipeline.actions, job.micro_batches, pipeline.size, period)
    feed = feeds_of(grid["tensor"], CPU, config.parallel.sequence)
    left_out, before = job.micro_batches - number, ledger.traffic

    def step(index: int, size: int) -> StepRecord:
        actions = built.pipeline.actions(size)
        left = next(at for at, action in enumerate(actions) if action.micro_batch >= size - period)
        behind = set(actions[left:])  # actions after the micro-batches that are left out

        def bring(batch: MicroBatch) -> StageInputs:
            if device == "cuda":  # which holds a copy
                batch = replace(batch, **{k: x.clone() for k, x in vars(batch).items() if isinstance(x, Tensor)})
            return feed(batch, index, True)

        def describe(action: Action) -> str | None:
            more = left_out if action in behind else 0
            return built.pipeline.describe(replace(action, micro_batch=action.micro_batch + more))

        with doing(f"simulating step {index + 1}") as progress:
            progress.total = sum(describe(action) is not None for action in actions)
            return _step(config, built, ledger, size, bring, describe, progress)

    first, steady = records = [step(index, number) for index in range(2)]
    if left_out:
        fewer = step(2, number - period)
        assert fewer.timeline.peak == steady.timeline.peak, "micro-batches that are left out need no more memory"
        ledger.traffic = deepcopy(steady.traffic)
        ledger.repeat(fewer.traffic, -1)
        of_period = ledger.traffic
        for record in records:
            ledger.traffic = record.traffic
            ledger.repeat(of_period, left_out // period)
    ledger.traffic = before
    for record in records:
        ledger.repeat(record.traffic, 1)
    ledger.hold("activations", steady.timeline.peak)
    ledger.hold("activations", -steady.timeline.peak)
    place = grid["shard"].rank, grid["tensor"].rank
    planned = memory(job, pipeline.rank, fused=fuses(ops), place=place)
    sent = traffic(job, pipeline.rank, *place)
    return Simulated(grid, first, steady, job.micro_batches, number, ledger, planned, sent)


def _enough(actions: Callable[[int], Sequence[Action]], micro_batches: int, ranks: int, period: int) -> int:
    """Return a number of micro-batches that reaches the peak of the whole step, plus `period` more (at most all).

    Args:
        actions: returns a rank's actions in a step of a number of micro-batches.
        ranks: number of pipeline ranks.
        period: number of micro-batches after which the schedule repeats.
    """
    highest = most_live(actions(micro_batches))
    for number in range(micro_batches % period + ranks + 2 * period, micro_batches - period, period):
        if most_live(actions(number)) == highest:
            return number + period
    return micro_batches


def _step(
    config: Config,
    built: Built,
    ledger: RecordingLedger,
    micro_batches: int,
    feed: Callable[[MicroBatch], StageInputs],
    describe: Callable[[Action], str | None],
    progress: Doing,
) -> StepRecord:
    """Simulate one step as the trainer runs it, and replace the ledger's traffic by that of this step.

    `describe` returns an action's name on the timeline; None: it belongs to the action before.
    """
    ledger.traffic = {}
    batches = [_batch(config) for _ in range(micro_batches)]
    held = {category: held.now for category, held in ledger.bytes.items() if not category.startswith((HOST, DISK))}
    timeline = ledger.timeline = MemoryTimeline(held)
    hooks = _name_places(built.model, timeline)

    def note(action: Action) -> None:
        if (phase := describe(action)) is not None:
            progress.advance()
            timeline.at(phase)

    with timeline:
        built.engine.begin_step()
        built.pipeline.train(batches, feed, before=note)
        timeline.at("update")
        built.engine.finish_step(config.optimizer.lr)
    ledger.timeline = None
    for hook in hooks:
        hook.remove()
    return StepRecord(timeline, ledger.traffic)


def _batch(config: Config) -> MicroBatch:
    """Return a micro-batch with the loader's shapes and dtypes."""
    shape, eod = (config.model.seq_len, config.batch.rows), config.data.mask_eod
    tokens, targets = (torch.empty(shape, dtype=torch.int64) for _ in range(2))
    return MicroBatch(
        tokens,
        targets,
        torch.empty(shape, dtype=torch.bool),
        torch.empty(shape, dtype=torch.int64) if eod else None,
        ((shape[0],),) * shape[1] if eod else None,
        torch.empty(config.batch.rows, dtype=torch.int64),
    )


def _name_places(model: nn.Module, timeline: MemoryTimeline) -> list[torch.utils.hooks.RemovableHandle]:
    """Tell the timeline which module runs: in forward, and in backward from the module's last operation on."""
    stack: list[str] = []
    hooks = []

    def enter(name: str) -> None:
        stack.append(name)
        timeline.at(module=name)

    def leave(name: str, y: Tensor) -> None:
        stack.pop()
        timeline.at(module=stack[-1] if stack else name)  # operations on its result belong to it
        if y.grad_fn is not None:
            y.grad_fn.register_prehook(lambda grads: timeline.at(module=name))

    for name, module in model.named_modules():
        if name:
            hooks.append(module.register_forward_pre_hook(lambda module, x, name=name: enter(name)))
            hooks.append(module.register_forward_hook(lambda module, x, y, name=name: leave(name, y)))
    return hooks
