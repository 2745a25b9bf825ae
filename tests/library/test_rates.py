"""A learning rate of 0, and the first update after a checkpoint of step 0."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import megazero
from megazero.base.errors import UserError
from tests.library.odd_modules import made, of_numbers
from tests.library.running import sharded_case

SGD = partial(torch.optim.SGD, momentum=0.9, dampening=0.5)


@pytest.mark.parametrize(
    "optimizer", [partial(SGD, lr=0.0), partial(torch.optim.Adam, lr=0.0), {"name": "adamw", "lr": 0.0}]
)
def test_an_optimizer_may_begin_with_a_learning_rate_of_0(optimizer: Any):
    module = made("plain")
    plain = (
        torch.optim.AdamW(module.parameters(), lr=0.0)
        if isinstance(optimizer, dict)
        else optimizer(module.parameters())
    )
    sharded = sharded_case("plain", 1, optimizer=optimizer, groups=[("*norm*", {"lr": 0.0})])
    for step, lr in enumerate((None, 0.01)):
        of_numbers(module, step, 0).backward()
        plain.param_groups[0]["lr"] = lr or 0.0
        plain.step()
        plain.zero_grad()
        sharded.backward(of_numbers(sharded, step, 0))
        sharded.step(lr)
    found = sharded.full_state_dict()
    assert all(torch.allclose(found[n], value, rtol=1e-12, atol=1e-13) for n, value in module.state_dict().items())


@pytest.mark.parametrize("optimizer", [partial(torch.optim.Adafactor, lr=0.0), partial(torch.optim.Muon, lr=0.0)])
def test_a_learning_rate_of_0_hides_no_optimizer_that_mixes_elements(optimizer: Any):
    with pytest.raises(UserError, match="MZ-501"):
        megazero.shard(nn.Linear(2, 2), optimizer, stage=0)


@pytest.mark.parametrize("optimizer", [{"name": "adamw", "lr": 0.0}, partial(torch.optim.SGD, lr=0.0)])
def test_a_group_has_no_rate_relative_to_0(optimizer: Any):
    with pytest.raises(UserError, match=r"MZ-501.*'\*norm\*': lr 0.1, but"):
        sharded_case("plain", 0, optimizer=optimizer, groups=[("*norm*", {"lr": 0.1})])


@pytest.mark.parametrize(
    "optimizer", [partial(SGD, lr=0.1), partial(torch.optim.Adagrad, lr=0.1, initial_accumulator_value=0.2)]
)
def test_a_loaded_step_0_begins_as_a_fresh_run(optimizer: Any, tmp_path: Path):
    module = made("plain")
    plain = optimizer(module.parameters())
    sharded = sharded_case("plain", 1, optimizer=optimizer)
    sharded.save(tmp_path)
    for step in (7, 8):
        sharded.backward(of_numbers(sharded, step, 0))
        sharded.step()
    assert sharded.load(tmp_path) == 0
    for step in range(2):
        of_numbers(module, step, 0).backward()
        plain.step()
        plain.zero_grad()
        sharded.backward(of_numbers(sharded, step, 0))
        sharded.step()
    found = sharded.full_state_dict()
    assert all(torch.allclose(found[n], value, rtol=1e-12, atol=1e-13) for n, value in module.state_dict().items())
