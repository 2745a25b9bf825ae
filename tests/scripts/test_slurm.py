"""What the batch scripts of scripts/slurm ask Python, without a cluster; tests/slurm has one."""

import json
import subprocess
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from megazero.base.errors import UserError
from megazero.kernels import __main__ as kernels
from megazero.kernels import cpu
from megazero.kernels.build import BuildError
from megazero.run.early_stops import EarlyStops
from megazero.tools.doctor.doctor import Diagnosis, as_json
from megazero.tools.doctor.finding import Finding
from scripts.slurm import folder, preflight
from tests.tiny_run import ROOT


def answer(*more: Finding, rate: float = 1e10) -> dict[str, Any]:
    found = [Finding("processor", "some cores"), Finding("matmul fp32", "fast", values={"flops": rate}), *more]
    return as_json(Diagnosis({"machine": found}, "not measured"))


def test_every_node_has_a_line_and_the_faulty_ones_decide(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    answers = {"node1": answer(), "node2": answer(rate=6e9), "node3": answer(), "node4": answer()}
    answers["node4"] = answer(Finding("gloo", "not in this torch", "missing", "take another"))
    for node, found in answers.items():
        (tmp_path / f"{node}.json").write_text(json.dumps(found))
    assert preflight.main([str(tmp_path), "node1", "node2", "node3"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[:1] + lines[2:3] == ["node1: ok: some cores", "node3: ok: some cores"]
    assert lines[1] == "node2: ok: some cores; SLOW matmul fp32, 60% of the median node"
    (tmp_path / "node5.json").write_text("")
    (tmp_path / "node5.err").write_text("Traceback\nModuleNotFoundError: No module named 'torch'\n")
    assert preflight.main([str(tmp_path), "node1", "node4", "node5", "node6"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[1:4] == [
        "node4: missing: gloo (not in this torch)",
        "node5: did not answer: ModuleNotFoundError: No module named 'torch'",
        "node6: did not answer: it said nothing",
    ]
    assert lines[4].startswith("1 of 4 nodes can train")


def test_a_run_folder_or_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert folder.main(["tiny.yaml", "run.steps=3"]) == 0 and capsys.readouterr().out == "runs/tiny\n"
    assert folder.main(["tiny", "run.dir=/there"]) == 0 and capsys.readouterr().out == "/there\n"
    assert folder.main(["tiny", "run.stpes=3"]) == 2
    said = capsys.readouterr()
    assert said.out == "" and said.err.startswith("MZ-104 ") and said.err.count("\n") == 1


def test_kernels_are_built_or_it_is_said_why_not(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels.torch.cuda, "is_available", lambda: False)
    if (code := kernels.main()) == 0:
        assert capsys.readouterr().out.startswith("cpu kernels: /")
    else:  # a machine without a compiler
        assert code == 1 and "no g++" in capsys.readouterr().err

    def fails() -> str:
        raise BuildError("no g++ on this machine")

    monkeypatch.setattr(cpu, "load", fails)
    assert kernels.main() == 1
    assert capsys.readouterr().err == (
        "cpu kernels: not built, no g++ on this machine; runs use the reference instead\n"
    )


def test_the_batch_script_counts_early_stops(tmp_path: Path) -> None:
    lines = (ROOT / "scripts/slurm/train.sbatch").read_text().splitlines()
    (line,) = [line for line in lines if line.startswith("early=")]
    script = f'folder="$1"\n{line}\necho "${{early:-0}}"'
    for count in range(4):
        done = subprocess.run(["bash", "-c", script, "_", tmp_path], capture_output=True, text=True, check=True)
        assert int(done.stdout) == count
        with suppress(UserError):
            EarlyStops(tmp_path / "early_stops").add("stopped by SIGTERM")


CLUSTER = """
scontrol() { case "$*" in *"$SLURM_JOB_NODELIST"*) printf 'node1\\nnode2\\n' ;; esac; }
sinfo() { printf 'node1\\nnode2\\nnode3\\n'; }
SLURM_JOB_NODELIST=node[1-2] SLURM_JOB_NUM_NODES=2 SLURM_JOB_ID=7 SLURM_JOB_PARTITION=all
source scripts/slurm/requeue.sh
bad_node "$1"
"""


def test_the_node_to_blame_is_the_first_one_of_the_line() -> None:
    """Who waited for it in a message is named behind it, on a node that is well."""
    line = "MZ-311 rank=0 step=3: did not answer in p2p #1 send (x) in forward on node1 (pid 12); "
    line += "rank 1 waited in p2p #1 recv (x) in forward on node2 (pid 13); it is stopped (SIGSTOP)"
    said = subprocess.run(["bash", "-c", CLUSTER, "-", line], cwd=ROOT, capture_output=True, text=True, check=True)
    assert (said.stdout, said.stderr) == ("node1\n", "")
