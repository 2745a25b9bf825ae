"""The wandb sink against servers that answer, that are not there, and that die under it."""

import gc
import importlib.util
import json
import os
import subprocess
import time
from collections.abc import Callable, Iterator
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest

from megazero.base.errors import UserError
from megazero.observe import wandb_sink
from megazero.observe.metrics import Value, scalars
from megazero.observe.wandb_sink import INIT_SECONDS, WandbSink
from tests.observe import wandb_file
from tests.observe.wandb_server import Server, black_hole, closed_port
from tests.processes import until

CONFIG = {"model": {"layers": 2}, "run": {"seed": 7}}
ROWS: list[dict[str, Value]] = [
    {
        "step": step,
        "tokens": 64 * step,
        "loss": 5.0 / step,
        "mfu": None,
        "grad_norm": 0.1 * step,
        "seconds": {"data": 0.2},
    }
    for step in range(1, 31)
]

Connect = Callable[..., None]


def started(folder: Path) -> WandbSink:
    """A sink of a run that has its plan and, as at its end, its ledger."""
    (folder / "plan.json").write_text(json.dumps({"fits": True}))
    (folder / "ledger.json").write_text(json.dumps([{"rank": 0, "bytes": {}}]))
    sink = WandbSink("megazero", "demo", "run7", CONFIG, folder)
    sink.start()
    return sink


def unended() -> list[subprocess.Popen]:
    return [found for found in gc.get_objects() if type(found) is subprocess.Popen and found.returncode is None]


@pytest.fixture
def connect(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Connect]:
    """Point the library at a server, as a user does, and end its process afterwards."""
    import wandb

    for key in [key for key in os.environ if key.startswith("WANDB_")]:
        monkeypatch.delenv(key)
    monkeypatch.setenv("WANDB_ERROR_REPORTING", "false")
    monkeypatch.setenv("NETRC", str(tmp_path / "no-netrc"))

    def point(url: str, key: str = "k" * 40, mode: str = "") -> None:
        monkeypatch.setenv("WANDB_BASE_URL", url)
        if key:
            monkeypatch.setenv("WANDB_API_KEY", key)
        if mode:
            monkeypatch.setenv("WANDB_MODE", mode)
        wandb.teardown()  # the library reads its environment once

    before = unended()  # not the library's
    yield point
    wandb.teardown()
    for left in unended():
        if left not in before:
            left.wait(10)  # a process that the sink had to end: the library does not wait for it, and it must be gone


def timed(call: Callable[[], None]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def run_folder(tmp_path: Path, pattern: str) -> Path:
    (found,) = (tmp_path / "wandb").glob(pattern)
    return found


def recorded(tmp_path: Path, pattern: str) -> wandb_file.Recorded:
    """What the run in this folder left on disk; the library's process may still be writing the end of it."""
    (path,) = run_folder(tmp_path, pattern).glob("*.wandb")
    until(lambda: wandb_file.read(path).finished)
    return wandb_file.read(path)


def assert_all_there(found: wandb_file.Recorded) -> None:
    assert found.name == "demo"
    config = {key: value for key, value in found.config.items() if key != "_wandb"}
    assert len(config.pop("git_revision").removesuffix("-dirty")) == 40
    assert config == {**CONFIG, "plan": {"fits": True}, "ledger": {"rank": 0, "bytes": {}}}
    expected = [{key: value for key, value in scalars(row).items() if value is not None} for row in ROWS]
    assert "seconds/data" in expected[0]
    assert [{key: row[key] for key in expected[0]} for row in found.history] == expected
    assert all("mfu" not in row and row["_step"] == row["step"] for row in found.history)


def test_a_run_with_nothing_to_do_leaves_no_trace(tmp_path):
    """Made, never started, and closed."""
    WandbSink("megazero", "demo", "run7", CONFIG, tmp_path).close()
    assert not list(tmp_path.iterdir())


def test_offline_by_the_librarys_own_switch_is_silent_and_complete(connect, tmp_path, capfd):
    connect("http://127.0.0.1:1", mode="offline")
    sink = started(tmp_path)
    for row in ROWS:
        sink.row(row)
    sink.close()
    assert_all_there(recorded(tmp_path, "offline-run-*"))
    assert capfd.readouterr() == ("", "")


@pytest.mark.full
@pytest.mark.parametrize("server", ["closed port", "black hole"])
def test_server_that_is_not_there_costs_a_wait_at_the_start(server, connect, tmp_path, capfd):
    with black_hole() as hole:
        connect(closed_port() if server == "closed port" else hole)
        sinks: list[WandbSink] = []
        start = timed(lambda: sinks.append(started(tmp_path)))
        steps = [timed(lambda row=row: sinks[0].row(row)) for row in ROWS]
        close = timed(sinks[0].close)
    print(f"{server}: start {start:.3f} s, slowest step {max(steps) * 1e6:.0f} us, close {close:.3f} s")
    assert start < 3 * INIT_SECONDS and max(steps) < 0.05 and close < INIT_SECONDS
    assert_all_there(recorded(tmp_path, "offline-run-*"))
    (line,) = capfd.readouterr().err.splitlines()
    assert "does not answer" in line
    assert f"wandb sync {run_folder(tmp_path, 'offline-run-*')}" in line


def test_no_key_is_offline_without_a_prompt(connect, tmp_path, capfd):
    server = Server()
    connect(server.url, key="")
    sink = started(tmp_path)
    for row in ROWS:
        sink.row(row)
    sink.close()
    server.die()
    assert_all_there(recorded(tmp_path, "offline-run-*"))
    out, err = capfd.readouterr()
    assert out == ""
    assert len(err.splitlines()) == 1
    assert "no API key" in err


def test_server_that_refuses_the_key(connect, tmp_path, capfd):
    server = Server()
    server.refuses = True
    connect(server.url)
    sink = started(tmp_path)
    for row in ROWS:
        sink.row(row)
    sink.close()
    server.die()
    assert_all_there(recorded(tmp_path, "offline-run-*"))
    (line,) = capfd.readouterr().err.splitlines()
    assert "refused the run" in line
    assert "k" * 40 not in line


def test_living_server_gets_every_row(connect, tmp_path, capfd):
    server = Server()
    connect(server.url)
    sink = started(tmp_path)
    for row in ROWS:
        sink.row(row)
    sink.close()
    server.die()
    assert [json.loads(row)["loss"] for row in server.history] == [row["loss"] for row in ROWS]
    assert_all_there(recorded(tmp_path, "run-*"))
    assert capfd.readouterr().err.startswith("wandb: http://127.0.0.1")


@pytest.mark.full
def test_server_that_dies_under_the_run(connect, tmp_path, capfd, monkeypatch):
    monkeypatch.setattr(wandb_sink, "FINISH_SECONDS", 3.0)
    server = Server()
    connect(server.url)
    sink = started(tmp_path)
    sink.row(ROWS[0])
    server.die()
    steps = [timed(lambda row=row: sink.row(row)) for row in ROWS[1:]]
    close = timed(sink.close)
    print(f"slowest step {max(steps) * 1e6:.0f} us, close {close:.3f} s")
    assert max(steps) < 0.05 and close < 30.0
    assert_all_there(recorded(tmp_path, "run-*"))


@pytest.mark.parametrize("spec", [None, ModuleSpec("wandb", None)], ids=["absent", "a folder of that name"])
def test_missing_package_names_the_command(spec, monkeypatch, tmp_path):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec)
    with pytest.raises(UserError, match=r"MZ-160.*pip install wandb"):
        WandbSink("megazero", "demo", "run7", CONFIG, tmp_path)
