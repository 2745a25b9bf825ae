"""A missing package is one line, and a process with torch ends without its second of tearing down."""

import subprocess
import sys

import pytest

from tests.tiny_run import ROOT

COMMANDS = [
    ["train.py", "--config", "tiny"],
    ["-m", "megazero", "plan", "--config", "tiny", "--gpus", "1", "--hardware", "h200"],
    ["data_tools/inspect.py", "data/any"],
    ["data_tools/preprocess.py", "--help"],
]


@pytest.mark.parametrize("words", COMMANDS, ids=lambda words: words[0])
def test_without_the_environment_it_is_one_line(words: list[str]) -> None:
    done = subprocess.run([sys.executable, "-S", *words], cwd=ROOT, capture_output=True, text=True)  # no packages
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.count("\n") == 1 and done.stderr.startswith("MZ-121: the package "), done.stderr
    assert f"is not installed for {sys.executable}" in done.stderr


def test_a_module_of_ours_that_is_missing_is_a_traceback() -> None:
    code = "import sys; from megazero import __main__ as m; m._parser = lambda: __import__('megazero.no_such'); "
    done = subprocess.run([sys.executable, "-c", code + "m.main([])"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1 and "No module named 'megazero.no_such'" in done.stderr


@pytest.mark.parametrize("torch", [False, True])
def test_leaving_flushes_and_does_what_was_to_be_done_at_the_end(torch: bool) -> None:
    code = f"import atexit, sys\nif {torch}: import torch\nfrom megazero.base.answers import leave\n"
    code += "atexit.register(print, 'at the end')\nprint('before', end=' ')\nsys.exit(leave(7))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (7, "before at the end\n", "")


def test_too_many_ranks_are_refused_before_torch_is_loaded() -> None:
    code = "import sys; from megazero.__main__ import main; "
    code += "code = main(['train', '--config', 'tiny', '--nproc', '3']); sys.exit(code + 10 * ('torch' in sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    line = "MZ-106 --nproc 3: expected batch.global % (batch.micro * data ranks) == 0, got 8 % (1 * 3) = 2; "
    assert (done.returncode, done.stderr) == (2, line + "use batch.global=6 or 9, or --nproc 1, 2, 4\n")
