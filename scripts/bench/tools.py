"""Seconds, processor seconds and memory of the verbs that say something about a run before it is trained.

    python scripts/bench/tools.py [--tables search simulate certify others] [--only PATTERN...] [--launches 3] [--json]
                                  [--save]

search    `plan --search` for 8 to 10,000 GPUs: 13B, two sequences a GPU
simulate  one rank of `tiny`, and of GPTs of 1.5B, 13B, 170B and 1T parameters as their configs have them; 1T with 512
          micro-batches and with 1,536
certify   layouts of up to 2 and up to 4 ranks against one process, as few as have every two values together (36 of 2
          ranks), of a small model on random tokens
others    `plan`, `schedule` and `explain`

Each is a whole process, from its command to its end, as a user starts it: nothing is kept from one to the next. There
is no other system beside: the figures are seconds (the median of the launches, the least, the most), seconds of the
processors by all its processes together, and the most MB that the largest of them had resident. In a launch every
command runs once, in an order drawn at random. Nothing is sent but by `certify`, whose ranks share memory.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # so that it runs from any folder, uninstalled too

import torch

from scripts.bench import figures
from scripts.bench.harness import LAUNCHES
from scripts.bench.runs import make_data

# A process is started by a small one, because the kernel counts the memory of who starts it as its own.
STARTER = """
import json, resource, subprocess, sys, time
began = time.perf_counter()
code = subprocess.run(sys.argv[1:], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL).returncode
seconds, used = time.perf_counter() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
print(json.dumps([code, seconds, used.ru_utime + used.ru_stime, used.ru_maxrss * 1024 / 1e6]))
"""
# A model of which a step takes less than all around it, and data that needs no preparation.
SMALL = "model.layers=4 model.hidden=64 model.seq_len=64 data.train={tokens} data.valid=null data.tokenizer=null"
COMMANDS: Mapping[str, Mapping[str, str]] = {
    "search": {
        f"{gpus:,} GPUs": f"plan --search --config gpt13b --hardware a100-80gb --gpus {gpus} batch.global={2 * gpus}"
        for gpus in (8, 64, 1024, 10_000)
    },
    "simulate": {
        "tiny, 8 ranks": "simulate --config tiny --gpus 8 parallel.tensor=2 parallel.pipeline=2 batch.micro=1",
        "1.5B, 64 ranks": "simulate --config gpt2_1.5b --gpus 64",
        "13B, 128 ranks": "simulate --config gpt13b --gpus 128",
        "170B, 400 ranks": "simulate --config gpt170b --gpus 400",
        "1T, 3,072 ranks, 512 micro-batches": "simulate --config gpt1t --gpus 3072",
        "1T, 1,024 ranks, 1,536 micro-batches": "simulate --config gpt1t --gpus 1024 batch.micro=1",
    },
    "certify": {
        f"{n} ranks": f"certify --config tiny --max-ranks {n} --layouts 20 batch.global=4 batch.micro=1 {SMALL}"
        for n in (2, 4)
    },
    "others": {
        "plan, 13B, 128 GPUs": "plan --config gpt13b --gpus 128 --hardware v100-32gb",
        "plan, 1T, 3,072 GPUs": "plan --config gpt1t --gpus 3072 --hardware a100-80gb",
        "schedule, 1T": "schedule --config gpt1t --nproc 3072",
        "explain": "explain",
    },
}


@dataclass(frozen=True)
class Used:
    """What a process and those that it started took: seconds, processor seconds, MB of the largest."""

    seconds: float
    processor: float
    megabytes: float


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tables", choices=COMMANDS, nargs="+", default=list(COMMANDS))
    parser.add_argument("--only", nargs="+", default=["*"], help="rows, by shell patterns")
    parser.add_argument("--launches", type=int, default=LAUNCHES, help="of every command (default: %(default)s)")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of tables")
    parser.add_argument("--save", action="store_true", help="keep what is measured in docs/figures, for its tables")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="bench-tools-") as folder:
        make_data(Path(folder))
        return figures.tell(reports(options, Path(folder)), as_json=options.json, save=options.save)


def reports(options: argparse.Namespace, folder: Path) -> Iterator[figures.Report]:
    """Yield the tables.

    Args:
        folder: that of the data.
    """
    for title in options.tables:
        commands = {
            name: words.format(tokens=folder / "tokens").split()
            for name, words in COMMANDS[title].items()
            if any(fnmatchcase(name, pattern) for pattern in options.only)
        }
        if commands:
            rows = rows_of(commands, options.launches)
            yield figures.report_of(title, rows, launches=options.launches)


def rows_of(commands: Mapping[str, Sequence[str]], launches: int) -> list[dict[str, object]]:
    """Run each verb some times, and return the rows of their table."""
    order, names = torch.Generator().manual_seed(0), list(commands)
    found: dict[str, list[Used]] = {name: [] for name in names}
    for _ in range(launches):
        for place in torch.randperm(len(names), generator=order).tolist():
            found[names[place]].append(used_by([sys.executable, "-m", "megazero", *commands[names[place]]]))
    return [{"system": name, "columns": columns_of(used)} for name, used in found.items()]


def columns_of(used: Sequence[Used]) -> dict[str, float]:
    seconds = [one.seconds for one in used]
    return {
        "s": statistics.median(seconds),
        "least s": min(seconds),
        "most s": max(seconds),
        "processor s": statistics.median(one.processor for one in used),
        "MB": max(one.megabytes for one in used),
    }


def used_by(line: Sequence[str]) -> Used:
    """Run a command and return what it took.

    Raises:
        RuntimeError: it failed; the text is what it said.
    """
    starter = [sys.executable, "-I", "-S", "-c", STARTER, *line]
    done = subprocess.run(starter, cwd=figures.ROOT, capture_output=True, text=True, check=True)
    code, *used = json.loads(done.stdout)
    if code:
        raise RuntimeError(f"{' '.join(line)}: {done.stderr}")
    return Used(*used)


if __name__ == "__main__":
    sys.exit(main())
