"""Hold the recipes of docs/library.md against plain torch: averages, norms and limits of groups, a norm over ranks."""

from collections.abc import Iterable
from fnmatch import fnmatchcase
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import megazero
from tests.library.odd_modules import made, numbers, of_numbers
from tests.library.running import ADAMW, STAGES, on_ranks, sharded_case

STEPS, DECAY = 3, 0.9
CLIPS = [("*norm*", 0.01), ("*", 0.02)]  # the first pattern that fits counts


def averaged(stage: int) -> dict[str, Tensor]:
    sharded, average = sharded_case("plain", stage), dict[str, Tensor]()
    for step in range(STEPS):
        sharded.backward(of_numbers(sharded, step, sharded.rank))
        sharded.step()
        with sharded.gathered() as values:
            for name, value in values.items():
                average.setdefault(name, value.clone()).lerp_(value, 1 - DECAY)
    return average


@pytest.mark.parametrize("stage", STAGES)
def test_an_average_of_the_weights(stage: int):
    module, average = made("plain"), dict[str, Tensor]()
    optimizer = torch.optim.AdamW(module.parameters(), **ADAMW)  # type: ignore[arg-type]
    for step in range(STEPS):
        stepped(module, optimizer, step)
        for name, value in module.state_dict().items():
            average.setdefault(name, value.clone()).lerp_(value, 1 - DECAY)
    for found in on_ranks(2, averaged, stage):
        assert all(torch.allclose(found[name], value, rtol=1e-12, atol=1e-13) for name, value in average.items())


def stepped(module: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    for rank in range(2):
        (of_numbers(module, step, rank) / 2).backward()
    optimizer.step()
    optimizer.zero_grad()


def normed(stage: int) -> dict[str, float]:
    """Return the norm of each group's gradient, from whole gradients."""
    sharded = sharded_case("plain", stage)
    sharded.backward(of_numbers(sharded, 0, sharded.rank))
    return group_norms(sharded.gradients())


def group_norms(gradients: dict[str, Tensor]) -> dict[str, float]:
    groups = grouped(gradients)
    return {pattern: float(nn.utils.get_total_norm([gradients[name] for name in of])) for pattern, of in groups.items()}


@pytest.mark.parametrize("stage", STAGES)
def test_norms_of_groups(stage: int):
    module = made("plain")
    ((of_numbers(module, 0, 0) + of_numbers(module, 0, 1)) / 2).backward()
    expected = group_norms({name: p.grad for name, p in module.named_parameters() if p.grad is not None})
    assert all(found == pytest.approx(expected, rel=1e-12) for found in on_ranks(2, normed, stage))


def clipped(stage: int, options: dict[str, Any]) -> dict[str, Tensor]:
    """Train with a limit for each group; return the values after all steps."""
    groups = [(pattern, {"clip": limit}) for pattern, limit in CLIPS]
    sharded = sharded_case("plain", stage, groups=groups, **options)
    for step in range(STEPS):
        sharded.backward(of_numbers(sharded, step, sharded.rank))
        sharded.step()
    return sharded.full_state_dict(everywhere=True)


def grouped(names: Iterable[str]) -> dict[str, list[str]]:
    groups: dict[str, list[str]] = {}
    for name in names:
        groups.setdefault(next(pattern for pattern, _ in CLIPS if fnmatchcase(name, pattern)), []).append(name)
    return groups


ON_HOST = {"offload": {"optimizer": "cpu"}}  # in stages that shard its state


@pytest.mark.parametrize(
    ("stage", "options"),
    [
        *(pytest.param(stage, {}, marks=pytest.mark.full) if stage in (0, 2) else (stage, {}) for stage in range(4)),
        *(pytest.param(stage, {"shard_ranks": 1}, marks=pytest.mark.full) for stage in range(4)),
        *(pytest.param(stage, ON_HOST, marks=pytest.mark.full) for stage in (1, 2, 3)),
    ],
    ids=str,
)
def test_a_limit_for_each_group(stage: int, options: dict[str, Any]):
    module, norms = made("plain"), list[float]()
    optimizer = torch.optim.AdamW(module.parameters(), **ADAMW)  # type: ignore[arg-type]
    for step in range(STEPS):
        for rank in range(2):
            (of_numbers(module, step, rank) / 2).backward()
        named = dict(module.named_parameters())
        for pattern, of in grouped(named).items():
            norms.append(float(nn.utils.clip_grad_norm_([named[name] for name in of], dict(CLIPS)[pattern])))
        optimizer.step()
        optimizer.zero_grad()
    assert norms[0] > CLIPS[0][1] and norms[1] > CLIPS[1][1]
    for values in on_ranks(2, clipped, stage, options):
        for name, value in module.state_dict().items():
            assert torch.allclose(values[name], value, rtol=1e-12, atol=1e-13)


class Summed(torch.autograd.Function):
    """The sum over all ranks, of values and of gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        dist.all_reduce(x := x.clone())
        return x

    backward = forward  # type: ignore[assignment]


class SyncedNorm(nn.BatchNorm1d):
    """Batch normalisation with the statistics of all ranks' samples, on any device."""

    def forward(self, x: Tensor) -> Tensor:
        if not (self.training and dist.is_initialized()):
            return super().forward(x)
        mean, square = Summed.apply(torch.stack([x.mean(0), x.square().mean(0)])) / dist.get_world_size()
        assert self.running_mean is not None and self.running_var is not None and self.momentum is not None
        of_samples = len(x) * dist.get_world_size()
        variance = square - mean.square()
        with torch.no_grad():
            self.running_mean.lerp_(mean, self.momentum)
            self.running_var.lerp_(variance * of_samples / (of_samples - 1), self.momentum)
        return (x - mean) * (variance + self.eps).rsqrt() * self.weight + self.bias


def with_norm(kind: type[nn.BatchNorm1d]) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(6, 6), kind(6), nn.Tanh(), nn.Sequential(nn.Linear(6, 6), kind(6))).double()


def synchronised(stage: int) -> dict[str, Tensor]:
    module = with_norm(SyncedNorm)
    sharded = megazero.shard(module, {"name": "adamw", **ADAMW}, stage=stage, units=["0", "3"], kernels="reference")
    for step in range(STEPS):
        sharded.backward((sharded(numbers(step, sharded.rank)) - 1).pow(4).mean())
        sharded.step()
    return sharded.full_state_dict()


@pytest.mark.parametrize("stage", STAGES)
def test_batch_normalisation_over_all_ranks(stage: int):
    module = with_norm(nn.BatchNorm1d)
    optimizer = torch.optim.AdamW(module.parameters(), **ADAMW)  # type: ignore[arg-type]
    for step in range(STEPS):
        batch = torch.cat([numbers(step, rank) for rank in range(2)])
        (module(batch) - 1).pow(4).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    found, *_ = on_ranks(2, synchronised, stage)
    for name, value in module.state_dict().items():
        if "num_batches" not in name:
            assert torch.allclose(found[name], value, rtol=1e-10, atol=1e-12), name
