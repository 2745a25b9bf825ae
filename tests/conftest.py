"""Tiny data, and one finished tiny run, shared by all tests that need them and not to be changed by any."""

import contextlib
import functools
import io
import json
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import settings

from data_tools import preprocess, train_tokenizer
from megazero.launcher.environment import MEETING, SLURM, TORCHRUN
from megazero.run.folder import RunFolder
from tests.ranks import PATCHES
from tests.tiny_run import CONFIG, VOCAB, TinyData, plain_picture

# torch's store looks up the name of each of its connections: a lost request to a name server costs 5 s by default.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:5")


@functools.cache
def in_memory() -> str | None:
    """A place for folders whose files are in memory, where there is room: on a disk a test waits for every save."""
    place = "/dev/shm"
    if not os.access(place, os.W_OK):
        return None
    found = os.statvfs(place)
    roomy = found.f_bavail * found.f_frsize >= 4 * 2**30
    return place if roomy and not found.f_flag & os.ST_NOEXEC else None


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    """A folder of its own with a short name: a line of an error has 300 characters, and leaves out the middle."""
    folder = Path(tempfile.mkdtemp(prefix="mz-", dir=in_memory()))
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def disk() -> Iterator[Path]:
    """A folder on a disk, for files that memory is too small for."""
    with tempfile.TemporaryDirectory(dir="/var/tmp") as folder:
        yield Path(folder)


@pytest.fixture(scope="session")
def tiny_data(tmp_path_factory: pytest.TempPathFactory) -> TinyData:
    """A tokenizer, a data set of some 500 short documents of uneven length, and a config that names them."""
    import argparse

    folder = tmp_path_factory.mktemp("tiny")
    text = Path(str(argparse.__file__)).read_text(encoding="utf-8")[:60_000]
    corpus, tokenizer, train = folder / "corpus.jsonl", folder / "tokenizer.model", folder / "train"
    corpus.write_text("".join(json.dumps({"text": part}) + "\n" for part in text.split("\n\n")))
    with contextlib.redirect_stdout(io.StringIO()):
        make = ["--input", str(corpus), "--output", str(tokenizer), "--vocab", str(VOCAB)]
        assert train_tokenizer.main(make) == 0
        make = ["--input", str(corpus), "--output", str(train), "--tokenizer", str(tokenizer)]
        assert preprocess.main(make) == 0
    config = folder / "small.yaml"
    config.write_text(CONFIG + f"data: {{train: {train}, tokenizer: {tokenizer}, valid: 0.1, valid_samples: 8}}\n")
    return TinyData(config, tokenizer, train)


@pytest.fixture(scope="session")
def finished(tiny_data: TinyData, tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    """The folder of a run of `tiny_data.config` as it stands, trained in this process."""
    from megazero.tools.training.launch import launch

    folder = RunFolder(tmp_path_factory.mktemp("finished") / "run")
    with contextlib.redirect_stdout(io.StringIO()):
        launch(tiny_data.load(folder.path), "small", 1)
    return folder


@pytest.fixture(scope="session", autouse=True)
def plain_pictures() -> Iterator[None]:
    """Runs in this process draw no loss curve; `tests/observe/test_plot.py` and fresh commands do."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("megazero.run.session.draw_loss", plain_picture)
        PATCHES.settle()
        yield


@pytest.fixture(autouse=True)
def one_process(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No launcher's environment and one thread: tests are one process unless they say otherwise."""
    for name in (*TORCHRUN, *MEETING, *SLURM):
        monkeypatch.delenv(name, raising=False)
    yield
    torch.set_num_threads(1)


@pytest.fixture
def usual_signals() -> Iterator[None]:
    """What a terminal's signals do by default: who runs the tests in the background may have them ignored, and
    processes inherit that.
    """
    usual = {signal.SIGINT: signal.default_int_handler, signal.SIGHUP: signal.SIG_DFL, signal.SIGTERM: signal.SIG_DFL}
    before = {number: signal.signal(number, handler) for number, handler in usual.items()}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """One thread here and in the processes that tests start; no deadlines for hypothesis: machines are busy.

    Tiny models gain nothing from a second one, and threads that wait for each other by spinning make a busy machine ten
    times slower.
    """
    os.environ["OMP_NUM_THREADS"] = "1"
    sys.dont_write_bytecode = False  # many containers set it, and each run rewrites the tests' assertions, for 8 s
    torch.set_num_threads(1)
    settings.register_profile("megazero", deadline=None)
    settings.load_profile("megazero")
    if config.option.basetemp is None and (place := in_memory()):  # of a worker it is a folder in that of its parent
        config.option.basetemp = tempfile.mkdtemp(prefix="mz-", dir=place)
        config.add_cleanup(lambda: shutil.rmtree(config.option.basetemp, ignore_errors=True))


def pytest_collection_finish() -> None:
    """Tests themselves leave no byte code where the environment forbids it."""
    sys.dont_write_bytecode = bool(os.environ.get("PYTHONDONTWRITEBYTECODE"))
