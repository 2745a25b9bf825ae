"""A run from the command line to its files: complete, repeatable to the bit, and hard to disturb."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from safetensors import safe_open

from megazero.config.file import load
from megazero.observe.jsonl import read_rows
from megazero.run.folder import RunFolder
from megazero.tools.training.launch import launch
from tests.tiny_run import PARAMETERS, TinyData, command, fresh_command, repeating, saved_bytes, saved_weights
from tests.warm import Process

KEYS = ["step", "time", "tokens", "samples", "epoch", "loss", "grad_norm", "clipped", "lr", "loss_scale", "skipped"]
KEYS += ["step_time", "tokens_per_second", "tokens_per_second_mean", "tflops_per_device", "mfu", "memory_peak_bytes"]
KEYS += ["comm_bytes", "seconds"]


def numbers(folder: RunFolder) -> list[dict]:
    """What must repeat: everything but time and memory."""
    return [repeating(row) for row in read_rows(folder.metrics)]


@contextmanager
def training(tiny_data: TinyData, folder: Path, *overrides: str) -> Iterator[Process]:
    with Process(["train.py", "--config", tiny_data.config, f"run.dir={folder}", *overrides]) as process:
        try:
            yield process
        finally:
            process.kill()


@pytest.fixture(scope="module")
def first(tiny_data: TinyData, tmp_path_factory: pytest.TempPathFactory):
    """(the process's result, the folder) of `python train.py`, as a user starts it."""
    folder = RunFolder(tmp_path_factory.mktemp("first") / "run")
    return fresh_command("train.py", "--config", tiny_data.config, f"run.dir={folder.path}"), folder


def test_command_succeeds_and_says_what_it_did(first, tiny_data: TinyData):
    result, folder = first
    assert (result.returncode, result.stderr) == (0, "")
    lines = result.stdout.splitlines()
    assert lines.pop(1) == f"data {tiny_data.train}, tokenizer {tiny_data.tokenizer}"
    assert lines.pop(6).startswith("memory of rank 0: 1.4 MB, planned ")  # after the second step is begun
    assert lines[0] == f"small: {PARAMETERS:,} parameters, 4 steps of 128 tokens on cpu, into {folder.path}"
    assert lines[1] == "ZeRO stage 1 over 1 data rank, held by this rank between steps:"
    assert [line.split()[0] for line in lines[2:5]] == ["parameters", "gradients", "optimizer"]
    assert lines[2].endswith("  0.2 MB    4.01 bytes per parameter")  # parameters begin at multiples of 16
    assert [line.split("  ")[0] for line in lines[5:9]] == [f"step {n}/4" for n in (1, 2, 3, 4)]
    last = read_rows(folder.metrics)[-1]
    assert lines[10].startswith(f"validation loss {last['valid_loss']:.4f} nats per token, ")
    assert lines[9].startswith("done in ") and lines[-1] == f"loss curve {folder.loss_plot}"


def test_files_of_the_contract(first, tiny_data: TinyData):
    _, folder = first
    found = {path.relative_to(folder.path).as_posix() for path in folder.path.rglob("*") if path.is_file()}
    step = {f"checkpoints/step_00000004/{name}" for name in ("manifest.json", "shard_00000.safetensors")}
    assert found == {"config.yaml", "plan.json", "metrics.jsonl", "ledger.json", "logs/rank_00.log", "loss.png", *step}
    assert load(str(folder.config)) == tiny_data.load(folder.path)
    assert folder.loss_plot.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    assert folder.loss_plot.read_bytes().endswith(b"IEND\xaeB`\x82")
    log = folder.log(0).read_text()
    assert f"{PARAMETERS:,} parameters" in log and "saved " in log and "kernels: " in log and "ERROR" not in log
    assert sum(tensor.numel() for tensor in saved_weights(folder).values()) == PARAMETERS
    with safe_open(folder.checkpoints / "step_00000004/shard_00000.safetensors", framework="np") as file:
        assert sum(file.get_tensor(name).size for name in file.keys()) == 3 * PARAMETERS  # noqa: SIM118


def test_rows_have_the_contracts_keys_in_order(first):
    _, folder = first
    rows = [json.loads(line) for line in folder.metrics.read_text().splitlines()]
    assert [list(row) for row in rows[:3]] == [KEYS] * 3
    assert list(rows[3]) == [*KEYS, "valid_loss", "valid_bits_per_byte"]
    assert [(row["step"], row["tokens"], row["skipped"]) for row in rows] == [(n, 128 * n, 0) for n in (1, 2, 3, 4)]
    assert [row["lr"] for row in rows] == [1e-3, 2e-3, 1.1e-3, 2e-4]  # warm-up of 2, then half a cosine, then its end
    assert rows[3]["loss"] < rows[0]["loss"] and all(row["mfu"] is None for row in rows)


def test_same_seed_same_bits_in_another_process(first, finished: RunFolder):
    _, folder = first
    assert numbers(folder) == numbers(finished)
    assert saved_bytes(folder) == saved_bytes(finished)


def test_same_seed_same_bits_and_another_seed_others(tiny_data: TinyData, finished: RunFolder, tmp_path: Path, capsys):
    folders = {seed: RunFolder(tmp_path / str(seed)) for seed in (0, 1)}
    for seed, folder in folders.items():
        launch(tiny_data.load(folder.path, f"run.seed={seed}"), "small", 1)
    assert numbers(folders[0]) == numbers(finished) and saved_bytes(folders[0]) == saved_bytes(finished)
    for column in ("loss", "grad_norm"):
        pairs = zip(numbers(folders[0]), numbers(folders[1]), strict=True)
        assert all(a[column] != b[column] for a, b in pairs)


def test_ranks_that_fail_before_the_first_row_give_the_folder_back(tiny_data: TinyData, tmp_path: Path):
    arguments = ["train.py", "--config", tiny_data.config, f"run.dir={tmp_path / 'run'}", "parallel.tensor=2"]
    done = command(*arguments, "data.tokenizer=null", "model.vocab=300", "data.valid=null")
    assert done.returncode == 1 and "2 cpu ranks" in done.stdout
    assert done.stderr.startswith("MZ-205 rank=") and done.stderr.count("\n") == 1
    assert not (tmp_path / "run/metrics.jsonl").exists()
    again = command(*arguments, "run.steps=1", "schedule.warmup=1", "data.valid=null")
    assert (again.returncode, again.stderr) == (0, "")
    taken = command(*arguments, "run.steps=1", "schedule.warmup=1", "data.valid=null")
    assert taken.returncode == 2 and taken.stderr.startswith("MZ-110 ") and (tmp_path / "run/metrics.jsonl").exists()


def test_default_folder_is_named_after_the_config(tiny_data: TinyData, tmp_path: Path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    config = load(str(tiny_data.config), ["run.steps=1", "data.valid=null", "data.tokenizer=null"])
    launch(config, "small", 1)
    assert (tmp_path / "runs/small/checkpoints/step_00000001/manifest.json").is_file()
    assert "validation" not in capsys.readouterr().out


@pytest.mark.parametrize("early", [True, pytest.param(False, marks=pytest.mark.full)], ids=["unread", "head"])
def test_reader_that_goes_away_does_not_hurt(tiny_data: TinyData, finished: RunFolder, tmp_path: Path, early: bool):
    """`| true` and `| head -1`: the run is as long and as good as with a reader."""
    with training(tiny_data, tmp_path / "run") as process:
        out, err = process.stdout, process.stderr
        if not early:
            assert any(line.startswith("small: ") for line in iter(out.readline, ""))  # behind a slow start's words
        out.close()
        warnings = err.read()
        assert process.wait(60) == 0, warnings
    assert all(line.startswith("warning: ConsoleSink: ") for line in warnings.splitlines())
    assert warnings.count("\n") <= 1
    folder = RunFolder(tmp_path / "run")
    assert len(read_rows(folder.metrics)) == 4 and len(saved_bytes(folder)) == len(saved_bytes(finished))


def test_rows_that_were_deleted_cost_the_plot_only(tiny_data: TinyData, tmp_path: Path, monkeypatch, capsys):
    from megazero.observe import jsonl

    monkeypatch.setattr(jsonl.JsonlSink, "row", lambda self, row: None)
    launch(tiny_data.load(tmp_path / "run", "run.steps=1", "schedule.warmup=1", "data.valid=null"), "small", 1)
    out, err = capsys.readouterr()
    assert err.startswith("warning: loss curve not drawn: ") and err.count("\n") == 1 and "done in" in out
    assert saved_bytes(RunFolder(tmp_path / "run"))
