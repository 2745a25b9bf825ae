"""The example of our own parts: two ranks in any stage equal one, and it learns."""

import subprocess
import sys

import pytest
import torch
from torch import Tensor

from examples.own_parts import CountingTokens, build, train
from megazero.comm.grid import Grid
from megazero.zero.placement import STAGES
from tests.house.source import ROOT
from tests.ranks import run_ranks


def trained(grid: Grid, stage: int, samples: int) -> tuple[dict[str, Tensor], list[float]]:
    model, engine = build(grid, STAGES[stage], torch.float64)  # type: ignore[index]
    losses: list[float] = []
    source = CountingTokens(samples, grid["data"].rank, grid["data"].size)
    train(model, engine, source, 3, 0.05, lambda _, numbers: losses.append(numbers.loss))
    return {name: values.clone() for name, values in engine.named_parameters()}, losses


@pytest.mark.parametrize("stage", range(4))
def test_two_ranks_equal_one(stage: int):
    expected, losses = run_ranks(1, trained, 0, 4)[0]
    for found, found_losses in run_ranks(2, trained, stage, 2):
        assert found_losses == pytest.approx(losses, rel=1e-12) and losses[-1] < losses[0]
        assert "blocks.1.weight" in found and found.keys() == expected.keys()
        assert all(torch.allclose(found[n], values, rtol=1e-11, atol=1e-12) for n, values in expected.items())


def test_it_runs_as_it_says():
    done = subprocess.run([sys.executable, "examples/own_parts.py"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    losses = [float(line.split()[1]) for line in done.stdout.splitlines()[1:]]
    assert len(losses) == 5 and losses[-1] < 0.5 * losses[0]
