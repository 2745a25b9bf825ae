"""A job of two hosts and a stranger beside it: another user's connections are refused, and the job goes on.

The hosts are network namespaces that this test makes: nothing here reaches another network.
"""

import os
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Iterator

import pytest

from tests.launcher.test_faults import listening
from tests.launcher.test_rendezvous import MEET, ROOT, STEP
from tests.processes import until_gone

STRANGER = 65534
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


ATTACK = textwrap.dedent(
    """
    import os, random, socket, sys, time
    from megazero.store.channel import Connection, Refused

    address, uid, victim = (sys.argv[1], int(sys.argv[2])), int(sys.argv[3]), sys.argv[4]
    "a".encode("idna")  # loaded now: the stranger cannot read this Python's files
    os.setgroups([])
    os.setgid(uid)
    os.setuid(uid)
    try:
        open(f"/proc/{victim}/environ", "rb").read()
        print("the token can be read")
    except PermissionError:
        pass
    refused, silent, chance = 0, [], random.Random(0)
    for key in range(100):
        try:
            Connection(socket.AF_INET, address, chance.randbytes(32), 20)
            print("a stranger got in")
        except Refused:
            refused += 1
    for size in range(400):
        with socket.create_connection(address, timeout=20) as connection:
            connection.sendall(chance.randbytes(size))
            if size % 4 == 0:
                connection.shutdown(socket.SHUT_WR)
    for _ in range(100):
        silent.append(socket.create_connection(address, timeout=20))
    print("refused", refused, flush=True)
    sys.stdin.read()
    """
)


def test_a_stranger_is_refused_and_the_job_goes_on(hosts: tuple[str, str]):
    first = task(hosts[0], 0)
    tasks = [first]
    try:
        wait_for_port(first)
        stranger = on(hosts[1], ATTACK, ADDRESSES[0], PORT, str(STRANGER), str(first.pid))
        tasks.append(stranger)
        assert stranger.stdout is not None
        said = stranger.stdout.readline()
        assert said == "refused 100\n", said or stranger.communicate()
        second = task(hosts[1], 1)  # while the stranger's silent connections are still there
        tasks.append(second)
        for process in (first, second):
            assert process.stdout is not None
            assert process.stdout.readline() == "sum [2.0, 2.0, 2.0]\n"
        assert listening(first.pid) == {ADDRESSES[0]} and listening(second.pid) == {ADDRESSES[1]}
        for process in (first, second):
            _, err = process.communicate("")
            assert process.returncode == 0 and "MZ-" not in err and "Traceback" not in err, err
        out, err = stranger.communicate("")
        assert (out, stranger.returncode) == ("", 0), err
    finally:
        for process in tasks:
            process.kill()
            process.communicate()
    until_gone([process.pid for process in tasks])


def wait_for_port(process: subprocess.Popen[str]) -> None:
    while not listening(process.pid):
        assert process.poll() is None, "rank 0 ended"
    assert listening(process.pid) == {ADDRESSES[0]}
