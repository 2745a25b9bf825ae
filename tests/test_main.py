"""The command line: what each kind of mistake exits with, and that it is one line on stderr and nothing else."""

import json
import re
import resource
import subprocess
import sys
import tomllib
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from megazero.__main__ import main
from megazero.comm.context import CommContext
from megazero.comm.grid import Axis, Grid, single
from megazero.comm.transport.host_staging import staging_pool
from megazero.config.file import load
from megazero.data.indexed_dataset import IndexedDatasetWriter
from megazero.launcher.environment import MEETING, TORCHRUN
from megazero.launcher.world import World
from megazero.run import session as run
from megazero.run.words import sharing
from megazero.tools.training import launch as start
from tests.quiet import without_heartbeat
from tests.tiny_run import ROOT, TinyData, all_tokens, fresh_command

VERBS = {"train", "explain", "certify", "schedule", "plan", "simulate", "generate", "export", "import", "doctor"}
VERBS |= {"eval"}
VERBS |= {"data", "tokenizer", "preprocess", "inspect", "merge"}
# Runs a script as `python script arguments` does, and says on stdout whether torch was imported.
WITNESS = """
import runpy, sys
sys.argv = sys.argv[1:]
try:
    runpy.run_path(sys.argv[0], run_name="__main__")
finally:
    print("torch" in sys.modules)
"""


@pytest.fixture
def refused(capsys: pytest.CaptureFixture[str]):
    """refused(exit code, MZ code, arguments ...) -> the one line."""

    def check(exit_code: int, code: int, *arguments: object) -> str:
        assert main([str(argument) for argument in arguments]) == exit_code
        out, err = capsys.readouterr()
        assert out == "" and err.startswith(f"MZ-{code}") and err.count("\n") == 1 and len(err) <= 301, err
        return err

    return check


@pytest.mark.parametrize(
    "arguments",
    [
        ["tain"],
        ["report"],
        ["train", "run.steps=1"],
        ["train", "--config"],
        ["train", "--config", "tiny", "--nproc", "two"],
        ["train", "--config", "tiny", "--no-such-flag"],
        ["generate", "--prompt", "a"],
        ["generate", "--run", "x", "--prompt", "a", "--top-k", "1.5"],
        ["explain", "--nproc", "1"],
    ],
)
def test_usage_errors(refused, arguments: list[str]):
    assert "see `megazero" in refused(2, 100, *arguments)


def test_verbs_are_the_contracts_and_each_has_its_help(capsys):
    with pytest.raises(SystemExit):
        main(["--help"])
    listed = {line.split()[0] for line in capsys.readouterr().out.splitlines() if re.match(r"    \w+( |$)", line)}
    assert listed == set(VERBS)
    for verb in VERBS:
        with pytest.raises(SystemExit) as caught:
            main([verb, "--help"])
        out, err = capsys.readouterr()
        assert caught.value.code == 0 and f"usage: megazero {verb} " in out and err == ""


@pytest.mark.parametrize(
    ("words", "usage"),
    [
        (["-m", "megazero"], "usage: megazero [-h] [--version] VERB"),
        (["train.py"], "usage: megazero train [-h] --config"),
    ],
)
def test_without_arguments_it_is_the_help(words: list[str], usage: str):
    done = fresh_command(*words)
    assert (done.returncode, without_heartbeat(done.stderr)) == (2, "") and done.stdout.startswith(usage)


def test_the_version(capsys):
    with pytest.raises(SystemExit) as caught:
        main(["--version"])
    assert caught.value.code == 0
    assert (
        capsys.readouterr().out
        == f"megazero {tomllib.loads((ROOT / 'pyproject.toml').read_text())['project']['version']}\n"
    )


def test_wrong_config_costs_a_fraction_of_a_second_and_no_torch(tmp_path: Path):
    config = tmp_path / "bad.yaml"
    config.write_text("model:\n  layers: 2\n  hiden: 64\n")
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    result = fresh_command("train.py", "--config", config)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    line = "MZ-104 bad.yaml:3: unknown key model.hiden; did you mean model.hidden?\n"
    assert (result.returncode, result.stdout, result.stderr) == (2, "", line)
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 1.0  # CPU seconds; about 0.25
    for arguments, exit_code in ((["train.py", "--config", config], 2), (["train.py", "--config", "nowhere"], 2)):
        result = fresh_command("-c", WITNESS, *arguments)
        assert (result.returncode, result.stdout) == (exit_code, "False\n")
    result = fresh_command("-c", WITNESS, "megazero/__main__.py", "explain", "model")
    assert result.returncode == 0 and result.stdout.endswith("\nFalse\n")


def test_all_faults_of_a_config_are_printed(capsys):
    assert main(["train", "--config", "tiny", "model.heads=3", "batch.micro=3", "zero.stage=2"]) == 2
    err = capsys.readouterr().err
    assert [line[:6] for line in err.splitlines()] == ["MZ-106", "MZ-106"]


def test_nproc(refused, tiny_data: TinyData, tmp_path: Path):
    arguments = ["train", "--config", tiny_data.config, f"run.dir={tmp_path / 'run'}", "--nproc"]
    assert "expected a number from 1 to 1,024, got 0" in refused(2, 100, *arguments, 0)
    assert "batch.global % (batch.micro * data ranks) == 0, got 4 % (2 * 3)" in refused(
        2, 106, *arguments, 3, "zero.stage=0"
    )
    assert "got 3 % (2 * 1) = 1" in refused(2, 106, *arguments, 3, "parallel.tensor=2")
    assert not (tmp_path / "run").exists()
    assert main([str(a) for a in (*arguments[:-1], "run.steps=1", "data.valid=null", "--nproc", 1)]) == 0


def test_worlds_that_are_refused(refused, tiny_data: TinyData, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    arguments = ["train", "--config", tiny_data.config, f"run.dir={tmp_path / 'run'}"]
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert "RANK and LOCAL_RANK not" in refused(2, 111, *arguments)
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert "WORLD_SIZE=2, but MASTER_ADDR and MASTER_PORT not set" in refused(2, 111, *arguments)
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    monkeypatch.setenv("MASTER_PORT", "1")
    assert "--nproc 2 under torchrun" in refused(2, 100, *arguments, "--nproc", 2)
    assert not (tmp_path / "run").exists()


def test_sharing_gpus_where_there_are_none_changes_nothing(tiny_data: TinyData, tmp_path: Path, capsys):
    rows = []
    for name, *flags in (("as-it-is",), ("shared", "--share-gpus")):
        arguments = ["--config", str(tiny_data.config), f"run.dir={tmp_path / name}", "run.steps=1", "data.valid=null"]
        assert main(["train", *arguments, *flags]) == 0
        said, line = capsys.readouterr().out, "--share-gpus has no effect: there is no GPU"
        log = (tmp_path / name / "logs/rank_00.log").read_text()
        assert (line in said) is (line in log) is bool(flags)
        rows.append(json.loads((tmp_path / name / "metrics.jsonl").read_text()))
    assert rows[0]["loss"] == rows[1]["loss"] and rows[0]["grad_norm"] == rows[1]["grad_norm"]


def test_ranks_of_a_launcher_learn_that_they_share_gpus(
    tiny_data: TinyData, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    for name, value in zip((*TORCHRUN, *MEETING), ("1", "2", "1", "localhost", "1"), strict=True):
        monkeypatch.setenv(name, value)
    worlds = []
    monkeypatch.setattr(start, "_one_of_many", lambda train, place: worlds.append(place.world) or 0)
    arguments = ["train", "--config", str(tiny_data.config), f"run.dir={tmp_path / 'run'}", "zero.stage=0"]
    assert main([*arguments, "--share-gpus"]) == 0 and main(arguments) == 0
    assert [world.shares_gpus for world in worlds] == [True, False]
    config = tiny_data.load(tmp_path)
    assert run._fingerprint(config, worlds[0]) == run._fingerprint(config, worlds[1]) + ", GPUs shared"


def test_ranks_that_share_gpus_say_so():
    comm = CommContext()
    grid = single(replace(comm, host_staging=staging_pool(torch.device("cpu"), comm.ledger)))
    said = sharing(World(0, 2, 0, shares_gpus=True), Grid({**grid, "world": Axis("world", 2, comm=grid.comm)}))
    assert said.startswith("--share-gpus: 2 ranks share their hosts' GPUs (0 here) and use gloo through pinned")


def test_missing_data_names_the_command(refused, tiny_data: TinyData, tmp_path: Path):
    """In a folder that was there before, whose log has every line; one that was not there is not left behind."""
    (tmp_path / "run").mkdir()
    arguments = ["train", "--config", tiny_data.config, f"run.dir={tmp_path / 'run'}"]
    assert "`megazero preprocess " in refused(1, 201, *arguments, f"data.train={tmp_path / 'none'}")
    assert "make data" in refused(1, 201, *arguments, f"data.train={tmp_path / 'data/quickstart/train'}")
    assert "`megazero tokenizer " in refused(1, 209, *arguments, f"data.tokenizer={tmp_path / 'none'}")
    assert "400 pieces, model.vocab is 399" in refused(2, 112, *arguments, "model.vocab=399")
    log = (tmp_path / "run/logs/rank_00.log").read_text()
    assert log.count("ERROR UserError: MZ-") == 4


def test_id_outside_the_vocabulary_is_named(refused, tiny_data: TinyData, tmp_path: Path, capsys):
    tokens = all_tokens(tiny_data.train)
    tokens[5000] = 401
    with IndexedDatasetWriter(tmp_path / "set", np.uint16) as writer:
        for part in (tokens[:4000], tokens[4000:6000]):
            writer.append(part)
            writer.end_document()
    options = [f"data.train={tmp_path / 'set'}", f"run.dir={tmp_path / 'run'}", "data.valid=null", "run.steps=100"]
    assert main(["train", "--config", str(tiny_data.config), *options]) == 1
    _, err = capsys.readouterr()
    line = f"MZ-205 {tmp_path}/set.bin: token 1,000 of document 1 is 401, expected 0 <= id < 400; "
    assert err.startswith(line) and err.count("\n") == 1


def test_run_folders_that_cannot_be_used(refused, tiny_data: TinyData, tmp_path: Path):
    def arguments(folder: Path) -> list[str]:
        return ["train", "--config", str(tiny_data.config), f"run.dir={folder}"]

    (tmp_path / "file").write_text("mine")
    assert "choose another run.dir" in refused(1, 401, *arguments(tmp_path / "file"))
    assert "choose another run.dir" in refused(1, 401, *arguments(tmp_path / "file/below"))
    assert (tmp_path / "file").read_text() == "mine"
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken/config.yaml").mkdir()
    assert "config.yaml: cannot be written" in refused(1, 401, *arguments(tmp_path / "taken"))
    for name in ("metrics.jsonl", "checkpoints/step_00000004/model.safetensors"):
        file = tmp_path / name.replace("/", "-") / name
        file.parent.mkdir(parents=True)
        file.write_text("precious")
        before = sorted((p, p.stat().st_mtime_ns) for p in file.parents[name.count("/")].rglob("*"))
        assert "holds a run already" in refused(2, 110, *arguments(file.parents[name.count("/")]))
        after = sorted((p, p.stat().st_mtime_ns) for p in file.parents[name.count("/")].rglob("*"))
        assert before == after and file.read_text() == "precious"


@pytest.mark.parametrize(("arguments", "lines"), [(["explain"], 100), (["explain", "run.steps"], 2)])
def test_reader_that_goes_away_is_no_fault(arguments: list[str], lines: int):
    assert fresh_command("-m", "megazero", *arguments).stdout.count("\n") >= lines
    line = [sys.executable, "-m", "megazero", *arguments]
    process = subprocess.Popen(line, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stderr is not None
    process.stdout.close()
    assert without_heartbeat(process.stderr.read()) == "" and process.wait() == 0
    process.stderr.close()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_answer_that_cannot_be_written_is_a_failure():
    line = [sys.executable, "-m", "megazero", "explain", "--json"]
    with open("/dev/full", "w") as full:
        result = subprocess.run(line, cwd=ROOT, stdout=full, stderr=subprocess.PIPE, text=True)
    said = without_heartbeat(result.stderr)
    assert (result.returncode, said[:6], said.count("\n")) == (1, "MZ-405", 1)


def test_console_script_and_module_are_the_same(capsys):
    assert main(["explain", "--json", "batch"]) == 0
    assert json.loads(capsys.readouterr().out) == json.loads(
        fresh_command("-m", "megazero", "explain", "--json", "batch").stdout
    )


@pytest.mark.parametrize(
    ("code", "arguments"),
    [
        (101, ["train", "--config", "no/such.yaml"]),
        (209, ["train", "--config", "tiny", "data.tokenizer=no/such.model", "run.dir=r"]),
        (201, ["train", "--config", "tiny", "data.tokenizer=null", "data.train=no/such", "run.dir=r"]),
        (402, ["train", "--config", "tiny", "checkpoint.resume=no/such", "run.dir=r"]),
        (113, ["generate", "--run", "no/such", "--prompt", "a"]),
        (113, ["export", "--to", "hf", "--run", "no/such", "--out", "o"]),
        (414, ["import", "--from", "hf", "--model", "no/such", "--out", "o"]),
        (116, ["plan", "--config", "tiny", "--gpus", "1", "--hardware", "no/such.yaml"]),
    ],
    ids=lambda given: str(given) if isinstance(given, int) else given[0],
)
@pytest.mark.parametrize("deep", [False, True], ids=["near", "deep"])
def test_a_relative_path_is_said_with_the_folder_it_was_looked_up_in(
    refused, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, code: int, arguments: list[str], deep: bool
) -> None:
    folder = tmp_path / "/".join(["a_folder_with_a_name"] * 9) if deep else tmp_path
    folder.mkdir(parents=True, exist_ok=True)
    monkeypatch.chdir(folder)
    shown = f"…{str(folder)[-80:]}" if len(str(folder)) > 80 else str(folder)
    assert f"(relative to the current folder, {shown})" in refused(2 if code < 200 else 1, code, *arguments)


def test_an_absolute_path_is_said_without_one(refused, tmp_path: Path) -> None:
    assert "current folder" not in refused(2, 101, "train", "--config", tmp_path / "such.yaml")


def test_help_says_how_options_are_changed_and_where_they_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["train", "--help"])
    said = capsys.readouterr().out
    for words in ("section.key=value changes one option", "run.steps=50", "megazero explain", "current folder"):
        assert words in said
    (example,) = (line.split() for line in said.splitlines() if "--config tiny run.steps" in line)
    load("tiny", [word.strip("'") for word in example[3:5]])
