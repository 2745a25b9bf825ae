"""Ranks that make other calls than the others all say so at once, in every stage."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import megazero
from megazero import Sharded
from megazero.base.errors import UserError
from tests.library.odd_modules import made, of_numbers
from tests.library.running import ADAMW, on_ranks, sharded_case

Call = Callable[[Sharded, Path], object]


def backward(sharded: Sharded, folder: Path) -> None:
    sharded.backward(of_numbers(sharded, 0, sharded.rank))


CALLS: dict[str, tuple[Call, Call]] = {  # of rank 0, and of the others, after a backward that all have made
    "backward and step": (backward, lambda sharded, _: sharded.step()),
    "step and backward": (lambda sharded, _: sharded.step(), backward),
    "gradients and backward": (lambda sharded, _: sharded.gradients(), backward),
    "backward and save": (backward, lambda sharded, folder: sharded.save(folder)),
    "full_state_dict and step": (lambda sharded, _: sharded.full_state_dict(), lambda sharded, _: sharded.step()),
}


def other_calls(stage: int, folder: Path, names: list[str]) -> list[str]:
    lines = []
    for first, others in map(CALLS.__getitem__, names):
        sharded = sharded_case("plain", stage)
        backward(sharded, folder)
        with pytest.raises(UserError) as caught:
            (others if sharded.rank else first)(sharded, folder)
        lines.append(str(caught.value))
    return lines


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_another_number_of_calls_is_one_line(stage: int, tmp_path: Path):
    gathers = stage == 3  # the forward before a backward is another message already
    names = ["backward and step"] if gathers else list(CALLS)
    for lines in on_ranks(3, other_calls, stage, tmp_path, names, fresh=gathers):
        for name, line in zip(names, lines, strict=True):
            first, others = name.split(" and ")
            assert re.match("MZ-507 rank=[12]", line) and len(line) <= 300
            if gathers:
                assert "other units of the module than rank 0" in line and "equally many backwards" in line
            else:
                assert f"rank=1: it waits in sharded.{others}, and rank 0 in sharded.{first}" in line


def uneven(stage: int) -> dict[str, Tensor]:
    sharded = sharded_case("plain", stage)
    for step in range(2):
        for micro in range(3 - sharded.rank):
            loss = of_numbers(sharded, 10 * step + micro, sharded.rank) / (3 - sharded.rank)
            sharded.backward(loss, last=micro == 2 - sharded.rank)
        sharded.step()
    return sharded.full_state_dict()


@pytest.mark.parametrize("stage", [0, 1])
def test_backwards_that_send_nothing_may_be_of_another_number(stage: int):
    module = made("plain")
    optimizer = torch.optim.AdamW(module.parameters(), **ADAMW)  # type: ignore[arg-type]
    for step in range(2):
        for rank in range(2):
            for micro in range(3 - rank):
                (of_numbers(module, 10 * step + micro, rank) / (3 - rank) / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
    found, *_ = on_ranks(2, uneven, stage)
    assert all(torch.allclose(found[n], value, rtol=1e-12, atol=1e-13) for n, value in module.state_dict().items())


def kept_outputs(keeps: bool) -> float:
    """Train after a forward whose output no backward reaches; rank 0 may keep it, and with it its graph."""
    with torch.random.fork_rng():
        torch.default_generator.manual_seed(0)
        module = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(3))).double()
    sharded, kept, x = megazero.shard(module, "adamw", stage=3), [], torch.ones(2, 4, dtype=torch.float64)
    for _ in range(3):
        out = sharded(x)
        if keeps and sharded.rank == 0:
            kept.append(out)
        del out
        sharded.backward(sharded(x).square().mean())
        sharded.step(1e-2)
    return sum(float(value.sum()) for value in sharded.full_state_dict(everywhere=True).values())


def test_a_graph_that_one_rank_keeps_changes_no_gather() -> None:
    dropped, kept = (megazero.launch(kept_outputs, 2, keeps) for keeps in (False, True))
    assert dropped == kept
