"""Modules that use their parameters in odd ways, each with a loss of a step on a rank."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

WIDTH = 6
Loss = Callable[[Callable[..., Any], int, int], Tensor]  # (module, step, rank) -> the rank's loss


def numbers(step: int, rank: int, *shape: int) -> Tensor:
    draw = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(shape or (4, WIDTH), generator=draw, dtype=torch.float64)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, scale: float = 1.0, *, shift: Tensor | None = None) -> Tensor:
        y = x + scale * torch.tanh(self.linear(self.norm(x)))
        return y if shift is None else y + shift


class Stack(nn.Module):
    """Blocks one after the other, run in a way that a test may replace."""

    def __init__(self, blocks: int = 3, run: Callable[["Stack", Tensor], Tensor] | None = None) -> None:
        super().__init__()
        self.first, self.blocks = nn.Linear(WIDTH, WIDTH), nn.ModuleList(Block() for _ in range(blocks))
        self.run = run

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        if self.run is not None:
            return self.run(self, x)
        for block in self.blocks:
            x = block(x)
        return x


class Conditional(Stack):
    """The second block runs in even steps only; the last parameter never; one is used on one rank only."""

    def __init__(self) -> None:
        super().__init__()
        self.never = nn.Parameter(torch.ones(3))
        self.sometimes = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, step: int, rank: int) -> Tensor:
        x = self.blocks[0](self.first(x))
        if step % 2 == 0:
            x = self.blocks[1](x)
        return self.sometimes(x) if rank == 1 else x


class Tied(Stack):
    """A weight of the first block is the last one's, and the head's."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(WIDTH, WIDTH, bias=False)
        first, _, last = self.blocks
        assert isinstance(first, Block) and isinstance(last, Block)
        self.head.weight = first.linear.weight = last.linear.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(super().forward(x))


class Frozen(Stack):
    """The first layer and the second block are frozen, and so is the norm of the third."""

    def __init__(self) -> None:
        super().__init__()
        for frozen in (self.first, self.blocks[1], self.blocks[2].norm):
            frozen.requires_grad_(False)


class Mixed(Stack):
    """The middle block computes in fp32, which `made` makes it."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks[0](self.first(x))
        return self.blocks[2](self.blocks[1](x.float()).double())


class Buffers(Stack):
    """A buffer that two submodules share, one that training changes, and batch normalisation."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        table = torch.arange(WIDTH, dtype=torch.float64)
        self.register_buffer("table", table)
        self.blocks[0].register_buffer("table", table)

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        return self.norm(super().forward(x)) + self.table


@dataclass
class Output:
    """What some models return."""

    hidden: list[Tensor]
    more: dict[str, Any]


class Nested(Stack):
    """Several inputs by name, outputs inside of others, and what is no tensor."""

    def forward(self, x: Tensor, *, pair: tuple[Tensor, Tensor], scale: float) -> Output:  # type: ignore[override]
        a = self.blocks[0](self.first(x), scale, shift=pair[0])
        b = self.blocks[1](a, shift=pair[1])
        return Output([a, b], {"last": (self.blocks[2](b), None), "name": "text"})


class Recursive(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Descending(), Descending()])

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks[1](self.blocks[0](x, 3), 2)


class Descending(nn.Module):
    """A module that calls itself."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, depth: int) -> Tensor:
        x = torch.tanh(self.linear(x))
        return self(x, depth - 1) if depth else x


class Library(nn.Module):
    """What torch has of its own: recurrent, attention, lists of parameters, a scalar, sparse gradients, weight norm."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(9, WIDTH, sparse=True)
        self.recurrent = nn.LSTM(WIDTH, WIDTH, num_layers=2, batch_first=True)
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.some = nn.ParameterList([nn.Parameter(torch.ones(WIDTH)), nn.Parameter(torch.ones(WIDTH))])
        self.scale = nn.Parameter(torch.tensor(0.5))
        self.normed = parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH))

    def forward(self, tokens: Tensor) -> Tensor:
        x, _ = self.recurrent(self.embedding(tokens))
        y, _ = self.attention(x, x, x)
        return self.normed(y * self.some[0] + self.some[1] * self.scale)


def _twice(stack: Stack, x: Tensor) -> Tensor:
    for block in (*stack.blocks, stack.blocks[0], stack.blocks[1]):
        x = block(x)
    return x


def _checkpointed(stack: Stack, x: Tensor, *, reentrant: bool) -> Tensor:
    for block in stack.blocks:
        x = checkpoint(block, x, use_reentrant=reentrant)  # type: ignore[assignment]
    return x


def _all_checkpointed(stack: Stack, x: Tensor) -> Tensor:
    def run(x: Tensor) -> Tensor:
        for block in stack.blocks:
            x = block(x)
        return x

    return checkpoint(run, x, use_reentrant=False)  # type: ignore[return-value]


class Inside(Stack):
    """Each block checkpoints what is inside of it."""

    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            plain = block.forward
            block.forward = partial(checkpoint, plain, use_reentrant=False)  # type: ignore[method-assign]


class Compiled(Stack):
    """Each block is compiled: the first two in place, the third by its wrapper."""

    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks[:2]:
            block.compile(backend="aot_eager")
        self.blocks[2] = torch.compile(self.blocks[2], backend="aot_eager")  # type: ignore[assignment]


def of_numbers(module: Callable[..., Any], step: int, rank: int) -> Tensor:
    return module(numbers(step, rank)).square().mean()


def conditional(module: Callable[..., Any], step: int, rank: int) -> Tensor:
    return module(numbers(step, rank), step, rank).square().mean()


def nested(module: Callable[..., Any], step: int, rank: int) -> Tensor:
    pair = (numbers(step, rank + 10), numbers(step, rank + 20))
    found = module(numbers(step, rank), pair=pair, scale=0.5)
    assert found.more["name"] == "text"
    return found.hidden[0].mean() + found.more["last"][0].square().mean()


def called_twice(module: Callable[..., Any], step: int, rank: int) -> Tensor:
    """Two forwards for one backward, one of them without gradients."""
    with torch.no_grad():
        target = module(numbers(step, rank + 50))
    return functional.mse_loss(module(numbers(step, rank)), target) + module(numbers(step, rank + 5)).square().mean()


def tokens(module: Callable[..., Any], step: int, rank: int) -> Tensor:
    draw = torch.Generator().manual_seed(step + 7 * rank)
    return module(torch.randint(0, 9, (3, 5), generator=draw)).square().mean()


CASES: dict[str, tuple[Callable[[], nn.Module], Loss]] = {
    "plain": (Stack, of_numbers),
    "conditional": (Conditional, conditional),
    "twice": (partial(Stack, run=_twice), of_numbers),
    "called twice": (Stack, called_twice),
    "tied": (Tied, of_numbers),
    "frozen": (Frozen, of_numbers),
    "mixed": (Mixed, of_numbers),
    "buffers": (Buffers, of_numbers),
    "nested": (Nested, nested),
    "recursive": (Recursive, of_numbers),
    "library": (Library, tokens),
    "checkpoint": (partial(Stack, run=partial(_checkpointed, reentrant=False)), of_numbers),
    "checkpoint, reentrant": (partial(Stack, run=partial(_checkpointed, reentrant=True)), of_numbers),
    "checkpoint of several": (partial(Stack, run=_all_checkpointed), of_numbers),
    "checkpoint inside": (Inside, of_numbers),
    "compiled": (Compiled, of_numbers),
}


def made(case: str) -> nn.Module:
    """Return a case's module in fp64, the same on every rank and in every call."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        make, _ = CASES[case]
        module = make().double()
    if isinstance(module, Mixed):
        module.blocks[1].float()
    return module
