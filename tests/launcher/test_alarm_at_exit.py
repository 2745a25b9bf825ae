"""A rank that waits for an alarm ends as it should, and says nothing while nothing happens."""

import socket
import subprocess
import sys
from pathlib import Path

import torch.distributed as dist

from megazero.store.server import StoreServer

ROOT = Path(__file__).parents[2]
KEY = b"0" * 32
OF_TORCH = 'dist.TCPStore("127.0.0.1", {port}, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=1))'
OF_OURS = 'JobStore("127.0.0.1", {port}, {key}, timedelta(seconds=10), None)'
PROGRAM = """
import time, torch.distributed as dist
from datetime import timedelta
from megazero.comm.status_board import StatusBoard
from megazero.launcher.attendance import NOWHERE, Presence
from megazero.launcher.job_board import JobBoard
from megazero.store.client import JobStore

class Slow:  # what takes time behind the end of the interpreter: CUDA, large objects
    def __del__(self, sleep=time.sleep):
        sleep(1.5)

store = {store}
roll = {{rank: Presence("host", "same", rank + 1, 7, "", NOWHERE) for rank in range(2)}}
JobBoard(StatusBoard.private(2), [1], store, 1, roll).listen()
time.sleep({seconds})
slow = Slow()
"""


def ran(seconds: float) -> subprocess.CompletedProcess[str]:
    """What comes of a rank of torchrun, whose store is another process', and whose waits take a second."""
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    return ran_with(OF_TORCH.format(port=server.port), seconds)


def ran_with(store: str, seconds: float) -> subprocess.CompletedProcess[str]:
    """The same for a rank that reaches a store by this expression."""
    program = PROGRAM.format(store=store, seconds=seconds)
    return subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=60)


def test_the_end_of_a_wait_while_the_process_ends_does_no_harm():
    done = ran(0.1)
    assert done.returncode == 0, done.stderr[-300:]


def test_no_alarm_is_no_news():
    assert ran(3.0).stderr == ""


def test_a_wait_at_our_own_store_does_no_harm_either():
    listener = socket.create_server(("127.0.0.1", 0))
    server = StoreServer(listener, KEY)
    done = ran_with(OF_OURS.format(port=listener.getsockname()[1], key=KEY), 0.1)
    assert (done.returncode, done.stderr) == (0, ""), done.stderr[-300:]
    server.close()
