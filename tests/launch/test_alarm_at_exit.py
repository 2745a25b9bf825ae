"""A rank that waits for an alarm ends as it should, and says nothing while nothing happens."""

import subprocess
import sys
from pathlib import Path

import torch.distributed as dist

ROOT = Path(__file__).parents[2]
PROGRAM = """
import time, torch.distributed as dist
from datetime import timedelta
from megazero.comm.status_board import StatusBoard
from megazero.launch.attendance import NOWHERE, Presence
from megazero.launch.job_board import JobBoard

class Slow:  # what takes time behind the end of the interpreter: CUDA, large objects
    def __del__(self, sleep=time.sleep):
        sleep(1.5)

store = dist.TCPStore("127.0.0.1", {port}, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=1))
roll = {{rank: Presence("host", "same", rank + 1, 7, "", NOWHERE) for rank in range(2)}}
JobBoard(StatusBoard.private(2), [1], store, 1, roll).listen()
time.sleep({seconds})
slow = Slow()
"""


def ran(seconds: float) -> subprocess.CompletedProcess[str]:
    """What comes of a rank of torchrun, whose store is another process', and whose waits take a second."""
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    program = PROGRAM.format(port=server.port, seconds=seconds)
    return subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=60)


def test_the_end_of_a_wait_while_the_process_ends_does_no_harm():
    done = ran(0.1)
    assert done.returncode == 0, done.stderr[-300:]


def test_no_alarm_is_no_news():
    assert ran(3.0).stderr == ""
