"""How ranks meet: who is missing is named, who runs something else is refused, one address is listened on."""

import os
import re
import socket
import textwrap
from datetime import timedelta
from pathlib import Path

import pytest

from megazero.base.errors import UserError
from megazero.launcher.environment import RankContext, world_from_environment
from megazero.launcher.rendezvous import connect
from megazero.launcher.store import open_store
from megazero.launcher.world import World
from tests.launcher.test_faults import listening
from tests.processes import until_gone
from tests.warm import Process

ROOT = Path(__file__).parents[2]
STEP = {"SLURM_NTASKS": "2", "SLURM_JOB_ID": "1", "MASTER_ADDR": "127.0.0.1"}
MEET = textwrap.dedent(
    """
    import sys, os
    from datetime import timedelta
    import torch
    from megazero.comm.agreement import agree
    from megazero.comm.collectives import all_reduce
    from megazero.comm.grid import make_grid
    from megazero.launcher.environment import RankContext, world_from_environment
    from megazero.launcher.exit_status import outcome, say_why
    from megazero.launcher.rendezvous import connect, disconnect

    place = RankContext.of(world_from_environment())

    def main():
        comm = connect(place, timeout=timedelta(seconds=float(sys.argv[1])), fingerprint=sys.argv[2])
        grid = make_grid(tensor=2, pipeline=1, comm=comm, device_type="cpu")
        print("sum", all_reduce(torch.ones(3), grid["tensor"], "test").tolist(), flush=True)
        if len(sys.argv) > 3:
            sys.stdin.read()
        disconnect()

    code = outcome(main, place)
    if code:
        say_why(place)
    sys.exit(code)
    """
)


def free_port() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


def task(rank: int, port: str, timeout: float, fingerprint: str, *more: str, **other: str) -> Process:
    """One task of a step of two, as srun would start it."""
    env = os.environ | STEP | {"SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank), "MASTER_PORT": port} | other
    return Process(["-c", MEET, timeout, fingerprint, *more], env=env, stdin=True)


def test_tasks_of_a_step_meet_on_one_address_only():
    port = free_port()
    tasks = [task(rank, port, 60, "same", "wait", GLOO_SOCKET_IFNAME="lo") for rank in (0, 1)]
    for process in tasks:
        assert process.stdout.readline() == "sum [2.0, 2.0, 2.0]\n"
    assert [listening(process.pid) for process in tasks] == [{"127.0.0.1"}, {"127.0.0.1"}]
    for process in tasks:
        _, err = process.communicate()
        assert process.returncode == 0 and "MZ-" not in err
    until_gone([process.pid for process in tasks])


def test_a_task_that_does_not_come_is_named():
    process = task(0, free_port(), 1, "same")
    _, err = process.communicate()
    assert process.returncode == 1
    assert err.splitlines()[-1].startswith("MZ-320 rank=0: 1 of 2 ranks did not connect within 1 s: 1 (in start on ")


def test_rank_0_that_does_not_come_is_named():
    port = free_port()
    process = task(1, port, 1, "same")
    _, err = process.communicate()
    assert process.returncode == 1
    assert f"MZ-320 rank=1: rank 0 cannot be reached at 127.0.0.1:{port} within 1 s" in err.splitlines()[-1]


def test_other_code_or_config_is_refused_once():
    port = free_port()
    tasks = [task(rank, port, 60, f"config {rank}") for rank in (0, 1)]
    errs = [process.communicate()[1] for process in tasks]
    lines = [line for err in errs for line in err.splitlines() if line.startswith("MZ-")]
    assert tasks[1].returncode == 1 and tasks[0].returncode == 1
    assert len(lines) == 1, errs
    assert lines[0].startswith("MZ-321 rank=1: runs config 1 on ") and " rank 0 config 0 on " in lines[0]


def test_an_address_that_is_taken_is_refused():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        process = task(0, str(taken.getsockname()[1]), 5, "same")
        _, err = process.communicate()
    assert process.returncode == 1
    assert "MZ-322 rank=0: cannot listen on 127.0.0.1:" in err and "Address already in use" in err


@pytest.mark.parametrize(
    ("host", "nodes", "why"),
    [
        ("127.0.0.1", 2, "127.0.0.1 cannot be reached from the other 1 hosts"),
        ("0.0.0.0", 1, "it stands for all addresses of this host"),
        ("", 1, "Name or service not known"),
        ("a" * 64 + ".org", 1, "label empty or too long"),
    ],
)
def test_a_host_that_ranks_cannot_meet_at_is_refused(host: str, nodes: int, why: str, monkeypatch: pytest.MonkeyPatch):
    for name, value in {**STEP, "MASTER_ADDR": host, "SLURM_STEP_NUM_NODES": str(nodes)}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match="MZ-322 rank=0: cannot listen on .*: .*" + why):
        open_store(RankContext.of(World(0, 2, 0, "srun")), timedelta(seconds=5))


def refused(rank: int, port: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return the line of a rank that torchrun's variables tell to meet another one."""
    variables = {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": str(rank), "MASTER_ADDR": "127.0.0.1"}
    for name, value in {**variables, "MASTER_PORT": port}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError) as error:
        connect(RankContext.of(world_from_environment()), timeout=timedelta(seconds=1), fingerprint="")
    return str(error.value)


@pytest.mark.parametrize(
    ("rank", "expected"),
    [
        (
            0,
            r"MZ-320 rank=0: not all 2 ranks connected to 127.0.0.1:\d+ within 1 s \(.*; start all ranks with one",
        ),
        (
            1,
            r"MZ-320 rank=1: rank 0 cannot be reached at 127.0.0.1:\d+ within 1 s \(.*; start all ranks with one",
        ),
    ],
)
def test_variables_left_over_in_a_shell_are_named(rank: int, expected: str, monkeypatch: pytest.MonkeyPatch):
    line = refused(rank, free_port(), monkeypatch)
    assert re.match(expected, line) and "for a single process, unset RANK, WORLD_SIZE and LOCAL_RANK" in line


def test_a_port_in_use_is_named(monkeypatch: pytest.MonkeyPatch):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        line = refused(0, str(taken.getsockname()[1]), monkeypatch)
    assert re.match(
        r"MZ-322 rank=0: cannot listen on 127.0.0.1:\d+: another process listens there; set MASTER_ADDR", line
    )
