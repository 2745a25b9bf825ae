"""The world is what torchrun or srun says, or one process; anything in between is refused."""

import subprocess
import sys

import pytest
import torch

from megazero.base.errors import UserError
from megazero.launcher.environment import (
    GPU_SETTINGS,
    Meeting,
    check_gpus,
    first_host,
    gpu_settings,
    local_size,
    meeting_of_step,
    set_for_gpus,
    world_from_environment,
)
from megazero.launcher.world import World
from tests.tiny_run import ROOT


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
        (srun(0, 1, 0), World(0, 1, 0)),  # a shell in a job of one task
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "8"}, World(0, 1, 0)),  # salloc's shell, not a task of srun
        ({"LOCAL_RANK": "0"}, World(0, 1, 0)),
    ],
)
def test_world(environment: dict[str, str], world: World):
    assert world_from_environment(environment) == world


PORTS = {"0": "in 1 to 65535, got 0", "65536": "got 65536", "x": "MASTER_PORT is x, expected a number", "": "is empty"}


@pytest.mark.parametrize("port", PORTS)
def test_a_port_that_is_none(port: str):
    for launched in (torchrun(0, 2, 0), srun(0, 2, 0) | {"MASTER_ADDR": "node1"}):
        with pytest.raises(UserError, match=f"MZ-111.*{PORTS[port]}"):
            environment = launched | {"MASTER_PORT": port}
            world_from_environment(environment)
            meeting_of_step(environment)


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
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    assert World(5, 8, 1).device == torch.device("cuda", 1)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)  # srun --gpus-per-task=1
    assert World(5, 8, 1).device == torch.device("cuda", 0)


def test_ranks_that_share_gpus_take_them_in_turn(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    taken = [World(rank, 5, rank, shares_gpus=True).device for rank in range(5)]
    assert taken == [torch.device("cuda", number) for number in (0, 1, 0, 1, 0)]
    assert World(3, 5, 3).device == torch.device("cuda", 3), "which is not there: torch says so"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert World(3, 5, 3, shares_gpus=True).device == torch.device("cpu")


# What srun sets on its tasks: a plain job, an array's task, a requeued job, a second step, several hosts.
JOB = {"SLURM_JOB_ID": "4242", "SLURM_JOB_NODELIST": "node[003-004]", "SLURM_STEP_ID": "0"}


@pytest.mark.parametrize(
    ("environment", "meeting"),
    [
        (JOB, Meeting("node003", 24242, None)),
        (JOB | {"SLURM_STEP_NODELIST": "node004"}, Meeting("node004", 24242, None)),
        # an array: every task has a job id of its own, the array's id is not it
        (JOB | {"SLURM_JOB_ID": "4243", "SLURM_ARRAY_JOB_ID": "4242", "SLURM_ARRAY_TASK_ID": "1"},
         Meeting("node003", 24243, None)),
        # requeued: the same job id, another port than the attempt before, whose processes may still be dying
        (JOB | {"SLURM_RESTART_COUNT": "1"}, Meeting("node003", 24343, None)),
        (JOB | {"SLURM_RESTART_COUNT": "2"}, Meeting("node003", 24444, None)),
        (JOB | {"SLURM_STEP_ID": "1"}, Meeting("node003", 25251, None)),  # two steps of one job side by side
        (JOB | {"MASTER_ADDR": "10.0.0.7", "MASTER_PORT": "1234"}, Meeting("10.0.0.7", 1234, None)),
        (JOB | {"GLOO_SOCKET_IFNAME": "ib0"}, Meeting("node003", 24242, "ib0")),
        (JOB | {"NCCL_SOCKET_IFNAME": "^docker,lo"}, Meeting("node003", 24242, None)),  # names none
        (JOB | {"NCCL_SOCKET_IFNAME": "^docker", "TP_SOCKET_IFNAME": "eth1"}, Meeting("node003", 24242, "eth1")),
        (JOB | {"NCCL_SOCKET_IFNAME": "eth"}, Meeting("node003", 24242, None)),  # a prefix, as NCCL allows
        (JOB | {"SLURM_JOB_NUM_NODES": "4", "SLURM_STEP_NUM_NODES": "2"}, Meeting("node003", 24242, None, 2)),
        ({"MASTER_ADDR": "a", "MASTER_PORT": "7"}, Meeting("a", 7, None)),
    ],
)  # fmt: skip
def test_where_a_step_meets(environment: dict[str, str], meeting: Meeting):
    assert meeting_of_step(environment, ["lo", "ib0", "eth1"]) == meeting


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"SLURM_JOB_ID": "1"}, "neither MASTER_ADDR nor SLURM_STEP_NODELIST is set"),
        ({"SLURM_JOB_NODELIST": "a"}, "SLURM_JOB_ID is not set"),
        ({"SLURM_JOB_NODELIST": "a", "SLURM_JOB_ID": "4_2"}, "SLURM_JOB_ID is 4_2, expected a number"),
        (JOB | {"MASTER_PORT": "http"}, "MASTER_PORT is http, expected a number"),
    ],
)
def test_a_step_that_cannot_meet_is_refused(environment: dict[str, str], message: str):
    with pytest.raises(UserError, match=message) as caught:
        meeting_of_step(environment)
    assert caught.value.code == 111


@pytest.mark.parametrize(
    ("launcher", "local_rank", "gpus", "shares", "refused"),
    [
        ("torchrun", 2, 2, False, True),
        ("torchrun", 1, 1, False, True),
        ("torchrun", 1, 2, False, False),
        ("torchrun", 2, 2, True, False),
        ("torchrun", 3, 0, False, False),
        ("srun", 3, 1, False, False),
        ("srun", 3, 2, False, True),
    ],
)
def test_a_rank_without_a_gpu_of_its_own(launcher, local_rank, gpus, shares, refused, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    world = World(local_rank, 8, local_rank, launcher, shares)
    if refused:
        with pytest.raises(UserError, match=f"at most {gpus} ranks"):
            check_gpus(world)
    else:
        check_gpus(world)


def test_ranks_that_share_gpus_make_whole_copies(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    assert local_size(None, 2, 1, shares_gpus=True) == 4
    assert local_size(None, 2, 4, shares_gpus=True) == 8
    assert local_size(None, 1, 1, shares_gpus=True) == 3


def test_ports_of_jobs_and_attempts_are_apart():
    jobs = [JOB | {"SLURM_JOB_ID": str(4242 + i), "SLURM_RESTART_COUNT": str(r)} for i in range(50) for r in range(3)]
    ports = [meeting_of_step(job).port for job in jobs]
    assert len(set(ports)) == len(ports) and all(20000 <= port < 30000 for port in ports)


@pytest.mark.parametrize(
    ("nodes", "host"),
    [
        ("node1", "node1"),
        ("node[3-7]", "node3"),
        ("node[003,005-007],gpu[1-2]", "node003"),
        ("gpu7,node[1-2]", "gpu7"),
        ("rack2-n[10-11]", "rack2-n10"),
        ("n[1-4]-ib", "n1-ib"),
        ("a.b.c", "a.b.c"),
        ("a[1-2]b[3-4],c", "a1b3"),
    ],
)
def test_first_host_of_a_node_list(nodes: str, host: str):
    assert first_host(nodes) == host


def test_local_ranks_are_what_is_asked_for_or_one_per_gpu_or_what_the_model_is_split_over(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert (local_size(None, 2, 3), local_size(5, 2, 3)) == (6, 5)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    assert (local_size(None, 2, 3), local_size(5, 2, 3)) == (8, 5)
    with pytest.raises(UserError, match="expected --nproc <= 8 GPUs, got 9"):
        local_size(9, 1, 1)
    assert local_size(9, 1, 1, shares_gpus=True) == 9
    assert (local_size(None, 2, 3, shares_gpus=True), local_size(None, 4, 4, shares_gpus=True)) == (12, 16)


def test_what_the_user_has_set_for_cuda_stays_and_is_said() -> None:
    environment: dict[str, str] = {}
    set_for_gpus(environment)
    assert environment == {**GPU_SETTINGS, "TORCH_CPP_LOG_LEVEL": "ERROR"}
    cuda = "CUDA_DEVICE_MAX_CONNECTIONS=32, CUDA_MODULE_LOADING=EAGER"
    assert gpu_settings(environment) == f"{cuda}, TORCH_FR_BUFFER_SIZE=2000"
    environment = {"CUDA_MODULE_LOADING": "LAZY"}
    set_for_gpus(environment)
    assert "CUDA_DEVICE_MAX_CONNECTIONS=32, CUDA_MODULE_LOADING=LAZY (not EAGER)" in gpu_settings(environment)
    assert gpu_settings({}).startswith("CUDA_DEVICE_MAX_CONNECTIONS=not set (not 32)")


def test_it_is_set_before_torch_is_there() -> None:
    """CUDA reads it when it starts, which torch may do at any time."""
    code = (
        "import os, sys, argparse; from megazero import __main__ as m; import megazero.config.file as f\n"
        "def load(*_): print('torch' in sys.modules, os.environ['CUDA_MODULE_LOADING']); sys.exit()\n"
        "f.load = load; m.main(['train', '--config', 'tiny'])"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=100)
    assert done.stdout == "False EAGER\n", done.stderr
