"""What a step holds beside what rests: gradients take the memory of released parameters, tables give rows."""

import torch
from torch import Tensor, nn

import megazero
from megazero.observe.allocations import Allocations
from tests.library.running import on_ranks

ROWS, WIDTH = 4000, 16
TABLE = ROWS * WIDTH * 4  # bytes


class Tied(nn.Module):
    """A table that is the head too, and blocks that are nothing beside it."""

    def __init__(self, *, tied: bool) -> None:
        super().__init__()
        self.table = nn.Embedding(ROWS, WIDTH)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.head = nn.Linear(WIDTH, ROWS if tied else 1, bias=False)
        if tied:
            self.head.weight = self.table.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.table(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def sharded_of(stage: int, *, tied: bool) -> tuple[Tied, megazero.Sharded]:
    module = Tied(tied=tied)
    return module, megazero.shard(module, {"name": "adamw", "lr": 0.01}, stage=stage, kernels="reference")


def pool_of_tied() -> int:
    _, sharded = sharded_of(3, tied=True)
    for _ in range(2):
        sharded.backward(sharded(torch.arange(6)).square().mean())
        sharded.step()
    return sharded.memory()["pool"]["peak"]


def test_gradients_take_the_memory_of_released_parameters() -> None:
    """The root stays whole until its last gradient has come: then one buffer is enough for both."""
    for pool in on_ranks(2, pool_of_tied):
        assert TABLE < pool < 1.5 * TABLE


def allocated_by_a_backward() -> int:
    _, sharded = sharded_of(0, tied=False)
    loss = sharded(torch.tensor([1, 1, ROWS - 1])).square().sum()
    with Allocations() as counted:
        sharded.backward(loss)
    return counted.peak


def test_a_table_gives_gradients_of_rows() -> None:
    """A dense one would be as large as the table, for three rows that have one."""
    (peak,) = on_ranks(1, allocated_by_a_backward)
    assert peak < TABLE / 10


class Scaled(nn.Embedding):
    """A table that computes what it looks up: torch has no product with a gradient of rows."""

    def forward(self, ids: Tensor) -> Tensor:
        return nn.functional.embedding(ids, 2.0 * self.weight, sparse=self.sparse)


def layouts_of_gradients() -> list[str]:
    """Say how the gradient of a table's look-up comes, in different uses of it."""
    found = []
    for table, ids in (
        (nn.Embedding(50, 4), torch.arange(9)),
        (nn.Embedding(50, 4), torch.arange(50)),
        (nn.Embedding(50, 4, scale_grad_by_freq=True), torch.arange(9)),
        (nn.Embedding(50, 4, dtype=torch.bfloat16), torch.arange(9)),
        (Scaled(50, 4), torch.arange(9)),
    ):
        sharded = megazero.shard(nn.Sequential(table), "adamw", stage=0, kernels="reference")
        y = sharded(ids)
        found.append(type(y.grad_fn).__name__ + str(getattr(y.grad_fn, "_saved_sparse", "")))
        sharded.backward(y.float().sum())
        assert sharded.gradients("0.weight")["0.weight"][:9].ne(0).all()
        sharded.step()
    return found


def test_a_table_is_asked_for_rows_where_that_is_right() -> None:
    """Not where it looks up more than it has, in 16 bits, or where it computes what it looks up."""
    (found,) = on_ranks(1, layouts_of_gradients)
    assert [name.endswith("True") for name in found] == [True, False, False, False, False], found
