"""A module's state on disks, its messages as integers, and second shards: as in a run."""

from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

import megazero
from megazero.base.errors import FaultList, UserError
from megazero.comm.host import Host
from megazero.library import tiers
from megazero.zero.unit import Unit
from tests.library.odd_modules import made, of_numbers
from tests.library.running import ADAMW, STEPS, on_ranks, sharded_case

OPTIMIZER: dict[str, Any] = {"name": "adamw", **ADAMW}


def trained(stage: int, folder: Path, options: dict[str, Any], again: bool = False) -> tuple[Any, ...]:
    """The state after some steps and the categories of memory; with a save and a load in the middle."""
    if "nvme" in str(options.get("offload")):
        options = {**options, "offload": {**options["offload"], "path": str(folder / "disk"), "host_mb": 160}}
    with patch.object(tiers, "Host", partial(Host, apart=True)):
        sharded = sharded_case("plain", stage, optimizer=OPTIMIZER, clip=0.5, **options)
        for step in range(STEPS):
            if again and step == 1:
                sharded.save(folder)
                sharded.load(folder)
            for micro in range(2):
                sharded.backward(of_numbers(sharded, 2 * step + micro, sharded.rank) / 2)
            sharded.step()
    held = {category for category, size in sharded.memory().items() if size["peak"]}
    return sharded.full_state_dict(everywhere=True), held


DISKS: list[tuple[int, dict[str, Any], set[str]]] = [
    (1, {"optimizer": "nvme"}, {"nvme_optimizer"}),
    (2, {"optimizer": "nvme"}, {"nvme_optimizer", "nvme_gradients"}),
    (3, {"optimizer": "nvme", "parameters": "nvme"}, {"nvme_optimizer", "nvme_gradients", "nvme_parameters"}),
    (3, {"optimizer": "cpu", "parameters": "nvme"}, {"host_optimizer", "host_gradients", "nvme_parameters"}),
]


@pytest.mark.parametrize(("stage", "offload", "kinds"), DISKS)
@pytest.mark.parametrize("again", [False, True])
def test_state_on_disks_changes_no_bit(
    stage: int, offload: dict[str, Any], kinds: set[str], again: bool, tmp_path: Path
) -> None:
    expected, _ = on_ranks(2, trained, stage, tmp_path / "plain", {})[0]
    for found, held in on_ranks(2, trained, stage, tmp_path / "there", {"offload": offload}, again):
        assert kinds <= held
        for name, value in expected.items():
            assert torch.equal(found[name], value), name


@pytest.mark.parametrize("stage", [3, pytest.param(2, marks=pytest.mark.full)])
def test_second_shards_change_no_bit(stage: int, tmp_path: Path) -> None:
    if stage == 2:
        with pytest.raises(FaultList, match=r"zero.stage == 3"):
            sharded_case("plain", stage, secondary_ranks=2)
        return
    expected, _ = on_ranks(4, trained, 3, tmp_path, {})[0]
    for found, held in on_ranks(4, trained, 3, tmp_path, {"secondary_ranks": 2}):
        assert "secondary" in held
        for name, value in expected.items():
            assert torch.equal(found[name], value), name


QUANTIZED: list[tuple[int, dict[str, Any], float]] = [
    (2, {"gradients": "int8"}, 0.3),
    (3, {"gradients": "int4", "parameters": "int8"}, 0.3),
    (1, {"gradients": "int8", "error_feedback": True}, 0.3),
]


def close(a: dict[str, Tensor], b: dict[str, Tensor], start: dict[str, Tensor]) -> float:
    """The distance of two updates, relative to their size."""
    apart = sum(float((a[name] - b[name]).square().sum()) for name in b)
    return float((apart / sum(float((b[name] - start[name]).square().sum()) for name in b)) ** 0.5)


@pytest.mark.parametrize(("stage", "quantize", "most"), QUANTIZED)
def test_messages_are_integers(stage: int, quantize: dict[str, Any], most: float, tmp_path: Path) -> None:
    expected, _ = on_ranks(2, trained, stage, tmp_path, {})[0]
    found, held = on_ranks(2, trained, stage, tmp_path, {"quantize": quantize})[0]
    assert 0 < close(found, expected, made("plain").state_dict()) < most
    assert ("residuals" in held) == ("error_feedback" in quantize)


@pytest.mark.parametrize(
    ("options", "line"),
    [
        (
            {"quantize": {"gradients": "int2"}},
            "MZ-105 shard: zero.quantize.gradients: expected 'none', 'int8' or 'int4'",
        ),
        ({"quantize": {"gradient": "int8"}}, "MZ-104 shard: unknown key zero.quantize.gradient; did you mean"),
        ({"offload": {"optimizer": "nvme"}}, "MZ-106 shard: zero.offload.path given with nvme"),
        (
            {"offload": {"optimizer": "cpu", "delayed": True}},
            "MZ-510 shard: offload: delayed updates are for runs only",
        ),
        ({"secondary_ranks": 2}, "MZ-106 shard: zero.stage == 3"),
    ],
)
def test_wrong_options_are_refused(options: dict[str, Any], line: str) -> None:
    with pytest.raises((UserError, FaultList)) as raised:
        megazero.shard(nn.Linear(2, 2), OPTIMIZER, stage=1, **options)
    assert str(raised.value).startswith(line), str(raised.value)


def test_optimizers_that_disks_do_not_hold_are_refused(tmp_path: Path) -> None:
    offload = {"optimizer": "nvme", "path": str(tmp_path)}
    with pytest.raises(UserError, match="state of torch's optimizers cannot be on disks"):
        megazero.shard(nn.Linear(2, 2), partial(torch.optim.SGD, lr=0.1), stage=1, offload=offload)
    with pytest.raises(FaultList, match="one optimizer other than muon"):
        megazero.shard(nn.Linear(2, 2), "muon", stage=1, offload=offload)


def test_values_on_disks_cannot_be_frozen_between_steps(tmp_path: Path) -> None:
    offload = {"optimizer": "nvme", "path": str(tmp_path), "host_mb": 160}
    sharded = sharded_case("plain", 1, offload=offload)
    next(sharded.module.parameters()).requires_grad_(False)
    sharded.backward(of_numbers(sharded, 0, 0))
    with pytest.raises(UserError, match="is frozen, and its state is on disks"):
        sharded.step()
    assert all(isinstance(unit, Unit) for unit in sharded._assembly.engine.units)
