"""All ranks of a grid call NCCL in one order, and hosts and GPUs come to the end; what would hang is found."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch.distributed as dist
from torch import Tensor

from megazero.comm.axes import Channel
from megazero.comm.grid import Axis
from megazero.comm.regions import Region
from megazero.comm.transport import nccl_channels
from megazero.comm.transport.nccl_channels import NcclChannels
from megazero.pipeline.transport import Transport
from megazero.plan.job import Job
from megazero.schedules.actions import Action, Kind
from megazero.train.trainer import Trainer
from megazero.zero import engine, reduce
from megazero.zero.gather import Gather
from tests.checkers import training
from tests.checkers.order import QUEUES, different, faults, stuck
from tests.checkers.trace import Operation, Queued, Trace, record_all
from tests.layouts import SHAPES, ids, job_on, pairwise

SCHEDULES = {"gpipe": 1, "1f1b": 1, "interleaved": 2, "zb-h1": 1, "zb-v": 2}  # chunks
OFFLOADS: dict[str, dict[str, bool | str]] = {
    "none": {},
    "optimizer": {"offload_optimizer": "cpu"},
    "parameters": {"offload_parameters": "cpu"},
    "both": {"offload_optimizer": "cpu", "offload_parameters": "cpu"},
    "delayed": {"offload_optimizer": "cpu", "delayed": True},
}
GRIDS = {"p4": (1, 4, 1), "p4 d2": (1, 4, 2), "2x2x2": (2, 2, 2)}  # tensor, pipeline, data
MICRO_BATCHES = (1, 2, 4)

CASES = [
    case
    for case in product(SCHEDULES, range(4), OFFLOADS, ("all", "hybrid"), GRIDS, MICRO_BATCHES)
    if case[3] == "all" or GRIDS[case[4]][2] > 1
]
SAMPLE = pairwise(CASES)
# With one number of micro-batches for each of the others, in turns.
FULL = [(*case, MICRO_BATCHES[i % 3]) for i, case in enumerate(dict.fromkeys(case[:-1] for case in CASES))]


def recorded(schedule: str, stage: int, offload: str, sharding: str, grid: str, micro_batches: int) -> list[Trace]:
    tensor, pipeline, data = GRIDS[grid]
    how: dict[str, Any] = {"schedule": schedule, "chunks": SCHEDULES[schedule], "pipeline": pipeline}
    how |= {"shard_ranks": 1 if sharding == "hybrid" else None, **OFFLOADS[offload]}
    return traces_of(job_on(tensor, data, tensor > 1, micro_batches, stage, **how))


def traces_of(job: Job, *, watched: bool = False) -> list[Trace]:
    shape = SHAPES["deep"]
    return record_all(job, replace(shape, layers=max(shape.layers, job.pipeline * job.chunks)), watched=watched)


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=[pytest.mark.full] * (n >= 8)) for n, case in enumerate(SAMPLE)], ids=ids(SAMPLE)
)
def test_every_rank_comes_to_the_end(case: tuple) -> None:
    assert faults(recorded(*case)) == []


@pytest.mark.full
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("stage", range(4))
def test_every_rank_of_every_layout_comes_to_the_end(schedule: str, stage: int) -> None:
    for case in FULL:
        if case[:2] == (schedule, stage):
            assert faults(recorded(*case)) == [], case


CHUNKED = [
    job_on(2, 2, True, 2, 3, tensor_chunks=3),
    job_on(2, 1, False, 2, 1, pipeline=2, schedule="zb-h1", tensor_chunks=2, recompute="full"),
]


@pytest.mark.parametrize("job", CHUNKED, ids=str)
def test_every_rank_comes_to_the_end_in_chunks(job: Job) -> None:
    assert faults(traces_of(job)) == []


def test_a_trace_has_what_a_step_does() -> None:
    traces = traces_of(job_on(1, 2, False, 2, 3, pipeline=2), watched=True)
    assert [trace.rank for trace in traces] == list(range(4))
    for trace in traces:
        step = trace.events[trace.before :]
        operations = [event.item for event in step if isinstance(event, Queued) and isinstance(event.item, Operation)]
        kinds = {operation.kind for operation in operations}
        assert kinds == {"all_reduce", "all_gather", "reduce_scatter", "send", "receive"}
        waits = [event.text for event in step if not isinstance(event, Queued)]
        assert waits.count("readback") == 1, "the flags of the first step, before the second one's first backward"
        assert set(waits) == {"readback", "synchronize"}, "channels are connected, and the end"


def pipeline_of(schedule: str, ranks: int, micro_batches: int) -> Job:
    chunks = SCHEDULES[schedule]
    return job_on(1, 1, False, micro_batches, 0, pipeline=ranks, schedule=schedule, chunks=chunks)


def plant_unconnected(patch: pytest.MonkeyPatch) -> None:
    """Channels that are connected by their first messages, as they once were."""
    patch.setattr(NcclChannels, "_connect", lambda *_: None)


def plant_waits(patch: pytest.MonkeyPatch) -> None:
    """The host waits behind each forward's input, and before the first backward, as it once did."""
    honest = Trainer._read

    def feed(batch: Any, step: int) -> Any:
        return replace(batch, tokens_SB=batch.tokens_SB.to("cpu"))

    def read(trainer: Trainer) -> None:
        if getattr(trainer, "seen", None) is not trainer.pipeline._batches:
            trainer.seen = trainer.pipeline._batches  # type: ignore[attr-defined]
            trainer.engine._totals[0].item()
        honest(trainer)

    patch.setattr(training, "feed", feed)
    patch.setattr(Trainer, "_read", read)


@pytest.mark.parametrize(
    ("schedule", "ranks", "micro_batches", "hangs"),
    [
        ("gpipe", 2, 1, True),
        ("gpipe", 2, 4, True),
        pytest.param("1f1b", 2, 1, True, marks=pytest.mark.full),
        ("1f1b", 2, 4, False),
        pytest.param("1f1b", 4, 2, True, marks=pytest.mark.full),
        pytest.param("zb-h1", 4, 2, True, marks=pytest.mark.full),
        pytest.param("zb-h1", 2, 4, False, marks=pytest.mark.full),
        pytest.param("interleaved", 2, 1, True, marks=pytest.mark.full),
        pytest.param("interleaved", 2, 4, False, marks=pytest.mark.full),
        pytest.param("interleaved", 4, 4, True, marks=pytest.mark.full),
        ("zb-v", 2, 1, True),
        pytest.param("zb-v", 2, 4, False, marks=pytest.mark.full),
        pytest.param("zb-v", 4, 4, True, marks=pytest.mark.full),
    ],
)
def test_pipelines_that_hung_in_their_first_step_are_found(
    monkeypatch: pytest.MonkeyPatch, schedule: str, ranks: int, micro_batches: int, hangs: bool
) -> None:
    """Those that a reading of the code had found, with the channels and the feed of that time."""
    plant_waits(monkeypatch)
    job = pipeline_of(schedule, ranks, micro_batches)
    if ranks == 2:
        assert faults(traces_of(job, watched=True)) == [], "on connected channels waits are slow, and no more"
    plant_unconnected(monkeypatch)
    traces = traces_of(job, watched=True)
    assert different(traces) == []
    assert [bool(stuck(traces, queues)) for queues in QUEUES] == [hangs] * len(QUEUES)


def plant_order_of_connecting(patch: pytest.MonkeyPatch) -> None:
    """The last rank goes through its channels from the other end."""
    honest = NcclChannels._connect
    kept: list[tuple] = []

    def connect(self: Any, axis: Axis, channel: Channel) -> None:
        if axis.rank < axis.size - 1:
            honest(self, axis, channel)
            return
        kept.append((axis, channel))
        while len(kept) == len(self._groups) or (kept and getattr(self, "begun", False)):
            self.begun = len(kept) > 1
            honest(self, *kept.pop())

    patch.setattr(NcclChannels, "_connect", connect)


def plant_one_communicator(patch: pytest.MonkeyPatch) -> None:
    """Both directions between two ranks share a communicator."""
    honest = NcclChannels.__init__

    def init(self: Any, axis: Axis, channels: list, everyone: list, device: Any) -> None:
        honest(self, axis, channels, everyone, device)
        shared: dict[frozenset, Any] = {}
        for channel in sorted(channels, key=lambda channel: channel.index):
            ends = frozenset((channel.source, channel.target))
            self._groups[channel.index] = shared.setdefault(ends, self._groups[channel.index])

    patch.setattr(NcclChannels, "__init__", init)


def plant_skipped(patch: pytest.MonkeyPatch) -> None:
    """One rank does not sum over the replicas."""
    honest = reduce.sum_replicas
    patch.setattr(reduce, "sum_replicas", lambda units: honest(units) if dist.get_rank() != 1 else None)


def plant_tail(patch: pytest.MonkeyPatch) -> None:
    """The ranks of the tensor axis sum their tails in different orders."""
    honest = engine.sum_tails
    patch.setattr(
        engine,
        "sum_tails",
        lambda units: honest(sorted(units, key=lambda unit: unit.numel * (-1) ** dist.get_rank())),
    )


def plant_dtype(patch: pytest.MonkeyPatch) -> None:
    """One rank sums the totals of a step in fp32."""
    honest = engine.all_reduce

    def all_reduce(x: Tensor, axis: Axis, purpose: str) -> Tensor:
        return honest(x.float() if dist.get_rank() == 1 else x, axis, purpose).to(x.dtype)

    patch.setattr(engine, "all_reduce", all_reduce)


def plant_awaited_at_once(patch: pytest.MonkeyPatch) -> None:
    """A receive is awaited where it is posted, one computation early."""
    honest = NcclChannels.post

    def post(self: Any, channel: Any, number: int, into: Tensor) -> Any:
        finish, came = honest(self, channel, number, into)
        finish()
        return finish, came

    patch.setattr(NcclChannels, "post", post)


def plant_awaited_sends(patch: pytest.MonkeyPatch) -> None:
    """The host waits until a message has been taken."""
    honest = NcclChannels.send

    def send(self: Any, channel: Any, number: int, x: Tensor) -> None:
        honest(self, channel, number, x)
        if number:
            self.finish()
            nccl_channels.synchronize(x.device)

    patch.setattr(NcclChannels, "send", send)


def plant_prefetch(patch: pytest.MonkeyPatch) -> None:
    """One rank gathers a unit when it is needed, not before."""
    honest, needed = Gather.prefetch, Gather.unshard

    def unshard(self: Gather, units: list) -> None:
        honest(self, units)
        needed(self, units)

    def prefetch(self: Gather, units: list) -> None:
        if dist.get_rank() != 1:
            honest(self, units)

    patch.setattr(Gather, "prefetch", prefetch)
    patch.setattr(Gather, "unshard", unshard)


def plant_receives(patch: pytest.MonkeyPatch) -> None:
    """A rank posts its first two receives of a step the other way round, before it needs them."""
    honest = Transport.post

    def post(self: Transport, action: Action, shape: Sequence[int]) -> None:
        if dist.get_rank() == 1 and action.kind is Kind.RECEIVE_FORWARD and action.micro_batch < 2:
            for m in (1, 0) if action.micro_batch == 0 else ():
                honest(self, replace(action, micro_batch=m), shape)
        else:
            honest(self, action, shape)

    patch.setattr(Transport, "post", post)


def plant_chunks(patch: pytest.MonkeyPatch) -> None:
    """One rank cuts its products into more chunks."""
    honest = Region.cut

    def cut(region: Region, rows: int) -> list[slice]:
        more = dist.get_rank() == 1 and region.chunks > 1
        return honest(replace(region, chunks=region.chunks + more), rows)

    patch.setattr(Region, "cut", cut)


PIPELINE = pipeline_of("1f1b", 2, 4)
SEQUENCE = job_on(2, 2, True, 2, 3)


@pytest.mark.parametrize(
    ("plant", "job", "differ"),
    [
        (plant_unconnected, pipeline_of("gpipe", 2, 1), False),
        (plant_order_of_connecting, PIPELINE, False),
        (plant_awaited_at_once, PIPELINE, False),
        (plant_awaited_sends, pipeline_of("zb-v", 2, 2), False),
        (plant_one_communicator, PIPELINE, True),
        (plant_receives, pipeline_of("gpipe", 2, 4), True),
        (plant_skipped, job_on(1, 4, False, 1, 3, shard_ranks=2), True),
        (plant_tail, SEQUENCE, True),
        (plant_dtype, SEQUENCE, True),
        (plant_prefetch, SEQUENCE, True),
        (plant_chunks, CHUNKED[0], True),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_what_is_planted_is_found(
    monkeypatch: pytest.MonkeyPatch, plant: Callable[[pytest.MonkeyPatch], None], job: Job, differ: bool
) -> None:
    plant(monkeypatch)
    traces = traces_of(job)
    assert bool(different(traces)) is differ
    assert differ or all(stuck(traces, queues) for queues in QUEUES)
