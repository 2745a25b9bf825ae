"""Rows of the table of faults, and what injects them."""

import errno
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from megazero.checkpoint import shard
from megazero.checkpoint.store import Store
from megazero.data.indexed_dataset import IndexedDatasetWriter
from megazero.optim.mixture import Mixture
from tests.tiny_run import TinyData

STEP = "RUN/checkpoints/step_00000004"
TWO = ("parallel.tensor=2", "parallel.timeout=3")


@dataclass
class Site:
    """Where a fault is injected."""

    folder: Path
    data: TinyData
    patch: pytest.MonkeyPatch

    @property
    def run(self) -> Path:
        return self.folder / "run"

    @property
    def step(self) -> Path:
        return Store(self.run / "checkpoints").path(4)

    def train(self, *overrides: str) -> list[str]:
        return ["train", "--config", str(self.data.config), f"run.dir={self.run}", "run.steps=4", *overrides]

    def resume(self, *overrides: str) -> list[str]:
        return self.train("checkpoint.resume=auto", "checkpoint.every=2", "run.steps=6", *overrides)

    def dataset(self, *documents: list[int]) -> Path:
        with IndexedDatasetWriter(self.folder / "data", np.uint16) as writer:
            for document in documents:
                writer.append(np.array(document))
                writer.end_document()
        return self.folder / "data"


@dataclass(frozen=True)
class Fault:
    """
    Attributes:
        what: is injected.
        line: the last one on standard error; a warning where the run goes on.
        lost: by it.
        code: of the exit.
        inject: does it; the command line to run then.
    """

    what: str
    line: str
    lost: str
    code: int
    inject: Callable[[Site], list[str]]


NOTHING, SINCE = "nothing", "steps since the last checkpoint"
FAULTS: list[Fault] = []


def fault(what: str, line: str, lost: str = NOTHING, code: int = 1):
    def add(inject: Callable[[Site], list[str]]) -> Callable[[Site], list[str]]:
        FAULTS.append(Fault(what, line, lost, code, inject))
        return inject

    return add


def usage(what: str, line: str, *overrides: str) -> None:
    fault(what, line, code=2)(lambda site: site.train(f"run.dir={site.folder / 'new'}", *overrides))


def full_from(site: Site, call: int, only: Callable[[], bool] = lambda: True) -> None:
    honest, calls = shard.write_all, []

    def write(*arguments: object) -> None:
        calls.append(arguments)
        if len(calls) >= call and only():
            raise OSError(errno.ENOSPC, "No space left on device")
        honest(*arguments)  # type: ignore[arg-type]

    site.patch.setattr(shard, "write_all", write)


def before_each_update(site: Site, do: Callable[[], object]) -> None:
    """Something happens to the files of a run while it trains."""
    honest = Mixture.update

    def update(*arguments: object, **options: object) -> object:
        do()
        return honest(*arguments, **options)  # type: ignore[arg-type]

    site.patch.setattr(Mixture, "update", update)


def children() -> list[int]:
    return [int(pid) for pid in Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text().split()]


def is_rank_1(site: Site) -> Callable[[], bool]:
    """Asked in a rank: ranks are forked in their order, by the process that calls this."""
    parent, before = os.getpid(), set(children())

    def answer() -> bool:
        of_parent = Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
        return sorted(pid for pid in map(int, of_parent) if pid not in before)[1:2] == [os.getpid()]

    return answer


def spoil(path: Path, position: int = -50) -> None:
    raw = bytearray(path.read_bytes())
    raw[position] ^= 1
    path.write_bytes(raw)
