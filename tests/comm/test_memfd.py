"""A rank maps the memory that was announced and no other."""

import os
import socket
import textwrap
from datetime import timedelta
from pathlib import Path

import pytest

from megazero.comm.transport.shared_memory import Handle, SharedMemoryTransport
from tests import warm

OTHER = """
import os, sys
from datetime import timedelta
from megazero.comm.transport.shared_memory import SharedMemoryTransport
memory = SharedMemoryTransport(1, 2, timedelta(seconds=1))
print(*memory.handle, flush=True)
sys.stdin.read()
"""


@pytest.fixture
def other():
    process = warm.Process(["-c", textwrap.dedent(OTHER)], stdin=True)
    yield Handle(*map(int, process.stdout.readline().split()))
    process.communicate()


def shared_memory() -> SharedMemoryTransport:
    return SharedMemoryTransport(0, 2, timedelta(seconds=1))


def test_only_the_announced_memory_is_mapped(other: Handle, tmp_path: Path):
    good = other
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    mine = [os.open(fifo, os.O_RDWR), socket.socket().detach(), os.open(tmp_path, os.O_RDONLY)]
    lies = [good._replace(inode=good.inode + 1), good._replace(device=good.device + 1), good._replace(number=0)]
    lies += [Handle(os.getpid(), number, os.fstat(number).st_dev, os.fstat(number).st_ino) for number in mine]
    lies += [good._replace(pid=os.getpid()), good._replace(pid=1 << 22), good._replace(number=9999)]
    for lie in lies:
        with pytest.raises(OSError):
            shared_memory().open(1, lie)
    shared_memory().open(1, good)
    for number in mine:
        os.close(number)
