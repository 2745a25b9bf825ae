"""Weights that are used outside of their unit's own forward: values and gradients are those of plain torch."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import megazero
from megazero import Sharded
from tests.library.running import ADAMW, on_ranks

WIDTH = 64
HOW = ("call", "use", "call and use", "call", "use and call", "use", "call, penalty", "checkpointed")


class Net(nn.Module):
    """A module that calls its second layer, or uses its weight, or both."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.table = nn.Embedding(5, WIDTH, sparse=True)
        self.double()

    def forward(self, x: Tensor, how: str) -> Tensor:
        h = torch.tanh(self.a(x)) + functional.embedding(torch.tensor([1, 3, 1, 2]), self.table.weight, sparse=True)
        if how == "checkpointed":
            y = checkpoint(lambda x: functional.linear(x, self.b.weight), h, use_reentrant=False)
            return y.square().mean() + self.b.weight.square().sum() + self.b(h).mean()  # type: ignore[union-attr]
        used = functional.linear(h, self.b.weight, self.b.bias) if "use" in how else h
        if how.startswith("use"):
            y = self.b(used) if "call" in how else used
        else:
            y = self.b(h) if how != "call and use" else functional.linear(self.b(h), self.b.weight)
        penalty = 0.1 * self.b.weight.square().sum() + self.a.bias.sum() if "penalty" in how else 0.0
        return (y + self.table(torch.tensor([0, 3, 3, 4]))).square().mean() + penalty


def made(make: Any) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return make()


def numbers(step: int, rank: int) -> Tensor:
    return torch.randn(4, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(10 * step + rank))


def sharded_net(stage: int, make: Any = Net, units: Any = ("a", "b", "table"), **options: Any) -> Sharded:
    return megazero.shard(
        made(make), {"name": "adamw", **ADAMW}, stage=stage, units=units, kernels="reference", **options
    )


def seen(stage: int) -> list[Tensor]:
    """Return the losses of steps and evaluations, and values that are looked at between them."""
    sharded, found = sharded_net(stage), []
    for step, how in enumerate(HOW):
        loss = sharded(numbers(step, sharded.rank), how)
        sharded.backward(loss)
        found.append(torch.tensor(sharded.step().loss, dtype=torch.float64))
        found.append(sharded.module.get_parameter("b.weight").detach().sum())
        with torch.no_grad():
            found.append(sharded(numbers(99, 0), "use"))
    return found


def plain_seen() -> list[Tensor]:
    module, found = made(Net), []
    optimizer = torch.optim.AdamW(module.parameters(), **ADAMW)  # type: ignore[arg-type]
    for step, how in enumerate(HOW):
        loss = sum(module(numbers(step, rank), how) / 2 for rank in range(2))
        loss.backward()  # type: ignore[union-attr]
        for parameter in module.parameters():
            parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.to_dense()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            found += [loss, module.get_parameter("b.weight").sum(), module(numbers(99, 0), "use")]
    return found


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_a_weight_outside_of_its_own_forward_is_that_of_the_update(stage: int):
    expected = plain_seen()
    found, *_ = on_ranks(2, seen, stage)
    assert torch.allclose(torch.stack(found), torch.stack(expected), rtol=1e-11, atol=0.0)


def loaded(stage: int, folder: Path) -> tuple[Tensor, Tensor]:
    sharded, found = sharded_net(stage), []
    for _ in range(2):
        sharded.backward(sharded(numbers(0, sharded.rank), "call"))
        sharded.step()
        if not found:
            sharded.save(folder)
        else:
            sharded.load(folder)
        with torch.no_grad():
            found.append(sharded(numbers(9, 0), "use"))
    return found[0], found[1]


@pytest.mark.parametrize("stage", [1, 2])
def test_a_weight_outside_of_its_own_forward_is_that_of_a_checkpoint(stage: int, tmp_path: Path):
    (before, after), *_ = on_ranks(2, loaded, stage, tmp_path)
    assert torch.equal(before, after)


class Parent(nn.Module):
    """A unit that uses the weight of another one inside of it."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(x, self.inner.weight)


class Holder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.parent = Parent()
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        return self.parent(x)


def called_alone(stage: int) -> tuple[Tensor, Tensor]:
    sharded = sharded_net(stage, Holder, ["parent", "parent.inner"])
    sharded.backward(sharded(numbers(0, sharded.rank)).square().mean())
    sharded.step()
    with torch.no_grad():
        found = sharded.module.get_submodule("parent")(numbers(1, 0))
    return found, numbers(1, 0) @ sharded.full_state_dict(everywhere=True)["parent.inner.weight"].T


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_a_submodule_that_is_called_alone_sees_the_update(stage: int):
    for found, expected in on_ranks(2, called_alone, stage):
        assert torch.equal(found, expected)


class Readers(nn.Module):
    """Modules of torch that read the weights of what is inside of them, and do not call it."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.layer = nn.TransformerEncoderLayer(WIDTH, 2, 16, dropout=0.0, batch_first=True)
        self.head = nn.Linear(WIDTH, WIDTH)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        y, _ = self.attention(x[None], x[None], x[None])
        return self.head(self.layer(y))[0]


def read(stage: int) -> tuple[dict[str, Tensor], Tensor, list[str]]:
    sharded = sharded_net(stage, Readers, [nn.Linear])
    for step in range(3):
        sharded.backward(sharded(numbers(step, sharded.rank)).square().mean())
        sharded.step()
    sharded.module.eval()
    with torch.no_grad():
        found = sharded(numbers(9, 0))
    return sharded.full_state_dict(), found, [part.name for part in sharded._assembly.parts if part.units]


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_modules_of_torch_that_read_weights_inside_of_them(stage: int):
    module = made(Readers)
    optimizer = torch.optim.AdamW(module.parameters(), **ADAMW)  # type: ignore[arg-type]
    for step in range(3):
        for rank in range(2):
            (module(numbers(step, rank)).square().mean() / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
    module.eval()
    with torch.no_grad():
        expected = module(numbers(9, 0))
    (state, found, parts), *_ = on_ranks(2, read, stage)
    assert parts == ["attention", "layer", "head"]
    assert torch.allclose(found, expected, rtol=1e-11, atol=1e-12)
    assert all(torch.allclose(state[n], value, rtol=1e-11, atol=1e-12) for n, value in module.state_dict().items())
