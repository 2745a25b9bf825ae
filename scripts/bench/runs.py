"""What a whole run costs: train.py's step beside the bare engine's, and start and step by number of ranks.

    python scripts/bench/runs.py [--ranks 1 2 4 8] [--launches 3] [--pairs 21] [--json] [--save]
    python scripts/bench/runs.py --resident [--ranks 1 2 4 8] [--launches 3] [--json] [--save]

`loop`: the *small* GPT (8 layers, hidden 512, vocabulary 8,192, sequence 256, micro-batch 2) on one thread: the engine
alone on tokens that are there, and `python train.py`, with loader, recorder, metrics and the agreement on stopping, and
a row for each step. Both do ten steps; the seconds are the mean of the last eight, as the run's own metrics have them.

`ranks`: a smaller one (4 layers, hidden 256, sequence 128, micro-batch 1 for each rank) in ZeRO stage 1 on N ranks of
one thread: from the command to the first step's end (*start*), and one step (*step*). Where there are more ranks than
cores they wait for each other; the note below the table says how many cores there are.

`--resident`: instead of times, the memory of those runs: the most MB that the largest process had resident until the
first step ended (*start*) and in the steps after it (*steady*), and the MB of all processes together when that step
ended (*of all*): pages that several share count once, those of files (libraries) not at all. The most of all launches.

Ranks talk through memory that they share. MB in the other tables are those of the process that starts train.py.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # so that it runs from any folder, uninstalled too

import numpy as np
import torch

from megazero.comm.grid import single
from megazero.config.schema import Batch, Config, Model, resolved
from megazero.data.indexed_dataset import IndexedDatasetWriter
from megazero.kernels.select import choose
from scripts.bench import figures
from scripts.bench.figures import ROOT
from scripts.bench.harness import Group, Pair, add_options, chosen, run
from scripts.bench.ours import CPU, SEQ_LEN, VOCAB, engine_step
from scripts.bench.processes import Call, System

STEPS, FIRST = 10, 2  # of a run; steps that do not count
SMALL = {"layers": 8, "hidden": 512, "heads": 8, "vocab": VOCAB, "seq_len": SEQ_LEN}
SMALLER = {"layers": 4, "hidden": 256, "heads": 4, "vocab": VOCAB, "seq_len": 128}
MICRO = 2
LOOK = 0.02  # seconds between two looks at the memory of a run
TOKENS = 400_000


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4, 8])
    add_options(parser)
    parser.add_argument("--resident", action="store_true", help="memory instead of times")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="bench-runs-") as folder:
        make_data(Path(folder))
        if options.resident:
            report = resident(Path(folder), options.ranks, options.launches)
            return figures.tell([report], as_json=options.json, save=options.save)
        return run(groups_of(folder, options.ranks, options.only), options)


def groups_of(folder: str, ranks: list[int], only: list[str]) -> Iterator[Group]:
    """Yield the loop, then the runs of several ranks, whose rows are beside those of the first number."""
    systems = [System("engine", bare), System("train.py", whole, (folder,))]
    systems = [System(one.name, one.build, one.arguments, has_loss=False, times_itself=True) for one in systems]
    yield Group("loop", chosen(systems, only))
    first, *_ = ranks
    by_ranks = System("runs", runs_of, (folder, tuple(ranks)), has_loss=False, times_itself=True)
    words = ("start", "step")
    rows = [Pair(f"{word}, {n} ranks", f"{word} {n}", f"{word} {first}") for word in words for n in ranks]
    yield Group(f"{first} to {ranks[-1]} ranks", [by_ranks], pairs=lambda _: rows, again=False)


def make_data(folder: Path) -> None:
    draw = torch.Generator().manual_seed(0)
    with IndexedDatasetWriter(folder / "tokens", np.uint16) as writer:
        writer.append(torch.randint(0, VOCAB, (TOKENS,), generator=draw).numpy())
        writer.end_document()


def bare() -> Call:
    """Return ten steps of the engine alone, which take as many seconds as the mean of the last eight."""
    batch = Batch(**{"global": MICRO, "micro": MICRO})
    config = resolved(Config(model=Model.model_validate(SMALL), batch=batch))
    step = engine_step(config, single(), choose("auto", CPU, torch.float32))

    def call() -> float:
        for _ in range(FIRST):
            step()
        began = time.perf_counter()
        for _ in range(STEPS - FIRST):
            step()
        return (time.perf_counter() - began) / (STEPS - FIRST)

    return call


def whole(folder: str) -> Call:
    """Return the same steps by train.py."""
    return lambda: train(Path(folder), SMALL, MICRO, ranks=1)[1]


def runs_of(folder: str, ranks: tuple[int, ...]) -> dict[str, Call]:
    """Return for each number of ranks what starts a run, and what tells a step of the run that was started last."""
    steps: dict[int, float] = {}

    def start(n: int) -> float:
        seconds, steps[n] = train(Path(folder), SMALLER, n, ranks=n)
        return seconds

    calls: dict[str, Call] = {}
    for n in ranks:
        calls[f"start {n}"] = lambda n=n: start(n)
        calls[f"step {n}"] = lambda n=n: steps[n] if n in steps else train(Path(folder), SMALLER, n, ranks=n)[1]
    return calls


@contextmanager
def prepared(folder: Path, model: dict[str, int], batch: int, ranks: int) -> Iterator[tuple[Path, list[str]]]:
    """Yield the folder that a run will make, and the command that trains it."""
    with tempfile.TemporaryDirectory(dir=folder) as where:
        path = Path(where)
        config = {
            "run": {"steps": STEPS, "dir": str(path / "run")},
            "model": model,
            "batch": {"global": batch, "micro": batch // ranks},
            "data": {"train": str(folder / "tokens")},
            "observe": {"every": 1},
        }
        (path / "config.yaml").write_text(json.dumps(config))
        line = ["env", "OMP_NUM_THREADS=1", sys.executable, "train.py", "--nproc", str(ranks)]
        yield path / "run", [*line, "--config", str(path / "config.yaml")]


def train(folder: Path, model: dict[str, int], batch: int, *, ranks: int) -> tuple[float, float]:
    """Run train.py; return the seconds from the command to the first step's end, and of a step."""
    with prepared(folder, model, batch, ranks) as (path, line):
        began = time.time()
        done = subprocess.run(line, cwd=ROOT, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(done.stderr)
        rows = [json.loads(row) for row in (path / "metrics.jsonl").read_text().splitlines()]
    counted = [row["step_time"] for row in rows[FIRST:]]
    return rows[0]["time"] - began, sum(counted) / len(counted)


def resident(folder: Path, ranks: Sequence[int], launches: int) -> figures.Report:
    """Return the report of the memory of runs of so many ranks."""
    rows = []
    for n in ranks:
        found = [memory_of(folder, n) for _ in range(launches)]
        rows.append({"system": f"{n} ranks", "columns": {head: max(one[head] for one in found) for head in found[0]}})
    return figures.report_of("resident MB of a rank", rows, launches=launches)


def memory_of(folder: Path, ranks: int) -> dict[str, float]:
    """Run train.py; return the megabytes that its processes had resident, by the heads of the table."""
    with prepared(folder, SMALLER, ranks, ranks) as (path, line):
        said, metrics = path.with_name("said"), path / "metrics.jsonl"
        with said.open("w") as output, subprocess.Popen(line, cwd=ROOT, stdout=output, stderr=output) as process:
            found = {"MB start": 0.0, "MB steady": 0.0, "MB of all": 0.0}
            while process.poll() is None and (steps := _lines(metrics)) < STEPS:
                pids = _family(process.pid)
                phase = "MB steady" if found["MB of all"] else "MB start"
                found[phase] = max([found[phase], *(_megabytes(pid, "status", "VmHWM") for pid in pids)])
                if steps and phase == "MB start":
                    found["MB of all"] = sum(_megabytes(pid, "smaps_rollup", "Pss_Anon", "Pss_Shmem") for pid in pids)
                    for pid in pids:
                        with suppress(OSError):  # forget the peak; it may have ended
                            Path(f"/proc/{pid}/clear_refs").write_text("5")
                time.sleep(LOOK)
        if process.returncode:
            raise RuntimeError(said.read_text())
    return found


def _lines(path: Path) -> int:
    return path.read_text().count("\n") if path.exists() else 0


def _family(pid: int) -> list[int]:
    """Return a process and all that it has started, and they in turn."""
    words = [word for path in Path(f"/proc/{pid}/task").glob("*/children") for word in _text(path).split()]
    return [pid, *(one for word in words for one in _family(int(word)))]


def _megabytes(pid: int, file: str, *keys: str) -> float:
    """Return the sum of figures of a process's file in /proc, in megabytes (1e6); 0 where the process has ended."""
    lines = (line.split() for line in _text(Path(f"/proc/{pid}/{file}")).splitlines())
    return sum(int(words[1]) * 1024 / 1e6 for words in lines if words and words[0].rstrip(":") in keys)


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


if __name__ == "__main__":
    sys.exit(main())
