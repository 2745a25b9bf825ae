"""A benchmark beside the engine of another checkout: imports come from there, and errors are one line."""

import argparse
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from scripts.bench.harness import Pair
from scripts.bench.other_tree import checkout, pairs_of, with_before
from scripts.bench.processes import System
from tests.tiny_run import ROOT

BUILD = """
import json, sys, torch
from scripts.bench.other_tree import in_tree
torch.set_num_threads(1)
step = in_tree(sys.argv[1], "tensor", sys.argv[2], ("small",))
step()
ours = [module for name, module in sys.modules.items() if name.partition(".")[0] in ("megazero", "scripts")]
print(json.dumps([module.__file__ for module in ours]))
"""


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A copy of this tree whose small model is tiny."""
    for folder in ("megazero", "scripts"):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__"))
    script = tmp_path / "scripts/bench/tensor.py"
    script.write_text(script.read_text().replace('"small": (8, 512, 8, 4)', '"small": (1, 32, 2, 1)'))
    return tmp_path


def built(tree: Path, name: str = "ours, one process, small") -> subprocess.CompletedProcess[str]:
    """Build a system of the tree in a fresh process and do one step of it."""
    command = [sys.executable, "-c", BUILD, str(tree), name]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)


@pytest.mark.full
def test_modules_come_from_the_other_tree(tree: Path):
    done = built(tree)
    assert done.returncode == 0, done.stderr
    files = [Path(file) for file in json.loads(done.stdout)]
    assert {tree / "megazero/__init__.py", tree / "scripts/bench/tensor.py", tree / "scripts/bench/ours.py"} <= {*files}
    assert [file for file in files if not file.is_relative_to(tree)] == []


def test_a_system_that_the_tree_lacks_is_one_line(tree: Path):
    done = built(tree, "ours-tp1024")
    assert done.returncode == 1
    assert done.stderr == f"{tree}: scripts/bench/tensor.py has no system 'ours-tp1024'\n"


def test_a_folder_without_megazero_is_one_line(tmp_path: Path):
    done = built(tmp_path)
    assert done.returncode == 1
    assert done.stderr.startswith(f"{tmp_path}: megazero was imported from ") and done.stderr.count("\n") == 1
    with pytest.raises(argparse.ArgumentTypeError, match="is not a checkout of this project"):
        checkout(str(tmp_path))


@pytest.mark.full
def test_a_tree_beside_itself_has_the_same_losses(tree: Path):
    """Spawned processes import the script that runs, except those of the other tree."""
    command = [
        sys.executable,
        str(tree / "scripts/bench/tensor.py"),
        "--only",
        "ours-tp2-sequence, *",
        "--pairs",
        "2",
        "--launches",
        "2",
    ]
    done = subprocess.run([*command, "--json", "--before", str(tree)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["loss_difference"] < 1e-6
    one, sequence = "one process, small", "tp2-sequence, small"
    names = [f"ours, {one}", f"before, {one}", f"ours-{sequence}", f"before-{sequence}"]
    names.insert(1, f"ours, {one}, again")
    names += [f"ours, {one} / before, {one}", f"ours-{sequence} / before-{sequence}"]
    assert [row["system"] for row in report["rows"]] == names


def test_each_of_ours_is_followed_by_itself_before():
    systems = [System(name, lambda: float, ranks=2) for name in ("ours-a", "peer", "ours, b")]
    assert with_before(systems, None, "script", ()) == systems
    found = with_before(systems, "/tree", "script", (1,))
    assert [one.name for one in found] == ["ours-a", "before-a", "peer", "ours, b", "before, b"]
    assert (found[1].arguments, found[1].ranks) == (("/tree", "script", "ours-a", (1,)), 2)


def test_each_pair_has_a_row_of_its_own():
    found = pairs_of(["floor", "ours-a", "before-a", "ours-b"])
    assert found == [Pair("ours-a / before-a", "ours-a", "before-a")]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch's own imports, which peers need
@pytest.mark.parametrize("together", [1, 2, 3])
def test_pairs_of_trees_are_measured_in_one_group(together: int):
    from scripts.bench.zero import cut

    systems = [System(name, dict) for name in ("plain", "ours-a", "ddp", "ours-b", "ours-c")]
    groups = list(cut("small", with_before([*systems[:2], *systems[3:]], "tree", "zero", ()), together))
    names = [[one.name for one in group.systems] for group in groups]
    assert names == [["plain", f"ours-{x}", f"before-{x}"] for x in "abc"]
    assert [pair.row for pair in groups[0].pairs(names[0])] == ["ours-a / before-a"]
    alone = [[one.name for one in group.systems[1:]] for group in cut("small", systems, together)]
    assert [name for group in alone for name in group] == [one.name for one in systems[1:]]
    assert max(map(len, alone)) == together
