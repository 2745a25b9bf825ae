"""All-to-all: part k of rank j arrives as part j of rank k, and nothing else changes."""

from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from megazero.comm.collectives import start_all_to_all
from megazero.comm.grid import Grid
from megazero.comm.rows import exchange_rows
from tests.comm.test_host_staging import bounced
from tests.layouts import Wires, rewired
from tests.ranks import run_ranks

LENGTHS = (1, 7, 20_003)
DTYPES = (torch.uint8, torch.int64)


def part(source: int, target: int, length: int, dtype: torch.dtype) -> Tensor:
    """Values that no other pair of ranks has."""
    return (torch.arange(length, dtype=torch.int64) * 7 + 31 * source + target + 1).to(dtype)


def exchanged(grid: Grid, way: str) -> list[tuple[bool, Tensor]]:
    """Whether each input stayed as it was, and what came; two are under way at once."""
    grid = bounced(grid) if way == "host" else rewired(grid, Wires(sockets=way == "sockets"))
    axis, found = grid["data"], []
    cases = [(length, dtype) for length in LENGTHS for dtype in DTYPES]
    for pair in zip(cases[::2], cases[1::2], strict=True):
        under_way = []
        for length, dtype in pair:
            x = torch.cat([part(axis.rank, target, length, dtype) for target in range(axis.size)])
            out = torch.zeros_like(x)
            under_way.append((x, x.clone(), start_all_to_all(x, out, axis, "test"), out))
        for x, before, pending, out in under_way:
            assert pending.wait() is out
            found.append((torch.equal(x, before), out))
    return found


@pytest.mark.parametrize("way", ["memory", "sockets", "host"])
@pytest.mark.parametrize("size", [2, 3, 4])
def test_each_part_goes_to_the_rank_of_its_number(size: int, way: str) -> None:
    cases = [(length, dtype) for length in LENGTHS for dtype in DTYPES]
    for rank, found in enumerate(run_ranks(size, exchanged, way)):
        for (length, dtype), (kept, out) in zip(cases, found, strict=True):
            assert kept, "the input is the caller's"
            for source, came in enumerate(out.split(length)):
                if source != rank:
                    assert torch.equal(came, part(source, rank, length, dtype)), f"of {source} at {rank}"


def without_gloo_s(grid: Grid) -> Tensor:
    x = torch.arange(4.0)
    out = torch.zeros_like(x)
    with patch.object(torch.distributed, "all_to_all_single", side_effect=AssertionError("gloo's own is slow")):
        return start_all_to_all(x, out, grid["data"], "test").wait()


def test_hosts_exchange_by_our_own_messages() -> None:
    assert run_ranks(2, without_gloo_s)[0][2:].tolist() == [0.0, 1.0]


def counted(grid: Grid) -> dict[str, int]:
    x = torch.zeros(grid["data"].size * 6, dtype=torch.int64)
    start_all_to_all(x, torch.zeros_like(x), grid["data"], "test").wait()
    sent = grid.comm.ledger.traffic["data"]["test"]
    return {"ops": sent.ops, "elements": sent.elements, "bytes": sent.bytes_sent}


def test_the_ledger_counts_what_a_rank_sends_to_others() -> None:
    assert run_ranks(3, counted) == [{"ops": 1, "elements": 12, "bytes": 96}] * 3


def rows_sent(grid: Grid) -> tuple[Tensor, dict[str, int]]:
    axis, counts = grid["data"], [[1, 2, 0], [3, 0, 1], [0, 1, 2]]
    own = torch.arange(3.0).repeat_interleave(torch.tensor(counts[axis.rank])) + 10 * axis.rank
    came = exchange_rows(own[:, None].expand(-1, 5).contiguous(), counts, axis, "test")
    sent = grid.comm.ledger.traffic["data"]["test"]
    return came[:, 0], {"ops": sent.ops, "elements": sent.elements, "bytes": sent.bytes_sent}


def test_rows_come_in_rank_order_and_the_ledger_counts_those_of_others() -> None:
    found = run_ranks(3, rows_sent)
    assert [came.tolist() for came, _ in found] == [[0, 10, 10, 10], [1, 1, 21], [12, 22, 22]]
    assert [sent for _, sent in found] == [{"ops": 1, "elements": 5 * n, "bytes": 20 * n} for n in (2, 4, 1)]
