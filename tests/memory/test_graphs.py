"""Recomputed blocks that are recorded and replayed: the same bits as without, whatever the host did in between.

There are no CUDA graphs here. In their place stands a recording of the operations that torch dispatches: recording
leaves no trace in any memory, and a replay does each operation again on the tensors of the recording, wherever they
lie. What the host does beside the operations is not repeated, as on a GPU.
"""

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from megazero.builders import recompute
from megazero.builders.assemble import build
from megazero.comm.grid import Grid, single
from megazero.comm.host import Host
from megazero.comm.ledger import Ledger
from megazero.kernels.operations import REFERENCE
from megazero.memory import graphs
from megazero.memory.graphs import WARM_UP, Exchange, GraphedLayer
from megazero.memory.graphs import graphs_of as honest_graphs_of
from megazero.memory.recompute import Kept
from megazero.model.batch_context import BatchContext
from megazero.plan.job import Job
from megazero.plan.memory import memory
from megazero.plan.model import Kind
from megazero.zero.placement import Precision
from tests.layouts import CPU, SHAPES, Rank, Trained, config_of, equal, job_on, planned, samples, train, train_rank

FP32, BF16 = Precision(), Precision(torch.bfloat16, torch.float32)
SHAPE = replace(SHAPES["deep"], dropout=0.0)


class Recording(TorchDispatchMode):
    """The operations of some work, each with its arguments and results; what they write is written back at the end."""

    def __init__(self) -> None:
        super().__init__()
        self._done: list[tuple[Any, tuple, dict, Any]] = []
        self._before: list[tuple[Tensor, Tensor]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = dict(zip((a.name for a in func._schema.arguments), args, strict=False)) | kwargs
        for argument in func._schema.arguments:
            if argument.alias_info is not None and argument.alias_info.is_write:
                self._before += [(x, x.clone()) for x in tree_leaves(given.get(argument.name)) if isinstance(x, Tensor)]
        found = func(*args, **kwargs)
        self._done.append((func, *tree_map_only(Tensor, Tensor.detach, (args, kwargs, found))))  # where they are now
        return found

    def undo(self) -> None:
        with torch.no_grad():
            for x, before in reversed(self._before):
                x.copy_(before)
        self._before.clear()

    def replay(self) -> None:
        with torch.no_grad():
            for func, args, kwargs, found in self._done:
                again = func(*args, **kwargs)
                pairs = zip(tree_leaves(found), tree_leaves(again), strict=True)
                for old, new in pairs:
                    if isinstance(old, Tensor) and old.data_ptr() != new.data_ptr():
                        old.copy_(new)


class Recordings:
    """In the place of CUDA graphs; they are counted."""

    made, replayed = 0, 0

    def record(self, work: Callable[[], None]) -> Callable[[], None]:
        recording = Recording()
        with recording:
            work()
        recording.undo()
        Recordings.made += 1

        def replay() -> None:
            Recordings.replayed += 1
            recording.replay()

        return replay


@pytest.fixture(autouse=True)
def pretended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recompute, "graphs_of", lambda device: Recordings().record)
    monkeypatch.setattr(Recordings, "made", 0)
    monkeypatch.setattr(Recordings, "replayed", 0)
    monkeypatch.setitem(SHAPES, "still", SHAPE)
    monkeypatch.setattr("tests.layouts.samples", whole_samples)


def whole_samples(ids: list[int], step: int, shape: Any) -> tuple:
    """Samples as they are, each one document."""
    tokens_SB, targets_SB, valid_SB, now = samples(ids, step, shape)
    return tokens_SB, targets_SB, valid_SB, BatchContext(now.step, now.sample_ids_B)


def steps(grid: Grid, job: Job, shape: Any, precision: Precision) -> Trained:
    """Return what a rank computes, and see that it replays."""
    found = train_rank(grid, job, shape, precision)
    if job.cuda_graphs:
        assert Recordings.replayed > Recordings.made > 0
    return found


LAYOUTS = {
    "one process": job_on(accumulation=4),
    "stage 0": job_on(1, 2, False, 4, 0),
    "stage 1": job_on(1, 2, False, 4, 1),
    "stage 2": job_on(1, 2, False, 4, 2),
    "stage 3": job_on(1, 2, False, 4, 3),
    "hybrid": job_on(1, 4, False, 2, 3, shard_ranks=2),
    "offload": job_on(1, 2, False, 4, 3, offload_optimizer="cpu", offload_parameters="cpu"),
    "host's update": job_on(1, 1, False, 4, 2, offload_optimizer="cpu"),
    "gpipe": replace(job_on(1, 2, False, 4, 2), schedule="gpipe"),
    "interleaved": replace(job_on(1, 2, False, 4, 2), schedule="interleaved", chunks=2),
    "loss in chunks": replace(job_on(1, 2, False, 4, 1), loss_chunk=5),
}


CASES = [(name, dtype) for name in LAYOUTS for dtype in ("fp32", "bf16")]
FEW = [(name, "bf16") for name in LAYOUTS] + [("one process", "fp32"), ("stage 3", "fp32")]


@pytest.mark.parametrize(
    ("name", "dtype"), [pytest.param(*case, marks=() if case in FEW else pytest.mark.full) for case in CASES]
)
def test_it_changes_no_bit(name: str, dtype: str) -> None:
    precision = FP32 if dtype == "fp32" else BF16
    plain = replace(LAYOUTS[name], recompute="full")
    equal(train(replace(plain, cuda_graphs=True), "still", precision, steps), train(plain, "still", precision))


@pytest.mark.parametrize("name", ["one process", "stage 3", "interleaved"])
def test_blocks_of_two_kinds_are_recorded_too(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A window in rotary blocks, and caps without positions."""
    shape = replace(SHAPES["deep-untied"], dropout=0.0, kinds=(Kind(5), Kind(rope=None)), attention_cap=3.0)
    monkeypatch.setitem(SHAPES, "still", shape)
    plain = replace(LAYOUTS[name], recompute="full")
    equal(train(replace(plain, cuda_graphs=True), "still", BF16, steps), train(plain, "still", BF16))


def test_each_combination_of_places_is_recorded_once() -> None:
    """Of parameters and gradients that rest whole: forward once, backward for the first gradients and those added."""
    rank = Rank(single(), replace(job_on(accumulation=4), recompute="full", cuda_graphs=True), SHAPE, FP32)
    for step in range(3):
        rank.step(step)
    assert Recordings.made == SHAPE.layers * (1 + 2)
    assert Recordings.replayed == SHAPE.layers * 2 * (3 * 4 - WARM_UP)


def test_memory_is_the_formula() -> None:
    job = replace(job_on(accumulation=4), recompute="full", cuda_graphs=True)
    rank = Rank(single(), job, SHAPE, FP32)
    held = rank.grid.comm.ledger.bytes["graphs"].now
    assert held == 4 * 4 * SHAPE.seq_len * job.micro_batch * SHAPE.hidden
    assert held == memory(planned(job, SHAPE, FP32), 0).held["graphs"]


@pytest.mark.parametrize(("fault", "stage"), [("places of gradients", 2), ("first or later", 1)])
def test_a_graph_of_other_places_is_noticed(fault: str, stage: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A key that leaves out what a graph depends on makes other numbers."""
    honest = graphs._Recorded.do

    def careless(self: Any, key: tuple, work: Any) -> Any:
        kept = slice(1, 2) if fault == "places of gradients" else slice(0, 1)  # what is left of (place, fresh)
        return honest(self, tuple(one[kept] if isinstance(one, tuple) else one for one in key), work)

    layout = replace(job_on(1, 2, False, 4, stage), recompute="full")
    expected = train(layout, "still", FP32)
    monkeypatch.setattr(graphs._Recorded, "do", careless)
    found = train(replace(layout, cuda_graphs=True), "still", FP32, steps)
    assert any(not torch.equal(value, expected.weights[name]) for name, value in found.weights.items())


class Scaled(torch.nn.Module):
    """x times a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = torch.nn.Parameter(torch.ones(2))

    def forward(self, x: Tensor, _: Any) -> Tensor:
        return x * self.factor


def test_parameters_that_move_get_a_graph_of_their_own() -> None:
    """As those of stage 3 do, in buffers of a pool."""
    layer, x = Scaled(), torch.ones(2, requires_grad=True)
    graphed = GraphedLayer(layer, Kept, Recordings().record, Exchange((2,), torch.float32, CPU, Ledger()))
    memory = [torch.full((2,), value) for value in (2.0, 5.0)]
    for place in (0, 1, 0, 1, 0, 1):
        layer.factor.data = memory[place]
        assert torch.equal(graphed(x, BatchContext(0, torch.tensor([0]))), memory[place])
    assert (Recordings.made, Recordings.replayed) == (2, 4)


def test_dropout_would_repeat_its_masks() -> None:
    """Why it is refused."""
    layout = replace(job_on(accumulation=4), recompute="full")
    found, expected = (train(one, "deep", FP32) for one in (replace(layout, cuda_graphs=True), layout))
    assert found.losses != expected.losses


def test_validation_runs_as_it_is() -> None:
    rank = Rank(single(), replace(job_on(accumulation=4), recompute="full", cuda_graphs=True), SHAPE, FP32)
    assert any(isinstance(getattr(part, "layer", None), GraphedLayer) for part in rank.model.layers)
    with torch.no_grad():
        list(rank.pipeline.evaluate([rank.feed(0, 0)], lambda feed: feed))
    assert Recordings.made == Recordings.replayed == 0


def test_on_a_cpu_there_are_none(caplog: pytest.LogCaptureFixture) -> None:
    job = replace(job_on(), recompute="full", cuda_graphs=True)
    grid = single()
    with caplog.at_level(logging.INFO, logger="megazero"):
        build(config_of(job, SHAPE, FP32), grid, CPU, REFERENCE, Host(CPU, grid.comm.ledger))
    assert "memory.cuda_graphs has no effect: a CPU has no CUDA graphs" in caplog.text


def test_a_pretended_gpu_records_nothing_and_counts_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a dry run."""
    monkeypatch.setattr(recompute, "graphs_of", honest_graphs_of)
    rank = Rank(single(), replace(job_on(accumulation=4), recompute="full", cuda_graphs=True), SHAPE, FP32)
    rank.step(0)
    assert not any(isinstance(getattr(part, "layer", None), GraphedLayer) for part in rank.model.layers)
    assert rank.grid.comm.ledger.bytes["graphs"].now > 0
