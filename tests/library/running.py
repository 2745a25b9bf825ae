"""Train small modules sharded on several ranks and plain in one process."""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import megazero
from megazero import Sharded
from megazero.comm.grid import Grid
from megazero.comm.status_board import StatusBoard
from megazero.launcher.environment import RankContext
from megazero.launcher.world import World
from megazero.library import meeting
from tests.library.odd_modules import CASES, made
from tests.ranks import run_ranks

STEPS, LR = 3, 0.05
STAGES = [1, 3, *(pytest.param(stage, marks=pytest.mark.full) for stage in (0, 2))]  # 1 publishes, 3 gathers
ADAMW = {"lr": LR, "betas": (0.9, 0.95), "eps": 1e-3, "weight_decay": 0.1}


def be(grid: Grid) -> None:
    """Let this process be a rank of a grid for what it shards from now on."""
    world = World(grid["world"].rank, grid["world"].size, grid["world"].rank, "local")
    meeting.be(RankContext(world, StatusBoard().status_slot(0)), grid.comm)


def on_ranks(size: int, function: Callable[..., Any], *arguments: Any, fresh: bool = False) -> list[Any]:
    """Return what a function of the library returns on each of some ranks.

    Args:
        fresh: as of `run_ranks`.
    """
    return run_ranks(size, _on, function, arguments, fresh=fresh)


def _on(grid: Grid, function: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    be(grid)
    return function(*arguments)


def sharded_case(case: str, stage: int, **options: Any) -> Sharded:
    options = {"kernels": "reference", **options}
    return megazero.shard(made(case), options.pop("optimizer", {"name": "adamw", **ADAMW}), stage=stage, **options)


def train(sharded: Sharded, case: str, first: int = 0, steps: int = STEPS) -> list[float]:
    """Train some steps; return the gradient's norms."""
    norms = []
    for step in range(first, first + steps):
        sharded.backward(loss_of(case, sharded, step, sharded.rank))
        norms.append(sharded.step().grad_norm)
    return norms


def loss_of(case: str, module: Callable[..., Any], step: int, rank: int) -> Tensor:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The .grad attribute")  # torch.compile looks at it
        return CASES[case][1](module, step, rank)


def trained(case: str, stage: int, steps: int = STEPS) -> tuple[dict[str, Tensor], list[float]]:
    """Return the state behind some steps, and the norms."""
    sharded = sharded_case(case, stage, clip=0.5)
    norms = train(sharded, case, steps=steps)
    return sharded.full_state_dict(), norms


def plain(case: str, ranks: int, steps: int = STEPS) -> tuple[dict[str, Tensor], list[float]]:
    """Return the same of one process of plain torch."""
    module = made(case)
    norms = train_plain(module, lambda step, rank: loss_of(case, module, step, rank), ranks, steps)
    return module.state_dict(), norms


def train_plain(module: nn.Module, loss: Callable[[int, int], Tensor], ranks: int, steps: int) -> list[float]:
    """Train a module in one process of plain torch that computes the losses of all ranks; return the norms.

    Args:
        loss: of a step and a rank, by this module.
    """
    norms = []
    parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(parameters, **ADAMW)  # type: ignore[arg-type]
    for step in range(steps):
        for rank in range(ranks):
            (loss(step, rank) / ranks).backward()
        for parameter in parameters:  # torch leaves out what has no gradient; here it is zero
            parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.to_dense()
        norms.append(float(nn.utils.clip_grad_norm_(parameters, 0.5)))
        optimizer.step()
        optimizer.zero_grad()
    return norms
