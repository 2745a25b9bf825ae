"""Products whose rows go in chunks, each summed or gathered beside the product of another: the same as in one piece."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megazero.comm.collectives import Pending, done
from megazero.comm.grid import Axis, Grid
from megazero.comm.regions import Region
from megazero.model import linear
from megazero.model.linear import ColumnProducts, RowProducts
from megazero.model.tape import apply
from megazero.plan.job import Job
from megazero.tools.certify.tolerances import GRADIENT_FP32, GRADIENT_FP64, difference
from megazero.zero.placement import Precision
from tests.layouts import SHAPES, Rank, Wires, job_on
from tests.ranks import run_ranks

S, B, D, F = 12, 3, 8, 16  # on 2 ranks a part has 18 rows, on 4 it has 9: some chunks are longer than others
TOLERANCE = {torch.float64: GRADIENT_FP64, torch.float32: GRADIENT_FP32}


def drawn(*shape: int, seed: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def products(grid: Grid, sequence: bool, chunks: int, dtype: torch.dtype) -> tuple[list[Tensor], dict[str, Any]]:
    """Return the outputs and gradients of two column products and a row product with biases, and what was sent."""
    axis = grid["tensor"]
    region = Region(axis, sequence, "block", chunks)
    inner, part = F // axis.size, S // axis.size if sequence else S
    shapes = [(inner, D), (inner,), (inner, D), (inner, D)]
    drawings = (drawn(*shape, seed=10 * axis.rank + i, dtype=dtype) for i, shape in enumerate(shapes))
    up, up_bias, gate, down = map(nn.Parameter, drawings)
    bias = nn.Parameter(drawn(D, seed=90, dtype=dtype))
    first = axis.rank * part if sequence else 0
    x = drawn(S, B, D, seed=91, dtype=dtype)[first : first + part].clone().requires_grad_()
    outside = drawn(S, B, D, seed=92, dtype=dtype)[first : first + part]
    y, z = apply(ColumnProducts(region, {"weight": up, "bias": up_bias}, {"weight": gate}), x.view(-1, D))
    out = apply(RowProducts(region, {"weight": down, "bias": bias}), y * z).view(part, B, D)
    (out * outside).sum().backward()
    found = [y, z, out, *(parameter.grad for parameter in (x, up, up_bias, gate, down, bias))]
    assert all(one is not None for one in found)
    return [one.detach() for one in found if one is not None], grid.comm.ledger.traffic_as_dict()["tensor"]


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.parametrize("size", [2, 4])
def test_chunks_compute_what_one_piece_does(size: int, sequence: bool, dtype: torch.dtype) -> None:
    whole = run_ranks(size, products, sequence, 1, dtype, tensor=size)
    for chunks in (2, 3, 16):
        for (found, sent), (expected, before) in zip(
            run_ranks(size, products, sequence, chunks, dtype, tensor=size), whole, strict=True
        ):
            for one, other in zip(found, expected, strict=True):
                assert difference(one, other) <= TOLERANCE[dtype]
            for purpose, row in before.items():
                pieces = min(chunks, S * B // size if sequence else S * B) if purpose == "block forward" else 1
                assert sent[purpose] == {**row, "ops": pieces * row["ops"]}, purpose


class Noted:
    """Note in which order products are computed, and operations started and waited for."""

    def __init__(self, patch: pytest.MonkeyPatch):
        self.events: list[str] = []
        honest = linear._product
        patch.setattr(linear, "_product", lambda *of: self.note("product", honest(*of)))
        patch.setattr(Region, "gather", lambda region, x, _: self.pending("gather", x.repeat(2, 1)))
        patch.setattr(Region, "sum", lambda region, x, _, out=None: self.pending("sum", x if out is None else out))

    def note(self, event: str, result: Any) -> Any:
        self.events.append(event)
        return result

    def pending(self, what: str, result: Tensor) -> Pending:
        return self.note(what, done(result).then(lambda: self.note(f"wait for {what}", result)))


@pytest.mark.parametrize("sequence", [False, True])
def test_each_chunk_is_under_way_beside_another_s_product(monkeypatch: pytest.MonkeyPatch, sequence: bool) -> None:
    noted = Noted(monkeypatch)
    region = Region(Axis("tensor", 2), sequence, "block", 3)
    weight = nn.Parameter(torch.ones(4, 6))
    with torch.no_grad():
        apply(RowProducts(region, {"weight": weight}), torch.ones(8, 4))
    assert noted.events == ["product", "sum"] * 3 + ["wait for sum"] * 3
    noted.events.clear()
    with torch.no_grad():
        apply(ColumnProducts(region, {"weight": weight}), torch.ones(8, 6))
    gathers = ["gather"] * 3 + ["wait for gather", "product"] * 3
    assert noted.events == (gathers if sequence else ["gather", "wait for gather"])


def test_cuts_are_as_equal_as_can_be() -> None:
    def lengths(chunks: int, rows: int, size: int = 2) -> list[int]:
        cuts = Region(Axis("tensor", size), False, "block", chunks).cut(rows)
        assert [row for cut in cuts for row in range(rows)[cut]] == list(range(rows))
        return [cut.stop - cut.start for cut in cuts]

    assert lengths(1, 7) == [7] and lengths(3, 7) == [2, 2, 3] and lengths(4, 8) == [2, 2, 2, 2]
    assert lengths(16, 3) == [1, 1, 1], "at most one a row"
    assert lengths(3, 7, size=1) == [7], "on one rank nothing is sent"


def losses(grid: Grid, job: Job, wires: Wires) -> list[float]:
    rank = Rank(grid, job, SHAPES["gpt"], Precision(), wires)
    return [rank.step(step).loss.item() for step in range(2)]


@pytest.mark.parametrize("sequence", [False, True])
def test_the_way_of_the_messages_changes_no_bit(sequence: bool) -> None:
    """More chunks than the outbox has slots, through shared memory and through sockets."""
    job = job_on(4, 1, sequence, 1, 1, tensor_chunks=16)
    shared, sockets = (run_ranks(4, losses, job, Wires(sockets=way), tensor=4) for way in (False, True))
    assert shared == sockets
