"""What ranks point at is proven before it is opened, and cannot be taken away from its readers."""

import fcntl
import os
import socket
import textwrap
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest

from megazero.comm.transport.shared_memory import Handle, Outbox, SharedMemoryTransport
from tests import warm

OTHER = """
import os, sys
from datetime import timedelta
from megazero.comm.transport.shared_memory import SharedMemoryTransport
memory = SharedMemoryTransport(1, 2, timedelta(seconds=1))
pipe = os.memfd_create("megazero-1")
os.ftruncate(pipe, os.fstat(memory.handle.number).st_size)
print(*vars(memory.handle).values(), pipe, os.fstat(pipe).st_ino, flush=True)
sys.stdin.read()
"""


@pytest.fixture
def other():
    process = warm.Process(["-c", textwrap.dedent(OTHER)], stdin=True)
    pid, number, device, inode, unsealed, its_inode = map(int, process.stdout.readline().split())
    yield Handle(pid, number, device, inode), Handle(pid, unsealed, device, its_inode)
    process.communicate()


def shared_memory() -> SharedMemoryTransport:
    return SharedMemoryTransport(0, 2, timedelta(seconds=1))


def test_only_what_is_proven_is_opened(other: tuple[Handle, Handle], tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    good, unsealed = other
    opened: list[str] = []
    honest = os.open
    monkeypatch.setattr(os, "open", lambda path, *flags: (opened.append(str(path)), honest(path, *flags))[1])
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    mine = [honest(fifo, os.O_RDWR), socket.socket().detach(), honest(tmp_path, os.O_RDONLY)]
    lies = [replace(good, inode=good.inode + 1), replace(good, device=good.device + 1), replace(good, number=0)]
    lies += [Handle(os.getpid(), number, os.fstat(number).st_dev, os.fstat(number).st_ino) for number in mine]
    lies += [replace(good, pid=os.getpid()), replace(good, pid=1 << 22), replace(good, number=9999)]
    for lie in lies:
        with pytest.raises(OSError):
            shared_memory().open(1, lie)
    assert opened == [], "nothing was opened to find out"
    with pytest.raises(OSError, match="its size can be changed"):
        shared_memory().open(1, unsealed)
    with pytest.raises(OSError, match="the descriptor is something else"):
        shared_memory().open(2, good)  # another rank's
    shared_memory().open(1, good)
    for number in mine:
        os.close(number)


def test_nobody_can_take_the_memory_away_from_a_reader():
    handle = shared_memory().handle
    for size in (0, Outbox.size(2) + 4096):
        with pytest.raises(PermissionError):
            os.ftruncate(handle.number, size)
    assert fcntl.fcntl(handle.number, fcntl.F_GETFD) & fcntl.FD_CLOEXEC
    os.close(handle.number)
