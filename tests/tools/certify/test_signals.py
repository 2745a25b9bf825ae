"""A signal ends a certificate at once: with 128 + its number and one line, and without anything left behind."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from megazero.tools.certify.certify import Certificate
from tests import warm
from tests.tiny_run import ROOT, TinyData

pytestmark = pytest.mark.usefixtures("usual_signals")

# What runs instead of `python -m megazero`: it says that it has come to a phase, and stays there. It sleeps again and
# again: a signal just before signal.pause() would wake nobody, because Python runs its handler after the call.
DRIVERS = {
    "importing": """
import sys
class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == "torch":
            print("here", flush=True)
            sys.stdin.read()
sys.meta_path.insert(0, Finder())
""",
    "training": """
import os, sys, time
from megazero.tools.certify import certify
def train_rank(comm, world, *job):
    if world.size > 1:
        os.write(1, b"here %d\\n" % os.getpid())  # in one piece
        while True:
            time.sleep(0.05)
    return honest(comm, world, *job)
honest, certify.train_rank = certify.train_rank, train_rank
""",
    "comparing": """
import time
from megazero.tools.certify import certify
def compare(*arguments):
    print("here", flush=True)
    while True:
        time.sleep(0.05)
certify.compare = compare
""",
}
MAIN = "\nfrom megazero.__main__ import main\nsys.exit(main(sys.argv[1:]))\n"
FULL = pytest.mark.full
SMALL = ("model.hidden=32", "model.heads=4", "model.seq_len=16", "model.layers=2", "data.valid=null")
SMALL += ("batch.global=4", "batch.micro=1")


@pytest.mark.parametrize(
    ("phase", "number"),
    [
        ("importing", signal.SIGTERM),
        ("training", signal.SIGTERM),
        ("comparing", signal.SIGTERM),
        pytest.param("importing", signal.SIGINT, marks=FULL),
        pytest.param("training", signal.SIGINT, marks=FULL),
        pytest.param("training", signal.SIGHUP, marks=FULL),
        pytest.param("comparing", signal.SIGINT, marks=FULL),
    ],
)
def test_a_signal_ends_it_and_blames_no_layout(
    phase: str, number: signal.Signals, tiny_data: TinyData, tmp_path: Path
) -> None:
    options = ["certify", "--config", str(tiny_data.config), "--max-ranks", "2", "--steps", "1", *SMALL]
    words = ["-c", "import sys" + DRIVERS[phase] + MAIN, *options]
    env = os.environ | {"TMPDIR": str(tmp_path)}
    if phase == "importing":
        pipe = subprocess.PIPE
        line = [sys.executable, *words]
        process = subprocess.Popen(line, cwd=ROOT, env=env, stdin=pipe, stdout=pipe, stderr=pipe, text=True)
    else:
        process = warm.Process(words, env=env)
    lines = [process.stdout.readline().split() for _ in range(2 if phase == "training" else 1)]
    assert all(line[0] == "here" for line in lines)
    process.send_signal(number)
    out, err = process.communicate()
    *rows, last = err.splitlines() or [""]
    if phase != "importing" or number == signal.SIGINT:
        said = "interrupted" if number == signal.SIGINT else f"ended by {number.name}"
        assert (process.returncode, out, last) == (128 + number, "", said)
    else:
        assert (process.returncode, out) == (-number, "")
    assert len(rows) == 2 * (phase == "training") and all(": at most 0." in row for row in rows)  # of one process
    assert list(tmp_path.iterdir()) == []
    for _, *pid in lines:
        for rank in pid:
            with pytest.raises(ProcessLookupError):
                os.kill(int(rank), 0)


def test_a_signal_that_the_ranks_did_not_mind_ends_it_too(
    tiny_data: TinyData, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It came when they were about to end: they are as they should be, and nothing goes on."""

    def signal_parent(rig: object) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        os.kill(os.getppid(), signal.SIGTERM)

    certificate = Certificate(tiny_data.load(tmp_path, "data.valid=null"), 1)
    with pytest.raises(SystemExit, match="143"):
        certificate.row(certificate.alone, signal_parent)
    assert capsys.readouterr().err == "ended by SIGTERM\n"
