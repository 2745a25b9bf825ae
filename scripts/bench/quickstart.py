"""Compare settings of the quickstart: which model, vocabulary and optimizer learn most in the same seconds of training.

    python scripts/bench/quickstart.py [--seconds 300] [--only PATTERN...] [--launches 1] [--folder DIR] [--json]
                                       [--save]

Every setting is trained as `make quickstart` trains (two local ranks of one thread, ZeRO stage 2, fp32) on the same
corpus, for as many steps as fit into the seconds: a run of 12 steps tells how many. Each setting names what it changes
of `BASE`. Held out are the same documents for all (their numbers decide, and the corpus is one); the figure is bits per
byte of all of their text, so that vocabularies can be compared. What DIR has of an earlier run is not measured again:
name a new one when the code has changed.

Columns: pieces of the vocabulary, parameters in millions, tokens of a step, steps, passes through the corpus, tokens
per second, seconds of the steps alone, and bits per byte at the end, the least of the launches.
"""

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # so that it runs from any folder, uninstalled too

import xxhash

from data_tools import preprocess, train_tokenizer
from megazero.base.atomic import write_atomically
from megazero.base.files import new_folder
from scripts import quickstart_data
from scripts.bench import figures
from scripts.bench.figures import ROOT

SECONDS, TRIED, WARMING = 300.0, 12, 4  # of training; steps that tell how long one takes, and of them not counted
RANKS = 2
HARDWARE = ("--hardware", "a100-80gb")  # which the number of parameters does not depend on
LLAMA = {"model.norm": "rmsnorm", "model.activation": "swiglu", "model.position": "rotary"}
BASE: Mapping[str, Any] = {
    "model.layers": 2,
    "model.hidden": 256,
    "model.heads": 4,
    "model.vocab": 4096,
    "model.seq_len": 256,
    "batch.global": 8,
    "optimizer.lr": 3e-3,
    "schedule.decay": "linear",
} | LLAMA
OLD = {"model.norm": "layernorm", "model.activation": "gelu", "model.position": "learned"}
SETTINGS: Mapping[str, Mapping[str, Any]] = {
    "before": {"model.layers": 6, "model.hidden": 320, "model.vocab": 8192, "optimizer.lr": 2e-3} | OLD,
    "base": {},
    "1 layer": {"model.layers": 1},
    "4 layers": {"model.layers": 4},
    "4 layers, 2,048 pieces": {"model.layers": 4, "model.vocab": 2048},
    "4 layers, hidden 192": {"model.layers": 4, "model.hidden": 192},
    "3 layers, hidden 192": {"model.layers": 3, "model.hidden": 192},
    "hidden 192": {"model.hidden": 192},
    "hidden 128": {"model.hidden": 128},
    "gpt parts": OLD,
    "2,048 pieces": {"model.vocab": 2048},
    "batch 4": {"batch.global": 4},
    "batch 16": {"batch.global": 16},
    "batch 4, sequence 512": {"batch.global": 4, "model.seq_len": 512},
    "rate 2e-3": {"optimizer.lr": 2e-3},
    "beta2 0.98": {"optimizer.betas": [0.9, 0.98]},
    "hidden 192, 2,048 pieces": {"model.hidden": 192, "model.vocab": 2048},
    "the same, beta2 0.98": {"model.hidden": 192, "model.vocab": 2048, "optimizer.betas": [0.9, 0.98]},
    "hidden 128, 2,048 pieces": {"model.hidden": 128, "model.vocab": 2048},
    "hidden 128, 4 layers": {"model.hidden": 128, "model.layers": 4},
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=SECONDS, help="of training (default: %(default)s)")
    parser.add_argument("--only", nargs="+", default=["*"], help="settings, by shell patterns")
    parser.add_argument("--launches", type=int, default=1, help="of every setting, with other seeds (default: 1)")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of a table")
    parser.add_argument("--save", action="store_true", help="keep what is measured in docs/figures, for its table")
    parser.add_argument("--folder", type=Path, help="keep data and what is measured there (default: nowhere)")
    options = parser.parse_args()
    if options.folder is not None:
        options.folder.mkdir(parents=True, exist_ok=True)
        return figures.tell(reports(options, options.folder.resolve()), as_json=options.json, save=options.save)
    with tempfile.TemporaryDirectory(prefix="bench-quickstart-") as folder:
        return figures.tell(reports(options, Path(folder)), as_json=options.json, save=options.save)


def reports(options: argparse.Namespace, folder: Path) -> Iterator[figures.Report]:
    """Yield the one report, the best setting first; each setting is said on standard error when it is through."""
    rows = []
    for name in (name for name in SETTINGS if any(fnmatchcase(name, pattern) for pattern in options.only)):
        setting = {**BASE, **SETTINGS[name]}
        found = [measured(setting, options.seconds, folder, seed=seed) for seed in range(1, options.launches + 1)]
        columns = min(found, key=lambda one: one["bits/byte"])
        print(f"{name}: {columns['bits/byte']:.3f} bits per byte", file=sys.stderr, flush=True)
        rows.append({"system": name, "columns": columns})
    rows.sort(key=lambda row: row["columns"]["bits/byte"])
    yield figures.report_of(f"{options.seconds:.0f} s of training", rows, launches=options.launches)


def measured(setting: Mapping[str, Any], seconds: float, folder: Path, *, seed: int) -> dict[str, float]:
    """Return the row of a setting: the one that is kept in the folder, or that of a training."""
    key = json.dumps([setting, seconds, seed], sort_keys=True)
    kept = folder / f"{xxhash.xxh3_64_hexdigest(key.encode())}.json"
    if not kept.exists():
        write_atomically(kept, json.dumps(trained(setting, seconds, folder, seed=seed)).encode())
    return json.loads(kept.read_text())


def trained(setting: Mapping[str, Any], seconds: float, folder: Path, *, seed: int) -> dict[str, float]:
    """Train a setting for so many seconds; return its row.

    Args:
        folder: of the data of all settings, and of the runs.
    """
    data = data_of(setting["model.vocab"], folder)
    tried = run(setting, TRIED, data, folder / "tried", seed)
    step = sum(row["step_time"] for row in tried[WARMING:]) / (TRIED - WARMING)
    steps = max(TRIED, round(seconds / step))
    rows = run(setting, steps, data, folder / "run", seed)
    spent, last = sum(row["step_time"] for row in rows), rows[-1]
    return {
        "vocabulary": float(setting["model.vocab"]),
        "parameters, M": parameters(setting, data) / 1e6,
        "tokens/step": last["tokens"] / steps,
        "steps": float(steps),
        "passes": last["epoch"],
        "tokens/s": last["tokens"] / spent,
        "s": spent,
        "bits/byte": last["valid_bits_per_byte"],
    }


def data_of(vocab: int, folder: Path) -> Path:
    """Return the folder with tokenizer.model and train.{bin,idx} of a vocabulary, made where it is not there yet."""
    corpus, where = folder / "corpus.jsonl", folder / f"pieces_{vocab}"
    if not corpus.exists():
        write_atomically(corpus, quickstart_data.as_lines(quickstart_data.documents()))
    if not where.exists():
        with new_folder(where) as new:
            words, model = ["--input", str(corpus), "--output"], str(new / "tokenizer.model")
            quietly(train_tokenizer.__file__, *words, model, "--vocab", str(vocab))
            quietly(preprocess.__file__, *words, str(new / "train"), "--tokenizer", model)
    return where


def run(setting: Mapping[str, Any], steps: int, data: Path, folder: Path, seed: int) -> list[dict[str, float]]:
    """Train so many steps in a folder, which is made anew; return the rows of metrics, one a step."""
    shutil.rmtree(folder, ignore_errors=True)
    words = [*words_of(setting, data, folder, seed), f"run.steps={steps}", f"schedule.warmup={max(1, steps // 15)}"]
    quietly("train.py", "--config", "tiny.yaml", "--nproc", str(RANKS), *words)
    return [json.loads(row) for row in (folder / "metrics.jsonl").read_text().splitlines()]


def words_of(setting: Mapping[str, Any], data: Path, folder: Path, seed: int) -> list[str]:
    """Return the overrides of configs/tiny.yaml that a setting is."""
    batch = setting["batch.global"]
    whole = {
        **setting,
        "batch.micro": batch // RANKS,
        "schedule.min_lr": setting["optimizer.lr"] / 50,
        "zero.stage": 2,
        "run.dir": folder,
        "run.seed": seed,
        "data.train": data / "train",
        "data.tokenizer": data / "tokenizer.model",
        "data.valid_every": "null",
        "data.valid_samples": "null",
        "observe.every": 1,
    }
    return [f"{key}={json.dumps(value) if isinstance(value, list) else value}" for key, value in whole.items()]


def parameters(setting: Mapping[str, Any], data: Path) -> int:
    """Return how many parameters a setting's model has, as `plan` counts them."""
    words = words_of(setting, data, Path("unused"), 1)
    done = quietly("-m", "megazero", "plan", "--config", "tiny.yaml", "--gpus", str(RANKS), *HARDWARE, "--json", *words)
    return json.loads(done)["parameters"]


def quietly(*words: str) -> str:
    """Run Python on some words from the root of the project; return what it printed.

    Raises:
        RuntimeError: it failed; with what it said.
    """
    done = subprocess.run([sys.executable, *words], cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(done.stderr or done.stdout)
    return done.stdout


if __name__ == "__main__":
    sys.exit(main())
