"""Train several small modules by phases, sharded on several ranks and plain in one process."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import megazero
from tests.library.running import ADAMW, on_ranks

Nets = Mapping[str, Any]


@dataclass(frozen=True)
class Phase:
    """A part of a step.

    Attributes:
        loss: (nets, step, rank) -> the rank's loss.
        trains: the modules that its backward names.
        before: (modules, step), called on plain modules too.
        last: the modules are updated after it.
    """

    loss: Callable[[Nets, int, int], Tensor]
    trains: tuple[str, ...]
    before: Callable[[Mapping[str, nn.Module], int], object] = lambda modules, step: None
    last: bool = True


@dataclass(frozen=True)
class Scenario:
    """Modules, and the phases of a step.

    Attributes:
        make: makes the modules by name.
        optimizer: of all; (parameters) -> an optimizer of torch. None: ours.
        frozen: the modules that are sharded without an optimizer.
    """

    make: Callable[[], Mapping[str, nn.Module]]
    phases: Sequence[Phase]
    steps: int = 4
    optimizer: Callable[..., torch.optim.Optimizer] | None = None
    frozen: tuple[str, ...] = ()

    def modules(self) -> Mapping[str, nn.Module]:
        with torch.random.fork_rng():
            torch.manual_seed(0)
            return {name: module.double() for name, module in self.make().items()}


def sharded_state(scenario: Scenario, stage: int, options: dict[str, Any]) -> dict[str, Tensor]:
    """Return the state of all modules, sharded."""
    modules = scenario.modules()
    asked = scenario.optimizer or {"name": "adamw", **ADAMW}
    told = {"stage": stage, "kernels": "reference", "clip": 0.5, **options}
    nets = {
        name: megazero.shard(module, None if name in scenario.frozen else asked, **told)
        for name, module in modules.items()
    }
    for step in range(scenario.steps):
        for phase in scenario.phases:
            phase.before(modules, step)
            trained = [nets[name] for name in phase.trains]
            loss = phase.loss(nets, step, trained[0].rank)
            if len(trained) == 1:
                trained[0].backward(loss, last=phase.last)
            else:
                megazero.backward(loss, *trained, last=phase.last)
            for one in trained if phase.last else ():
                one.step()
    return {f"{n}.{k}": x for n, one in nets.items() for k, x in one.full_state_dict(everywhere=True).items()}


def plain_state(scenario: Scenario, ranks: int) -> dict[str, Tensor]:
    """Return the same of one process of plain torch."""
    nets = scenario.modules()
    for name in scenario.frozen:
        nets[name].requires_grad_(False)
    make = scenario.optimizer or partial(torch.optim.AdamW, **ADAMW)  # type: ignore[arg-type]
    optimizers = {name: make(net.parameters()) for name, net in nets.items() if name not in scenario.frozen}
    for step in range(scenario.steps):
        for phase in scenario.phases:
            phase.before(nets, step)
            live = [p for name in phase.trains for p in nets[name].parameters() if p.requires_grad]
            for rank in range(ranks):
                found = torch.autograd.grad(phase.loss(nets, step, rank) / ranks, live, allow_unused=True)
                for parameter, gradient in zip(live, found, strict=True):  # one without a use has zeros here
                    gradient = torch.zeros_like(parameter) if gradient is None else gradient.to_dense()
                    parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient
            for name in phase.trains if phase.last else ():
                nn.utils.clip_grad_norm_(nets[name].parameters(), 0.5)
                optimizers[name].step()
                optimizers[name].zero_grad()
    return {f"{name}.{key}": value for name, net in nets.items() for key, value in net.state_dict().items()}


def compare(scenario: Scenario, ranks: int, stages: Sequence[int], **options: Any) -> None:
    """Compare both on some ranks, in some stages."""
    expected = plain_state(scenario, ranks)
    for stage in stages:
        for found in on_ranks(ranks, sharded_state, scenario, stage, options):
            for name, values in expected.items():
                assert torch.allclose(found[name], values, rtol=1e-12, atol=1e-13), (stage, name)
