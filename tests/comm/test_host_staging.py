"""Tensors that go through the host's memory: the same bits as without, nothing stale, nothing too early.

The device is the CPU, and its memory is declared apart: every copy is made. Buffers are full of ones in every bit when
they are taken and again when they are given back: NaN in every floating dtype, -1, true.
"""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from megazero.builders.assemble import grid_of
from megazero.comm.collectives import (
    all_gather,
    all_reduce,
    gather_bytes,
    start_all_gather,
    start_all_gather_in_place,
    start_all_reduce,
    start_reduce_scatter,
)
from megazero.comm.grid import Axis, Grid
from megazero.comm.ledger import Ledger
from megazero.comm.pool import Pool
from megazero.comm.transport.host_staging import HostStaging, staging_pool
from megazero.config.schema import Batch, Config, Zero, resolved
from megazero.launcher import rendezvous
from megazero.launcher.environment import RankContext
from megazero.launcher.spawn import run_local
from megazero.zero.placement import Precision
from tests.comm.test_collectives import LENGTHS, values
from tests.comm.test_p2p import MANY, around, both_ways, large
from tests.comm.test_shared_memory import stress, through_sockets
from tests.layouts import Trained, equal, ids, job_on, pairwise, train, train_rank
from tests.ranks import TIMEOUT, run_ranks

CPU = torch.device("cpu")
DTYPES = [torch.float32, torch.bfloat16, torch.int64, torch.bool]


class PoisonedPool(Pool):
    """Spoils what it gives and gets, and counts."""

    def __init__(self, ledger: Ledger):
        super().__init__(torch.uint8, CPU, ledger, "host_bounce")
        self.taken, self.out = 0, 0

    def take(self, numel: int) -> Tensor:
        self.taken, self.out = self.taken + 1, self.out + 1
        return super().take(numel).fill_(255)

    def give(self, buffer: Tensor) -> None:
        self.out -= 1
        super().give(buffer.fill_(255))


def bounced(grid: Grid, *, sockets: bool = False) -> Grid:
    """The same ranks, whose tensors gloo cannot reach."""
    comm = grid.comm
    comm = replace(comm, host_staging=PoisonedPool(comm.ledger), shared_memory=None if sockets else comm.shared_memory)
    return grid.with_comm(comm)


def pool_of(grid: Grid) -> PoisonedPool:
    pool = grid.comm.host_staging
    assert isinstance(pool, PoisonedPool)
    return pool


def everything(axis: Axis, dtype: torch.dtype, length: int) -> list[Tensor]:
    """Every collective, and every way to call it; `length` is of one part, or of the whole of an all-reduce."""
    mine, whole = values(axis.rank, length, dtype), values(axis.rank, length * axis.size, dtype)
    found = [all_reduce(mine.clone(), axis, "reduce"), all_reduce(mine.clone()[:1].sum(), axis, "scalar")]
    untouched = whole.clone()
    found += [start_reduce_scatter(untouched, axis, "scatter").wait(), untouched]
    apart = torch.zeros_like(mine)
    found += [start_reduce_scatter(whole.clone(), axis, "scatter", out=apart).wait(), apart]
    within = whole.clone()
    part = within[axis.rank * length : (axis.rank + 1) * length]
    found += [start_reduce_scatter(within, axis, "scatter", out=part).wait()]
    total = mine.clone()
    start_reduce_scatter(whole.clone(), axis, "scatter", out=total, accumulate=True).wait()
    rows = whole.clone().view(axis.size, length)
    found += [total, start_reduce_scatter(rows, axis, "scatter").wait(), all_gather(mine, axis, "gather")]
    found += [all_gather(mine.view(1, length), axis, "gather")]
    own = torch.zeros_like(whole)
    own.chunk(axis.size)[axis.rank].copy_(mine)
    return [*found, start_all_gather_in_place(own, axis, "gather").wait()]


def same_bits(grid: Grid, sockets: bool) -> bool:
    plain = through_sockets(grid["data"]) if sockets else grid["data"]
    apart = bounced(grid, sockets=sockets)
    ledger = grid.comm.ledger
    for dtype in DTYPES:
        for length in LENGTHS:
            expected = everything(plain, dtype, length)
            sent = ledger.traffic_as_dict()
            ledger.traffic.clear()
            found = everything(apart["data"], dtype, length)
            assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True)), (dtype, length)
            assert ledger.traffic_as_dict() == sent, "the ledger counts what is sent, however it goes"
            ledger.traffic.clear()
    pool, sizes = pool_of(apart), len(DTYPES) * len(LENGTHS)
    return pool.taken == 10 * sizes and pool.out == 0


MORE = [pytest.param(size, sockets, marks=pytest.mark.full) for size, sockets in ((2, 0), (3, 1), (4, 0), (4, 1))]


@pytest.mark.parametrize(("size", "sockets"), [(2, True), (3, False), *MORE])
def test_every_operation_gives_the_same_bits(size: int, sockets: bool) -> None:
    assert all(run_ranks(size, same_bits, sockets))


def in_pieces(grid: Grid, sockets: bool) -> bool:
    """1 KiB at a time."""
    comm = replace(grid.comm, bucket=1 << 10, shared_memory=None if sockets else grid.comm.shared_memory)
    plain = replace(grid["data"], comm=comm)
    apart = replace(plain, comm=replace(comm, host_staging=PoisonedPool(comm.ledger)))
    expected, found = (everything(axis, torch.float32, 3001) for axis in (plain, apart))
    return all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("sockets", [False, True], ids=["shared", "sockets"])
def test_long_tensors_go_in_pieces(sockets: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megazero.comm.transport.exchange.SLOT_BYTES", 1 << 10)
    assert all(run_ranks(3, in_pieces, sockets))


def nothing_before_the_wait(grid: Grid) -> bool:
    """On the device; and what is written there after the start is not what is sent."""
    axis = bounced(grid)["data"]
    reduced, gathered = torch.ones(40_000), torch.zeros(2, 5)
    gathered[axis.rank] = axis.rank + 1.0
    scattered, out = torch.ones(2, 3), torch.full((1, 3), 7.0)
    before = [x.clone() for x in (reduced, gathered, out)]
    pending = [
        start_all_reduce(reduced, axis, "test"),
        start_all_gather_in_place(gathered, axis, "test"),
        start_reduce_scatter(scattered, axis, "test", out=out, accumulate=True),
    ]
    all_reduce(torch.ones(1), replace(axis, comm=replace(axis.comm, host_staging=None)), "all have come")
    last = start_all_gather(torch.full((3,), float(axis.rank)), axis, "test")
    assert all(torch.equal(a, b) for a, b in zip((reduced, gathered, out), before, strict=True))
    for x in (reduced, gathered, scattered):
        x.fill_(-50.0)
    for operation in pending:
        operation.wait()
    assert torch.equal(reduced, torch.full((40_000,), 2.0))
    assert torch.equal(gathered[1 - axis.rank], torch.full((5,), 2.0 - axis.rank)), "the other's part comes"
    assert torch.equal(gathered[axis.rank], torch.full((5,), -50.0)), "this rank's own part does not come back"
    assert torch.equal(out, torch.full((1, 3), 9.0))
    return torch.equal(last.wait(), torch.tensor([0.0] * 3 + [1.0] * 3))


def test_the_device_is_read_by_the_start_and_written_by_the_wait() -> None:
    assert run_ranks(2, nothing_before_the_wait) == [True] * 2


def under_way(grid: Grid, seed: int) -> bool:
    apart = bounced(grid)
    world = apart["world"]
    return stress(apart, seed) >= 195 and gather_bytes(b"x" * world.rank, world, "test", CPU)[3] == b"xxx"


def test_many_operations_under_way_do_not_mix() -> None:
    assert all(run_ranks(4, under_way, 0, tensor=2))


def messages(grid: Grid, sockets: bool) -> tuple[int, int, int]:
    apart = bounced(grid)
    right = both_ways(apart, sockets)
    large(apart, torch.bfloat16)
    return right, pool_of(apart).taken, pool_of(apart).out


@pytest.mark.parametrize("sockets", [False, True], ids=["shared", "sockets"])
def test_messages_arrive_and_their_memory_is_given_back(sockets: bool) -> None:
    """Of each rank: what it sends and what it gets on two channels a way and again, a sum, two large ones."""
    taken = 2 * (2 * MANY + 2) + 1 + 2
    assert run_ranks(2, messages, sockets, pipeline=2) == [(2 * MANY + 2, taken, 0)] * 2


def in_a_ring(grid: Grid) -> bool:
    return around(bounced(grid))


def test_messages_in_a_ring() -> None:
    assert run_ranks(4, in_a_ring, pipeline=4) == [True] * 4


def test_a_bounce_keeps_no_hold_of_the_tensor_and_no_graph() -> None:
    pool = staging_pool(CPU, Ledger())
    x = torch.ones(3, requires_grad=True)
    staging = HostStaging(x, pool)
    assert not staging.host.requires_grad and staging.host.tolist() == [1.0] * 3
    assert all(value is not x for value in vars(staging).values())


def test_the_ledger_holds_as_many_pages_as_were_out_at_once() -> None:
    ledger = Ledger()
    pool = staging_pool(CPU, ledger)
    for _ in range(2):
        bounces = [HostStaging(torch.empty(n, dtype=torch.bfloat16), pool) for n in (0, 1, 2047, 2048)]
        for staging in bounces:
            staging.end()
    assert ledger.bytes_as_dict() == {"host_bounce": {"now": 5 * 4096, "peak": 5 * 4096}}


# Stage, tensor, data, pipeline, dtype, where memory is saved.
CASES = [
    (stage, tensor, data, pipeline, dtype, memory)
    for stage in range(4)
    for tensor in (1, 2)
    for data in (1, 2)
    for pipeline in (1, 2)
    for dtype in ("fp32", "bf16")
    for memory in ("kept", "elsewhere")
    if 1 < tensor * data * pipeline < 8 and (data > 1 or stage < 2) and (stage or memory == "kept")
]
FEW = pairwise(CASES)
EVERYTHING = {"recompute": "full", "partition": True, "offload": "cpu", "offload_optimizer": "cpu"}
PRECISION = {"fp32": Precision(), "bf16": Precision(torch.bfloat16, torch.float32)}


def bounced_rank(grid: Grid, *arguments) -> Trained:
    apart = bounced(grid)
    result = train_rank(apart, *arguments)
    assert pool_of(apart).taken and not pool_of(apart).out
    return result


REST = [pytest.param(case, marks=pytest.mark.full) for case in FEW[5:]]


@pytest.mark.parametrize("case", [*FEW[:5], *REST], ids=ids(FEW))
def test_training_gives_the_same_bits(case: tuple) -> None:
    stage, tensor, data, pipeline, dtype, memory = case
    layout = job_on(tensor, data, tensor > 1 and memory == "kept", pipeline, stage, pipeline=pipeline)
    if memory == "elsewhere":
        layout = replace(layout, **EVERYTHING, offload_parameters="cpu" if stage == 3 else "none")
    equal(train(layout, "gpt", PRECISION[dtype], bounced_rank), train(layout, "gpt", PRECISION[dtype]))


def share(monkeypatch: pytest.MonkeyPatch, folder: Path, *, shares_gpus: bool) -> tuple[int, list[dict]]:
    """Two local ranks that meet where torch sees one GPU; what happens to tensors there is left to the CPU."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)

    def main(place: RankContext) -> None:
        seen: dict = {}
        monkeypatch.setattr(torch.cuda, "set_device", lambda device: seen.update(device=str(device)))
        monkeypatch.setattr(
            rendezvous,
            "staging_pool",
            lambda device, ledger: seen.update(bounces=str(device)) or staging_pool(CPU, ledger),
        )
        comm = rendezvous.connect(place, timeout=TIMEOUT, fingerprint="test")
        grid = grid_of(resolved(Config(zero=Zero(stage=0), batch=Batch(micro=1))), comm, place.world)
        total = all_reduce(torch.ones(3), grid["data"], "test").tolist()
        seen |= {"backend": comm.backend, "sum": total, "held": comm.ledger.bytes["host_bounce"].now}
        (folder / f"{place.world.rank}").write_text(json.dumps(seen))
        rendezvous.disconnect()

    code = run_local(2, main, lambda statuses, line: None, shares_gpus=shares_gpus)
    return code, [json.loads((folder / f"{rank}").read_text()) for rank in range(2)] if not code else []


def test_ranks_of_one_gpu_meet_on_gloo_if_they_are_told_to(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    rank = {"device": "cuda:0", "bounces": "cuda:0", "backend": "gloo", "sum": [2.0] * 3, "held": 4096}
    assert share(monkeypatch, tmp_path, shares_gpus=True) == (0, [rank, rank])


def test_ranks_of_one_gpu_are_not_put_on_gloo_unasked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """NCCL it is, which this torch does not have, and another would refuse."""
    assert share(monkeypatch, tmp_path, shares_gpus=False) == (1, [])
