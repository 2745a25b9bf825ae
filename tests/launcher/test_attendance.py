"""What ranks tell each other when they meet is checked before it is used; what they point at is proven before it is
opened."""

import contextlib
import fcntl
import json
import os
import random
import socket
import textwrap
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest

from megazero.comm.transport.shared_memory import Handle, Outbox, SharedMemoryTransport
from megazero.launcher.attendance import NOWHERE, InvalidPresenceError, Presence
from tests import warm
from tests.launcher.test_rendezvous import free_port, task

GOOD = Presence("node7", "megazero 1, config 0a1b", 77, 123456, "boot 0 pid:[1]", Handle(77, 5, 30, 99))
SAID = json.loads(GOOD.to_json())


def test_what_a_rank_says_is_heard():
    assert Presence.from_json(GOOD.to_json().encode()) == GOOD
    alone = replace(GOOD, host_id="", handle=NOWHERE)
    assert Presence.from_json(alone.to_json().encode()) == alone


def said(at: int, value: object) -> bytes:
    return json.dumps([*SAID[:at], value, *SAID[at + 1 :]]).encode()


BAD = {
    "empty": b"",
    "no JSON": b"\xff\xfe",
    "deep": b"[" * 4000,
    "long": b" " * 5000 + GOOD.to_json().encode(),
    "an object": b"{}",
    "short": json.dumps(SAID[:-1]).encode(),
    "more": json.dumps([*SAID, 1]).encode(),
    "host": said(0, "a b\x1b[2J"),
    "no host": said(0, None),
    "fingerprint": said(1, "\n"),
    "long fingerprint": said(1, "x" * 301),
    "pid 0": said(2, 0),
    "pid 1.0": said(2, 77.0),
    "pid true": said(2, True),
    "pid text": said(2, "77"),
    "pid many": said(2, 1 << 40),
    "start": said(3, -1),
    "host id": said(4, ["boot"]),
    "another's memory": said(5, 78),
    "descriptor": said(6, -2),
    "device": said(7, 10**30),
    "inode": said(8, float("inf")),
}


@pytest.mark.parametrize("raw", BAD.values(), ids=BAD)
def test_what_no_rank_says_is_refused(raw: bytes):
    with pytest.raises(InvalidPresenceError):
        Presence.from_json(raw)


def test_fuzz():
    chance, good = random.Random(2), GOOD.to_json().encode()
    for _ in range(10_000):
        raw = bytearray(good[: chance.randint(0, len(good))])
        for _ in range(chance.randint(0, 3)):
            if raw:
                raw[chance.randrange(len(raw))] = chance.randrange(256)
        with contextlib.suppress(InvalidPresenceError):
            heard = Presence.from_json(bytes(raw))
            assert heard.host.isprintable() and heard.fingerprint.isprintable() and 0 < heard.pid <= 1 << 22


LIE = """
from megazero.launcher.attendance import Presence
Presence.to_json = lambda self: '["node7", "same", 1]'
"""


def test_a_rank_that_says_something_else_is_named_once():
    port = free_port()
    tasks = [task(rank, port, 60, "same", before=LIE * rank) for rank in (0, 1)]
    errs = [process.communicate()[1] for process in tasks]
    lines = [line for err in errs for line in err.splitlines()]
    assert len(lines) == 1 and [process.returncode for process in tasks] == [1, 1], errs
    assert lines[0].startswith(
        "MZ-321 rank=1: said what is no presence at the roll call: expected a list of 9 (in start"
    )


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
