"""`megazero simulate`: one rank's steps of any grid, on tensors without data, without the other ranks.

What runs is what trains: the model, the engine, the pipeline's schedule, the update, and the ledger that counts. Only
three things are not there: the numbers (torch's FakeTensorMode computes shapes), the other ranks
(`comm/fake_group.py`), and initial values. So every byte is the real rank's, and a rank of thousands takes a process of
some hundred megabytes. What a rank does again and again in a step (`schedules/repeat.py`) it does a few times; traffic
and memory are counted as often as they would have been (`repetition.py`).

Tensors say that they are on the CPU, whatever is simulated: what depends on the hardware (algorithms, kernels, whether
the host's memory is another) follows the device that is declared.
"""

from collections.abc import Callable
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
from megazero.schedules.repeat import Shortened, shortened
from megazero.tools.dry_run.idle_disk import IdleDisk
from megazero.tools.dry_run.repetition import Operation, RecordingLedger, Repeated, Repetition, repeated, sent_since
from megazero.tools.dry_run.timeline import MemoryTimeline

CPU = torch.device("cpu")


@dataclass(frozen=True)
class StepRecord:
    """The record of one step.

    Attributes:
        timeline: its memory.
        operations: what was sent, in order.
        traffic: totals by axis and purpose, as the ledger counts them.
        activations: the most bytes of a step's own, as a run's ledger has them.
        repeated: what operations have once and the step many times.
    """

    timeline: MemoryTimeline
    operations: list[Operation]
    traffic: dict[str, dict[str, Sent]]
    activations: int
    repeated: Repeated


@dataclass(frozen=True)
class Simulated:
    """The results of a simulated rank.

    Attributes:
        first, steady: the first step, in which buffers are made that stay, and the second, which every later one is
            like.
        ledger: the ledger after both steps.
        planned, planned_traffic: the memory and traffic of this rank by the formulas of plan/ (docs/planning.md).
    """

    grid: Grid
    first: StepRecord
    steady: StepRecord
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
        host_ops = for_host(config.precision.kernels, precision_of(config).masters) if device == "cuda" else ops
        return two_steps(config, grid, ops, Host(CPU, grid.comm.ledger, apart=device == "cuda"), device, host_ops)


def two_steps(
    config: Config, grid: Grid, ops: Operations, host: Host, device: str, host_ops: Operations | None = None
) -> Simulated:
    """Simulate two steps on a given grid; within a FakeTensorMode.

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
    with doing("looking for what a step repeats"):
        job, rank = job_of(config, grid["world"].size, apart=host.apart), grid["pipeline"].rank
        short = shortened(built.pipeline.actions(job.micro_batches), job.pipeline)
    feed = feeds_of(grid["tensor"], CPU, config.parallel.sequence)

    def bring(batch: MicroBatch, step: int) -> StageInputs:
        return feed(_copy(batch) if device == "cuda" else batch, step, True)

    records = []
    for number in range(2):
        with doing(f"simulating step {number + 1} of 2") as progress:
            records.append(_step(config, built, ledger, short, bring, number, progress))
    first, steady = records
    ledger.hold("activations", steady.activations)
    ledger.hold("activations", -steady.activations)
    planned = memory(job, rank, fused=fuses(ops))
    return Simulated(grid, first, steady, ledger, planned, traffic(job, rank, grid["shard"].rank))


def _step(
    config: Config,
    built: Built,
    ledger: RecordingLedger,
    short: Shortened,
    feed: Callable[[MicroBatch, int], StageInputs],
    number: int,
    progress: Doing,
) -> StepRecord:
    """Simulate one step as the trainer takes it."""
    before, ledger.operations = deepcopy(ledger.traffic), []
    batches = [_batch(config) for _ in range(short.micro_batches)]
    held = {category: held.now for category, held in ledger.bytes.items() if not category.startswith((HOST, DISK))}
    timeline = ledger.timeline = MemoryTimeline(held)
    hooks, describe = _name_places(built.model, timeline), built.pipeline.describe
    progress.total = sum(describe(action) is not None for action in short.actions)
    with timeline:
        built.engine.begin_step()
        built.pipeline.begin(batches, lambda batch: feed(batch, number))
        for action, original in Repetition(short, ledger, timeline).actions():
            if (phase := describe(original)) is not None:
                progress.advance()
                timeline.at(phase)
            built.pipeline.run(action)
        built.pipeline.end()
        timeline.at("update")
        built.engine.finish_step(config.optimizer.lr)
    ledger.timeline = None
    for hook in hooks:
        hook.remove()
    sent = sent_since(before, ledger.traffic)
    return StepRecord(timeline, ledger.operations, sent, timeline.peak, repeated(short, describe))


def _batch(config: Config) -> MicroBatch:
    """Return a batch as the loader makes it."""
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


def _copy(batch: MicroBatch) -> MicroBatch:
    """Return a batch as a device has it."""
    tensors = {name: value.clone() for name, value in vars(batch).items() if isinstance(value, Tensor)}
    return replace(batch, **tensors)


def _name_places(model: nn.Module, timeline: MemoryTimeline) -> list[torch.utils.hooks.RemovableHandle]:
    """Let the timeline know which module runs, forward or (from the last of its operations on) backward."""
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
