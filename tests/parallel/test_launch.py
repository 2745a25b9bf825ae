"""The world is what torchrun or srun says, or one process; anything in between is refused."""

import pytest
import torch

from megazero.errors import UserError
from megazero.parallel.launch import World, world_from_environment


def torchrun(rank: object, size: object, local: object) -> dict[str, str]:
    there = {"MASTER_ADDR": "a", "MASTER_PORT": "1"}
    return {"RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_RANK": str(local)} | there


def srun(rank: object, size: object, local: object) -> dict[str, str]:
    return {"SLURM_PROCID": str(rank), "SLURM_NTASKS": str(size), "SLURM_LOCALID": str(local)}


@pytest.mark.parametrize(
    ("environment", "world"),
    [
        ({}, World(0, 1, 0)),
        (torchrun(0, 1, 0), World(0, 1, 0, "torchrun")),
        (torchrun(5, 8, 1), World(5, 8, 1, "torchrun")),
        (srun(3, 4, 0), World(3, 4, 0, "srun")),
        (srun(3, 4, 0) | torchrun(5, 8, 1), World(5, 8, 1, "torchrun")),  # torchrun inside srun: the inner one counts
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "8"}, World(0, 1, 0)),  # salloc's shell, not a task of srun
        ({"LOCAL_RANK": "0"}, World(0, 1, 0)),
    ],
)
def test_world(environment: dict[str, str], world: World):
    assert world_from_environment(environment) == world


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        (torchrun("x", 2, 0), "got RANK=x, WORLD_SIZE=2, LOCAL_RANK=0"),
        (torchrun("", 2, 0), "got RANK=, "),
        (torchrun(2, 2, 0), "expected 0 <= rank < size and local rank >= 0, got RANK=2"),
        (torchrun(0, 0, 0), "WORLD_SIZE=0"),
        (torchrun(-1, 2, 0), "RANK=-1"),
        (srun(0, 2, -1), "SLURM_LOCALID=-1"),
        ({"WORLD_SIZE": "2"}, "WORLD_SIZE set, RANK and LOCAL_RANK not"),
        ({"WORLD_SIZE": "2", "RANK": "1"}, "RANK and WORLD_SIZE set, LOCAL_RANK not"),
    ],
)
def test_half_a_world_is_refused(environment: dict[str, str], message: str):
    with pytest.raises(UserError, match=r"^MZ-111: .*; unset them or start through torchrun$") as caught:
        world_from_environment(environment)
    assert message in str(caught.value) and caught.value.exit_code == 2


def test_device_is_the_local_gpu_or_the_cpu(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert World(5, 8, 1).device == torch.device("cpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert World(5, 8, 1).device == torch.device("cuda", 1)
