"""The parts of the check, each run in a process of its own that may not last longer than its limit.

The processes are forked from one that has imported everything and has not touched a GPU, which saves each of them some
seconds. A part writes its rows as it finds them, so what it has found is there even if it is ended.
"""

import importlib
import json
import multiprocessing
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch

from megazero.launcher.environment import set_for_gpus
from megazero.launcher.scratch import scratch_folder
from scripts.gpu_check.findings import Asked, Row, finite, line, told

_FORK = multiprocessing.get_context("fork")


@dataclass(frozen=True)
class Part:
    """One part of the check.

    Attributes:
        title: for people.
        limit: seconds after which it is ended.
        where: "module:function" in this package; the function is called with what is asked and yields rows.
        as_run: CUDA is set as a run sets it. Loading all kernels at the start takes some seconds.
    """

    title: str
    limit: float
    where: str
    as_run: bool = False

    def rows(self) -> Callable[[Asked], Iterator[Row]]:
        """Return the function that finds the rows."""
        module, _, function = self.where.partition(":")
        return getattr(importlib.import_module(f"scripts.gpu_check.{module}"), function)


# In the order of what one wants to know first: there may be no time for the last ones.
PARTS = {
    "machine": Part("The machine", 30, "machine:rows"),
    "build": Part("Kernels: build", 90, "kernels:built"),
    "waits": Part("Steps that may not wait: sync debug mode", 60, "waits:rows", as_run=True),
    "exchange": Part("Stage 3 with its exchange", 75, "exchange:rows", as_run=True),
    "nccl": Part("NCCL, one rank for each GPU", 75, "ranks:on_own_gpus", as_run=True),
    "training": Part("Training a GPT of 1.3B parameters", 100, "training:rows", as_run=True),
    "host": Part("Host time for each layer", 40, "host:rows", as_run=True),
    "blocks": Part("Blocks and cross entropy beside torch.compile and Liger", 75, "blocks:rows"),
    "correctness": Part("Kernels: against fp64", 60, "correctness:rows"),
    "engine": Part("Sharded and offloaded beside plain, one process", 45, "ranks:engine"),
    "ranks": Part("Ranks that share the GPU beside one on the CPU", 75, "ranks:on_shared_gpu"),
    "bandwidth": Part("Kernels: bytes per second", 120, "bandwidth:rows"),
}


def imported(names: list[str]) -> None:
    """Import the modules of some parts; one that cannot be imported is its own part's fault."""
    for name in names:
        with suppress(Exception):
            PARTS[name].rows()


def run(name: str, asked: Asked, limit: float) -> tuple[list[Row], float]:
    """Run a part for at most so many seconds; return its rows, and the seconds that it took."""
    begin = time.perf_counter()
    with scratch_folder("check") as folder:
        found = folder / "rows"
        process = _FORK.Process(target=_run, args=(name, asked, found))
        process.start()
        try:
            process.join(limit)
        finally:
            late = process.is_alive()
            if late:
                _end(process.pid)
            process.join()
        rows = [json.loads(text) for text in found.read_text().splitlines()] if found.exists() else []
    if late and limit < PARTS[name].limit:
        rows.append({"name": name, "absent": f"the rest: the check's time was over after {limit:.0f} s"})
    elif late:
        rows.append({"name": name, "fault": f"not done within {limit:.0f} s"})
    elif process.exitcode:
        rows.append({"name": name, "fault": f"its process ended with {process.exitcode}"})
    if late or process.exitcode:
        print(line(rows[-1]), flush=True)
    return rows, time.perf_counter() - begin


def _end(pid: int | None) -> None:
    """Kill a part's process and all that it has started."""
    assert pid is not None, "it was started"
    for kill in (os.killpg, os.kill):  # it may not have come to make a group of its own
        with suppress(ProcessLookupError):
            kill(pid, signal.SIGKILL)


def _run(name: str, asked: Asked, found: Path) -> None:
    """Find a part's rows, in its own process."""
    os.setsid()
    if PARTS[name].as_run:
        set_for_gpus()
    if not asked.on_gpu:
        torch.set_num_threads(1)  # a fork has none of the threads that its parent has made
    with found.open("w", encoding="utf-8", buffering=1) as file:

        def tell(row: Row) -> None:
            print(line(row), flush=True)
            file.write(json.dumps(finite(row), allow_nan=False) + "\n")

        try:
            for row in PARTS[name].rows()(asked):
                tell(row)
        except Exception as error:
            traceback.print_exc()
            tell({"name": name, "fault": told(error)})
        sys.stdout.flush()
