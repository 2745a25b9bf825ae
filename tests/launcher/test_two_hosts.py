"""A job of two hosts: its ranks listen on one address each.

The hosts are network namespaces that this test makes: nothing here reaches another network.
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator

import pytest

from tests.launcher.test_faults import listening
from tests.launcher.test_rendezvous import MEET, ROOT, STEP
from tests.processes import until_gone

PORT = "29431"
ADDRESSES = ("10.231.7.1", "10.231.7.2")


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


def obstacle() -> str | None:
    """Why there can be no such hosts here."""
    if os.geteuid() != 0:
        return "network namespaces and other users want root"
    if shutil.which("ip") is None:
        return "iproute2 is not installed"
    name = f"mz-{os.getpid()}-try"
    try:
        ip("netns", "add", name)
        ip("netns", "delete", name)
    except subprocess.CalledProcessError as error:
        return f"no network namespaces: {error.stderr.strip()}"
    return None


@pytest.fixture
def hosts() -> Iterator[tuple[str, str]]:
    """Two of them, joined by one wire, each with one address besides the loopback."""
    if reason := obstacle():
        pytest.skip(reason)
    names = (f"mz-{os.getpid()}-a", f"mz-{os.getpid()}-b")
    try:
        for name in names:
            ip("netns", "add", name)
        ip("link", "add", "eth0", "netns", names[0], "type", "veth", "peer", "name", "eth0", "netns", names[1])
        for name, address in zip(names, ADDRESSES, strict=True):
            ip("-n", name, "address", "add", f"{address}/24", "dev", "eth0")
            for link in ("eth0", "lo"):
                ip("-n", name, "link", "set", link, "up")
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "delete", name], capture_output=True)


def on(host: str, program: str, *arguments: str, **environment: str) -> subprocess.Popen[str]:
    pipe = subprocess.PIPE
    line = ["ip", "netns", "exec", host, sys.executable, "-c", program, *arguments]
    env = os.environ | environment
    return subprocess.Popen(line, cwd=ROOT, env=env, stdin=pipe, stdout=pipe, stderr=pipe, text=True)


def task(host: str, rank: int) -> subprocess.Popen[str]:
    step = STEP | {"MASTER_ADDR": ADDRESSES[0], "MASTER_PORT": PORT, "SLURM_STEP_NUM_NODES": "2"}
    step |= {"SLURM_PROCID": str(rank), "SLURM_LOCALID": "0", "GLOO_SOCKET_IFNAME": "eth0"}
    return on(host, MEET, "60", "same", "wait", **step)


@pytest.mark.full
def test_two_hosts_meet_on_one_address_each(hosts: tuple[str, str]):
    tasks = [task(host, rank) for rank, host in enumerate(hosts)]
    try:
        for process in tasks:
            assert process.stdout is not None
            assert process.stdout.readline() == "sum [2.0, 2.0, 2.0]\n"
        assert [listening(process.pid) for process in tasks] == [{address} for address in ADDRESSES]
        for process in tasks:
            _, err = process.communicate("")
            assert process.returncode == 0 and "MZ-" not in err and "Traceback" not in err, err
    finally:
        for process in tasks:
            process.kill()
            process.communicate()
    until_gone([process.pid for process in tasks])
