"""What a whole run costs: train.py's step beside the bare engine's, and start and step by number of ranks.

    python scripts/bench/runs.py [--ranks 1 2 4 8] [--launches 3] [--pairs 21] [--json] [--save]

`loop`: the *small* GPT (8 layers, hidden 512, vocabulary 8,192, sequence 256, micro-batch 2) on one thread: the engine
alone on tokens that are there, and `python train.py`, with loader, recorder, metrics and the agreement on stopping, and
a row for each step. Both do ten steps; the seconds are the mean of the last eight, as the run's own metrics have them.

`ranks`: a smaller one (4 layers, hidden 256, sequence 128, micro-batch 1 for each rank) in ZeRO stage 1 on N ranks of
one thread: from the command to the first step's end (*start*), and one step (*step*). Where there are more ranks than
cores they wait for each other; the note below the table says how many cores there are.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # so that it runs from any folder, uninstalled too

import numpy as np
import torch

from megazero.comm.grid import single
from megazero.config.schema import Batch, Config, Model, resolved
from megazero.data.indexed_dataset import IndexedDatasetWriter
from megazero.kernels.select import choose
from scripts.bench.figures import ROOT
from scripts.bench.harness import Group, Pair, add_options, chosen, run
from scripts.bench.ours import CPU, SEQ_LEN, VOCAB, engine_step
from scripts.bench.processes import Call, System

STEPS, FIRST = 10, 2  # of a run; steps that do not count
SMALL = {"layers": 8, "hidden": 512, "heads": 8, "vocab": VOCAB, "seq_len": SEQ_LEN}
SMALLER = {"layers": 4, "hidden": 256, "heads": 4, "vocab": VOCAB, "seq_len": 128}
MICRO = 2
TOKENS = 400_000


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4, 8])
    add_options(parser)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="bench-runs-") as folder:
        make_data(Path(folder))
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


def train(folder: Path, model: dict[str, int], batch: int, *, ranks: int) -> tuple[float, float]:
    """Run train.py; return the seconds from the command to the first step's end, and of a step."""
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
        line += ["--config", str(path / "config.yaml")]
        began = time.time()
        done = subprocess.run(line, cwd=ROOT, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(done.stderr)
        rows = [json.loads(row) for row in (path / "run/metrics.jsonl").read_text().splitlines()]
    counted = [row["step_time"] for row in rows[FIRST:]]
    return rows[0]["time"] - began, sum(counted) / len(counted)


if __name__ == "__main__":
    sys.exit(main())
