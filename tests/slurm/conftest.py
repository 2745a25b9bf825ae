"""One SLURM cluster for all tests of a session, and jobs on it."""

import contextlib
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from megazero.launcher.store import address_of
from tests.slurm.cluster import cluster, obstacle
from tests.tiny_run import ROOT


@pytest.fixture(scope="session")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    if reason := obstacle():
        pytest.skip(f"no SLURM here: {reason}")
    with cluster(tmp_path_factory.mktemp("slurm")) as environment:
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"  # of the Python that has what is needed
        # nodes' names are no hosts', and ranks on several nodes do not meet on the loopback
        yield environment | {"MASTER_ADDR": _own_address(), "OMP_NUM_THREADS": "1", "PATH": path}


def _own_address() -> str:
    """An address of this host besides the loopback's, where it has one."""
    for _, interface in socket.if_nameindex():
        with contextlib.suppress(OSError):
            if not (address := address_of(interface)).startswith("127."):
                return address
    return "127.0.0.1"


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A folder to submit from that has what the repository has, and scripts/slurm of its own."""
    root = tmp_path / "checkout"
    (root / "scripts").mkdir(parents=True)
    for name in ("megazero", "configs", "train.py", "scripts/__init__.py"):
        (root / name).symlink_to(ROOT / name)
    shutil.copytree(ROOT / "scripts/slurm", root / "scripts/slurm", ignore=shutil.ignore_patterns("site.sh"))
    return root


class Job:
    """A job that sbatch has taken.

    Attributes:
        number: its id.
        out: what it prints; %a stands for a task of an array.
    """

    def __init__(self, environment: dict[str, str], out: Path, line: Sequence[object], folder: Path = ROOT):
        self._environment, self._folder, self.out = environment, folder, out
        self.number = self.call("sbatch", "--parsable", f"--output={out}", *map(str, line)).strip()

    def call(self, *line: str) -> str:
        done = subprocess.run(line, cwd=self._folder, env=self._environment, capture_output=True, text=True)
        assert done.returncode == 0, (line, done.stderr)
        return done.stdout

    def until(self, reached: Callable[[], bool], seconds: float = 400) -> None:
        """Wait for something that the job does; fail when it has ended without it."""
        deadline = time.monotonic() + seconds
        while not reached():
            assert time.monotonic() < deadline and (not self.ended() or reached()), self.text()
            time.sleep(0.1)

    def text(self) -> str:
        return self.out.read_text() if self.out.exists() else "no output"

    def says(self, text: str) -> Callable[[], bool]:
        return lambda: text in self.text()

    def ended(self) -> bool:
        return self.call("squeue", "-h", "-j", self.number, "-t", "PD,R,CG").strip() == ""

    def state(self) -> str:
        return self.shown("JobState")

    def shown(self, field: str) -> str:
        return self.call("scontrol", "-o", "show", "job", self.number).split(f" {field}=")[1].split()[0]
