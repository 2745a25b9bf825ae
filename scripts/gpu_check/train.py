"""Run train.py itself: a GPT of 1.3B parameters, and a smaller one that saves, resumes and repeats its bits.

    whole     1.3B parameters, 10 steps, the run's own choice of kernels and attention, and a save at the end
    straight  4 layers of the same width, data.mask_eod, run.deterministic: 10 steps
    begun     the same for 5 steps; its losses and norms must equal those of `straight`, bit for bit
    resumed   the folder of `begun`, continued to step 10; the saved weights and moments must be equal too

A checkpoint has 12 bytes per parameter: 16 GB for the whole model, 3.7 GB for four layers. So the whole model is saved
once and not loaded. The first three runs run at the same time.
"""

import json
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from hashlib import sha256
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from scripts.gpu_check import carry, commands
from scripts.gpu_check.findings import Asked, Row

STEPS, HALF, LIMIT_S = 10, 5, 100
THREADS = {"cuda": 4, "cpu": 1}  # per run; other parts of the check run at the same time
OPTIONS = (
    "optimizer.lr=3e-4",
    "schedule.warmup=0",
    "schedule.decay=constant",
    "observe.every=1",
    "precision.dtype=bf16",
)
SIZES = {"hidden": 2048, "heads": 16, "vocab": 50_304, "seq_len": 2048}
TINY = {"hidden": 64, "heads": 4, "vocab": 512, "seq_len": 64}
SAID = re.compile(r"(kernels|attention|weight gradients): .*")
Rows = list[dict[str, Any]]


def rows(asked: Asked) -> Iterator[Row]:
    """Yield a row for each run."""
    with TemporaryDirectory(prefix="megazero-train-") as name:
        folder = Path(name)
        made = carry.CARRIED if (carry.CARRIED / "train.idx").exists() else folder
        data = carry.tokens(made)
        same = ["run.deterministic=true", "data.mask_eod=true"]
        jobs = {
            "whole": (24, [f"run.steps={STEPS}"]),
            "straight": (4, [*same, f"run.steps={STEPS}"]),
            "begun": (4, [*same, f"run.steps={HALF}"]),
        }
        with ThreadPoolExecutor() as pool:
            futures = {name: pool.submit(_run, folder / name, data, asked, *job) for name, job in jobs.items()}
            faults = {name: future.result() for name, future in futures.items()}
        yield whole(folder / "whole", faults["whole"])
        straight = metrics(folder / "straight")
        yield {"name": "straight", "steps": len(straight), "fault": faults["straight"] or None}
        yield same_bits("begun", metrics(folder / "begun"), straight[:HALF], faults["begun"])
        more = [*same, f"run.steps={STEPS}", "checkpoint.resume=auto"]
        fault = _run(folder / "begun", data, asked, 4, more)
        yield same_bits("resumed", metrics(folder / "begun"), straight, fault)
        yield same_files(folder / "straight", folder / "begun")


def _run(folder: Path, data: Path, asked: Asked, layers: int, options: list[str]) -> str:
    """Run train.py; return "", or the fault."""
    sizes = (TINY if asked.tiny else SIZES) | {"layers": 2 if asked.tiny else layers}
    options = [f"run.dir={folder}", f"data.train={data}", "data.valid=null", "data.tokenizer=null", *OPTIONS, *options]
    options += ["batch.micro=4", *(f"model.{name}={value}" for name, value in sizes.items())]
    log = folder.with_name(f"{folder.name}-{options[-1]}.log")
    words = ["train.py", "--config", "tiny", *options, "--nproc", 1]
    return commands.python(words, log, LIMIT_S, asked.device, OMP_NUM_THREADS=str(THREADS[asked.device.type]))


def metrics(folder: Path) -> Rows:
    """Return the rows of a run's training steps."""
    path = folder / "metrics.jsonl"
    found = [json.loads(text) for text in path.read_text().splitlines()] if path.exists() else []
    return [row for row in found if "grad_norm" in row]


def whole(folder: Path, fault: str) -> Row:
    """Return the row of the large run: its speed in the last step, its choices, and whether the loss falls."""
    steps = metrics(folder)
    if "out of memory" in fault:
        return {"name": "whole", "absent": fault}
    if fault or len(steps) < STEPS:
        return {"name": "whole", "fault": fault or f"{len(steps)} rows instead of {STEPS}"}
    first, last = steps[0], steps[-1]
    row: Row = {"name": "whole", "loss_first": first["loss"], "loss_last": last["loss"]}
    row |= {name: last[name] for name in ("step_time", "tokens_per_second", "mfu", "memory_peak_bytes")}
    log = folder / "logs" / "rank_00.log"
    row["chose"] = "; ".join(dict.fromkeys(found[0] for found in SAID.finditer(log.read_text())))
    return row | {"fault": None if last["loss"] < first["loss"] else "the loss does not fall"}


def same_bits(name: str, found: Rows, expected: Rows, fault: str) -> Row:
    """Return a row that says whether losses and gradient norms are equal bit for bit."""
    numbers = [[(row["step"], row["loss"], row["grad_norm"]) for row in each] for each in (found, expected)]
    if not fault and (not expected or numbers[0] != numbers[1]):
        pairs = zip(*numbers, strict=False)
        at = next((one[0] for one, other in pairs if one != other), "none: other numbers of rows")
        fault = f"not equal bit for bit; the first other step: {at}"
    return {"name": name, "steps": len(found), "fault": fault or None}


def same_files(*runs: Path) -> Row:
    """Return a row that says whether the saved tensors of two runs are equal bit for bit."""
    names = [sorted(path.glob(f"checkpoints/step_{STEPS:08}/*.safetensors")) for path in runs]
    digests = [[sha256(path.read_bytes()).hexdigest() for path in each] for each in names]
    size = sum(path.stat().st_size for path in names[0])
    fault = None if digests[0] and digests[0] == digests[1] else "the saved tensors differ"
    return {"name": "saved weights and moments", "files": len(digests[0]), "gb": size / 1e9, "fault": fault}
