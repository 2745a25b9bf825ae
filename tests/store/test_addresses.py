"""Where ranks may meet: one host's own address; whatever else the environment says is refused in one line."""

import os
import subprocess
import sys
from datetime import timedelta

import pytest

from megazero.base.errors import UserError
from megazero.launcher.environment import World, meeting_of_step, world_from_environment
from megazero.launcher.rendezvous import _step_store
from megazero.store import addresses
from tests.launcher.test_environment import srun, torchrun
from tests.launcher.test_rendezvous import ROOT

HOSTS = [
    "",
    " ",
    "0.0.0.0",
    "0",
    "0x0",
    "00.0.0.0",
    "0.0.0.1",
    "::",
    "0:0:0:0:0:0:0:0",
    "::ffff:0.0.0.0",
    "255.255.255.255",
]
HOSTS += [
    "127.255.255.255",
    "224.0.0.1",
    "239.1.2.3",
    "ff02::1",
    "240.0.0.1",
    "a" * 64,
    "b." * 127 + "b",
    "ho st",
    "höst",
    "a\nb",
]
PORTS = ["0", "65536", "9" * 5000, "http", "", "-1", "+80", "1_000", " 80", "80.0", "0x50", "٣٢", "\uff18\uff10"]


def environments(**values: str) -> list[dict[str, str]]:
    step = {"SLURM_JOB_ID": "1", "MASTER_ADDR": "127.0.0.1"}
    return [torchrun(1, 2, 1) | values, srun(1, 2, 1) | step | values]


def refused(environment: dict[str, str]) -> str:
    with pytest.raises(UserError) as caught:
        world_from_environment(environment)
    assert caught.value.code == 111 and caught.value.exit_code == 2
    line = str(caught.value)
    assert len(line) <= 300 and line.isprintable()
    return line


@pytest.mark.parametrize("host", HOSTS, ids=lambda host: repr(host[:20]))
def test_hosts_that_nobody_can_meet_at(host: str):
    for environment in environments(MASTER_ADDR=host):
        assert refused(environment).startswith("MZ-111: MASTER_ADDR is ")


@pytest.mark.parametrize("port", PORTS, ids=lambda port: repr(port[:20]))
def test_ports_that_nobody_can_listen_on(port: str):
    for environment in environments(MASTER_PORT=port):
        assert "MASTER_PORT" in refused(environment)


def test_a_name_that_means_all_addresses(monkeypatch: pytest.MonkeyPatch):
    everywhere = [(2, 1, 6, "", ("10.0.0.7", 0)), (2, 1, 6, "", ("0.0.0.0", 0))]
    monkeypatch.setattr(addresses.socket, "getaddrinfo", lambda *_, **__: everywhere)
    for environment in environments(MASTER_ADDR="node1"):
        assert "MASTER_ADDR is node1: that is all addresses of a host" in refused(environment)


def test_the_steps_first_node_is_looked_at_too():
    meeting = meeting_of_step({"SLURM_JOB_ID": "1", "SLURM_STEP_NODELIST": "0"})
    with pytest.raises(UserError, match="MZ-111: the host to meet at is 0: that is all addresses of a host"):
        _step_store(World(0, 2, 0, "srun"), meeting, timedelta(seconds=1))


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "node1", "10.1.2.3", "a.b.c", "::1", "n-1"])
def test_others_are_let_through(host: str):
    for environment in environments(MASTER_ADDR=host):
        assert world_from_environment(environment).size == 2


@pytest.mark.parametrize("names", [("RANK", torchrun), ("SLURM_PROCID", srun)], ids=lambda names: names[0])
@pytest.mark.parametrize("rank", ["9" * 5000, "٣", "\uff11", " 1", "1_0", "+1"], ids=lambda text: repr(text[:8]))
def test_digits_are_ascii_and_few(names, rank: str):
    name, environment = names
    assert f"{name}=" in refused(environment(rank, 12, 0) | {"MASTER_ADDR": "127.0.0.1"})


COMMAND = """
import sys, time
import megazero.run.session
from megazero.__main__ import main
began = time.monotonic()
code = main(["train", "--config", "tiny", "parallel.tensor=2"])
print(code, time.monotonic() - began)
"""


@pytest.mark.parametrize(
    "environment",
    [
        torchrun(0, 2, 0) | {"MASTER_ADDR": "a" * 64},
        srun(0, 2, 0) | {"SLURM_JOB_ID": "1", "MASTER_ADDR": ""},
        pytest.param(srun(0, 2, 0) | {"SLURM_JOB_ID": "1", "MASTER_PORT": "9" * 5000}, marks=pytest.mark.full),
    ],
    ids=["label", "empty", "digits"],
)
def test_a_run_says_one_line_at_once(environment: dict[str, str]):
    line = [sys.executable, "-c", COMMAND]
    done = subprocess.run(line, cwd=ROOT, env=clean() | environment, capture_output=True, text=True)
    assert done.stderr.startswith("MZ-111: MASTER_") and done.stderr.count("\n") == 1, done.stderr
    code, seconds = done.stdout.split()
    assert code == "2" and float(seconds) < 2, done.stdout


def clean() -> dict[str, str]:
    return {k: v for k, v in os.environ.items() if not k.startswith(("SLURM_", "MASTER_"))}
