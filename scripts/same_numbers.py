"""Compare the numbers of two versions of the code, to the last digit, in 92 layouts.

    python scripts/same_numbers.py record TREE FOLDER      # trains with the code in TREE, keeps rows and ledgers
    python scripts/same_numbers.py compare FOLDER FOLDER   # exits with 1 if a number differs

Each layout trains a small model for three steps, with validation, using `train.py` of TREE, or a plain module using
`megazero.shard` (`scripts/library_numbers.py`). Compared are all rows of `metrics.jsonl` except timings, and the bytes
and operations of `ledger.json`; for the library, losses, norms, final values and the ledger. The activation bytes of a
pipeline may differ by the message of one micro-batch, because a message may or may not arrive before it is needed.
"""

import argparse
import json
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from megazero.data.indexed_dataset import IndexedDatasetWriter
from megazero.observe.metrics import TIMING_KEYS

VOCAB = 300
CONFIG = f"""
run: {{steps: 3}}
model: {{layers: 4, hidden: 32, heads: 4, vocab: {VOCAB}, seq_len: 32}}
optimizer: {{lr: 2e-3, clip: 0.5}}
schedule: {{warmup: 1, min_lr: 2e-4}}
batch: {{global: 8, micro: 1}}
data: {{valid: 0.1}}
observe: {{every: 1}}
precision: {{kernels: reference}}
"""
LLAMA = (
    *("model.position=rotary", "model.norm=rmsnorm", "model.activation=swiglu"),
    *("model.kv_heads=2", "model.tie_embeddings=false"),
)
SEQUENCE = ("parallel.sequence=true",)
SCHEDULES = ("gpipe", "1f1b", "interleaved", "zb-h1", "zb-v")
RECOMPUTE = {
    "selective": ("memory.recompute=selective",),
    "full": ("memory.recompute=full",),
    "Pa": ("memory.recompute=full", "memory.partition=true"),
    "Pa+cpu": ("memory.recompute=full", "memory.partition=true", "memory.offload=true"),
}
PRECISION = {
    "fp64": ("precision.dtype=fp64",),
    "bf16": ("precision.dtype=bf16",),
    "bf16-param": ("precision.dtype=bf16", "zero.grad_dtype=param"),
    "fp16": ("precision.dtype=fp16",),
}
INPUTS = {"dropout": ("model.dropout=0.1",), "documents": ("data.mask_eod=true",)}
OFFLOAD = {
    "optimizer": ("zero.offload.optimizer=cpu",),
    "delayed": ("zero.offload.optimizer=cpu", "zero.offload.delayed=true"),
    "both": ("zero.offload.optimizer=cpu", "zero.offload.parameters=cpu"),
}
QUANTIZED = {
    "int8": ("zero.quantize.parameters=int8", "zero.quantize.gradients=int8"),
    "int4-feedback": ("zero.quantize.gradients=int4", "zero.quantize.error_feedback=true"),
}
HYBRID = {"hybrid": ("zero.shard_ranks=2",), "secondary": ("zero.secondary_ranks=2",)}
DISKS = {
    "optimizer": ("zero.offload.optimizer=nvme",),
    "both": ("zero.offload.optimizer=nvme", "zero.offload.parameters=nvme"),
}
HOST = "zero.offload.host_mb=160"
PARTS = [{"until_step": 1}, {"until_step": 2, "batch": {"global": 4}}, {"until_step": 3, "optimizer": {"clip": 0.1}}]
LIBRARY = {
    "stage0": {"stage": 0},
    "stage1": {"stage": 1},
    "stage2": {"stage": 2},
    "stage3": {"stage": 3},
    "stage3-bf16": {"stage": 3, "precision": "bf16"},
    "stage2-fp16": {"stage": 2, "precision": "fp16"},
    "stage3-cpu": {"stage": 3, "offload": "cpu"},
    "stage3-tables": {"stage": 3, "tables": ["table"]},
}
Layout = tuple[str, int, tuple[str, ...]]  # name, ranks, options


def layouts() -> Iterator[Layout]:
    """Yield all layouts that are compared."""
    tp2, pp2 = ("parallel.tensor=2",), ("parallel.pipeline=2",)
    for name, flavour in (("gpt", ()), ("llama", LLAMA)):
        yield f"{name}-one", 1, flavour
        for stage in range(4):
            yield f"{name}-dp2-stage{stage}", 2, (*flavour, f"zero.stage={stage}")
        yield f"{name}-tp2", 2, (*flavour, *tp2)
        yield f"{name}-tp2-sequence", 2, (*flavour, *tp2, *SEQUENCE)
        for schedule in SCHEDULES:
            yield f"{name}-pp2-{schedule}", 2, (*flavour, *pp2, f"pipeline.schedule={schedule}")
    yield "tp4-sequence", 4, ("parallel.tensor=4", *SEQUENCE)
    for stage in range(4):
        yield f"dp4-stage{stage}", 4, (f"zero.stage={stage}",)
        yield f"tp2-dp2-stage{stage}", 4, (*tp2, *SEQUENCE, f"zero.stage={stage}")
    for stage, schedule in ((1, "1f1b"), (2, "zb-h1"), (3, "zb-v"), (3, "interleaved"), (0, "gpipe")):
        yield f"pp2-{schedule}-dp2-stage{stage}", 4, (*pp2, f"pipeline.schedule={schedule}", f"zero.stage={stage}")
    yield "tp2-pp2-zb-v", 4, (*tp2, *SEQUENCE, *pp2, "pipeline.schedule=zb-v")
    yield "tp2-pp2-1f1b", 4, (*LLAMA, *tp2, *pp2)
    for name, options in RECOMPUTE.items():
        yield f"tp2-{name}", 2, (*tp2, *options)
    for name in ("selective", "full"):
        yield f"dp2-stage3-{name}", 2, ("zero.stage=3", *RECOMPUTE[name])
    for name, options in PRECISION.items():
        for stage in (0, 1, 2, 3):
            yield f"dp2-stage{stage}-{name}", 2, (f"zero.stage={stage}", *options)
    for name, options in INPUTS.items():
        yield f"one-{name}", 1, options
        yield f"dp2-stage2-{name}", 2, ("zero.stage=2", *options)
        yield f"tp2-sequence-{name}", 2, (*tp2, *SEQUENCE, *options)
        yield f"pp2-{name}", 2, (*pp2, *options)
    for name, options in OFFLOAD.items():
        yield f"dp2-stage3-offload-{name}", 2, ("zero.stage=3", *options)
    for name, options in QUANTIZED.items():
        for stage in (1, 2, 3):
            if stage == 3 or "parameters" not in options[0]:
                yield f"dp2-stage{stage}-{name}", 2, (f"zero.stage={stage}", *options)
    for name, options in HYBRID.items():
        for stage in (1, 3):
            if stage == 3 or name == "hybrid":
                yield f"dp4-stage{stage}-{name}", 4, (f"zero.stage={stage}", *options)
    for name, options in DISKS.items():
        yield f"dp2-stage3-nvme-{name}", 2, ("zero.stage=3", HOST, *options)
    for name, flavour in (("one", ()), ("dp2-stage2", ("zero.stage=2",))):
        yield f"{name}-stages", 1 if name == "one" else 2, (*flavour, f"stages={json.dumps(PARTS)}")
    for name, options in LIBRARY.items():
        yield f"library-{name}", 2, (json.dumps(options),)


def record(tree: Path, folder: Path) -> None:
    """Train in every layout with the code in a tree, and write the numbers to a folder."""
    folder.mkdir(parents=True)
    make_data(folder)
    found = list(layouts())
    for number, (name, ranks, options) in enumerate(found, 1):
        print(f"{number} of {len(found)}: {name}", flush=True)
        train = trained_library if name.startswith("library-") else trained_run
        (folder / f"{name}.json").write_text(json.dumps(train(tree, folder, ranks, options), sort_keys=True, indent=1))


def trained_run(tree: Path, folder: Path, ranks: int, options: Sequence[str]) -> dict[str, Any]:
    """Train with `train.py` of a tree; return the run's numbers."""
    run, disk = folder / "run", folder / "disk"
    places = [f"run.dir={run}", f"data.train={folder / 'tokens'}"]
    places += [f"zero.offload.path={disk}"] if HOST in options else []
    command = ["train.py", "--nproc", str(ranks), "--config", str(folder / "config.yaml"), *places, *options]
    output(tree, *command)
    found = numbers(run)
    for place in (run, disk):
        shutil.rmtree(place, ignore_errors=True)
    return found


def trained_library(tree: Path, folder: Path, ranks: int, options: Sequence[str]) -> dict[str, Any]:
    """Train a module with `megazero.shard` of a tree; return its numbers."""
    return json.loads(output(tree, str(Path(__file__).with_name("library_numbers.py")), str(ranks), *options))


def output(tree: Path, *command: str) -> str:
    """Run a Python program with the code in a tree; return its output."""
    environment = ["env", f"PYTHONPATH={tree}", "OMP_NUM_THREADS=1", sys.executable]
    done = subprocess.run([*environment, *command], cwd=tree, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}: exit code {done.returncode}: {done.stderr[-2000:]}")
    return done.stdout


def make_data(folder: Path) -> None:
    """Write the config, and tokens in documents of random length."""
    draw = torch.Generator().manual_seed(0)
    with IndexedDatasetWriter(folder / "tokens", np.uint16) as writer:
        for _ in range(60):
            length = int(torch.randint(5, 90, (), generator=draw))
            writer.append(torch.randint(0, VOCAB, (length,), generator=draw).numpy())
            writer.end_document()
    (folder / "config.yaml").write_text(CONFIG)


def numbers(run: Path) -> dict[str, Any]:
    """Return the numbers in a run's folder, except timings."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    ledger = json.loads((run / "ledger.json").read_text())
    rows = [{key: value for key, value in row.items() if key not in TIMING_KEYS} for row in rows]
    for rank in ledger:
        rank["traffic"].get("world", {}).pop("agree", None)  # the texts sent there contain times
    counted = [{"traffic": rank["traffic"], "bytes": rank["bytes"]} for rank in ledger]
    return {"rows": rows, "ranks": counted}


def compare(one: Path, other: Path) -> int:
    """Print every number that differs; return the number of layouts with differences."""
    different = 0
    names = [name for name, *_ in layouts()]
    for name in names:
        before, after = (_flat(json.loads((folder / f"{name}.json").read_text())) for folder in (one, other))
        odd = [key for key in before.keys() | after.keys() if before.get(key) != after.get(key)]
        different += bool(odd)
        for key in sorted(odd):
            print(f"{name}: {key}: {before.get(key)} -> {after.get(key)}")
    print(f"{len(names) - different} of {len(names)} layouts are equal to the last digit")
    return different


def _flat(value: Any, key: str = "") -> dict[str, Any]:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else None
    if items is None:
        return {key: value}
    return {k: v for name, part in items for k, v in _flat(part, f"{key}.{name}" if key else str(name)).items()}


def main(arguments: Sequence[str]) -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("record", "compare"))
    parser.add_argument("first", type=Path)
    parser.add_argument("second", type=Path)
    options = parser.parse_args(arguments)
    if options.what == "record":
        record(options.first.resolve(), options.second.resolve())
        return 0
    return 1 if compare(options.first, options.second) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
