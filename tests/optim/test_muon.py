"""Muon against torch's own and a plain one, with matrices that take turns in a parameter; who owns which matrix."""

import math
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from megazero.builders.units import resources_of
from megazero.comm.grid import Axis
from megazero.comm.ledger import Ledger
from megazero.comm.pool import Scratch
from megazero.kernels.operations import REFERENCE
from megazero.optim.elements import Settings
from megazero.optim.groups import Groups
from megazero.optim.mixture import Mixture
from megazero.optim.muon import Orthogonaliser
from megazero.plan.matrices import Item, Matrix, waves_of
from megazero.zero.layout import Entry, lay_out
from megazero.zero.placement import Precision, UnitAxes
from megazero.zero.unit import Unit

CPU = torch.device("cpu")
LR, DECAY, STEPS = 0.02, 0.1, 4
MATRICES = {
    "tall": Matrix(24, 8),
    "wide": Matrix(8, 40),
    "turned": Matrix(8, 24, inputs_first=True),
    "fused": Matrix(2 * 12, 10, ((0, 6), (6, 9), (9, 12)), 12),
}


def orthogonal(x: Tensor, steps: int = 5) -> Tensor:
    """The iteration, with a zero matrix as torch treats it."""
    turned = x.shape[0] > x.shape[1]
    x = x.T if turned else x
    x = x / x.norm().clamp(min=1e-7)
    for _ in range(steps):
        a = x @ x.T
        x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
    return x.T if turned else x


def updated(matrix: Matrix, start: Tensor, gradients: list[Tensor], settings: Settings, dtype: torch.dtype) -> Tensor:
    groups = Groups("muon", DECAY)
    entry = Entry("w", (matrix.rows, matrix.columns), groups.of("w", decays=True, hidden=True), True, matrix=matrix)
    axes = UnitAxes(Axis("shard"), Axis("tensor"))
    unit = Unit(lay_out("blocks.0", [entry]), axes, resources_of(Precision(dtype, dtype), CPU, Ledger()))
    unit.resting.masters.values[: start.numel()].copy_(start.reshape(-1))
    optimizer = Mixture(
        [unit],
        groups.optimizers,
        {"adamw": settings, "muon": settings},
        bucket=1 << 20,
        ops=REFERENCE,
        scratch=Scratch(Ledger()),
    )
    for gradient in gradients:
        unit.resting.gradients.values[: start.numel()].copy_(gradient.reshape(-1))
        optimizer.update(unit, lr=LR, scale=torch.ones((), dtype=torch.float64), skip=torch.zeros(()))
    return unit.masters[: start.numel()].view(start.shape).clone()


def samples(matrix: Matrix, dtype: torch.dtype) -> tuple[Tensor, list[Tensor]]:
    draw = torch.Generator().manual_seed(0)
    start, *gradients = torch.randn(1 + STEPS, matrix.rows, matrix.columns, generator=draw, dtype=torch.float64).to(
        dtype
    )
    return start, gradients


@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("scale", ["rms", "spectral"])
@pytest.mark.parametrize("name", MATRICES)
def test_it_is_a_plain_muon(name: str, scale: str, nesterov: bool) -> None:
    matrix = MATRICES[name]
    start, gradients = samples(matrix, torch.float64)
    value, momentum = start.clone(), torch.zeros_like(start)
    period, parts = matrix.turns
    for gradient in gradients:
        momentum = 0.95 * momentum + 0.05 * gradient
        wanted = 0.95 * momentum + 0.05 * gradient if nesterov else momentum
        value *= 1 - LR * DECAY
        for first, stop in parts:
            rows = torch.cat([torch.arange(at + first, at + stop) for at in range(0, matrix.rows, period)])
            outputs, inputs = wanted[rows].shape[:: -1 if matrix.inputs_first else 1]
            factor = 0.2 * math.sqrt(max(outputs, inputs)) if scale == "rms" else math.sqrt(max(1, outputs / inputs))
            value[rows] -= LR * factor * orthogonal(wanted[rows])
    found = updated(matrix, start, gradients, Settings(nesterov=nesterov, scale=scale), torch.float64)  # type: ignore[arg-type]
    assert (found - value).abs().max() <= 1e-11 * value.abs().max()


@pytest.mark.parametrize("rule", ["original", "match_rms_adamw"])
@pytest.mark.parametrize("name", ["tall", "wide"])
def test_it_is_torch_s_muon(name: str, rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch orthogonalises in bf16, whatever the parameter's dtype."""
    muon = pytest.importorskip("torch.optim._muon")
    monkeypatch.setattr("megazero.optim.muon.dtype_of", lambda unit: torch.bfloat16)
    matrix = MATRICES[name]
    start, gradients = samples(matrix, torch.float32)
    parameter = torch.nn.Parameter(start.clone())
    optimizer = muon.Muon([parameter], lr=LR, weight_decay=DECAY, adjust_lr_fn=rule)
    for gradient in gradients:
        parameter.grad = gradient.clone()
        optimizer.step()
    scale = "spectral" if rule == "original" else "rms"
    found = updated(matrix, start, gradients, Settings(scale=scale), torch.float32)  # type: ignore[arg-type]
    apart = (found - parameter.detach()).abs().max() / (found - start).abs().max()
    assert apart <= 2.0**-7  # two roundings to bf16, of the factor and of its product


def test_singular_values_come_near_one() -> None:
    matrix = torch.randn(1, 20, 50, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    Orthogonaliser([(20, 50)], 5, lambda name, numel: torch.empty(numel, dtype=torch.float64))(matrix, 1.0)
    values = torch.linalg.svdvals(matrix[0])
    assert values.min() > 0.6 and values.max() < 1.3


def test_every_matrix_has_one_owner_and_work_is_even() -> None:
    items = [[Item(u, 100 * k, 100 * k + 100, 50, Matrix(10, 10)) for k in range(4)] for u in range(12)]
    for shards, tensors in ((1, 1), (2, 1), (8, 1), (4, 2), (16, 2)):
        waves = list(waves_of(items, shards, tensors, sharded=True))
        assert [len(wave.items) for wave in waves[:-1]] == [max(4, -(-shards * tensors // 4) * 4)] * (len(waves) - 1)
        assert sum(len(wave.items) for wave in waves) == 48
        counts = [sum(wave.owners.count(rank) for wave in waves) for rank in range(shards * tensors)]
        assert max(counts) - min(counts) <= 1
        for wave in waves:
            assert all(a <= b for a, b in pairwise(wave.owners))
            exchange = wave.over_shards
            assert sum(map(sum, exchange.counts)) == sum(sum(own) for own in exchange.held)
            for rank in range(shards):
                places = [part for parts in exchange.places(rank).values() for part in parts]
                assert sum(part.stop - part.start for part in places) == sum(exchange.back[rank])


def test_the_owner_holds_most_of_its_matrix() -> None:
    """Of two equal matrices, each within a shard, none has to be sent."""
    items = [Item(0, 0, 100, 100, Matrix(10, 10)), Item(0, 100, 200, 100, Matrix(10, 10))]
    (wave,) = waves_of([items], 2, 1, sharded=True)
    assert wave.owners == (0, 1) and [wave.over_shards.sent(rank) for rank in (0, 1)] == [0, 0]
