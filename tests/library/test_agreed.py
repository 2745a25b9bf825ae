"""Ranks call different units, in different orders, or none: they train as one process of plain torch does."""

import random
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import megazero
from megazero.base.errors import UserError
from tests.library.odd_modules import CASES, WIDTH, Stack, numbers, of_numbers
from tests.library.running import ADAMW, on_ranks, plain, sharded_case, train

STEPS, MICRO = 3, 2


class Wandering(Stack):
    """Blocks in any order, some of them checkpointed or without gradients, one of them frozen."""

    def __init__(self) -> None:
        super().__init__(blocks=4)
        self.blocks[2].requires_grad_(False)

    def forward(self, x: Tensor, order: list[tuple[int, str]]) -> Tensor:
        x = self.first(x)
        for number, how in order:
            block = self.blocks[number]
            if how == "checkpointed":
                x = checkpoint(block, x, use_reentrant=False)  # type: ignore[assignment]
            elif how == "unused":
                block(x)
            elif how == "without gradients":
                with torch.no_grad():
                    y = block(x)
                x = x + y
            else:
                x = block(x)
        return x


def made() -> Wandering:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return Wandering().double()


def order_of(seed: int, step: int, micro: int, rank: int) -> list[tuple[int, str]]:
    """Return which blocks a rank runs, and how; none now and then."""
    draw = random.Random(f"{seed} {step} {micro} {rank}")
    ways = ("plain", "plain", "checkpointed", "unused", "without gradients")
    return [(draw.randrange(4), draw.choice(ways)) for _ in range(draw.randrange(6))]


def wandered(seed: int, options: dict[str, Any]) -> dict[str, Tensor]:
    sharded = megazero.shard(
        made(), {"name": "adamw", **ADAMW}, stage=3, clip=0.5, lockstep=False, kernels="reference", **options
    )
    for step in range(STEPS):
        for micro in range(MICRO):
            order = order_of(seed, step, micro, sharded.rank)
            loss = sharded(numbers(10 * step + micro, sharded.rank), order).square().mean() / MICRO
            sharded.backward(loss, last=micro == MICRO - 1)
        if sharded.rank == step % 2:  # what one rank looks at alone, the others give it
            with torch.no_grad():
                sharded(numbers(7, 7), [(3, "plain"), (0, "plain")])
        sharded.step()
    return sharded.full_state_dict(everywhere=True)


@pytest.mark.parametrize(
    ("seed", "ranks", "options"),
    [(0, 2, {}), (1, 2, {}), (2, 3, {}), (3, 4, {"shard_ranks": 2})]
    + [pytest.param(seed, 2 + seed % 3, {}, marks=pytest.mark.full) for seed in range(4, 40)],
)
def test_ranks_that_call_different_units_train_as_one_process(seed: int, ranks: int, options: dict[str, Any]):
    module = made()
    parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(parameters, **ADAMW)  # type: ignore[arg-type]
    for step in range(STEPS):
        for micro in range(MICRO):
            for rank in range(ranks):
                loss = module(numbers(10 * step + micro, rank), order_of(seed, step, micro, rank)).square().mean()
                (loss / MICRO / ranks).backward()
        for parameter in parameters:  # torch leaves out what has no gradient; here it is zero
            parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        nn.utils.clip_grad_norm_(parameters, 0.5)
        optimizer.step()
        optimizer.zero_grad()
    for found in on_ranks(ranks, wandered, seed, options):
        for name, values in module.state_dict().items():
            assert torch.allclose(found[name], values, rtol=1e-12, atol=1e-13), name


def trained(case: str) -> tuple[dict[str, Tensor], list[float]]:
    sharded = sharded_case(case, 3, clip=0.5, lockstep=False)
    norms = train(sharded, case)
    return sharded.full_state_dict(), norms


@pytest.mark.parametrize("case", ["conditional", "library", "checkpoint, reentrant"])
def test_ranks_that_call_the_same_units_may_be_told_so_or_not(case: str):
    expected, norms = plain(case, 2)
    (found, found_norms), *_ = on_ranks(2, trained, case)
    assert all(torch.allclose(found[name], values, rtol=1e-12, atol=1e-12) for name, values in expected.items())
    assert found_norms == pytest.approx(norms, rel=1e-12) and case in CASES


def held() -> tuple[int, dict[str, int]]:
    """Return the most bytes of the pool, where one rank calls a block and the other calls none."""
    sharded = sharded_case("plain", 3, lockstep=False)
    stack = sharded.module
    assert isinstance(stack, Stack)
    stack.run = lambda stack, x: stack.blocks[2](stack.blocks[1](x)) if sharded.rank else x
    sharded.backward(of_numbers(sharded, 0, sharded.rank))
    sharded.step()
    return sharded.memory()["pool"]["peak"], sharded.traffic()["data"]["parameters"]


def test_who_serves_others_holds_one_unit_more():
    """The root and one block beside it; each of two blocks is gathered for forward and backward, the root once."""
    for pool, sent in on_ranks(2, held):
        assert pool <= 8 * 4 * 64  # and the gradients of both
        assert sent["ops"] == 5 and sent["elements"] == (4 * 96 + 64) // 2, sent


def other_calls(what: str) -> str:
    sharded = sharded_case("plain", 3, lockstep=False)
    sharded.backward(of_numbers(sharded, 0, sharded.rank))
    with pytest.raises(UserError) as caught:
        if sharded.rank == 0:
            sharded.step()
        elif what == "backward":
            sharded.backward(of_numbers(sharded, 1, 1))
        else:
            sharded.gradients()
    return str(caught.value)


@pytest.mark.parametrize("what", ["backward", "gradients"])
def test_ranks_that_wait_for_different_calls_all_say_so(what: str):
    for line in on_ranks(2, other_calls, what):
        assert "MZ-507 rank=1" in line and f"sharded.{what}, and rank 0 for sharded.step" in line


def failed_on_one() -> str:
    sharded = sharded_case("plain", 3, lockstep=False)
    stack = sharded.module
    assert isinstance(stack, Stack)
    loss = of_numbers(sharded, 0, sharded.rank)
    if sharded.rank == 1:
        loss = loss * torch.full((), 2.0, dtype=loss.dtype, requires_grad=True)
        loss.register_hook(lambda _: (_ for _ in ()).throw(RuntimeError("planted")))
        with pytest.raises(RuntimeError, match="planted"):
            sharded.backward(loss)
    with pytest.raises(UserError) as caught:
        sharded.backward(loss if sharded.rank == 0 else of_numbers(sharded, 1, 1))
    return str(caught.value)


def test_a_backward_that_one_rank_begins_anew_is_told_by_all():
    for line in on_ranks(2, failed_on_one):
        assert "MZ-507 rank=1" in line and "a sum of blocks.2" in line, line


def test_tables_are_looked_up_by_all_ranks():
    with pytest.raises(UserError, match=r"MZ-510.*tables"):
        megazero.shard(nn.Sequential(nn.Embedding(4, WIDTH)), "adamw", stage=3, tables=["0"], lockstep=False)
