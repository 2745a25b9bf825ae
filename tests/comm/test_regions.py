"""The ends of tensor-parallel regions: each operation is the backward of the other, by finite differences over ranks.

What a rank's autograd computes is the gradient of the sum of all ranks' outputs. The numerical one is taken of the same
sum: every rank shifts one element of one rank's input, and all outputs are added up.
"""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from megazero.comm.collectives import all_reduce
from megazero.comm.grid import Axis, Grid
from megazero.comm.regions import Region, leave
from megazero.kernels.operations import REFERENCE
from megazero.model.linear import ColumnProducts, RowProducts
from megazero.model.mlp import Mlp
from megazero.model.parameter import declaration_of
from megazero.model.tape import apply
from tests.model.small import GPT
from tests.ranks import run_ranks

S, B, D, F = 8, 2, 6, 12


def doubles(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def numerical(function, x: Tensor, tensor: Axis, shared: bool) -> Tensor:
    """d (sum over ranks of function(x)) / dx by central differences; `shared`: all ranks hold the same x."""
    eps, result = 1e-5, torch.zeros_like(x)
    owners = [None] if shared else range(tensor.size)
    for owner in owners:
        for i in range(x.numel()):
            sides = []
            for sign in (eps, -eps):
                moved = x.clone()
                if owner in (None, tensor.rank):
                    moved.view(-1)[i] += sign
                sides.append(all_reduce(function(moved).reshape(1).clone(), tensor, "check"))
            if owner in (None, tensor.rank):
                result.view(-1)[i] = (sides[0] - sides[1]).item() / (2 * eps)
    return result


def check(grid: Grid, sequence: bool, kind: str, chunks: int) -> tuple[Tensor, Tensor]:
    """(autograd's gradient, the numerical one) of one rank's input."""
    tensor = grid["tensor"]
    region = Region(tensor, sequence, "block", chunks)
    rows = S // tensor.size if sequence else S
    weigh = doubles(S, B, F, seed=tensor.rank + 50)  # outputs inside a region differ from rank to rank
    outside = doubles(S, B, D, seed=60)[:rows] * (tensor.rank + 1 if sequence else 1)
    weight = torch.nn.Parameter(doubles(F, D, seed=tensor.rank))

    def column(x: Tensor) -> Tensor:
        (y,) = apply(ColumnProducts(region, {"weight": weight}), x.flatten(0, 1))
        return (y.view_as(weigh) * weigh).sum()

    def row(x: Tensor) -> Tensor:
        y = apply(RowProducts(region, {"weight": weight}), x.flatten(0, 1))
        return (y.view_as(outside) * outside).sum()

    def left(x: Tensor) -> Tensor:
        return (leave(x * 1.0, region) * outside).sum()

    seed = tensor.rank if kind != "column" or sequence else 0
    shape = {"column": (rows, B, D), "row": (S, B, F), "leave": (S, B, D)}[kind]
    x = doubles(*shape, seed=100 + seed).requires_grad_()
    function = {"column": column, "row": row, "leave": left}[kind]
    function(x).backward()
    assert x.grad is not None
    with torch.no_grad():
        expected = numerical(function, x.detach(), tensor, shared=kind == "column" and not sequence)
    # Without sequence parallelism what leaves a region is one and the same on all ranks: one output, not several.
    return x.grad, expected if sequence or kind == "column" else expected / tensor.size


@pytest.mark.parametrize(("sequence", "chunks"), [(False, 1), (True, 1), (True, 3)])
@pytest.mark.parametrize("kind", ["column", "row", "leave"])
def test_backward_is_the_gradient_of_all_ranks_outputs(kind: str, sequence: bool, chunks: int):
    for found, expected in run_ranks(2, check, sequence, kind, chunks, tensor=2):
        assert torch.allclose(found, expected, rtol=1e-6, atol=1e-7)


def traffic_of_mlp(grid: Grid, sequence: bool, kind: str) -> dict:
    norm = {"gelu": "layernorm", "swiglu": "rmsnorm"}[kind]
    shape = replace(GPT, hidden=D, ffn=F, activation=kind, norm=norm)
    mlp = Mlp(shape, region=Region(grid["tensor"], sequence, "block"), ops=REFERENCE)
    for parameter in list(mlp.parameters()):
        torch.utils.swap_tensors(parameter, torch.nn.Parameter(torch.ones(declaration_of(parameter).local_shape)))
    x = torch.ones(B * S // (grid["tensor"].size if sequence else 1), D, requires_grad=True)
    apply(mlp, x).sum().backward()
    return {purpose: sent["elements"] for purpose, sent in grid.comm.ledger.traffic_as_dict()["tensor"].items()}


@pytest.mark.parametrize("kind", ["gelu", "swiglu"])
@pytest.mark.parametrize("size", [2, 4])
def test_gate_and_up_share_one_way_in(size: int, kind: str):
    """A quarter of a layer: 2 b s h (t - 1) / t, however many matrices read the same input."""
    quarter = 2 * B * S * D * (size - 1) // size
    for traffic in run_ranks(size, traffic_of_mlp, False, kind, tensor=size):
        assert traffic == {"block backward": quarter}
    for traffic in run_ranks(size, traffic_of_mlp, True, kind, tensor=size):
        assert traffic == {f"block {when}": quarter // 2 for when in ("forward", "backward", "again")}
