"""Run the parts of the check, each in its own process with a time limit.

The processes are forked from a process that has imported everything and has not used a GPU, which saves some seconds
per part. A part appends each row to a file, so its rows survive if the part is stopped. Parts that measure run alone;
others run a few at a time.
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
from scripts.gpu_check.findings import Asked, Row, error_line, finite, line

_FORK = multiprocessing.get_context("fork")
LANES = {"cuda": 4, "cpu": 2}  # concurrent parts that do not measure
LEAST = 5.0  # no part starts with fewer seconds left


@dataclass(frozen=True)
class Part:
    """One part of the check.

    Attributes:
        title: title in the report.
        limit: seconds after which it is stopped.
        where: "module:function" in this package; the function is called with the request (`Asked`) and yields rows.
        as_run: sets CUDA as a run does. This loads all kernels at the start, which takes some seconds.
        alone: it measures, so no other part runs at the same time.
        after: a part that must end before this one starts; "": none.
    """

    title: str
    limit: float
    where: str
    as_run: bool = False
    alone: bool = False
    after: str = ""

    def rows(self) -> Callable[[Asked], Iterator[Row]]:
        """Return the function that yields the rows."""
        module, _, function = self.where.partition(":")
        return getattr(importlib.import_module(f"scripts.gpu_check.{module}"), function)


# In order of importance, as time may run out before the last ones. The kernels are built while the first parts run on
# the reference.
PARTS = {
    "machine": Part("The machine", 30, "machine:rows", alone=True),
    "build": Part("Kernels: build", 120, "kernels:built"),
    "train": Part("train.py: a run, its checkpoints, documents, the same bits", 160, "train:rows", after="build"),
    "engine": Part("Sharded and offloaded compared with plain, one process", 60, "ranks:engine"),
    "ranks": Part("Ranks that share the GPU compared with one on the CPU", 100, "ranks:on_shared_gpu"),
    "waits": Part("Steps that may not wait: sync debug mode", 75, "waits:rows", as_run=True, after="build"),
    "fused": Part("Training with fused kernels compared with a CPU", 110, "ranks:fused", after="build"),
    "correctness": Part("Kernels: against fp64", 75, "correctness:rows", after="build"),
    "sanitizer": Part("Kernels: compute-sanitizer", 100, "correctness:sanitized", after="build"),
    "nccl": Part("NCCL, one rank for each GPU", 75, "ranks:on_own_gpus", as_run=True, after="build"),
    "gpt": Part("Steps of GPT-2 1.5B, s 1,024", 130, "steps:gpt", as_run=True, alone=True, after="build"),
    "llama": Part("Steps of Llama 3.2 1B, s 4,096", 95, "steps:llama", as_run=True, alone=True, after="build"),
    "attention": Part("Attention: each implementation, and the run's choice", 35, "attention:rows", alone=True),
    "rates": Part("Products, host memory, disk, loading of kernels", 80, "rates:rows", alone=True, after="build"),
    "exchange": Part("Stage 3 with its exchange", 45, "exchange:rows", as_run=True, alone=True, after="build"),
    "bandwidth": Part("Kernels: bytes per second", 75, "bandwidth:rows", alone=True, after="build"),
    "host": Part("Host time for each layer", 35, "exchange:host", as_run=True, alone=True, after="build"),
}
# The parts of --second, for a GPU with more memory.
SECOND = {
    **{name: PARTS[name] for name in ("machine", "build")},
    "whole": Part("Llama 2 7B in the memory of one GPU", 60, "steps:whole", as_run=True, alone=True, after="build"),
    "hosted": Part("Llama 2 7B, optimizer on the host", 120, "steps:hosted", as_run=True, alone=True, after="build"),
    "variants": Part("GPT-2 1.5B, variants", 120, "steps:variants", as_run=True, alone=True, after="build"),
    "rules": Part("Optimizers and 16-bit state compared with a CPU", 60, "updates:rows", after="build"),
    "updates": Part("GPT-2 1.5B, optimizers", 80, "updates:measured", as_run=True, alone=True, after="build"),
    "texts": Part("Generation, Llama 3.2 1B", 80, "texts:rows", alone=True, after="build"),
}
# The parts whose rows the summary shows, most important first. For the others it shows the maximum of each column.
SHOWN = (
    "gpt",
    "llama",
    "whole",
    "hosted",
    "variants",
    "updates",
    "texts",
    "train",
    "rates",
    "attention",
    "exchange",
    "host",
    "bandwidth",
    "sanitizer",
)
ALL = PARTS | SECOND


class Running:
    """A running part; its process writes its rows and its output to two files.

    Args:
        limit: seconds after which it is stopped.
    """

    def __init__(self, name: str, asked: Asked, limit: float, folder: Path):
        self.name, self._limit, self._began = name, limit, time.perf_counter()
        self._found, self._log = folder / f"{name}.jsonl", folder / f"{name}.log"
        for path in (self._found, self._log):
            path.write_text("")
        self._process = _FORK.Process(target=_run, args=(name, asked, self._found, self._log))
        self._process.start()

    def ended(self) -> bool:
        """Return whether the process has ended or its time is over."""
        return not self._process.is_alive() or time.perf_counter() - self._began >= self._limit

    def result(self) -> tuple[list[Row], float]:
        """Stop the process and print its output; return its rows and its seconds."""
        late, seconds = self._process.is_alive(), time.perf_counter() - self._began
        self.end()
        texts = self._found.read_text().splitlines(keepends=True)
        rows = [json.loads(text) for text in texts if text.endswith("\n")]  # a kill may leave a partial row
        print(f"\n{ALL[self.name].title}\n{self._log.read_text(errors='replace').rstrip()}", flush=True)
        last: Row = {"name": self.name}
        if late and self._limit < ALL[self.name].limit:
            last["absent"] = f"the rest: the check's time was over after {self._limit:.0f} s"
        elif late:
            last["fault"] = f"not done within {self._limit:.0f} s"
        elif self._process.exitcode:
            last["fault"] = f"its process ended with {self._process.exitcode}"
        if len(last) > 1:
            print(line(last), flush=True)
            rows.append(last)
        return rows, seconds

    def end(self) -> None:
        """Kill the process and all processes that it has started."""
        pid = self._process.pid
        assert pid is not None, "it was started"
        if self._process.is_alive():
            for kill in (os.killpg, os.kill):  # it may not have made its own group yet
                with suppress(ProcessLookupError):
                    kill(pid, signal.SIGKILL)
        self._process.join()


def imported(names: list[str]) -> None:
    """Import the modules of some parts; ignore failures, which the parts themselves report."""
    for name in names:
        with suppress(Exception):
            ALL[name].rows()


def run(
    names: list[str], asked: Asked, seconds: float, folder: Path, tell: Callable[[str, list[Row], float], bool]
) -> None:
    """Run parts in order, each as soon as it may start.

    Args:
        seconds: time limit of all parts together.
        folder: the folder for the files of the parts.
        tell: called with the name, rows and seconds of each part; if it returns False, no more parts start.
    """
    begin, waiting, running = time.perf_counter(), list(names), list[Running]()
    try:
        while waiting or running:
            for name in list(waiting):
                here = {each.name for each in running}
                if ALL[name].after in {*waiting, *here}:
                    continue
                full = len(running) >= LANES[asked.device.type]
                if full or (running and (ALL[name].alone or any(ALL[each].alone for each in here))):
                    break
                waiting.remove(name)
                left = seconds - (time.perf_counter() - begin)
                if left > LEAST:
                    running.append(Running(name, asked, min(left, ALL[name].limit), folder))
                else:
                    tell(name, [{"name": name, "absent": "all of it: the check's time was over"}], 0.0)
            for each in [each for each in running if each.ended()]:
                running.remove(each)
                if not tell(each.name, *each.result()):
                    waiting.clear()
            time.sleep(0.02)
    finally:
        for each in running:
            each.end()


def _run(name: str, asked: Asked, found: Path, log: Path) -> None:
    """Run a part in its own process."""
    os.setsid()
    with log.open("wb") as out:
        os.dup2(out.fileno(), 1)
        os.dup2(out.fileno(), 2)
    if ALL[name].as_run:
        set_for_gpus()
    if not (asked.on_gpu and ALL[name].alone):
        torch.set_num_threads(1)  # else threads of processes that share cores wait for each other in every operation
    with found.open("w", encoding="utf-8", buffering=1) as file:

        def tell(row: Row) -> None:
            print(line(row), flush=True)
            file.write(json.dumps(finite(row), allow_nan=False) + "\n")

        try:
            for row in ALL[name].rows()(asked):
                tell(row)
        except Exception as error:
            traceback.print_exc()
            tell({"name": name, "fault": error_line(error)})
        sys.stdout.flush()
