"""Sums in rank order, gathers, what the ledger counts, and what is refused."""

import pytest
import torch
from torch import Tensor

from megazero.comm.collectives import (
    all_gather,
    all_reduce,
    gather_bytes,
    start_all_reduce,
    start_reduce_scatter,
)
from megazero.comm.grid import Axis, Grid
from tests.ranks import run_ranks

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.int64]
LENGTHS = [0, 1, 7, 8, 20_003]  # with and without remainders, below and above what is exchanged whole


def values(rank: int, length: int, dtype: torch.dtype) -> Tensor:
    """Of very different sizes, so that another order of addition gives another sum."""
    generator = torch.Generator().manual_seed(rank)
    exponents = torch.randint(-12, 12, (length,), generator=generator)
    return (torch.randn(length, generator=generator, dtype=torch.float64) * 2.0**exponents).to(dtype)


def rank_order_sum(size: int, length: int, dtype: torch.dtype) -> Tensor:
    total = values(0, length, dtype)
    for rank in range(1, size):
        total = total + values(rank, length, dtype)
    return total


def reduce_everything(grid: Grid) -> list[Tensor]:
    return [all_reduce(values(grid["data"].rank, n, d), grid["data"], "test") for d in DTYPES for n in LENGTHS]


@pytest.mark.parametrize("size", [2, 3, 4])
def test_all_reduce_adds_in_rank_order(size: int):
    expected = [rank_order_sum(size, n, d) for d in DTYPES for n in LENGTHS]
    for found in run_ranks(size, reduce_everything):
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def scatter_and_gather(grid: Grid, columns: int) -> tuple[Tensor, Tensor, Tensor]:
    mine = values(grid["data"].rank, 12 * columns, torch.float32).view(12, columns)
    before = mine.clone()
    part = start_reduce_scatter(mine, grid["data"], "test").wait()
    assert torch.equal(mine, before), "the input is the caller's"
    return part, all_gather(part, grid["data"], "test"), all_reduce(before, grid["data"], "test")


@pytest.mark.parametrize("size", [2, 3, 4])
def test_reduce_scatter_and_all_gather_are_an_all_reduce(size: int):
    for columns in (1, 5_000):
        results = run_ranks(size, scatter_and_gather, columns)
        expected = rank_order_sum(size, 12 * columns, torch.float32).view(12, columns)
        for rank, (part, gathered, reduced) in enumerate(results):
            assert torch.equal(part, expected.chunk(size)[rank])
            assert torch.equal(gathered, expected) and torch.equal(reduced, expected)


def say(grid: Grid) -> list[bytes]:
    return gather_bytes(b"x" * grid["world"].rank + b"\x00\xff", grid["world"], "test", torch.device("cpu"))


def test_bytes_of_any_length_are_gathered():
    assert run_ranks(3, say) == [[b"\x00\xff", b"x\x00\xff", b"xx\x00\xff"]] * 3


def both_axes(grid: Grid) -> tuple[float, float, float]:
    mine = torch.tensor([10.0 ** grid["world"].rank])
    return tuple(
        float(all_reduce(mine.clone(), axis, "test")) for axis in (grid["tensor"], grid["data"], grid["world"])
    )


def test_axes_of_the_grid_are_the_ranks_they_say():
    """Rank = data rank x 2 + tensor rank."""
    results = run_ranks(4, both_axes, tensor=2)
    assert results == [(11, 101, 1111), (11, 1010, 1111), (1100, 101, 1111), (1100, 1010, 1111)]


def several_under_way(grid: Grid) -> list[float]:
    pending = [start_all_reduce(torch.tensor([float(i)]), grid["data"], "test") for i in range(5)]
    return [float(p.wait()) for p in reversed(pending)]


def test_operations_under_way_together_do_not_mix():
    assert run_ranks(2, several_under_way) == [[8.0, 6.0, 4.0, 2.0, 0.0]] * 2


def count(grid: Grid) -> dict:
    all_reduce(torch.ones(10), grid["data"], "a")  # padded to 12
    all_reduce(torch.ones(20_000, dtype=torch.float64), grid["data"], "b")
    start_reduce_scatter(torch.ones(8, 3), grid["data"], "c").wait()
    all_gather(torch.ones(2, 3, dtype=torch.bfloat16), grid["data"], "c")
    return grid.comm.ledger.traffic_as_dict()


def test_the_ledger_counts_by_the_ring_formula():
    for traffic in run_ranks(4, count):
        assert traffic == {
            "data": {
                "a": {"ops": 1, "elements": 2 * 12 * 3 // 4, "bytes_sent": 72},
                "b": {"ops": 1, "elements": 30_000, "bytes_sent": 240_000},
                "c": {"ops": 2, "elements": 24 * 3 // 4 + 24 * 3 // 4, "bytes_sent": 18 * 4 + 18 * 2},
            }
        }


def test_an_axis_of_one_is_the_identity_and_counts_nothing():
    axis, x = Axis("data"), torch.ones(4, 4)
    assert all(operation(x, axis, "a") is x for operation in (all_reduce, all_gather))
    assert start_reduce_scatter(x, axis, "a").wait() is x
    assert axis.comm.ledger.traffic == {} and axis.comm.ledger.bytes_sent == 0


def strided(grid: Grid) -> str:
    with pytest.raises(AssertionError, match="strided view"):
        all_reduce(torch.ones(4, 4)[:, ::2], grid["data"], "a")
    with pytest.raises(AssertionError, match="no 2 equal parts"):
        start_reduce_scatter(torch.ones(3), grid["data"], "a")
    return "refused"


def test_strided_views_and_uneven_parts_are_refused():
    assert run_ranks(2, strided) == ["refused"] * 2
